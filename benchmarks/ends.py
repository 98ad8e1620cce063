"""The ends of an exchange, as actors for processes: a rank of a peer's trainer, and a rollout."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

import peers
import placed
import tensors as contents
from harness import Actors, seconds


def load(file: str) -> peers.Peer:
    return importlib.import_module(f"peers.{file}").PEER


def trainer(file: str, place: peers.Place, rank: int) -> Actors:
    if place.trainers == 1:
        tensors = placed.whole(place.size_bytes)
    else:
        mesh = contents.join(place.directory, "trainers", rank, place.trainers)
        tensors = placed.by_rows(place.size_bytes, mesh)
    placed.write(tensors, 0, rank)  # so that all of their pages are there
    return {"end": TrainerEnd(load(file).trainer(place, rank, tensors))}


def rollout(file: str, place: peers.Place, rank: int) -> Actors:
    tensors = placed.whole(place.size_bytes)
    placed.write(tensors, 0)
    return {"end": RolloutEnd(load(file).rollout(place, rank, tensors))}


class TrainerEnd:
    """Times are of a clock that all processes of the host share."""

    def __init__(self, peer: peers.Trainer) -> None:
        self._peer = peer

    def card(self) -> tuple[Any, int]:
        return self._peer.card(), placed.size_bytes(self._peer.tensors)

    def write(self, version: int) -> None:
        placed.write(self._peer.tensors, version, self._peer.rank)

    def publish(self, version: int) -> tuple[Any, float, float]:
        """Return the ticket, and when the call began and ended."""
        began_s = time.perf_counter()
        ticket = self._peer.publish(version)
        return ticket, began_s, time.perf_counter()

    def release(self) -> tuple[float, float]:
        """Return how long it took, and when it ended."""
        return seconds(self._peer.release), time.perf_counter()

    def forget(self) -> None:
        self._peer.forget()

    def close(self) -> None:
        self._peer.close()


class RolloutEnd:
    def __init__(self, peer: peers.Rollout) -> None:
        self._peer = peer

    def meet(self, cards: Sequence[Any]) -> int:
        self._peer.meet(cards)
        return placed.size_bytes(self._peer.tensors)

    def receive(self, version: int, tickets: Sequence[Any]) -> float:
        """Return when the version was there."""
        self._peer.receive(version, tickets)
        return time.perf_counter()

    def verify(self, version: int) -> None:
        placed.verify(self._peer.tensors, version)

    def forget(self) -> None:
        self._peer.forget()

    def close(self) -> None:
        self._peer.close()
