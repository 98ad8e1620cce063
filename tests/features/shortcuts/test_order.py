"""The order of a read, of which the base brings nothing: docs/protocol/nixl.md."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from features.shortcuts.steps import Refusing
from kit import FREEZERS, freezer, until
from p2p.steps import attached, prepared, region

from torch_ros.costs import HOST_COSTS
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.shortcuts import cma
from torch_ros.features.shortcuts import peer as peer_module
from torch_ros.features.shortcuts.peer import ShortcutPeer
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.fleet import life
from torch_ros.memory.transport import MemoryTransport

pytestmark = pytest.mark.timeout(90)

TESTS = pathlib.Path(__file__).parents[2]
SIZE = 3 << 20
SECRET = 83  # what nobody may see
WORD = 0x0102030405060708

# Has a tensor full of 7, and a mailbox of which the first bytes are the word.
SOURCE = """
import ctypes
sys.path.insert(0, sys.argv[1])
from features.shortcuts.steps import Refusing
from torch_ros.features.shortcuts.transport import ShortcutTransport

transport = ShortcutTransport(Refusing(), threads=2)
tensor, box = np.full(int(sys.argv[2]), 7, np.uint8), np.zeros(4096, np.uint8)
word = box[:8].view(np.uint64)
word[0] = int(sys.argv[3])
registrations = [transport.register([region(each)]) for each in (tensor, box)]
say(os.getpid(), transport.agent, transport.connection.hex())
say(*(each.descriptor.hex() for each in registrations))
say(tensor.ctypes.data, box.ctypes.data)

while True:
    match hear():
        case ["set", value]:
            word[0] = int(value)
            say("set")
        case ["name", name]:
            say(ctypes.CDLL(None).prctl(15, bytes.fromhex(name), 0, 0, 0))
        case ["let", "go"]:
            for each in registrations:
                each.close()
            tensor[:], box[:] = 83, 83
            say("gone")
        case ["exec"]:
            again = "import time; print('another', flush=True); time.sleep(60)"
            os.execv(sys.executable, [sys.executable, "-c", again])
        case ["fork"]:
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            say(child)
"""


class Source:
    """A process of `SOURCE`, and reads of its tensor, its mailbox and its word."""

    def __init__(self, reader, process):
        self.process = process
        pid, self.agent, connection = process.hear()
        self.pid, self.connection = int(pid), bytes.fromhex(connection)
        descriptors = [bytes.fromhex(each) for each in process.hear()]
        tensor, box = map(int, process.hear())
        self.peer = reader.connect(self.connection)
        for each in descriptors:
            self.peer.attach(each)
        sizes = {"tensor": (tensor, SIZE), "box": (box, 4096), "word": (box, 8)}
        self.targets = {name: np.zeros(size, np.uint8) for name, (_, size) in sizes.items()}
        self.landing = {
            name: reader.register([region(each)]) for name, each in self.targets.items()
        }
        self.reads = {
            name: self.peer.prepare(
                np.array([(at, self.targets[name].ctypes.data, size)], np.uint64)
            )
            for name, (at, size) in sizes.items()
        }

    @property
    def word(self):
        return int(self.targets["word"].view(np.uint64)[0])

    def fetch(self, name):
        self.reads[name].post()
        until(self.reads[name].is_done, 20, pause_s=0)
        return self.targets[name]

    @property
    def state(self):
        return pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def stop(self):
        self.process.signal(signal.SIGSTOP)
        until(lambda: self.state == "T", 20)

    def kill(self):
        self.process.signal(signal.SIGKILL)  # which is waited for

    def is_untouched(self):
        return not any(each.any() for each in self.targets.values())


@pytest.fixture
def base():
    return Refusing()


@pytest.fixture
def reader(base):
    transport = ShortcutTransport(base, threads=2)
    yield transport
    transport.close()


@pytest.fixture
def source(spawn, reader):
    return Source(reader, spawn(SOURCE, TESTS, SIZE, WORD))


every_read = pytest.mark.parametrize("name", ["tensor", "box", "word"])


def test_each_byte_comes_by_the_kernel(source, base):
    assert (source.fetch("tensor") == 7).all()
    source.fetch("word")
    assert source.word == WORD
    assert source.fetch("box")[:8].tobytes() == WORD.to_bytes(8, "little")
    assert {read.ways for read in source.reads.values()} == {
        (("cma", SIZE),),
        (("cma", 4096),),
        (("cma", 8),),
    }
    assert source.peer.costs == HOST_COSTS
    assert not source.peer.is_beyond(0.0)
    assert base.asked == []


def test_what_is_small_is_copied_by_who_asks(source, reader, monkeypatch):
    def submit(part):
        raise AssertionError("a thread is told")

    monkeypatch.setattr(reader.threads._pool, "submit", submit)
    for name in ("box", "word"):
        source.fetch(name)


# A process that is stopped


def test_a_stopped_source_is_silent_until_it_runs_again(source):
    source.stop()
    for name in ("box", "word"):
        source.reads[name].post()
        assert not any(source.reads[name].is_done() for _ in range(100))
    assert (source.fetch("tensor") == 7).all()  # its memory can be read
    source.process.signal(signal.SIGCONT)
    for name in ("box", "word"):
        until(source.reads[name].is_done, 20)
    assert source.word == WORD


def test_a_read_of_a_stopped_source_is_closed_at_once(source):
    source.stop()
    source.reads["word"].post()
    assert not source.reads["word"].is_done()
    source.reads["word"].close()
    with pytest.raises(ClosedError):
        source.reads["word"].is_done()
    source.process.signal(signal.SIGCONT)
    source.process.ask("set", 5)
    assert source.is_untouched()


def test_the_word_is_the_one_that_is_there_when_the_source_runs_again(source):
    source.stop()
    source.reads["word"].post()
    assert not source.reads["word"].is_done()
    source.process.tell("set", 5)
    source.process.signal(signal.SIGCONT)
    assert source.process.hear() == ["set"]
    until(source.reads["word"].is_done, 20)
    assert source.word == 5


def test_a_process_whose_name_looks_like_a_state_runs(source):
    source.process.ask("name", b"a) T 1 (".hex())
    source.fetch("word")
    assert source.word == WORD


@pytest.mark.parametrize("kind", FREEZERS)
def test_a_source_that_its_cgroup_has_frozen_is_silent_until_it_runs_again(
    source, reader, monkeypatch, kind
):
    monkeypatch.setattr(peer_module, "FROZEN_S", 0)
    reader.is_frozen = life.is_frozen
    with freezer(kind, source.pid) as (freeze, thaw):
        freeze()
        until(lambda: life.is_frozen(source.pid), 20)
        for name in ("box", "word"):
            source.reads[name].post()
            assert not any(source.reads[name].is_done() for _ in range(100))
        assert source.is_untouched()
        thaw()
        for name in ("box", "word"):
            until(source.reads[name].is_done, 20)
    assert source.word == WORD


def test_a_source_is_looked_at_once_a_second_for_whether_it_is_frozen(source, reader, monkeypatch):
    asked, now_s = [], [time.monotonic()]
    monkeypatch.setattr(peer_module.time, "monotonic", lambda: now_s[0])
    reader.is_frozen = lambda pid: asked.append(pid) or len(asked) == 2
    for is_answered in (True, False, True):
        for _ in range(10):
            source.reads["word"].post()
            assert source.reads["word"].is_done() == is_answered
        now_s[0] += 1.0
    assert asked == [source.pid] * 3


# A process that is gone, or another one


def is_gone(source):
    """Each read of it fails, and names it; it cannot be connected again."""
    for read in source.reads.values():
        with pytest.raises(TransferFailed, match=source.agent):
            read.post()
            while not read.is_done():
                pass
    with pytest.raises(TransferFailed):
        source.peer.transport.connect(source.connection)
    return source.is_untouched()


def test_a_killed_source_is_lost_and_nothing_lands(source):
    source.kill()
    assert is_gone(source)


def test_a_stopped_source_that_is_killed_is_lost(source):
    source.stop()
    source.reads["word"].post()
    assert not source.reads["word"].is_done()
    source.kill()
    with pytest.raises(TransferFailed, match=source.agent):
        source.reads["word"].is_done()
    assert is_gone(source)


def test_a_source_that_calls_exec_is_lost(source):
    assert source.process.ask("exec") == ["another"]
    assert is_gone(source)


def test_a_child_does_not_stand_for_its_parent(source):
    child = int(source.process.ask("fork")[0])
    try:
        source.fetch("word")
        assert source.word == WORD
        source.targets["word"][:] = 0
        source.kill()
        assert is_gone(source)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.fixture
def replaced(source, monkeypatch):
    """The source has ended; its number is another process's, which has a secret there."""
    source.kill()

    def read(pid, spans):
        for _, target, size in spans.tolist():
            cma.ctypes.memset(target, SECRET, size)

    def copied(pid, here, count, there, times):
        cma.ctypes.memset(here[0], SECRET, here[1])
        return int(here[1])

    monkeypatch.setattr(cma, "read", read)
    monkeypatch.setattr(cma, "_copied", copied)
    monkeypatch.setattr(ShortcutPeer, "is_running", lambda _: True)
    return source


@every_read
def test_of_a_process_that_has_got_the_number_no_byte_lands(replaced, name):
    read = replaced.reads[name]
    with pytest.raises(TransferFailed, match=replaced.agent):
        read.post()
        while not read.is_done():
            pass
    assert replaced.is_untouched()


@every_read
@pytest.mark.parametrize("ends", ["let go", "exec", "kill"])
def test_the_voucher_is_looked_at_after_the_bytes(source, monkeypatch, name, ends):
    """The memory becomes another's, or nobody's, between the first look and the copy."""
    copied = cma._copied

    def late(*args):
        if source.is_whole:
            source.is_whole = False
            source.kill() if ends == "kill" else source.process.ask(*ends.split())
            if ends == "let go":
                return copied(*args)
        return int(args[1][1]) if isinstance(args[1], cma.ctypes.Array) else 0

    source.is_whole = True
    monkeypatch.setattr(cma, "_copied", late)
    read = source.reads[name]
    read.post()
    with pytest.raises(TransferFailed, match=source.agent):
        while not read.is_done():
            pass
    assert not source.is_whole
    if name != "tensor":
        assert source.is_untouched()


# The word


@pytest.mark.parametrize("torn", [1, 3, cma.LOOKS_MAX])
def test_a_word_lands_once_two_looks_agree(source, monkeypatch, torn):
    copied, left = cma._copied, [torn]

    def tear(pid, here, *args):
        count = copied(pid, here, *args)
        if left[0]:
            left[0] -= 1
            cma.ctypes.memset(here[0] + 4, SECRET, 4)  # of the first look
        return count

    monkeypatch.setattr(cma, "_copied", tear)
    if torn == cma.LOOKS_MAX:
        source.reads["word"].post()
        assert not source.reads["word"].is_done()
        assert source.is_untouched()
    source.fetch("word")
    assert source.word == WORD
    assert left == [0]


def test_a_target_that_is_unregistered_while_its_source_is_stopped_is_not_written(source):
    source.stop()
    source.reads["word"].post()
    assert not source.reads["word"].is_done()
    source.landing["word"].close()
    source.process.signal(signal.SIGCONT)
    with pytest.raises(TransferFailed, match="unregistered"):
        while not source.reads["word"].is_done():
            pass
    assert source.is_untouched()


# The base, and what it is needed for


class Counting(MemoryTransport):
    def __init__(self):
        super().__init__()
        self.asked = 0

    def connect(self, connection):
        self.asked += 1
        return super().connect(connection)


@pytest.fixture
def pair():
    """A source and a reader, which are taken for two processes."""
    made = [ShortcutTransport(Counting(), threads=2) for _ in range(2)]
    made[1].never = 0
    yield made
    for each in made:
        each.close()


def arrives(pair, peer, memory):
    read, targets = prepared(pair[1], peer, memory)
    read.post()
    until(read.is_done, 20)
    return dict(read.ways), (targets[0] == memory).all()


def test_the_base_is_connected_when_something_needs_it(pair):
    memory = [np.full(5000, number, np.uint8) for number in range(3)]
    peer, first = attached(*pair, memory[0])
    assert arrives(pair, peer, memory[0]) == ({"cma": 5000}, True)
    peer.attach(pair[0].register([region(memory[1])]).descriptor)
    first.close()
    assert pair[1].base.asked == 0
    with pytest.raises(Exception, match="GPU"):
        peer.prepare(np.array([(1, 2, 3)], np.uint64), source_device=0)
    assert pair[1].base.asked == 1
    row = np.array([(memory[1].ctypes.data, memory[2].ctypes.data, 5000)], np.uint64)
    pair[1].register([region(memory[2])])
    peer.base().prepare(row).post()  # it was told of what is registered still
    assert (memory[2] == 1).all()
    assert arrives(pair, peer, memory[1]) == ({"cma": 5000}, True)
    assert pair[1].base.asked == 1


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EFAULT])
def test_the_first_trial_decides_before_a_byte_counts(pair, monkeypatch, caplog, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    memory = np.full(5000, 7, np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(cma, "read", refuse)
        registration = pair[0].register([region(memory)])
        for _ in range(2):
            peer = pair[1].connect(pair[0].connection)
            peer.attach(registration.descriptor)
    assert arrives(pair, peer, memory) == ({"memory": 5000}, True)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert f"the kernel does not read it: [Errno {number}]" in caplog.text


def test_memory_that_the_kernel_does_not_read_is_the_bases_alone(pair):
    there, beyond = np.full(5000, 7, np.uint8), np.full(5000, 8, np.uint8)
    peer, _ = attached(*pair, there)
    registration = pair[0].register([region(beyond)])
    copied = cma.read

    def refuse(pid, spans):
        if int(spans[0, 0]) == beyond.ctypes.data:
            raise OSError(errno.EFAULT, "Bad address")
        copied(pid, spans)

    cma.read = refuse
    try:
        peer.attach(registration.descriptor)
    finally:
        cma.read = copied
    assert arrives(pair, peer, beyond) == ({"memory": 5000}, True)
    assert arrives(pair, peer, there) == ({"cma": 5000}, True)


def test_a_peer_that_is_closed_while_its_base_connects_leaves_nothing_open(pair, monkeypatch):
    begun, go_on, closed, errors = threading.Event(), threading.Event(), [], []
    connect = pair[1].base.connect

    def late(connection):
        begun.set()
        assert go_on.wait(20)
        made = connect(connection)
        monkeypatch.setattr(made, "close", lambda: closed.append(made))
        return made

    def ask():
        with pytest.raises(ClosedError) as error:
            peer.base()
        errors.append(error.value)

    peer, _ = attached(*pair, np.zeros(10, np.uint8))
    monkeypatch.setattr(pair[1].base, "connect", late)
    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(20)
    peer.close()
    go_on.set()
    asking.join(20)
    assert len(errors) == len(closed) == 1


def test_a_card_that_lends_another_ones_connection_is_refused(pair):
    other = ShortcutTransport(Counting())
    said = cma_card(pair[0], other)
    peer = pair[1].connect(said)
    peer.attach(pair[0].register([region(np.zeros(10, np.uint8))]).descriptor)
    with pytest.raises(TransferFailed, match="its connection is of"):
        peer.prepare(np.array([(1, 2, 3)], np.uint64), source_device=0)
    other.close()


def cma_card(near, far):
    """The card of one, with the base's connection of another one."""
    from msgspec import msgpack, structs

    from torch_ros.features.shortcuts.peer import ShortcutCard

    said = ShortcutCard.decode("?", near.connection)
    return msgpack.encode(structs.replace(said, base=far.base.connection))


# The end of a process

ENDS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from features.shortcuts.steps import Refusing
from torch_ros.features.shortcuts.transport import ShortcutTransport

class Late:
    def __init__(self, number):
        self.number = number
        os.fstat(number)

    def __del__(self, os=os):
        try:
            os.fstat(self.number)
        except OSError:
            os.write(1, b"it vouches for nothing\\n")

transport = ShortcutTransport(Refusing())
late = Late(transport.process.voucher)  # freed when the module is, as tensors are
"""


def test_a_process_vouches_for_nothing_when_its_memory_is_freed_at_exit():
    """Puppets end at once: none of their memory is freed before."""
    command = [sys.executable, "-c", ENDS, str(TESTS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "it vouches for nothing\n"


def test_a_read_of_a_peer_that_was_closed_looks_at_nobody(source):
    """The number of the file with its state may be another file's by then."""
    read = source.reads["word"]
    read.post()
    source.peer.close()
    with pytest.raises(TransferFailed, match="the connection was closed"):
        while not read.is_done():
            pass
