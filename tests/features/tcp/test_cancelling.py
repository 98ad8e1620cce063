"""A read that is closed is over: at once, and no byte of it lands afterwards.

TORCH_ROS_KILLS=n closes n times as many: 1,000 with 50.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest
from kit import until
from p2p.steps import region

from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.tcp.transport import TcpTransport

KILLS = int(os.environ.get("TORCH_ROS_KILLS", "1"))
COUNT, CANARY = 20 * KILLS, 0xA5
SIZE = 32 << 20  # more than lands in the moment for which a read is looked at

pytestmark = pytest.mark.timeout(60 + 5 * KILLS)


@pytest.fixture
def source(start):
    made = start(sizes=[SIZE])
    made.fill(0, 7)
    return made


@pytest.fixture
def reader():
    made = TcpTransport()
    yield made
    made.close()


@pytest.fixture(params=["near", "tls"])
def peer(request, source, reader):
    """The source as a peer of the reader, by the way that its card leaves."""
    card = source.card
    if request.param == "tls":
        card = card.but(network=card.network + 1, addresses=[b"\x7f\0\0\1"])
    peer = reader.connect(card.encode())
    peer.attach(bytes.fromhex(source.ask("where")[0][0]))
    return peer


def read_into(reader, peer, source, target):
    reader.register([region(target)])
    _, address, _ = source.regions[0]
    return lambda: peer.prepare(np.array([[address, target.ctypes.data, SIZE]], np.uint64))


def whole(read):
    read.post()
    until(read.is_done, pause_s=0.0002)


def test_close_waits_for_no_stopped_source_and_nothing_lands_afterwards(source, reader, peer):
    target, other = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    begin = read_into(reader, peer, source, target)
    sound = read_into(reader, peer, source, other)
    took_s, landed = [], 0
    for number in range(COUNT):
        read = begin()
        target[:] = CANARY
        read.post()
        while number % 3 and target[0] == CANARY:
            read.is_done()
        source.process.signal(signal.SIGSTOP)
        source.process.await_stop()
        for _ in range(number % 4):
            read.is_done()
        started_s = time.perf_counter()
        read.close()
        took_s.append(time.perf_counter() - started_s)
        landed += 0 < np.count_nonzero(target == 7) < SIZE
        target[:] = CANARY
        source.process.signal(signal.SIGCONT)
        if number % 5 == 4:  # whatever was on its way has come by then
            other[:] = 0
            again = sound()
            whole(again)
            again.close()
            assert (other == 7).all()
        assert (target == CANARY).all()
    assert landed  # they were in the middle
    print(f"{COUNT} reads closed, {landed} in the middle, at most {max(took_s):.4f} s each")
    assert KILLS < 50 or max(took_s) < 0.1
    reader.close()
    source.assert_is_well()


def test_a_read_that_another_thread_closes_is_over_when_close_returns(source, reader, peer):
    """Numbers of closed sockets are used again at once, by connections with other bytes."""
    target = np.zeros(SIZE, np.uint8)
    begin = read_into(reader, peer, source, target)
    ends, errors, landed = threading.Event(), [], 0
    others = [TcpTransport() for _ in range(2)]

    def connect(other):
        while not ends.is_set():
            other.connect(source.connection).close()

    def follow(read, begun):
        try:
            begun.set()
            while not read.is_done():
                pass
        except (ClosedError, TransferFailed):
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=connect, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for number in range(COUNT):
        target[:] = CANARY
        read, begun = begin(), threading.Event()
        read.post()
        following = threading.Thread(target=follow, args=(read, begun))
        following.start()
        begun.wait()
        if number % 2:
            until(lambda: target[0] != CANARY, pause_s=0)
        read.close()
        landed += 0 < np.count_nonzero(target == 7) < SIZE
        target[:] = CANARY
        following.join()
        assert (target == CANARY).all()
    ends.set()
    for thread in threads:
        thread.join()
    for other in others:
        other.close()
    assert not errors
    assert landed
    reader.close()
    source.assert_is_well()


def test_closing_a_target_or_the_peer_or_the_transport_ends_reads_of_a_stopped_source(
    source, reader, peer
):
    target = np.zeros(SIZE, np.uint8)
    registration = reader.register([region(target)])
    _, address, _ = source.regions[0]
    for close in (registration.close, peer.close, reader.close):
        if close == peer.close:
            reader.register([region(target)])
        if close == reader.close:
            peer = reader.connect(source.connection)
            peer.attach(bytes.fromhex(source.ask("where")[0][0]))
        read = peer.prepare(np.array([[address, target.ctypes.data, SIZE]], np.uint64))
        source.process.signal(signal.SIGSTOP)
        source.process.await_stop()
        read.post()
        close()
        target[:] = CANARY
        with pytest.raises((TransferFailed, ClosedError)):
            read.is_done()
        source.process.signal(signal.SIGCONT)
        source.ask("is_untouched")
        assert (target == CANARY).all()
