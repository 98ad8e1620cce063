# ruff: noqa: N802  # the driver's own names
"""Copies by CUDA's driver: here one of Python, whose devices are memory of this process."""

import ctypes
import logging
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from torch_ros.copies import crossing
from torch_ros.copies.crossing import NON_BLOCKING, PORTABLE, RELAXED, CrossingFailed, CudaCrossing

GLOBAL = 0  # the mode of a thread that has not said otherwise
FAILED = 700
CONTEXTS = 0x7F00_0000_0000
STREAMS = 0x7E00_0000_0000
DEVICES = 2
NAMES = {101: b"CUDA_ERROR_INVALID_DEVICE", FAILED: b"CUDA_ERROR_ILLEGAL_ADDRESS", 999: b"UNKNOWN"}


class Driver:
    """Copies when its stream is waited for. Its functions have the types of the real ones.

    Attributes:
        calls: The names of what was called.
        fails: The names of what fails.
    """

    def __init__(self):
        self.calls, self.fails, self.pinned = [], set(), {}
        self._streams, self._queues = {}, {}
        self._threads, self._functions = threading.local(), []

    def load(self):
        given = crossing._CALLS.items()
        return SimpleNamespace(**{name: self._function(name, types) for name, types in given})

    @property
    def mode(self):
        return getattr(self._threads, "mode", GLOBAL)

    @property
    def contexts(self):
        self._threads.contexts = getattr(self._threads, "contexts", [])
        return self._threads.contexts

    def _function(self, name, types):
        def call(*given):
            self.calls.append(name)
            return FAILED if name in self.fails else getattr(self, name)(*given) or 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)

    def cuGetErrorName(self, code, into):
        ctypes.c_char_p.from_address(into).value = NAMES[code]

    def cuDeviceGet(self, into, device):
        ctypes.c_int.from_address(into).value = device + 5
        return 0 if device < DEVICES else 101

    def cuDevicePrimaryCtxRetain(self, into, number):
        ctypes.c_void_p.from_address(into).value = CONTEXTS + number - 5

    def cuThreadExchangeStreamCaptureMode(self, into):
        mode = ctypes.c_int.from_address(into)
        self._threads.mode, mode.value = mode.value, self.mode

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context)

    def cuCtxPopCurrent_v2(self, into):
        ctypes.c_void_p.from_address(into).value = self.contexts.pop()

    def cuStreamCreate(self, into, flags):
        made = STREAMS + len(self._streams)
        ctypes.c_void_p.from_address(into).value = made
        self._streams[made], self._queues[made] = self.contexts[-1], []
        return 0 if flags == NON_BLOCKING else 999

    def cuMemHostRegister_v2(self, address, size, flags):
        self.pinned[address] = size
        return 0 if self.mode == RELAXED and self.contexts and flags == PORTABLE else 999

    def cuMemHostUnregister(self, address):
        del self.pinned[address]

    def cuMemcpyDtoHAsync_v2(self, to, source, size, stream):
        return self._put(to, source, size, stream)

    def cuMemcpyHtoDAsync_v2(self, to, source, size, stream):
        return self._put(to, source, size, stream)

    def _put(self, to, source, size, stream):
        self._queues[stream].append((to, source, size))
        return 0 if self.mode == RELAXED and self._streams[stream] == self.contexts[-1] else 999

    def cuStreamSynchronize(self, stream):
        while self._queues[stream]:
            ctypes.memmove(*self._queues[stream].pop(0))
        return 0 if self.mode == RELAXED else 999


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def cuda(driver):
    made = CudaCrossing(driver.load)
    for device in range(DEVICES):
        made.open(device)
    yield made
    assert driver.mode == GLOBAL
    assert not driver.contexts


def parts_of(devices, arrays, views):
    return [
        (d, a.ctypes.data, memoryview(v)) for d, a, v in zip(devices, arrays, views, strict=True)
    ]


@pytest.mark.parametrize("way", ["out", "into"])
def test_what_is_copied_is_there_at_once(cuda, way):
    devices = [0, 1, 1, 0]
    there = [np.arange(size, dtype=np.uint8) for size in (1, 200, 7, 100)]
    here = [bytearray(array.nbytes) for array in there]
    expected = [bytes(array) for array in there]
    if way == "into":
        here, there = [bytearray(b) for b in expected], [np.zeros_like(a) for a in there]
    getattr(cuda, way)(parts_of(devices, there, here))
    assert [bytes(array) for array in there] == [bytes(view) for view in here] == expected


@pytest.mark.parametrize("fails", ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"])
def test_a_failure_says_which_call_it_was_and_leaves_the_thread_as_it_was(cuda, driver, fails):
    driver.fails = {fails}
    parts = parts_of([0], [np.zeros(9, np.uint8)], [bytearray(9)])
    with pytest.raises(CrossingFailed, match=f"{fails}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda.out(parts)


def test_a_copy_that_has_begun_is_over_when_the_next_one_fails(cuda):
    target = np.zeros(9, np.uint8)
    parts = parts_of([0, 0], [target, target], [bytearray(b"x" * 9), b"cannot be written"])
    with pytest.raises(TypeError):
        cuda.into(parts)
    assert bytes(target) == b"x" * 9


def test_what_an_interrupted_copy_has_begun_is_waited_for(cuda, driver):
    target, held = np.zeros(9, np.uint8), bytearray(b"x" * 9)
    driver.fails = {"cuStreamSynchronize"}
    with pytest.raises(CrossingFailed):
        cuda.into(parts_of([1], [target], [held]))
    cuda.settle(1)  # no error
    driver.fails = set()
    assert not target.any()
    cuda.settle(1)
    assert bytes(target) == b"x" * 9


def test_a_device_is_opened_once(cuda, driver):
    cuda.open(1)
    assert driver.calls.count("cuStreamCreate") == 2 * DEVICES
    assert driver.calls.count("cuDevicePrimaryCtxRetain") == DEVICES


def test_a_device_that_is_not_there_is_refused(cuda):
    with pytest.raises(CrossingFailed, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        cuda.open(DEVICES)


def test_memory_is_pinned_until_it_is_unpinned(cuda, driver):
    views = [memoryview(bytearray(100)) for _ in range(2)]
    cuda.pin(views[0])
    assert [*driver.pinned.values()] == [100]
    for view in (*views, *views):
        cuda.unpin(view)
    assert not driver.pinned
    assert driver.calls.count("cuMemHostUnregister") == 1


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(cuda, driver, caplog):
    driver.fails = {"cuMemHostRegister_v2"}
    view = memoryview(bytearray(3))
    cuda.pin(view)
    [said] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "slow" in said.message
    cuda.out([(0, np.array([1, 2, 3], np.uint8).ctypes.data, view)])
    cuda.unpin(view)
    assert "cuMemHostUnregister" not in driver.calls


def test_nothing_is_loaded_before_a_device_is_opened():
    def load():
        raise OSError("there is none")

    made = CudaCrossing(load)
    made.unpin(memoryview(bytearray(3)))
    with pytest.raises(OSError, match="there is none"):
        made.open(0)


def test_a_forked_child_calls_nothing(cuda, driver):
    count = len(driver.calls)
    parts = parts_of([0], [np.zeros(9, np.uint8)], [bytearray(9)])
    if not (child := os.fork()):
        refused = 0
        try:
            for ask in (lambda: cuda.out(parts), lambda: cuda.open(1), lambda: cuda.open(0)):
                try:
                    ask()
                except CrossingFailed:
                    refused += 1
            cuda.settle(0)
            os._exit(0 if refused == 3 and len(driver.calls) == count else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
