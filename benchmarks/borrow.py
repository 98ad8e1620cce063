"""Time and memory of borrowing a version from another process of this host, and of lending."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import tensors as contents
from harness import Actors, Child, Setup, say, started
from ours import status_bytes
from report import Report, Row

import torch_ros

PART = "Borrowing"
SMALL_MIB = 10
COUNT = 100  # tensors
LOOKS = 20  # beside the first one
STEPS = 100
BORROW_MS_MAX = 10.0
MEMORY_MIB_MAX = 1.0
SLOWER_MAX = 1.25  # medians of what two busy cores do

FIRST, AGAIN, LEAVE, MEMORY, STEP = (
    "borrow, the first time",
    "borrow, again",
    "leave",
    "memory of its own, all read",
    f"publish_copy, each of {STEPS}",
)


class Lender:
    def __init__(self, setup: Setup, size_mib: int) -> None:
        self._tensors = contents.plain(size_mib << 20, COUNT)
        self._handle = torch_ros.open(
            model_of(setup, size_mib),
            endpoint=setup.endpoint,
            replica="lender",
            borrow_bytes=size_mib << 20,
        )
        self._version = 0

    def publish(self, count: int) -> list[float]:
        """Milliseconds that each took."""
        took_ms = []
        for _ in range(count):
            self._version += 1
            contents.write(self._tensors, self._version)
            began_s = time.perf_counter()
            self._handle.publish_copy(self._version, self._tensors)
            took_ms.append(1e3 * (time.perf_counter() - began_s))
        return took_ms

    def buffers(self) -> int:
        files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        lent = (file for file in files if "torch_ros lent" in str(file.readlink()))
        return len({file.stat().st_ino for file in lent})

    def close(self) -> None:
        self._handle.close()


class Borrower:
    def __init__(self, setup: Setup, size_mib: int) -> None:
        self._handle = torch_ros.open(model_of(setup, size_mib), endpoint=setup.endpoint)
        self._stays = ExitStack()
        contents.verify(contents.plain(1 << 20, COUNT), 0)  # the code that only this runs

    def look(self, version: int) -> tuple[float, float, float]:
        """Milliseconds until the version was there, and to leave; MiB that this process took."""
        before = status_bytes("RssAnon")
        began_s = time.perf_counter()
        with self._handle.borrow() as tensors:
            there_s = time.perf_counter()
            contents.verify(tensors, version)
            grown = status_bytes("RssAnon") - before
            ends_s = time.perf_counter()
        left_s = time.perf_counter()
        return 1e3 * (there_s - began_s), 1e3 * (left_s - ends_s), grown / 2**20

    def stay(self) -> None:
        self._stays.enter_context(self._handle.borrow())

    def close(self) -> None:
        self._stays.close()
        self._handle.close()


def model_of(setup: Setup, size_mib: int) -> str:
    return f"{setup.name}-borrow-{size_mib}"


def lender(setup: Setup, size_mib: int) -> Actors:
    return {"lender": Lender(setup, size_mib)}


def borrower(setup: Setup, size_mib: int) -> Actors:
    return {"borrower": Borrower(setup, size_mib)}


def measure(setup: Setup, report: Report) -> None:
    for size_mib in (SMALL_MIB, setup.size_mib):
        say(f"  {size_mib} MiB")
        builds = {
            "lender": partial(lender, setup, size_mib),
            "borrower": partial(borrower, setup, size_mib),
        }
        with started(builds) as (lends, borrows):
            lends.ask("lender", "publish", 1)
            looks = [borrows.ask("borrower", "look", 1) for _ in range(1 + LOOKS)]
            there_ms, leave_ms, memory_mib = zip(*looks, strict=True)

            row = partial(Row, part=PART, params={"MiB": size_mib, "tensors": COUNT})
            report.add(row(what=FIRST, unit="ms", samples=there_ms[:1]))
            again = report.add(row(what=AGAIN, unit="ms", samples=there_ms[1:]))
            report.add(row(what=LEAVE, unit="ms", samples=leave_ms))
            memory = report.add(row(what=MEMORY, unit="MiB", samples=memory_mib[1:]))
            what = f"borrow {size_mib} MiB"
            report.expect(f"{what}, first", there_ms[0], at_most=BORROW_MS_MAX, unit="ms")
            report.expect(what, again.median, at_most=BORROW_MS_MAX, unit="ms")
            report.expect(f"{what}: memory", memory.median, at_most=MEMORY_MIB_MAX, unit="MiB")
            if size_mib == SMALL_MIB:
                _stay(lends, borrows, row, report)


def _stay(lends: Child, borrows: Child, row: Callable[..., Row], report: Report) -> None:
    """The cost to the lender of a borrower that never leaves."""
    samples = {STEP: lends.ask("lender", "publish", STEPS)}
    borrows.ask("borrower", "stay")
    beside = f"{STEP}, beside a borrower that never leaves"
    samples[beside] = lends.ask("lender", "publish", STEPS)
    alone, held = (
        report.add(row(what=what, unit="ms", samples=took)) for what, took in samples.items()
    )
    report.expect(beside, held.median / alone.median, at_most=SLOWER_MAX)
    report.expect("buffers of its lender", lends.ask("lender", "buffers"), at_most=3, unit="")
