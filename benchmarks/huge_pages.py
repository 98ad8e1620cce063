"""Huge pages: what they bring to many readers at once, and what they take from a trainer's step.

How fast one process reads with them and without is in `one_to_one.py`.
"""

from functools import partial
from statistics import median

import tensors as contents
import torch
from fanout import CPU, LAST, burst
from harness import Actors, Setup, ask_all, rounds, say, seconds, started
from ours import ALONE, Process, Rollout, Trainer, opened, settle, status_bytes
from report import Report, Row, Unit, ratio

PART = "Huge pages"
WAYS = {"huge pages": True, "pages of 4 KiB": False}
READERS, SIZE_MIB_MAX, TENSOR_COUNT = 8, 128, 64
TURNS = 3  # of so many rounds as elsewhere: short, and noisy
MATRIX = 1024
LOOP_S = 3.0
GROWTH = 0.02  # of the tensors, and 8 MiB

UNITS: dict[str, Unit] = {LAST: "ms", CPU: "s/GiB"}


class Step:
    """A trainer that multiplies matrices on one thread while its tensors get huge pages."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._tensors = setup, contents.plain(setup.size_bytes, 100)
        contents.write(self._tensors, 1)
        self._matrices = torch.randn(2, MATRIX, MATRIX)
        self._handle = opened(setup, "step", "trainer", {}, **ALONE)
        self._handle.unregister()

    def measure(self) -> dict[str, float]:
        before = [self._product_s() for _ in range(int(LOOP_S / self._product_s()))]
        bytes_before = status_bytes("VmRSS")
        register_s = seconds(lambda: self._handle.register(self._tensors))
        during: list[float] = []
        while self._handle.huge_pages.bytes_waiting:
            during += [self._product_s() for _ in range(10)]
        settle(self._handle)
        grown = status_bytes("VmRSS") - bytes_before
        after = [self._product_s() for _ in during]
        calm_s = (sum(before) / len(before) + sum(after) / len(after)) / 2
        return {
            "slower": 100 * (sum(during) / len(during) / calm_s - 1),
            "took_s": sum(during),
            "register_ms": 1e3 * register_s,
            "grown_mib": grown / 2**20,
        }

    def _product_s(self) -> float:
        return seconds(lambda: torch.mm(*self._matrices))

    def close(self) -> None:
        self._handle.close()


def step(setup: Setup) -> Actors:
    return {"step": Step(setup)}


def trainer(setup: Setup, size_bytes: int) -> Actors:
    trainers = {
        way: Trainer(
            setup, way, contents.plain(size_bytes, TENSOR_COUNT), huge_pages=is_huge, **ALONE
        )
        for way, is_huge in WAYS.items()
    }
    return {**trainers, "process": Process()}


def reader(setup: Setup, size_bytes: int, number: int) -> Actors:
    rollouts = {
        way: Rollout(
            setup,
            way,
            f"reader {number}",
            contents.plain(size_bytes, TENSOR_COUNT),
            huge_pages=is_huge,
            **ALONE,
        )
        for way, is_huge in WAYS.items()
    }
    return {**rollouts, "process": Process()}


def measure(setup: Setup, report: Report) -> None:
    _measure_step(setup, report)
    size_mib = min(setup.size_mib, SIZE_MIB_MAX)
    builds = {"trainer": partial(trainer, setup, size_mib << 20)}
    builds |= {
        f"reader {number}": partial(reader, setup, size_mib << 20, number)
        for number in range(READERS)
    }
    with started(builds) as (source, *readers):
        for way in WAYS:
            say(f"  {ask_all((source, *readers), way, 'settle')[0]}")
        cases = {way: burst(way, size_mib, source, readers) for way in WAYS}
        for meet in list(cases.values()) * 3:
            meet()
        samples = rounds(TURNS * setup.repeat, cases)
    huge, small = WAYS
    for what, unit in UNITS.items():
        found = {way: [sample[what] for sample in samples[way]] for way in WAYS}
        for way in WAYS:
            report.add(
                Row(
                    part=PART,
                    what=f"{what}, {way}",
                    params={"MiB": size_mib, "readers": READERS},
                    unit=unit,
                    samples=found[way],
                    ratios={f"of {small}": ratio(found[huge], found[small])} if way == huge else {},
                )
            )
        reached = ratio(found[huge], found[small])
        report.expect(f"{READERS} readers: {what}, {huge} of {small}", reached, at_most=0.8)


def _measure_step(setup: Setup, report: Report) -> None:
    found = []
    for _ in range(min(3, setup.repeat)):  # each needs tensors that were never on huge pages
        with started({"step": partial(step, setup)}) as [child]:
            found.append(child.ask("step", "measure"))
    at = {"MiB": setup.size_mib, "tensors": 100}
    rows: tuple[tuple[str, str, Unit], ...] = (
        ("slower", "matrix products on one thread meanwhile: slower by", "%"),
        ("took_s", "until all are on huge pages", "s"),
        ("register_ms", "register", "ms"),
        ("grown_mib", "RSS: grown by", "MiB"),
    )
    for key, what, unit in rows:
        samples = [each[key] for each in found]
        report.add(Row(part=PART, what=what, params=at, unit=unit, samples=samples))
    slower, took_s, grown = (median(e[k] for e in found) for k in ("slower", "took_s", "grown_mib"))
    report.expect("matrix products: slower by", slower, at_most=5.0, unit="%")
    per_gib = took_s / (setup.size_mib / 1024)
    report.expect("until a GiB is on huge pages", per_gib, at_most=10.0, unit="s")
    allowed = GROWTH * setup.size_mib + 8
    report.expect("growth of RSS", grown, at_most=allowed, unit="MiB")
