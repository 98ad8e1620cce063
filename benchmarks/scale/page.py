"""The page docs/scale/README.md, from rows of results.json: nobody edits it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import acceptance
import figures

Row = Mapping[str, Any]

ABOUT = """# At scale

`make scale` has written this page: nobody edits it. Everything behind `torch_ros.open` runs as it
is, among up to 10,000 replicas; clocks, etcd and the network are [modelled](#the-model), so times
are those of the model. "x" is of the time in which one NIC carries the version.
"""

SLOW = """\
Slow ones have a tenth of the rate: in a first version nobody knows which they are, in the next one
they pass nothing on. `results.json` has all figures.
"""

HEADS = """\
Eight of many heads send, each to a chain of its own: a newcomer looks at the eight oldest. More
would not be sooner, since etcd lets 15 newcomers decide in a millisecond.
"""

WORKS = """## The model

- `benchmarks/scale/cluster.py` runs the processes on the scheduler of the simulated tests, without
  its dice: who can move moves, in order, and then time passes.
- etcd is one queue. A request takes half a millisecond each way, up or down by half, and of etcd's
  time 1/20,000 s for a write and 1/60,000 s for a read or a renewed lease. Another datacenter is
  40 ms away.
- `benchmarks/scale/network.py` shares NICs (25 GB/s each way, 50 GB for each rank) and links
  between datacenters max-min fairly. Relays pass on steps of 4 MiB.
- Readers miss a process that has died 0.1 s later, etcd when its lease has ended.

The model leaves out connecting, kernels' and processors' time, congestion, loss, other traffic,
busy GPUs, and digests. It flatters: 1.06 and 1.12 are the same, 4 and 1.1 are not.
"""


def rows_in(directory: Path) -> list[Row]:
    """All rows that are there; those of ten thousand replicas last."""
    paths = sorted(directory.glob("results*.json"), key=lambda path: len(path.name))
    return [row for path in paths for row in json.loads(path.read_text())]


def write(rows: Sequence[Row], directory: Path) -> None:
    figures.draw(rows, directory)
    (directory / "README.md").write_text("\n".join([*_page(rows)]).rstrip("\n") + "\n")


def _page(rows: Sequence[Row]) -> Iterator[str]:
    yield ABOUT
    yield "## Aims\n"
    yield from _table(("aim", "at most", "found", ""), acceptance.lines(rows))
    yield from (f"- Missed, {why}" for why in acceptance.causes(rows))
    yield ""
    yield SLOW
    yield "## Bursts\n"
    yield "![When the last one is done, by the number of replicas](last-done.svg)\n"
    yield "![How long each of 1,000 waits](stalls.svg)\n"
    yield from _without_constants(BURST_HEAD, [_burst_line(row) for row in _rows(rows, "burst")])
    yield "Commits, lost races, reads and KiB of keys and values of etcd are those of a newcomer.\n"
    yield HEADS
    yield ("![What etcd is asked](requests.svg)\n")
    yield "## The figures of the TensorHub paper\n"
    yield "![Figures 7b, 11 and 12](paper.svg)\n"
    twelve = [row["figures"] for row in _rows(rows, "figure_12")]
    if twelve:
        stall, crossings = (fmean(f[name] for f in twelve) for name in ("stall_s", "crossings"))
        yield from _table(
            ("12: two datacenters", "total stall s", "crossings"),
            (
                ("paper, UCX", "62.4", "4"),
                ("paper, smart skipping", "7.7", "1"),
                ("this release", f"{stall:.1f}", f"{crossings:.2f}"),
                *_updates(rows),
            ),
        )
    yield WORKS


def _updates(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for row in _rows(rows, "updates_12"):
        key = row["params"]["seeding"], row["params"].get("etcd", "")
        found.setdefault(key, []).append(row["figures"])
    for (seeding, etcd), each in found.items():
        how = {"foreground": "... that skip", "host": '... `seeding="host"`'}[seeding]
        where = "etcd beside them" if etcd else "etcd 40 ms away"
        stall, crossings = (fmean(f[name] for f in each) for name in ("stall_s", "crossings"))
        yield f"{how}, polling every 5 s, {where}", f"{stall:.1f}", f"{crossings:.2f}"


BURST_HEAD = (
    "N", "heads", "over s", "last x", "p99 x", "median x", "heads sent x", "readers of one, most",
    "until it reads, ms: median, most", "commits", "lost", "reads", "KiB",
)  # fmt: skip


def _burst_line(row: Row) -> tuple[str, ...]:
    params, found = row["params"], row["figures"]
    over_s = params.get("over_s", 0.0)
    [last] = _of(row, "last_x")  # counted from the first one's arrival
    attached = ", ".join(f"{each:g}" for each in found["attached_ms"])
    return (
        *(_n(row), str(params.get("heads", 1)), f"{over_s:g}" if over_s else "at once"),
        *("-" if over_s else last, *_of(row, "p99_x", "median_x", "heads_sent_x", "readers_max")),
        attached,
        *_of(row, "commits", "lost", "reads", "KiB"),
    )


def _without_constants(head: Sequence[str], lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A table; columns that have the same in all lines are told above it."""
    columns = list(zip(*lines, strict=True))
    same = [at for at, column in enumerate(columns) if len(set(column)) == 1 and len(lines) > 1]
    left = [at for at in range(len(head)) if at not in same]
    if same:
        told = "; ".join(f"{head[at]} {columns[at][0]}" for at in same)
        yield f"The same in all lines: {told}.\n"
    yield from _table([head[at] for at in left], ([line[at] for at in left] for line in lines))


def _rows(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _n(row: Row) -> str:
    return f"{row['params']['n']:,}"


def _of(row: Row, *names: str) -> tuple[str, ...]:
    return tuple(f"{row['figures'][name]:g}" for name in names)


def _table(head: Sequence[str], lines: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| --- {'| ---: ' * (len(head) - 1)}|"
    for line in lines:
        yield f"| {' | '.join(line)} |"
    yield ""
