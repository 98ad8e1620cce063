"""NIXL by hand: a descriptor for each tensor, and a read that is prepared once."""

from collections.abc import Sequence
from typing import Any

from others import RawReader, RawSource

import peers


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._source = RawSource("source", tensors)

    def card(self) -> Any:
        return self._source.offer()

    def publish(self, version: int) -> None:  # noqa: ARG002
        self._source.begin()

    def release(self) -> None:
        self._source.end()

    def close(self) -> None:
        self._source.close()


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._reader = RawReader(f"reader {rank}", tensors)

    def meet(self, cards: Sequence[Any]) -> None:
        [card] = cards
        self._reader.connect(*card)

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        self._reader.read()

    def close(self) -> None:
        self._reader.close()


PEER = peers.Peer(name="NIXL by hand", package="nixl", trainer=Trainer, rollout=Rollout, lends=True)
