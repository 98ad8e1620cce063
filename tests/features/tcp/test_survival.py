"""A source outlives its readers, whatever becomes of them, and ends well while they read.

TORCH_ROS_KILLS=n strikes n times as many readers, and ends n times as many sources.
"""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from features.tcp.hostile import MODES, Card, Ended, Reader, regions_of
from kit import until
from p2p.steps import region

from torch_ros.errors import TransferFailed
from torch_ros.features.tcp.transport import TcpTransport

KILLS = int(os.environ.get("TORCH_ROS_KILLS", "1"))
IS_WHOLE = KILLS >= 50
AT_ONCE, SIZE = 4, 16 << 20
STOPPED_S = 20 if IS_WHOLE else 1
HELD_S = 10 if IS_WHOLE else 1

pytestmark = pytest.mark.timeout(120 + 20 * KILLS)

READERS, EXITS = (Path(__file__).with_name(name) for name in ("readers.py", "exits.py"))


class Crowd:
    """Processes that read from a source; readers.py has them."""

    def __init__(self, started, source):
        (name, address, size), _ = source.regions
        assert name
        far = source.card.but(network=source.card.network + 1, addresses=[b"\x7f\0\0\1"])
        options = {
            "cards": [source.connection.hex(), far.encode().hex()],
            "descriptor": source.ask("where")[0][0],
            "address": address,
            "size": size,
            "value": 7,
        }
        self.process = started.start(READERS, json.dumps(options), talks=True)
        assert self.hear() == "here"

    def hear(self):
        return json.loads(self.process.hear())

    def ask(self, *words):
        self.process.tell(*map(str, words))
        return self.hear()


@pytest.fixture
def source(start):
    made = start(sizes=[SIZE, 5000], pipe="default")
    made.fill(0, 7)
    return made


def is_well(source):
    """It serves, nothing was written, and no descriptor or thread is left of those who read."""
    assert source.process.poll() is None, source.process.end_of_log()
    until(lambda: source.count("fd") == source.files, 60, by=source.process)
    assert source.ask("threads") == source.threads
    for mode in MODES:
        with source.reader(mode) as reader:
            assert reader.read(source.regions[1]) == source.pattern(1).tobytes()
    assert source.ask("is_untouched")
    assert "Traceback" not in source.process.end_of_log()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "closed"])
def test_readers_that_end_in_the_middle_leave_their_source_as_it_was(source, started, how):
    readers, ends = Crowd(started, source), []
    for _ in range(5 * KILLS if how == signal.SIGKILL else max(2, KILLS)):
        readers.ask("start", AT_ONCE)
        ends += readers.ask("strike", int(how), 0.2)
    assert set(ends) == {-signal.SIGKILL if how == signal.SIGKILL else 0}, ends
    print(len(ends), "readers", how.name)
    is_well(source)


def test_readers_that_are_stopped_and_go_on_read_on(source, started):
    readers, ends = Crowd(started, source), []
    for _ in range(max(1, KILLS // 5)):
        readers.ask("start", AT_ONCE * (5 if IS_WHOLE else 1))
        readers.ask("strike", int(signal.SIGSTOP), 0.2)
        time.sleep(STOPPED_S)
        with source.reader() as reader:  # while they hold their places
            assert reader.read(source.regions[1]) == source.pattern(1).tobytes()
        readers.ask("strike", int(signal.SIGCONT), 0.1)
        ends += readers.ask("strike", int(signal.SIGTERM), 0.5)
    assert set(ends) == {0}, ends
    print(len(ends), "readers stopped for", STOPPED_S, "s")
    is_well(source)


def test_a_source_whose_gil_is_held_in_c_goes_on_with_its_readers(source, started):
    readers = Crowd(started, source)
    readers.ask("start", AT_ONCE)
    source.ask("hold", HELD_S)
    assert set(readers.ask("strike", int(signal.SIGTERM), 0.5)) == {0}
    is_well(source)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_meeting_that_the_gil_holds_up_for_longer_than_one_may_take_goes_on(source, mode):
    """The source's standing still is not its reader's fault."""
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
    is_well(source)


# Forks


def a_reader(source, size=4 << 20):
    """A transport that has the source as a peer, and a read of its first region."""
    transport = TcpTransport()
    target = np.zeros(size, np.uint8)
    transport.register([region(target)])
    peer = transport.connect(source.connection)
    peer.attach(bytes.fromhex(source.ask("where")[0][0]))
    _, address, _ = source.regions[0]
    return (
        transport,
        peer.prepare(np.array([[address, target.ctypes.data, size]], np.uint64)),
        target,
    )


def sockets_of(pid):
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]


def test_children_of_a_source_hold_nothing_of_it_open(source, started):
    readers = Crowd(started, source)
    readers.ask("start", AT_ONCE)
    children = source.ask("fork", 2)
    assert set(readers.ask("strike", int(signal.SIGKILL), 0.3)) == {-signal.SIGKILL}
    is_well(source)
    assert not [child for child in children if sockets_of(child)]
    transport, read, _ = a_reader(source)
    read.post()
    until(read.is_done)
    source.process.signal(signal.SIGKILL)  # and its children, after it
    with pytest.raises(TransferFailed):
        read.post()
        until(read.is_done)
    transport.close()


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
    process = started.start(INTERRUPTED, 50 * KILLS, talks=True)
    left, hit = map(int, process.hear().split())
    print(hit, "of", 50 * KILLS, "interrupted")
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
    process = started.start(HASHING, 60 * KILLS, talks=True)
    connection = process.hear()
    tests = Path(__file__).parents[2]
    meeting = [started.start(MEETING, tests, connection) for _ in range(3)]
    process.finish(60 * KILLS)
    for each in meeting:
        each.kill()


# Files and exits


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


def test_a_source_that_exits_while_it_is_read_has_exit_code_0(started):
    """By its end, by `sys.exit`, and by an error that nobody catches, which is 1."""
    count = 8 if KILLS == 1 else 20 * KILLS
    exits = started.start(EXITS, count, talks=True)
    ends = []
    for _ in range(count):
        said = exits.hear().split()
        if said[0] == "ended":
            break
        card = Card.read(bytes.fromhex(said[0]))
        name, [start], [end] = regions_of(bytes.fromhex(said[1]))
        readers = read_on(card, (name, start, end - start))
        exits.tell("go")
        ends.append(exits.hear())
        for reader in readers:
            assert set(reader.rest()) <= {0, 7} or reader.mode == "tls"
            reader.line.sock.close()
    print(len(ends), "exits")
    assert ends == ["0"] * count
    exits.finish()


def read_on(card, row):
    """Readers that are in the middle of an answer."""
    readers = []
    for mode in MODES:
        readers.append(Reader(card, mode).meet())
        readers[-1].ask(row)
        assert readers[-1].status() == 0
    readers.append(Reader(card))  # and one that is in the middle of its knock
    readers[-1].knock(bytes(30))
    return readers
