"""A job that runs: what every step's calls take, and how much of it is bytes."""

from functools import partial

import tensors as contents
from harness import Actors, Setup, say, started
from ours import Rollout, Trainer
from report import Report, Row

PART = "Steady state"
TENSOR_COUNT = 100
STEPS = 20  # a repetition
LOOKS = 5  # a step

PUBLISHING = "Publishing"
SIZES_MIB = {"small": 10, "whole": None}  # None: what the run moves
MANY = 2000
CYCLES = 20  # a repetition

SYNC, PUBLISH, NOTHING, SHARE = (
    "publish and update",
    "publish",
    "update that finds nothing",
    "share of publish and update that is bytes",
)


def source(setup: Setup) -> Actors:
    return {
        "trainer": Trainer(setup, "steady", contents.plain(setup.size_bytes, TENSOR_COUNT)),
        **{
            name: Trainer(setup, name, contents.plain((mib or setup.size_mib) << 20, MANY))
            for name, mib in SIZES_MIB.items()
        },
    }


def reader(setup: Setup) -> Actors:
    held = contents.plain(setup.size_bytes, TENSOR_COUNT)
    return {"rollout": Rollout(setup, "steady", "rollout", held)}


def measure(setup: Setup, report: Report) -> None:
    published_s: list[float] = []
    updated_s: list[float] = []
    read_s: list[float] = []
    looked_s: list[float] = []
    cycles_s: dict[str, list[tuple[float, float]]] = {name: [] for name in SIZES_MIB}
    builds = {"source": partial(source, setup), "reader": partial(reader, setup)}
    with started(builds) as (trainer, rollout):
        for number in range(setup.repeat + 1):
            for _ in range(STEPS if number else 2):
                version = trainer.ask("trainer", "write")
                taken = trainer.ask("trainer", "publish")
                sample = rollout.ask("rollout", "update")
                rollout.ask("rollout", "verify", version)
                if number:
                    published_s.append(taken)
                    updated_s.append(sample["elapsed_s"])
                    read_s.append(sample["read_s"])
                    looked_s += rollout.ask("rollout", "look", LOOKS)
            for name in SIZES_MIB:
                taken_s = trainer.ask(name, "cycle", CYCLES)
                if number:
                    cycles_s[name] += taken_s
            say(f"  {STEPS} steps, {number} of {setup.repeat}" if number else "  warm-up")
    sync_s = [one + other for one, other in zip(published_s, updated_s, strict=True)]
    params = {"MiB": setup.size_mib, "tensors": TENSOR_COUNT}

    def add(what: str, found_s: list[float]) -> float:
        samples = [1e3 * one_s for one_s in found_s]
        row = Row(part=PART, what=what, params=params, unit="ms", samples=samples, has_tail=True)
        return report.add(row).median

    add(SYNC, sync_s)
    what = f"publish of a step of {setup.size_mib} MiB that was just written, p50"
    report.expect(what, add(PUBLISH, published_s), at_most=5.0, unit="ms")
    add(NOTHING, looked_s)
    shares = [100 * part / whole for part, whole in zip(read_s, sync_s, strict=True)]
    report.add(Row(part=PART, what=SHARE, params=params, unit="%", samples=shares))
    for name, mib in SIZES_MIB.items():
        for position, call in enumerate(("publish", "unpublish, nobody reads")):
            samples = [1e3 * pair[position] for pair in cycles_s[name]]
            row = report.add(
                Row(
                    part=PUBLISHING,
                    what=call,
                    params={"MiB": mib or setup.size_mib, "tensors": MANY},
                    unit="ms",
                    samples=samples,
                    has_tail=True,
                )
            )
            if call == "publish":
                what = f"warm publish of {mib or setup.size_mib} MiB in {MANY:,} tensors, p50"
                report.expect(what, row.median, at_most=5.0, unit="ms")
