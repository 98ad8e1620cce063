"""Mooncake's transfer engine over TCP: registered memory, read in one batch."""

from collections.abc import Sequence
from typing import Any

from mooncake.engine import TransferEngine

import peers

HOST = "127.0.0.1"


def engine(tensors: peers.Tensors) -> TransferEngine:
    """Return one in which the tensors are registered."""
    made = TransferEngine()
    assert made.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    for tensor in tensors.values():
        assert made.register_memory(tensor.data_ptr(), tensor.nbytes) == 0
    return made


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._engine = engine(tensors)

    def card(self) -> tuple[str, list[int]]:
        addresses = [tensor.data_ptr() for tensor in self.tensors.values()]
        return f"{HOST}:{self._engine.get_rpc_port()}", addresses


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._engine = engine(tensors)
        self._into = [tensor.data_ptr() for tensor in tensors.values()]
        self._sizes = [tensor.nbytes for tensor in tensors.values()]

    def meet(self, cards: Sequence[Any]) -> None:
        [(self._peer, self._sources)] = cards

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        read = self._engine.batch_transfer_sync_read
        assert read(self._peer, self._into, self._sources, self._sizes) == 0


PEER = peers.Peer(
    name="Mooncake's transfer engine, TCP",
    package="mooncake-transfer-engine-non-cuda",
    trainer=Trainer,
    rollout=Rollout,
    lends=True,
)
