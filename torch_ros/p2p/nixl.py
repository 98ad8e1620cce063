"""The transport over NIXL and UCX: the only module that imports nixl.

It uses the bindings below NIXL's Python wrapper: the progress thread sleeps, one lock of ours is
around every call, each cover is a device to NIXL, and reads are waited for, since none can be
cancelled. The reasons: docs/ARCHITECTURE.md#decisions-with-what-speaks-against-them.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import os
import threading
import time
import uuid
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from torch_ros.costs import NIXL_COSTS, TCP_COSTS, Costs
from torch_ros.errors import ClosedError, TransferFailed, UsageError
from torch_ros.p2p import rdma, room, sockets, ucx
from torch_ros.p2p.regions import Cover, Pieces, cut, merge
from torch_ros.p2p.transport import CONNECT_S
from torch_ros.p2p.voucher import Neighbour, Unproven
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Region, Spans

# A peer that dies is expected here and becomes an exception; both libraries would print it first.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "FATAL")

# Signals are the user's. UCX takes SIGHUP, even if it is ignored (nohup), to print all that it does
# from then on, and those of a crash, where Python's faulthandler may wait for them.
os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
os.environ.setdefault("UCX_HANDLE_ERRORS", "none")

import nixl._bindings as bindings  # type: ignore[import-untyped]

logger = log_of(__name__)

# The progress thread also looks this often without being woken, because NIXL knows of file
# descriptors that did not wake it. Costs 0.05 % of a core.
_PROGRESS_DELAY_US = 100_000

_PINGS = 8  # a busy core delays some; the first one makes the connection
_POLL_S = 0.0002

# How long `Transfer.close` waits for a read in flight before it ends the whole transport: slow is
# better than that, so it assumes a very slow network.
_LINGER_S = 10.0
_LINGER_BYTES_PER_S = 50e6
_CUT_S = 2.0  # until UCX has noticed that a connection has ended

_CONNECTION, _DESCRIPTOR = b"connection", b"descriptor"

_NIXL_ERRORS: tuple[type[Exception], ...] = (
    bindings.nixlBackendError,
    bindings.nixlCancelledError,
    bindings.nixlInvalidParamError,
    bindings.nixlMismatchError,
    bindings.nixlNotAllowedError,
    bindings.nixlNotFoundError,
    bindings.nixlNotPostedError,
    bindings.nixlNotSupportedError,
    bindings.nixlRepostActiveError,
    bindings.nixlUnknownError,
    RuntimeError,
)

_making = threading.Lock()  # one backend at a time, to see which descriptors it has opened
_transports: weakref.WeakSet[NixlTransport] = weakref.WeakSet()
_inherited: list[str] = []  # agents that were open when this process was forked off


class NixlRegistration:
    """A `Registration`. Its descriptor has three parts for each device, as `_register` says."""

    def __init__(self, transport: NixlTransport, regions: Sequence[Region]) -> None:
        self._transport = transport
        self.is_open: bool = True
        self.covers: list[Cover] = []
        self.listed: list[Any] = []  # NIXL's lists of regions, one per device
        by_device: defaultdict[int, list[Region]] = defaultdict(list)
        for region in regions:
            by_device[region.device].append(region)
        covers = [merge(at, by_device[at], key=next(transport.keys)) for at in by_device]
        parts = [part for cover in covers for part in self._register(cover)]
        self.descriptor: bytes = (
            _pack(_DESCRIPTOR, transport.agent.encode(), *parts) if parts else b""
        )

    def _register(self, cover: Cover) -> tuple[bytes, bytes, bytes]:
        """Register a cover; for peers, return its key and device, its bounds, and NIXL's bytes."""
        nixl = self._transport.nixl
        rows = (cover.starts, cover.ends - cover.starts, np.full_like(cover.starts, cover.key))
        listed = bindings.nixlRegDList(_kind(cover.device), np.stack(rows, axis=1))
        try:
            nixl.registerMem(listed, [])
            self.listed.append(listed)
            blob = nixl.getLocalPartialMD(listed, False, [])  # noqa: FBT003
        except _NIXL_ERRORS as error:
            self.close()
            regions = f"{len(cover.starts)} regions on device {cover.device}"
            raise UsageError(f"NIXL cannot register {regions}: {error}") from error
        self.covers.append(cover)
        head = np.array((cover.key, cover.device), np.int64)
        return head.tobytes(), np.stack((cover.starts, cover.ends)).tobytes(), blob

    def close(self) -> None:
        transport = self._transport
        if transport.is_foreign:
            return
        with transport.lock:
            self.is_open = False  # no read into it is posted from here on
            reads = [read for link in transport.links.values() for read in link.reads]
        for read in reads:
            # UCX would go on writing through a registration that is gone.
            if self in read.targets:
                read.settle()
        with transport.lock:
            if self in transport.registrations:
                transport.registrations.remove(self)
            while self.listed and not transport.closed_because:
                transport.nixl.deregisterMem(self.listed.pop(), [])


class NixlTransfer:
    """A `Transfer`: a handle of NIXL's, and how far it is."""

    def __init__(
        self, link: _Link, handle: int, size_bytes: int, targets: AbstractSet[NixlRegistration]
    ) -> None:
        self._link, self._handle = link, handle
        self.size_bytes: int = size_bytes
        self.targets: AbstractSet[NixlRegistration] = targets
        self.ways: tuple[tuple[str, int]] = ((link.transport.way, size_bytes),)
        self._state: Literal["idle", "in flight", "done", "released"] = "idle"
        self.posted_s: float = 0.0
        link.reads.add(self)

    def post(self) -> None:
        with self._link.calls() as nixl:
            if self._state == "released":
                raise ClosedError("this read was closed")
            if self._state == "in flight":
                raise UsageError("this read is still in flight; post it again when it is done")
            if not all(registration.is_open for registration in self.targets):
                raise TransferFailed(self._link.agent, "the memory it lands in was unregistered")
            self.posted_s = time.monotonic()
            self._follow(nixl.postXferReq, b"")

    def is_done(self) -> bool:
        with self._link.calls() as nixl:
            if self._state == "in flight":
                self._follow(nixl.getXferStatus)
            if self._state in ("idle", "released"):
                raise ClosedError("this read was not posted, failed, or was closed")
            return self._state == "done"

    def _follow(self, call: Callable[..., Any], *arguments: bytes) -> None:
        """Make a call of NIXL's about this read, and note from its answer how the read is."""
        self._state = "in flight"  # it may be, if Ctrl-C comes between the call and its answer
        try:
            if call(self._handle, *arguments) != bindings.NIXL_IN_PROG:
                self._state = "done"
        except _NIXL_ERRORS:
            self._state = "idle"  # it failed, and has terminated
            raise

    def close(self) -> None:
        transport = self._link.transport
        if transport.is_foreign:
            return
        self.settle()
        with transport.lock:
            self.release()

    def settle(self) -> None:
        """Wait until no byte of it can land any more; at last by ending more than this read."""
        transport = self._link.transport
        wait_s = _LINGER_S + self.size_bytes / _LINGER_BYTES_PER_S
        deadline = time.monotonic() + wait_s
        while self.is_landing() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self.is_landing():
            self._link.cut()
        with transport.lock:
            if self.is_landing():
                reason = f"agent {self._link.agent!r} did not end a read within {wait_s:.0f} s"
                logger.error("%s; closing the transport, so that no byte lands later", reason)
                transport.end(reason)

    def release(self) -> None:
        """Give the handle back. If the read is in flight, its bytes go on landing."""
        if self._state != "released":
            self._state = "released"
            self._link.reads.discard(self)
            self._link.transport.nixl.releaseXferReq(self._handle)

    def is_landing(self) -> bool:
        try:
            return self._state == "in flight" and not self.is_done()
        except TransferFailed:
            return False


class _Link:
    """A connection to an agent, shared by all peers that `connect` returned for it."""

    def __init__(self, transport: NixlTransport, agent: str, ping: Pieces) -> None:
        self.transport, self.agent, self._ping = transport, agent, ping
        self.peers: set[NixlPeer] = set()
        self.reads: set[NixlTransfer] = set()
        self.covers: list[Cover] = []  # attached; the newest first
        self.pings, self.ping_s = 0, math.inf  # how many were answered; the shortest time
        self.where = b""  # its address, among what NIXL was told of it first
        self.failure = ""

    @contextmanager
    def calls(self) -> Iterator[Any]:
        """NIXL's agent, locked; its errors become ours."""
        self.transport.refuse_fork()
        with self.transport.lock:
            if self.failure:
                raise TransferFailed(self.agent, self.failure)
            try:
                yield self.transport.nixl
            except bindings.nixlRemoteDisconnectError as error:
                # UCX has ended every read of a connection that failed.
                self.end(f"it disconnected (has its process ended?){room.lacking()}")
                raise TransferFailed(self.agent, self.failure) from error
            except _NIXL_ERRORS as error:
                raise TransferFailed(self.agent, f"NIXL says {error}{room.lacking()}") from error

    def load(self, blob: bytes) -> None:
        """Tell NIXL of the agent: first how to connect, later of its registrations."""
        self.where = self.where or blob
        with self.calls() as nixl:
            if nixl.loadRemoteMD(blob).decode() != self.agent:
                raise TransferFailed(self.agent, "these bytes are of another agent")

    def ping(self) -> None:
        """Read one byte of the agent, to see that it is there: `load` makes no connection. Worse,
        if the agent is gone, NIXL forgets half of it there, and later refuses to know it again.

        Raises: TransferFailed: It is gone, or does not answer in time.
        """
        read = self.create(self._ping, HOST, HOST, frozenset())
        try:
            read.post()
            deadline = read.posted_s + self.transport.connect_s
            while not read.is_done():
                if time.monotonic() > deadline:
                    reason = f"it did not answer within {self.transport.connect_s:g} s"
                    raise TransferFailed(self.agent, reason)
                time.sleep(_POLL_S)
            self.pings += 1
            self.ping_s = min(self.ping_s, time.monotonic() - read.posted_s)
        finally:
            with self.transport.lock:
                read.release()  # if it is in flight: its byte lands where nobody looks

    def create(
        self,
        pieces: Pieces,
        source_device: int,
        target_device: int,
        targets: AbstractSet[NixlRegistration],
    ) -> NixlTransfer:
        """Make a read of pieces: NIXL wants address, bytes and device number, which is the key."""
        source, target, size, source_key, target_key = range(5)  # the columns of `Pieces`

        def listed(device: int, columns: list[int]) -> Any:
            return bindings.nixlXferDList(_kind(device), np.ascontiguousarray(pieces[:, columns]))

        sources = listed(source_device, [source, size, source_key])
        landing = listed(target_device, [target, size, target_key])
        with self.calls() as nixl:
            handle = nixl.createXferReq(bindings.NIXL_READ, landing, sources, self.agent, b"", [])
            return NixlTransfer(self, handle, int(pieces[:, size].sum()), targets)

    def cut(self) -> None:
        """End reads in flight by ending the silent connections below them; over TCP only."""
        with self.transport.lock:
            # A copy: a read that has failed is released, and leaves the set.
            flying = [read for read in tuple(self.reads) if read.is_landing()]
            if not flying:
                return
            asked_s = time.monotonic() - max(read.posted_s for read in flying)
            count = sockets.silence(self.transport.epolls, asked_s, self.where)  # how many ended
        logger.warning(
            "agent %r does not answer: ending %d connections on which nothing came for %.1f s",
            *(self.agent, count, asked_s),
        )
        deadline = time.monotonic() + (_CUT_S if count else 0.0)
        while any(read.is_landing() for read in flying) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def end(self, reason: str) -> None:
        """Disconnect, with the lock held; no read is in flight, or none can land any more."""
        if self.failure:
            return
        self.failure = reason
        for read in tuple(self.reads):
            read.release()
        self.transport.links.pop(self.agent, None)
        self.transport.nixl.invalidateRemoteMD(self.agent)


class NixlPeer:
    agent: str

    def __init__(self, link: _Link) -> None:
        self._link, self.agent, self.costs = link, link.agent, link.transport.costs
        link.peers.add(self)

    def attach(self, descriptor: bytes) -> None:
        """Tell NIXL of the covers in a descriptor that it does not know yet."""
        self._refuse_closed()
        if not descriptor:
            return
        agent, *parts = _unpack(self.agent, _DESCRIPTOR, descriptor)
        if agent.decode() != self.agent:
            raise TransferFailed(self.agent, "the descriptor is not of this agent")
        link = self._link
        link.ping()  # NIXL must not be told of an agent that is gone
        for head, bounds, blob in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            key, device = np.frombuffer(head, np.int64).tolist()
            cover = Cover(key, device, *np.frombuffer(bounds, np.uint64).reshape(2, -1))
            with link.transport.lock:
                if cover.key not in [known.key for known in link.covers]:
                    link.load(blob)
                    link.covers.insert(0, cover)

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> NixlTransfer:
        """Cut the spans where covers end, and note in whose registrations the pieces land."""
        self._refuse_closed()
        link = self._link
        with link.transport.lock:
            sources = [cover for cover in link.covers if cover.device == source_device]
            owners = {
                cover: registration
                for registration in reversed(link.transport.registrations)
                for cover in registration.covers
                if cover.device == target_device
            }
            pieces = cut(self.agent, spans, sources, tuple(owners))
            keys = set(pieces[:, 4].tolist())  # of the target covers
            targets = {owner for cover, owner in owners.items() if cover.key in keys}
            return link.create(pieces, source_device, target_device, targets)

    def is_beyond(self, limit_s: float) -> bool:
        self._refuse_closed()
        while self._link.ping_s > limit_s and self._link.pings < _PINGS:
            self._link.ping()
        return self._link.ping_s > limit_s

    def close(self) -> None:
        link = self._link
        if link.transport.is_foreign:
            return
        with link.transport.lock:
            link.peers.discard(self)
            left = () if link.peers else tuple(link.reads)  # this was the last peer
        for read in left:
            read.settle()
        with link.transport.lock:
            if not link.peers:
                link.end("the connection was closed")

    def cut(self) -> None:
        if not self._link.transport.is_foreign:
            self._link.cut()

    def _refuse_closed(self) -> None:
        self._link.transport.refuse_closed()
        if self not in self._link.peers:
            raise ClosedError(f"the connection to agent {self.agent!r} was closed")


class NixlTransport:
    """A `Transport` over NIXL with UCX: shared memory, RDMA, TCP, whichever connects two agents.

    A read on the same host may be copied inside `post`; calls in other threads wait for that long.
    A peer that is alive but stuck can make `Transfer.close` close the whole transport.

    After `fork`, calls in the child raise `ClosedError`, and to close something does nothing. A
    child of a process with an open transport cannot make its own: UCX has one thread for all agents
    of a process, takes it for running in the child too, and so answers no peer there.

    Args:
        interfaces: Leave UCX nothing but TCP over these network interfaces, whatever
            UCX_NET_DEVICES says. None: all ways that it has.
        is_closed: UCX opens no port to other hosts, and reads no process by its number: it has
            RDMA and what a GPU has, and, without RDMA, TCP over loopback, by which it learns that a
            process of this host has ended.
        connect_s: For the first answer of a peer.

    Raises: UsageError: This process was forked from one that had an open transport; or UCX can use
        none of the interfaces.
    """

    is_copied_from: bool = False  # UCX may; it does not say

    def __init__(
        self,
        agent: str | None = None,
        *,
        interfaces: Sequence[str] = (),
        is_closed: bool = False,
        connect_s: float = CONNECT_S,
    ) -> None:
        if _inherited:
            raise UsageError(
                "this process was forked while its parent had a torch_ros handle open, and peers "
                "could not read from it: the threads of UCX are not in the child; close the handle "
                "before the fork, or start this process with spawn or forkserver"
            )
        self.agent: str = agent or str(uuid.uuid4())
        self.connect_s: float = connect_s
        self.costs: Costs = TCP_COSTS if interfaces else NIXL_COSTS
        self.way: str = f"ucx tcp {','.join(interfaces)}" if interfaces else "ucx"
        self.lock: threading.RLock = threading.RLock()
        self.keys: Iterator[int] = itertools.count()
        self.registrations: list[NixlRegistration] = []
        self.links: dict[str, _Link] = {}
        self.closed_because: str = ""  # it is open
        self._pid = os.getpid()
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # our lock is around every call
        self.nixl: Any = bindings.nixlAgent(self.agent, config)
        # UCX does not tell its sockets: `_Link.cut` finds a silent peer's by the epolls that appear
        # while UCX begins, for one agent at a time.
        with _making:
            others = sockets.epolls()
            self._begin_ucx(interfaces, is_closed=is_closed)
            self.epolls: tuple[int, ...] = sockets.nested(sockets.epolls() - others)
        _transports.add(self)

        # Peers read the first byte, to see that this agent is there; theirs comes into the second.
        self._ping_bytes = np.zeros(2, np.uint8)
        region = Region(self._ping_bytes.ctypes.data, self._ping_bytes.nbytes)
        registration = NixlRegistration(self, [region])
        self._ping = (region.address, registration.covers[0].key)
        self.connection: bytes = _pack(
            _CONNECTION,
            self.agent.encode(),
            np.array(self._ping, np.uint64).tobytes(),
            self.nixl.getLocalPartialMD(registration.listed[0], True, []),  # noqa: FBT003
        )

    def _begin_ucx(self, interfaces: Sequence[str], *, is_closed: bool) -> None:
        """Make NIXL's backend, as the arguments of the class say."""
        tried = ucx.options(interfaces, is_closed=is_closed, has_rdma=rdma.has_devices())
        for number, (options, closed) in enumerate(tried, 1):
            try:
                with ucx.closing(closed):
                    self.nixl.createBackend("UCX", options)
                break
            except _NIXL_ERRORS as error:
                if number == len(tried):
                    raise UsageError(ucx.lacking(options, closed, error)) from error
                logger.warning("RDMA is not used: %s", ucx.lacking(options, closed, error))
        rdma.warn_if_mixed()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, in which NIXL's threads do not exist."""
        return os.getpid() != self._pid

    def register(self, regions: Sequence[Region]) -> NixlRegistration:
        self.refuse_closed()
        with self.lock:
            self.refuse_closed()
            registration = NixlRegistration(self, regions)
            self.registrations.append(registration)
            return registration

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:  # noqa: ARG002  # neither helps
        raise Unproven("NIXL does not say in which process an agent is")

    def connect(self, connection: bytes) -> NixlPeer:
        """Return a peer once it has answered; all peers of one agent share a link."""
        self.refuse_closed()
        name, ping, blob = _unpack("?", _CONNECTION, connection)
        agent = name.decode()
        if agent == self.agent:
            raise TransferFailed(agent, "an agent cannot connect to itself")
        with self.lock:
            self.refuse_closed()
            if agent not in self.links:
                source, source_key = np.frombuffer(ping, np.uint64)
                own, own_key = self._ping  # its second byte is for what is read
                row = (source, own + 1, 1, source_key, own_key)  # one of `Pieces`
                self.links[agent] = link = _Link(self, agent, np.array([row], np.uint64))
                try:
                    link.load(blob)
                except TransferFailed:
                    link.end("it could not be connected")
                    raise
            peer = NixlPeer(self.links[agent])
        try:  # without the lock: it may take seconds
            self.links[agent].ping()
        except TransferFailed:
            peer.close()
            raise
        return peer

    def close(self) -> None:
        if self.is_foreign:
            return
        with self.lock:
            reads = [read for link in self.links.values() for read in link.reads]
        for read in reads:  # without the lock: it may take seconds
            read.settle()
        with self.lock:
            self.end("it was closed")

    def end(self, reason: str) -> None:
        """Destroy the agent, with the lock held. Nothing lands after that."""
        if not self.closed_because:
            self.closed_because = reason
            for link in tuple(self.links.values()):
                link.end(f"this transport is closed: {reason}")
            self.nixl = None

    def refuse_closed(self) -> None:
        self.refuse_fork()
        if self.closed_because:
            raise ClosedError(
                f"the transport of agent {self.agent!r} is closed: {self.closed_because}"
            )

    def refuse_fork(self) -> None:
        if self.is_foreign:
            raise ClosedError(f"the transport of agent {self.agent!r} belongs to another process")


def _kind(device: int) -> Any:
    return bindings.DRAM_SEG if device == HOST else bindings.VRAM_SEG


def _pack(*parts: bytes) -> bytes:
    body = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return zlib.crc32(body).to_bytes(4, "little") + body


def _unpack(agent: str, kind: bytes, packed: bytes) -> list[bytes]:
    """Return the parts behind `kind`. NIXL would trust any bytes, so it gets no others."""
    checksum, body = packed[:4], packed[4:]
    parts = []
    if int.from_bytes(checksum, "little") == zlib.crc32(body):
        while body:
            end = 4 + int.from_bytes(body[:4], "little")
            parts.append(body[4:end])
            body = body[end:]
    if parts[:1] != [kind]:
        raise TransferFailed(agent, f"these bytes are no {kind.decode()} of a NixlTransport")
    return parts[1:]


def _close_all() -> None:
    for transport in tuple(_transports):
        transport.close()


def _leak_all() -> None:
    # To destroy the parent's agent in a child would wait for a thread that is not there, and say
    # goodbye to peers over the parent's sockets.
    for transport in _transports:
        if not transport.closed_because:
            _inherited.append(transport.agent)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport.nixl))


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leak_all)
