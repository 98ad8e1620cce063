"""A transport whose bytes land when the seed says so: late, in pieces, while others move.

One-sided, like the real one: the process that is read from takes no part, and may be suspended. A
read that was posted lands even if its reader stands still. What is read of memory that nobody
offers any more is garbage, or an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from functools import partial

from torch_ros.costs import HOST_COSTS
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.seeding.rules import is_forerunner
from torch_ros.p2p import voucher
from torch_ros.p2p.voucher import LetGo, Neighbour
from torch_ros.protocol import keys as k
from torch_ros.spans import HOST

LOOK_S = 1.0  # a reader looks again after that, so that its deadlines count
LATE_S = 1e-6  # after a process that was mute is not any more
ABSENT = "it is gone"


class Wire:
    """A process's endpoint."""

    is_copied_from = False

    def __init__(self, world, process, replica: str) -> None:
        self.world, self.process = world, process
        self.agent = f"agent-{process.number}"
        if is_forerunner(k.instance(replica, "")):
            self.agent = f"forerunner-{process.number}-{world.number()}"
        self.registrations: dict[int, list] = {}
        self._keys = itertools.count(1)
        self.is_closed = False
        self.flying: set = set()
        self.landed = 0  # reads of this process of which something has landed
        self.waiting: tuple | None = None
        world.wires[self.agent] = self

    @property
    def connection(self) -> bytes:
        return self.agent.encode()

    def register(self, regions):
        if self.is_closed:
            raise ClosedError("the transport is closed")
        return _Registration(self, regions, next(self._keys))

    def prove(self, agent: str, descriptor: bytes):
        """All files are open in this one process, whoever has made them."""
        peer = self.world.wires.get(agent)
        if peer is None or peer.is_closed or peer.process.is_gone:
            raise LetGo(ABSENT)
        return Neighbour(agent, voucher.Process(os.getpid()))

    def connect(self, connection: bytes):
        return _Peer(self, connection.decode())

    def close(self) -> None:
        """No byte lands after that; a thread that waits for one, as a prefetch may, is told."""
        self.is_closed = True
        for read in [*self.flying]:
            read.cut()
        self.registrations.clear()

    def has(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= end
            for regions in self.registrations.values()
            for start, end in regions
        )

    def reach(self, agent: str) -> Wire:
        """The endpoint of a peer, if there is a way to it."""
        peer = self.world.wires.get(agent)
        if peer is None or peer.is_closed or self.is_closed:
            raise TransferFailed(agent, ABSENT)
        if peer.process.is_unreachable or self.process.is_unreachable:
            raise TransferFailed(agent, "it cannot be reached")
        return peer


class _Registration:
    def __init__(self, wire: Wire, regions, key: int) -> None:
        self._wire, self._key = wire, key
        self.descriptor = f"{wire.agent}/{key}".encode()
        wire.registrations[key] = [(r.address, r.address + r.size_bytes) for r in regions]

    def close(self) -> None:
        self._wire.registrations.pop(self._key, None)


class _Peer:
    costs = HOST_COSTS

    def __init__(self, wire: Wire, agent: str) -> None:
        self.wire, self.agent = wire, agent
        wire.reach(agent)

    def attach(self, descriptor: bytes) -> None:
        key = int(descriptor.rpartition(b"/")[2])
        if key not in self.wire.reach(self.agent).registrations:
            raise TransferFailed(self.agent, "it has closed the registration")

    def prepare(self, spans, *, source_device=HOST, target_device=HOST):
        return _Read(self, [tuple(map(int, span)) for span in spans])

    def cut(self) -> None:
        for read in [each for each in self.wire.flying if each.agent == self.agent]:
            read.cut()

    def close(self) -> None:
        pass


class _Read:
    def __init__(self, peer: _Peer, spans: list) -> None:
        self._wire, self.agent, self._spans = peer.wire, peer.agent, spans
        self.size_bytes = sum(size for _, _, size in spans)
        self.ways = (("wire", self.size_bytes),)
        self._flight = 0  # which posting of it
        self._left = 0
        self._error = ""
        self._is_posted = False

    def post(self) -> None:
        world, wire = self._wire.world, self._wire
        world.pause("posts a read")
        wire.reach(self.agent)
        self._flight += 1
        self._error, self._is_posted = "", True
        pieces = []
        for source, target, size in self._spans:
            assert wire.has(target, size), "a read into memory that is not registered"
            # The word is read whole; everything else may land in pieces.
            half = size // 16 * 8 if size > 8 and world.random() < 0.3 else 0
            pieces += [(source, target, half)] if half else []
            pieces.append((source + half, target + half, size - half))
        self._left = len(pieces)
        wire.flying.add(self)
        self._error = world.read_error()
        for piece in pieces:
            delay_s = world.read_delay_s()
            land = partial(self._land, self._flight, *piece)
            if delay_s:
                world.at(world.now_s + delay_s, land)
            else:
                world.soon(land)

    def _land(self, flight: int, source: int, target: int, size: int) -> None:
        world, wire = self._wire.world, self._wire
        if flight != self._flight or wire.is_closed:
            return
        mute_until_s = world.wires[self.agent].process.mute_until_s
        if mute_until_s > world.now_s:  # it is asked, and does not answer yet
            land = partial(self._land, flight, source, target, size)
            world.at(mute_until_s + LATE_S, land)
            return
        self._left -= 1
        try:
            peer = wire.reach(self.agent)
        except TransferFailed as error:
            self._error = error.reason
        else:
            if peer.has(source, size):
                ctypes.memmove(target, source, size)
            elif size == 8 or world.random() < 0.5:
                self._error = "its memory was unregistered"
            else:
                world.saw("garbage read")
                ctypes.memset(target, 0x5A, size)
            world.checks.landed(wire.process, target, size)
        if not self._left:
            wire.flying.discard(self)
            self._wake()

    def _wake(self) -> None:
        wire = self._wire
        if wire.waiting is not None:
            wire.world.wake(*wire.waiting, None)
            wire.waiting = None

    def cut(self) -> None:
        """Nothing of it lands any more."""
        self._wire.world.saw("read cut")
        self._wire.flying.discard(self)
        self._flight += 1
        self._left, self._error = 0, "the connection was ended"
        self._wake()

    def is_done(self) -> bool:
        world, wire = self._wire.world, self._wire
        if self._left:
            wire.waiting = (world.current, world.current.token)
            world.park("waits for a read", world.now_s + LOOK_S)
        if self._left:
            return False
        self._is_posted = False
        if self._error:
            world.saw("read failed")
            raise TransferFailed(self.agent, self._error)
        return True

    def close(self) -> None:
        if self._is_posted and self._left and not self._wire.process.is_gone:
            world = self._wire.world
            world.saw("read ended early")
            if world.random() < 0.5:  # it is seen through, as when it cannot be cancelled
                while self._left:
                    self.is_done_or_failed()
        self._wire.flying.discard(self)
        self._flight += 1
        self._left = 0

    def is_done_or_failed(self) -> None:
        with contextlib.suppress(TransferFailed):
            self.is_done()
