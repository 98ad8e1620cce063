"""Reading another process's memory through the kernel (cross memory attach), and in parallel.

UCX does the same within a host, on one thread: the kernel looks up and holds every page of the
source, so that a core copies at half the speed of memory. Two cores copy twice as much.
"""

import ctypes
import errno
import os
from itertools import pairwise

import numpy as np

from torch_ros.spans import Spans

ROWS_MAX = 1024  # of one call, by the kernel's limit
LOOKS_MAX = 8  # at what changes meanwhile

_Vector = ctypes.c_uint64 * 2  # an address and bytes

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)  # Linux with glibc or musl
if _readv:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)


def is_allowed(ucx_tls: str) -> bool:
    """Whether this value of UCX_TLS lets UCX read memory of processes here; "": unset."""
    names = set(ucx_tls.lstrip("^").split(",")) if ucx_tls else {"all"}
    return ucx_tls.startswith("^") != bool(names & {"all", "cma", "shm", "sm"})


def read(pid: int, spans: Spans) -> None:
    """Copy memory of another process. Releases the GIL.

    Args:
        pid: A process of this process's user, in the same namespace.
        spans: A row each: address there, address here, bytes.

    Raises: OSError: EPERM: the kernel does not allow it (ptrace); ESRCH: the process is gone;
        EFAULT: a byte is not there. Some bytes may have been copied.
    """
    if len(spans) == 1:  # as most are, and this takes a tenth of the time
        [[source, target, size_bytes]] = spans.tolist()
        count = _copied(pid, _Vector(target, size_bytes), 1, _Vector(source, size_bytes), 1)
        spans = _behind(spans, count) if count < size_bytes else spans[:0]
    while len(spans):
        some = spans[:ROWS_MAX]
        here, there = np.ascontiguousarray(some[:, 1:]), np.ascontiguousarray(some[:, [0, 2]])
        count = _copied(pid, here.ctypes.data, len(some), there.ctypes.data, len(some))
        spans = _behind(spans, count)


def _copied(pid: int, here: object, count_here: int, there: object, count_there: int) -> int:
    """How many bytes one call has copied; at least one. Raises: OSError: As `read`."""
    if _readv is None:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv")
    count: int = _readv(pid, here, count_here, there, count_there, 0)
    if count <= 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


class Answer:
    """A few bytes of another process, in memory of its own until they `land`.

    They are never torn, though the kernel copies bytes and promises no more: one call copies them
    twice, one after the other, until both are the same.
    """

    def __init__(self, pid: int, source: int, target: int, size_bytes: int) -> None:
        self._pid, self._seen = pid, (ctypes.c_ubyte * (2 * size_bytes))()
        self._here = _Vector(ctypes.addressof(self._seen), 2 * size_bytes)
        self._there = (ctypes.c_uint64 * 4)(*(source, size_bytes) * 2)
        both = memoryview(self._seen).cast("B")
        self._from, self._again = both[:size_bytes], both[size_bytes:]
        self._to = memoryview((ctypes.c_ubyte * size_bytes).from_address(target)).cast("B")

    def look(self) -> bool:
        """Return whether it is whole. Raises: OSError: As `read`."""
        for _ in range(LOOKS_MAX):
            if _copied(self._pid, self._here, 1, self._there, 2) < len(self._seen):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            if bytes(self._from) == bytes(self._again):
                return True
        return False

    def land(self) -> None:
        self._to[:] = self._from


def _behind(spans: Spans, count: int) -> Spans:
    """Return the rest of `spans` after the first `count` bytes: a call may stop halfway."""
    ends = np.cumsum(spans[:ROWS_MAX, 2])
    row = int(np.searchsorted(ends, count, side="right"))
    rest = spans[row:]
    if row < len(ends) and (done := count - int(ends[row] - spans[row, 2])):
        rest = rest.copy()
        rest[0] += np.array([done, done, -done], np.int64).view(np.uint64)  # it wraps
    return rest


def shares(spans: Spans, count: int) -> list[Spans]:
    """The same bytes in as many parts of equal sizes, cut anywhere; those without any left out."""
    ends = np.cumsum(spans[:, 2]).astype(np.int64)
    sizes = spans[:, 2].astype(np.int64)
    starts, total = ends - sizes, int(ends[-1]) if len(ends) else 0
    parts = []
    for low, high in pairwise(total * part // count for part in range(count + 1)):
        skipped = np.clip(low - starts, 0, sizes)
        taken = np.clip(high - starts, 0, sizes) - skipped
        step = skipped.astype(np.uint64)
        part = np.stack((spans[:, 0] + step, spans[:, 1] + step, taken.astype(np.uint64)), axis=1)
        parts.append(part[taken > 0])
    return [part for part in parts if len(part)]
