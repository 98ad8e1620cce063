"""Memory of devices is served and filled as the host's is, by way of pieces in host memory."""

import logging
import os
import socket
import threading
from contextlib import closing

import numpy as np
import pytest
from features.tcp.devices import Devices, there
from features.tcp.test_serving import DEADLINE_S, SEALED, Raw, bytes_of, done
from kit import until
from p2p.steps import region

from torch_ros.channels import wire
from torch_ros.channels.addresses import Listen, place
from torch_ros.channels.wire import PIECE_BYTES
from torch_ros.copies.crossing import CrossingFailed, CudaCrossing
from torch_ros.errors import NotSupported, TransferFailed
from torch_ros.features.tcp.transport import PIECES, TcpTransport
from torch_ros.spans import HOST, Region

WAYS = pytest.mark.parametrize(
    ("here", "to"), [(HOST, 0), (0, HOST), (1, 0), (0, 0)], ids=["in", "out", "over", "same"]
)


@pytest.fixture
def far():
    """The source's devices."""
    return Devices()


@pytest.fixture
def near():
    """The reader's."""
    return Devices()


@pytest.fixture
def source(is_sealed, far):
    where = (place()[0], -1 if is_sealed else place()[1])
    made = TcpTransport(listen=Listen(("127.0.0.1",)), place=where, crossing=far)
    with closing(made):
        yield made


@pytest.fixture
def reader(near):
    with closing(TcpTransport(crossing=near)) as made:
        yield made


def on(devices, device, array):
    devices.kept.append(array)
    return region(array) if device == HOST else devices.region(device, array)


def connected(source, reader, *regions):
    """The reader's peer, with these registered at the source; and their registration."""
    registration = source.register(regions)
    peer = reader.connect(source.connection)
    peer.attach(registration.descriptor)
    return peer, registration


def prepared(peer, *pairs):
    """A read of regions into others of the same sizes."""
    rows = [(a.address, b.address, a.size_bytes) for a, b in pairs]
    devices = {(a.device, b.device) for a, b in pairs}
    [(here, to)] = devices
    spans = np.array(rows, np.uint64)
    return peer.prepare(spans, source_device=here, target_device=to)


def copied(source, reader, far, near, held, here=0, to=0):
    """A read of `held` on device `here` of the source, what it lands in, and the registrations."""
    target = np.zeros_like(held)
    into = on(near, to, target)
    landing = reader.register([into])
    peer, shown = connected(source, reader, at := on(far, here, held))
    return prepared(peer, (at, into)), target, shown, landing


@SEALED
@WAYS
@pytest.mark.parametrize(
    "size",
    [1, PIECE_BYTES + 1, 33 << 20, *(pytest.param(n, marks=pytest.mark.long) for n in (8, 4099))],
)
def test_every_byte_arrives(source, reader, far, near, here, to, size):
    read, target, _, _ = copied(source, reader, far, near, held := bytes_of(size), here, to)
    for _ in range(2):
        done(read)
        assert (target == held).all()
        target[:] = 0
    read.close()


@SEALED
@WAYS
def test_many_small_pieces_arrive(source, reader, far, near, here, to):
    held, target = bytes_of(900 * 1000), np.zeros(900 * 1000, np.uint8)
    peer, _ = connected(source, reader, a := on(far, here, held))
    reader.register([b := on(near, to, target)])
    order = np.random.default_rng(1).permutation(900)
    rows = [(a.address + 1000 * n, b.address + 1000 * n, 999) for n in order]
    done(peer.prepare(np.array(rows, np.uint64), source_device=here, target_device=to))
    expected = held.reshape(900, 1000).copy()
    expected[:, 999] = 0
    assert (target.reshape(900, 1000) == expected).all()


@SEALED
def test_all_of_a_device_that_is_registered_is_read_and_not_a_byte_beside_it(source, far):
    held = bytes_of(4096)
    whole = far.region(0, held)  # the device would copy all of it
    registration = source.register([Region(whole.address + 1000, 1000, 0)])
    [name] = registration.names.values()
    with closing(Raw(source)) as stranger:
        assert stranger.ask((name, whole.address + 1000, 1000)) == wire.HERE
        assert stranger.receive(1000) == held[1000:2000].tobytes()
    count = len(far.calls)
    for row in (
        (whole.address + 999, 1),
        (whole.address + 999, 1000),
        (whole.address + 1000, 1001),
        (whole.address + 2000, 1),
        (whole.address + 1999, (1 << 64) - whole.address),
        (held.ctypes.data + 1000, 1),
        (there(1, held.ctypes.data) + 1000, 1),
        (0, 1),
    ):
        with closing(Raw(source)) as stranger, pytest.raises(ConnectionError):
            stranger.ask((name, whole.address + 1000, 10), (name, *row))
    assert len(far.calls) == count


@SEALED
def test_a_registration_may_have_memory_of_several_devices(source, reader, far, near):
    held = {device: bytes_of(5000, 2 + device) for device in (HOST, 0, 1)}
    regions = {device: on(far, device, array) for device, array in held.items()}
    peer, registration = connected(source, reader, *regions.values())
    _, named = wire.parse_descriptor(registration.descriptor)
    assert [each.device for each in named] == [HOST, 0, 1]
    assert len({each.id for each in named}) == 3
    targets = {device: np.zeros(5000, np.uint8) for device in held}
    landing = {device: on(near, 1 - device, array) for device, array in targets.items()}
    reader.register([*landing.values()])
    reads = {device: prepared(peer, (regions[device], landing[device])) for device in held}
    for device, read in reads.items():
        done(read)
        assert (targets[device] == held[device]).all()
    registration.close()
    for read in reads.values():
        with pytest.raises(TransferFailed, match="let go"):
            done(read)


@SEALED
def test_the_id_of_one_device_is_none_of_another(source, far):
    held = bytes_of(100)
    regions = {device: on(far, device, held) for device in (HOST, 0, 1)}
    registration = source.register([*regions.values()])
    for cover, name in registration.names.items():
        for device, other in regions.items():
            with closing(Raw(source)) as stranger:
                if device == cover.device:
                    assert stranger.ask((name, other.address, 100)) == wire.HERE
                    assert stranger.receive(100) == held.tobytes()
                else:
                    with pytest.raises(ConnectionError):
                        stranger.ask((name, other.address, 100))


@SEALED
def test_one_answer_may_have_bytes_of_host_and_devices_in_any_order(source, far):
    held = {device: bytes_of(700_000, 2 + device) for device in (HOST, 0, 1)}
    regions = {device: on(far, device, array) for device, array in held.items()}
    names = {c.device: name for c, name in source.register([*regions.values()]).names.items()}
    order = [HOST, 0, HOST, HOST, 1, 0, HOST]
    rows = [(names[at], regions[at].address + n, 600_000) for n, at in enumerate(order)]
    expected = b"".join(held[at][n : n + 600_000].tobytes() for n, at in enumerate(order))
    with closing(Raw(source)) as stranger:
        assert stranger.ask(*rows) == wire.HERE
        assert stranger.receive(len(expected)) == expected


@SEALED
def test_slow_readers_get_their_own_bytes(source, far):
    """Each is in the middle of a piece when the source copies another one's."""
    held = [bytes_of(16 << 20, seed) for seed in range(3)]
    readers = [Raw(source) for _ in held]
    for one in tuple(source._server._connections.values()):
        one.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    for reader, array in zip(readers, held, strict=True):
        reader.channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        [name] = source.register([at := far.region(0, array)]).names.values()
        assert reader.ask((name, at.address, array.nbytes)) == wire.HERE
    for reader, array in zip(readers, held, strict=True):
        assert reader.receive(array.nbytes) == array.tobytes()
        reader.close()


@SEALED
def test_to_unregister_waits_for_the_copy_under_way_and_no_other_follows(source, far):
    held = bytes_of(8 << 20)
    registration = source.register([at := far.region(0, held)])
    [name] = registration.names.values()
    copies, goes_on = threading.Event(), threading.Event()

    def wait(way, parts):
        copies.set()
        assert goes_on.wait(DEADLINE_S)

    far.before = wait
    with closing(Raw(source)) as slow:
        assert slow.ask((name, at.address, held.nbytes)) == wire.HERE
        assert copies.wait(DEADLINE_S)
        closes = threading.Thread(target=registration.close)
        closes.start()
        until(lambda: source.table.find(name, at.address, 1) is None, DEADLINE_S)
        closes.join(0.2)
        assert closes.is_alive()
        goes_on.set()
        closes.join(DEADLINE_S)
        assert not closes.is_alive()
        count = len(far.calls)
        with pytest.raises(ConnectionError):
            slow.receive(held.nbytes)
    assert len(far.calls) == count == 1


@SEALED
def test_a_device_that_fails_ends_one_connection_and_says_so(
    source, reader, far, near, caplog, is_sealed
):
    read, target, _, _ = copied(source, reader, far, near, held := bytes_of(3 << 20))
    fails = []

    def fail(way, parts):
        fails.append(way)
        raise CrossingFailed("CUDA_ERROR_OUT_OF_MEMORY")

    with closing(Raw(source)) as other:
        far.before = fail
        with pytest.raises(TransferFailed):
            done(read)
        far.before = lambda way, parts: None
        assert fails
        said = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(said) == len(fails)
        assert all("CUDA_ERROR_OUT_OF_MEMORY" in each.message for each in said)
        assert other.ask((bytes(16), 0, 1)) == wire.IS_GONE  # the same connection as before
    done(read)
    assert (target == held).all()


@SEALED
def test_a_reader_whose_device_fails_is_told_and_may_read_again(source, reader, far, near):
    read, target, _, _ = copied(source, reader, far, near, held := bytes_of(3 << 20))

    def fail(way, parts):
        raise CrossingFailed("CUDA_ERROR_LAUNCH_FAILED")

    near.before = fail
    with pytest.raises(TransferFailed, match="LAUNCH_FAILED"):
        done(read)
    assert not target.any()
    near.before = lambda way, parts: None
    done(read)
    assert (target == held).all()


@SEALED
def test_a_read_that_is_closed_in_the_middle_leaves_the_device_alone(source, reader, far, near):
    held = bytes_of(32 << 20)
    for _ in range(5):
        read, target, _, _ = copied(source, reader, far, near, held)
        before = len(near.calls)
        read.post()
        until(lambda before=before, read=read: read.is_done() or len(near.calls) > before)
        read.close()
        target[:] = 7
        again, other, _, _ = copied(source, reader, far, near, held[:1000])
        done(again)
        assert (target == 7).all()
        assert (other == held[:1000]).all()


@SEALED
@pytest.mark.parametrize("ends", ["read", "target", "transport"])
def test_no_byte_is_on_its_way_to_a_device_when_its_read_has_ended(
    source, reader, far, near, pool, ends
):
    held = bytes_of(8 << 20)
    read, target, _, landing = copied(source, reader, far, near, held)
    copies, goes_on = threading.Event(), threading.Event()

    def wait(way, parts):
        copies.set()
        assert goes_on.wait(DEADLINE_S)

    near.before = wait

    def make_one_copy():
        read.post()
        while not copies.is_set():
            read.is_done()

    receives = pool.submit(make_one_copy)
    assert copies.wait(DEADLINE_S)
    closes = pool.submit({"read": read, "target": landing, "transport": reader}[ends].close)
    with pytest.raises(TimeoutError):
        closes.result(0.2)
    goes_on.set()
    closes.result(DEADLINE_S)
    seen, count = target.copy(), len(near.calls)
    with pytest.raises(Exception, match=r"closed|unregistered"):
        receives.result(DEADLINE_S)  # raises if it looks at the read once more after its copy
        read.is_done()
    assert (target == seen).all()
    assert len(near.calls) == count == 1


@SEALED
def test_a_copy_that_a_signal_interrupts_is_over_when_its_read_is_closed(source, reader, far, near):
    read, _, _, _ = copied(source, reader, far, near, bytes_of(100))

    def interrupt(way, parts):
        raise KeyboardInterrupt

    near.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        done(read)
    assert near.settled == [0]
    read.close()


@pytest.mark.parametrize("is_sealed", [False])
def test_pieces_are_pinned_by_who_registers_the_first_memory_of_a_device(source, reader, far, near):
    host = bytes_of(10)
    source.register([region(host)])
    assert not far.opened
    held = bytes_of(3 << 20)
    read, target, _, _ = copied(source, reader, far, near, held)
    here = threading.get_ident()
    expected = [(PIECE_BYTES, here), (PIECES * PIECE_BYTES, here)]
    assert [each[1:] for each in far.pinned] == expected
    assert [each[1:] for each in near.pinned] == expected
    done(read)
    copied(source, reader, far, near, held)
    assert [each[1:] for each in far.pinned] == expected
    assert {who for _, who in far.calls} == {source._server._thread.ident}
    assert {who for _, who in near.calls} == {here}
    [_, (start, size, _)] = near.pinned
    landed = []
    near.before = lambda way, parts: landed.extend(np.frombuffer(v, np.uint8) for *_, v in parts)
    done(read)
    assert all(start <= each.ctypes.data < start + size for each in landed)
    assert (target == held).all()
    for each in (source, reader):
        each.close()
    assert far.pinned == near.pinned == []


@pytest.mark.parametrize("is_sealed", [False])
def test_host_memory_takes_no_call_of_a_device(source, reader, far, near):
    read, _, _, _ = copied(source, reader, far, near, bytes_of(3 << 20), HOST, HOST)
    done(read)
    read.close()
    for each in (source, reader):
        each.close()
    for devices in (far, near):
        assert devices.opened == devices.pinned == devices.calls == devices.settled == []


def test_the_driver_of_cuda_is_not_loaded_for_host_memory():
    with closing(TcpTransport(crossing=CudaCrossing(lambda: pytest.fail("loaded")))) as one:
        one.register([region(bytes_of(10))])


@SEALED
def test_a_forked_child_asks_a_device_for_nothing(source, reader, far, near):
    read, _, shown, landing = copied(source, reader, far, near, bytes_of(3 << 20))
    read.post()
    calls = len(near.calls)
    if not (child := os.fork()):
        try:
            for devices in (far, near):
                devices.open = devices.pin = devices.unpin = devices.settle = None
                devices.before = None
            for each in (read, shown, landing, source, reader):
                each.close()
            os._exit(0 if len(near.calls) == calls else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    until(read.is_done, DEADLINE_S, pause_s=0)


def test_a_device_that_cannot_be_reached_is_refused_with_a_way_out():
    def load():
        raise OSError("libcuda.so.1: cannot open shared object file")

    with (
        closing(TcpTransport(crossing=CudaCrossing(load))) as made,
        pytest.raises(NotSupported, match=r'libcuda.*transport="auto"'),
    ):
        made.register([Region(4096, 10, 0)])
    assert not made.registrations
