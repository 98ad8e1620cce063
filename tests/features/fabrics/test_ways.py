"""The ways between processes: names decide which one a reader takes, and it stays with it."""

import signal

import pytest

from torch_ros.errors import TransferFailed
from torch_ros.features.fabrics.ways import EVERYBODY, WaysTransport, chosen
from torch_ros.memory.transport import MemoryTransport

pytestmark = pytest.mark.timeout(90)

WEST, EAST, UNNAMED = ("west", EVERYBODY), ("east", EVERYBODY), ("default",)


@pytest.mark.parametrize(
    ("own", "theirs", "here", "there"),
    [
        (WEST, WEST, "west", "west"),
        (UNNAMED, UNNAMED, "default", "default"),
        (WEST, EAST, EVERYBODY, EVERYBODY),
        # One end has TCP alone, so that it is TCP.
        (WEST, UNNAMED, EVERYBODY, "default"),
        (UNNAMED, WEST, "default", EVERYBODY),
        (("default", EVERYBODY), UNNAMED, "default", "default"),
        (WEST, ("ib", "west", EVERYBODY), "west", "west"),
    ],
)
def test_a_reader_takes_the_first_way_that_both_have_and_else_the_last(own, theirs, here, there):
    at_home, away = chosen(own, theirs)
    assert (own[at_home], theirs[away]) == (here, there)


def test_who_shows_no_ways_or_too_few_of_them_is_a_failed_transfer():
    with_two, with_one = (
        WaysTransport([(name, MemoryTransport()) for name in names]) for names in (EAST, WEST[:1])
    )
    with pytest.raises(TransferFailed, match="no ways"):
        with_one.connect(b"\x90")
    peer = with_one.connect(with_two.connection)
    with pytest.raises(TransferFailed, match="with these ways"):
        peer.attach(b"\x91\xc4\x01a")
    with_two.close()
    with_one.close()


def test_no_other_way_is_taken_when_one_fails():
    source, reader = ([MemoryTransport(), MemoryTransport()] for _ in range(2))
    shown, reads = (WaysTransport(list(zip(WEST, ways, strict=True))) for ways in (source, reader))
    reads.connect(shown.connection).close()
    source[0].close()
    with pytest.raises(TransferFailed, match="no such agent"):
        reads.connect(shown.connection)
    reader[1].connect(source[1].connection).close()
    for each in (shown, reads):
        each.close()


# Two ways, of which the second is TCP over loopback.
BOTH = """
from torch_ros.costs import NIXL_COSTS, TCP_COSTS
from torch_ros.features.fabrics.ways import EVERYBODY, WaysTransport
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")

def two_ways(fabric):
    agent = f"agent-{os.getpid()}"
    across = nixl.NixlTransport(agent, interfaces=["lo"])
    return WaysTransport([(fabric, nixl.NixlTransport(agent)), (EVERYBODY, across)])

def lo_bytes():
    lines = open("/proc/net/dev").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == "lo:")
"""

SOURCE = (
    BOTH
    + """
transport = two_ways(sys.argv[1])
memory = np.full(int(sys.argv[2]), 7, np.uint8)
registration = transport.register([region(memory)])
say(transport.connection.hex(), registration.descriptor.hex(), memory.ctypes.data, memory.size)
hear()
"""
)

READER = (
    BOTH
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
            say("tcp" if peer.costs == TCP_COSTS else "any")
        case ["read"]:
            before = lo_bytes()
            read.post()
            wait(read)
            say((lo_bytes() - before) / target.size, (target == 7).all())
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


@pytest.mark.long
def test_tcp_carries_the_bytes_between_fabrics_and_not_within_one(spawn):
    reader = spawn(READER, "west", SIZE)
    for fabric, way in (("west", "any"), ("east", "tcp")):
        assert reader.ask("connect", *spawn(SOURCE, fabric, SIZE).hear()) == [way]
        reads = [reader.ask("read") for _ in range(3)]
        assert all(is_right == "True" for _, is_right in reads)
        carried = min(float(carried) for carried, _ in reads)  # other tests use loopback too
        assert 1 < carried < 1.1 if way == "tcp" else carried < 0.01


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
    reader.ask("connect", *stuck.hear())
    stuck.signal(signal.SIGSTOP)
    assert reader.ask("post") == ["posted"]
    assert reader.ask("close") == ["closed"]
    reader.ask("connect", *other.hear())
    assert reader.ask("read")[1] == "True"
    assert reader.ask("close") == ["closed"]
    stuck.signal(signal.SIGCONT)
    stuck.tell("end")
    assert stuck.process.wait(20) == 0
    assert reader.ask("landed") == ["0"]
