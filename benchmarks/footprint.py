"""What an open handle takes of the machine besides its tensors."""

import time
from functools import partial
from pathlib import Path

import tensors as contents
import torch
from harness import Actors, Setup, ask_all, say, started
from ours import settle, status_bytes
from report import Report, Row

import torch_ros
from torch_ros.face.choose import TransportName

PART = "Memory and CPU of a handle"
TRANSPORTS: tuple[TransportName, ...] = ("auto", "ucx-tcp")
ROLES = ("trainer", "rollout")
LARGE_COUNT, SMALL_COUNT, SMALL_BYTES = 100, 1000, 4096
STAGING_BYTES = 4 << 20  # the default of torch_ros.open
READS = 5
IDLE_S = 2.0
IDLE_PERCENT_MAX = 2.0

OPEN, PEAK, AFTER, IDLE = (
    "open: RSS",
    "register and move 5 versions: peak RSS",
    "... PSS afterwards",
    "CPU of one that nobody reads from",
)


class End:
    """One of the two, alone in its process, whose memory grows by what the handle needs."""

    def __init__(self, setup: Setup, role: str, transport: TransportName) -> None:
        self._setup, self._role, self._transport = setup, role, transport
        small = {
            f"small{i:04d}": torch.zeros(SMALL_BYTES // 2, dtype=torch.bfloat16)
            for i in range(SMALL_COUNT)
        }
        self._tensors = contents.plain(setup.size_bytes, LARGE_COUNT) | small
        contents.write(self._tensors, 0)  # so that all of their pages are there
        contents.verify(self._tensors, 0)  # and those of the code that only this benchmark runs
        self._rss_bytes = self._pss_bytes = 0

    def open(self) -> float:
        """MiB it has grown by."""
        before = status_bytes("VmRSS")
        model = f"{self._setup.name}-memory-{self._transport}"
        self._handle = torch_ros.open(
            model, endpoint=self._setup.endpoint, replica=self._role, transport=self._transport
        )
        return (status_bytes("VmRSS") - before) / 2**20

    def register(self) -> None:
        """Memory counts from here on."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        self._rss_bytes, self._pss_bytes = (
            status_bytes("VmRSS"),
            status_bytes("Pss", "smaps_rollup"),
        )
        self._handle.register(self._tensors)

    def publish(self, version: int) -> None:
        self._handle.unpublish()
        contents.write(self._tensors, version)
        self._handle.publish(version)

    def replicate(self, version: int) -> None:
        self._handle.unpublish()
        self._handle.replicate(version)
        contents.verify(self._tensors, version)

    def grown(self) -> tuple[float, float]:
        """MiB since `register`: of the peak, and now, of its share of what is shared."""
        peak = status_bytes("VmHWM") - self._rss_bytes
        return peak / 2**20, (status_bytes("Pss", "smaps_rollup") - self._pss_bytes) / 2**20

    def idle(self) -> float:
        """Percent of a core that the process takes while it is told nothing."""
        settle(self._handle)
        began_s, used_s = time.perf_counter(), time.process_time()
        time.sleep(IDLE_S)
        return 100 * (time.process_time() - used_s) / (time.perf_counter() - began_s)

    def close(self) -> None:
        self._handle.close()


def end(setup: Setup, role: str, transport: TransportName) -> Actors:
    return {"end": End(setup, role, transport)}


def measure(setup: Setup, report: Report) -> None:
    for transport in TRANSPORTS:
        builds = {role: partial(end, setup, role, transport) for role in ROLES}
        with started(builds) as ends:
            trainer, rollout = ends
            opened = ask_all(ends, "end", "open")
            ask_all(ends, "end", "register")
            for version in range(1, READS + 1):
                trainer.ask("end", "publish", version)
                rollout.ask("end", "replicate", version)
            grown = ask_all(ends, "end", "grown")
            idle = [ask_all(ends, "end", "idle") for _ in range(setup.repeat)]
        say(f"  {transport}")
        for role, opened_mib, (peak_mib, after_mib), shares in zip(
            ROLES, opened, grown, zip(*idle, strict=True), strict=True
        ):
            params = {
                "MiB": setup.size_mib,
                "tensors": LARGE_COUNT + SMALL_COUNT,
                "transport": transport,
                "at": role,
            }
            for what, unit, samples in (
                (OPEN, "MiB", [opened_mib]),
                (PEAK, "MiB", [peak_mib]),
                (AFTER, "MiB", [after_mib]),
                (IDLE, "%", shares),
            ):
                row = Row(part=PART, what=what, params=params, unit=unit, samples=samples)
                report.add(row)
            _expect(report, f"{role}, {transport}", peak_mib, row.median)


def _expect(report: Report, who: str, peak_mib: float, idle_percent: float) -> None:
    allowed_mib = (SMALL_COUNT * SMALL_BYTES + STAGING_BYTES) / 2**20
    what = f"{who}: memory beyond the tensors, small ones packed and staging"
    report.expect(what, peak_mib, at_most=allowed_mib, unit="MiB")
    what = f"{who}: idle, of a core"
    report.expect(what, idle_percent, at_most=IDLE_PERCENT_MAX, unit="%")
