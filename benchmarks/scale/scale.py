"""`make scale`: what the library does among N replicas, by running it; writes docs/scale.

Everything behind `torch_ros.open` runs as it is, on modelled clocks, etcd and network (`cluster`).
The same release, seed and N make the same `results.json`, byte for byte.

    python benchmarks/scale/scale.py                     all scenarios, N to 1,000
    python benchmarks/scale/scale.py --n 10000           bursts of 10,000, beside what is there
    python benchmarks/scale/scale.py --n 200 --only burst,deaths --rules today,"steps of 64 MiB"
                                                         prints rows, and writes nothing
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import acceptance
import page
import scenarios
from rules import RULES, TODAY

DOCS = Path(__file__).parents[2] / "docs" / "scale"
WORKERS = 2
SEEDS = 20
# Far replicas, and how many seeds are tried of how often a version crosses to them.
CROSSINGS = ((1, 1), *((n, SEEDS) for n in (2, 4, 8, 16)), (32, 5), (64, 5), (256, 1), (1000, 1))
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    what: str
    params: tuple[tuple[str, Any], ...]
    seed: int = 0
    rule: str = TODAY

    @property
    def weight(self) -> float:
        """The job's time, roughly, beside that of others: the longest go first."""
        params = dict(self.params)
        slow = 2 if self.what == "stragglers" else 1
        return slow * sum(params.get(name, 0) for name in ("n", "waiting", "reading"))


def job(what: str, seed: int = 0, **params: Any) -> Job:
    return Job(what, tuple(params.items()), seed)


def large(n: int) -> list[Job]:
    """The jobs among ten thousand replicas."""
    jobs = [job(what, n=n) for what in ("burst", "stragglers", "deaths")]
    return [*jobs, job("burst", n=n, heads=48)]


def usual(n_max: int) -> list[Job]:
    """The jobs of all scenarios, among no more than `n_max` replicas."""
    counts = [n for n in (3, 10, 30, 100, 300, 1000) if n <= n_max]
    jobs = [job("burst", n=n) for n in counts]
    jobs += [job("burst", n=counts[-1], heads=heads) for heads in (4, 16, 48)]
    jobs += [job("burst", n=n, over_s=5.0) for n in (100, 1000) if n <= n_max]
    jobs += [job(what, n=n) for what in ("stragglers", "deaths") for n in (100, 1000) if n <= n_max]
    jobs += [job("figure_7b", groups=groups) for groups in (1, 4, 9, 18)]
    jobs += [job("figure_11", rollouts=n, trainers=t) for t in (1, 8) for n in (1, 2, 3, 4)]
    jobs += [job("figure_12", seed) for seed in range(10)]
    for seeding in ("foreground", "host"):
        for where in ({"etcd": scenarios.WEST}, {}):
            jobs += [job("updates_12", seed, seeding=seeding, **where) for seed in range(5)]
    for n, seeds in CROSSINGS:
        jobs += [job("datacenters", seed, n=n) for seed in range(seeds) if n <= n_max]
    for n, seeds in ((4, SEEDS), (16, SEEDS), (64, 2)):
        jobs += [job("datacenters", seed, n=n, far=2) for seed in range(seeds) if n <= n_max]
    jobs += [job("datacenters", seed, n=4, over_s=2.0) for seed in range(SEEDS)]
    many = min(300, n_max // 2)
    jobs += [job("herd", waiting=many, reading=many), job("held_up"), job("fast_versions")]
    return jobs


def perform(one: Job) -> Row:
    with RULES[one.rule]():
        figures = getattr(scenarios, one.what)(one.seed, **dict(one.params))
    row = {"what": one.what, "params": dict(one.params), "seed": one.seed, "rule": one.rule}
    return {**row, "figures": figures}


def timed(numbered: tuple[int, Job]) -> tuple[int, Row, float]:
    number, one = numbered
    began_s = time.process_time()
    row = perform(one)
    gc.collect()
    return number, row, time.process_time() - began_s


def played(jobs: Sequence[Job], workers: int) -> list[Row]:
    """The rows of these jobs, in the order of the jobs."""
    order = sorted(enumerate(jobs), key=lambda each: -each[1].weight)
    rows: dict[int, Row] = {}
    took_s: dict[str, float] = {}

    def gather(found: Iterable[tuple[int, Row, float]]) -> None:
        for number, row, seconds in found:
            rows[number] = row
            took_s[jobs[number].what] = took_s.get(jobs[number].what, 0.0) + seconds

    if workers == 1:
        _no_garbage()
        gather(map(timed, order))
        gc.enable()
    else:
        with multiprocessing.get_context("fork").Pool(workers, _no_garbage) as pool:
            gather(pool.imap_unordered(timed, order))
    spent = ", ".join(f"{what} {seconds:.0f}" for what, seconds in took_s.items())
    print(f"seconds of a core: {sum(took_s.values()):.0f} ({spent})", file=sys.stderr)
    return [rows[number] for number in range(len(jobs))]


def _no_garbage() -> None:
    """Collect garbage only between jobs, and only theirs: it takes a tenth of the time."""
    gc.disable()
    gc.freeze()


def told(rows: Iterable[Row]) -> Iterator[str]:
    for row in rows:
        figures = {name: value for name, value in row["figures"].items() if name != "stalls_x"}
        who = " ".join(f"{name}={value}" for name, value in row["params"].items())
        yield f"{row['rule']:>30}  {row['what']} {who} seed={row['seed']}  {json.dumps(figures)}"


def encoded(rows: Sequence[Row]) -> str:
    lines = (json.dumps(row, sort_keys=True) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--n", type=int, default=1000, help="replicas at most; above 1,000: so many"
    )
    parser.add_argument("--only", help="these scenarios, which are printed")
    parser.add_argument("--rules", help="with these rules, which are printed: see rules.py")
    parser.add_argument("--out", type=Path, default=DOCS)
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes")
    given = parser.parse_args()
    jobs = large(given.n) if given.n > 1000 else usual(given.n)
    if given.only or given.rules:
        wanted = given.only.split(",") if given.only else [each.what for each in jobs]
        some = [each for each in jobs if each.what in wanted]
        names = given.rules.split(",") if given.rules else [TODAY]
        some = [replace(one, rule=name) for one in some for name in names]
        print(*told(played(some, given.workers)), sep="\n")
        return
    rows = played(jobs, given.workers)
    given.out.mkdir(parents=True, exist_ok=True)
    name = "results.json" if given.n <= 1000 else f"results-{given.n}.json"
    (given.out / name).write_text(encoded(rows))
    known = page.rows_in(given.out)
    page.write(known, given.out)
    print(*acceptance.table(known), sep="\n")


if __name__ == "__main__":
    main()
