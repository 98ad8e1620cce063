"""torch.distributed: a broadcast of each tensor, in which all take part."""

from collections.abc import Sequence
from typing import Any

import tensors as contents
import torch.distributed as dist

import peers


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        contents.join(place.directory, "all", 0, 1 + place.rollouts)

    def publish(self, version: int) -> None:  # noqa: ARG002
        for tensor in self.tensors.values():
            dist.broadcast(tensor, 0)


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        contents.join(place.directory, "all", 1 + rank, 1 + place.rollouts)

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        for tensor in self.tensors.values():
            dist.broadcast(tensor, 0)


PEER = peers.Peer(
    name="gloo, broadcast",
    package="torch",
    trainer=Trainer,
    rollout=Rollout,
    lends=False,
    together=True,
)
