"""Tensors in shared memory (torch.multiprocessing), which each rollout copies: a host's bound.

The user has to say when there is a new version, and when all have read it.
"""

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import peers

torch.multiprocessing.set_sharing_strategy("file_system")  # no limit on descriptors


class Trainer(peers.Trainer):
    def card(self) -> bytes:
        held = {
            fqn: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for fqn, tensor in self.tensors.items()
        }
        for tensor in held.values():
            tensor.share_memory_()
        return bytes(ForkingPickler.dumps(held))


class Rollout(peers.Rollout):
    def meet(self, cards: Sequence[bytes]) -> None:
        self._sources = [ForkingPickler.loads(card) for card in cards]

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        for rank, sources in enumerate(self._sources):
            for fqn, tensor in sources.items():
                rows = len(tensor)
                self.tensors[fqn][rank * rows : (rank + 1) * rows].copy_(tensor)


PEER = peers.Peer(
    name="shared tensors, copied by hand",
    package="torch",
    trainer=Trainer,
    rollout=Rollout,
    lends=True,
    cases=("one", "four", "resharded"),  # by two lines of the user's
)
