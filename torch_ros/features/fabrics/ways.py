"""The ways from a process to others: NIXL within a fabric, TCP to all.

docs/protocol/nixl.md#ways says which one a reader takes, and why it stays with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Annotated

import msgspec

from torch_ros.costs import Costs
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.p2p.transport import Peer, Registration, Transfer, Transport
from torch_ros.p2p.voucher import Neighbour, Unproven
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Region, Spans

log: logging.Logger = log_of(__name__)

NIXL = "nixl"  # the kind of way that stays within a fabric
DEFAULT_FABRIC = "default"  # of processes that name none, nor a datacenter

# Light in glass needs as long for 500 km there and back.
FAR_S = 0.005


class _Way(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    kind: str
    connection: bytes


class _Connection(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    fabric: str
    ways: Annotated[list[_Way], msgspec.Meta(max_length=2)]


def common(own: Sequence[str], theirs: Sequence[str], *, is_same_fabric: bool) -> list[str]:
    """The kinds of ways by which one process may read another, those that it prefers first."""
    return [kind for kind in own if kind in theirs and (is_same_fabric or kind != NIXL)]


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
    """A `Peer` by one way, which is number `there` of the peer's: its descriptors have a part for
    each. `is_near`: it is in the same fabric.
    """

    agent: str

    def __init__(self, transport: WaysTransport, base: Peer, there: int, *, is_near: bool) -> None:
        self._transport, self._base, self.agent = transport, base, base.agent
        self._there, self._is_near = there, is_near

    @property
    def costs(self) -> Costs:
        return self._base.costs

    def attach(self, descriptor: bytes) -> None:
        self._base.attach(_part_of(self.agent, descriptor, self._there))
        if self._is_near:
            self._transport.warn_of_distance(self)

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
        fabric: Within it NIXL reaches others.
        ways: Kinds and their transports, which belong to this from then on; preferred ones first.
    """

    is_copied_from: bool = False

    def __init__(self, fabric: str, ways: Sequence[tuple[str, Transport]]) -> None:
        self._fabric, self._ways = fabric, dict(ways)
        self.agent: str = ways[0][1].agent
        said = [_Way(kind, transport.connection) for kind, transport in ways]
        self.connection: bytes = msgspec.msgpack.encode(_Connection(fabric, said))
        self._has_warned = False
        self._unreached: set[bytes] = set()  # connections of peers that another way leads to

    def register(self, regions: Sequence[Region]) -> WaysRegistration:
        """Register with all ways; with none, if one of them refuses."""
        with contextlib.ExitStack() as undo:
            registrations = []
            for transport in self._ways.values():
                registrations.append(transport.register(regions))
                undo.callback(registrations[-1].close)
            undo.pop_all()
        return WaysRegistration(registrations)

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:  # noqa: ARG002  # neither helps
        raise Unproven("neither NIXL nor TCP says in which process an agent is")

    def connect(self, connection: bytes) -> WaysPeer:
        """Connect by the first way that both ends have, and that leads there: nothing has been read
        yet, so that no byte may come late by another one.
        """
        try:
            said = msgspec.msgpack.decode(connection, type=_Connection)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransferFailed("?", "these bytes are no connection of a WaysTransport") from error
        theirs, is_near = [way.kind for way in said.ways], said.fabric == self._fabric
        kinds = common(tuple(self._ways), theirs, is_same_fabric=is_near)
        failed, agent = dict[str, str](), "?"
        for kind in kinds:
            there = theirs.index(kind)
            to = said.ways[there].connection
            if to in self._unreached and kind != kinds[-1]:
                continue
            try:
                peer = self._ways[kind].connect(to)
            except TransferFailed as error:
                failed[kind], agent = error.reason, error.agent
                continue
            except ClosedError as error:  # NIXL has ended here
                if kind == kinds[-1]:
                    raise
                failed[kind] = str(error)
                continue
            if failed:
                self._unreached.add(said.ways[theirs.index(NIXL)].connection)
                why = "; ".join(failed.values())
                log.info("agent %s: %s, as NIXL fails: %s", peer.agent, kind, why)
            elif not is_near:
                log.info("agent %s: TCP, as it is in fabric %r", peer.agent, said.fabric)
            return WaysPeer(self, peer, there, is_near=is_near)
        if not kinds:
            found = f"{' and '.join(theirs) or 'no way'} in fabric {said.fabric!r}"
            reason = f"it has {found}, this process {' and '.join(self._ways)} in {self._fabric!r}"
            raise TransferFailed(agent, f"{reason}: the option transport of both decides")
        where = "" if is_near else f", as it is in fabric {said.fabric!r}"
        reasons = "; ".join(f"by {kind}{where}: {reason}" for kind, reason in failed.items())
        raise TransferFailed(agent, reasons)

    def warn_of_distance(self, peer: WaysPeer) -> None:
        """Say once if a peer of the own fabric is further than a datacenter is long."""
        if not self._has_warned and peer.is_beyond(FAR_S):
            self._has_warned = True
            log.warning(
                "agent %s is more than %.0f ms away, and in the same fabric, %r. If these are two"
                " datacenters, name them by open(datacenter=...): a version then crosses once",
                peer.agent,
                FAR_S * 1e3,
                self._fabric,
            )

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for each in self._ways.values():
                stack.callback(each.close)


def _part_of(agent: str, descriptor: bytes, there: int) -> bytes:
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
