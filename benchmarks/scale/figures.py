"""The pictures of docs/scale, drawn from rows of results.json."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))

from style import BLUE, OURS, STYLE, THEIRS

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], directory: Path) -> None:
    pictures = {
        "last-done.svg": _last_done,
        "stalls.svg": _stalls,
        "requests.svg": _requests,
        "paper.svg": _paper,
    }
    with mpl.rc_context(STYLE):
        for name, picture in pictures.items():
            figure = picture(rows)
            figure.savefig(directory / name, metadata={"Date": None}, facecolor="white")


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _bursts(rows: Sequence[Row]) -> list[Row]:
    """Bursts of one head, all at once, by their size."""
    plain = [row for row in _of(rows, "burst") if set(row["params"]) == {"n"}]
    return sorted(plain, key=lambda row: row["params"]["n"])


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _last_done(rows: Sequence[Row]) -> Figure:
    figure, axes = _figure(6.5, 2.8)
    for what, figure_of, label, colour in (
        ("burst", "last_x", "burst", OURS),
        ("stragglers", "healthy_p99_x", "1 % slow: healthy ones, p99", BLUE),
        ("deaths", "last_x", "2 % die", THEIRS),
    ):
        some = _bursts(rows) if what == "burst" else _of(rows, what)
        some = sorted(some, key=lambda row: row["params"]["n"])
        counts = [row["params"]["n"] for row in some]
        axes.plot(counts, [r["figures"][figure_of] for r in some], "o-", label=label, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xlabel("replicas at once")
    axes.set_ylabel("last done, x")
    axes.legend()
    return figure


def _stalls(rows: Sequence[Row]) -> Figure:
    figure, axes = _figure(6.5, 2.8)
    bursts = _of(rows, "burst")
    most = max((r["params"]["n"] for r in bursts if r["params"]["n"] <= 1000), default=0)
    for row in bursts:
        params = row["params"]
        if params["n"] == most:
            heads = params.get("heads", 1)
            label = "over 5 s" if params.get("over_s") else f"{heads} head{'s' * (heads > 1)}"
            stalls = row["figures"]["stalls_x"]
            shares = [100 * k / (len(stalls) - 1) for k in range(len(stalls))]
            axes.plot(stalls, shares, label=label)
    axes.set_xlabel(f"stall of one of {most:,} replicas, x")
    axes.set_ylabel("% that wait no longer")
    axes.legend(loc="lower right")
    return figure


def _requests(rows: Sequence[Row]) -> Figure:
    figure, axes = _figure(6.5, 2.6)
    bursts = _bursts(rows)
    counts = [row["params"]["n"] for row in bursts]
    for name in ("commits", "lost", "reads", "commits_first"):
        label = name.replace("_first", " before the first byte, with lost ones")
        axes.plot(counts, [row["figures"][name] for row in bursts], "o-", label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("replicas at once")
    axes.set_ylabel("requests, each")
    axes.legend()
    return figure


def _paper(rows: Sequence[Row]) -> Figure:
    figure, (burst, elastic, far) = _figure(9.0, 2.8, 3)
    groups = _of(rows, "figure_7b")
    counts = [row["params"]["groups"] for row in groups]
    burst.plot(counts, [row["figures"]["stall_s"] for row in groups], "o-", color=OURS)
    burst.plot(counts, [8 * 2.2 * n for n in counts], "--", color=THEIRS, label="ideal")
    burst.set_title("7b: total stall, s", fontsize=9)
    burst.set_xlabel("groups of 8 GPUs")
    burst.legend()
    for trainers, colour in ((1, OURS), (8, BLUE)):
        some = [row for row in _of(rows, "figure_11") if row["params"]["trainers"] == trainers]
        counts = [row["params"]["rollouts"] for row in some]
        label = f"{trainers} trainer{'s' * (trainers > 1)}"
        elastic.plot(
            counts, [r["figures"]["mean_s"] for r in some], "o-", color=colour, label=label
        )
    elastic.axhline(1.5, ls="--", color=THEIRS, label="paper")
    elastic.set_title("11: mean stall, s", fontsize=9)
    elastic.set_ylim(bottom=0)
    elastic.set_xlabel("elastic rollouts")
    elastic.legend(loc="lower right")
    ours = [row["figures"]["stall_s"] for row in _of(rows, "figure_12")]
    bars = {
        "paper, UCX": 62.4,
        "this release": fmean(ours) if ours else 0.0,
        "paper, skipping": 7.7,
    }
    found = far.bar(list(bars), list(bars.values()), color=[THEIRS, OURS, THEIRS])
    far.bar_label(found, [f"{value:.1f}" for value in bars.values()])
    far.set_title("12: total stall, s", fontsize=9)
    return figure
