"""A source gives registered memory to those who know the token, and nothing else to anybody."""

import ctypes
import errno
import hashlib
import mmap
import os
import select
import signal
import socket
import ssl
import statistics
import threading
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from kit import until
from p2p.steps import attached, prepared, region

from torch_ros.channels import addresses, pool, wire
from torch_ros.channels.addresses import Listen, place
from torch_ros.channels.meeting import TcpIdentity, openssl
from torch_ros.channels.pool import Flight, Sockets
from torch_ros.channels.views import PieceBuffers
from torch_ros.copies.crossing import cuda
from torch_ros.errors import TransferFailed, UsageError
from torch_ros.features.tcp import serving
from torch_ros.features.tcp.serving import Server, Table
from torch_ros.features.tcp.transport import TcpTransport, _answered
from torch_ros.p2p.regions import merge
from torch_ros.spans import HOST

DEADLINE_S = 20
SIZE = 8 << 20
SEALED = pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])


def transport(is_sealed=False):
    """One whose readers are in another network, or in the same."""
    where = (place()[0], -1 if is_sealed else place()[1])
    return TcpTransport(listen=Listen(("127.0.0.1",)), place=where)


@pytest.fixture
def source(is_sealed):
    with closing(transport(is_sealed)) as made:
        yield made


@pytest.fixture
def reader():
    with closing(TcpTransport()) as made:
        yield made


class Raw:
    """A connection by hand, of somebody who knows the token."""

    def __init__(self, source):
        self.card = wire.parse_card(source.connection)
        routes = addresses.routes(self.card, place())
        self.flight = Flight()
        self.sockets = Sockets(self.card, routes, source._buffers)
        self.channel, _ = self.run(self.sockets.take(self.flight))

    def run(self, steps):
        return _answered(steps, self.flight, DEADLINE_S)

    def ask(self, *rows):
        """The status of the answer."""
        for part in wire.request(rows):
            self.run(self.channel.send(part))
        return int.from_bytes(self.run(self.channel.receive(8)), "little")

    def receive(self, size):
        """The bytes of an answer, piece by piece."""
        pieces = range(0, size, wire.PIECE_BYTES)
        return b"".join(
            self.run(self.channel.receive(min(size - first, wire.PIECE_BYTES))) for first in pieces
        )

    def close(self):
        self.flight.close()


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def name_of(registration):
    """The id of what it has in host memory, alone."""
    [name] = registration.names.values()
    return name


def done(read):
    read.post()
    until(read.is_done, DEADLINE_S, pause_s=0)


@SEALED
def test_all_of_a_registration_is_read_and_not_a_byte_beside_it(source):
    held = bytes_of(4096)
    registration = source.register([region(held[1000:2000])])
    address, name = held.ctypes.data, name_of(registration)
    with closing(Raw(source)) as stranger:
        assert stranger.ask((name, address + 1000, 1000)) == wire.HERE
        assert stranger.receive(1000) == held[1000:2000].tobytes()
    for row in (
        (address + 999, 1),
        (address + 999, 1000),
        (address + 1000, 1001),
        (address + 2000, 1),
        (address + 1999, (1 << 64) - address),
        ((1 << 64) - 1, 1),
        (0, 1),
    ):
        with closing(Raw(source)) as stranger, pytest.raises(ConnectionError):
            stranger.ask((name, address + 1000, 10), (name, *row))


@SEALED
def test_memory_of_one_registration_is_not_read_by_the_id_of_another(source):
    first, second = bytes_of(4096, 1), bytes_of(4096, 2)
    names = [name_of(source.register([region(each)])) for each in (first, second)]
    for held, name in zip((first, second), names[::-1], strict=True):
        with closing(Raw(source)) as stranger, pytest.raises(ConnectionError):
            stranger.ask((name, held.ctypes.data, 1))


@SEALED
def test_what_was_unregistered_is_not_read(source):
    held = bytes_of(4096)
    registration = source.register([region(held)])
    row = (name_of(registration), held.ctypes.data, 1)
    with closing(Raw(source)) as stranger:
        assert stranger.ask(row) == wire.HERE
        stranger.receive(1)
        registration.close()
        again = source.register([region(held)])
        assert stranger.ask(row) == wire.IS_GONE
        assert stranger.ask((bytes(16), *row[1:])) == wire.IS_GONE
        assert stranger.ask((name_of(again), *row[1:])) == wire.HERE


@SEALED
@pytest.mark.parametrize("body", [b"", bytes(8), b"\xff" * 8, wire.HEAD.pack(4097, 0)])
def test_garbage_ends_a_connection(source, body):
    held = bytes_of(10)
    name = name_of(source.register([region(held)]))
    with closing(Raw(source)) as stranger:
        stranger.run(stranger.channel.send(body or wire.HEAD.pack(1, 0)))
        if not body:
            stranger.run(stranger.channel.send(wire.ROW.pack(name, held.ctypes.data, 0)))
        with pytest.raises(ConnectionError):
            stranger.receive(8)


@pytest.mark.parametrize("is_sealed", [False])
@pytest.mark.parametrize("body", [b"GET / HTTP/1.1\r\n\r\n" + bytes(60), bytes(72), b"\xff" * 72])
def test_a_stranger_is_told_nothing(source, body):
    card = wire.parse_card(source.connection)
    with socket.create_connection(("127.0.0.1", card.port), DEADLINE_S) as stranger:
        stranger.sendall(body)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


@pytest.mark.parametrize("is_sealed", [False])
def test_no_tls_is_begun_with_a_stranger(source):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    card = wire.parse_card(source.connection)
    with (
        socket.create_connection(("127.0.0.1", card.port), DEADLINE_S) as stranger,
        pytest.raises(OSError),
    ):
        context.wrap_socket(stranger)


@SEALED
def test_silent_strangers_are_few_and_keep_nobody_out(source, reader):
    held = bytes_of(1000)
    card = wire.parse_card(source.connection)
    where = ("127.0.0.1", card.port)
    silent = [socket.create_connection(where, DEADLINE_S) for _ in range(200)]
    peer, _ = attached(source, reader, held)
    read, [target] = prepared(reader, peer, held)
    done(read)
    assert (target == held).all()
    assert source._server.count <= serving.UNKNOWN_MAX + 1
    for each in silent:
        each.close()


@pytest.mark.parametrize("is_sealed", [False])
def test_silent_strangers_are_ended(source, monkeypatch):
    monkeypatch.setattr(serving, "UNKNOWN_S", 0.1)
    card = wire.parse_card(source.connection)
    with socket.create_connection(("127.0.0.1", card.port), DEADLINE_S) as silent:
        assert silent.recv(1) == b""


@SEALED
def test_many_readers_that_know_the_token_meet_at_once(source):
    card = wire.parse_card(source.connection)
    routes = addresses.routes(card, place())
    flights = [Flight() for _ in range(2 * serving.UNKNOWN_MAX)]
    meeting = {flight: Sockets(card, routes, source._buffers).take(flight) for flight in flights}

    def all_have_met():
        for flight, steps in list(meeting.items()):
            try:
                flight.event = next(steps)
            except StopIteration:
                del meeting[flight]
        return not meeting

    until(all_have_met, DEADLINE_S)
    for flight in flights:
        flight.close()


@SEALED
def test_a_source_that_may_watch_no_socket_for_a_moment_serves_later(source, reader, monkeypatch):
    register, lacks = source._server._selector.register, []

    def lacking(*args):
        if not lacks:
            lacks.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        return register(*args)

    monkeypatch.setattr(source._server._selector, "register", lacking)
    with suppress(TransferFailed):
        reader.connect(source.connection).close()
    assert lacks
    attached(source, reader, bytes_of(8))


@SEALED
def test_a_source_begins_anew_after_an_error_of_its_own(source, reader, monkeypatch):
    held, turn, failed = bytes_of(1000), source._server._turn, threading.Event()

    def failing():
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EBADF, "Bad file descriptor")
        turn()

    monkeypatch.setattr(source._server, "_turn", failing)
    os.eventfd_write(source._server._wakes, 1)
    with suppress(TransferFailed):
        reader.connect(source.connection).close()
    assert failed.wait(DEADLINE_S)
    peer, _ = attached(source, reader, held)
    read, [target] = prepared(reader, peer, held)
    done(read)
    assert (target == held).all()


@SEALED
def test_a_read_goes_on_if_its_connection_ends_between_two_answers(source, reader, monkeypatch):
    monkeypatch.setattr(wire, "BYTES_MAX", 4096)
    held, asked = bytes_of(3 * 4096), []
    peer, _ = attached(source, reader, held)
    read, [target] = prepared(reader, peer, held)
    ask = read._asked

    def asks(channel, rows):
        asked.append(channel)
        if len(asked) == 2:
            channel.sock.shutdown(socket.SHUT_RDWR)
        return ask(channel, rows)

    monkeypatch.setattr(read, "_asked", asks)
    done(read)
    assert (target == held).all()


@pytest.mark.parametrize("is_sealed", [True])
def test_what_else_listens_at_an_address_keeps_nobody_from_the_next_one(source):
    card = wire.parse_card(source.connection)
    with socket.create_server(("127.0.0.2", card.port)) as other:
        told = [b"\x7f\0\0\2", *card.addresses]
        sockets = Sockets(
            card, addresses.routes(card._replace(addresses=told), place()), source._buffers
        )
        flight = Flight()
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0"))
        thread.start()
        channel, _ = _answered(sockets.take(flight), flight, DEADLINE_S)
        thread.join()
        assert channel.sock.getpeername()[0] == "127.0.0.1"
        flight.close()


@pytest.mark.parametrize("is_sealed", [False])
def test_a_source_that_is_awake_when_it_is_closed_is_woken_first(source, monkeypatch):
    write, server = os.eventfd_write, source._server

    def late(fd, value):
        server._thread.join(2 * serving.TICK_S)  # it looks as often beside those it does not know
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    card = wire.parse_card(source.connection)
    with socket.create_connection(("127.0.0.1", card.port), DEADLINE_S) as stranger:
        stranger.send(b"T")
        until(lambda: server.count, DEADLINE_S)
        source.close()
    assert not server._thread.is_alive()


@SEALED
def test_unregistering_waits_for_no_reader(source):
    file = mmap.mmap(-1, SIZE)
    held = np.frombuffer(file, np.uint8)
    registration = source.register([region(held)])
    address = held.ctypes.data
    slow = [Raw(source) for _ in range(10)]
    for each in slow:
        assert each.ask((name_of(registration), address, SIZE)) == wire.HERE
    registration.close()
    del held
    file.close()  # the memory is gone
    for each in slow:
        with pytest.raises(ConnectionError):
            each.receive(SIZE)
        each.close()
    other = bytes_of(10)
    name = name_of(source.register([region(other)]))
    with closing(Raw(source)) as stranger:
        assert stranger.ask((name, other.ctypes.data, 10)) == wire.HERE
        assert stranger.receive(10) == other.tobytes()


@SEALED
def test_no_byte_is_copied_after_unregistering(source):
    held = np.zeros(32 << 20, np.uint8)
    registration = source.register([region(held)])
    with closing(Raw(source)) as slow:
        assert slow.ask((name_of(registration), held.ctypes.data, held.nbytes)) == wire.HERE
        registration.close()
        held[:] = 7
        came = 0
        with pytest.raises(ConnectionError):
            while came < held.nbytes:
                assert not any(slow.receive(wire.PIECE_BYTES))
                came += wire.PIECE_BYTES


def test_unregistering_waits_for_a_copy_under_way():
    table, held = serving.Table(), bytes_of(10)
    table.add(bytes(16), merge(HOST, [region(held)], key=1))
    closing_thread = threading.Thread(target=table.remove, args=(bytes(16),))
    with table.lock:
        closing_thread.start()
        until(lambda: table.find(bytes(16), held.ctypes.data, 1) is None, DEADLINE_S)
        closing_thread.join(0.2)
        assert closing_thread.is_alive()
    closing_thread.join(DEADLINE_S)
    assert not closing_thread.is_alive()


def test_plain_is_spoken_by_loopback_alone():
    far = [each for _, each in addresses.own() if not each.is_loopback and each.version == 4]
    if not far:
        pytest.skip("this host has loopback alone")
    with closing(TcpTransport()) as source:
        card = wire.parse_card(source.connection)
        knock = wire.knock(wire.NEAR, bytes(32), card.token, card.pin, card.agent)
        for host, answer in (("127.0.0.1", wire.WELCOME), (str(far[0]), b"")):
            with socket.create_connection((host, card.port), DEADLINE_S) as stranger:
                stranger.sendall(knock)
                assert stranger.recv(1) == answer


@SEALED
@pytest.mark.parametrize("cut", ["unmapped", "cut short"])
def test_memory_that_is_gone_ends_the_read_and_not_the_source(source, reader, cut):
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    file = mmap.mmap(fd, SIZE)
    held = np.frombuffer(file, np.uint8)
    peer, _ = attached(source, reader, held)
    read, _ = prepared(reader, peer, held)
    done(read)
    if cut == "unmapped":
        libc = ctypes.CDLL(None)
        where = ctypes.c_void_p(held.ctypes.data + SIZE // 2)
        assert libc.mprotect(where, ctypes.c_size_t(SIZE // 2), 0) == 0
    else:
        os.ftruncate(fd, SIZE // 2)
    with pytest.raises(TransferFailed):
        done(read)
    other = bytes_of(1000)
    peer.attach(source.register([region(other)]).descriptor)
    read, [target] = prepared(reader, peer, other)
    done(read)
    assert (target == other).all()
    os.close(fd)


@SEALED
def test_a_piece_that_is_short_ends_the_read(source, reader):
    """Else the bytes of another registration, which the piece had before, would go for them."""
    secret, page = bytes_of(wire.PIECE_BYTES, 7), mmap.PAGESIZE
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * page)
    held = np.frombuffer(mmap.mmap(fd, 2 * page), np.uint8)
    peer, _ = attached(source, reader, held, secret)
    first, _ = prepared(reader, peer, secret)
    done(first)
    os.ftruncate(fd, page)
    read, [target] = prepared(reader, peer, held)
    with pytest.raises(TransferFailed):
        done(read)
    assert not target[page:].any()
    os.close(fd)


@SEALED
def test_a_source_that_ends_idle_connections_is_not_lost(source, reader):
    held = bytes_of(1000)
    peer, _ = attached(source, reader, held)
    read, [target] = prepared(reader, peer, held)
    for _ in range(3):
        target[:] = 0
        done(read)
        assert (target == held).all()
        for each in tuple(source._server._connections.values()):
            each.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: source._server.count == 0, DEADLINE_S)


@SEALED
def test_a_full_source_ends_what_is_idle_and_nothing_else(source, reader, monkeypatch):
    monkeypatch.setattr(serving, "share", lambda: 2)
    monkeypatch.setattr(pool, "FULL_S", 0.01)
    held = bytes_of(SIZE)
    name = name_of(source.register([region(held)]))
    busy, idle = Raw(source), Raw(source)
    row = (name, held.ctypes.data, SIZE)
    assert busy.ask(row) == wire.HERE
    assert idle.ask((name, row[1], 1)) == wire.HERE
    assert idle.receive(1) == held[:1].tobytes()
    third = Raw(source)
    with pytest.raises(ConnectionError):
        idle.ask(row)
    assert third.ask(row) == wire.HERE
    flight = Flight()
    waiting = third.sockets.dial(flight)
    for _ in range(20):
        flight.event = next(waiting)
        pool.wait([flight], 0.01)
    assert busy.receive(SIZE) == held.tobytes()
    _answered(waiting, flight, DEADLINE_S)
    assert third.receive(SIZE) == held.tobytes()
    for each in (busy, idle, third, flight):
        each.close()


@SEALED
def test_more_reads_than_sockets_take_turns(source, reader):
    held = bytes_of(1 << 20)
    peer, _ = attached(source, reader, held)
    reads = [prepared(reader, peer, held) for _ in range(40)]
    for read, _ in reads:
        read.post()
    until(lambda: {read.is_done() for read, _ in reads} == {True}, DEADLINE_S, pause_s=0)
    assert all((target == held).all() for _, [target] in reads)
    most = pool.FAR_MAX if reads[0][0].ways[0][0] == "tcp, encrypted" else pool.NEAR_MAX
    assert source._server.count <= most + pool.MORE_MAX


@SEALED
@pytest.mark.parametrize("size", [8, 1 << 20])
def test_a_read_ends_though_nobody_asks_about_those_before_it(source, reader, size):
    held = bytes_of(SIZE)
    peer, _ = attached(source, reader, held)
    before = [prepared(reader, peer, held) for _ in range(20)]
    for read, _ in before:
        read.post()
    last, [target] = prepared(reader, peer, held[:size])
    done(last)
    assert (target == held[:size]).all()
    until(lambda: {read.is_done() for read, _ in before} == {True}, DEADLINE_S, pause_s=0)
    assert all((target == held).all() for _, [target] in before)


@SEALED
def test_a_read_that_is_closed_in_the_middle_leaves_its_target_alone(source, reader):
    held = bytes_of(32 << 20)
    peer, _ = attached(source, reader, held)
    for _ in range(20):
        read, [target] = prepared(reader, peer, held)
        read.post()
        read.is_done()
        read.close()
        seen = target.copy()
        target[:] = 7
        after, [other] = prepared(reader, peer, held[:1000])
        done(after)
        assert (target == 7).all()
        assert (other == held[:1000]).all()
        assert len(seen)


@SEALED
def test_memory_that_is_let_go_of_says_so(source, reader):
    held = bytes_of(1000)
    peer, registration = attached(source, reader, held)
    read, _ = prepared(reader, peer, held)
    registration.close()
    with pytest.raises(TransferFailed, match="let go"):
        done(read)


def test_a_process_that_may_write_no_piece_is_told_so(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    with pytest.raises(UsageError, match="ulimit -f"):
        TcpTransport()


def test_a_source_that_cannot_begin_leaves_nothing_open(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    identity, table, listener = TcpIdentity(), Table(), socket.create_server(("127.0.0.1", 0))
    before, there = set(serving._servers), len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        Server("agent", identity, table, [listener], cuda())
    assert len(list(Path("/proc/self/fd").iterdir())) == there - 1, "the listener is closed too"
    assert listener.fileno() < 0
    assert serving._servers == before


# Processes


class Child:
    """A forked process with a source; `pid` and what its readers need."""

    def __init__(self, size, is_sealed=False, before=lambda: None):
        here, there = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                before()
                held = bytes_of(size, 3)
                made = transport(is_sealed)
                registration = made.register([region(held)])
                said = made.connection, registration.descriptor, name_of(registration)
                where = held.ctypes.data.to_bytes(8, "little")
                for part in (*said, where):
                    os.write(there, len(part).to_bytes(4, "little") + part)
                signal.pause()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(there)
        with os.fdopen(here, "rb") as file:
            parts = [file.read(int.from_bytes(file.read(4), "little")) for _ in range(4)]
        self.connection, self.descriptor, self.name = parts[:3]
        self.address = int.from_bytes(parts[3], "little")
        self.size = size
        self._buffers = PieceBuffers(wire.PIECE_BYTES + 64)

    def read(self, reader, target):
        peer = reader.connect(self.connection)
        peer.attach(self.descriptor)
        rows = [(self.address, target.ctypes.data, target.nbytes)]
        return peer, peer.prepare(np.array(rows, np.uint64))

    def files(self):
        return len([*Path(f"/proc/{self.pid}/fd").iterdir()])

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@SEALED
def test_a_read_of_a_stopped_source_ends_when_it_is_closed(reader, is_sealed):
    target = np.zeros(32 << 20, np.uint8)
    reader.register([region(target)])
    with closing(Child(target.nbytes, is_sealed)) as child:
        peer, first = child.read(reader, target)
        done(first)
        assert (target == bytes_of(target.nbytes, 3)).all()
        os.kill(child.pid, signal.SIGSTOP)
        took = []
        for _ in range(50):
            rows = [(child.address, target.ctypes.data, target.nbytes)]
            read = peer.prepare(np.array(rows, np.uint64))
            read.post()
            read.is_done()
            target[:] = 7
            begun_s = time.monotonic()
            read.close()
            took.append(time.monotonic() - begun_s)
        assert statistics.median(took) < 0.1
        os.kill(child.pid, signal.SIGCONT)
        _, after = child.read(reader, np.frombuffer(target, np.uint8))
        assert (target == 7).all()
        done(after)
        assert (target == bytes_of(target.nbytes, 3)).all()


@SEALED
def test_readers_that_end_in_the_middle_end_no_source(reader, is_sealed):
    def as_programs_in_c():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    with closing(Child(8 << 20, is_sealed, as_programs_in_c)) as child:
        before = child.files()
        for count in range(60):
            stranger = Raw(child)
            assert stranger.ask((child.name, child.address, child.size)) == wire.HERE
            stranger.receive(1 if count % 2 and not is_sealed else wire.PIECE_BYTES)
            stranger.close()
        until(lambda: child.files() <= before, DEADLINE_S)
        target = np.zeros(child.size, np.uint8)
        reader.register([region(target)])
        _, read = child.read(reader, target)
        done(read)
        assert (target == bytes_of(child.size, 3)).all()


@SEALED
def test_a_killed_source_is_noticed(reader, is_sealed):
    target = np.zeros(8 << 20, np.uint8)
    reader.register([region(target)])
    child = Child(target.nbytes, is_sealed)
    _, read = child.read(reader, target)
    done(read)
    child.close()
    with pytest.raises(TransferFailed):
        done(read)


@SEALED
def test_a_forked_child_serves_nobody_and_holds_nothing_open(source, reader):
    held = bytes_of(1000)
    peer, _ = attached(source, reader, held)
    read, [target] = prepared(reader, peer, held)
    done(read)
    server = source._server
    ours = [*server._listeners, *(each.sock for each in server._connections.values())]
    ours += [channel.sock for channel in peer.sockets._idle]
    files = {each.fileno() for each in ours} | {server._piece_fd}
    found = {inode(fd) for fd in files if fd >= 0}
    assert len(found) >= 4
    here, there = os.pipe()
    if not (child := os.fork()):
        try:
            source.close()  # does nothing
            reader.close()
            os.write(there, bytes([len(found & open_files())]))
            signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(there)
    try:
        assert os.read(here, 1) == b"\0"
        target[:] = 0
        done(read)
        assert (target == held).all()
        source.close()
        with pytest.raises(TransferFailed):
            done(read)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(here)


def inode(fd):
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def open_files():
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(inode(int(each.name)))
    return found


def test_a_forked_child_makes_its_own():
    with closing(Child(1000)) as child, closing(TcpTransport()) as reader:
        target = np.zeros(1000, np.uint8)
        reader.register([region(target)])
        _, read = child.read(reader, target)
        done(read)
        assert (target == bytes_of(1000, 3)).all()


def test_a_fork_waits_for_a_meeting_under_way():
    """OpenSSL's locks are free in a child, whatever another thread was about."""
    begun, forks, is_over = threading.Event(), threading.Event(), []

    def meet():
        with openssl:
            begun.set()
            forks.wait(DEADLINE_S)
            is_over.append(True)

    os.register_at_fork(before=forks.set)  # which runs before those that were there
    thread = threading.Thread(target=meet)
    thread.start()
    begun.wait(DEADLINE_S)
    if not (child := os.fork()):
        os._exit(0 if is_over else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.long)])
def test_forks_do_not_hang_beside_meetings(count):
    """OpenSSL's locks are free in a child, whatever another thread did at the fork."""
    ends = threading.Event()
    with closing(transport(is_sealed=True)) as source:

        def meet():
            while not ends.is_set():
                Raw(source).close()

        thread = threading.Thread(target=meet)
        thread.start()
        try:
            for _ in range(count):
                if not (child := os.fork()):
                    hashlib.new("sha3_384").update(b"x")
                    os._exit(0)
                handle = os.pidfd_open(child)
                ended, _, _ = select.select([handle], [], [], DEADLINE_S)
                os.close(handle)
                if not ended:
                    os.kill(child, signal.SIGKILL)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            ends.set()
            thread.join()
