"""The ways from a process to others: within its fabric as UCX likes, over TCP to all others.

Names alone decide which way a reader takes, before the first byte:
docs/protocol/nixl.md#ways says why it takes no other if that one fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import msgspec

from torch_ros.costs import Costs
from torch_ros.errors import TransferFailed
from torch_ros.p2p.transport import Peer, Registration, Transfer, Transport
from torch_ros.p2p.voucher import Neighbour
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Region, Spans

log: logging.Logger = log_of(__name__)

EVERYBODY = ""  # the fabric of a way that is open to all: TCP
DEFAULT_FABRIC = "default"  # of processes that name none, nor a datacenter

# Light in glass needs as long for 500 km there and back.
FAR_S = 0.005


class _Way(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    fabric: str
    connection: bytes


def chosen(own: Sequence[str], theirs: Sequence[str]) -> tuple[int, int]:
    """The ways here and there by which a process with `own` fabrics reads one with `theirs`: the
    first of theirs that is also an own one, else the last one at each end.
    """
    shared = (there for there, fabric in enumerate(theirs) if fabric in own)
    there = next(shared, len(theirs) - 1)
    here = own.index(theirs[there]) if theirs[there] in own else len(own) - 1
    return here, there


class WaysRegistration:
    """Registrations of the same memory, one for each way, with a descriptor of all of them."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        self._registrations = registrations
        descriptors = [each.descriptor for each in registrations]
        self.descriptor: bytes = msgspec.msgpack.encode(descriptors) if any(descriptors) else b""

    def close(self) -> None:
        """Close all, also if one raises."""
        with contextlib.ExitStack() as stack:
            for each in self._registrations:
                stack.callback(each.close)


class WaysPeer:
    """A `Peer` by one way, in the `fabric` that both ends share; `EVERYBODY`: none, over TCP. It is
    number `there` of the peer's ways: the peer's descriptors have a part for each.
    """

    agent: str

    def __init__(self, transport: WaysTransport, base: Peer, fabric: str, there: int) -> None:
        self._transport, self._base, self.agent = transport, base, base.agent
        self._fabric, self._there = fabric, there

    @property
    def costs(self) -> Costs:
        return self._base.costs

    def attach(self, descriptor: bytes) -> None:
        self._base.attach(part_of(self.agent, descriptor, self._there))
        if self._fabric:
            self._transport.warn_of_distance(self, self._fabric)  # over TCP, far is no surprise

    def is_beyond(self, limit_s: float) -> bool:
        return self._base.is_beyond(limit_s)

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> Transfer:
        return self._base.prepare(spans, source_device=source_device, target_device=target_device)

    def cut(self) -> None:
        self._base.cut()

    def close(self) -> None:
        self._base.close()


class WaysTransport:
    """Several transports of one agent, of which one reaches each peer.

    Args:
        ways: Fabrics and their transports, which belong to this from then on; the last one is for
            peers that are in none of the fabrics.
    """

    def __init__(self, ways: Sequence[tuple[str, Transport]]) -> None:
        self._fabrics = [fabric for fabric, _ in ways]
        self._transports = [transport for _, transport in ways]
        self._first: Transport = self._transports[0]
        self.agent: str = self._first.agent
        said = [_Way(fabric, transport.connection) for fabric, transport in ways]
        self.connection: bytes = msgspec.msgpack.encode(said)
        self._has_warned = False

    @property
    def is_copied_from(self) -> bool:
        return self._first.is_copied_from

    def register(self, regions: Sequence[Region]) -> WaysRegistration:
        """Register with all ways; with none, if one of them refuses."""
        with contextlib.ExitStack() as undo:
            registrations = []
            for transport in self._transports:
                registrations.append(transport.register(regions))
                undo.callback(registrations[-1].close)
            undo.pop_all()
        return WaysRegistration(registrations)

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:
        """As the first way does: processes of one host see each other, whatever their fabrics."""
        return self._first.prove(agent, part_of(agent, descriptor, 0))

    def connect(self, connection: bytes) -> WaysPeer:
        """Connect by the way that the names choose. No other is tried if that one fails."""
        try:
            theirs = msgspec.msgpack.decode(connection, type=list[_Way])
        except (msgspec.DecodeError, ValueError) as error:
            raise TransferFailed("?", "these bytes are no connection of a WaysTransport") from error
        if not theirs:
            raise TransferFailed("?", "its connection has no ways")
        here, there = chosen(self._fabrics, [way.fabric for way in theirs])
        fabric = self._fabrics[here] if self._fabrics[here] == theirs[there].fabric else EVERYBODY
        reason = "" if fabric else f"TCP, as it is in fabric {theirs[0].fabric!r}"
        try:
            peer = self._transports[here].connect(theirs[there].connection)
        except TransferFailed as error:
            if not reason:
                raise
            raise TransferFailed(error.agent, f"{error.reason}; by {reason}") from error
        if reason:
            log.info("agent %s: %s", peer.agent, reason)
        return WaysPeer(self, peer, fabric, there)

    def warn_of_distance(self, peer: WaysPeer, fabric: str) -> None:
        """Say once if a peer of the own fabric is further than a datacenter is long."""
        if not self._has_warned and peer.is_beyond(FAR_S):
            self._has_warned = True
            log.warning(
                "agent %s is more than %.0f ms away, and in the same fabric, %r. If these are two"
                " datacenters, name them by open(datacenter=...): a version then crosses once",
                peer.agent,
                FAR_S * 1e3,
                fabric,
            )

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for each in self._transports:
                stack.callback(each.close)


def part_of(agent: str, descriptor: bytes, there: int) -> bytes:
    """Return what a descriptor says for one way.

    Raises: TransferFailed: These are other bytes.
    """
    if not descriptor:
        return b""
    try:
        return msgspec.msgpack.decode(descriptor, type=list[bytes])[there]
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        reason = "these bytes are no descriptor of a WaysTransport with these ways"
        raise TransferFailed(agent, reason) from error
