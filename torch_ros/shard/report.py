"""Reports of what this process did: the time of each stage, and the figures at its end."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch_ros.deadline import wall_ms
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.records import VersionRef

log: logging.Logger = log_of(__name__)

REPORTS_KEPT = 64  # some 500 bytes each


class Via(NamedTuple):
    """The last figures of a `ReadReport`: what was read, if that was not all bytes."""

    via: Literal["full", "delta"] = "full"
    base: int | None = None
    links: int = 0
    changed: int = 0
    prefetched: bool = False


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The figures of one replicate, update, read or dcp.load on this rank."""

    version: int
    source: str
    """The replicas read from, separated by commas; of the last ones, if some were lost. Or the URL
    from which it came."""
    reroutes: int  # how often a source was lost
    bytes_total: int  # of this rank's tensors
    bytes_read: int  # over the wire: more where whole rows were read for a part of them
    elapsed_s: float  # of the whole call
    stages_s: Mapping[str, float]  # decide, manifests, plan, read, commit
    ways: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the way that they came, together `bytes_read`. "memory": within this process. On one
    host "mapped": out of shared memory; "cma": copied by the kernel. "ucx": NIXL, as UCX chose;
    "ucx tcp eth0,eth1": NIXL over TCP, on these devices. "bucket": from there."""
    call: int = 0  # number of the group's call
    began_ms: int = 0  # milliseconds since 1970, by this host's clock
    uid: str = ""  # of the content: the same number published again is another one
    via: Literal["full", "delta"] = "full"  # all bytes, or the changes from `base` on
    base: int | None = None  # the version held before, if its changes were read
    links: int = 0  # deltas that were applied one after the other
    changed: int = 0  # elements that they had, in this rank's part
    prefetched: bool = False  # `prefetch` had brought them before; `bytes_read` counts them
    turns: Mapping[str, int] = field(default_factory=dict)
    """How often it began again, by reason: "lost seat", "lost source", "lost race", "wait" for a
    seat. The log says so each time, at DEBUG."""

    def line(self, model: str) -> str:
        """One line for the log."""
        stages = ", ".join(f"{stage} {1e3 * s:.1f} ms" for stage, s in self.stages_s.items())
        return (
            f"version {self.version} of {model!r} from {self.source!r}: "
            f"{self.bytes_total / 1e6:.1f} MB in {1e3 * self.elapsed_s:.1f} ms, "
            f"{self._how}, {self.reroutes} re-routed ({stages})"
        )

    @property
    def _how(self) -> str:
        if self.via == "delta":
            kind = "prefetched deltas" if self.prefetched else "deltas"
            return (
                f"by {self.links} {kind} from version {self.base}: {self.changed} elements in "
                f"{self.bytes_read / 1e6:.1f} MB"
            )
        reading_s = max(self.stages_s["read"], 1e-9)
        return f"{self.bytes_total / reading_s / 1e9:.2f} GB/s while reading"


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The figures of one publish, or `publish_copy`, on this rank."""

    version: int
    bytes_total: int  # of this rank's tensors
    is_offered: bool  # else it was not waited for, and is offered when etcd is back
    elapsed_s: float  # of the whole call
    stages_s: Mapping[str, float]  # decide, tensors (copied and registered), digest, commit
    call: int  # number of the group's call
    began_ms: int  # milliseconds since 1970, by this host's clock
    uid: str = ""  # of the content: the same number published again is another one
    turns: Mapping[str, int] = field(default_factory=dict)  # as in a ReadReport


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The figures of one unpublish on this rank, also as a part of another call.

    Only the rank that decides the call looks at readers; on the others none are named.
    """

    version: int
    waited_for: tuple[str, ...]  # replicas that still read it
    left_behind: tuple[str, ...]  # those that still did after `drain_s`
    is_copied: bool  # a copy in host memory was made first
    elapsed_s: float  # of the whole call
    call: int  # number of the group's call
    began_ms: int  # milliseconds since 1970, by this host's clock
    uid: str = ""  # of the content: the same number published again is another one
    turns: Mapping[str, int] = field(default_factory=dict)  # as in a ReadReport


Report = ReadReport | PublishReport | DrainReport


class Reports:
    """The last reports of a handle. One thread adds at a time; any may ask."""

    def __init__(self) -> None:
        self._last = deque[Report](maxlen=REPORTS_KEPT)
        self.last_read: ReadReport | None = None
        self.listeners: list[Callable[[Report], object]] = []
        """Called with each report, within the call that it is about."""

    def add(self, report: Report) -> None:
        self._last.append(report)
        if isinstance(report, ReadReport):
            self.last_read = report
        for listener in self.listeners:
            try:
                listener(report)
            except Exception:
                log.exception("a listener failed; the call goes on")

    def last(self) -> tuple[Report, ...]:
        """The last ones, the oldest first."""
        return tuple(self._last)


@dataclass(slots=True)
class Stopwatch:
    began_ms: int = field(default_factory=wall_ms)
    started_s: float = field(default_factory=time.perf_counter)
    stages_s: dict[str, float] = field(default_factory=dict)
    _last_s: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        now_s = time.perf_counter()
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def drain_report(self, held: VersionRef, call: GroupCall) -> DrainReport:
        return DrainReport(
            held.version,
            tuple(sorted(call.waited_for)),
            tuple(sorted(call.left_behind)),
            bool(call.decided.copy),
            self.elapsed_s,
            call.number,
            self.began_ms,
            held.uid,
            call.turns,
        )
