"""Memory that the kernel copies from process to process: which, in what parts, and which not."""

import contextlib
import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import chain

import msgspec
import numpy as np
import pytest
from features.shortcuts.steps import copied, pair_of
from p2p.steps import attached, prepared, region, span

from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.shortcuts import cma
from torch_ros.features.shortcuts.peer import ShortcutCard
from torch_ros.p2p.voucher import Process
from torch_ros.transfer.posting import close_all

SIZE = 3 << 20  # three parts
TWO_PARTS = 2 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def random_bytes(seed, size=SIZE):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


# Reading


def test_more_spans_than_one_call_takes_arrive():
    source, target = random_bytes(0), np.zeros(SIZE, np.uint8)
    starts = np.random.default_rng(1).permutation(2500) * 1000
    rows = [(source.ctypes.data + at, target.ctypes.data + at, 999) for at in starts.tolist()]
    cma.read(os.getpid(), np.array(rows, np.uint64))
    is_read = np.arange(SIZE) % 1000 < 999
    is_read[2500 * 1000 :] = False
    assert (target == np.where(is_read, source, 0)).all()


def test_a_call_that_stops_halfway_is_followed_by_another(monkeypatch):
    readv = cma._readv

    def half_of_the_first(pid, here, _, there, *__):
        less = [np.array((ctypes.c_uint64 * 2).from_address(at)) for at in (here, there)]
        for row in less:
            row[1] = max(1, row[1] // 2)
        return readv(pid, less[0].ctypes.data, 1, less[1].ctypes.data, 1, 0)

    monkeypatch.setattr(cma, "_readv", half_of_the_first)
    source, target = random_bytes(0, 1000), np.zeros(1000, np.uint8)
    halves = zip(np.split(source, 2), np.split(target, 2), strict=True)
    cma.read(os.getpid(), np.array([span(*half) for half in halves], np.uint64))
    assert (target == source).all()


def test_what_is_left_after_some_bytes():
    spans = np.array([(1000, 9000, 5), (2000, 8000, 1), (3000, 7000, 4)], np.uint64)

    def bytes_of(rows):
        return [(s + i, t + i) for s, t, size in rows.tolist() for i in range(size)]

    for count in range(1, 11):
        assert bytes_of(cma._behind(spans, count)) == bytes_of(spans)[count:]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_shares_are_all_of_it_in_parts_of_the_same_size(count):
    sizes = [1, 500, 0, 3, 96, 400]
    spans = np.array([(1000 * i, 5000 + 1000 * i, n) for i, n in enumerate(sizes)], np.uint64)
    parts = cma.shares(spans, count)
    bytes_of = [[s + i for s, t, n in part.tolist() for i in range(n)] for part in parts]
    assert list(chain(*bytes_of)) == [s + i for s, _, n in spans.tolist() for i in range(n)]
    assert len(parts) == min(count, 1000)
    assert max(map(len, bytes_of)) - min(map(len, bytes_of)) <= 1
    assert all((part[:, 1] - part[:, 0] == 5000).all() for part in parts)


def test_memory_that_is_not_there_is_an_error():
    target = np.zeros(8, np.uint8)
    with pytest.raises(OSError) as error:
        cma.read(os.getpid(), np.array([(PAGE, target.ctypes.data, 8)], np.uint64))
    assert error.value.errno == errno.EFAULT


def test_a_process_that_is_gone_is_an_error():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    target = np.zeros(8, np.uint8)
    with pytest.raises(OSError) as error:
        cma.read(gone.pid, np.array([span(target, target)], np.uint64))
    assert error.value.errno == errno.ESRCH


@pytest.mark.parametrize(
    ("ucx_tls", "is_allowed"),
    [
        *(("", True), ("all", True), ("tcp,cma,self", True), ("rc,sm", True), ("^tcp", True)),
        *(("tcp,self", False), ("rc", False), ("^cma", False), ("^tcp,sm", False)),
    ],
)
def test_it_is_left_out_where_ucx_may_not_either(ucx_tls, is_allowed):
    assert cma.is_allowed(ucx_tls) == is_allowed


# As a transport


@pytest.fixture
def pair():
    """A source and a reader that copies with two threads."""
    with pair_of(2) as made:
        yield made


def wait_for(*reads):
    for read in reads:
        while not read.is_done():
            time.sleep(0.001)


def test_each_byte_is_read_through_the_kernel(pair):
    sources = [random_bytes(0), random_bytes(1, 5), random_bytes(2, 2 << 20)]
    read, targets = prepared(pair[1], attached(*pair, *sources)[0], *sources)
    assert read.ways == (("cma", read.size_bytes),)
    assert read.size_bytes == sum(source.nbytes for source in sources)
    for _ in range(2):
        sources[0][:] += 1
        read.post()
        wait_for(read)
        assert all((t == s).all() for t, s in zip(targets, sources, strict=True))


def other_host(said):
    return {"host": "another boot id"}


def other_namespace(said):
    process = said.process
    return {"process": Process(process.pid, process.namespace + 1, process.voucher)}


def no_process(said):
    return {"process": Process()}


@pytest.mark.parametrize("change", [other_host, other_namespace, no_process])
def test_what_is_not_this_process_number_is_left_to_the_base(pair, change):
    source, said = random_bytes(0), ShortcutCard.decode("?", pair[0].connection)
    pair[0].connection = msgspec.msgpack.encode(msgspec.structs.replace(said, **change(said)))
    read, targets = prepared(pair[1], attached(*pair, source)[0], source)
    assert copied(read) == 0
    read.post()
    assert (targets[0] == source).all()


def test_what_the_kernel_does_not_allow_is_left_to_the_base(pair, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cma, "read", refuse)
    source = random_bytes(0)
    read, targets = prepared(pair[1], attached(*pair, source)[0], source)
    assert copied(read) == 0
    read.post()
    assert (targets[0] == source).all()
    assert "[Errno 1] Operation not permitted)" in caplog.text


@pytest.mark.parametrize("part", [slice(PAGE, None), slice(None, -PAGE)])
def test_what_is_not_registered_is_refused_and_not_read(pair, part):
    source = random_bytes(0)
    peer, _ = attached(*pair, source[part])
    with pytest.raises(TransferFailed, match="attached"):
        prepared(pair[1], peer, source)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_that_fails_fails_the_read_when_no_other_runs_any_more(pair, monkeypatch, failing):
    source = random_bytes(0, TWO_PARTS)
    peer, _ = attached(*pair, source)
    begun, failed, ended = (threading.Event() for _ in range(3))

    def read(pid, spans):
        if (int(spans[0, 0]) == source.ctypes.data) == (failing == 0):
            assert begun.wait(10)
            failed.set()
            raise OSError(errno.EFAULT, "Bad address")
        begun.set()
        assert failed.wait(10)
        assert not ended.wait(0.2)  # long enough for an `is_done` that does not wait to return
        ended.set()

    monkeypatch.setattr(cma, "read", read)
    reading, _ = prepared(pair[1], peer, source)
    reading.post()
    with pytest.raises(TransferFailed, match=r"cannot be read \(Bad address\)"):
        wait_for(reading)
    assert ended.is_set()


def test_ctrl_c_waits_for_the_other_parts_however_often_it_is_pressed(pair, monkeypatch, ctrl_c):
    source = random_bytes(0, TWO_PARTS)
    peer, _ = attached(*pair, source)
    both, pressed, ended = threading.Barrier(2), threading.Event(), []

    def press():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def read(pid, spans):
        both.wait(10)
        if int(spans[0, 0]) == source.ctypes.data:
            threading.Timer(0.2, press_again).start()
            press()
        assert pressed.wait(10)
        ended.append(pid)

    def press_again():
        press()
        threading.Timer(0.2, pressed.set).start()

    monkeypatch.setattr(cma, "read", read)
    reading, _ = prepared(pair[1], peer, source)
    with pytest.raises(KeyboardInterrupt):  # it may come at once
        try:
            reading.post()
            wait_for(reading)
        finally:
            close_all([reading])
    assert len(ended) == 2


def test_without_a_thread_to_be_had_the_caller_copies_and_nobody_later(pair, monkeypatch):
    source = random_bytes(0)
    read, targets = prepared(pair[1], attached(*pair, source)[0], source)
    orphans = []

    def submit(part):
        orphans.append(part)  # as if a thread that exists took it later
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pair[1].threads._pool, "submit", submit)
    read.post()
    assert read.is_done()
    assert (targets[0] == source).all()
    targets[0][:] = 0
    for part in orphans:
        part()
    assert len(orphans) == 1
    assert not targets[0].any()


def poll(reading):
    with contextlib.suppress(TransferFailed, ClosedError):
        wait_for(reading)


def test_what_no_thread_has_begun_when_its_target_is_unregistered_is_never_copied(
    pair, monkeypatch
):
    monkeypatch.setattr(pair[1].threads._pool, "submit", lambda _: None)
    source, target = random_bytes(0), np.zeros(SIZE, np.uint8)
    registration = pair[1].register([region(target)])
    read = attached(*pair, source)[0].prepare(np.array([span(source, target)], np.uint64))
    read.post()
    registration.close()
    with pytest.raises(TransferFailed, match="was ended"):
        read.is_done()
    assert not target.any()


def test_a_thread_that_is_free_begins_the_next_read(pair, monkeypatch):
    sources = [random_bytes(number) for number in range(2)]
    peer, _ = attached(*pair, *sources)
    next_begun, copy = threading.Event(), cma.read

    def read(pid, spans):
        if int(spans[0, 0]) == sources[0].ctypes.data:
            assert next_begun.wait(10)
        if sources[1].ctypes.data <= int(spans[0, 0]) < end:
            next_begun.set()
        copy(pid, spans)

    end = sources[1].ctypes.data + SIZE
    monkeypatch.setattr(cma, "read", read)
    pairs = [prepared(pair[1], peer, source) for source in sources]
    for reading, _ in pairs:
        reading.post()
    wait_for(*(reading for reading, _ in pairs))
    for (_, targets), source in zip(pairs, sources, strict=True):
        assert (targets[0] == source).all()


def test_closing_waits_for_what_is_being_copied(pair, monkeypatch):
    source = random_bytes(0)
    peer, _ = attached(*pair, source)
    copying, go_on, closed = (threading.Event() for _ in range(3))

    def read(pid, spans):
        copying.set()
        assert go_on.wait(10)
        assert not closed.is_set()

    monkeypatch.setattr(cma, "read", read)
    reading, _ = prepared(pair[1], peer, source)
    reading.post()
    posting = threading.Thread(target=poll, args=(reading,))
    closing = threading.Thread(target=lambda: (pair[1].close(), closed.set()))
    posting.start()
    assert copying.wait(10)
    closing.start()
    assert not closed.wait(0.3)
    go_on.set()
    posting.join()
    assert closed.wait(10)
