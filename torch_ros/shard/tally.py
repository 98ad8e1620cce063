"""Counts of what this process's handles have done, for collectors: a few integers for each call.

Each tally has one thread that counts, so that nobody waits; a scrape adds tallies up. What a
closed handle has counted stays.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch_ros.errors import TorchRosError

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
ENDED_MAX = 256  # names of closed handles whose counts are kept


class Whose(NamedTuple):
    """The labels of a handle's figures."""

    model: str
    replica: str
    rank: str


class Histogram:
    """Durations, by the first of `BOUNDS_S` that is not below them; the last count has no bound."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts, self.sum_s = [0] * (len(BOUNDS_S) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def merge(self, other: "Histogram") -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s


class Tally:
    """The counts of one handle, or of one stream. One thread at a time counts."""

    def __init__(self, whose: Whose) -> None:
        self.whose = whose
        self.failures = Counter[str]()  # reads that failed, by the error's class
        self.reroutes = self.corrupt = 0
        self.seats_lost = 0  # of a handle that is closed

    def failed(self, error: TorchRosError) -> None:
        """A read has failed. An outcome is one of the classes in `torch_ros.errors`."""
        self.failures[type(error).__name__] += 1

    def merge(self, other: "Tally") -> None:
        self.failures += other.failures.copy()
        self.reroutes += other.reroutes
        self.corrupt += other.corrupt
        self.seats_lost += other.seats_lost


class Tallies:
    """All tallies of this process."""

    def __init__(self) -> None:
        self._counting: set[Tally] = set()
        self._ended: dict[Whose, Tally] = {}
        self._lock = threading.Lock()  # of beginnings, ends and scrapes; not of counts

    def begin(self, whose: Whose) -> Tally:
        """One more, to count in until `end`."""
        tally = Tally(whose)
        with self._lock:
            self._counting.add(tally)
        return tally

    def end(self, tally: Tally) -> None:
        """Nobody counts in it any more."""
        with self._lock:
            if tally in self._counting:
                self._counting.remove(tally)
                _add(self._ended, (tally,))
                while len(self._ended) > ENDED_MAX:
                    del self._ended[next(iter(self._ended))]

    def all(self) -> dict[Whose, Tally]:
        """The sums of those with the same labels."""
        found: dict[Whose, Tally] = {}
        with self._lock:
            _add(found, self._ended.values())
            _add(found, self._counting)
        return found


def _add(sums: dict[Whose, Tally], tallies: Iterable[Tally]) -> None:
    for tally in tallies:
        sums.setdefault(tally.whose, Tally(tally.whose)).merge(tally)


tallies = Tallies()
