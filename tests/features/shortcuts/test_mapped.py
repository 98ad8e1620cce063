"""Shared memory: what is copied, what is left to the base, and when it is let go of."""

import contextlib
import ctypes
import fcntl
import gc
import itertools
import logging
import mmap
import os
import pathlib
import signal
import tempfile
import threading

import numpy as np
import pytest
from features.shortcuts.steps import copied
from kit import until
from p2p.steps import attached, prepared, region, span

from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.shortcuts import copying as copying_module
from torch_ros.features.shortcuts import mapped
from torch_ros.features.shortcuts.peer import LOOK_BYTES
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p import shared

pytestmark = pytest.mark.timeout(90)

SIZE = 2 << 20
PAGE = mmap.PAGESIZE


class File:
    """Shared memory with random content, and the number under which this process has it open."""

    def __init__(self, seed=0, size=SIZE, path=None, *, is_sealed=True):
        if path is None:
            self.fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        else:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self.fd, 0, size)
        if is_sealed:
            self.seal()
        # Python's mmap would keep another descriptor open.
        self.address = map_file(self.fd, size)
        self.memory = array_at(self.address, size)
        self.memory[:] = random_bytes(seed, size)

    def seal(self):
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    @property
    def uses(self):
        """How often this process has it mapped."""
        inode = os.fstat(self.fd).st_ino
        return sum(int(line.split()[4]) == inode for line in maps())


def maps():
    return pathlib.Path("/proc/self/maps").read_text().splitlines()


def map_file(fd, size, *, at=None, flags=mmap.MAP_SHARED):
    fixed = 0 if at is None else 0x10  # MAP_FIXED: replace what is there
    how = (mmap.PROT_READ | mmap.PROT_WRITE, flags | fixed)
    address = shared._libc.mmap(at, size, *how, fd, 0)
    assert address != shared._FAILED
    return address


def array_at(address, size):
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def random_bytes(seed, size=SIZE):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.fixture
def make():
    """Makes transports over the one in memory."""
    made = []

    def transport(**options):
        made.append(ShortcutTransport(MemoryTransport(), **options))
        made[-1].never = 0  # here both ends are one process
        return made[-1]

    yield transport
    for each in made:
        each.close()


@pytest.fixture
def pair(make):
    """A source and a reader."""
    return make(), make()


def arrives(read, targets, *sources):
    read.post()
    until(read.is_done, 20)
    return all((t == s).all() for t, s in zip(targets, sources, strict=True))


def post_and_copy(read):
    """For a thread; the read may be closed meanwhile."""
    read.post()
    with contextlib.suppress(ClosedError, TransferFailed):
        read.is_done()


def test_shared_memory_is_copied(pair):
    file = File()
    read, targets = prepared(pair[1], attached(*pair, file.memory)[0], file.memory)
    assert copied(read) == SIZE
    assert read.size_bytes == SIZE
    assert arrives(read, targets, file.memory)
    file.memory[:] = random_bytes(1)
    assert arrives(read, targets, file.memory)


def test_ordinary_memory_is_left_to_the_base(pair):
    source = random_bytes(0)
    read, targets = prepared(pair[1], attached(*pair, source)[0], source)
    assert copied(read) == 0
    assert arrives(read, targets, source)


def test_one_read_may_be_of_both(pair):
    file, source = File(), random_bytes(1)
    peer, _ = attached(*pair, file.memory, source)
    read, targets = prepared(pair[1], peer, source[5:], file.memory[7:], source[:3])
    assert copied(read) == 0  # it is the base's as a whole
    assert read.size_bytes == 2 * SIZE - 7 - 5 + 3
    assert arrives(read, targets, source[5:], file.memory[7:], source[:3])


def test_each_span_is_copied_in_one_way(make):
    source_end, reader = make(), make(threads=1)
    file, source = File(), random_bytes(1)
    peer, _ = attached(source_end, reader, file.memory, source)
    read, targets = prepared(reader, peer, file.memory, source)
    assert dict(read.ways) == {"mapped": SIZE, "cma": SIZE}
    assert arrives(read, targets, file.memory, source)


def test_a_part_of_a_file_that_is_mapped_elsewhere_in_it_is_found(pair):
    file = File(size=3 * SIZE)
    address = shared._libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_SHARED, file.fd, SIZE)
    part = array_at(address, SIZE)
    inner = part[100:-100]
    read, targets = prepared(pair[1], attached(*pair, inner)[0], inner)
    assert copied(read) == SIZE - 200
    assert arrives(read, targets, file.memory[SIZE + 100 : 2 * SIZE - 100])


@pytest.mark.parametrize("folder", [None, "/dev/shm"])  # the second is on tmpfs
def test_a_file_with_a_name_is_left_to_the_base(pair, tmp_path, folder):
    with tempfile.TemporaryDirectory(dir=folder or tmp_path) as made:
        file = File(path=f"{made}/memfd:weights", is_sealed=False)
        read, targets = prepared(pair[1], attached(*pair, file.memory)[0], file.memory)
    assert copied(read) == 0
    assert arrives(read, targets, file.memory)


def test_what_was_written_to_a_private_mapping_is_what_arrives(pair):
    file = File()
    private = array_at(map_file(file.fd, SIZE, flags=mmap.MAP_PRIVATE), SIZE)
    private[:] = random_bytes(1)
    read, targets = prepared(pair[1], attached(*pair, private)[0], private)
    assert copied(read) == 0
    assert arrives(read, targets, private)


def other_file(file):
    os.dup2(File(seed=9).fd, file.fd)


def no_file(file):
    os.close(file.fd)


def shorter_file(file):
    os.ftruncate(file.fd, SIZE - PAGE)
    file.seal()


def file_that_may_become_shorter(file):
    fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def file_with_holes(file):
    keep, punch = 1, 2
    fallocate = ctypes.CDLL(None).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    assert fallocate(file.fd, keep | punch, SIZE - PAGE, PAGE) == 0
    file.seal()


def a_pipe_instead(file):
    os.dup2(os.pipe()[0], file.fd)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (other_file, "another file"),
        (no_file, "not there"),
        (shorter_file, f"has {SIZE - PAGE} bytes"),
        (file_that_may_become_shorter, "may be cut short"),
        (file_with_holes, "holes"),
        (a_pipe_instead, "not there"),
    ],
)
def test_what_cannot_be_mapped_is_left_to_the_base(pair, caplog, spoil, reason):
    caplog.set_level(logging.INFO)
    file = File(is_sealed=False)
    registration = pair[0].register([region(file.memory)])
    spoil(file)
    peer = pair[1].connect(pair[0].connection)
    peer.attach(registration.descriptor)
    wanted = file.memory[:PAGE]
    read, targets = prepared(pair[1], peer, wanted)
    assert copied(read) == 0
    assert arrives(read, targets, wanted)
    assert reason in caplog.text


def test_more_mappings_than_a_process_can_have_are_not_made(pair, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(mapped, "MAPPINGS_MAX", 1)
    files = [File(seed) for seed in range(2)]
    sources = [file.memory for file in files]
    peer, _ = attached(*pair, *sources)
    read, targets = prepared(pair[1], peer, *sources)
    assert copied(read) == 0
    assert arrives(read, targets, *sources)
    assert len(peer.mapped.mappings) == 1
    assert "1 of 2 pieces" in caplog.text


@pytest.mark.parametrize("unused", [0, 1])
def test_both_ends_have_to_want_it_and_can_talk_if_one_does_not(make, unused):
    ends = [make(is_used=number != unused) for number in range(2)]
    file = File()
    read, targets = prepared(ends[1], attached(*ends, file.memory)[0], file.memory)
    assert copied(read) == 0
    assert arrives(read, targets, file.memory)


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_address_that_has_become_other_memory_is_read_as_that(pair, is_shared):
    before, after = File(seed=1), File(seed=2)
    peer, registration = attached(*pair, before.memory)
    read, targets = prepared(pair[1], peer, before.memory)
    assert arrives(read, targets, before.memory)
    registration.close()
    flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
    map_file(after.fd, SIZE, at=before.address, flags=flags)
    peer.attach(pair[0].register([region(before.memory[PAGE:])]).descriptor)
    read, targets = prepared(pair[1], peer, before.memory[PAGE:])
    assert copied(read) == (SIZE - PAGE if is_shared else 0)
    assert arrives(read, targets, after.memory[PAGE:])


def test_memory_that_is_registered_anew_is_mapped_once(pair):
    file = File()
    peer, registration = attached(*pair, file.memory)
    for seed in range(3):
        registration.close()
        registration = pair[0].register([region(file.memory)])
        peer.attach(registration.descriptor)
        file.memory[:] = random_bytes(seed)
        read, targets = prepared(pair[1], peer, file.memory)
        assert copied(read) == SIZE
        assert arrives(read, targets, file.memory)
        assert file.uses == 2


def test_what_its_process_has_let_go_of_is_unmapped_at_the_next_connection(make):
    source, reader, other = make(), make(), make()
    file, witness = File(), os.memfd_create("witness")
    read, targets = prepared(reader, attached(source, reader, file.memory)[0], file.memory)
    assert file.uses == 2
    kept = os.dup(file.fd)
    os.dup2(witness, file.fd)  # to its peers it looks closed, and as another file
    file.fd, closed = kept, file.fd
    reader.connect(other.connection)
    assert file.uses == 1
    with pytest.raises(TransferFailed):
        read.post()
    assert not any(target.any() for target in targets)
    os.close(closed)


def test_a_target_that_was_unregistered_is_not_written_whichever_it_is(pair):
    file, targets = File(), [np.zeros(SIZE // 2, np.uint8) for _ in range(2)]
    peer, _ = attached(*pair, file.memory)
    registrations = [pair[1].register([region(target)]) for target in targets]
    halves = zip(np.split(file.memory, 2), targets, strict=True)
    read = peer.prepare(np.array([span(*half) for half in halves], np.uint64))
    registrations[0].close()
    with pytest.raises(TransferFailed):
        read.post()
    assert not any(target.any() for target in targets)


def test_ctrl_c_while_memory_is_mapped_leaves_a_peer_that_can_be_attached_again(pair, monkeypatch):
    files = [File(seed=seed) for seed in range(2)]
    registration = pair[0].register([region(file.memory) for file in files])
    peer = pair[1].connect(pair[0].connection)
    with monkeypatch.context() as patched:
        mapping, calls = mapped.Mapping, itertools.count()

        def interrupted(*arguments):
            if next(calls):
                raise KeyboardInterrupt
            return mapping(*arguments)

        patched.setattr(mapped, "Mapping", interrupted)
        with pytest.raises(KeyboardInterrupt):
            peer.attach(registration.descriptor)
    peer.attach(registration.descriptor)
    sources = [file.memory for file in files]
    read, targets = prepared(pair[1], peer, *sources)
    assert arrives(read, targets, *sources)


def test_what_a_living_source_replaced_is_unmapped_when_the_new_is_mapped(pair):
    old, new = File(seed=1), File(seed=2)
    peer, registration = attached(*pair, old.memory)
    registration.close()
    kept = os.dup(old.fd)
    os.close(old.fd)
    old.fd = kept
    peer.attach(pair[0].register([region(new.memory)]).descriptor)
    assert (old.uses, new.uses) == (1, 2)
    read, targets = prepared(pair[1], peer, new.memory)
    assert arrives(read, targets, new.memory)


@pytest.mark.parametrize(("size", "is_worth_it"), [(LOOK_BYTES, 1), (PAGE, 0)])
def test_what_is_small_is_not_worth_a_look_at_what_is_mapped(pair, size, is_worth_it):
    file = File(size=size)
    peer, _ = attached(*pair, file.memory)
    assert len(peer.mapped.mappings) == is_worth_it
    read, targets = prepared(pair[1], peer, file.memory)
    assert arrives(read, targets, file.memory)


@pytest.mark.parametrize("closes", ["peer", "transport"])
def test_closing_unmaps(pair, closes):
    file = File()
    peer, _ = attached(*pair, file.memory)
    read, _ = prepared(pair[1], peer, file.memory)
    assert file.uses == 2
    read.close()
    (peer if closes == "peer" else pair[1]).close()
    assert file.uses == 1


@pytest.mark.parametrize("closes", ["registration", "peer", "read"])
def test_memory_that_is_being_copied_is_let_go_of_when_that_is_done(pair, monkeypatch, closes):
    file = File()
    peer, _ = attached(*pair, file.memory)
    target = np.zeros_like(file.memory)
    registration = pair[1].register([region(target)])
    read = peer.prepare(np.array([span(file.memory, target)], np.uint64))
    copying, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        copying.set()
        go_on.wait(20)
        copying_module._move_at_once(*arguments)

    monkeypatch.setattr(copying_module, "_move", slow)
    poster = threading.Thread(target=post_and_copy, args=(read,))
    closer = threading.Thread(
        target={"registration": registration, "peer": peer, "read": read}[closes].close
    )
    poster.start()
    assert copying.wait(20)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    assert file.uses == 2
    go_on.set()
    for thread in (poster, closer):
        thread.join(20)
        assert not thread.is_alive()
    assert (target == file.memory).all()


def test_a_forked_child_has_no_mapping_and_cannot_read(pair):
    file = File()
    peer, _ = attached(*pair, file.memory)
    read, targets = prepared(pair[1], peer, file.memory)
    gc.collect()
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            read.post()
        except ClosedError:
            for each in (read, peer, pair[1]):
                each.close()
            outcome = 0 if file.uses == 1 else 2
        os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arrives(read, targets, file.memory)


# Has tensors of torch full of 7, as of a copy, shared in torch's two ways, or not.
SOURCE = """
import torch
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.p2p import shared
memory = torch.full((int(sys.argv[2]),), 7, dtype=torch.uint8)
if sys.argv[1] == "copy":
    memory = torch.frombuffer(shared.allocate(memory.numel()), dtype=torch.uint8).fill_(7)
elif sys.argv[1] != "not shared":
    torch.multiprocessing.set_sharing_strategy(sys.argv[1])
    memory.share_memory_()
word = np.zeros(1, np.uint64)
transport = ShortcutTransport(nixl.NixlTransport())
registration = transport.register([Region(memory.data_ptr(), memory.numel()), region(word)])
say(transport.connection.hex(), registration.descriptor.hex(), memory.data_ptr(), word.ctypes.data)
if sys.argv[3:]:
    for version in range(1, 1 << 62):
        word[0] = 0
        memory.fill_(version % 251)
        word[0] = version
        time.sleep(0.01)  # for as long as that, it may be read
hear()
"""


class Remote:
    """The memory of a process of `SOURCE`, connected to a reader here."""

    def __init__(self, reader, process, size):
        connection, descriptor, address, word_address = process.hear()
        self.target, self.word = np.zeros(size, np.uint8), np.zeros(1, np.uint64)
        reader.register([region(self.target), region(self.word)])
        self.peer = reader.connect(bytes.fromhex(connection))
        self.peer.attach(bytes.fromhex(descriptor))
        self.inodes = {each.file[1] for each in self.peer.mapped.mappings}
        self.read, self.ask = (
            self.peer.prepare(np.array([(int(at), to.ctypes.data, to.nbytes)], np.uint64))
            for at, to in ((address, self.target), (word_address, self.word))
        )

    def fetch(self, read):
        read.post()
        while not read.is_done():
            pass


@pytest.fixture
def reader():
    from torch_ros.p2p.nixl import NixlTransport

    transport = ShortcutTransport(NixlTransport(), threads=2)
    yield transport
    transport.close()


def mapped_of(remote):
    """How many files of that process are mapped here."""
    return sum(int(line.split()[4]) in remote.inodes for line in maps())


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("copy", "mapped"),
        *((each, "cma") for each in ("file_descriptor", "file_system", "private")),
    ],
)
def test_tensors_are_copied_from_another_process(spawn, reader, strategy, way):
    """Torch's files may be cut short, and would then end who has them mapped."""
    source = spawn(SOURCE, strategy.replace("private", "not shared"), SIZE)
    remote = Remote(reader, source, SIZE)
    assert dict(remote.read.ways) == {way: SIZE}
    remote.fetch(remote.read)
    assert (remote.target == 7).all()


def test_a_source_that_was_killed_is_noticed_and_its_memory_let_go_of(spawn, reader):
    killed, other = (spawn(SOURCE, "copy", SIZE) for _ in range(2))
    remote = Remote(reader, killed, SIZE)
    remote.fetch(remote.read)
    assert mapped_of(remote) == 1
    killed.signal(signal.SIGKILL)
    with pytest.raises(TransferFailed):
        for _ in range(10_000):
            remote.fetch(remote.read)
    another = Remote(reader, other, SIZE)
    assert (mapped_of(remote), mapped_of(another)) == (0, 1)
    another.fetch(another.read)
    assert (another.target == 7).all()


def test_a_source_without_shared_memory_that_was_killed_is_noticed(spawn, reader):
    killed = spawn(SOURCE, "not shared", SIZE)
    remote = Remote(reader, killed, SIZE)
    remote.fetch(remote.read)
    killed.signal(signal.SIGKILL)
    with pytest.raises(TransferFailed):
        for _ in range(10_000):
            remote.fetch(remote.read)


@pytest.mark.timeout(240)  # on busy cores, both kinds of reads come seldom
@pytest.mark.parametrize("times", [15, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", ["copy", "not shared"])
def test_a_read_that_overlaps_a_write_is_followed_by_a_word_that_shows_it(
    spawn, reader, strategy, times
):
    remote = Remote(reader, spawn(SOURCE, strategy, SIZE, "writes"), SIZE)
    counted = refused = 0
    while min(counted, refused) < times:
        remote.fetch(remote.ask)
        before = int(remote.word[0])
        remote.fetch(remote.read)
        remote.fetch(remote.ask)
        if before and int(remote.word[0]) == before:
            counted += 1
            assert (remote.target == before % 251).all()
        else:
            refused += 1
