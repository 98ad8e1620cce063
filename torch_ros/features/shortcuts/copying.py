"""Copies spans with several threads: out of memory mapped here, or in any other way."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch_ros.copies import cgroups
from torch_ros.features.shortcuts import cma
from torch_ros.p2p import ucx
from torch_ros.spans import Spans

THREADS_MAX = 4  # a few fill the memory's channels
# The least that a thread should have to copy: to start one takes some 50 us.
SHARE_BYTES = 1 << 20
# A thread that is done with its part finds another, and one without a core keeps nobody waiting.
PARTS_PER_THREAD = 2
WAIT_S = 0.005  # for a copy; meanwhile nobody looks at the clock, or after readers
# To copy less takes less time than to give up the GIL, and to wait until the thread that took it
# gives it back: up to 5 ms in Python.
HOLD_BYTES = 256 << 10

# The same function twice: called without the GIL, and with it.
_move, _move_at_once = ctypes.CDLL(None).memmove, ctypes.PyDLL(None).memmove
for _each in (_move, _move_at_once):
    _each.argtypes, _each.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


def thread_count() -> int:
    """Return how many cores may copy for this process while all of torchrun's on this host read."""
    if not cma.is_allowed(ucx.told()):
        return 0
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = min(len(os.sched_getaffinity(0)), cgroups.cores())
    cores //= max(1, int(ranks) if ranks.isdecimal() else 1)
    return max(1, int(min(cores, THREADS_MAX)))


def copy(spans: Spans) -> None:
    for source, target, size_bytes in spans.tolist():
        move = _move if size_bytes >= HOLD_BYTES else _move_at_once
        move(target, source, size_bytes)


class CopyThreads:
    """The threads that copy for a transport; 0: whoever waits copies, mapped memory only."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(max(1, count), "torch_ros copies")

    def shares(self, spans: Spans) -> list[Spans]:
        """Cut spans into parts for the threads, none of them too small to be worth one."""
        wanted = int(spans[:, 2].sum()) // SHARE_BYTES
        return cma.shares(spans, max(1, min(self.count * PARTS_PER_THREAD, wanted)))

    def begin(self, copying: SharedCopy) -> None:
        """Have the threads do its parts, once those of all that began before it are taken."""
        if len(copying.tasks) > 1:  # a single part is left to whoever waits
            copying.over = threading.Event()
            try:
                for _ in range(self.count):
                    self._pool.submit(copying.run)
            except RuntimeError:  # no thread to be had: who waits copies
                copying.over = None

    def close(self) -> None:
        self._pool.shutdown()


class SharedCopy:
    """Something that is copied in parts, each by the first thread that comes."""

    def __init__(self, parts: Sequence[Callable[[], None]] = ()) -> None:
        self.tasks: list[_Task] = [_Task(part) for part in parts]
        self.over: threading.Event | None = None  # threads were told; else whoever waits copies

    def run(self) -> None:
        """Do all parts that no thread has taken."""
        for task in self.tasks:
            if not task.is_taken:
                task.run()
        if (over := self.over) and all(task.is_over for task in self.tasks):
            over.set()

    def is_done(self) -> bool:
        """Wait a little for all parts, and say whether they have been done.

        Raises: Exception: As a part did; others may still run. OSError: One was dropped: ECANCELED.
        """
        if self.over:
            self.over.wait(WAIT_S)
        else:
            self.run()
        for task in self.tasks:
            if task.error is not None:
                raise task.error
        return all(task.is_over for task in self.tasks)

    def drop(self) -> None:
        """Keep parts from being begun. None runs any more when this returns or raises."""
        try:
            for task in self.tasks:
                task.is_taken = True  # or threads begin it while another one is waited for
            for task in self.tasks:
                task.drop()
        except BaseException:  # Ctrl-C: the memory may be freed after this
            self.drop()
            raise


class _Task:
    """A part of a copy. Its lock is held while it is done, so that `drop` waits for that."""

    def __init__(self, part: Callable[[], None]) -> None:
        self._part, self._lock, self.is_taken = part, threading.Lock(), False
        self.is_over = False
        self.error: Exception | None = None

    def run(self) -> None:
        """Do the part, unless a thread has taken it; note its error, or that it is over."""
        with self._lock:
            if not self.is_taken:
                self.is_taken = True
                try:
                    self._part()
                except Exception as error:  # noqa: BLE001  # raised to whoever waits
                    self.error = error
                self.is_over = True  # not after Ctrl-C: then `drop` says that it was ended

    def drop(self) -> None:
        """Say that the part was ended, unless it is over. Returns when no thread is at it."""
        with self._lock:
            if not self.is_over:
                self.error, self.is_over = OSError(errno.ECANCELED, "it was ended"), True
