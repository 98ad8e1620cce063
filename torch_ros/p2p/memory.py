"""The transport inside one process: for tests, examples and single-process runs."""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch_ros.errors import NotSupported, TransferFailed, UsageError
from torch_ros.p2p.transport import HOST, Region, Spans

_lock = threading.Lock()
_agents: dict[str, MemoryTransport] = {}


@dataclass(eq=False)
class MemoryRegistration:
    _transport: MemoryTransport
    regions: tuple[Region, ...]
    descriptor: bytes = field(default_factory=lambda: uuid.uuid4().bytes)

    def close(self) -> None:
        self._transport.registrations.pop(self.descriptor, None)


@dataclass(eq=False)
class MemoryRead:
    _peer: MemoryPeer
    _spans: Spans
    size_bytes: int

    def post(self) -> None:
        self._peer.check(self._spans)
        for source, target, size_bytes in self._spans.tolist():
            ctypes.memmove(target, source, size_bytes)

    def is_done(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is ever in flight: `post` copies."""


class MemoryPeer:
    def __init__(self, reader: MemoryTransport, agent: str) -> None:
        self.agent, self._reader = agent, reader
        self._attached: set[bytes] = set()

    def attach(self, descriptor: bytes) -> None:
        if descriptor not in self._source().registrations:
            raise TransferFailed(self.agent, "this is no registration of that agent")
        self._attached.add(descriptor)

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> MemoryRead:
        if (source_device, target_device) != (HOST, HOST):
            raise NotSupported("device memory in a memory:// store", "use etcd:// or local")
        self.check(spans)
        return MemoryRead(self, spans.copy(), int(spans[:, 2].sum()))

    def check(self, spans: Spans) -> None:
        """Raises: TransferFailed: Memory that may not be read, or not be written."""
        source = self._source()
        shown = [r for d, r in source.registrations.items() if d in self._attached]
        for rows, registrations, side in (
            (spans[:, [0, 2]], shown, "attached from it"),
            (spans[:, [1, 2]], self._reader.registrations.values(), "registered here"),
        ):
            regions = [region for each in list(registrations) for region in each.regions]
            if not _covers(regions, rows.tolist()):
                raise TransferFailed(self.agent, f"memory that is not {side}")

    def close(self) -> None:
        self._attached.clear()

    def _source(self) -> MemoryTransport:
        with _lock:
            source = _agents.get(self.agent)
        if source is None:
            raise TransferFailed(self.agent, "it is closed")
        return source


class MemoryTransport:
    def __init__(self) -> None:
        self.agent = uuid.uuid4().hex
        self.registrations: dict[bytes, MemoryRegistration] = {}
        with _lock:
            _agents[self.agent] = self

    @property
    def connection(self) -> bytes:
        return self.agent.encode()

    def register(self, regions: Sequence[Region]) -> MemoryRegistration:
        if any(region.size_bytes <= 0 for region in regions):
            raise UsageError("a region of no bytes cannot be registered")
        if any(region.device != HOST for region in regions):
            raise NotSupported("device memory in a memory:// store", "use etcd:// or local")
        registration = MemoryRegistration(self, tuple(regions))
        self.registrations[registration.descriptor] = registration
        return registration

    def connect(self, connection: bytes) -> MemoryPeer:
        agent = connection.decode(errors="replace")
        with _lock:
            if agent not in _agents:
                raise TransferFailed(agent, "no such agent in this process")
        return MemoryPeer(self, agent)

    def close(self) -> None:
        self.registrations.clear()
        with _lock:
            _agents.pop(self.agent, None)


def _covers(regions: Iterable[Region], rows: Sequence[Sequence[int]]) -> bool:
    """Whether each (address, bytes) lies in the union of `regions`."""
    merged: list[list[int]] = []
    for start, end in sorted((r.address, r.address + r.size_bytes) for r in regions):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return all(
        any(start <= address and address + size <= end for start, end in merged)
        for address, size in rows
    )
