"""Huge pages under registered memory, which other processes copy twice as fast.

The kernel finds and holds each page of a source before it copies: of 4 KiB, that takes as long as
the copy. docs/ARCHITECTURE.md#decisions-with-what-speaks-against-them.
"""

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_ros.p2p.regions import merge
from torch_ros.spans import HOST, Region

log = logging.getLogger(__name__)

HUGE_BYTES = 2 << 20
# Between neighbours there are the allocator's own bytes; pages of nobody are not filled for more.
GAP_BYTES = 2 * mmap.PAGESIZE

COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1: make one page of these 512, now, where they lie

# A thread that collapses takes half a core, in steps of 5 ms: a GiB takes 5 s.
PAUSE_PER_STEP = 1.0
# The call that registers ends first, and so does a life of memory that is registered for a moment.
BEGIN_S = 0.5
# A peer reads a page, or a device has pinned it: it may be free later.
TRIES, RETRY_S = 4, 1.0
BUSY = (errno.EAGAIN, errno.EBUSY)

_ASKED = -1

KNOWN_MAX = 1 << 18  # addresses of which the outcome is kept: half a TiB

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_RDMA = Path("/dev/infiniband")  # there are devices, and this process can open them

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Call `madvise`, without the GIL. Returns the errno; 0: it is done."""
    return 0 if _libc.madvise(address, size_bytes, advice) == 0 else ctypes.get_errno()


def obstacle() -> str:
    """Why pages stay as they are in this process; "": they need not."""
    try:
        size_bytes = int(_SIZE.read_text())
    except (OSError, ValueError):
        return "this kernel has no transparent huge pages"
    if size_bytes != HUGE_BYTES:
        return f"this kernel's huge pages have {size_bytes} bytes, not {HUGE_BYTES}"
    if any(_RDMA.glob("uverbs*")):
        return "there are RDMA devices, which pin what is registered"
    return ""


def runs(regions: Sequence[Region]) -> npt.NDArray[np.int64]:
    """From and to, a row each: the aligned multiples of 2 MiB that these regions cover together."""
    if not regions:
        return np.zeros((0, 2), np.int64)
    page = mmap.PAGESIZE
    pages = [(r.address // page * page, -(-(r.address + r.size_bytes) // page)) for r in regions]
    wide = [Region(start, end * page + GAP_BYTES - start) for start, end in pages]
    cover = merge(HOST, wide, key=0)
    starts, ends = cover.starts.astype(np.int64), cover.ends.astype(np.int64) - GAP_BYTES
    bounds = np.stack((-(-starts // HUGE_BYTES), ends // HUGE_BYTES), axis=1) * HUGE_BYTES
    return bounds[bounds[:, 0] < bounds[:, 1]]


@dataclass(frozen=True, slots=True)
class HugePageReport:
    """How much of the registered host memory is on huge pages, which peers copy faster."""

    bytes_huge: int = 0
    bytes_waiting: int = 0  # their turn is to come
    bytes_left: Mapping[str, int] = field(default_factory=dict)  # by the reason: as they were
    off_because: str = ""  # why nothing is done; empty: something is


Found = tuple[Sequence[Region], Mapping[str, int]]
"""Memory to be brought onto huge pages, and the bytes that must not be, by the reason."""


@dataclass(eq=False)
class _Job:
    find: Callable[[], Found]
    is_over: bool = False  # then `find` is idle

    @cached_property
    def found(self) -> Found:
        return self.find()

    @cached_property
    def addresses(self) -> Sequence[int]:
        """Of the huge pages to be."""
        rows = runs(self.found[0]).tolist()
        return [at for start, end in rows for at in range(start, end, HUGE_BYTES)]

    def end(self) -> None:
        """Let go of whatever the memory is found by: it may be freed."""
        self.is_over, self.find = True, lambda: ((), {})


class HugePages:
    """Brings memory onto huge pages, in a thread that lives while there is something to do.

    Each address is tried once: for memory that is allocated anew for each version it does not pay.

    Args:
        off_because: Do nothing, and why.
        call: As `advise`; for tests.
    """

    def __init__(
        self, off_because: str = "", call: Callable[[int, int, int], int] = advise
    ) -> None:
        self._off_because, self._call = off_because, call
        self._lock = threading.Lock()
        self._job: _Job | None = None
        self._has_thread = False
        self._outcomes: dict[int, int] = {}  # by address: 0 if it is huge, `_ASKED`, or an errno

    def ask(self, regions: Sequence[Region]) -> None:
        """Have memory that nobody has touched yet made of huge pages at its first touch."""
        if not self._off_because:
            for start, end in runs(regions).tolist():
                self._call(start, end - start, mmap.MADV_HUGEPAGE)

    def follow(self, find: Callable[[], Found] | None) -> None:
        """Bring this memory onto huge pages from now on, in place of what was followed before.

        The memory may be freed at any time.

        Args:
            find: Called once, by the thread; None: there is nothing to do any more.
        """
        if self._off_because:
            return
        with self._lock:
            if self._job is not None:
                self._job.end()
            self._job = _Job(find) if find else None
            if find and not self._has_thread:
                thread = threading.Thread(
                    target=self._work, name="torch_ros makes huge pages", daemon=True
                )
                with suppress(RuntimeError):  # no thread to be had: then pages stay small
                    thread.start()
                    self._has_thread = True

    @property
    def report(self) -> HugePageReport:
        job = self._job
        if job is None:
            return HugePageReport(off_because=self._off_because)
        regions, left = job.found
        counts = Counter(self._outcomes.get(address) for address in job.addresses)
        pages = {outcome: count * HUGE_BYTES for outcome, count in counts.items()}
        rest = sum(region.size_bytes for region in regions) - HUGE_BYTES * len(job.addresses)
        reasons = {_reason(n): size for n, size in pages.items() if n}
        unaligned = {"tensors do not cover 2 MiB there": rest} if rest > 0 else {}
        return HugePageReport(pages.get(0, 0), pages.get(None, 0), {**left, **reasons, **unaligned})

    def _work(self) -> None:
        done = None
        while True:
            with self._lock:
                job = self._job
                if job is None or job is done:
                    self._has_thread = False
                    return
            time.sleep(BEGIN_S)
            self._bring(job)
            done = job

    def _bring(self, job: _Job) -> None:
        began_s = time.perf_counter()
        if len(self._outcomes) > KNOWN_MAX:
            self._outcomes = {}
        left = [address for address in job.addresses if address not in self._outcomes]
        for number in range(TRIES):
            time.sleep(RETRY_S * number)
            for address in left:
                if job.is_over:
                    return
                step_s = time.perf_counter()
                self._outcomes[address] = self._collapse(address)
                time.sleep(PAUSE_PER_STEP * (time.perf_counter() - step_s))
            left = [address for address in left if self._outcomes[address] in BUSY]
            if not left:
                break
        if job.addresses:
            report, took_s = self.report, time.perf_counter() - began_s
            huge_mb, others = report.bytes_huge / 1e6, dict(report.bytes_left)
            log.info("%.0f MB are on huge pages after %.1f s; left: %s", huge_mb, took_s, others)

    def _collapse(self, address: int) -> int:
        outcome = self._call(address, HUGE_BYTES, COLLAPSE)
        if outcome != errno.EINVAL:
            return outcome
        # An older kernel, or memory that is not touched yet: then as soon as the kernel can.
        return self._call(address, HUGE_BYTES, mmap.MADV_HUGEPAGE) or _ASKED


def _reason(outcome: int) -> str:
    if outcome == _ASKED:
        return "the kernel was asked to, and does it when it can"
    if outcome in BUSY:
        return "it was being read, or is pinned"
    return f"the kernel says: {os.strerror(outcome)}"
