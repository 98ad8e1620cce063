"""Memory of ours that peers read: it stays mapped after use, since a peer may ask for it late.

TCP cannot read remote memory, so UCX at the source copies what a reader asked for. A reader that
was stopped for long, or not waited for (`drain_s`), asks for memory that the source has let go;
if that is no longer mapped, the source ends with SIGSEGV. The word tells the reader that what it
got does not count.
"""

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

_all: list[mmap.mmap] = []  # so that none is unmapped, also one that Ctrl-C left without an owner
_spare: list[mmap.mmap] = []


class LastingMemory:
    """Zeroed bytes on pages of their own. `close` gives the pages back, and keeps the addresses."""

    def __init__(self, size_bytes: int) -> None:
        self._map: mmap.mmap | None = _taken(size_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[:size_bytes]

    def close(self) -> None:
        """Nobody here uses it any more; whoever reads it gets zeros, or what comes to lie there."""
        memory, self._map = self._map, None
        if memory is not None:
            try:
                memory.madvise(mmap.MADV_DONTNEED)
            except OSError:  # its pages are locked
                self.bytes[:] = 0
            _spare.append(memory)


def _taken(size_bytes: int) -> mmap.mmap:
    """A mapping of at most twice that size, used before or new. It belongs to who takes it."""
    pages = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    for spare in sorted(_spare, key=len):
        if pages <= len(spare) <= 2 * pages:
            with suppress(ValueError):  # another thread was faster
                _spare.remove(spare)
                return spare
    made = mmap.mmap(-1, pages, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _all.append(made)
    return made
