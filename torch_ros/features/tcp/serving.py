"""The source's end: a thread that sends registered memory to readers who know the token.

docs/protocol/tcp.md says what a stranger can do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import resource
import selectors
import socket
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from torch_ros.channels import wire
from torch_ros.channels.addresses import plain, tune
from torch_ros.channels.meeting import (
    FLAGS,
    GO_ON,
    WRITE,
    Channel,
    SealedChannel,
    Steps,
    TcpIdentity,
    accept,
    sent,
)
from torch_ros.channels.pool import close_number, drop_copy, hang_up, share
from torch_ros.channels.views import PieceBuffers, at, rest
from torch_ros.channels.wire import Garbage
from torch_ros.copies.crossing import Crossing, CrossingFailed, Part
from torch_ros.errors import UsageError
from torch_ros.p2p.regions import Cover
from torch_ros.printable import log_of
from torch_ros.spans import HOST

log = log_of(__name__)

Rows = Sequence[tuple[bytes, int, int]]
Found = Sequence[tuple[bytes, int, int, int]]  # with the device

UNKNOWN_MAX, UNKNOWN_S = 64, 5.0  # connections that have not shown the token
MEET_S = 10.0  # for those that have
REST_S = 1.0  # of the listeners, when this process may open no more
TICK_S = 0.5
LOOKS_MAX = 8  # at a word that changes meanwhile
_NOEXEC = 0x0008  # MFD_NOEXEC_SEAL, which some systems ask for and old ones do not know
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_servers: set[Server] = set()  # no weak ones: another thread may add one while they are counted


class Table:
    """Memory that may be read now, by the ids of registrations."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held for one look-up, and one copy that does not wait
        self._bounds: dict[bytes, tuple[int, list[int], list[int]]] = {}

    def add(self, name: bytes, cover: Cover) -> None:
        self._bounds[name] = cover.device, cover.starts.tolist(), cover.ends.tolist()

    def remove(self, name: bytes) -> None:
        """When this returns, not a byte of it is copied any more."""
        self._bounds.pop(name, None)
        with self.lock:
            pass

    def find(self, name: bytes, address: int, size: int) -> int | None:
        """The device of this memory; None if the id is not there.

        Raises: Garbage: These bytes are not in one region of it.
        """
        if (bounds := self._bounds.get(name)) is None:
            return None
        device, starts, ends = bounds
        region = bisect_right(starts, address) - 1
        if region < 0 or address + size > ends[region]:
            raise Garbage("memory that is not registered")
        return device

    def refuse_gone(self, names: Collection[bytes]) -> None:
        """Raises: ConnectionError: One is not there any more. The caller holds the lock."""
        if not all(name in self._bounds for name in names):
            raise ConnectionError("it was unregistered")


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    who: str  # the address that it comes from
    since_s: float  # it is there, or the last byte went, on the server's clock
    steps: Steps = field(init=False)
    event: int = selectors.EVENT_READ
    is_known: bool = False  # it has knocked with the token
    is_due: bool = False  # an answer is
    is_near: bool = False  # it came by loopback


class Server:
    """Listens, meets and answers, in one thread, until `close`.

    Raises: UsageError: This process may write no piece to memory that is a file.
    """

    def __init__(
        self,
        agent: str,
        identity: TcpIdentity,
        table: Table,
        listeners: Sequence[socket.socket],
        crossing: Crossing,
    ) -> None:
        self._agent, self._identity, self._table = agent, identity, table
        self._crossing = crossing
        self._listeners = tuple(listeners)
        self._buffers = PieceBuffers(wire.PIECE_BYTES + 64)
        self._connections: dict[int, _Connection] = {}
        self._unproven: dict[_Connection, None] = {}  # those of them that have a limited time
        self._now_s = self._rests_s = self._turned_s = 0.0  # by its own clock; by the system's
        self._ends = False
        self._closing = threading.Lock()
        with ExitStack() as undo:
            for sock in listeners:
                undo.callback(sock.close)
            self._piece_fd, self._piece = _piece()
            undo.callback(os.close, self._piece_fd)
            undo.callback(self._piece.close)
            self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wakes)
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            self._begin()
            self._thread = threading.Thread(target=self._run, name="torch_ros serves", daemon=True)
            undo.callback(_servers.discard, self)
            _servers.add(self)
            self._thread.start()
            undo.pop_all()

    @property
    def count(self) -> int:
        return len(self._connections)

    def close(self) -> None:
        """End all connections. Idempotent. Nothing is sent when this has returned."""
        with self._closing:
            if not self._ends:  # once the thread sees that, it closes what it is woken by
                os.eventfd_write(self._wakes, 1)
                self._ends = True
        self._thread.join(UNKNOWN_S)
        if self._thread.is_alive():
            log.error("%s does not end: memory may still be read", self._thread.name)

    def pin(self) -> None:
        """Have devices copy to the piece; one is open."""
        with self._closing:
            if not self._ends:
                self._crossing.pin(memoryview(self._piece))

    def forget(self) -> None:
        """In a forked child: close the parent's files, by their numbers and without a word."""
        self._ends = True
        for sock in (*self._listeners, *(each.sock for each in self._connections.values())):
            drop_copy(sock)
        self._connections.clear()
        self._selector.close()
        self._close_rest()

    def _close_rest(self) -> None:
        for fd in (self._wakes, self._piece_fd):
            close_number(fd)
        with contextlib.suppress(BufferError):  # the parent was just sending it
            self._piece.close()

    # The thread

    def _begin(self) -> None:
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._listen()

    def _listen(self) -> None:
        for sock in self._listeners:
            self._selector.register(sock, selectors.EVENT_READ)
        self._rests_s = 0.0

    def _run(self) -> None:
        self._turned_s = time.monotonic()
        is_whole = True
        while not self._ends:
            try:
                if not is_whole:
                    self._begin_anew()
                is_whole = True
                self._turn()
            except Exception:
                log.exception("%s goes on after an error that was not expected", self._thread.name)
                is_whole = False
                time.sleep(REST_S)  # for what this process may lack
        _servers.discard(self)  # its numbers may be others' from here on
        self._drop_all()
        for sock in self._listeners:
            sock.close()
        self._selector.close()
        self._crossing.unpin(memoryview(self._piece))
        self._close_rest()

    def _begin_anew(self) -> None:
        self._drop_all()
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        self._begin()

    def _turn(self) -> None:
        """Serve all that is ready; then end those who have been there too long without the token.
        The time that this process stood still is not theirs.
        """
        found = self._selector.select(TICK_S if self._rests_s or self._unproven else None)
        now_s = time.monotonic()
        self._now_s += min(now_s - self._turned_s, 2 * TICK_S)
        self._turned_s = now_s
        for key, _ in found:
            if isinstance(key.data, _Connection):
                self._step(key.data)
            elif isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        for each in tuple(self._unproven):
            limit_s = MEET_S if each.is_known else UNKNOWN_S
            if each.since_s + limit_s < self._now_s:
                self._drop(each)
        if self._rests_s and self._rests_s <= self._now_s:
            self._listen()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _NO_ROOM and not self._rests_s:
                log.warning("no reader can connect for now (%s)", error)
                for each in self._listeners:
                    self._selector.unregister(each)
                self._rests_s = self._now_s + REST_S
            return
        try:
            sock.settimeout(0)
            tune(sock)
            who, to = plain(sock.getpeername()[0]), plain(sock.getsockname()[0])
        except (OSError, ValueError):  # it has gone again
            sock.close()
            return
        new = _Connection(sock, str(who), self._now_s)
        new.is_near, new.steps = to.is_loopback, self._serve(new)
        self._make_room()
        try:
            self._selector.register(sock, new.event, new)
        except OSError as error:
            log.warning("no reader can connect for now (%s)", error)
            sock.close()
            return
        self._connections[sock.fileno()] = new
        self._unproven[new] = None
        self._step(new)

    def _make_room(self) -> None:
        """End one of those who have not shown the token, if they are too many: one of the address
        that has most, by chance, so that no flood pushes out all others.
        """
        unknown = [each for each in self._unproven if not each.is_known]
        if len(unknown) >= UNKNOWN_MAX:
            [(most, _)] = Counter(each.who for each in unknown).most_common(1)
            self._drop(random.choice([each for each in unknown if each.who == most]))  # noqa: S311

    def _has_room(self, new: _Connection, mode: int) -> bool:
        """Whether a reader that knows the token may stay. The one that has been quiet for longest
        goes for it, and none on which an answer is due.
        """
        if mode == wire.NEAR and not new.is_near:
            raise Garbage("plain, and not by loopback")
        if sum(server.count for server in tuple(_servers)) > share():
            quiet = [e for e in self._connections.values() if e.is_known and not e.is_due]
            if not quiet:
                return False
            self._drop(min(quiet, key=lambda each: each.since_s))
        new.is_known = True
        return True

    def _step(self, one: _Connection) -> None:
        """Let a connection do what it can now. Its error is its own end, and nobody else's."""
        if one.sock.fileno() not in self._connections:
            return  # ended in this turn, for another
        try:
            event = next(one.steps) or WRITE
            if event != one.event:
                self._selector.modify(one.sock, event, one)
        except StopIteration:
            self._drop(one)
        except OSError as error:
            level = logging.WARNING if isinstance(error, CrossingFailed) else logging.DEBUG
            log.log(level, "a connection from %s ends: %s", one.who, error)
            self._drop(one)
        except Exception:
            log.exception("%s goes on after an error that was not expected", self._thread.name)
            self._drop(one)
        else:
            one.event = event
            if one not in self._unproven:
                one.since_s = self._now_s

    def _drop(self, one: _Connection) -> None:
        self._unproven.pop(one, None)
        if self._connections.pop(one.sock.fileno(), None):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one.sock)
        one.steps.close()
        hang_up(one.sock)

    def _drop_all(self) -> None:
        for each in tuple(self._connections.values()):
            self._drop(each)

    # A connection

    def _serve(self, one: _Connection) -> Steps:
        channel = yield from accept(
            *(one.sock, self._identity, self._agent, self._buffers),
            lambda mode: self._has_room(one, mode),
        )
        self._unproven.pop(one)
        while True:
            one.is_due = False
            count = wire.parse_head((yield from channel.receive(wire.HEAD.size)))
            one.is_due = True
            rows = wire.parse_rows((yield from channel.receive(count * wire.ROW.size)))
            yield from self._answer(channel, rows)

    def _answer(self, channel: Channel, rows: Rows) -> Steps:
        found = []
        for number, row in enumerate(rows):
            if number % wire.PIECE_ROWS == wire.PIECE_ROWS - 1:
                yield GO_ON
            if (device := self._table.find(*row)) is None:
                yield from channel.send(wire.STATUS.pack(wire.IS_GONE))
                return
            found.append((*row, device))
        yield from channel.send(wire.STATUS.pack(wire.HERE), more=True)
        if wire.is_word(rows):
            yield from channel.send(self._look(found))
        elif isinstance(channel, SealedChannel):
            yield from self._sealed(channel, found)
        else:
            yield from self._plain(channel, found)

    def _look(self, found: Found) -> bytes:
        """A word that is whole: the kernel copies bytes, and promises no more."""
        before = b""
        for _ in range(LOOKS_MAX):
            now = bytes(self._copied(found))
            if now == before:
                return now
            before = now
        raise ConnectionError("a word that never stays the same")

    def _plain(self, channel: Channel, found: Found) -> Steps:
        is_host = all(device == HOST for _, _, _, device in found)
        for parts in _pieces(found, channel.piece_bytes if is_host else wire.PIECE_BYTES):
            if any(device != HOST for _, _, _, device in parts):
                copied = self._copied(parts)
                with self._buffers.one(len(copied)) as own:  # the piece is another's later
                    own[:] = copied
                    yield from sent(channel.sock, own)
                yield GO_ON
                continue
            names = {name for name, _, _, _ in parts}
            views = [at(address, size) for _, address, size, _ in parts]
            while views:
                count = 0
                with self._table.lock, contextlib.suppress(BlockingIOError):
                    self._table.refuse_gone(names)
                    count = channel.sock.sendmsg(views, (), FLAGS)
                views = rest(views, count)
                if views:
                    yield WRITE
            yield GO_ON

    def _sealed(self, channel: SealedChannel, found: Found) -> Steps:
        for parts in _pieces(found, channel.piece_bytes):
            yield from channel.seal(self._copied(parts))
            yield GO_ON

    def _copied(self, parts: Found) -> memoryview:
        """Copy memory to the piece: of the host by the kernel, to which a page that is gone is no
        signal; of a device by that.

        Raises: OSError: It is not there any more, in whole: what was in the piece is another's.
        """
        piece = memoryview(self._piece)
        first, runs, crossed = 0, list[tuple[int, list[memoryview]]](), list[Part]()
        for device, some in groupby(parts, key=itemgetter(3)):
            if device == HOST:
                runs.append((first, [at(address, size) for _, address, size, _ in some]))
                first += sum(map(len, runs[-1][1]))
                continue
            for _, address, size, _ in some:
                crossed.append((device, address, piece[first : first + size]))
                first += size
        with self._table.lock:
            self._table.refuse_gone({name for name, _, _, _ in parts})
            for begin, views in runs:
                if os.pwritev(self._piece_fd, views, begin) != sum(map(len, views)):
                    raise ConnectionError("memory that is registered cannot be read")
            if crossed:
                self._crossing.out(crossed)
        return piece[:first]


def _pieces(found: Found, bytes_max: int) -> Iterator[Found]:
    """The parts that are sent at once; sealed, they are cut as their reader cuts them."""
    for piece in wire.pieces([size for _, _, size, _ in found], bytes_max):
        parts = []
        for number, first, size in piece:
            name, address, _, device = found[number]
            parts.append((name, address + first, size, device))
        yield parts


def _piece() -> tuple[int, mmap.mmap]:
    """Memory for one piece that is a file, and where it is mapped."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit < wire.PIECE_BYTES:
        raise UsageError(
            f"this process may write files of {limit} bytes: expected {wire.PIECE_BYTES} at least, "
            "for what is sent from memory; raise the limit (ulimit -f)"
        )
    try:
        fd = os.memfd_create("torch_ros piece", os.MFD_CLOEXEC | _NOEXEC)
    except OSError:
        fd = os.memfd_create("torch_ros piece", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, wire.PIECE_BYTES)
        return fd, mmap.mmap(fd, wire.PIECE_BYTES)
    except BaseException:
        os.close(fd)
        raise


def _forget_all() -> None:
    for server in tuple(_servers):
        server.forget()
    _servers.clear()


for _ in range(2):  # a signal's handler that raises there ends the first one
    os.register_at_fork(after_in_child=_forget_all)
