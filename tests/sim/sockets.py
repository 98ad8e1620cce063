"""Production's TCP transport, over sockets by which bytes come late, in part, or never.

What it does itself runs as it is, at both ends of a connection. The world's are only what a kernel
does, and the thread of a source, which stands still with its process. What is sent is copied at
that moment, and comes later: a reader may get what its source had long ago.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import socket
import sys
from collections import deque
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import wires
from planting import others

from torch_ros.channels import addresses, pool, wire
from torch_ros.channels.meeting import GO_ON, READ, WRITE, TcpIdentity
from torch_ros.features.seeding.rules import is_forerunner
from torch_ros.features.tcp import reading, serving, transport
from torch_ros.protocol import keys as k

LOST_S = 15.0  # until a kernel ends a connection by which nothing comes
LIMITS = {"ROWS_MAX": 2, "BYTES_MAX": 2048}  # of a request: most reads make several
PLACE = "host", 1


@functools.cache
def _identity(_: int) -> TcpIdentity:
    return TcpIdentity()


_piece = functools.cache(serving._piece)


class StreamWire(transport.TcpTransport):
    """A process's endpoint."""

    def __init__(self, world, process, replica: str) -> None:
        self.world, self.process = world, process
        agent = f"agent-{process.number}"
        if is_forerunner(k.instance(replica, "")):
            agent = f"forerunner-{process.number}-{world.number()}"
        super().__init__(agent, place=PLACE, crossing=SimpleNamespace())
        self.reads, self._peers = _Ordered(), _Ordered()
        world.wires[agent] = self

    def register(self, regions):
        made = super().register(regions)
        made.bounds = [e for c in made.names for e in np.stack((c.starts, c.ends), 1).tolist()]
        return made

    def has(self, address: int, size: int) -> bool:
        """Whether it is registered at this moment."""
        bounds = (each for made in self.registrations for each in made.bounds)
        return any(start <= address and address + size <= end for start, end in bounds)


class _Ordered(dict):
    """A set that is gone through in the same order by each run."""

    add = dict.setdefault

    def discard(self, one) -> None:
        self.pop(one, None)


class Sock:
    """One end of a connection, or of none yet."""

    def __init__(self, world, process, agent: str = "") -> None:
        self.world, self.process, self.agent = world, process, agent
        self.number = world.number()
        self.other: Sock | None = None
        self.came = bytearray()
        self.held = b""  # what goes with the next that is sent
        self.line: deque[bytes] = deque()  # what is on its way to the other end; b"": the end
        self.late_s = self.due_s = 0.0  # of what is sent, and when the last of it comes
        self.error = 0
        self.is_over = self.is_closed = self.is_silent = False
        self.waiting: list = []  # actors, for what comes
        self.called = lambda: None  # when something has

    # What production code calls

    def connect_ex(self, where: tuple[str, int]) -> int:
        if self.other is not None:
            return errno.EISCONN
        server = self.world.ports.get(where[1])
        if server is None or server.is_over:
            return errno.ECONNREFUSED
        if self._silent_until_s(server.process) > self.world.now_s:
            return errno.EINPROGRESS
        self.other = Sock(self.world, server.process, server._agent)
        self.other.other = self
        server.meet(self.other)
        self.world.dialed.append(self)
        return 0

    def send(self, view, flags: int) -> int:
        """A request's last part decides how it and its answer fare."""
        self._refuse_over()
        self.held += view
        if not flags & socket.MSG_MORE:
            if not self.agent:
                self._fare()
            self._carry(b"")
        return len(view)

    def sendmsg(self, views, _, __) -> int:
        """An answer's: a part of it is copied now, the rest when the source is called again."""
        self._refuse_over()
        for view in views:
            self.world.checks.sent(self.process, self.agent, _address(view), len(view))
        data = b"".join(views)
        if len(data) > 1 and self.world.random() < self.world.part_share:
            self.world.saw("sent in part")
            data = data[: len(data) // 2]
        self._carry(data)
        return len(data)

    def recvmsg_into(self, views, _, __):
        if self.is_closed:
            raise OSError(errno.EBADF, "it was closed")
        if not self.came and self.error:
            raise OSError(self.error, "the connection was ended")
        if not self.came and not self.has_ended:
            raise BlockingIOError
        first = 0
        for view in views:
            part = self.came[first : first + len(view)]
            view[: len(part)] = part
            first += len(part)
            if part and not self.agent:
                self.world.checks.landed(self.process, _address(view), len(part))
        del self.came[:first]
        return first, [], 0, None

    def shutdown(self, _) -> None:
        if self.other is not None and not self.is_closed:
            self.held = b""
            self._carry(b"")

    def close(self) -> None:
        self.is_closed = True

    def fileno(self) -> int:
        return self.number

    def setsockopt(self, *_) -> None:
        pass

    def getsockopt(self, *_) -> bytes:
        return bytes(256)

    # What happens to it

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes: of a process that is gone, what it had sent does."""
        return self.is_over or (self.other.process.is_gone and not self.other.line)

    def is_ready(self, event: int) -> bool:
        if event == WRITE:
            return self.other is not None
        return event == READ and bool(self.came or self.error or self.has_ended)

    def fail(self) -> None:
        """It ends soon, or nothing comes by it any more until its kernel gives up."""
        self.is_silent = self.other.is_silent = self.world.random() < self.world.silent_share
        if self.is_silent:
            self.world.saw("never answered")
            self.world.at(self.world.now_s + LOST_S, self.cut)
        else:
            self.world.soon(self.cut)

    def cut(self) -> None:
        """What has come is there, and what was on its way is lost."""
        if self.is_closed or self.error:
            return
        self.world.saw("a connection cut")
        for end in (self, self.other):
            end.line.clear()
            end.error = errno.ECONNRESET
            end._wake()

    def _fare(self) -> None:
        world = self.world
        delay_s = world.read_delay_s()
        is_early = delay_s and world.random() < world.early_share
        self.other.late_s = delay_s if is_early else 0.0  # copied now, and it comes later
        self.late_s = 0.0 if is_early else delay_s
        if world.read_error():
            self.fail()

    def _silent_until_s(self, other) -> float:
        return max(self.process.unlinked_until_s, other.unlinked_until_s)

    def _refuse_over(self) -> None:
        if self.is_closed or self.error or self.other.is_closed or self.other.process.is_gone:
            raise BrokenPipeError(errno.EPIPE, "the connection was ended")

    def _carry(self, data: bytes) -> None:
        self.line.append(self.held + data)
        self.held = b""
        self.due_s = max(self.due_s, self.world.now_s + self.late_s)
        if self.due_s > self.world.now_s:
            self.world.at(self.due_s, self.other._come)
        else:
            self.world.soon(self.other._come)

    def _come(self) -> None:
        """The next that is on its way is there."""
        until_s = self._silent_until_s(self.other.process)
        if until_s > self.world.now_s:
            self.world.at(until_s + wires.LATE_S, self._come)
        elif self.other.line and not self.is_silent:
            data = self.other.line.popleft()
            self.came += data
            self.is_over = self.is_over or not data
            self._wake()

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for actor, token in waiting:
            self.world.wake(actor, token, None)
        self.called()


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Server(serving.Server):
    """Its thread is the world's: it does a step when something has come, or there is room."""

    _thread = SimpleNamespace(name="serves")

    def __init__(self, world, agent: str, identity, table, ports, crossing) -> None:
        self.world, self.process = world, world.current.process
        self._agent, self._identity, self._table, self._crossing = agent, identity, table, crossing
        self._piece_fd, self._piece = _piece()
        self._selector = SimpleNamespace(modify=lambda *_: None, unregister=lambda _: None)
        self._connections, self._unproven = {}, {}
        self._buffers, self._now_s, self._ends = None, 0.0, False
        world.ports[ports[0]] = self

    @property
    def is_over(self) -> bool:
        return self._ends or self.process.is_gone

    def close(self) -> None:
        self._ends = True
        self._drop_all()

    def _copied(self, parts):
        for _, address, size, _ in parts:
            self.world.checks.sent(self.process, self._agent, address, size)
        return super()._copied(parts)

    def _answer(self, channel, rows):
        was_there = self._has(rows)
        try:
            yield from super()._answer(channel, rows)
        finally:
            if not self._has(rows):
                self.world.saw(f"let go of {'within' if was_there else 'before'} an answer")

    def _has(self, rows) -> bool:
        return all(self._table.find(*row) is not None for row in rows)

    def meet(self, sock: Sock) -> None:
        one = serving._Connection(sock, "here", 0.0)
        one.is_near, one.steps = True, self._serve(one)
        self._connections[sock.fileno()] = one
        self._unproven[one] = None
        sock.called = partial(self._call, one)

    def _call(self, one) -> None:
        one.sock.called = lambda: None  # it is to move already
        self.world.soon(partial(self._move, one))

    def _move(self, one) -> None:
        process = self.process
        still_s = max(process.suspended_until_s, process.mute_until_s)
        if self.is_over or one.sock.fileno() not in self._connections:
            return
        if still_s > self.world.now_s:
            self.world.at(still_s + wires.LATE_S, self._move, one)
            return
        one.sock.called = partial(self._call, one)
        self._step(one)
        if one.event == WRITE:  # who sends what comes late has room late
            self.world.at(self.world.now_s + one.sock.late_s, one.sock.called)


@contextmanager
def streamed(world):
    """Within it, the transport over TCP is this world's."""
    numbers, greet = itertools.count(), pool.greet

    def listeners(_):
        """A port that another process had, if there is one."""
        free = (port for port, server in world.ports.items() if server.is_over)
        return [port := next(free, 1 + len(world.ports))], port, ()

    def meets(sock, card, *options):
        try:
            channel = yield from greet(sock, card, *options)
        except OSError:
            if sock.other.agent != card.agent:
                world.saw("a stranger at the address")
            raise
        world.checks.met(world.current.process, card.agent, sock.other.agent)
        return channel

    def dial(*_):
        return Sock(world, world.current.process)

    def wait(flights, _):
        ready = {each for each in flights if _is_ready(each)}
        if not ready:
            for each in flights:
                if each.sock is not None:
                    each.sock.waiting.append((world.current, world.current.token))
            world.park("waits for bytes", world.now_s + wires.LOOK_S)
            ready = {each for each in flights if _is_ready(each)}
        return ready

    made = {
        (transport, "Server"): partial(_Server, world),
        (transport, "TcpIdentity"): lambda: _identity(next(numbers)),
        (transport, "addresses"): SimpleNamespace(listeners=listeners, routes=addresses.routes),
        (transport, "wait"): wait,
        (transport, "_transports"): set(),
        (reading, "wait"): wait,
        (pool, "greet"): meets,
        (pool, "_sockets"): set(),
        (pool, "socket"): SimpleNamespace(**{**vars(socket), "socket": dial}),
        (serving, "log"): SimpleNamespace(log=lambda *_: None, exception=partial(_raised, world)),
        **{(wire, name): most for name, most in LIMITS.items()},
    }
    with others(made):
        yield


def _is_ready(flight: pool.Flight) -> bool:
    return flight.event == GO_ON or (flight.sock is not None and flight.sock.is_ready(flight.event))


def _raised(world, *_) -> None:
    """Nothing that was not expected happens to a source."""
    world.crash = world.crash or sys.exception()
