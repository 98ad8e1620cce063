"""The transport inside one process: for tests and examples. Host memory only."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import uuid
from collections.abc import Iterable, Sequence

from torch_ros.costs import HOST_COSTS
from torch_ros.errors import ClosedError, NotSupported, TransferFailed
from torch_ros.p2p.regions import Cover, Pieces, cut, merge
from torch_ros.p2p.voucher import Neighbour, Process
from torch_ros.spans import HOST, Region, Spans

_PREFIX = "memory:"

_agents: dict[str, MemoryTransport] = {}

# Held while bytes are copied too: a registration that has closed is not being read any more.
_lock = threading.RLock()


class MemoryRegistration:
    def __init__(self, transport: MemoryTransport, regions: Sequence[Region], key: int) -> None:
        self._transport, self._key = transport, key
        self.covers: tuple[Cover] | tuple[()] = (merge(HOST, regions, key=key),) if regions else ()
        self.descriptor: bytes = f"{_PREFIX}{transport.agent}/{key}".encode() if regions else b""
        transport.registrations[key] = self

    def close(self) -> None:
        with _lock:
            self._transport.registrations.pop(self._key, None)


class MemoryTransfer:
    def __init__(self, peer: MemoryPeer, pieces: Pieces) -> None:
        self._peer, self._pieces = peer, pieces
        self._is_posted = self._is_closed = False
        self.size_bytes: int = int(pieces[:, 2].sum())
        self.ways: tuple[tuple[str, int]] = (("memory", self.size_bytes),)

    def post(self) -> None:
        with _lock:
            if self._is_closed:
                raise ClosedError("this read was closed")
            source = self._peer.source()
            for transport, column in ((source, 3), (self._peer.transport, 4)):
                if not set(self._pieces[:, column].tolist()) <= transport.registrations.keys():
                    raise TransferFailed(self._peer.agent, "its memory, or ours, was unregistered")
            for source_address, target_address, size_bytes, _, _ in self._pieces.tolist():
                ctypes.memmove(target_address, source_address, size_bytes)
            self._is_posted = True

    def is_done(self) -> bool:
        if not self._is_posted:
            raise ClosedError("this read was not posted")
        return True

    def close(self) -> None:
        self._is_closed = True


class MemoryPeer:
    transport: MemoryTransport
    agent: str

    costs = HOST_COSTS

    def __init__(self, transport: MemoryTransport, agent: str) -> None:
        self.transport, self.agent = transport, agent
        self._attached: list[Cover] = []
        self._is_closed = False
        self.source()

    def source(self) -> MemoryTransport:
        """The transport of the peer.

        Raises: TransferFailed: It is gone, or this side is.
        """
        if self._is_closed or self.transport.is_closed:
            raise TransferFailed(self.agent, "the connection was closed")
        if self.agent not in _agents:
            raise TransferFailed(self.agent, "there is no such agent in this process")
        return _agents[self.agent]

    def attach(self, descriptor: bytes) -> None:
        with _lock:
            self._refuse_closed()
            source = self.source()
            if not descriptor:
                return
            agent, _, key = _unwrap(self.agent, descriptor).rpartition("/")
            if agent != self.agent or not key.isdigit():
                raise TransferFailed(self.agent, "the descriptor is not of this agent")
            registration = source.registrations.get(int(key))
            if registration is None:
                raise TransferFailed(self.agent, "it has closed the registration")
            self._attached[:0] = registration.covers

    def is_beyond(self, limit_s: float) -> bool:  # noqa: ARG002  # it is in this process
        return False

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> MemoryTransfer:
        _refuse_cuda((source_device, target_device))
        with _lock:
            self._refuse_closed()
            self.source()
            newest_first = reversed(self.transport.registrations.values())
            targets = [cover for registration in newest_first for cover in registration.covers]
            pieces = cut(self.agent, spans, self._attached, targets)
            return MemoryTransfer(self, pieces)

    def cut(self) -> None:
        pass  # nothing is ever in flight

    def close(self) -> None:
        self._is_closed = True

    def _refuse_closed(self) -> None:
        if self._is_closed or self.transport.is_closed:
            raise ClosedError(f"the connection to agent {self.agent!r} was closed")


class MemoryTransport:
    is_copied_from: bool = False

    def __init__(self, agent: str | None = None) -> None:
        self.agent: str = agent or str(uuid.uuid4())
        self.connection: bytes = f"{_PREFIX}{self.agent}".encode()
        self.registrations: dict[int, MemoryRegistration] = {}
        self._keys = itertools.count()
        with _lock:
            _agents[self.agent] = self

    @property
    def is_closed(self) -> bool:
        return _agents.get(self.agent) is not self

    def register(self, regions: Sequence[Region]) -> MemoryRegistration:
        _refuse_cuda(region.device for region in regions)
        with _lock:
            self._refuse_closed()
            return MemoryRegistration(self, regions, next(self._keys))

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:
        _unwrap(agent, descriptor)
        return Neighbour(agent, Process(os.getpid()))

    def connect(self, connection: bytes) -> MemoryPeer:
        with _lock:
            self._refuse_closed()
            agent = _unwrap("?", connection)
            if agent == self.agent:
                raise TransferFailed(agent, "an agent cannot connect to itself")
            return MemoryPeer(self, agent)

    def close(self) -> None:
        with _lock:
            if not self.is_closed:
                del _agents[self.agent]
            self.registrations.clear()

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise ClosedError(f"the transport of agent {self.agent!r} was closed")


def _unwrap(agent: str, wrapped: bytes) -> str:
    text = wrapped.decode(errors="replace")
    if not text.startswith(_PREFIX):
        raise TransferFailed(agent, "these bytes are not of a memory transport")
    return text.removeprefix(_PREFIX)


def _refuse_cuda(devices: Iterable[int]) -> None:
    if any(device != HOST for device in devices):
        raise NotSupported("GPU memory in a MemoryTransport", "use NixlTransport")
