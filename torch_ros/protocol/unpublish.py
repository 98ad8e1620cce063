"""How a replica gives a version back: drain its readers, keep a copy, release the copy. Pure."""

from functools import partial
from typing import Literal

import msgspec

from torch_ros.protocol import keys as k
from torch_ros.protocol.calls import conclude
from torch_ros.protocol.legible import keyed, nobody
from torch_ros.protocol.records import (
    Call,
    Decisions,
    Holding,
    Kept,
    Outcome,
    RunRecord,
    ShardRecord,
    VersionRecord,
    VersionRef,
)
from torch_ros.protocol.retention import keeping, keeping_ranges
from torch_ros.protocol.seat import Seat, calls_of, find, holding_put, own_group, recall, recorded
from torch_ros.store.loops import Act, Done, Step, Wait, WaitAtMost, settle
from torch_ros.store.txn import Delete, Op, Put, Steps, Txn, View, one


def unpublish(
    view: View, seat: Seat, number: int, asked: str, ref: VersionRef
) -> Step[Call | Outcome]:
    """Take the holding out of what is offered, wait for its readers, delete it (I2, I4).

    Returns the call when the group has ended it, when it is another one than asked for, or when a
    copy has to be made first (`copied`). One that has ended may be of other content: a rank that
    could not unpublish while its peers went on without etcd holds what nobody offers any more.
    """
    own_group(view, seat)
    readers = seat.keys.readers_of_any(ref.run, ref.version, seat.inst)
    reading = [reader for _, (_, reader, _), _ in keyed(view.within(readers), k.parse_reader)]
    own_key = seat.holding(ref)
    call = recall(view, seat, number)
    if call is not None and (call.asked != asked or call.outcome is not None):
        return Done(call)
    fresh = call is None
    call = call or Call(number, "unpublish", asked, seat.rank, ref)
    holding = Holding.at(view, own_key)
    if holding is None or (call.ref and holding.uid != call.ref.uid):  # others' content
        return conclude(view, seat, call, Outcome())
    keep = keeping(view, seat.keys, ref, seat.inst)
    is_last = keep.is_needed and not seat.spot
    if is_last and not call.copy:
        call = msgspec.structs.replace(call, copy=k.copy_of(seat.inst, number))
        return recorded(view, seat, call)
    if call.copy and view.get(seat.copy_holding(ref, call.copy)) is None:
        return Done(call)
    if call.by != seat.rank:
        return Wait(f"rank {call.by} waits for readers of version {ref.version}", seat.own)
    if is_last:
        reason = f"the copy of version {ref.version} in host memory is suspected, or draining"
        return Wait(reason, (*seat.own, *keeping_ranges(seat.keys, ref)))
    guards = (view.unchanged(own_key), *(() if seat.spot else keep.guards))
    gone = (Delete(one(own_key)),)
    if not reading:
        return conclude(view, seat, call, Outcome(), (*guards, nobody(view, readers)), gone)
    if fresh or holding.state != "draining":
        draining = msgspec.structs.replace(holding, state="draining")
        return recorded(view, seat, call, guards, (holding_put(view, seat, ref, draining),))
    who = sorted({*map(k.replica_of, reading)})
    reason = f"version {ref.version} is still read by {', '.join(who)} ({len(reading)} records)"
    wait = Wait(reason, (*seat.own, readers))
    return WaitAtMost(wait, seat.drain_s, conclude(view, seat, call, Outcome(), guards, gone))


def copied(
    view: View, seat: Seat, kept: Kept, copy: str, call: int, shard: ShardRecord
) -> Step[bool]:
    """This rank's part of the copy is there; True: all of it is offered. False: it is of no use."""
    anchor = own_group(view, seat).lease_id
    keys, ref = seat.keys, kept.ref
    key, version = seat.copy_holding(ref, copy), keys.version(ref.run, ref.version)
    if view.get(key):
        return Done(value=True)
    record, unpublishing = VersionRecord.at(view, version), find(view, seat, call)
    if record is not None and record.uid != ref.uid:
        return Done(value=False)
    is_over = unpublishing is not None and unpublishing.outcome is not None
    if is_over and unpublishing is not None and unpublishing.copy == copy:
        return Done(value=False)
    own = keys.shard(copy, seat.rank)
    if view.get(own) is None:
        put = Put(own, shard.encode(), seat.lease_id)
        return Act(Txn((view.unchanged(seat.group), view.unchanged(own)), (put,)), None)
    parts = keyed(view.within(keys.shards(copy)), k.parse_rank)
    there = sum(rank < seat.world_size for _, rank, _ in parts)
    if there < seat.world_size:
        if is_over and not keeping(view, keys, ref, copy).is_needed:
            return Done(value=False)  # peers may have let go of their parts before seats were lost
        reason = f"{there} of {seat.world_size} ranks have copied version {ref.version}"
        return Wait(reason, (*seat.own, keys.shards(copy), *keeping_ranges(keys, ref)))
    holding = Holding(ref.uid, call, "full", seat.world_size, seat.datacenter)
    # The version's record even if it is unchanged: it wakes who waits for the version.
    # The decisions too: who takes this incarnation's holdings away must have seen this one.
    ops: list[Op] = [
        Put(key, holding.encode(), anchor),
        Put(version, VersionRecord(ref.uid, kept.layout).encode()),
        Put(seat.decisions, Decisions([*calls_of(view, seat)]).encode(), anchor),
    ]
    run = keys.run(ref.run)
    if view.get(run) is None:
        ops.append(Put(run, RunRecord(seat.inst, ref.run_number).encode()))
    guards = map(view.unchanged, (seat.group, seat.decisions, key, version, run))
    return Act(Txn(tuple(guards), tuple(ops)), lambda _: True)


def copying(seat: Seat, kept: Kept, copy: str, call: int, shard: ShardRecord) -> Steps[bool]:
    """`copied`, to its end."""
    own = one(seat.copy_holding(kept.ref, copy))
    rule = partial(copied, seat=seat, kept=kept, copy=copy, call=call, shard=shard)
    ranges = (*seat.own, own, *keeping_ranges(seat.keys, kept.ref), seat.keys.shards(copy))
    return settle("copy", ranges, rule)


def release(view: View, seat: Seat, ref: VersionRef, copy: str) -> Step[None]:
    """Give a copy up that is not needed any more (I4). Every rank runs this.

    It returns when the copy is not offered and nobody reads it.
    """
    own_group(view, seat)
    keys = seat.keys
    key = seat.copy_holding(ref, copy)
    entry = view.get(key)
    if entry is None:
        return Done(None)
    holding, keep = Holding.decode(entry.value, key), keeping(view, keys, ref, copy)
    if keep.is_needed and holding.state == "full":
        return Wait("", (one(seat.group), *keeping_ranges(keys, ref)))
    state: Literal["full", "draining"] = "full" if keep.is_needed else "draining"
    if holding.state != state:
        put = Put(key, msgspec.structs.replace(holding, state=state).encode(), entry.lease_id)
        woken = wake(view, keys.version(ref.run, ref.version)) if state == "full" else ()
        return Act(Txn((view.unchanged(key), *keep.guards), (put, *woken)), None)
    readers = keys.readers_of(ref.run, ref.version, copy)
    gone = (Delete(one(key)), Delete(keys.shards(copy)))
    guards = (view.unchanged(key), *keep.guards)
    if not any(True for _ in keyed(view.within(readers), k.parse_reader)):
        return Act(Txn((*guards, nobody(view, readers)), gone), lambda _: None)
    wait = Wait("", (one(seat.group), *keeping_ranges(keys, ref), readers))
    return WaitAtMost(wait, seat.drain_s, Act(Txn(guards, gone), lambda _: None))


def wake(view: View, version: str) -> tuple[Put, ...]:
    """Write the record again: that is what those watch who wait for a version."""
    return tuple(Put(key, entry.value) for key, entry in view.within(one(version)))


def releasing(seat: Seat, ref: VersionRef, copy: str) -> Steps[None]:
    """`release`, to its end."""
    readers = seat.keys.readers_of(ref.run, ref.version, copy)
    own = one(seat.copy_holding(ref, copy))
    rule = partial(release, seat=seat, ref=ref, copy=copy)
    return settle("release", (*seat.own, own, *keeping_ranges(seat.keys, ref), readers), rule)
