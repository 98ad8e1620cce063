"""How a replica gives a version back: it drains its readers. Pure."""

import msgspec

from torch_ros.protocol import keys as k
from torch_ros.protocol.calls import conclude
from torch_ros.protocol.keeping import GivenUp, Keeping
from torch_ros.protocol.legible import keyed, nobody, readable
from torch_ros.protocol.records import Call, Holding, Outcome, Reader, VersionRef
from torch_ros.protocol.seat import Seat, find, holding_put, own_group, recall, recorded
from torch_ros.store.loops import Done, Step, Wait, WaitAtMost
from torch_ros.store.txn import Delete, Put, Range, Ranges, View, one


def unpublish_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    keys = seat.keys
    return (
        *seat.own,
        one(seat.holding(ref)),
        keys.readers_of_any(ref.run, ref.version, seat.inst),
        *seat.keeper.unpublish_ranges(seat, ref),
    )


def unpublish(
    view: View, seat: Seat, made: Call, ref: VersionRef, at_ms: int = 0
) -> Step[Call | Outcome]:
    """Take the holding out of what is offered, wait for its readers, delete it (I2, I4).

    Those in other datacenters are not waited for if somebody else has the version (I14).

    Returns the call when the group has ended it, when it is another one than asked for, or when it
    asks each rank for something first. One that has ended may be of other content: a rank that
    could not unpublish while its peers went on without etcd holds what nobody offers any more.

    Args:
        made: The call as this rank makes it.
        at_ms: Now.
    """
    own_group(view, seat)
    call = recall(view, seat, made.number)
    if call is not None and (call.asked != made.asked or call.outcome is not None):
        return Done(call)
    call = call or msgspec.structs.replace(made, ref=ref, at_ms=at_ms)
    holding = Holding.at(view, seat.holding(ref))
    if holding is None or (call.ref and holding.uid != call.ref.uid):  # others' content
        return conclude(view, seat, call, Outcome(at_ms=at_ms))
    keep = seat.keeper.on_unpublish(view, seat, call, ref)
    if not isinstance(keep, Keeping):
        return keep
    if call.by != seat.rank:  # the others wait for the call, and for nothing else
        return Wait(f"rank {call.by} waits for readers of version {ref.version}", seat.own)
    return _let_go(view, seat, call, ref, keep, at_ms)


def _let_go(
    view: View, seat: Seat, call: Call, ref: VersionRef, keep: Keeping, at_ms: int
) -> Step[Call | Outcome]:
    """Delete the holding when nobody is waited for any more."""
    is_new = find(view, seat, call.number) is None
    own_key, keys = seat.holding(ref), seat.keys
    readers = keys.readers_of_any(ref.run, ref.version, seat.inst)
    near, far = near_and_far(view, readers)
    awaited = near if keep.is_elsewhere else near + far
    guards = (view.unchanged(own_key), *keep.guards)
    gone = (Delete(one(own_key)),)
    if not awaited:  # who comes meanwhile may be near
        ended, guards = Outcome(at_ms=at_ms), (*guards, nobody(view, readers))
        return conclude(view, seat, call, ended, guards, gone)
    holding = Holding.at(view, own_key)
    assert holding is not None
    if is_new or holding.state != "draining":
        draining = msgspec.structs.replace(holding, state="draining")
        return recorded(view, seat, call, guards, (holding_put(view, seat, ref, draining),))
    who = sorted({*map(k.replica_of, awaited)})
    reason = f"version {ref.version} is still read by {', '.join(who)} ({len(awaited)} records)"
    watched: Ranges = (*seat.own, readers)
    if far and awaited != near:
        reason = f"{reason}, also in other datacenters: {seat.keeper.why_nobody_else(view, seat)}"
        watched = unpublish_ranges(seat, ref)
    late = Outcome(at_ms=at_ms + int(1000 * seat.drain_s))
    end = conclude(view, seat, call, late, guards, gone)
    return WaitAtMost(Wait(reason, watched), seat.drain_s, end)


def awaited(view: View, seat: Seat, ref: VersionRef) -> set[str]:
    """The replicas whose readers are waited for."""
    near, far = near_and_far(view, seat.keys.readers_of_any(ref.run, ref.version, seat.inst))
    keep = seat.keeper.keeping(view, seat.keys, ref, GivenUp(seat.inst, seat.datacenter))
    return {k.replica_of(k.owner_of(inst)) for inst in (near if keep.is_elsewhere else near + far)}


def near_and_far(view: View, readers: Range) -> tuple[list[str], list[str]]:
    """The readers to be waited for; and those in other datacenters, one for each record.

    The latter go on from another source when they find that theirs has gone.
    """
    there, near, far = [*view.within(readers)], list[str](), list[str]()
    left = {key for key, _, it, _ in readable(there, k.parse_reader, Reader) if it.is_far}
    for key, (_, reader, _), _ in keyed(there, k.parse_reader):
        (far if key in left else near).append(reader)
    return near, far


def wake(view: View, version: str) -> tuple[Put, ...]:
    """Write the record again: that is what those watch who wait for a version."""
    return tuple(Put(key, entry.value) for key, entry in view.within(one(version)))
