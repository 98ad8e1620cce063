"""Huge pages under registered memory: where, once, in the background, and never at a price."""
# needs features shortcuts

import errno
import itertools
import mmap
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_ros.features.huge_pages import pages as huge_pages
from torch_ros.features.huge_pages.pages import (
    COLLAPSE,
    HUGE_BYTES,
    PAUSE_PER_STEP,
    TRIES,
    HugePageReport,
    HugePages,
    huge_pages_for,
    runs,
)
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.memory.transport import MemoryTransport
from torch_ros.shard.tensors import Tensors
from torch_ros.spans import Region
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.registered import LocalState

PAGE = mmap.PAGESIZE
BASE = 7 * HUGE_BYTES
WAIT_S = 20.0
BUSY = "it was being read, or is pinned"
LATER = "not now; the kernel may do it there at its first touch"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for name in ("BEGIN_S", "RETRY_S", "PAUSE_PER_STEP"):
        monkeypatch.setattr(huge_pages, name, 0.0)


# Which ranges


def covered(regions):
    """The same, page by page."""
    pages = {
        page
        for region in regions
        for page in range(region.address // PAGE, -(-(region.address + region.size_bytes) // PAGE))
    }
    gaps = {
        page
        for low, high in itertools.pairwise(sorted(pages))
        if high - low <= 3
        for page in range(low + 1, high)
    }
    each = HUGE_BYTES // PAGE
    whole = {page // each for page in pages}
    return {n * HUGE_BYTES for n in whole if {*range(n * each, (n + 1) * each)} <= pages | gaps}


REGIONS = st.builds(
    Region,
    st.integers(0, 3 * HUGE_BYTES).map(lambda offset: BASE + offset),
    st.integers(1, 2 * HUGE_BYTES) | st.sampled_from((1, PAGE, HUGE_BYTES, HUGE_BYTES + PAGE)),
)


@given(st.lists(REGIONS, max_size=6))
def test_what_regions_cover_together_is_what_their_pages_cover(regions):
    rows = runs(regions).tolist()
    assert {at for low, high in rows for at in range(low, high, HUGE_BYTES)} == covered(regions)
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(rows))


@pytest.mark.parametrize(("gap", "found"), [(0, 1), (PAGE, 1), (2 * PAGE, 1), (3 * PAGE, 0)])
def test_small_neighbours_cover_a_huge_page_over_gaps_of_two_pages(gap, found):
    half = HUGE_BYTES // 2
    regions = [Region(BASE + 64, half - 64), Region(BASE + half + gap, half - gap - 100)]
    assert len(runs(regions)) == found


# The kernel's answers


class Kernel:
    """Answers `madvise` with what is in store for an address, the last of it again and again."""

    def __init__(self, **answers):
        self.answers = {
            BASE + n * HUGE_BYTES: list(some) for n, some in enumerate(answers.values())
        }
        self.calls = []

    def __call__(self, address, size_bytes, advice):
        self.calls.append((address, advice))
        if advice == mmap.MADV_HUGEPAGE:
            return 0
        assert size_bytes == HUGE_BYTES
        some = self.answers[address]
        return some.pop(0) if len(some) > 1 else some[0]

    def counts(self):
        return [sum(at == address for at, _ in self.calls) for address in sorted(self.answers)]


def settled(pages):
    deadline = time.monotonic() + WAIT_S
    while pages._has_thread:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return pages.report


def follow(pages, *regions):
    pages.follow(regions)
    return settled(pages)


def test_each_errno_has_its_consequence_and_none_is_an_error():
    kernel = Kernel(
        done=[0],
        free_later=[errno.EAGAIN, errno.EBUSY, 0],
        never=[errno.EAGAIN],
        old=[errno.EINVAL],
        full=[errno.ENOMEM],
        limited=[errno.EBUSY],
        other=[errno.EPERM],
    )
    report = follow(HugePages(call=kernel), Region(BASE, 7 * HUGE_BYTES + 5))
    assert (report.bytes_huge, report.bytes_waiting) == (2 * HUGE_BYTES, 0)
    no_memory = "it is not mapped any more, or the kernel has no free huge page"
    other = f"the kernel says: {os.strerror(errno.EPERM)}"
    limit = "the memory limit of the cgroup"
    assert report.bytes_left == dict.fromkeys((BUSY, LATER, no_memory, limit, other), HUGE_BYTES)
    assert kernel.counts() == [1, 3, TRIES, 2, 1, TRIES, 1]
    assert (BASE + 3 * HUGE_BYTES, mmap.MADV_HUGEPAGE) in kernel.calls


def test_memory_that_is_registered_again_is_left_as_it_is():
    kernel, whole = Kernel(a=[0], b=[errno.ENOMEM], c=[0]), Region(BASE, 2 * HUGE_BYTES)
    pages = HugePages(call=kernel)
    first = follow(pages, whole)
    pages.follow(())
    assert follow(pages, whole) == first
    assert kernel.counts() == [1, 1, 0]
    follow(pages, Region(BASE + HUGE_BYTES, 2 * HUGE_BYTES))
    assert kernel.counts() == [1, 1, 1]


def test_memory_that_is_let_go_is_not_touched():
    held, may_go = threading.Event(), threading.Event()

    def kernel(*_):
        held.set()
        assert may_go.wait(WAIT_S)
        return 0

    pages = HugePages(call=kernel)
    pages.follow([Region(BASE, 9 * HUGE_BYTES)])
    assert held.wait(WAIT_S)
    pages.follow([Region(BASE + 90 * HUGE_BYTES, HUGE_BYTES)])  # returns while the kernel is busy
    pages.follow(())
    may_go.set()
    assert settled(pages).bytes_huge == 0
    assert list(pages._outcomes) == [BASE]


def test_what_was_busy_when_it_was_let_go_is_tried_again(monkeypatch):
    kernel = Kernel(a=[errno.EAGAIN, 0])
    pages = HugePages(call=kernel)
    monkeypatch.setattr(huge_pages, "RETRY_S", WAIT_S)
    pages.follow([Region(BASE, HUGE_BYTES)])
    while not kernel.calls:
        time.sleep(0.001)
    assert pages.report.bytes_waiting == HUGE_BYTES
    pages.follow(())
    assert settled(pages) == HugePageReport()
    assert follow(pages, Region(BASE, HUGE_BYTES)).bytes_huge == HUGE_BYTES


def test_steps_are_taken_slowly(monkeypatch):
    """A step takes 5 ms, and as long a rest: a training step has the other half."""
    waited = []
    over = SimpleNamespace(wait=waited.append, set=lambda: None)
    clock = iter(range(100))
    monkeypatch.setattr(huge_pages, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pages = HugePages(call=Kernel(a=[0], b=[errno.EAGAIN, 0]))
    monkeypatch.setattr(huge_pages, "PAUSE_PER_STEP", PAUSE_PER_STEP)
    monkeypatch.setattr(huge_pages, "RETRY_S", 3.0)
    pages._bring(huge_pages._Job([BASE, BASE + HUGE_BYTES], {}, over))
    assert waited == [0, 1, 1, 3, 1]  # the clock moves by 1 within each step


def test_without_a_thread_pages_stay_small(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    pages = HugePages(call=Kernel(a=[0]))
    pages.follow([Region(BASE, HUGE_BYTES)])
    assert pages.report == HugePageReport()


def test_what_is_turned_off_asks_the_kernel_nothing():
    kernel = Kernel(a=[0])
    pages = HugePages("a reason", call=kernel)
    assert follow(pages, Region(BASE, HUGE_BYTES)).off_because == "a reason"
    pages.ask([Region(BASE, HUGE_BYTES)])
    assert not kernel.calls
    HugePages(call=kernel).ask([Region(BASE, HUGE_BYTES)])
    assert kernel.calls == [(BASE, mmap.MADV_HUGEPAGE)]


@pytest.mark.parametrize(("pages", "is_asked"), [(HugePages("no"), False), (HugePages(), True)])
def test_tensors_are_asked_whether_they_are_pinned_only_where_it_matters(
    monkeypatch, pages, is_asked
):
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: bool(asked.append(tensor)))
    transport = MemoryTransport()
    mailbox = Mailbox(transport)
    tensors = Tensors(mailbox, pages)
    tensors.show(LocalState.of({"a": torch.ones(3), "b": torch.ones(4)}))
    assert bool(asked) is is_asked
    tensors.withdraw()
    mailbox.close()
    transport.close()


# Where


def reason(transport, *, is_wanted=True):
    return huge_pages_for(transport, is_wanted=is_wanted).report.off_because


def test_pages_stay_small_where_nobody_copies_them(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "_SIZE", size := tmp_path / "size")
    monkeypatch.setattr(huge_pages, "_RDMA", tmp_path / "infiniband")
    size.write_text(f"{HUGE_BYTES}\n")
    near, slow = (ShortcutTransport(MemoryTransport(), threads=count) for count in (2, 0))
    unused = ShortcutTransport(MemoryTransport(), is_used=False, threads=2)
    try:
        assert reason(near) == ""
        assert reason(near, is_wanted=False) == "open(huge_pages=False)"
        for other in (slow, unused, MemoryTransport()):
            assert reason(other) == "no memory is read through the kernel here"
        size.write_text("536870912\n")
        assert "536870912 bytes" in reason(near)
        size.unlink()
        assert "no transparent huge pages" in reason(near)
        size.write_text(f"{HUGE_BYTES}\n")
        (tmp_path / "infiniband").mkdir()
        assert reason(near) == ""
        (tmp_path / "infiniband/uverbs0").touch()
        assert "RDMA" in reason(near)
        monkeypatch.setenv("TORCH_ROS_HUGE_PAGES", "0")
        assert reason(near) == "TORCH_ROS_HUGE_PAGES=0"
    finally:
        for transport in (near, slow, unused):
            transport.close()


# Real memory


def regions_of(tensors):
    return [Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def collapses():
    """Whether this kernel can, and has memory for it."""
    tensor = torch.ones(2 * HUGE_BYTES, dtype=torch.uint8)
    [(start, _)] = runs(regions_of([tensor])).tolist()
    return huge_pages.advise(start, HUGE_BYTES, COLLAPSE) == 0


real = pytest.mark.skipif(not collapses(), reason="this kernel has no MADV_COLLAPSE, or no memory")


@real
def test_tensors_are_on_huge_pages_where_they_lie_with_their_content():
    tensors = [torch.full((5 << 18,), number, dtype=torch.int32) for number in range(20)]
    addresses = [t.data_ptr() for t in tensors]
    report = follow(HugePages(), *regions_of(tensors))
    no_page = "it is not mapped any more, or the kernel has no free huge page"
    assert report.bytes_huge + report.bytes_left.get(no_page, 0) >= 20 * (2 << 20)
    assert report.bytes_huge, "the kernel had one when this file was loaded"
    assert [t.data_ptr() for t in tensors] == addresses
    assert all(bool((t == number).all()) for number, t in enumerate(tensors))


def asked_for(address):
    """Whether the mapping that this address lies in was asked to be on huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return pytest.fail(f"{address:#x} is not mapped")


@real
def test_memory_that_is_asked_for_is_huge_at_its_first_touch():
    """If the kernel has a free huge page by then."""
    fresh = mmap.mmap(
        -1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # malloc's may not be
    tensor = torch.frombuffer(fresh, dtype=torch.uint8)
    inside = tensor.data_ptr() + (32 << 20)
    assert not asked_for(inside)
    HugePages().ask(regions_of([tensor]))
    assert asked_for(inside)
    tensor.fill_(3)
    assert bool((tensor == 3).all())


@real
@pytest.mark.long
def test_tensors_may_be_written_resized_freed_forked_and_shared_meanwhile():
    pages = HugePages()
    for _ in range(3):
        # Larger than what malloc keeps: freed memory is unmapped.
        tensors = [torch.zeros(12 << 18, dtype=torch.int32) for _ in range(16)]
        written, resized, freed, shared, *rest = tensors
        regions = regions_of(tensors)
        pages.follow(regions)
        resized.untyped_storage().resize_(0)
        del freed, tensors
        shared.fill_(7).share_memory_()
        views = [tensor.numpy() for tensor in rest]  # torch's threads are not in the child
        child = os.fork()
        if child == 0:  # its writes are not seen by the parent
            views[0][:] = 9
            os._exit(any(view.any() for view in views[1:]) or not (views[0] == 9).all())
        rounds = 0
        while pages._has_thread or rounds < 3:
            rounds += 1
            written.fill_(rounds)
            assert bool((written == rounds).all())
        assert os.waitpid(child, 0)[1] == 0
        assert all(int(t.sum()) == 0 for t in rest)
        assert bool((shared == 7).all())
        assert settled(pages).bytes_waiting == 0
