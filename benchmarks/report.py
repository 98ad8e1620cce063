"""What was found: rows for programs, a page for people, and whether it is good enough."""

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.request import urlopen

import torch_ros
from torch_ros.local import etcd as local

Unit = Literal["GB/s", "ms", "s", "s/GiB", "MiB", "times", "%"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity."""

    part: str
    what: str
    unit: Unit
    samples: Sequence[float]
    params: Mapping[str, Any] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)  # to what, by its name
    has_tail: bool = False  # the 99th percentile says something

    @property
    def median(self) -> float:
        return median(self.samples)

    def as_json(self) -> dict[str, Any]:
        tail = {"p50": self.median, "p99": percentile(self.samples, 0.99)} if self.has_tail else {}
        return {
            "part": self.part,
            "what": self.what,
            "params": self.params,
            "unit": self.unit,
            "median": self.median,
            **tail,
            "ratios": self.ratios,
            "samples": [float(f"{sample:.6g}") for sample in self.samples],
        }


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    wanted: float
    measured: float
    is_minimum: bool
    unit: str

    @property
    def is_met(self) -> bool:
        return self.measured >= self.wanted if self.is_minimum else self.measured <= self.wanted


class Report:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.targets: list[Target] = []

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def expect(
        self,
        what: str,
        measured: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "x",
    ) -> None:
        """One of the two bounds is given."""
        wanted = at_most if at_least is None else at_least
        assert wanted is not None
        self.targets.append(Target(what, wanted, measured, at_least is not None, unit))


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest that at least this share of them does not exceed."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def speeds(size_bytes: int, elapsed_s: Sequence[float]) -> list[float]:
    """GB/s of the payload, which counts once."""
    return [size_bytes / one_s / 1e9 for one_s in elapsed_s]


def ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """Round by round, so that what disturbs a round disturbs both."""
    return median(one / other for one, other in zip(samples, others, strict=True))


def machine(endpoint: str) -> dict[str, Any]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch_ros": f"{torch_ros.__version__} ({_commit()})",
        "torch": importlib.metadata.version("torch"),
        "nixl": importlib.metadata.version("nixl"),
        "etcd": _etcd_version(endpoint),
    }


def _commit() -> str:
    """Of this directory; "+" if it has changes."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not of a clone"


def _etcd_version(endpoint: str) -> str:
    where = endpoint.removeprefix("etcd://").split(",")[0]
    host = local.ensure() if endpoint == "local" else where
    with urlopen(f"http://{host}/version", timeout=5.0) as answer:
        return json.load(answer)["etcdserver"]


def as_json(header: Mapping[str, Any], report: Report) -> str:
    """An object; each row has a line of its own."""
    targets = [
        {
            "what": target.what,
            "at_least" if target.is_minimum else "at_most": target.wanted,
            "measured": target.measured,
            "unit": target.unit,
            "is_met": target.is_met,
        }
        for target in report.targets
    ]

    def lines(values: Sequence[object]) -> str:
        return ",\n".join(json.dumps(value) for value in values)

    rows = lines([row.as_json() for row in report.rows])
    return (
        f'{{"header": {json.dumps(header)},\n"rows": [\n{rows}],\n'
        f'"targets": [\n{lines(targets)}]}}\n'
    )


# For people


def page(header: Mapping[str, Any], report: Report, plots: Mapping[str, str]) -> str:
    """Markdown.

    Args:
        plots: File names, by the part that they show.
    """
    lines = [
        "# Measured",
        "",
        "<!-- Written by `make bench`; not to be edited. -->",
        "",
        _setting(header),
        "",
        "All of it is from one run between processes on one host, in which the cases of a part",
        "take turns, round by round. Figures are medians over the rounds; ratios are medians of",
        "the rounds' ratios. GB/s count the payload, once. [results.json](results.json) has all",
        "samples.",
        "",
        "## Targets",
        "",
        *target_table(report.targets),
    ]
    parts = list(dict.fromkeys(row.part for row in report.rows))
    for part in parts:
        lines += ["", f"## {part}", ""]
        if part in plots:
            lines += [f"![{part}]({plots[part]})", ""]
        lines += table([row for row in report.rows if row.part == part])
    return "\n".join(lines) + "\n"


def _setting(header: Mapping[str, Any]) -> str:
    return (
        f"{header['date']}, {header['cores']} cores of {header['cpu']}, "
        f"{header['memory_gib']} GiB, Linux {header['kernel']}, load {header['load_before']} "
        f"before;\nPython {header['python']}, torch {header['torch']}, NIXL {header['nixl']}, "
        f"etcd {header['etcd']}, torch_ros {header['torch_ros']}; `{header['command']}`."
    )


def target_table(targets: Sequence[Target]) -> Iterator[str]:
    yield "| | target | measured | |"
    yield "| --- | ---: | ---: | --- |"
    for target in targets:
        sign = "≥" if target.is_minimum else "≤"
        wanted = f"{target.wanted:.3g}{_suffix(target.unit)}"
        measured = _with_unit(target.measured, target.unit)
        verdict = "met" if target.is_met else "**not met**"
        yield f"| {target.what} | {sign} {wanted} | {measured} | {verdict} |"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Of one part, whose rows have the same parameters or lack some."""
    names = list(dict.fromkeys(name for row in rows for name in row.params))
    has_tail = any(row.has_tail for row in rows)
    has_ratios = any(row.ratios for row in rows)
    heads = ["", *names, "median", "min - max", *["p99"] * has_tail, *["ratios"] * has_ratios]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- " + "| ---: " * (len(heads) - 1 - has_ratios) + "| --- " * has_ratios + "|"
    for row in rows:
        cells = [row.what, *(str(row.params.get(name, "")) for name in names)]
        cells += [_with_unit(row.median, row.unit)]
        cells += [f"{_digits(min(row.samples))} - {_digits(max(row.samples))}"]
        if has_tail:
            cells += [_with_unit(percentile(row.samples, 0.99), row.unit) if row.has_tail else ""]
        if has_ratios:
            cells += [", ".join(f"{_digits(value)} {to}" for to, value in row.ratios.items())]
        yield "| " + " | ".join(cells) + " |"


def _with_unit(value: float, unit: str) -> str:
    return f"{_digits(value)}{_suffix(unit)}"


def _suffix(unit: str) -> str:
    return unit if unit in {"x", "%"} else f" {unit}"


def _digits(value: float) -> str:
    """Three of them."""
    if not value:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 3)}f}"
