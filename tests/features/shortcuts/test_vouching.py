"""Whose memory is copied: descriptors that name what is not theirs, and a process that vouches."""

import fcntl
import logging
import os
import pathlib
import re
import threading

import msgspec
import numpy as np
import pytest
from features.shortcuts.steps import pair_of

from torch_ros.digests import digest_of
from torch_ros.errors import TransferFailed
from torch_ros.features.shortcuts import cma
from torch_ros.features.shortcuts.peer import ShortcutTransfer
from torch_ros.features.shortcuts.transport import ShortcutTransport
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p import voucher
from torch_ros.p2p.voucher import Process
from torch_ros.spans import Region

pytestmark = pytest.mark.timeout(90)

ROOT = pathlib.Path(__file__).parents[3]

SIZE = 2 << 20

# Has weights full of 7, and secrets full of 83, which it never registered: in private memory, and
# in shared. All else that it is told to do an honest process may do, or an attacker on its host.
SOURCE = """
import fcntl, mmap
from torch_ros.features.shortcuts.transport import ShortcutTransport

def shared(value):
    fd = os.memfd_create("weights")
    os.posix_fallocate(fd, 0, size)
    array = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    array[:] = value
    return array

size = int(sys.argv[1])
weights, secrets = ([np.full(size, value, np.uint8), shared(value)] for value in (7, 83))
transport = ShortcutTransport(nixl.NixlTransport(*sys.argv[2:]))
registrations = [transport.register([region(each)]) for each in weights]
started = open("/proc/self/stat").read().split()[21]
say(transport.agent, transport.connection.hex(), started)
say(*(each.descriptor.hex() for each in registrations))
say(*(each.ctypes.data for each in weights))
say(*(each.ctypes.data for each in secrets))
while True:
    match hear():
        case ["hold", number, name, seals, content]:
            fd = os.memfd_create(bytes.fromhex(name).decode(), os.MFD_ALLOW_SEALING)
            os.write(fd, bytes.fromhex(content))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, int(seals))
            say(os.dup2(fd, int(number)))
        case ["open", number, path]:
            say(os.dup2(os.open(path, os.O_RDONLY), int(number)))
        case ["unregister"]:
            registrations[0].close()
            weights[0][:] = secrets[0]
            say("unregistered")
"""

NUMBER = 400  # of a file that a process has open, and that is no voucher


class Source:
    def __init__(self, process):
        self.process, self.pid = process, process.process.pid
        self.agent, connection, started = process.hear()
        self.connection, self.started = bytes.fromhex(connection), int(started)
        # Each of private memory, then of shared.
        self.descriptors = [bytes.fromhex(each) for each in process.hear()]
        self.weights, self.secrets = ([int(each) for each in process.hear()] for _ in range(2))

    def hold(self, content, *, name="torch_ros voucher", seals=voucher._SEALS):
        """Have a file with that content."""
        self.process.ask("hold", NUMBER, name.encode().hex(), seals, content.hex())


@pytest.fixture(scope="module")
def honest(spawn_for_all):
    return Source(spawn_for_all(SOURCE, SIZE))


@pytest.fixture(scope="module")
def evil(spawn_for_all):
    return Source(spawn_for_all(SOURCE, SIZE))


@pytest.fixture
def reader():
    from torch_ros.p2p.nixl import NixlTransport

    transport = ShortcutTransport(NixlTransport(), threads=2)
    yield transport
    transport.close()


def naming(descriptor, address, process=None):
    """A descriptor that says that something else, or somebody else's, is registered."""
    host, _, mine, base = msgspec.msgpack.decode(descriptor)
    bounds = np.array([address, address + SIZE], np.uint64).tobytes()
    return msgspec.msgpack.encode([host, bounds, process or mine, base])


def at(connection, descriptor):
    """A card that names the same process as this descriptor."""
    agent, host, _, base = msgspec.msgpack.decode(connection)
    process = msgspec.msgpack.decode(descriptor)[2]
    return msgspec.msgpack.encode([agent, host, process, base])


def content_for(agent, pid, started, *descriptors):
    said = (agent, pid, started, [digest_of(each) for each in descriptors])
    return msgspec.msgpack.encode(said)


def fetched(reader, connection, descriptor, address):
    """The bytes that a reader has then, and whether it copied them."""
    target = np.zeros(SIZE, np.uint8)
    reader.register([Region(target.ctypes.data, SIZE)])
    peer = reader.connect(connection)
    read = None
    try:
        peer.attach(descriptor)
        read = peer.prepare(np.array([(address, target.ctypes.data, SIZE)], np.uint64))
        read.post()
        while not read.is_done():
            pass
    except TransferFailed:
        pass
    return target, isinstance(read, ShortcutTransfer)


@pytest.mark.parametrize("memory", [0, 1])
def test_what_a_process_vouches_for_is_copied(honest, reader, memory):
    where = honest.descriptors[memory], honest.weights[memory]
    got, is_copied = fetched(reader, honest.connection, *where)
    assert is_copied
    assert (got == 7).all()


def own_process(evil, honest, reader):
    """The reader's own number, which has a voucher too."""
    reader.secret = np.full(SIZE, 83, np.uint8)
    address = reader.secret.ctypes.data
    return naming(evil.descriptors[0], address, reader.process), address


def own_thread(evil, honest, reader):
    """A thread's number leads to its process as well."""
    _, address = own_process(evil, honest, reader)
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait, args=(60,), daemon=True)
    thread.start()
    said = Process(thread.native_id, reader.process.namespace, reader.process.voucher)
    return naming(evil.descriptors[0], address, said), address


def borrowed(evil, honest, reader):
    """A third process vouches, though not for this, nor for this agent."""
    return _borrowed(evil, honest, 0)


def borrowed_shared(evil, honest, reader):
    """The same, of memory that is a file."""
    return _borrowed(evil, honest, 1)


def _borrowed(evil, honest, memory):
    process = msgspec.msgpack.decode(honest.descriptors[memory])[2]
    address = honest.secrets[memory]
    return naming(evil.descriptors[0], address, process), address


def other_bounds(evil, honest, reader):
    """The process that it belongs to, with its proof, but beyond what it registered."""
    return naming(honest.descriptors[0], honest.secrets[0]), honest.secrets[0]


def forged(evil, honest, reader):
    """A descriptor of the honest process's secret, and what a voucher for it would say."""
    process = Process(honest.pid, reader.process.namespace, NUMBER)
    descriptor = naming(evil.descriptors[0], honest.secrets[0], process)
    return descriptor, content_for(evil.agent, honest.pid, honest.started, descriptor)


def not_sealed(evil, honest, reader):
    """Weights that the attacker chose, which were replicated into shared memory."""
    descriptor, content = forged(evil, honest, reader)
    honest.hold(content, seals=voucher._SEALS & ~fcntl.F_SEAL_WRITE)
    return descriptor, honest.secrets[0]


def other_name(evil, honest, reader):
    """The same, and their owner has sealed them."""
    descriptor, content = forged(evil, honest, reader)
    honest.hold(content, name="weights")
    return descriptor, honest.secrets[0]


def lent_name(evil, honest, reader):
    """The honest process has the attacker's voucher open, as each reader of it for a moment."""
    descriptor, content = forged(evil, honest, reader)
    evil.hold(content)
    honest.process.ask("open", NUMBER, f"/proc/{evil.pid}/fd/{NUMBER}")
    return descriptor, honest.secrets[0]


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (own_process, "names this process"),
        pytest.param(own_thread, "expected agent", marks=pytest.mark.long),
        (borrowed, "expected agent"),
        pytest.param(borrowed_shared, "expected agent", marks=pytest.mark.long),
        (not_sealed, "can be written to"),
        (other_name, "something else"),
        (lent_name, "only reads the voucher"),
    ],
)
def test_what_a_process_does_not_vouch_for_is_not_copied(
    evil, honest, reader, caplog, attack, reason
):
    caplog.set_level(logging.INFO)
    descriptor, address = attack(evil, honest, reader)
    for _ in range(2):
        got, is_copied = fetched(reader, at(evil.connection, descriptor), descriptor, address)
        assert not is_copied
        assert not (got == 83).any()
    refused = [each for each in caplog.records if "read in another way" in each.message]
    assert [each.levelno for each in refused] == [logging.WARNING]
    assert reason in refused[0].message


def test_what_is_not_or_no_longer_vouched_for_is_not_asked_for_in_another_way(evil, honest, reader):
    """Its owner may just have let go of it, and writes there."""
    descriptor, address = other_bounds(evil, honest, reader)
    peer = reader.connect(honest.connection)
    with pytest.raises(TransferFailed, match="does not vouch for this descriptor"):
        peer.attach(descriptor)
    peer.attach(honest.descriptors[0])
    with pytest.raises(TransferFailed):
        peer.prepare(np.array([(address, address, 1)], np.uint64))
    assert peer._base is None


@pytest.mark.long
def test_an_agent_that_takes_the_name_of_another_has_not_its_voucher(spawn, honest, reader):
    evil = Source(spawn(SOURCE, SIZE, honest.agent))
    descriptor, address = borrowed(evil, honest, reader)
    got, is_copied = fetched(reader, evil.connection, descriptor, address)
    assert not is_copied
    assert not (got == 83).any()


def test_memory_that_was_let_go_of_is_not_copied_any_more(spawn, reader):
    honest = Source(spawn(SOURCE, SIZE))
    target = np.zeros(SIZE, np.uint8)
    reader.register([Region(target.ctypes.data, SIZE)])
    peer = reader.connect(honest.connection)
    peer.attach(honest.descriptors[0])
    read = peer.prepare(np.array([(honest.weights[0], target.ctypes.data, SIZE)], np.uint64))
    assert isinstance(read, ShortcutTransfer)
    honest.process.ask("unregister")
    with pytest.raises(TransferFailed, match="let go of the memory"):
        read.post()
    assert not target.any()
    where = honest.descriptors[0], honest.weights[0]
    _, is_copied = fetched(reader, honest.connection, *where)
    assert not is_copied


# Within this process


def test_two_agents_of_one_process_copy_from_each_other(pair, caplog):
    caplog.set_level(logging.INFO)
    pair[1].never = os.getpid()
    weights = np.full(SIZE, 7, np.uint8)
    registration = pair[0].register([Region(weights.ctypes.data, SIZE)])
    where = pair[0].connection, registration.descriptor, weights.ctypes.data
    got, is_copied = fetched(pair[1], *where)
    assert is_copied
    assert (got == 7).all()
    assert {each.levelno for each in caplog.records} == {logging.INFO}


@pytest.fixture
def pair():
    """A source and a reader that copies."""
    with pair_of(1) as made:
        yield made


def test_memory_that_is_let_go_of_while_it_is_copied_does_not_count(pair, monkeypatch):
    weights, target = np.full(SIZE, 7, np.uint8), np.zeros(SIZE, np.uint8)
    registration = pair[0].register([Region(weights.ctypes.data, SIZE)])
    pair[1].register([Region(target.ctypes.data, SIZE)])
    peer = pair[1].connect(pair[0].connection)
    peer.attach(registration.descriptor)
    copy = cma.read

    def let_go(*arguments):
        copy(*arguments)
        registration.close()

    monkeypatch.setattr(cma, "read", let_go)
    read = peer.prepare(np.array([(weights.ctypes.data, target.ctypes.data, SIZE)], np.uint64))
    read.post()
    with pytest.raises(TransferFailed, match="let go of the memory"):
        while not read.is_done():
            pass


def test_without_a_voucher_all_is_left_to_the_base(monkeypatch, caplog):
    with monkeypatch.context() as patched:

        def refuse(*_):
            raise OSError("no such call")

        patched.setattr(os, "memfd_create", refuse)
        source, reader = (ShortcutTransport(MemoryTransport(), threads=1) for _ in range(2))
    reader.never = 0
    memory = np.full(SIZE, 7, np.uint8)
    registration = source.register([Region(memory.ctypes.data, SIZE)])
    got, is_copied = fetched(reader, source.connection, registration.descriptor, memory.ctypes.data)
    assert not is_copied
    assert (got == 7).all()
    assert "no voucher: no such call" in caplog.text
    source.close()
    reader.close()


def test_a_reader_whose_own_voucher_is_lost_still_copies_from_others(honest, reader, caplog):
    caplog.set_level(logging.INFO)
    os.close(reader.process.voucher)
    for _ in range(2):
        where = honest.descriptors[0], honest.weights[0]
        got, is_copied = fetched(reader, honest.connection, *where)
        assert is_copied
        assert (got == 7).all()
    assert "the voucher of agent" in caplog.text
    assert "read in another way" not in caplog.text


def test_what_a_process_registers_without_a_voucher_is_not_copied(pair, caplog):
    caplog.set_level(logging.INFO)
    os.close(pair[0].process.voucher)
    memory = np.full(SIZE, 7, np.uint8)
    for _ in range(2):  # with the first one it is noticed
        registration = pair[0].register([Region(memory.ctypes.data, SIZE)])
    assert not pair[0].is_copied_from
    where = pair[0].connection, registration.descriptor, memory.ctypes.data
    got, is_copied = fetched(pair[1], *where)
    assert not is_copied
    assert (got == 7).all()


# The reach of a peer, as docs/SECURITY.md has it


OURS = 'our copies, `transport="auto"` on one host'
SOURCE_PEER = "UCX, if the peer is the source"
CLOSED = 'the same, with `transport="auto"` or `"nixl"` at the reader'
READER_PEER = "UCX over TCP, if the peer is the reader"


def test_what_a_peer_reaches_is_what_the_document_says(evil, honest, reader, spawn):
    document = ROOT.joinpath("docs/SECURITY.md").read_text()
    table = document.partition("| way | a peer reaches |")[2].strip().partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[1:]]
    reached = {
        OURS: our_copies(evil, honest, reader),
        SOURCE_PEER: ucx_of_a_hostile_source(evil, honest),
        CLOSED: ucx_of_a_hostile_source(Source(spawn(SOURCE, SIZE)), honest, is_closed=True),
        READER_PEER: ucx_of_a_hostile_reader(honest),
    }
    assert dict(rows) == reached


def our_copies(evil, honest, reader):
    """The part that a reader copies, of all that it may be asked for."""
    asked = [
        (honest.connection, honest.descriptors[0], honest.weights[0]),
        (honest.connection, *other_bounds(evil, honest, reader)),
        (evil.connection, *borrowed(evil, honest, reader)),
        (evil.connection, *borrowed_shared(evil, honest, reader)),
        (evil.connection, *own_process(evil, honest, reader)),
    ]
    asked += [
        (at(evil.connection, descriptor), descriptor, where) for _, descriptor, where in asked
    ]
    copied = [is_copied(reader, *each) for each in asked]
    return "what is registered" if copied == [True, *[False] * 9] else f"{copied}"


def is_copied(reader, *asked):
    try:
        return fetched(reader, *asked)[1]
    except TransferFailed:
        return False


def ucx_of_a_hostile_source(evil, honest, *, is_closed=False):
    """A reader believes the number of a process in an address of UCX, unless it is closed."""
    from torch_ros.p2p.nixl import NixlTransport

    mine = np.full(SIZE, 83, np.uint8)
    reached = []
    for pid, address in ((os.getpid(), mine.ctypes.data), (honest.pid, honest.secrets[0])):
        reader = NixlTransport(is_closed=is_closed)
        connection = msgspec.msgpack.decode(evil.connection)[3]
        if is_closed:  # it would read what it is to read
            base = msgspec.msgpack.decode(evil.descriptors[0])[3]
            got, _ = fetched(reader, connection, base, evil.weights[0])
            assert (got == 7).all()
        connection = number_changed(connection, evil.pid, pid, address)
        descriptor = address_changed(evil, address)
        try:
            got, _ = fetched(reader, connection, descriptor, address)
            reached.append((got == 83).all())
        except TransferFailed:  # it is asked for memory that it does not have, and ends
            reached.append(False)
        reader.close()
    is_any = "any memory of the reader, and of other processes of its user on its host"
    return {(True, True): is_any, (False, False): "nothing"}.get(tuple(reached), f"{reached}")


def ucx_of_a_hostile_reader(honest):
    """A process does what a peer asks for, at the addresses that it says."""
    from torch_ros.p2p import nixl

    address = honest.secrets[0]
    thief = nixl.NixlTransport(interfaces=["lo"])
    connection = msgspec.msgpack.decode(honest.connection)[3]
    got, _ = fetched(thief, connection, address_changed(honest, address), address)
    is_read = (got == 83).all()
    link = thief.links[honest.agent]
    lists = (
        nixl.bindings.nixlXferDList(nixl.bindings.DRAM_SEG, np.array([row], np.uint64))
        for row in (
            (got.ctypes.data, 8, thief.registrations[0].covers[0].key),
            (address, 8, link.covers[0].key),
        )
    )
    got[:8] = 66
    handle = thief.nixl.createXferReq(nixl.bindings.NIXL_WRITE, *lists, honest.agent, b"", [])
    state = thief.nixl.postXferReq(handle, b"")
    while state == nixl.bindings.NIXL_IN_PROG:
        state = thief.nixl.getXferStatus(handle)
    got[:] = 0
    connection = msgspec.msgpack.decode(honest.connection)[3]
    got, _ = fetched(thief, connection, address_changed(honest, address), address)
    is_written = (got[:8] == 66).all()
    thief.close()
    is_any = "any memory of the process, to read and to write"
    return is_any if is_read and is_written else f"{is_read}, {is_written}"


def number_changed(connection, before, after, ping):
    """An address of UCX that names another process, where there is a byte at `ping`."""
    from torch_ros.p2p import nixl

    agent, where, blob = nixl._unpack("?", nixl._CONNECTION, connection)
    number = re.escape(before.to_bytes(4, "little")) + b"(?!\0\0\0\0)"  # not a length, of 8 bytes
    blob = re.sub(number, lambda _: after.to_bytes(4, "little"), blob)
    blob = blob.replace(where[:8], ping.to_bytes(8, "little"))
    return nixl._pack(nixl._CONNECTION, agent, ping.to_bytes(8, "little") + where[8:], blob)


def address_changed(source, address):
    """NIXL's descriptor of a source, of other memory."""
    from torch_ros.p2p import nixl

    base = msgspec.msgpack.decode(source.descriptors[0])[3]
    agent, head, bounds, blob = nixl._unpack("?", nixl._DESCRIPTOR, base)
    bounds = np.array([address, address + SIZE], np.uint64).tobytes()
    now = address.to_bytes(8, "little")
    blob = blob.replace(source.weights[0].to_bytes(8, "little"), now)
    return nixl._pack(nixl._DESCRIPTOR, agent, head, bounds, blob)
