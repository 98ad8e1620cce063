"""torchft's PGTransport over gloo: a state dict is sent, and received in place."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo

import peers

LIMIT = timedelta(seconds=60)


def joined(place: peers.Place, rank: int, tensors: peers.Tensors) -> PGTransport:
    group = ProcessGroupGloo(timeout=LIMIT)
    group.configure(f"127.0.0.1:{place.port}/group", place.name, rank, 1 + place.rollouts)
    return PGTransport(group, LIMIT, torch.device("cpu"), lambda: dict(tensors))


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._store = TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)
        self._transport = joined(place, 0, tensors)

    def publish(self, version: int) -> None:
        everyone = [1 + number for number in range(self.place.rollouts)]
        self._transport.send_checkpoint(everyone, version, dict(self.tensors), LIMIT)


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._transport = joined(place, 1 + rank, tensors)

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        self._transport.recv_checkpoint(0, "", version, LIMIT)


PEER = peers.Peer(
    name="torchft, process group",
    package="torchft",
    trainer=Trainer,
    rollout=Rollout,
    lends=False,
    together=True,
)
