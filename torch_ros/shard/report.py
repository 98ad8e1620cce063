"""A read's report: bytes as they come, the time of each stage, and the figures at its end."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tqdm import tqdm  # type: ignore[import-untyped]  # its stubs are another package

from torch_ros import environment

log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], object]
"""Called with the bytes that have arrived, and the bytes that the read takes."""

BAR_AFTER_S = 1.0  # a shorter read needs no bar


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The figures of one replicate, update or dcp.load on this rank."""

    version: int
    source: str  # the replicas read from, separated by commas; of the last ones, if some were lost
    reroutes: int  # how often a source was lost
    bytes_total: int  # of this rank's tensors
    bytes_read: int  # over the wire: more where whole rows were read for a part of them
    elapsed_s: float  # of the whole call
    stages_s: Mapping[str, float]  # decide, manifests, plan, read, commit

    def line(self, model: str) -> str:
        """One line for the log."""
        stages = ", ".join(f"{stage} {1e3 * s:.1f} ms" for stage, s in self.stages_s.items())
        reading_gb_per_s = self.bytes_total / max(self.stages_s["read"], 1e-9) / 1e9
        return (
            f"version {self.version} of {model!r} from {self.source!r}: "
            f"{self.bytes_total / 1e6:.1f} MB in {1e3 * self.elapsed_s:.1f} ms, "
            f"{reading_gb_per_s:.2f} GB/s while reading, {self.reroutes} re-routed ({stages})"
        )


@dataclass(slots=True)
class Stopwatch:
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


class Meter:
    """Counts the bytes of one read for `on_progress`; None: for a bar on the terminal.

    with Meter("version 7", on_progress, rank) as meter:
        meter.expect(bytes_total)
        meter.add(size_bytes)  # for each batch

    The bar needs a terminal and a read of more than a second; the first rank of each host draws.
    """

    def __init__(self, what: str, on_progress: OnProgress | None, rank: int) -> None:
        self._on_progress, self._done, self._total = on_progress, 0, 0
        is_first = os.environ.get("LOCAL_RANK", str(rank)) == "0"
        is_wanted = is_first and environment.value(environment.PROGRESS) != "0"
        is_drawn = is_wanted and on_progress is None and sys.stderr.isatty()
        self._bar = tqdm(
            desc=what, unit="B", unit_scale=True, delay=BAR_AFTER_S, disable=not is_drawn
        )

    def expect(self, bytes_total: int) -> None:
        """Set the bytes that the read takes, those that have arrived included."""
        self._total = self._bar.total = bytes_total

    def add(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        self._done += size_bytes
        self._bar.update(size_bytes)
        if self._on_progress is not None:
            try:
                self._on_progress(self._done, self._total)
            except Exception:  # the replica needs its weights more than its display
                log.exception("on_progress failed; it is not called again in this read")
                self._on_progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
