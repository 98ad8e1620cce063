"""The time that a call waits for its report to be told, with a journal and without.

Calls are far apart, as those of a job are: the thread that writes has done before the next one.

    python benchmarks/journals.py --calls 2000
"""

import argparse
import os
import statistics
import tempfile
import time

import torch

import torch_ros
from torch_ros import environment
from torch_ros.shard import journal
from torch_ros.shard.report import ReadReport, Reports

STAGES = ("decide", "manifests", "plan", "read", "digest", "commit")
REPORT = ReadReport(
    version=42,
    source="trainer, roll-0",
    reroutes=0,
    bytes_total=15 << 30,
    bytes_read=15 << 30,
    elapsed_s=2.0,
    stages_s=dict.fromkeys(STAGES, 0.3),
    ways={"cma": 10 << 30, "mapped": 5 << 30},
)


def microseconds(reports: Reports, calls: int) -> list[float]:
    """What the caller waits in each call."""
    found = []
    for _ in range(calls):
        began_ns = time.perf_counter_ns()
        reports.add(REPORT)
        found.append((time.perf_counter_ns() - began_ns) / 1e3)
        journal.flush()
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = {}
        for name, to in (("without", ""), ("with a journal", folder)):
            os.environ[environment.TRACE] = to
            handle = torch_ros.open("bench", endpoint="memory://here", replica=name.split()[-1])
            handle.register({"w": torch.zeros(4)})
            reports[name] = handle._shard.reports  # noqa: SLF001  # as its calls do
        medians = {}
        for name, its in reports.items():
            microseconds(its, given.calls // 10)
            took = microseconds(its, given.calls)
            medians[name] = statistics.median(took)
            print(
                f"{name}: {medians[name]:.2f} us a call, 99 of 100 below "
                f"{took[len(took) * 99 // 100]:.2f} us; {len(its.listeners)} listeners"
            )
        print(f"a journal costs {medians['with a journal'] - medians['without']:.2f} us a call")


if __name__ == "__main__":
    main()
