"""A source of TCP whose process forks, holds the GIL, or has a file that is cut short.

TORCH_ROS_KILLS=50 forks 3,000 times.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from features.survival.conftest import KILLS, times
from features.tcp.hostile import MODES, Card, Ended, Reader, regions_of
from kit import until

FORKS = times(20, 3000)

pytestmark = pytest.mark.timeout(120 + 60 * KILLS)  # on busy cores


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_meeting_that_the_gil_holds_up_for_longer_than_one_may_take_goes_on(start, mode):
    """The source's standing still is not its reader's fault."""
    source = start(sizes=[5000, 5000])
    with Reader(source.card, mode) as reader, Reader(source.card, mode) as half:
        half.knock()
        assert half.is_welcome()
        source.process.tell("hold", 6.5)
        time.sleep(0.2)
        reader.knock()
        assert source.hear() is None
        for each in (reader, half):
            assert each is half or each.is_welcome()
            assert each.hear()
            each.prove()
            assert each.read(source.regions[1]) == source.pattern(1).tobytes()
    source.assert_is_well()


# Forks


def sockets_of(pid):
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]


FORKED = """
import os, signal, sys
import numpy as np
from torch_ros.features.tcp.transport import TcpTransport
from torch_ros.spans import Region
memory = np.full(1 << 20, 7, np.uint8)
transport = TcpTransport()
registration = transport.register([Region(memory.ctypes.data, memory.nbytes)])
reading = TcpTransport()
peer = reading.connect(transport.connection)
said = transport.connection.hex(), registration.descriptor.hex(), memory.ctypes.data
if os.fork() == 0:
    for each in (registration, peer, transport, reading):
        each.close()
    os._exit(0)
assert os.wait()[1] == 0
if os.fork() == 0:  # outlives its parent
    print(*said, os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""


def test_a_source_that_is_killed_is_gone_though_a_child_lives(started):
    process = started.start(FORKED, talks=True)
    connection, descriptor, address, child = process.hear().split()
    card, (name, [start], [end]) = (
        Card.read(bytes.fromhex(connection)),
        regions_of(bytes.fromhex(descriptor)),
    )
    assert start == int(address)
    with Reader(card).meet() as reader:
        assert reader.read((name, start, end - start)) == b"\x07" * (end - start)
        assert not sockets_of(child)
        process.signal(signal.SIGKILL)
        os.kill(int(child), 0)
        assert reader.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            Reader(card)
    os.kill(int(child), signal.SIGKILL)


INTERRUPTED = """
import os, random, signal, sys
import numpy as np

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
begin = lambda: signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 3e-4))
os.register_at_fork(after_in_child=begin)  # before the one that is to be interrupted
from torch_ros.features.tcp.transport import TcpTransport
transport, reading = TcpTransport(), TcpTransport()
peer = reading.connect(transport.connection)
sys.unraisablehook = lambda *_: interrupted.append(True)
left = hit = 0
for _ in range(int(sys.argv[1])):
    interrupted = []
    child = os.fork()
    if child == 0:
        code = 2 if interrupted else 0
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        links = [os.readlink(f"/proc/self/fd/{each.name}") for each in os.scandir("/proc/self/fd")
                 if os.path.lexists(f"/proc/self/fd/{each.name}")]
        os._exit(code | any(link.startswith("socket:") for link in links))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left, hit = left + code % 2, hit + (code > 1)
print(left, hit, flush=True)
"""


def test_a_child_whose_fork_a_signal_interrupts_holds_nothing_open(started):
    process = started.start(INTERRUPTED, FORKS, talks=True)
    left, hit = map(int, process.hear().split())
    print(hit, "of", FORKS, "interrupted")
    assert left == 0
    process.finish()


HASHING = """
import hashlib, os, sys, threading
from torch_ros.features.tcp.transport import TcpTransport
transport = TcpTransport()
print(transport.connection.hex(), flush=True)
while not transport._server.count:
    pass
for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        hashlib.new("sha3_384", b"x").digest()
        hashlib.new("md5", b"x").digest()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


# Readers that meet a source, one after the other, without a pause.
MEETING = """
import sys
sys.path.insert(0, sys.argv[1])
from features.tcp.hostile import Card, Ended, Reader
card = Card.read(bytes.fromhex(sys.argv[2]))
while True:
    try:
        with Reader(card, "tls") as reader:
            reader.meet()
    except (Ended, OSError):
        pass
"""


def test_children_that_are_forked_while_readers_meet_their_parent_can_hash(started):
    """OpenSSL has locks that a child would have without the thread that gives them back."""
    process = started.start(HASHING, FORKS, talks=True)
    connection = process.hear()
    tests = Path(__file__).parents[2]
    meeting = [started.start(MEETING, tests, connection) for _ in range(3)]
    process.finish(60 * KILLS)
    for each in meeting:
        each.kill()


# Files


@pytest.mark.parametrize("mode", MODES)
def test_a_registered_file_that_is_cut_short_ends_reads_and_not_its_source(start, mode):
    source = start(sizes=[8 << 20, 5000], is_file=True, pipe="default")
    left = (1 << 20) + (1 << 19)  # a piece and a half: what is behind it is no other piece's
    row, whole = source.regions[0], source.pattern(0).tobytes()
    with source.reader(mode) as reader, source.reader(mode, buffer_bytes=4096) as slow:
        assert reader.read(row) == whole
        slow.ask(row)
        assert slow.status() == 0
        source.ask("cut", left)
        for each in (slow, reader):
            got = b""
            with pytest.raises(Ended):
                if each is reader:
                    reader.ask(row)
                    assert reader.status() == 0
                for some in each.content(row):
                    got += some
            assert got == whole[: len(got)]
    with source.reader(mode) as reader:  # of which there is nothing any more
        reader.ask(source.regions[1])
        assert len(reader.rest()) < 200  # a status, perhaps
    assert source.process.poll() is None, source.process.end_of_log()
    until(lambda: source.count("fd") == source.files, 60, by=source.process)
    assert source.ask("threads") == source.threads
    source.process.tell("end")
    source.process.finish()
