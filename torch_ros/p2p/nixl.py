"""The only module that imports nixl. Turns its None, "ERR" and exceptions into ours.

NIXL over UCX: shared memory or cma on one host, RDMA where there is some, else TCP; UCX_TLS in the
environment narrows the choice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from torch_ros.errors import ClosedError, TransferFailed, UsageError
from torch_ros.p2p.progress import ProgressLoop
from torch_ros.p2p.transport import HOST, Region, Spans

# Read when UCX is loaded. With its default segments TCP runs at a third of this speed.
for _name, _value in (
    ("UCX_TCP_TX_SEG_SIZE", "1m"),
    ("UCX_TCP_RX_SEG_SIZE", "1m"),
    ("NIXL_LOG_LEVEL", "FATAL"),  # a peer that died is an exception here, not a page of log
    ("UCX_LOG_LEVEL", "fatal"),
):
    os.environ.setdefault(_name, _value)

from nixl import nixl_agent, nixl_agent_config  # type: ignore[import-untyped]  # noqa: E402

log = logging.getLogger(__name__)
T = TypeVar("T")

BACKEND = "UCX"
QUIESCE_S = 5.0  # how long a read in flight is given to end before its peer is disconnected
POLL_S = 0.0002
HELLO = b"torch_ros reads"  # makes the peer's progress loop hurry


class NixlRegistration:
    def __init__(self, transport: NixlTransport, regions: Sequence[Region]) -> None:
        self._transport, self._registered = transport, []
        blobs = []
        for kind in ("DRAM", "VRAM"):
            rows = _merged(r for r in regions if (r.device == HOST) == (kind == "DRAM"))
            if rows:
                array = np.array(rows, np.uint64)
                self._registered.append(transport.call(_register, array, kind))
                blobs.append(transport.call(_described, self._registered[-1]))
        self.descriptor = msgspec.msgpack.encode(blobs)

    def close(self) -> None:
        while self._registered:
            self._transport.call(_deregister, self._registered.pop())


class NixlRead:
    def __init__(
        self, peer: NixlPeer, spans: Spans, source_device: int, target_device: int
    ) -> None:
        self._peer, self.size_bytes = peer, int(spans[:, 2].sum())
        self._is_flying = False
        sources, targets = _rows(spans, 0, source_device), _rows(spans, 1, target_device)
        self._handle = peer.call(
            "preparing a read",
            lambda agent: agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(targets, _kind(target_device)),
                agent.get_xfer_descs(sources, _kind(source_device)),
                peer.agent,
            ),
        )

    def post(self) -> None:
        self._peer.hello()
        self._is_flying = True
        self._note(self._peer.call("reading", lambda agent: agent.transfer(self._handle)))

    def is_done(self) -> bool:
        if self._is_flying:
            state = self._peer.call("reading", lambda agent: agent.check_xfer_state(self._handle))
            self._note(state)
        return not self._is_flying

    def _note(self, state: str) -> None:
        if state == "ERR":
            self._is_flying = False
            raise TransferFailed(self._peer.agent, "the read failed")
        self._is_flying = state != "DONE"

    def close(self) -> None:
        if self._handle is None:
            return
        end_s = time.monotonic() + QUIESCE_S
        try:
            while not self.is_done() and time.monotonic() < end_s:
                time.sleep(POLL_S)
        except TransferFailed:
            self._is_flying = False
        handle, self._handle = self._handle, None
        if self._is_flying:
            # Nothing lands through an endpoint that is closed.
            log.warning("agent %s does not end a read; disconnecting from it", self._peer.agent)
            self._peer.close()
        self._peer.release(handle)


class NixlPeer:
    def __init__(self, transport: NixlTransport, agent: str) -> None:
        self.agent, self._transport = agent, transport
        self._is_closed = False
        self._greeted_s = 0.0

    def attach(self, descriptor: bytes) -> None:
        try:
            blobs = msgspec.msgpack.decode(descriptor, type=list[bytes])
        except msgspec.MsgspecError as error:
            raise TransferFailed(self.agent, f"this is no descriptor ({error})") from error
        for blob in blobs:
            found = _text(self.call("attaching", partial(_add, connection=blob)))
            if found != self.agent:
                raise TransferFailed(self.agent, f"this is a descriptor of agent {found}")

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> NixlRead:
        return NixlRead(self, spans, source_device, target_device)

    def hello(self) -> None:
        """Tell the peer, at most ten times a second, that it is being read from."""
        now_s = time.monotonic()
        if now_s - self._greeted_s > 0.1:
            self._greeted_s = now_s
            self.call("greeting", lambda agent: agent.send_notif(self.agent, HELLO))

    def call(self, what: str, use: Callable[[nixl_agent], T]) -> T:
        if self._is_closed:
            raise TransferFailed(self.agent, "this peer is closed")
        try:
            found = self._transport.call(use)
        except (TransferFailed, ClosedError):
            raise
        except Exception as error:
            raise TransferFailed(self.agent, f"{what}: {_reason(error)}") from error
        if found is None and what != "greeting":
            raise TransferFailed(self.agent, f"{what}: NIXL refused the memory descriptors")
        return found

    def release(self, handle: Any) -> None:
        try:
            self._transport.call(lambda agent: agent.release_xfer_handle(handle))
        except Exception as error:  # noqa: BLE001  # the read is over in any case
            log.debug("releasing a read from %s: %s", self.agent, error)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._transport.call(lambda agent: agent.remove_remote_agent(self.agent))
        except Exception as error:  # noqa: BLE001  # it may be gone already
            log.debug("disconnecting from %s: %s", self.agent, error)


class NixlTransport:
    def __init__(self) -> None:
        self.agent = uuid.uuid4().hex
        self._lock = threading.RLock()  # one agent, several threads: callers and progress
        self._nixl: nixl_agent | None = nixl_agent(
            self.agent, nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        )
        self._pid = os.getpid()
        # Connection bytes come with at least one region.
        self._anchor = np.zeros(64, np.uint8)
        row = np.array([[self._anchor.ctypes.data, 64, 0]], np.uint64)
        self._anchored = self.call(_register, row, "DRAM")
        self.connection: bytes = self.call(_connection, self._anchored)
        self._progress = ProgressLoop(self._look, name=f"torch_ros progress {self.agent[:8]}")

    def register(self, regions: Sequence[Region]) -> NixlRegistration:
        if any(region.size_bytes <= 0 for region in regions):
            raise UsageError("a region of no bytes cannot be registered")
        return NixlRegistration(self, regions)

    def connect(self, connection: bytes) -> NixlPeer:
        try:
            agent = _text(self.call(partial(_add, connection=connection)))
        except Exception as error:
            raise TransferFailed("(unknown)", f"connecting: {_reason(error)}") from error
        peer = NixlPeer(self, agent)
        peer.hello()
        return peer

    def call(self, use: Callable[..., T], *arguments: object) -> T:
        """Use the agent, one thread at a time."""
        if os.getpid() != self._pid:
            raise ClosedError("this transport belongs to the parent of a fork")
        with self._lock:
            if self._nixl is None:
                raise ClosedError("this transport is closed")
            return use(self._nixl, *arguments)

    def close(self) -> None:
        if os.getpid() != self._pid or self._nixl is None:
            return
        self._progress.stop()
        with self._lock:
            _deregister(self._nixl, self._anchored)
            self._nixl = None

    def _look(self) -> bool:
        return bool(self.call(lambda nixl: nixl.get_new_notifs()))


def _add(agent: nixl_agent, connection: bytes) -> str | bytes:
    return agent.add_remote_agent(connection)  # type: ignore[no-any-return]


def _register(agent: nixl_agent, rows: Spans, kind: str) -> Any:
    try:
        found = agent.register_memory(rows, kind, [BACKEND])
    except Exception as error:
        raise UsageError(f"NIXL cannot register this memory: {_reason(error)}") from error
    if found is None:
        raise UsageError(f"NIXL refused to register {len(rows)} regions of {kind}")
    return found


def _deregister(agent: nixl_agent, registered: Any) -> None:
    agent.deregister_memory(registered, [BACKEND])


def _described(agent: nixl_agent, registered: Any) -> bytes:
    return bytes(
        agent.get_partial_agent_metadata(registered, inc_conn_info=False, backends=[BACKEND])
    )


def _connection(agent: nixl_agent, registered: Any) -> bytes:
    return bytes(
        agent.get_partial_agent_metadata(registered, inc_conn_info=True, backends=[BACKEND])
    )


def _merged(regions: Iterable[Region]) -> list[list[int]]:
    """(address, bytes, device) of the union of regions: few registrations are fast ones."""
    merged: list[list[int]] = []
    for region in sorted(regions, key=lambda r: (r.device, r.address)):
        device, end = max(region.device, 0), region.address + region.size_bytes
        if merged and merged[-1][2] == device and region.address <= sum(merged[-1][:2]):
            merged[-1][1] = max(merged[-1][1], end - merged[-1][0])
        else:
            merged.append([region.address, region.size_bytes, device])
    return merged


def _rows(spans: Spans, column: int, device: int) -> Spans:
    rows = np.empty((len(spans), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = spans[:, column], spans[:, 2], max(device, 0)
    return rows


def _kind(device: int) -> str:
    return "DRAM" if device == HOST else "VRAM"


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    known = {
        "nixlRemoteDisconnectError": "it disconnected (has the process ended?)",
        "nixlBackendError": "it cannot be reached (has the process ended?)",
        "nixlNotFoundError": "memory that is not attached from it, or not registered here",
        "nixlMismatchError": "these are not bytes of a torch_ros agent",
    }
    return known.get(kind, f"{kind}: {error}")
