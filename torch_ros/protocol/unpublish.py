"""How a replica gives a version back: it drains its readers. Pure."""

from typing import NamedTuple

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
    """All that `unpublish` is decided from."""
    return (
        *seat.own,
        one(seat.holding(ref)),
        _readers_of_tensors(seat, ref),
        *seat.keeper.unpublish_ranges(seat, ref),
    )


def unpublish(
    view: View, seat: Seat, made: Call, ref: VersionRef, at_ms: int = 0
) -> Step[Call | Outcome]:
    """Take the holding out of what is offered, wait for its readers, delete it (I2, I4).

    Those in other datacenters are not waited for if somebody else has the version (I14).

    Returns the call when the group has ended it, when it is another one than asked for, or when it
    asks each rank for something first (a copy); else its outcome. A call that has ended may be of
    other content: a rank that could not unpublish while its peers went on without etcd holds what
    nobody offers any more.

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
    if holding is None or (call.ref and holding.uid != call.ref.uid):
        return conclude(view, seat, call, Outcome(at_ms=at_ms))  # nothing of ours is offered
    keep = seat.keeper.on_unpublish(view, seat, call, ref)
    if not isinstance(keep, Keeping):
        return keep
    if call.by != seat.rank:  # the others wait for the call, and for nothing else
        return Wait(f"rank {call.by} waits for readers of version {ref.version}", seat.own)
    return _let_go(view, seat, call, ref, keep, at_ms)


def _let_go(
    view: View, seat: Seat, call: Call, ref: VersionRef, keep: Keeping, at_ms: int
) -> Step[Call | Outcome]:
    """Delete the holding once nobody is waited for, or after `drain_s`; until then it drains."""
    own_key, range_ = seat.holding(ref), _readers_of_tensors(seat, ref)
    readers, holding = near_and_far(view, range_), Holding.at(view, own_key)
    assert holding is not None
    waited_for = _waited_for(readers, keep)
    guards = (view.unchanged(own_key), *keep.guards)
    gone = (Delete(one(own_key)),)
    if not waited_for:  # a reader that has come since this view may be near: then look again
        nobody_came = nobody(view, range_)
        return conclude(view, seat, call, Outcome(at_ms=at_ms), (*guards, nobody_came), gone)
    is_decided = find(view, seat, call.number) is not None
    if not is_decided or holding.state != "draining":  # so that nobody else comes to read
        draining = msgspec.structs.replace(holding, state="draining")
        return recorded(view, seat, call, guards, (holding_put(view, seat, ref, draining),))
    who = ", ".join(sorted({*map(k.replica_of, waited_for)}))
    reason = f"version {ref.version} is still read by {who} ({len(waited_for)} records)"
    wait = Wait(reason, (*seat.own, range_))
    if readers.far and not keep.is_elsewhere:  # with another copy they would not be waited for
        reason = f"{reason}, also in other datacenters: {seat.keeper.why_nobody_else(view, seat)}"
        wait = Wait(reason, unpublish_ranges(seat, ref))
    late = Outcome(at_ms=at_ms + int(1000 * seat.drain_s))
    # A reader that still reads then finds the word cleared, and discards what it got.
    return WaitAtMost(wait, seat.drain_s, conclude(view, seat, call, late, guards, gone))


def awaited(view: View, seat: Seat, ref: VersionRef) -> set[str]:
    """The replicas whose readers an unpublish would wait for, to name them to people."""
    readers = near_and_far(view, _readers_of_tensors(seat, ref))
    keep = seat.keeper.keeping(view, seat.keys, ref, GivenUp(seat.inst, seat.datacenter))
    return {k.replica_of(k.owner_of(inst)) for inst in _waited_for(readers, keep)}


class Readers(NamedTuple):
    """The instances that read something, one for each record."""

    near: list[str]
    far: list[str]  # in other datacenters: when their source has gone, they go on from another


def near_and_far(view: View, range_: Range) -> Readers:
    """Sort the readers of a range; a record that cannot be read counts as near, and is waited for.

    Its key alone says who reads, and that it is far stands in the value.
    """
    found = Readers([], [])
    there = [*view.within(range_)]
    far_keys = {key for key, _, it, _ in readable(there, k.parse_reader, Reader) if it.is_far}
    for key, (_, reader, _), _ in keyed(there, k.parse_reader):
        (found.far if key in far_keys else found.near).append(reader)
    return found


def _waited_for(readers: Readers, keep: Keeping) -> list[str]:
    """All readers; where somebody else has the version, only near ones: far ones find that copy."""
    return readers.near if keep.is_elsewhere else readers.near + readers.far


def _readers_of_tensors(seat: Seat, ref: VersionRef) -> Range:
    """Readers of any incarnation of this replica: all read the same memory."""
    return seat.keys.readers_of_any(ref.run, ref.version, seat.inst)


def wake(view: View, version_key: str) -> tuple[Put, ...]:
    """Write a version's record again: whoever waits for the version watches that record."""
    return tuple(Put(key, entry.value) for key, entry in view.within(one(version_key)))
