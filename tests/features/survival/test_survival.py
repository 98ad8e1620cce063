"""A source outlives its readers, whatever becomes of them, and ends well while they read.

TORCH_ROS_KILLS=50 kills 1,000 readers, stops and closes 200 each, and ends 1,000 sources.
"""

import contextlib
import json
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from features.survival.conftest import KILLS, over, times
from features.survival.ways import FAILED, transport_of, ways_of
from features.tcp.hostile import MODES, Card, Reader, regions_of
from kit import until
from p2p.steps import region

from torch_ros.errors import TransferFailed

IS_WHOLE = KILLS >= 50
AT_ONCE, SIZE = 4, 16 << 20
STOPPED_S = 20 if IS_WHOLE else 1
HELD_S = 10 if IS_WHOLE else 1

pytestmark = pytest.mark.timeout(120 + 60 * KILLS)  # on busy cores

READERS, EXITS = (Path(__file__).with_name(name) for name in ("readers.py", "exits.py"))


class Crowd:
    """Processes that read from a source; readers.py has them."""

    def __init__(self, started, source):
        (name, address, size), _ = source.regions
        assert name
        cards = [source.connection]
        if source.way == "tcp":  # half of them as readers on other hosts
            far = source.card.but(network=source.card.network + 1, addresses=[b"\x7f\0\0\1"])
            cards.append(far.encode())
        options = {
            "way": source.way,
            "cards": [card.hex() for card in cards],
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


@contextlib.contextmanager
def reading(source, number, size=None):
    """A read of one of its regions, and where it lands."""
    _, address, whole = source.regions[number]
    target = np.zeros(size or whole, np.uint8)
    with contextlib.closing(transport_of(source.way)) as transport:
        transport.register([region(target)])
        peer = transport.connect(source.connection)
        peer.attach(bytes.fromhex(source.ask("where")[number][0]))
        read = peer.prepare(np.array([[address, target.ctypes.data, target.nbytes]], np.uint64))
        yield read, target


def is_read(source, number):
    with reading(source, number) as (read, target):
        read.post()
        until(read.is_done)
        return (target == source.pattern(number)).all()


def has_nothing_left(source):
    """It runs, and no descriptor or thread is left of those who read."""
    assert source.process.poll() is None, source.process.end_of_log()
    until(lambda: source.count("fd") == source.files, 60, by=source.process)
    return source.ask("threads") == source.threads


def is_well(source):
    """It serves besides, and nothing was written."""
    assert has_nothing_left(source)
    for mode in MODES:
        with source.reader(mode) as reader:
            assert reader.read(source.regions[1]) == source.pattern(1).tobytes()
    assert is_read(source, 0)
    assert source.ask("is_untouched")
    assert "Traceback" not in source.process.end_of_log()


@over("tcp", "kernel")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "closed"])
def test_readers_that_end_in_the_middle_leave_their_source_as_it_was(source, started, how):
    readers, ends = Crowd(started, source), []
    for _ in range(times(2, 250) if how == signal.SIGKILL else times(1, 50)):
        readers.ask("start", AT_ONCE)
        ends += readers.ask("strike", int(how), 0.2)
    assert set(ends) == {-signal.SIGKILL if how == signal.SIGKILL else 0}, ends
    print(len(ends), "readers", how.name, "over", source.way)
    is_well(source)


@over("tcp")
def test_readers_that_are_stopped_and_go_on_read_on(source, started):
    readers, ends = Crowd(started, source), []
    for _ in range(times(1, 10)):
        readers.ask("start", AT_ONCE * (5 if IS_WHOLE else 1))
        readers.ask("strike", int(signal.SIGSTOP), 0.2)
        time.sleep(STOPPED_S)
        assert is_read(source, 1)  # while they hold their places
        readers.ask("strike", int(signal.SIGCONT), 0.1)
        ends += readers.ask("strike", int(signal.SIGTERM), 0.5)
    assert set(ends) == {0}, ends
    print(len(ends), "readers stopped for", STOPPED_S, "s over", source.way)
    is_well(source)


@over("tcp")
def test_a_source_whose_gil_is_held_in_c_goes_on_with_its_readers(source, started):
    readers = Crowd(started, source)
    readers.ask("start", AT_ONCE)
    source.ask("hold", HELD_S)
    assert set(readers.ask("strike", int(signal.SIGTERM), 0.5)) == {0}
    is_well(source)


# Forks, files and exits


def sockets_of(pid):
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("socket:")]


@over("tcp")
def test_children_of_a_source_hold_nothing_of_it_open(source, started):
    readers = Crowd(started, source)
    readers.ask("start", AT_ONCE)
    children = source.ask("fork", 2)
    assert set(readers.ask("strike", int(signal.SIGKILL), 0.3)) == {-signal.SIGKILL}
    is_well(source)
    assert not [child for child in children if sockets_of(child)]
    with reading(source, 0, 4 << 20) as (read, _):
        read.post()
        until(read.is_done)
        source.process.signal(signal.SIGKILL)  # and its children, after it
        with pytest.raises(TransferFailed):
            read.post()
            until(read.is_done)


@over("kernel", among=["tcp"])  # a sealed file, which is mapped, stays as it is
def test_a_registered_file_that_is_cut_short_ends_reads_and_no_process(start, started):
    source = start(sizes=[SIZE, 5000], is_file=True, pipe="default")
    source.fill(0, 7)
    readers = Crowd(started, source)
    readers.ask("start", AT_ONCE)
    source.ask("cut", SIZE // 2)
    assert set(readers.ask("reap")) == {FAILED}
    assert has_nothing_left(source)
    source.process.tell("end")
    source.process.finish()


@over("tcp", "kernel")
def test_a_source_that_exits_while_it_is_read_has_exit_code_0(started, way):
    """By its end, and by `sys.exit`."""
    count, ends = times(2, 1000), []
    exits = started.start(EXITS, count, way, talks=True)
    copying = transport_of(way)
    target = np.zeros(32 << 20, np.uint8)
    copying.register([region(target)])
    for _ in range(count):
        said = exits.hear().split()
        if said[0] == "ended":
            break
        card = Card.read(bytes.fromhex(said[0]))
        name, [start], [end] = regions_of(bytes.fromhex(said[1]))
        readers = read_on(card, (name, start, end - start))
        copier = threading.Thread(target=copy_on, args=(copying, way, said, start, target))
        target[:] = 0
        copier.start()
        until(lambda: target[0] == 7)
        exits.tell("go")
        ends.append(exits.hear())
        copier.join(60)
        assert not copier.is_alive()
        assert ((target == 0) | (target == 7)).all()
        assert target.any()
        for reader in readers:
            assert set(reader.rest()) <= {0, 7} or reader.mode == "tls"
            reader.line.sock.close()
    print(len(ends), "exits over", way)
    assert ends == ["0"] * count
    exits.finish()
    copying.close()


def copy_on(transport, way, said, address, target):
    """Read again and again, until the source is gone."""
    peer = transport.connect(bytes.fromhex(said[0]))
    peer.attach(bytes.fromhex(said[1]))
    read = peer.prepare(np.array([[address, target.ctypes.data, target.nbytes]], np.uint64))
    assert ways_of(read) == {way}
    with contextlib.suppress(TransferFailed):
        while True:
            read.post()
            until(read.is_done, pause_s=0)
    read.close()
    peer.close()


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
