"""What the benchmark found, as rows for programs and as tables for people."""

import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from torch_ros.store import local

Row = dict[str, Any]
Sample = Mapping[str, float]  # of one round: elapsed_s, and whatever else was seen


def machine_row(endpoint: str) -> Row:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "kind": "machine",
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "nixl": importlib.metadata.version("nixl"),
        "etcd": _etcd_version(endpoint),
    }


def _etcd_version(endpoint: str) -> str:
    where = endpoint.removeprefix("etcd://").split(",")[0]
    host = local.ensure() if endpoint == "local" else where
    with urlopen(f"http://{host}/version", timeout=5.0) as answer:
        return json.load(answer)["etcdserver"]


def transfer_row(
    name: str, size_bytes: int, samples: Sequence[Sample], bases: Mapping[str, Sequence[float]]
) -> Row:
    """The speed of one case, and its ratios to others, round by round.

    Args:
        bases: GB/s of each round, of what to compare with.
    """
    found = speeds(size_bytes, samples)
    ratios = {
        f"of_{base}": median(one / other for one, other in zip(found, others, strict=True))
        for base, others in bases.items()
    }
    row = {
        "kind": "transfer",
        "case": name,
        "bytes": size_bytes,
        "gb_per_s": median(found),
        "gb_per_s_min": min(found),
        "gb_per_s_max": max(found),
        **ratios,
    }
    if "read_s" in samples[0]:
        row["read_share"] = median(sample["read_s"] / sample["elapsed_s"] for sample in samples)
    row["rounds"] = list(samples)
    return row


def speeds(size_bytes: int, samples: Sequence[Sample]) -> list[float]:
    return [size_bytes / sample["elapsed_s"] / 1e9 for sample in samples]


def call_row(name: str, timed_s: Sequence[float]) -> Row:
    ordered = sorted(timed_s)
    return {
        "kind": "call",
        "call": name,
        "count": len(ordered),
        "p50_s": median(ordered),
        "p99_s": ordered[math.ceil(0.99 * len(ordered)) - 1],
    }


def tables(rows: Sequence[Row]) -> Iterator[str]:
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("transfer", "call")}
    machine = rows[0]
    yield (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, load "
        f"{machine['load_before']:.1f} before; Python {machine['python']}, torch "
        f"{machine['torch']}, NIXL {machine['nixl']}, etcd {machine['etcd']}"
    )
    yield ""
    heads = ("GB/s", "min", "max", "of NIXL", "of DCP", "reading", "MiB")
    yield f"{'payload, median over the rounds':40}" + "".join(f"{head:>9}" for head in heads)
    for row in by_kind["transfer"]:
        share = f"{row['read_share']:9.0%}" if "read_share" in row else " " * 9
        yield (
            f"{row['case']:40}{row['gb_per_s']:9.2f}{row['gb_per_s_min']:9.2f}"
            f"{row['gb_per_s_max']:9.2f}{row['of_nixl']:8.2f}x{row['of_dcp']:8.2f}x{share}"
            f"{row['bytes'] / 2**20:9.0f}"
        )
    yield ""
    yield f"{'call, slowest rank':40}" + "".join(f"{h:>9}" for h in ("p50 ms", "p99 ms", "calls"))
    for row in by_kind["call"]:
        yield (
            f"{row['call']:40}{1e3 * row['p50_s']:9.1f}{1e3 * row['p99_s']:9.1f}{row['count']:9}"
        )
