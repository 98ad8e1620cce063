"""Versions that are fetched into a datacenter ahead of their use (docs/protocol/seeding.md)."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from torch_ros.errors import UsageError, VersionNotFound
from torch_ros.protocol import calls
from torch_ros.protocol import keys as k
from torch_ros.protocol.policy import Next
from torch_ros.protocol.records import Call, Holding, VersionRef
from torch_ros.protocol.seat import Seat, own_group
from torch_ros.protocol.sources import is_relaying, near_range, seen_near
from torch_ros.protocol.versions import (
    HOLDERS_MAX,
    Spec,
    first_holders,
    newer,
    newer_refs,
    newest_record,
    resolve,
)
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.txn import NoneNewer, Range, Ranges, Sample, Unseen, View, one, whole

# Said by an update that goes nowhere yet:
FETCHED = "ahead"  # its `ref` is fetched by the forerunner
COMING = "coming"  # another replica here reads a newer version

AHEAD = "+host"


@dataclass(frozen=True, slots=True)
class Skipping:
    """How a replica passes by newer versions that are far, or only just coming here."""

    may_fetch: bool | None = None  # whether its forerunner is idle; None: it has none
    has_waited: bool = False  # for another replica, since it last went to a version


def forerunner_of(replica: str) -> str:
    """The name of the replica that fetches versions for this one; nobody else may have it.

    Raises: UsageError: A forerunner may have this one.
    """
    if replica.endswith(AHEAD):
        raise UsageError(f"replica {replica!r}: names that end in {AHEAD!r} are taken")
    return f"{replica}{AHEAD}"


def is_forerunner(inst: str) -> bool:
    return k.replica_of(inst).endswith(AHEAD)


def check_policy(policy: object, seeding: str) -> None:
    """Raises: UsageError: They do not go together."""
    if policy is not None and seeding != "foreground":
        raise UsageError(f"policy: seeding={seeding!r} chooses versions, too; give one of them")


def next_version(view: View, seat: Seat, spec: Spec, held: VersionRef, skipping: Skipping) -> Next:
    """The newest version above `held` that is here; else how one is to come here."""
    keys = seat.keys
    newest = newest_record(view, keys)
    if newest is not None and newest != held:
        firsts = [_first(seat, ref) for ref in newer_refs(view, keys, held, newest)]
        if not all(map(view.has, firsts)):
            raise Unseen(first_holders(keys, newest.run, newest.version), *firsts)
    offer = newer(view, keys, spec, held)
    if offer is None:
        return Next()
    there = {ref: seen_near(view, seat, ref) for ref in newer_refs(view, keys, held, offer.ref)}
    for ref, near in there.items():
        if any(holding.state == "full" for holding in near.values()):
            return Next(ref)
        if not view.shows(near_range(seat, ref)):
            raise Unseen(*_of_holdings(view, seat), near_range(seat, ref))
    return _next_from_afar(there, offer.ref, skipping)


def _next_from_afar(
    there: Mapping[VersionRef, Mapping[str, Holding]], newest: VersionRef, skipping: Skipping
) -> Next:
    """The step to take where none of these versions is full here: one fetches it."""
    if any(map(_is_fetching, there.values())):
        return Next()
    if skipping.may_fetch is not None:
        return Next(newest, FETCHED) if skipping.may_fetch else Next()
    coming = [ref for ref, near in there.items() if any(map(is_relaying, near.values()))]
    if not coming:
        return Next(newest)
    return Next(coming[0]) if skipping.has_waited else Next(said=COMING)


def newer_near(view: View, seat: Seat, held: VersionRef) -> Ranges:
    """The holdings in the own datacenter of the versions that a replica might go to."""
    return tuple(near_range(seat, ref) for ref in newer_refs(view, seat.keys, held))


def _first(seat: Seat, ref: VersionRef) -> Sample:
    """Those that are full first."""
    return Sample(near_range(seat, ref), HOLDERS_MAX, is_oldest=True)


def _of_holdings(view: View, seat: Seat) -> list[Range | Sample]:
    """The holdings that were asked for already, to be asked for again beside others."""
    return [asked for asked in view.asked if whole((asked,))[0].start in seat.keys.holdings()]


def _is_fetching(near: Mapping[str, Holding]) -> bool:
    return any(h.state == "filling" and is_forerunner(inst) for inst, h in near.items())


def fetch(view: View, seat: Seat, call: Call, wanted: VersionRef) -> Step[Call]:
    """Announce that this forerunner fills itself with `wanted`, unless that is here, or coming.

    Then the call has no `ref`, and has ended well: nothing is to be done (I15).
    """
    spec = Spec.at_hand(wanted)
    try:
        resolve(view, seat.keys, spec)
    except VersionNotFound:
        return calls.nothing(view, seat, call)
    here = near_range(seat, wanted)
    if not view.shows(here):
        raise Unseen(*_of_holdings(view, seat), here)
    near = seen_near(view, seat, wanted)
    if _is_fetching(near) or any(holding.state == "full" for holding in near.values()):
        return calls.nothing(view, seat, call)
    step = calls.announce_filling(view, seat, call, spec, is_relay=True)
    assert isinstance(step, Act)
    guards = (*step.txn.guards, NoneNewer(here, view.rev))
    return msgspec.structs.replace(step, txn=msgspec.structs.replace(step.txn, guards=guards))


def spare_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    keys = seat.keys
    own = one(seat.holding(ref))
    return (*seat.own, keys.runs(), keys.versions(), own, Sample(keys.holdings(), 1))


def await_spare(view: View, seat: Seat, ref: VersionRef) -> Step[None]:
    """Wait until nobody in this datacenter needs what this forerunner holds.

    Somebody else here has it then, who does not wait for the same; or something newer.
    """
    own_group(view, seat)
    if view.get(seat.holding(ref)) is None:
        return Done(None)
    refs = [ref, *newer_refs(view, seat.keys, ref)]
    ranges = [near_range(seat, each) for each in refs]
    if not all(map(view.shows, ranges)):
        raise Unseen(Sample(seat.keys.holdings(), 1), *ranges)
    for each in refs:
        for inst, holding in seen_near(view, seat, each).items():
            if holding.state == "full" and (each != ref or not is_forerunner(inst)):
                return Done(None)
    return Wait("", (one(seat.group), seat.keys.versions(), *ranges))
