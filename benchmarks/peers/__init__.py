"""Peers, which move weights between processes in other ways: a file for each, run by beside.py.

A peer's file defines `PEER`, as its own documents would have it used, and can be deleted. It
imports its package at the top: where that is not installed, the run says so, and goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import harness
import torch

Tensors = Mapping[str, torch.Tensor]
Builds = Mapping[str, Callable[[], harness.Actors]]
EVERYWHERE = ("one", "four")  # the cases of a peer that leaves resharding to its user


@dataclass(frozen=True, slots=True)
class Place:
    """Where one turn is: a directory in memory, a name and a port, that no other turn has."""

    directory: str
    name: str
    port: int
    size_bytes: int
    trainers: int
    rollouts: int


class Trainer:
    """Rank `rank` of the trainer; ranks of all ends are made at the same time, as is `Rollout`."""

    def __init__(self, place: Place, rank: int, tensors: Tensors) -> None:
        self.place, self.rank, self.tensors = place, rank, tensors

    def card(self) -> Any:
        """An object that rollouts are given once, before anything moves."""

    def publish(self, version: int) -> Any:
        """Return a ticket, which the program brings to each rollout."""

    def release(self) -> None:
        """Return once the tensors may be written to; all rollouts have received."""

    def forget(self) -> None:
        """Give up what is kept of the version. Nobody times this."""

    def close(self) -> None:
        pass


class Rollout:
    def __init__(self, place: Place, rank: int, tensors: Tensors) -> None:
        self.place, self.rank, self.tensors = place, rank, tensors

    def meet(self, cards: Sequence[Any]) -> None:
        """Take the card of each rank of the trainer."""

    def receive(self, version: int, tickets: Sequence[Any]) -> None:
        """Return when the version is in the rollout's own tensors."""

    def forget(self) -> None:
        """Make ready for the next version. Nobody times this."""

    def close(self) -> None:
        pass


@contextmanager
def children(_: Place, builds: Builds) -> Iterator[list[harness.Child]]:
    with harness.started(builds) as started:
        yield started


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    package: str  # whose version is named
    trainer: type[Trainer]
    rollout: type[Rollout]
    lends: bool  # the trainer's own memory is read: it may write once the readers are done
    together: bool = False  # `publish` and `receive` wait for each other
    cases: Sequence[str] = EVERYWHERE
    services: Callable[[Place], AbstractContextManager[Any]] = nullcontext
    started: Callable[[Place, Builds], AbstractContextManager[Sequence[Any]]] = children


def copy(tensors: Tensors, into: Tensors) -> None:
    for fqn, tensor in tensors.items():
        into[fqn].copy_(tensor)
