"""The transport over sockets of our own: docs/protocol/tcp.md.

Reads go through requests to a thread of the source, which sends what is registered, and nothing
else. What is on a device goes by way of host memory at both ends.
"""

from __future__ import annotations

import atexit
import itertools
import mmap
import os
import secrets
import threading
import uuid
import weakref
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import closing

import numpy as np

from torch_ros.channels import addresses, wire
from torch_ros.channels.addresses import Listen, parse_listen
from torch_ros.channels.meeting import Answer, Running, TcpIdentity
from torch_ros.channels.pool import Flight, Sockets, wait
from torch_ros.channels.steps import within
from torch_ros.channels.views import PieceBuffers
from torch_ros.channels.wire import Garbage, Named
from torch_ros.copies.crossing import Crossing, cuda
from torch_ros.costs import TCP_COSTS, Costs
from torch_ros.errors import ClosedError, NotSupported, TransferFailed
from torch_ros.features.tcp.reading import TcpTransfer
from torch_ros.features.tcp.serving import Server, Table
from torch_ros.p2p.regions import Cover, cut, merge
from torch_ros.p2p.transport import CONNECT_S
from torch_ros.p2p.voucher import Neighbour, Unproven
from torch_ros.spans import HOST, Region, Spans

EVERYWHERE = Listen()
PIECES = 8  # that are pinned: of reads that are receiving one at the same moment

_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


class TcpRegistration:
    """A `Registration`. What it has on each device has a random id, which only its descriptor has.

    Attributes:
        names: The ids, by what they name.
    """

    def __init__(self, transport: TcpTransport, regions: Sequence[Region]) -> None:
        self._transport = transport
        self.is_open: bool = True
        by_device: defaultdict[int, list[Region]] = defaultdict(list)
        for region in regions:
            by_device[region.device].append(region)
        self.names: dict[Cover, bytes] = {
            merge(device, by_device[device], key=next(transport.keys)): secrets.token_bytes(16)
            for device in sorted(by_device)
        }
        transport.reach(by_device.keys() - {HOST})
        named = []
        for cover, name in self.names.items():
            named.append(Named(name, cover.device, np.stack((cover.starts, cover.ends)).tobytes()))
            transport.table.add(name, cover)
        self.descriptor: bytes = wire.descriptor_of(transport.agent, named) if named else b""

    def close(self) -> None:
        transport = self._transport
        if transport.is_foreign:
            return
        with transport.lock:
            self.is_open = False  # no read into it is posted from here on
            if self in transport.registrations:
                transport.registrations.remove(self)
            reads = [read for read in transport.reads if self in read.targets]
        for name in self.names.values():
            transport.table.remove(name)
        for read in reads:
            read.stop("the memory it lands in was unregistered")


class TcpPeer:
    """A `Peer`, with its own sockets."""

    costs: Costs = TCP_COSTS

    def __init__(self, transport: TcpTransport, agent: str, sockets: Sockets) -> None:
        self.transport, self.agent, self.sockets = transport, agent, sockets
        self._names: dict[Cover, bytes] = {}  # attached, the newest first
        self._is_closed = False
        self._keys = itertools.count()

    def ended(self) -> str:
        """The reason for which nothing more is read from it; ""."""
        if self.transport.is_closed:
            return "this transport is closed"
        return "the connection was closed" if self._is_closed else ""

    def attach(self, descriptor: bytes) -> None:
        self._refuse_closed()
        if not descriptor:
            return
        try:
            agent, named = wire.parse_descriptor(descriptor)
            if agent != self.agent:
                raise Garbage("the descriptor is not of this agent")
            new = {Cover(next(self._keys), each.device, *each.regions()): each.id for each in named}
        except Garbage as error:
            raise TransferFailed(self.agent, str(error)) from error
        with self.transport.lock:
            known = set(self._names.values())
            self._names = {
                cover: name for cover, name in new.items() if name not in known
            } | self._names

    def is_beyond(self, limit_s: float) -> bool:
        """Whether the hosts are: how long the peer takes for an answer says nothing of that."""
        self._refuse_closed()
        return self.sockets.round_trip_s > limit_s

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> TcpTransfer:
        """Cut the spans where registrations end, and note in which of them the pieces land."""
        self._refuse_closed()
        with self.transport.lock:
            names = {c.key: (c, n) for c, n in self._names.items() if c.device == source_device}
            owners = {
                cover: each
                for each in reversed(self.transport.registrations)
                for cover in each.names
                if cover.device == target_device
            }
        sources = [cover for cover, _ in names.values()]
        pieces = cut(self.agent, spans, sources, tuple(owners))
        used = set(pieces[:, 4].tolist())  # of the target covers
        rows = [(names[key][1], source, to, size) for source, to, size, key, _ in pieces.tolist()]
        targets = [own for cover, own in owners.items() if cover.key in used]
        return TcpTransfer(self, rows, targets, target_device)

    def cut(self) -> None:
        """Nothing: to close a read ends it at once, whether the peer answers or not."""

    def close(self) -> None:
        if self.transport.is_foreign:
            return
        self._is_closed = True
        with self.transport.lock:
            reads = [read for read in self.transport.reads if read.peer is self]
        for read in reads:
            read.stop("the connection was closed")
        self.transport.leave(self)
        self.sockets.close()

    def _refuse_closed(self) -> None:
        self.transport.refuse_closed()
        if self._is_closed:
            raise ClosedError(f"the connection to agent {self.agent!r} was closed")


class TcpTransport:
    """A `Transport` over TCP: encrypted, but for processes that share a host's loopback.

    After `fork`, calls in the child raise `ClosedError`, and to close something does nothing. The
    child may make its own.

    Args:
        listen: Where.
        connect_s: For the first answer of a peer.
        place: The host and the namespace of its network, as `addresses.place` says. For tests.
        crossing: How memory of devices is copied. None: by CUDA's driver.

    Raises: UsageError: It cannot listen there.
    """

    is_copied_from: bool = False

    def __init__(
        self,
        agent: str | None = None,
        *,
        listen: Listen = EVERYWHERE,
        connect_s: float = CONNECT_S,
        place: tuple[str, int] | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        self.agent: str = agent or str(uuid.uuid4())
        self.connect_s: float = connect_s
        self.lock: threading.RLock = threading.RLock()  # never held while a read's is asked for
        self.table: Table = Table()
        self.registrations: list[TcpRegistration] = []
        self.reads: set[TcpTransfer] = set()
        self.flying: dict[TcpTransfer, None] = {}  # those in flight, in the order of their posts
        self.keys = itertools.count()
        self.is_closed: bool = False
        self._place = place or addresses.place()
        self._peers: set[TcpPeer] = set()
        self._buffers = PieceBuffers(wire.PIECE_BYTES + 64)
        self.crossing: Crossing = crossing or cuda()
        self.pieces: PieceBuffers = PieceBuffers(wire.PIECE_BYTES)  # on their way to a device
        self._pinned: memoryview | None = None  # some of these
        self._pid = os.getpid()
        identity = TcpIdentity()
        sockets, port, told = addresses.listeners(listen)
        self.told: tuple[str, ...] = tuple(map(str, told))  # the addresses for readers elsewhere
        self.where: str = f"port {port} of {', '.join(self.told) or 'loopback'}"
        packed = [address.packed for address in told]
        self.connection: bytes = wire.card_of(
            *(self.agent, self._place, port, packed, (identity.pin, identity.token))
        )
        self._server = Server(self.agent, identity, self.table, sockets, self.crossing)
        _transports.add(self)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, in which no thread serves."""
        return os.getpid() != self._pid

    def register(self, regions: Sequence[Region]) -> TcpRegistration:
        self.refuse_closed()
        with self.lock:
            self.refuse_closed()
            registration = TcpRegistration(self, regions)
            self.registrations.append(registration)
        return registration

    def reach(self, devices: Collection[int]) -> None:
        """Make ready to copy memory of these devices: nothing is made while bytes move.

        Raises: NotSupported: This process cannot.
        """
        try:
            for device in devices:
                self.crossing.open(device)
        except OSError as error:
            raise NotSupported(
                f'memory of a GPU with transport="tcp" ({error})',
                'use transport="auto" on all replicas, or publish a copy in host memory: '
                'publish_copy(..., to="cpu")',
            ) from error
        with self.lock:
            if not devices or self._pinned is not None:
                return
            self.refuse_closed()
            self._server.pin()
            # Shared, so that a fork moves no page of it away from under a device.
            self._pinned = memoryview(mmap.mmap(-1, PIECES * wire.PIECE_BYTES))
            self.crossing.pin(self._pinned)
            for first in range(0, len(self._pinned), wire.PIECE_BYTES):
                self.pieces.keep(self._pinned[first : first + wire.PIECE_BYTES])

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:  # noqa: ARG002  # neither helps
        raise Unproven("TCP does not say in which process an agent is")

    def connect(self, connection: bytes) -> TcpPeer:
        """Return a peer once it has answered."""
        self.refuse_closed()
        agent = "?"
        try:
            card = wire.parse_card(connection)
            agent = card.agent
            if agent == self.agent:
                raise Garbage("an agent cannot connect to itself")
            routes = addresses.routes(card, self._place)
            sockets = Sockets(card, routes, self._buffers)
            self._first(sockets)
        except OSError as error:
            raise TransferFailed(agent, str(error.strerror or error)) from error
        peer = TcpPeer(self, agent, sockets)
        with self.lock:
            if not self.is_closed:
                self._peers.add(peer)
                self._share_out()
                return peer
        sockets.close()
        raise ClosedError(f"the transport of agent {self.agent!r} is closed")

    def _first(self, sockets: Sockets) -> None:
        """Make the first connection. Raises: OSError: It does not answer in time."""
        flight = Flight()
        try:
            channel, _ = _answered(sockets.take(flight), flight, self.connect_s)
        except BaseException:
            flight.close()
            raise
        sockets.give(flight, channel)

    def _share_out(self) -> None:
        for peer in self._peers:
            peer.sockets.share_with(len(self._peers))

    def leave(self, peer: TcpPeer) -> None:
        with self.lock:
            self._peers.discard(peer)
            self._share_out()

    def add(self, read: TcpTransfer) -> None:
        with self.lock:
            self.reads.add(read)

    def discard(self, read: TcpTransfer) -> None:
        with self.lock:
            self.reads.discard(read)

    def close(self) -> None:
        if self.is_foreign:
            return
        with self.lock:
            self.is_closed = True
        self._server.close()
        with self.lock:
            registrations, reads = tuple(self.registrations), tuple(self.reads)
            peers = tuple(self._peers)
        for registration in registrations:
            registration.close()
        for read in reads:
            read.stop("this transport is closed")
        for peer in peers:
            peer.close()
        with self.lock:
            pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self.crossing.unpin(pinned)

    def refuse_closed(self) -> None:
        self.refuse_fork()
        if self.is_closed:
            raise ClosedError(f"the transport of agent {self.agent!r} is closed")

    def refuse_fork(self) -> None:
        if self.is_foreign:
            raise ClosedError(f"the transport of agent {self.agent!r} belongs to another process")


def at(listen: str, agent: str, *, connect_s: float) -> TcpTransport:
    """A transport where the option `listen` of `open` says. Raises: UsageError: It cannot be."""
    return TcpTransport(agent, listen=parse_listen(listen), connect_s=connect_s)


def _answered(steps: Running[Answer], flight: Flight, limit_s: float) -> Answer:
    """The answer, for which this thread waits. Raises: TimeoutError: It takes longer."""
    with closing(within(steps, limit_s)) as limited:
        try:
            while True:
                flight.event = next(limited)
                wait([flight], 0.05)
        except StopIteration as end:
            answer: Answer = end.value
            return answer


def _close_all() -> None:
    for transport in tuple(_transports):
        transport.close()


atexit.register(_close_all)
