"""One source, 1 to 8 readers at once, with relays and without.

In a chain, each reader has another source every time. The first time that two meet they connect and
prepare their reads; that is measured apart.
"""

from collections.abc import Callable, Sequence
from functools import partial

import tensors as contents
from harness import Actors, Child, Sample, Setup, ask_all, rounds, started
from ours import Process, Rollout, Trainer
from report import Report, Row, Unit

PART = "One source, many readers"
READERS = (1, 2, 4, 8)
SIZE_MIB_MAX = 128  # of each of nine processes
TENSOR_COUNT = 64
WAYS = {True: "relays", False: "no relays"}
MEETINGS = 24  # until nearly all have read from nearly all others
TURNS = 3  # of so many rounds as elsewhere: short, and noisy

LAST, FROM_TRAINER, CPU = "until the last reader has it", "trainer's memory read", "CPU"
UNITS: dict[str, Unit] = {LAST: "ms", FROM_TRAINER: "times", CPU: "s/GiB"}


def trainer(setup: Setup, size_bytes: int) -> Actors:
    held = contents.plain(size_bytes, TENSOR_COUNT)
    trainers = {way: Trainer(setup, f"fanout, {way}", held) for way in WAYS.values()}
    return {**trainers, "process": Process()}


def reader(setup: Setup, size_bytes: int, number: int) -> Actors:
    held = contents.plain(size_bytes, TENSOR_COUNT)
    rollouts = {
        way: Rollout(setup, f"fanout, {way}", f"reader {number}", held, relay=relay)
        for relay, way in WAYS.items()
    }
    return {**rollouts, "process": Process()}


def measure(setup: Setup, report: Report) -> None:
    size_mib = min(setup.size_mib, SIZE_MIB_MAX)
    builds = {"trainer": partial(trainer, setup, size_mib << 20)}
    builds |= {
        f"reader {number}": partial(reader, setup, size_mib << 20, number)
        for number in range(max(READERS))
    }
    points = [(way, count) for count in READERS for way in WAYS.values()]
    with started(builds) as (source, *readers):
        cases = {
            (way, count): burst(way, size_mib, source, readers[:count]) for way, count in points
        }
        most, relays = max(READERS), WAYS[True]
        meetings = [cases[relays, most]() for _ in range(MEETINGS)]
        samples = rounds(TURNS * setup.repeat, cases)
    found: dict[tuple[str, str, int], float] = {}
    for what, unit in UNITS.items():
        for way, count in points:
            row = Row(
                part=PART,
                what=f"{what}, {way}",
                params={"MiB": size_mib, "readers": count},
                unit=unit,
                samples=[sample[what] for sample in samples[way, count]],
            )
            report.add(row)
            found[what, way, count] = row.median
        row = Row(
            part=PART,
            what=f"{what}, {relays} that meet for the first time",
            params={"MiB": size_mib, "readers": most},
            unit=unit,
            samples=[sample[what] for sample in meetings[: setup.repeat]],
        )
        report.add(row)
    what = f"{most} readers: how often the trainer's memory is read"
    report.expect(what, found[FROM_TRAINER, relays, most], at_most=1.1)
    what = f"{most} readers: CPU per delivered GiB, of that of 1 reader"
    report.expect(what, found[CPU, relays, most] / found[CPU, relays, 1], at_most=1.2)


def burst(way: str, size_mib: int, source: Child, readers: Sequence[Child]) -> Callable[[], Sample]:
    """The actor `way` of the source publishes, and those of all readers replicate at once."""

    def cpu_s() -> float:
        return sum(ask_all((source, *readers), "process", "cpu_s"))

    def once() -> Sample:
        version = source.ask(way, "write")
        source.ask(way, "publish")
        before_s = cpu_s()
        took = ask_all(readers, way, "replicate", version)
        used_s = cpu_s() - before_s
        ask_all(readers, way, "verify", version)
        ask_all(readers, way, "let_go")
        source.ask(way, "unpublish")  # the other way's trainer has the same tensors
        # A reader that changed its source may have read any part of it from the trainer.
        from_trainer = [t for t in took if t["source"] == "trainer" or t["reroutes"]]
        return {
            LAST: 1e3 * max(t["elapsed_s"] for t in took),
            FROM_TRAINER: sum(t["bytes_read"] for t in from_trainer) / (size_mib << 20),
            CPU: used_s / (len(readers) * size_mib / 1024),
        }

    return once
