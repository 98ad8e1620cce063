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

from faults import FAULTS, planted
from scenes import perform
from world import EVENTS, Broken, simulate

WORKERS = 2
STORY = 60  # steps of the story that a failure shows
ENOUGH = 2000  # seeds, in which each kind of event must have happened


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
    """The invariant that a seed found broken, and what was found; "": none."""
    what, seed = task
    try:
        with planted(what):
            _history(FAULTS[what].scenario, seed)
    except Broken as broken:
        if isinstance(broken.__cause__, TypeError | AttributeError):
            raise  # it does not fit the code any more
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
    named = re.match(r"(I\d(?:, I\d)*): ", why)
    return (named[1] if named else "other"), " ".join(why.split())[:150]


def find(what: str, pool, seeds: int) -> tuple[int, str, str] | None:
    """The first seed that finds a planted fault, and how."""
    tasks = ((what, seed) for seed in range(seeds))
    for seed, (invariant, why) in enumerate(pool.imap(_with_fault, tasks, 2)):
        if invariant:
            return seed, invariant, why
    return None


def find_all(names: list[str], seeds: int) -> int:
    print("| planted fault | hole | found by | breaks |\n| --- | --- | --- | --- |")
    missed = 0
    for what in names:
        with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
            found = find(what, pool, seeds)
        fault = FAULTS[what]
        by = f"scene *{fault.scenario}*" if fault.scenario else "seed"
        where = f"{by}, {found[0]}" if found else f"**nobody**, {seeds} seeds"
        breaks = found[1] if found else ""
        print(f"| {what} | {fault.hole or ''} | {where} | {breaks} |", flush=True)
        print(f"    {what}: {found[2] if found else ''}", file=sys.stderr, flush=True)
        missed += found is None
    print(f"\n{len(names) - missed} of {len(names)} planted faults are found")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=ENOUGH)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--story", action="store_true", help="the whole story of a failure")
    parser.add_argument("--fails", type=int, default=5, help="stop after so many")
    parser.add_argument("--faults", nargs="*", help="plant these, or all")
    options = parser.parse_args()
    if options.faults is not None:
        return bool(find_all(options.faults or list(FAULTS), options.seeds))
    began_s = time.monotonic()
    workers = 1 if options.seeds == 1 else WORKERS
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
