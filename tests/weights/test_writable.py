"""Which memory of this process may not be written to."""

import ctypes
import mmap

import numpy as np

from torch_ros.weights import writable


def test_the_first_span_that_may_not_be_written_is_found_to_the_byte(monkeypatch, tmp_path):
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 3 * page)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    middle, end = start + page, start + 2 * page
    assert libc.mprotect(ctypes.c_void_p(middle), page, mmap.PROT_READ) == 0

    def first(*spans):
        return writable.first_unwritable(*np.array(spans, np.uint64).reshape(-1, 2).T)

    beside = [(start, middle), (end, end + page), (middle, middle)]  # the last one is empty
    assert first() is None
    assert first(*beside) is None
    for inside in [(middle - 1, middle + 1), (end - 1, end), (start, end + page)]:
        assert first(*beside, inside, (middle, end)) == 3
    monkeypatch.setattr(writable, "_OWN_MAPS", tmp_path / "none")
    assert first((middle, end)) is None
