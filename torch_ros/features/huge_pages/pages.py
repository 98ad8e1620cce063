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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from torch_ros import environment
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.regions import merge
from torch_ros.p2p.transport import Transport
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Region

log: logging.Logger = log_of(__name__)

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
_RDMA = Path("/dev/infiniband")

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
    """How much of the registered host memory was made of huge pages, which peers copy faster.

    Where a child was forked since, each page that is written becomes small again.
    """

    bytes_huge: int = 0
    bytes_waiting: int = 0  # their turn, or another try, is to come
    bytes_left: Mapping[str, int] = field(default_factory=dict)  # by the reason: as they were
    off_because: str = ""  # why nothing is done; empty: something is


@dataclass(eq=False)
class _Job:
    addresses: Sequence[int]  # of the huge pages to be
    bytes_left: Mapping[str, int]
    over: threading.Event = field(default_factory=threading.Event)


class HugePages(Pages):
    """Brings memory onto huge pages, in a thread that lives while there is something to do.

    Each address is tried once: for memory that is allocated anew for each version it does not pay.
    The thread only calls the kernel: torch's memory may be freed meanwhile, and the process end.

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
        self._outcomes: dict[int, int] = {}  # by address: 0 if it was made huge, `_ASKED`, or errno

    @property
    def is_on(self) -> bool:
        return not self._off_because

    def ask(self, regions: Sequence[Region]) -> None:
        """Have it made of huge pages at its first touch."""
        if self.is_on:
            for start, end in runs(regions).tolist():
                self._call(start, end - start, mmap.MADV_HUGEPAGE)

    def follow(
        self, regions: Sequence[Region], bytes_left: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Bring it onto huge pages from now on."""
        if not self.is_on:
            return
        rows = runs(regions).tolist()
        addresses = [at for start, end in rows for at in range(start, end, HUGE_BYTES)]
        with self._lock:
            if self._job is not None:
                self._job.over.set()
            self._job = _Job(addresses, bytes_left)
            if not addresses or self._has_thread:
                return
            self._has_thread = True
            thread = threading.Thread(
                target=self._work, name="torch_ros makes huge pages", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no thread to be had: pages stay small
                self._job, self._has_thread = None, False

    @property
    def report(self) -> HugePageReport:
        job = self._job
        if job is None:
            return HugePageReport(off_because=self._off_because)
        counts = Counter(self._outcomes.get(address) for address in job.addresses)
        pages = {outcome: count * HUGE_BYTES for outcome, count in counts.items()}
        reasons = {_reason(n): size for n, size in pages.items() if n}
        return HugePageReport(pages.get(0, 0), pages.get(None, 0), {**job.bytes_left, **reasons})

    def _work(self) -> None:
        done = None
        while True:
            with self._lock:
                job = self._job
                if job is None or job is done or not job.addresses:
                    self._has_thread = False
                    return
            if not job.over.wait(BEGIN_S):
                self._bring(job)
            done = job

    def _bring(self, job: _Job) -> None:
        began_s = time.perf_counter()
        if len(self._outcomes) > KNOWN_MAX:
            self._outcomes = {}
        left = [address for address in job.addresses if address not in self._outcomes]
        for number in range(TRIES):
            if job.over.wait(RETRY_S * number):
                return
            busy = {}
            for address in left:
                step_s = time.perf_counter()
                outcome = self._collapse(address)
                if outcome in BUSY:
                    busy[address] = outcome
                else:
                    self._outcomes[address] = outcome
                if job.over.wait(PAUSE_PER_STEP * (time.perf_counter() - step_s)):
                    return
            left = list(busy)
            if not left:
                break
        self._outcomes |= busy
        report, took_s = self.report, time.perf_counter() - began_s
        huge_mb, others = report.bytes_huge / 1e6, dict(report.bytes_left)
        log.info("%.0f MB were made of huge pages in %.1f s; left: %s", huge_mb, took_s, others)

    def _collapse(self, address: int) -> int:
        outcome = self._call(address, HUGE_BYTES, COLLAPSE)
        if outcome != errno.EINVAL:
            return outcome
        # An older kernel, or memory that is not touched yet: then as soon as the kernel can.
        return self._call(address, HUGE_BYTES, mmap.MADV_HUGEPAGE) or _ASKED


def huge_pages_for(transport: Transport, *, is_wanted: bool) -> HugePages:
    """Huge pages for memory that peers copy through the kernel; elsewhere a reason for none."""
    if not is_wanted:
        return HugePages("open(huge_pages=False)")
    if environment.value(environment.HUGE_PAGES) == "0":
        return HugePages(f"{environment.HUGE_PAGES}=0")
    if not transport.is_copied_from:
        return HugePages("no memory is read through the kernel here")
    return HugePages(obstacle())


def _reason(outcome: int) -> str:
    if outcome == _ASKED:
        return "not now; the kernel may do it there at its first touch"
    if outcome == errno.EAGAIN:
        return "it was being read, or is pinned"
    if outcome == errno.EBUSY:
        return "the memory limit of the cgroup"
    if outcome == errno.ENOMEM:
        return "it is not mapped any more, or the kernel has no free huge page"
    return f"the kernel says: {os.strerror(outcome)}"
