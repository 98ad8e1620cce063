"""A source that does as it is told, a line of words each, and answers in JSON. Run, never imported.

python source.py '{"sizes": [5000, 70000], "files": 600}'

Its regions lie apart, with canaries between them, in memory that no allocator uses.
"""

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import sys
import threading
import time

import numpy as np
from ways import transport_of

from torch_ros.p2p import shared
from torch_ros.spans import Region

CANARY, GAP = 0xA5, 8192


def pattern(number, size):
    """The first content of region `number`: the test computes it too."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


class Source:
    """Regions of these sizes, each a registration of its own.

    Args:
        way: By which it is read.
        limit: Of open files, if any; `files` of them are taken before the transport is made.
        is_file: The regions are a file in memory, which can be cut short.
    """

    def __init__(self, sizes, way="tcp", limit=0, files=0, is_file=False, pipe="ignored"):
        if limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        if pipe == "default":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        self.taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(files)]
        total = sum(sizes) + GAP * (len(sizes) + 1)
        self.file = os.memfd_create("regions") if is_file else -1
        if is_file:
            os.ftruncate(self.file, total)
        is_mapped = way == "mapped" and not is_file
        memory = shared.allocate(total) if is_mapped else mmap.mmap(self.file, total)
        self.memory = np.frombuffer(memory, np.uint8)
        self.memory[:] = CANARY
        self.regions, at = [], GAP
        for number, size in enumerate(sizes):
            self.regions.append(self.memory[at : at + size])
            self.regions[-1][:] = pattern(number, size)
            at += size + GAP
        self.transport = transport_of(way)
        self.registrations = [self._register([region]) for region in self.regions]
        self.children, self.expected = [], self.memory.copy()

    def _register(self, arrays):
        return self.transport.register([Region(a.ctypes.data, a.nbytes) for a in arrays])

    def card(self):
        return self.transport.connection.hex()

    def where(self):
        """The descriptor, address and size of each region."""
        return [
            (made.descriptor.hex(), region.ctypes.data, region.nbytes)
            for made, region in zip(self.registrations, self.regions, strict=True)
        ]

    def register(self, number):
        """Once more, or again; its descriptor."""
        self.registrations[int(number)] = made = self._register([self.regions[int(number)]])
        return made.descriptor.hex()

    def unregister(self, number):
        """How long that took."""
        started_s = time.perf_counter()
        self.registrations[int(number)].close()
        return time.perf_counter() - started_s

    def fill(self, number, value):
        self.regions[int(number)][:] = int(value)
        self.expected = self.memory.copy()

    def restore(self, number):
        self.regions[int(number)][:] = pattern(int(number), self.regions[int(number)].size)
        self.expected = self.memory.copy()

    def is_untouched(self):
        """Whether no byte of regions and canaries has changed but by `fill` and `restore`."""
        return bool((self.memory == self.expected).all())

    def threads(self):
        return sorted(thread.name for thread in threading.enumerate())

    def hold(self, seconds):
        """Sleep in C with the GIL."""
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))

    def fork(self, count):
        """Children that live until the parent has ended."""
        for _ in range(int(count)):
            child = os.fork()
            if child == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                signal.pause()
            self.children.append(child)
        return self.children

    def cut(self, size):
        """Cut the file of the regions short, so many bytes behind the first one's start."""
        os.ftruncate(self.file, GAP + int(size))

    def close(self):
        self.transport.close()


def main():
    source = Source(**json.loads(sys.argv[1]))
    gc.freeze()
    print(json.dumps("here"), flush=True)
    for line in sys.stdin:
        do, *words = line.split()
        if do == "end":
            return  # with whatever is under way
        print(json.dumps(getattr(source, do)(*words)), flush=True)


if __name__ == "__main__":
    main()
