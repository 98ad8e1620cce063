"""The reader's end: sockets to a peer, and reads of its memory.

There are no threads here: bytes are received by whoever asks whether a read is done, so none lands
once that is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch_ros.channels import addresses, wire
from torch_ros.channels.addresses import TcpRoute
from torch_ros.channels.meeting import (
    GO_ON,
    LATER,
    READ,
    WRITE,
    Channel,
    Full,
    Running,
    Steps,
    greet,
)
from torch_ros.channels.steps import connected, pause, within
from torch_ros.channels.views import PieceBuffers, at
from torch_ros.channels.wire import TcpCard
from torch_ros.errors import ClosedError, TransferFailed, UsageError
from torch_ros.features.tcp.serving import drop_copy, share

if TYPE_CHECKING:
    from torch_ros.features.tcp.transport import TcpPeer, TcpRegistration

NEAR_MAX, FAR_MAX = 4, 16  # sockets of a peer: 16 fill 10 Gbit/s at 40 ms with Linux's defaults
MORE_MAX, SMALL_BYTES = 2, 64 << 10  # further ones for small reads, as of words: they do not queue
CONNECT_S, MEET_S = 1.5, 4.0  # for an address, if there is another one to try
LOST_MS = 15_000  # without an answer of the source's host to what was sent
FULL_S = 0.5  # between two tries of a source that has no room
WAIT_S = 0.005  # for bytes, of any read of this process; what is there is taken for as long

_EVENTS = {READ: select.POLLIN, WRITE: select.POLLOUT}
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Unregistered(ConnectionError):
    """The source has not registered it any more."""


@dataclass(eq=False, slots=True)
class Flight:
    """The socket that something under way waits for, and how: whoever waits looks here."""

    sock: socket.socket | None = None
    event: int = LATER

    def close(self) -> None:
        sock, self.sock = self.sock, None
        if sock is not None:
            hang_up(sock)

    def watch(self) -> tuple[int, int] | None:
        """The socket and the events to ask `poll` for; None: nothing."""
        sock, event = self.sock, _EVENTS.get(self.event)
        number = -1 if sock is None else sock.fileno()
        return None if number < 0 or event is None else (number, event)


def hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a forked child may have it too: say that it is over
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def wait(flights: Iterable[Flight], wait_s: float) -> None:
    """Wait until one of them can go on. A socket that is closed meanwhile ends the wait early."""
    poll = select.poll()
    for watched in [each.watch() for each in tuple(flights)]:
        if watched:
            poll.register(*watched)
    poll.poll(wait_s * 1e3)


class Sockets:
    """The connections to one peer. A read owns one while an answer is due.

    Attributes:
        peers: How many peers the transport has, which share the sockets that it may open.
    """

    def __init__(self, card: TcpCard, routes: Sequence[TcpRoute], buffers: PieceBuffers) -> None:
        self._card, self._routes, self._buffers = card, list(routes), buffers
        self._idle: deque[Channel] = deque()
        self._lock = threading.Lock()
        self._count = 0
        self._is_closed = False
        self.peers = 1

    @property
    def is_near(self) -> bool:
        return bool(self._routes) and self._routes[0].mode == wire.NEAR

    def take(self, flight: Flight, size_bytes: int = 0) -> Running[tuple[Channel, bool]]:
        """A channel for this flight, and whether others have used it. Waits until there is one."""
        more = MORE_MAX if size_bytes <= SMALL_BYTES else 0
        while True:
            with self._lock:
                if self._is_closed:
                    raise ConnectionError("the connection was closed")
                channel = self._idle.pop() if self._idle else None
                most = min(NEAR_MAX if self.is_near else FAR_MAX, max(1, share() // self.peers))
                is_new = channel is None and self._count < most + more
                self._count += is_new
            if channel is not None:
                flight.sock = channel.sock
                return channel, True
            if is_new:
                break
            yield LATER
        try:
            return (yield from self.dial(flight)), False
        except BaseException:
            self.drop(flight)
            raise

    def give(self, flight: Flight, channel: Channel) -> None:
        """Take it back, with no answer due."""
        flight.sock = None
        with self._lock:
            if not self._is_closed:
                self._idle.append(channel)
                return
        hang_up(channel.sock)

    def drop(self, flight: Flight) -> None:
        """Close what the flight has."""
        flight.close()
        with self._lock:
            self._count -= 1

    def dial(self, flight: Flight) -> Running[Channel]:
        """Connect anew, by the first route that leads to the process of the card.

        Raises: ConnectionError: None does; why, for each.
        """
        said = []
        for route in tuple(self._routes):
            is_last = route == self._routes[-1]
            try:
                while True:
                    with contextlib.suppress(Full):
                        channel = yield from self._reach(flight, route, is_last=is_last)
                        self._prefer(route)
                        return channel
                    flight.close()
                    yield from pause(FULL_S)
            except OSError as error:
                flight.close()
                said.append(f"{route}: {error.strerror or error}")
        raise ConnectionError("; ".join(said) or "its card has no address for this host")

    def _prefer(self, route: TcpRoute) -> None:
        if route.mode != wire.NEAR and self._routes[0] != route and not self.is_near:
            self._routes = [route, *(each for each in self._routes if each != route)]

    def _reach(self, flight: Flight, route: TcpRoute, *, is_last: bool) -> Running[Channel]:
        family = socket.AF_INET if route.address.version == 4 else socket.AF_INET6
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # what this process lacks is not the source's fault
            raise Full(str(error)) from error
        _sockets.add(sock)
        flight.sock = sock
        addresses.tune(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
        connecting = connected(sock, route)
        meeting = greet(sock, self._card, route.mode, self._buffers)
        if is_last:
            yield from connecting
            return (yield from meeting)
        yield from within(connecting, CONNECT_S)
        return (yield from within(meeting, MEET_S))

    def close(self) -> None:
        """Close those that are idle; others are their reads' to close."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, deque()
        for channel in idle:
            hang_up(channel.sock)


class TcpTransfer:
    """A `Transfer`: rows that are asked for, and the socket on which they come."""

    ways: Sequence[tuple[str, int]]

    def __init__(
        self,
        peer: TcpPeer,
        rows: Sequence[tuple[bytes, int, int, int]],
        targets: Collection[TcpRegistration],
    ) -> None:
        self.peer, self.targets, self._rows = peer, targets, rows
        self.size_bytes: int = sum(size for _, _, _, size in rows)
        way = "tcp, plain" if peer.sockets.is_near else "tcp, encrypted"
        self.ways = ((way, self.size_bytes),)
        self.flight: Flight = Flight()
        self._steps: Steps | None = None
        self._state: Literal["idle", "flying", "done", "closed"] = "idle"
        self._failure = ""
        self._cause: OSError | None = None
        self._lock = threading.RLock()  # nobody writes to the targets without it
        self._has_all = False
        peer.transport.add(self)

    def post(self) -> None:
        self.peer.transport.refuse_fork()
        with self._lock:
            if self._state == "closed":
                raise ClosedError("this read was closed")
            if self._state == "flying":
                raise UsageError("this read is still in flight; post it again when it is done")
            if reason := self.peer.ended():
                raise TransferFailed(self.peer.agent, reason)
            if not all(registration.is_open for registration in self.targets):
                raise TransferFailed(self.peer.agent, "the memory it lands in was unregistered")
            self._failure, self._cause, self._has_all = "", None, False
            self._steps, self._state = self._run(), "flying"
            self._go_on()
        self._raise_failure()

    def is_done(self) -> bool:
        """Receive for a while, also what is there for other reads of this process: one that nobody
        asks about meanwhile would keep its socket, and its source waiting.
        """
        transport = self.peer.transport
        transport.refuse_fork()
        if not self._is_done():
            for read in transport.flying():
                read.go_on()
            wait((read.flight for read in transport.flying()), WAIT_S)
            return self._is_done()
        return True

    def go_on(self) -> None:
        """Receive what is there, unless another thread does; errors are kept for `is_done`."""
        if self._state == "flying" and self._lock.acquire(blocking=False):
            try:
                if self._state == "flying":
                    self._go_on()
            finally:
                self._lock.release()

    @property
    def is_flying(self) -> bool:
        return self._state == "flying"

    def _is_done(self) -> bool:
        with self._lock:
            if self._state == "flying":
                self._go_on()
            self._raise_failure()
            if self._state in {"idle", "closed"}:
                raise ClosedError("this read was not posted, failed, or was closed")
            return self._state == "done"

    def _raise_failure(self) -> None:
        if self._failure:
            reason = self.peer.ended() or self._failure
            raise TransferFailed(self.peer.agent, reason) from self._cause

    def _go_on(self) -> None:
        """Receive what is there, for a while. The caller holds the lock."""
        end_s = time.monotonic() + WAIT_S
        try:
            assert self._steps is not None
            while True:
                self.flight.event = next(self._steps)
                if self.flight.event != GO_ON or time.monotonic() > end_s:
                    return
        except StopIteration:
            self._state = "done" if self._has_all else "idle"
        except OSError as error:
            self._end(str(error.strerror or error))
            self._cause = error
        except BaseException:  # Ctrl-C: the steps are over, and not the read
            self._end("it was interrupted")
            raise

    def _run(self) -> Steps:
        sockets, flight = self.peer.sockets, self.flight
        channel, is_used = yield from sockets.take(flight, self.size_bytes)
        try:
            for rows in wire.requests(self._rows):
                try:
                    status = yield from self._asked(channel, rows)
                except OSError:
                    if not is_used:
                        raise
                    flight.close()  # the source may have ended what was idle: that is no loss
                    channel = yield from sockets.dial(flight)
                    status = yield from self._asked(channel, rows)
                is_used = True
                if status != wire.HERE:
                    raise Unregistered("it has let go of the memory")
                for piece in wire.pieces([size for _, _, _, size in rows]):
                    views = [at(rows[number][2] + first, size) for number, first, size in piece]
                    yield from channel.fill(views)
                    yield GO_ON
        except BaseException:  # also of `close`, in the middle
            sockets.drop(flight)
            raise
        sockets.give(flight, channel)
        self._has_all = True

    def _asked(self, channel: Channel, rows: Sequence[tuple[bytes, int, int, int]]) -> Running[int]:
        """The status of the answer."""
        head, body = wire.request([(name, source, size) for name, source, _, size in rows])
        yield from channel.send(head, more=True)
        yield from channel.send(body)
        (status,) = wire.STATUS.unpack((yield from channel.receive(wire.STATUS.size)))
        return int(status)

    def close(self) -> None:
        if self.peer.transport.is_foreign:
            return
        with self._lock:
            self._end("")
            self._state = "closed"
        self.peer.transport.discard(self)

    def stop(self, reason: str) -> None:
        """End it, if it is in flight. No byte lands when this has returned."""
        with self._lock:
            if self._state == "flying":
                self._end(reason)

    def _end(self, reason: str) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
        self.flight.close()
        if self._state == "flying":
            self._state, self._failure = "idle", reason


def _forget_all() -> None:
    for sock in tuple(_sockets):
        drop_copy(sock)


for _ in range(2):  # a signal's handler that raises there ends the first one
    os.register_at_fork(after_in_child=_forget_all)
