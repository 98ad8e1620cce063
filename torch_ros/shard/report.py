"""A read's report: the time of each stage, and the figures at its end."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The figures of one replicate, update, read or dcp.load on this rank."""

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
