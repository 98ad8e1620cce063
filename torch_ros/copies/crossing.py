"""Copies between memory of a GPU and host memory, on behalf of peers.

They are calls of CUDA's driver, without torch. Its calls leave a thread as it was: no other GPU
gets a context by them, and no stream of torch's pool is used, which a trainer's kernels may be on,
or a capture.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch_ros.printable import log_of

log = log_of(__name__)

LIBRARY = "libcuda.so.1"
RELAXED, NON_BLOCKING, PORTABLE = 2, 1, 1  # a capture's mode; flags of a stream, of pinned memory

_POINTER, _SIZE, _ADDRESS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_POINTER, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuStreamCreate": (_POINTER, ctypes.c_uint),
    "cuStreamSynchronize": (_POINTER,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuGetErrorName": (ctypes.c_int, _POINTER),
}

Part = tuple[int, int, memoryview]  # a device, an address there, and as many bytes of host memory


class CrossingFailed(OSError):
    """A device does not copy; why."""


class Crossing(Protocol):
    """The way between devices and host memory. Any thread may call, at any time.

    Each raises CrossingFailed. A call that copies returns, or raises, when no copy is under way.
    """

    def open(self, device: int) -> None:
        """Make all that copies from and to it need. Idempotent. May wait for what the device does.

        Raises: OSError: This process cannot reach it.
        """

    def pin(self, view: memoryview) -> None:
        """Have copies from and to this memory be quick, if that can be. A device is open. May wait
        for what devices do. No error if it fails.
        """

    def unpin(self, view: memoryview) -> None:
        """Undo that, before the memory goes. Idempotent; no error."""

    def out(self, parts: Sequence[Part]) -> None:
        """Copy from devices that are open to host memory."""

    def into(self, parts: Sequence[Part]) -> None:
        """Copy from host memory to devices that are open."""

    def settle(self, device: int) -> None:
        """Wait for what an `into` that was interrupted (Ctrl-C) has begun. No error."""


@dataclass(frozen=True, slots=True)
class _Gate:
    """An open device: its primary context, which torch uses too, and a stream each way."""

    context: int | None
    out: int | None
    into: int | None


def _library() -> Any:
    """Raises: OSError: There is none."""
    library = ctypes.CDLL(LIBRARY)  # its calls release the GIL
    for name, types in _CALLS.items():
        getattr(library, name).argtypes = types
    library.cuInit(0)  # as torch has done; if it fails, so do all others
    return library


class CudaCrossing:
    """A `Crossing` by CUDA's driver, of which nothing is loaded before a device is opened."""

    def __init__(self, load: Callable[[], Any] = _library) -> None:
        self._load = load
        self._driver: Any = None
        self._pid = 0
        self._gates: dict[int, _Gate] = {}
        self._pinned: set[int] = set()

    def open(self, device: int) -> None:
        if self._driver is None:
            driver, self._pid = self._load(), os.getpid()
            self._driver = driver
        with self._relaxed():
            if device in self._gates:
                return
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        with self._at(context.value):
            streams = [ctypes.c_void_p() for _ in range(2)]
            for stream in streams:
                self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self._gates.setdefault(device, _Gate(context.value, *(each.value for each in streams)))

    def pin(self, view: memoryview) -> None:
        gate, here = next(iter(self._gates.values())), _address(view)
        try:
            with self._at(gate.context):
                self._call("cuMemHostRegister_v2", here, len(view), PORTABLE)
            self._pinned.add(here)
        except CrossingFailed as error:
            log.warning("memory for copies from and to GPUs is not pinned, so slow: %s", error)

    def unpin(self, view: memoryview) -> None:
        here = _address(view)
        if here in self._pinned:
            self._pinned.discard(here)
            gate = next(iter(self._gates.values()))
            with suppress(CrossingFailed), self._at(gate.context):
                self._call("cuMemHostUnregister", here)

    def out(self, parts: Sequence[Part]) -> None:
        for gate, some in self._by_gate(parts):
            with self._at(gate.context), self._ended(gate.out):
                for _, address, view in some:
                    given = _address(view), address, len(view), gate.out
                    self._call("cuMemcpyDtoHAsync_v2", *given)

    def into(self, parts: Sequence[Part]) -> None:
        for gate, some in self._by_gate(parts):
            with self._at(gate.context), self._ended(gate.into):
                for _, address, view in some:
                    given = address, _address(view), len(view), gate.into
                    self._call("cuMemcpyHtoDAsync_v2", *given)

    def settle(self, device: int) -> None:
        gate = self._gates[device]
        with suppress(CrossingFailed), self._at(gate.context), self._ended(gate.into):
            pass

    def _by_gate(self, parts: Sequence[Part]) -> Iterator[tuple[_Gate, Sequence[Part]]]:
        for device in dict.fromkeys(device for device, _, _ in parts):
            yield self._gates[device], [part for part in parts if part[0] == device]

    @contextmanager
    def _ended(self, stream: int | None) -> Iterator[None]:
        """All that is put on this stream within the block is over when that ends."""
        try:
            yield
        finally:
            self._call("cuStreamSynchronize", stream)

    @contextmanager
    def _at(self, context: int | None) -> Iterator[None]:
        """The calls of the block are about this context's device."""
        with self._relaxed():
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        """The calls of the block end no capture of another thread, nor are refused for it."""
        if self._pid != os.getpid():
            raise CrossingFailed("CUDA belongs to the process that this one was forked from")
        mode = ctypes.c_int(RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _call(self, name: str, *given: object) -> None:
        if code := getattr(self._driver, name)(*given):
            said = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(said))
            raise CrossingFailed(f"{name}: {(said.value or b'').decode() or code}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@cache
def cuda() -> CudaCrossing:
    """This process's, with which its streams live."""
    return CudaCrossing()
