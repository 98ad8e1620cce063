"""Counts of what this process's handles have done, for collectors: a few integers for each call.

Each tally has one thread that counts, so that nobody waits; a scrape adds tallies up. Counts of
a closed handle stay.
"""

import re
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torch_ros.errors import TorchRosError
from torch_ros.shard.report import DrainReport, PublishReport, ReadReport, Report

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
UNIQUE = re.compile(r"-\d+-[0-9a-f]{6}$")  # the end of a name that nobody chose
WHOLE = "all"  # the stage that stands for the whole call
ENDED_MAX = 256  # names of closed handles whose counts are kept


class Whose(NamedTuple):
    """The labels of a handle's figures."""

    model: str
    replica: str
    rank: str


def without_pid(replica: str) -> str:
    """The host of a name that nobody chose; any other as it is."""
    return UNIQUE.sub("", replica)


class Histogram:
    """Durations, by the first of `BOUNDS_S` that is not below them; the last count has no bound."""

    counts: list[int]
    sum_s: float

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

    publish_s: Histogram
    drain_s: Histogram
    reroutes: int
    corrupt: int
    left_behind: int

    def __init__(self, whose: Whose) -> None:
        self.whose = whose
        self.failures: Counter[str] = Counter[str]()  # reads that failed, by the error's class
        self.reads: Counter[str] = Counter[
            str
        ]()  # that ended well, by the way of most of their bytes
        self.read_bytes: Counter[str] = Counter[str]()  # by way
        self.reads_via: Counter[str] = Counter[str]()  # that ended well, by what was read
        self.read_via_bytes: Counter[str] = Counter[str]()
        self.read_s: dict[str, Histogram] = {}  # by stage
        self.publish_s, self.drain_s = Histogram(), Histogram()
        # What features have done, by its kind: how often it ended how; and sums of figures.
        self.ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.reroutes = self.corrupt = self.left_behind = 0
        self.seats_lost: int = 0  # of a handle that is closed

    def failed(self, error: TorchRosError) -> None:
        """A read has failed. An outcome is one of the classes in `torch_ros.errors`."""
        self.failures[type(error).__name__] += 1

    def add(self, report: Report) -> None:
        """A call has ended well."""
        match report:
            case ReadReport(ways=ways):
                self.reads[max(ways, key=ways.__getitem__, default="none")] += 1
                for way, size_bytes in ways.items():
                    self.read_bytes[way] += size_bytes
                via = "prefetched" if report.prefetched else report.via
                self.reads_via[via] += 1
                self.read_via_bytes[via] += report.bytes_read
                for stage, seconds in report.stages_s.items():
                    self._stage(stage).add(seconds)
                self._stage(WHOLE).add(report.elapsed_s)
            case PublishReport():
                self.publish_s.add(report.elapsed_s)
            case DrainReport():
                self.drain_s.add(report.elapsed_s)
                self.left_behind += len(report.left_behind)

    def _stage(self, stage: str) -> Histogram:
        if stage not in self.read_s:
            self.read_s[stage] = Histogram()
        return self.read_s[stage]

    def merge(self, other: "Tally") -> None:
        """Add another one's counts, which may go on counting: `dict` copies in one step."""
        for mine, its in (
            (self.failures, other.failures),
            (self.reads, other.reads),
            (self.read_bytes, other.read_bytes),
            (self.reads_via, other.reads_via),
            (self.read_via_bytes, other.read_via_bytes),
            *((self.ended[kind], ended) for kind, ended in dict(other.ended).items()),
        ):
            mine.update(dict(its))
        for stage, times in dict(other.read_s).items():
            self._stage(stage).merge(times)
        for name, value in dict(other.sums).items():
            self.sums[name] += value
        self.publish_s.merge(other.publish_s)
        self.drain_s.merge(other.drain_s)
        self.left_behind += other.left_behind
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


tallies: Tallies = Tallies()
