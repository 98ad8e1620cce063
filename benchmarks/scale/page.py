"""The page docs/scale/README.md, from rows of results.json: nobody edits it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import acceptance

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
    import figures  # noqa: PLC0415 - a second, and most runs draw nothing

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
    yield "![What etcd is asked](requests.svg)\n"
    yield HEADS
    yield "## The figures of the TensorHub paper\n"
    yield "![Figures 7b, 11 and 12](paper.svg)\n"
    yield WORKS


def _table(head: Sequence[str], lines: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| --- {'| ---: ' * (len(head) - 1)}|"
    for line in lines:
        yield f"| {' | '.join(line)} |"
    yield ""
