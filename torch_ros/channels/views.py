"""Memory by its addresses, as the kernel is given it, and buffers for sealed pieces."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

KEPT_MAX = 16
LEAST_BYTES = 64 << 10  # of what is worth keeping

_WRITE = 0x200  # PyBUF_WRITE
_memoryview = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def at(address: int, size_bytes: int) -> memoryview:
    """Memory of this process, which nothing keeps allocated: only for calls of the kernel, which
    answer EFAULT where there is none, and for targets that are registered.
    """
    view: memoryview = _memoryview(address, size_bytes, _WRITE)
    return view


def rest(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The rest of these when so many bytes have gone."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


class PieceBuffers:
    """Buffers of up to one size, used again."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._kept: list[bytearray | memoryview] = []

    def keep(self, buffer: memoryview) -> None:
        """One more, of that size."""
        self._kept.append(buffer)

    @contextmanager
    def one(self, size_bytes: int) -> Iterator[memoryview]:
        """A buffer of so many bytes, until the block ends."""
        is_small = size_bytes <= LEAST_BYTES
        try:
            whole: bytearray | memoryview
            whole = bytearray(size_bytes) if is_small else self._kept.pop()
        except IndexError:
            whole = bytearray(self._size_bytes)
        try:
            yield memoryview(whole)[:size_bytes]
        finally:
            if not is_small and len(self._kept) < KEPT_MAX:
                self._kept.append(whole)
