"""The ways between processes: both ends must have one that leads there, and reads stay with it."""

import signal
from contextlib import ExitStack

import numpy as np
import pytest

from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.face import choose
from torch_ros.features.fabrics.ways import WaysTransport, common
from torch_ros.memory.transport import MemoryTransport
from torch_ros.spans import Region

pytestmark = pytest.mark.timeout(90)

BOTH = ("nixl", "tcp")


@pytest.mark.parametrize(
    ("own", "theirs", "is_same_fabric", "kinds"),
    [
        (BOTH, BOTH, True, ["nixl", "tcp"]),
        (BOTH, BOTH, False, ["tcp"]),
        (BOTH, ["tcp"], True, ["tcp"]),
        (["tcp"], BOTH, True, ["tcp"]),
        (["nixl"], BOTH, False, []),
        (["nixl"], ["tcp"], True, []),
        (BOTH, ["ib", "tcp"], True, ["tcp"]),
        (BOTH, ["tcp", "nixl"], True, ["nixl", "tcp"]),
    ],
)
def test_nixl_is_the_first_way_within_a_fabric_and_tcp_leads_to_all(
    own, theirs, is_same_fabric, kinds
):
    assert common(own, theirs, is_same_fabric=is_same_fabric) == kinds


@pytest.fixture
def made():
    """Makes transports of several ways in memory."""
    with ExitStack() as stack:

        def made(fabric, *kinds):
            ways = [(kind, MemoryTransport()) for kind in kinds]
            transport = WaysTransport(fabric, ways)
            stack.callback(transport.close)
            return transport, dict(ways)

        yield made


def test_who_shows_no_ways_or_too_few_of_them_is_a_failed_transfer(made):
    (with_two, _), (with_one, _) = made("f", *BOTH), made("f", "tcp")
    for garbage in (b"\x90", b"\x92\xa1f\x90x", with_two.connection[:-1]):
        with pytest.raises(TransferFailed, match="no connection of a WaysTransport"):
            with_one.connect(garbage)
    with pytest.raises(TransferFailed, match="it has no way in fabric 'f'"):
        with_one.connect(b"\x92\xa1f\x90")
    peer = with_one.connect(with_two.connection)
    with pytest.raises(TransferFailed, match="with these ways"):
        peer.attach(b"\x91\xc4\x01a")


def test_who_has_no_way_in_common_is_told_what_both_have(made):
    (source, _), (reader, _) = made("west", "nixl"), made("east", *BOTH)
    said = "it has nixl in fabric 'west', this process nixl and tcp in 'east'"
    with pytest.raises(TransferFailed, match=said):
        reader.connect(source.connection)


def test_a_way_that_does_not_lead_there_is_left_before_the_first_byte_and_not_after(made, caplog):
    (source, theirs), (reader, _) = made("f", *BOTH), made("f", *BOTH)
    caplog.set_level("INFO", logger="torch_ros")
    content, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    shown, _ = (
        transport.register([Region(memory.ctypes.data, 8)])
        for transport, memory in ((source, content), (reader, target))
    )
    peer = reader.connect(source.connection)
    assert not caplog.text
    peer.attach(shown.descriptor)
    read = peer.prepare(np.array([(content.ctypes.data, target.ctypes.data, 8)], np.uint64))
    theirs["nixl"].close()
    with pytest.raises(TransferFailed):
        read.post()
    assert not target.any()
    peer.close()
    for _ in range(2):  # the second time NIXL is not tried
        reader.connect(source.connection).close()
    assert caplog.text.count("tcp, as NIXL fails") == 1
    theirs["tcp"].close()
    with pytest.raises(TransferFailed, match="by tcp: "):
        reader.connect(source.connection)


def test_a_way_that_has_ended_here_is_left_for_the_other(made):
    (source, _), (reader, own) = made("f", *BOTH), made("f", *BOTH)

    def closed(_):
        raise ClosedError("the transport is closed")

    own["nixl"].connect = closed
    reader.connect(source.connection).close()


# The way by which a reader (row) reads a source (column). "": they have none in common.
NAMES = ("auto", "auto with NIXL", "tcp", "nixl", "ucx", "ucx-tcp")
PAIRS = {
    "auto": ("tcp", "tcp", "tcp", "", "", ""),
    "auto with NIXL": ("tcp", "nixl", "tcp", "nixl", "nixl", "nixl"),
    "tcp": ("tcp", "tcp", "tcp", "", "", ""),
    "nixl": ("", "nixl", "", "nixl", "nixl", "nixl"),
    "ucx": ("", "nixl", "", "nixl", "nixl", "nixl"),
    "ucx-tcp": ("", "nixl", "", "nixl", "nixl", "nixl"),
}


@pytest.fixture(scope="module")
def ends():
    """Two transports of each name in this process, and memory of one of each."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def made(name, end):
            patch.setattr(choose, "has_gpu", lambda: name == "auto with NIXL")
            patch.setattr(choose.rdma, "has_devices", lambda: False)
            transport = choose.choose_transport(
                name.split()[0], replica=end, rank=0, in_process=False, reason="a test"
            )
            stack.callback(transport.close)
            memory = np.full(1 << 16, 7 if end == "source" else 0, np.uint8)
            region = Region(memory.ctypes.data, memory.nbytes)
            return transport, transport.register([region]), memory

        yield {(name, end): made(name, end) for name in NAMES for end in ("source", "reader")}


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("reader", NAMES)
def test_a_pair_of_options_reads_by_the_way_of_the_table_or_not_at_all(ends, reader, source):
    expected = PAIRS[reader][NAMES.index(source)]
    theirs, shown, content = ends[source, "source"]
    transport, _, target = ends[reader, "reader"]
    target[:] = 0
    if not expected:
        with pytest.raises(TransferFailed, match="the option transport of both decides"):
            transport.connect(theirs.connection)
        return
    peer = transport.connect(theirs.connection)
    peer.attach(shown.descriptor)
    peer = getattr(peer, "base", lambda: peer)()  # nothing is copied
    span = (content.ctypes.data, target.ctypes.data, 1024)
    read = peer.prepare(np.array([span], np.uint64))
    read.post()
    while not read.is_done():
        pass
    assert (target[:1024] == 7).all()
    [(way, _)] = read.ways
    assert way.startswith({"tcp": "tcp, plain", "nixl": "ucx"}[expected])
    read.close()
    peer.close()


# Two ways, of which the second is our own TCP.
TWO = """
from torch_ros.features.fabrics.ways import WaysTransport
from torch_ros.features.tcp.transport import TcpTransport
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")

def two_ways(fabric):
    agent = f"agent-{os.getpid()}"
    ways = [("nixl", nixl.NixlTransport(agent)), ("tcp", TcpTransport(agent))]
    return WaysTransport(fabric, ways)
"""

SOURCE = (
    TWO
    + """
transport = two_ways(sys.argv[1])
memory = np.full(int(sys.argv[2]), 7, np.uint8)
registration = transport.register([region(memory)])
say(transport.connection.hex(), registration.descriptor.hex(), memory.ctypes.data, memory.size)
hear()
"""
)

READER = (
    TWO
    + """
transport = two_ways(sys.argv[1])
target = np.zeros(int(sys.argv[2]), np.uint8)
transport.register([region(target)])
while True:
    match hear():
        case ["linger", seconds]:
            nixl._LINGER_S = float(seconds)
        case ["connect", connection, descriptor, address, size]:
            peer = transport.connect(bytes.fromhex(connection))
            peer.attach(bytes.fromhex(descriptor))
            span = (int(address), target.ctypes.data, int(size))
            read = peer.prepare(np.array([span], np.uint64))
            say(read.ways[0][0].split()[0].strip(","))
        case ["read"]:
            read.post()
            wait(read)
            say((target == 7).all())
        case ["post"]:
            read.post()
            say("posted")
        case ["close"]:
            read.close()
            target[:] = 0
            say("closed")
        case ["landed"]:
            say(int(target.any()))
"""
)
SIZE = 64 << 20


@pytest.mark.parametrize("fabric", ["west", "east"])
@pytest.mark.long
def test_no_byte_of_a_source_that_was_left_lands_over_those_of_another_way(spawn, fabric):
    """The source that goes on is read in the other way, into the same memory."""
    ucx = {"UCX_TLS": "tcp"}  # a read within the host would be over at once
    reader = spawn(READER, "west", SIZE, environment=ucx)
    stuck, other = (
        spawn(SOURCE, name, SIZE, environment=ucx)
        for name in (fabric, {"west": "east", "east": "west"}[fabric])
    )
    reader.tell("linger", 0.2)
    assert reader.ask("connect", *stuck.hear()) == [{"west": "ucx", "east": "tcp"}[fabric]]
    stuck.signal(signal.SIGSTOP)
    assert reader.ask("post") == ["posted"]
    assert reader.ask("close") == ["closed"]
    reader.ask("connect", *other.hear())
    assert reader.ask("read") == ["True"]
    assert reader.ask("close") == ["closed"]
    stuck.signal(signal.SIGCONT)
    stuck.tell("end")
    assert stuck.process.wait(20) == 0
    assert reader.ask("landed") == ["0"]
