"""Devices that are memory of this process, at addresses that nothing of the host can read."""

import ctypes
import threading

import numpy as np

from torch_ros.copies.crossing import CrossingFailed
from torch_ros.spans import Region

SHIFT = 1 << 59  # beyond all that a process may have mapped


class Devices:
    """A `Crossing` to them.

    Attributes:
        opened: The devices.
        pinned: Addresses and sizes, with the thread that asked.
        calls: How many copies each thread has asked for.
        kept: Memory that lasts as long as they do, because peers read or write it.
        before: Called with "out" or "into", the parts, and before each copy.
    """

    def __init__(self):
        self.opened, self.pinned, self.settled, self.calls = [], [], [], []
        self.before = lambda way, parts: None
        self.kept, self._held = [], []

    def region(self, device, array):
        """Memory of the device, which is seen as `array` on the host."""
        self._held.append((device, array.ctypes.data, array.ctypes.data + array.nbytes))
        return Region(there(device, array.ctypes.data), array.nbytes, device)

    def open(self, device):
        self.opened.append(device)

    def pin(self, view):
        assert self.opened
        self.pinned.append((address_of(view), len(view), threading.get_ident()))

    def unpin(self, view):
        self.pinned = [each for each in self.pinned if each[0] != address_of(view)]

    def out(self, parts):
        self._begin("out", parts)
        for device, address, view in parts:
            ctypes.memmove(address_of(view), self._seen(device, address, len(view)), len(view))

    def into(self, parts):
        self._begin("into", parts)
        for device, address, view in parts:
            ctypes.memmove(self._seen(device, address, len(view)), address_of(view), len(view))

    def settle(self, device):
        self.settled.append(device)

    def _begin(self, way, parts):
        assert {device for device, _, _ in parts} <= set(self.opened)
        self.calls.append((way, threading.get_ident()))
        self.before(way, parts)

    def _seen(self, device, address, size):
        seen = reached = address - there(device, 0)
        for where, start, end in sorted(self._held):
            if where == device and start <= reached < end:
                reached = end
        if reached < seen + size:
            raise CrossingFailed("CUDA_ERROR_INVALID_VALUE")
        return seen


def there(device, address):
    return address + SHIFT + device * (SHIFT >> 8)


def address_of(view):
    return np.frombuffer(view, np.uint8).ctypes.data


class OnDevice:
    """A `Transport` whose memory is all on device 0, for those who name it as host memory."""

    def __init__(self, base, devices):
        self._base, self._devices = base, devices

    def __getattr__(self, name):
        return getattr(self._base, name)

    def register(self, regions):
        for region in regions:
            self._devices._held.append((0, region.address, region.address + region.size_bytes))
        return self._base.register(
            [Region(there(0, region.address), region.size_bytes, 0) for region in regions]
        )

    def connect(self, connection):
        return _PeerOnDevice(self._base.connect(connection))


class _PeerOnDevice:
    def __init__(self, base):
        self._base = base

    def __getattr__(self, name):
        return getattr(self._base, name)

    def prepare(self, spans, **_):
        moved = spans + np.array([there(0, 0), there(0, 0), 0], np.uint64)
        return self._base.prepare(moved, source_device=0, target_device=0)
