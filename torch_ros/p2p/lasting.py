"""Memory of ours that peers read: it stays mapped after use, since a peer may ask for it late.

TCP cannot read remote memory, so UCX at the source copies what a reader asked for. A reader that
was stopped for long, or not waited for (`drain_s`), asks for memory that the source has let go;
if that is no longer mapped, the source ends with SIGSEGV. The word tells the reader that what it
got does not count.
"""

import mmap
import threading

import numpy as np

_spare: list[mmap.mmap] = []
_lock = threading.Lock()


class LastingMemory:
    """Zeroed bytes on pages of their own. `close` gives the pages back, and keeps the addresses."""

    def __init__(self, size_bytes: int) -> None:
        with _lock:
            fitting = [spare for spare in _spare if len(spare) >= size_bytes]
            self._map = min(fitting, key=len, default=None)
            if self._map is not None:
                _spare.remove(self._map)
        if self._map is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, max(1, size_bytes), flags)
        self.bytes = np.frombuffer(self._map, np.uint8)[:size_bytes]

    def close(self) -> None:
        """Nobody here uses it any more; whoever reads it gets zeros, or what comes to lie there."""
        memory, self._map = self._map, None
        if memory is not None:
            memory.madvise(mmap.MADV_DONTNEED)
            with _lock:
                _spare.append(memory)
