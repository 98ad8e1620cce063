"""The report's pictures. Also by itself, from a results.json: python benchmarks/plots.py FILE."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import fanout
import matplotlib as mpl
import one_to_one
import resharding
import steady
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import PICTURES
from style import BLUE, OURS, STYLE, THEIRS

COLOURS = (OURS, "#dd8452", BLUE)

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows, directory: Path) -> None:
    """Writes the pictures of those parts that were measured."""
    pictures = {
        one_to_one.PART: _one_to_one,
        resharding.PART: _resharding,
        fanout.PART: _fanout,
        steady.PART: _steady,
    }
    with mpl.rc_context(STYLE):
        for part, picture in pictures.items():
            if shown := [row for row in rows if row["part"] == part]:
                figure = picture(shown)
                file = directory / PICTURES[part]
                figure.savefig(file, metadata={"Date": None}, facecolor="white")


def _one_to_one(rows: Rows) -> Figure:
    whats = list(dict.fromkeys(row["what"] for row in rows))
    counts = list(dict.fromkeys(row["params"]["tensors"] for row in rows))
    figure, axes = _figure(7.5, 4.2)
    height = 0.8 / len(counts)
    for number, count in enumerate(counts):
        found = {r["what"]: r["median"] for r in rows if r["params"]["tensors"] == count}
        at = [place + (number - (len(counts) - 1) / 2) * height for place in range(len(whats))]
        label = f"{count:,} tensor{'s' if count > 1 else ''}"
        axes.barh(at, [found[w] for w in whats], height, label=label, color=COLOURS[number])
    _name_bars(axes, whats)
    axes.set_xlabel(f"GB/s, {rows[0]['params']['MiB']:,} MiB")
    axes.legend()
    return figure


def _resharding(rows: Rows) -> Figure:
    figure, axes = _figure(7.5, 2.6)
    colours = [OURS if row["ratios"] else THEIRS for row in rows]
    bars = axes.barh(range(len(rows)), [row["median"] for row in rows], color=colours)
    of_same = (f"{r:.2f}" for row in rows for r in row["ratios"].values() or [1.0])
    axes.bar_label(bars, list(of_same), padding=3)
    _name_bars(axes, [row["what"] for row in rows])
    axes.set_xlabel(f"GB/s, {rows[0]['params']['MiB']:,} MiB; number: of the same layout (grey)")
    return figure


def _fanout(rows: Rows) -> Figure:
    whats = (fanout.LAST, fanout.FROM_TRAINER, fanout.CPU)
    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    for axes, what in zip(figure.subplots(1, len(whats)), whats, strict=True):
        for way, colour in zip(fanout.WAYS.values(), (OURS, THEIRS), strict=True):
            line = [row for row in rows if row["what"] == f"{what}, {way}"]
            counts = [row["params"]["readers"] for row in line]
            axes.plot(counts, [r["median"] for r in line], "o-", label=way, color=colour)
        axes.set_title(f"{what}, {line[0]['unit']}", fontsize=9)
        axes.set_xlabel("readers at once")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _steady(rows: Rows) -> Figure:
    calls = [row for row in rows if row["unit"] == "ms"]
    figure, axes = _figure(7.5, 2.8)
    for row, colour in zip(calls, COLOURS, strict=True):
        ordered = sorted(row["samples"])
        share = [100 * (number + 1) / len(ordered) for number in range(len(ordered))]
        label = f"{row['what']}, p50 {median(ordered):.3g} ms"
        axes.step(ordered, share, where="post", label=label, color=colour)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("% of calls that took no longer")
    axes.legend(loc="lower right")
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


if __name__ == "__main__":
    given = Path(sys.argv[1])
    draw(json.loads(given.read_text())["rows"], given.parent)
