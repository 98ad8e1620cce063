"""The connections of a reader to one peer, and how sockets are waited for, counted and closed."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch_ros.channels import addresses, wire
from torch_ros.channels.addresses import TcpRoute
from torch_ros.channels.meeting import GO_ON, LATER, READ, WRITE, Channel, Full, Running, greet
from torch_ros.channels.steps import connected, pause, within
from torch_ros.channels.views import PieceBuffers
from torch_ros.channels.wire import TcpCard

CONNECTIONS_MAX = 1024  # of a process, and at most a quarter of the files that it may open
NEAR_MAX, FAR_MAX = 2, 16  # sockets of a peer: 16 fill 10 Gbit/s at 40 ms with Linux's defaults
MORE_MAX, SMALL_BYTES = 2, 64 << 10  # further ones for small reads, as of words: they do not queue
CONNECT_S, MEET_S = 1.5, 4.0  # for an address, if there is another one to try
LOST_MS = 15_000  # without an answer of the source's host to what was sent
FULL_S = 0.5  # between two tries of a source that has no room

_EVENTS = {READ: select.POLLIN, WRITE: select.POLLOUT}
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def share() -> int:
    """How many connections this process may have in each direction."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if limit < 0 else max(1, min(CONNECTIONS_MAX, limit // 4))


@dataclass(eq=False, slots=True)
class Flight:
    """The socket that something under way waits for, and how: whoever waits looks here."""

    sock: socket.socket | None = None
    event: int = LATER

    def close(self) -> None:
        sock, self.sock = self.sock, None
        if sock is not None:
            hang_up(sock)

    def watch(self) -> tuple[int, int]:
        """The number of the socket and the events to ask `poll` for; -1, 0: nothing."""
        sock, events = self.sock, _EVENTS.get(self.event, 0)
        return (-1 if sock is None or not events else sock.fileno()), events


def _round_trip_s(sock: socket.socket) -> float:
    """The shortest between the kernels, whatever keeps the processes busy: `tcpi_min_rtt`."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[148:152], "little") / 1e6  # kernels before 4.9 have none: 0


def hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a forked child may have it too: say that it is over
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def wait(flights: Sequence[Flight], wait_s: float) -> set[Flight]:
    """Wait until some of them can go on; those. A socket that is closed meanwhile ends the wait
    early.
    """
    ready = {each for each in flights if each.event == GO_ON}
    poll, waiting = select.poll(), dict[int, Flight]()
    for each in flights:
        number, events = each.watch()
        if number >= 0:
            poll.register(number, events)
            waiting[number] = each
    return ready | {waiting[number] for number, _ in poll.poll(0 if ready else wait_s * 1e3)}


class Sockets:
    """The connections to one peer. A read owns one while an answer is due.

    Attributes:
        round_trip_s: The shortest that the kernel has seen between the hosts; infinity: none.
    """

    def __init__(self, card: TcpCard, routes: Sequence[TcpRoute], buffers: PieceBuffers) -> None:
        self._card, self._routes, self._buffers = card, list(routes), buffers
        self._idle: deque[Channel] = deque()
        self._out: set[Flight] = set()  # those that have one, or dial
        self._waiting: dict[Flight, None] = {}  # for one, in the order of their turns
        self._lock = threading.RLock()  # a signal's handler may close all
        self._is_closed = False
        self._peers = 1
        self.round_trip_s: float = math.inf

    @property
    def is_near(self) -> bool:
        return bool(self._routes) and self._routes[0].mode == wire.NEAR

    def take(self, flight: Flight, size_bytes: int = 0) -> Running[tuple[Channel, bool]]:
        """A channel for this flight, and whether others have used it. Waits until there is one, in
        turn: blocks count in order, so that one that is passed over holds up all behind it. After
        an error, the caller drops the flight.
        """
        more = MORE_MAX if size_bytes <= SMALL_BYTES else 0
        try:
            while True:
                with self._lock:
                    if self._is_closed:
                        raise ConnectionError("the connection was closed")
                    is_next = more > 0 or next(iter(self._waiting), flight) is flight
                    if is_next and self._idle:
                        self._out.add(flight)
                        channel = self._idle.pop()
                        flight.sock = channel.sock
                        return channel, True
                    if is_next and len(self._out) < self._most() + more:
                        self._out.add(flight)
                        break
                    self._waiting[flight] = None
                yield LATER
        finally:
            self._waiting.pop(flight, None)
        return (yield from self.dial(flight)), False

    def give(self, flight: Flight, channel: Channel) -> None:
        """Take it back, with no answer due."""
        with self._lock:
            flight.sock = None
            self._out.discard(flight)
            self._idle.append(channel)
            self._close_idle()

    def drop(self, flight: Flight) -> None:
        """Close what the flight has, if anything."""
        flight.close()
        with self._lock:
            self._out.discard(flight)

    def share_with(self, peers: int) -> None:
        """The transport has so many peers, which share the sockets that it may open."""
        with self._lock:
            self._peers = peers
            self._close_idle()

    def _most(self) -> int:
        return min(NEAR_MAX if self.is_near else FAR_MAX, max(1, share() // self._peers))

    def _close_idle(self) -> None:
        """Close those that are too many."""
        most = 0 if self._is_closed else self._most() + MORE_MAX
        while self._idle and len(self._idle) + len(self._out) > most:
            hang_up(self._idle.popleft().sock)

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
                        self.round_trip_s = min(self.round_trip_s, _round_trip_s(channel.sock))
                        return channel
                    flight.close()
                    yield from pause(FULL_S)
            except OSError as error:
                flight.close()
                said.append(f"{route}: {error.strerror or error}")
        raise ConnectionError("; ".join(said) or "its card has no address for this host")

    def _prefer(self, route: TcpRoute) -> None:
        if self._routes[0] != route:
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
            self._close_idle()


def close_number(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def drop_copy(sock: socket.socket) -> None:
    """Close a forked child's copy of a socket, by its number and without a word to the peer. Once
    more does no harm: a signal may have ended the first time anywhere.
    """
    close_number(sock.fileno())
    sock.detach()


def _forget_all() -> None:
    for sock in tuple(_sockets):
        drop_copy(sock)


for _ in range(2):  # a signal's handler that raises there ends the first one
    os.register_at_fork(after_in_child=_forget_all)
