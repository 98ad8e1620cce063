"""A read that is closed is over: at once, and no byte of it lands afterwards.

TORCH_ROS_KILLS=50 closes 1,000.
"""

import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
from features.survival.conftest import KILLS, over, times
from features.survival.ways import transport_of, ways_of
from features.tcp.hostile import MODES
from kit import until
from p2p.steps import region

from torch_ros.errors import ClosedError, TransferFailed

COUNT, CANARY = times(5, 1000), 0xA5
SIZE = 32 << 20  # more than lands in the moment for which a read is looked at
COPIES = 4

pytestmark = pytest.mark.timeout(120 + 60 * KILLS)  # on busy cores


@pytest.fixture
def source(start):
    made = start(sizes=[SIZE])
    made.fill(0, 7)
    return made


seen = partial(over, among=[*MODES, "kernel", "mapped"], fixture="mode")


@pytest.fixture
def mode(request):
    """How the reader sees the source: see `seen`."""
    return request.param


@pytest.fixture
def way(mode):
    return "tcp" if mode in MODES else mode


@pytest.fixture
def reader(way):
    made = transport_of(way)
    yield made
    made.close()


@pytest.fixture
def peer(mode, source, reader):
    """The source as a peer of the reader, by the way that its card leaves."""
    connection = source.connection
    if mode == "tls":
        far = source.card.but(network=source.card.network + 1, addresses=[b"\x7f\0\0\1"])
        connection = far.encode()
    peer = reader.connect(connection)
    peer.attach(bytes.fromhex(source.ask("where")[0][0]))
    return peer


class Reading:
    """Reads of the source's region, and where they land; one after the other by the kernel, which
    is faster than this process is woken.
    """

    def __init__(self, reader, peer, source):
        self.source, self.peer = source, peer
        self.target = np.zeros((1 if source.way == "tcp" else COPIES, SIZE), np.uint8)
        self.registration, self.reads = reader.register([region(self.target)]), []

    def begin(self):
        """Post them onto canaries."""
        self.target[:] = CANARY
        _, address, _ = self.source.regions[0]
        rows = [[address, each.ctypes.data, SIZE] for each in self.target]
        self.reads = [self.peer.prepare(np.array([row], np.uint64)) for row in rows]
        assert {way for read in self.reads for way in ways_of(read)} == {self.source.way}
        for read in self.reads:
            read.post()

    @property
    def has_landed(self):
        """Whether some of it has."""
        return self.target[0, 0] != CANARY

    def is_done(self):
        return all(read.is_done() for read in self.reads)

    def close(self):
        """Close them; return how long each took, and whether they were in the middle."""
        took_s = [close_timed(read) for read in self.reads]
        seen = self.target[:, ::4096]
        landed = 0 < np.count_nonzero(seen == 7) < seen.size
        self.target[:] = CANARY
        return took_s, landed

    def is_untouched(self):
        return (self.target == CANARY).all()


def close_timed(read):
    started_s = time.perf_counter()
    read.close()
    return time.perf_counter() - started_s


def stop(source):
    source.process.signal(signal.SIGSTOP)
    source.process.await_stop()


@seen("tls", "kernel")
def test_close_waits_for_no_stopped_source_and_nothing_lands_afterwards(source, reader, peer):
    reading, other = (Reading(reader, peer, source) for _ in range(2))
    closed = []
    for number in range(COUNT):
        if source.way != "tcp":  # the kernel copies from one that is stopped
            stop(source)
        reading.begin()
        while number % 3 and not reading.has_landed:
            reading.is_done()
        if source.way == "tcp":
            stop(source)
            for _ in range(number % 4):
                reading.is_done()
        closed.append(reading.close())
        source.process.signal(signal.SIGCONT)
        if number % 5 == 4:  # whatever was on its way has come by then
            other.begin()
            until(other.is_done, pause_s=0.0002)
            assert (other.target == 7).all()
            other.close()
        assert reading.is_untouched()
    took_s, landed = [each for took, _ in closed for each in took], [each for _, each in closed]
    assert any(landed)  # they were in the middle
    longest_s = max(took_s)
    said = (
        f"{len(took_s)} reads closed, {sum(landed)} in the middle, at most {longest_s:.4f} s each"
    )
    print(said, "over", source.way)
    assert KILLS < 50 or longest_s < 0.1
    reader.close()
    source.assert_is_well()


@seen("tls")
def test_a_read_that_another_thread_closes_is_over_when_close_returns(source, reader, peer):
    """Numbers of closed sockets are used again at once, by connections with other bytes."""
    reading = Reading(reader, peer, source)
    ends, errors, landed = threading.Event(), [], []
    others = [transport_of(source.way) for _ in range(2)]

    def connect(other):
        while not ends.is_set():
            other.connect(source.connection).close()

    def follow(begun):
        try:
            begun.set()
            while not reading.is_done():
                pass
        except (ClosedError, TransferFailed):
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=connect, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for number in range(COUNT):
        begun = threading.Event()
        reading.begin()
        following = threading.Thread(target=follow, args=(begun,))
        following.start()
        begun.wait()
        if number % 2:
            until(lambda: reading.has_landed, pause_s=0)
        landed.append(reading.close()[1])
        following.join()
        assert reading.is_untouched()
    ends.set()
    for thread in threads:
        thread.join()
    for other in others:
        other.close()
    assert not errors
    assert any(landed)
    reader.close()
    source.assert_is_well()


@seen("tls", "kernel")
def test_closing_a_target_or_the_peer_or_the_transport_ends_reads_of_a_stopped_source(
    source, reader, peer
):
    for closes in ("target", "peer", "transport"):
        if closes == "transport":
            peer = reader.connect(source.connection)
            peer.attach(bytes.fromhex(source.ask("where")[0][0]))
        reading = Reading(reader, peer, source)
        stop(source)
        reading.begin()
        {"target": reading.registration, "peer": peer, "transport": reader}[closes].close()
        reading.target[:] = CANARY
        with pytest.raises((TransferFailed, ClosedError)):
            reading.is_done()
        source.process.signal(signal.SIGCONT)
        source.ask("is_untouched")
        assert reading.is_untouched()
