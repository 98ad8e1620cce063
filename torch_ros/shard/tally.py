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

    def __init__(self, whose: Whose) -> None:
        self.whose = whose
        # By its kind, how often it ended how: "reads" by the way of most of their bytes, and
        # "reads_via" by what was read; "failures" of reads by the error's class. And their bytes.
        self.ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.sums: defaultdict[str, float] = defaultdict(float)  # of features' figures
        self.read_s: defaultdict[str, Histogram] = defaultdict(Histogram)  # by stage
        self.publish_s: Histogram = Histogram()
        self.drain_s: Histogram = Histogram()
        self.reroutes: int = 0
        self.corrupt: int = 0
        self.left_behind: int = 0
        self.seats_lost: int = 0  # of a handle that is closed

    def failed(self, error: TorchRosError) -> None:
        """A read has failed. An outcome is one of the classes in `torch_ros.errors`."""
        self.ended["failures"][type(error).__name__] += 1

    def add(self, report: Report) -> None:
        """A call has ended well."""
        match report:
            case ReadReport(ways=ways):
                self.ended["reads"][max(ways, key=ways.__getitem__, default="none")] += 1
                self.ended["read_bytes"].update(ways)
                via = "prefetched" if report.prefetched else report.via
                self.ended["reads_via"][via] += 1
                self.ended["read_via_bytes"][via] += report.bytes_read
                for stage, seconds in report.stages_s.items():
                    self.read_s[stage].add(seconds)
                self.read_s[WHOLE].add(report.elapsed_s)
            case PublishReport():
                self.publish_s.add(report.elapsed_s)
            case DrainReport():
                self.drain_s.add(report.elapsed_s)
                self.left_behind += len(report.left_behind)

    def merge(self, other: "Tally") -> None:
        """Add another one's counts, which may go on counting: `dict` copies in one step."""
        for kind, ended in dict(other.ended).items():
            self.ended[kind].update(dict(ended))
        for name, value in dict(other.sums).items():
            self.sums[name] += value
        for stage, times in dict(other.read_s).items():
            self.read_s[stage].merge(times)
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
