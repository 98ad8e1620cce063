"""`make sim`: many seeds, on two cores. `make sim-faults`: whether planted faults are found."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from faults import FAULTS, planted
from scenes import perform
from world import EVENTS, Broken, simulate

from torch_ros.errors import TorchRosError

WORKERS = 2
STORY = 60  # steps of the story that a failure shows
ENOUGH = 2000  # seeds, in which each kind of event must have happened
FOUND = Path(__file__).parent / "found.txt"
MISFIT = "does not fit"  # an accident: the code has changed, and the fault is none any more
HEAD = "| planted fault | found by | breaks |\n| --- | --- | --- |\n"


def _one(task: tuple[int, int]) -> tuple[int, Counter | None, str]:
    seed, story = task
    try:
        return seed, simulate(seed, story=story), ""
    except Broken as broken:
        return seed, None, str(broken)


def play(first: int, count: int, *, workers: int, story: int = STORY, fails_max: int = 5):
    """All that was seen, and the stories of the seeds that failed."""
    tasks = [(seed, story) for seed in range(first, first + count)]
    if workers == 1:
        return _gather(map(_one, tasks), fails_max)
    # Collecting garbage takes a tenth of the time; a worker ends before it needs to.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(workers, gc.disable, maxtasksperchild=50) as pool:
        return _gather(pool.imap_unordered(_one, tasks, 20), fails_max)


def _gather(results: Iterable, fails_max: int) -> tuple[Counter, dict[int, str]]:
    seen: Counter[str] = Counter()
    failures: dict[int, str] = {}
    for seed, counted, why in results:
        if counted is None:
            failures[seed] = why
            if len(failures) >= fails_max:
                break
        else:
            seen.update(counted)
            seen["seeds"] += 1
    return seen, failures


def _with_fault(task: tuple[str, int]) -> tuple[str, str]:
    """The invariant that a seed found broken, or `MISFIT`, and what was found; "": none."""
    what, seed = task
    try:
        with planted(what):
            _history(FAULTS[what].scenario, seed)
    except Broken as broken:
        if not isinstance(broken.__cause__, AssertionError | TorchRosError):
            return MISFIT, _why(str(broken))[1]
        _history(FAULTS[what].scenario, seed)  # without it, nothing is to be found
        return _why(str(broken))
    return "", ""


def _history(scene: str, seed: int) -> None:
    if scene:
        perform(scene, seed)
    else:
        simulate(seed)


def _why(story: str) -> tuple[str, str]:
    why = re.split(r"seed \d+: \w+: ", story)[-1].partition("\nreplay")[0]
    named = re.match(r"(I\d+(?:, I\d+)*): ", why)
    return (named[1] if named else "other"), " ".join(why.split())[:150]


def find(what: str, pool, seeds: int) -> tuple[int, str, str] | None:
    """The first seed that finds a planted fault, and how."""
    tasks = ((what, seed) for seed in range(seeds))
    for seed, (invariant, why) in enumerate(pool.imap(_with_fault, tasks, 2)):
        if invariant:
            return seed, invariant, why
    return None


def find_all(names: list[str], seeds: int, workers: int) -> dict[str, str]:
    """The rows of those that are found, for the table in found.txt."""
    print(HEAD, end="")
    rows = {}
    for what in names:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            found = find(what, pool, seeds)
        fault = FAULTS[what]
        by = f"scene *{fault.scenario}*" if fault.scenario else "seed"
        where = f"{by}, {found[0]}" if found else f"**nobody**, {seeds} seeds"
        breaks = found[1] if found else ""
        row = f"| {what} | {where} | {breaks} |"
        print(row, flush=True)
        print(f"    {what}: {found[2] if found else ''}", file=sys.stderr, flush=True)
        if found and found[1] != MISFIT:
            rows[what] = row
    print(f"\n{len(rows)} of {len(names)} planted faults are found")
    return rows


def table() -> dict[str, str]:
    """The rows of the table in found.txt, by fault."""
    rows = FOUND.read_text().partition(HEAD)[2].splitlines()
    return {row.split(" | ")[0][2:]: row for row in rows}


def write(names: list[str], rows: dict[str, str]) -> None:
    """Put the rows of these faults into that table; one that is not found has none."""
    known = {what: row for what, row in table().items() if what not in names} | rows
    lines = "".join(f"{known[what]}\n" for what in FAULTS if what in known)
    FOUND.write_text(f"{FOUND.read_text().partition(HEAD)[0]}{HEAD}{lines}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=ENOUGH)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--story", action="store_true", help="the whole story of a failure")
    parser.add_argument("--fails", type=int, default=5, help="stop after so many")
    parser.add_argument("--faults", nargs="*", help="plant these, or all")
    parser.add_argument("--write", action="store_true", help="into the table of found.txt")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes")
    options = parser.parse_args()
    if options.faults is not None:
        names = options.faults or list(FAULTS)
        rows = find_all(names, options.seeds, options.workers)
        if options.write:
            write(names, rows)
        return len(rows) < len(names)
    began_s = time.monotonic()
    workers = 1 if options.seeds == 1 else options.workers
    story = 1_000_000 if options.story else STORY
    seen, failures = play(
        options.first, options.seeds, workers=workers, story=story, fails_max=options.fails
    )
    for why in failures.values():
        print(why, end="\n\n")
    if options.seeds > 1:
        for what, count in sorted(seen.items()):
            print(f"{count:12,}  {what}")
    unseen = [event for event in EVENTS if not seen[event]] if options.seeds >= ENOUGH else []
    if unseen and not failures:
        print(f"never happened: {', '.join(unseen)}")
    took_s = time.monotonic() - began_s
    print(f"{seen['seeds']} seeds without a violation, {len(failures)} with one, {took_s:.0f} s")
    return 1 if failures or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
