"""Crowds that hold places at a source, whom nobody has to wait for; and the port where they are.

With TORCH_ROS_KILLS=50 or more there are 200 slow readers, and the time that they cost is limited.
"""

import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec
import pytest
import torch
from features.tcp.hostile import BYTES_MAX, MODES, Card, Ended, Reader, regions_of
from kit import inside, until

from torch_ros.features.tcp.transport import TcpTransport

pytestmark = pytest.mark.timeout(120)

IS_WHOLE = int(os.environ.get("TORCH_ROS_KILLS", "1")) >= 50
SLOW = 200 if IS_WHOLE else 40

modes = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(
    "stage",
    [
        "half a knock",
        "a hello",
        *(pytest.param(less, marks=pytest.mark.long) for less in ("silent", "knocked")),
    ],
)
def test_500_that_say_nothing_more_keep_nobody_out_where_few_files_are_left(start, stage):
    """Some of them go, and nobody who has met the source, for those who cannot even knock."""
    source = start(sizes=[70_001], limit=1024, files=600)
    silent, here = [], [source.reader(mode) for mode in MODES]
    try:
        for _ in range(500):
            silent.append(Reader(source.card, "tls" if stage == "a hello" else "near"))
            with contextlib.suppress(Ended):
                if stage != "silent":
                    silent[-1].knock(bytes(30) if stage == "half a knock" else None)
                if stage == "a hello":
                    silent[-1].line.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
            if len(silent) in {1, 100, 300, 500}:
                for mode in MODES:
                    with until(lambda m=mode: source.try_reader(m), 60) as proper:
                        assert proper.read(source.regions[0]) == source.pattern(0).tobytes()
        are_strangers = stage in {"silent", "half a knock"}
        most = 64 if are_strangers else 1024 // 4  # who knows the token
        assert source.count("fd") < source.files + most + 8
        for reader in here if are_strangers else ():  # others take the places of idle ones
            assert reader.read(source.regions[0]) == source.pattern(0).tobytes()
    finally:
        for reader in silent + here:
            reader.line.sock.close()
    source.assert_is_well()


# Opens connections as fast as it can, and says nothing, or what leads nowhere.
FLOOD = """
import collections, socket, sys
port, said = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
held = collections.deque(maxlen=300)
for number in range(10**9):
    try:
        held.append(socket.create_connection(("127.0.0.1", port)))
        held[-1].send(said)
    except OSError:
        pass
    if number == 300:
        print("flooded", flush=True)
"""


@pytest.mark.parametrize(
    "said", [b"", b"TROS" + bytes(68), b"TROS"], ids=["silent", "wrong", "part"]
)
@pytest.mark.long
def test_readers_come_in_while_strangers_open_connections_without_a_pause(start, started, said):
    source = start(sizes=[70_001])
    floods = [started.start(FLOOD, source.card.port, said.hex(), talks=True) for _ in range(2)]
    for flood in floods:
        assert flood.hear() == "flooded"
    reader = TcpTransport()
    for _ in range(30):
        peer = reader.connect(source.connection)
        peer.close()
    reader.close()
    for flood in floods:
        flood.kill()
    source.assert_is_well()


# Slow readers


def shown_by(handle):
    """The card of a handle's process, and what a request for its tensors asks for."""
    shard = inside(handle)
    descriptor = shard.mailbox._tensors.descriptor
    while (fields := msgspec.msgpack.decode(descriptor))[0] != "tcp":
        descriptor = fields[-1]  # of what stands around the transport
    name, starts, ends = regions_of(descriptor)
    return Card.read(shard.transport.connection), [
        (name, start, end - start) for start, end in zip(starts, ends, strict=True)
    ]


def slow_readers(card, row, count):
    """Readers that are due 32 MiB each, and take a byte."""
    name, start, size = row
    rows = [(name, start, min(size, BYTES_MAX))] * (BYTES_MAX // min(size, BYTES_MAX))
    readers = []
    for number in range(count):
        readers.append(Reader(card, MODES[number % 2], buffer_bytes=4096).meet())
        readers[-1].ask(*rows)
        assert readers[-1].status() == 0
    return readers


@pytest.fixture
def opened_with():
    return {"transport": "tcp", "drain_s": 0.5}


def test_unpublish_and_unregister_wait_for_no_reader_that_takes_a_byte_a_second(opened):
    """They take none while it is waited for: who waits for them waits for ever."""
    tensor = torch.zeros(4 << 20, dtype=torch.uint8)
    handle = opened("trainer", {"w": tensor})
    took_s = []
    for version in (1, 2):
        handle.publish(version)
        card, [row] = shown_by(handle)
        readers = slow_readers(card, row, SLOW // 2)
        for call in (handle.unpublish, handle.unregister):
            started_s = time.perf_counter()
            call()
            took_s.append(time.perf_counter() - started_s)
        tensor.fill_(255)  # which the trainer may now
        for reader in readers[:8]:
            left = bytearray()
            with contextlib.suppress(Ended):
                if reader.mode == "near":
                    left = reader.rest()
                else:
                    for piece in reader.content(*[(row[0], 0, BYTES_MAX)]):
                        left += piece
            assert not any(left)  # all are older than the step
            assert len(left) < BYTES_MAX
        for reader in readers:
            reader.line.sock.close()
        tensor.zero_()
        handle.register({"w": tensor})
    print("unpublish and unregister took", [round(each, 4) for each in took_s])
    assert not IS_WHOLE or max(took_s) < 0.1


# Listeners


def listening(pid):
    """The ports on which a process listens."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(str(link.readlink()))
    ports = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


OPENED = """
import sys
import torch, torch_ros
handle = torch_ros.open("ports", endpoint="memory://ports", transport="tcp")
handle.register({"w": torch.zeros(1000)})
handle.publish(1)
print(handle._shard.transport.connection.hex(), "nixl" in sys.modules, flush=True)
sys.stdin.readline()
handle.close(linger_s=0)
"""


@pytest.mark.parametrize(
    "ucx_tls", ["all", *(pytest.param(each, marks=pytest.mark.long) for each in ("", "tcp,self"))]
)
def test_no_port_is_open_but_the_one_of_the_card_whatever_ucx_is_told(started, ucx_tls):
    environment = {"UCX_TLS": ucx_tls} if ucx_tls else {}
    process = started.start(OPENED, talks=True, **environment)
    connection, has_nixl = process.hear().split()
    assert listening(process.pid) == {Card.read(bytes.fromhex(connection)).port}
    assert has_nixl == "False"
    process.tell("end")
    process.finish()


def test_listening_ports_are_seen(started):
    code = (
        "import socket; a = socket.create_server(('', 0)); "
        "b = socket.create_server(('::1', 0), family=socket.AF_INET6); "
        "print(a.getsockname()[1], b.getsockname()[1], flush=True); input()"
    )
    process = started.start(code, talks=True)
    ports = set(map(int, process.hear().split()))
    assert listening(process.pid) == ports
    with socket.create_server(("127.0.0.1", 0)):
        assert listening(process.pid) == ports
