"""The findings of a run: rows for programs, a page for people, and whether it is good enough.

python benchmarks/report.py    writes the page of docs/benchmarks anew, from its results.json
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def from_json(text: str) -> tuple[dict[str, Any], Report]:
    """The rows that `as_json` has written, so that the page can be written anew."""
    found, report = json.loads(text), Report()
    for row in found["rows"]:
        has_tail = "p99" in row
        for name in ("median", "p50", "p99"):
            row.pop(name, None)
        report.add(Row(**row, has_tail=has_tail))
    for target in found["targets"]:
        bound = "at_least" if "at_least" in target else "at_most"
        report.expect(
            target["what"], target["measured"], unit=target["unit"], **{bound: target[bound]}
        )
    return found["header"], report


# For people


PICTURES = {  # by the part that they show
    "One to one, same layout": "one-to-one.svg",
    "Resharding": "resharding.svg",
    "One source, many readers": "fanout.svg",
    "Steady state": "steady.svg",
}
TABLES = {"One to one, same layout"}  # which the README takes from


def page(header: Mapping[str, Any], report: Report) -> str:
    """Markdown."""
    lines = [
        "# Measured",
        "",
        "<!-- Written by `make bench`; not to be edited. -->",
        "",
        _setting(header),
        "",
        "Medians of one run on one host. The cases of a part take turns, and a ratio is the median",
        "of the rounds' ratios. GB/s count the payload, once. [results.json](results.json) has all",
        "samples and ratios, also of the parts that have no table here.",
        "",
        "## Targets",
        "",
        *target_table(report.targets),
    ]
    for part, rows in by_part(report.rows).items():
        if part in PICTURES:
            lines += ["", f"## {part}", "", f"![{part}]({PICTURES[part]})"]
        if part in TABLES:
            lines += ["", *table(rows)]
    return "\n".join(lines) + "\n"


def by_part(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        part: [r for r in rows if r.part == part] for part in dict.fromkeys(r.part for r in rows)
    }


def _setting(header: Mapping[str, Any]) -> str:
    return (
        f"{header['date']}, {header['cores']} cores of {header['cpu']}, "
        f"{header['memory_gib']} GiB, Linux {header['kernel']}, load {header['load_before']} "
        f"before;\nPython {header['python']}, torch {header['torch']}, NIXL {header['nixl']}, "
        f"etcd {header['etcd']}, torch_ros {header['torch_ros']}; `{header['command']}`."
    )


def target_table(targets: Sequence[Target]) -> Iterator[str]:
    """Those of the same thing in one line: "1 tensor; 100 tensors: stream, memory"."""
    yield "| | target | measured | |"
    yield "| --- | ---: | ---: | --- |"
    alike: dict[str, list[Target]] = {}
    for target in targets:
        alike.setdefault(target.what.rpartition(": ")[2], []).append(target)
    for what, each in alike.items():
        cases = "; ".join(one.what.removesuffix(what).removesuffix(": ") for one in each)
        measured = ", ".join(_with_unit(target.measured, target.unit) for target in each)
        yield _line(
            f"{cases}: {what}" if cases else what,
            [_each(map(_bound, each)), measured, _each(map(_verdict, each))],
        )


def _each(told: Iterable[str]) -> str:
    """Once, if it is always the same."""
    each = list(told)
    return each[0] if len(set(each)) == 1 else ", ".join(each)


def _bound(target: Target) -> str:
    return f"{'≥' if target.is_minimum else '≤'}{target.wanted:.3g}{_suffix(target.unit)}"


def _verdict(target: Target) -> str:
    return "met" if target.is_met else "**not met**"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of one part: one for each quantity, a column for each case."""
    varying = _varying(rows)
    if same := _params(rows[0], [name for name in rows[0].params if name not in varying]):
        yield f"All with {same}:\n"
    has_columns = len({row.what for row in rows}) < len(rows)
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        case = _params(row, varying)
        aside = f" ({case})" if case and not has_columns else ""
        line = lines.setdefault(f"{row.what}{aside}, {row.unit}", {})
        line[case if has_columns else ""] = row
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    yield _line("", columns)
    yield "| --- |" + " ---: |" * len(columns)
    for name, line in lines.items():
        yield _line(
            name, [_digits(line[column].median) if column in line else "" for column in columns]
        )


def _varying(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.params)
    return [name for name in names if len({str(row.params.get(name)) for row in rows}) > 1]


def _params(row: Row, names: Sequence[str]) -> str:
    given = {name: row.params[name] for name in names if name in row.params}
    return ", ".join(
        f"{name} {value}" if isinstance(value, str) else _counted(value, name)
        for name, value in given.items()
    )


def _counted(value: int, name: str) -> str:
    return f"{value:,} {name.removesuffix('s') if value == 1 else name}"


def _line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


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


def main(directory: Path) -> None:
    """Write the page anew."""
    header, report = from_json((directory / "results.json").read_text())
    (directory / "README.md").write_text(page(header, report))


if __name__ == "__main__":
    main(Path(__file__).parents[1] / "docs" / "benchmarks")
