"""The aims of the library among many replicas, and whether it reaches them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
NOT_RUN = "not run"


@dataclass(frozen=True)
class Aim:
    """One line of the table. `found`: the figure that counts, of rows; None: no row has it.

    `why` says the cause, in case the figure misses the aim.
    """

    what: str
    unit: str
    most: float
    found: Callable[[Sequence[Row]], float | None]
    why: str = ""

    def verdict(self, found: float | None) -> str:
        return NOT_RUN if found is None else "met" if found <= self.most else "missed"


def rows_of(rows: Sequence[Row], what: str, **params: Any) -> list[Row]:
    return [row for row in rows if row["what"] == what and row["params"] == params]


def worst(figure: str, what: str, **params: Any) -> Callable[[Sequence[Row]], float | None]:
    def found(rows: Sequence[Row]) -> float | None:
        values = [row["figures"][figure] for row in rows_of(rows, what, **params)]
        return max(values, default=None)

    return found


def worst_crossings(rows: Sequence[Row]) -> float | None:
    found = [row["figures"]["crossings"] for row in rows if row["what"] == "datacenters"]
    return max(found, default=None)


def mean_stall_12(**params: str) -> Callable[[Sequence[Row]], float | None]:
    def found(rows: Sequence[Row]) -> float | None:
        stalls = [r["figures"]["stall_s"] for r in rows_of(rows, "updates_12", **params)]
        return round(sum(stalls) / len(stalls), 2) if stalls else None

    return found


def herd_reads(rows: Sequence[Row]) -> float | None:
    found = [row["figures"]["reads"] for row in rows if row["what"] == "herd"]
    return max(found, default=None)


def kib(rows: Sequence[Row]) -> float | None:
    found = [
        row["figures"]["KiB"]
        for row in rows
        if row["what"] == "burst" and set(row["params"]) == {"n"} and row["params"]["n"] >= 10
    ]
    return max(found, default=None)


def held_up_beyond(rows: Sequence[Row]) -> float | None:
    found = [r["figures"]["unpublish_s"] for r in rows if r["what"] == "held_up"]
    return max(found, default=None)


# The words before the colon name the aims.
FAR_ETCD = "etcd 40 ms away: each of eight GPUs waits for some twelve round trips."
ONE_CHAIN = (
    "10,000: there is one chain. etcd takes 0.07 ms for the decision of each replica, and each hop "
    "0.17 ms to pass on a step. docs/ARCHITECTURE.md says why it stays a chain."
)
SLOW_CHAIN = (
    "10,000 with slow ones, first version: the chain finds them as it comes to them, and each that "
    "steps aside holds up those behind it."
)

AIMS = (
    Aim("crossings per datacenter, 1 to 1,000 far, worst of all seeds", "", 1.005, worst_crossings),
    Aim("7b, 18 groups, mean", "x", 1.03, worst("mean_x", "figure_7b", groups=18)),
    *(
        Aim(
            f"figure 12, total stall, {how}{where}",
            *("s", most, mean_stall_12(**params)),
            FAR_ETCD if where else "",
        )
        for how, most, seeding in (("skipping", 8.5, "foreground"), ("host seeding", 4.0, "host"))
        for where, params in (
            ("", {"seeding": seeding, "etcd": "west"}),
            (", etcd 40 ms away", {"seeding": seeding}),
        )
    ),
    *(
        Aim(f"burst of {n:,}, last done", "x", most, worst("last_x", "burst", n=n), ONE_CHAIN)
        for n, most in ((100, 1.10), (1000, 1.12), (10_000, 1.15))
    ),
    *(
        Aim(
            f"... {n:,}, 1 % at a tenth of the rate, {when}, healthy ones, p99",
            *("x", 1.15, worst(figure, "stragglers", n=n), cause),
        )
        for n in (100, 1000, 10_000)
        for when, figure, cause in (
            ("first version", "healthy_p99_x", SLOW_CHAIN),
            ("next one", "next_p99_x", ONE_CHAIN),
        )
    ),
    *(
        Aim(f"... {n:,}, 2 % die, last done", "x", 1.3, worst("last_x", "deaths", n=n), ONE_CHAIN)
        for n in (100, 1000, 10_000)
    ),
    Aim(
        "commits before the first byte, per replica, 1,000",
        *("", 2.0, worst("commits_first", "burst", n=1000)),
    ),
    Aim("from etcd per newcomer, worst N", "KiB", 20.0, kib),
    Aim("300 wait for latest-1 while 300 read: reads each", "", 10.0, herd_reads),
    Aim("unpublish with far readers only (copy and 3 round trips)", "s", 0.33, held_up_beyond),
    Aim("versions faster than the link: versions behind", "", 8, worst("lag", "fast_versions")),
    Aim("... crossings per version that came", *("", 1.005, worst("crossings", "fast_versions"))),
    Aim("... the trainer is held up, at most", *("s", 0.33, worst("held_up_s", "fast_versions"))),
)


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table: name, aim, figure found, and "met", "missed" or "not run"."""
    for aim in AIMS:
        found = aim.found(rows)
        is_once = aim.most == 1.005
        most = f"{1.0 if is_once else aim.most:g}{' ' * bool(aim.unit)}{aim.unit}"
        said = "" if found is None else f"{found:g}{' ' * bool(aim.unit)}{aim.unit}"
        yield aim.what, most, said, aim.verdict(found)


def causes(rows: Sequence[Row]) -> list[str]:
    """Why aims are missed."""
    missed = (aim for aim in AIMS if aim.verdict(aim.found(rows)) == "missed")
    return list(dict.fromkeys(aim.why for aim in missed))


def table(rows: Sequence[Row]) -> Iterator[str]:
    for what, most, found, verdict in lines(rows):
        yield f"{what:64}{most:>10}{found:>12}  {verdict}"
