"""Copies in host memory: when one is made, how it is offered, when it goes. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import msgspec

from torch_ros.features.retention.rules import Wish, keeping, keeping_ranges
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.keeping import GivenUp, Keeper, Keeping
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, nobody
from torch_ros.protocol.records import (
    Call,
    Holding,
    Kept,
    Outcome,
    RetainRecord,
    RunRecord,
    ShardRecord,
    VersionRecord,
    VersionRef,
)
from torch_ros.protocol.seat import Seat, decisions_at, find, group_txn, own_group, recorded
from torch_ros.protocol.unpublish import near_and_far, wake
from torch_ros.protocol.versions import is_passed
from torch_ros.store.loops import Act, Done, Step, Wait, WaitAtMost, settle
from torch_ros.store.txn import Delete, Op, Put, Ranges, Steps, Txn, View, one


class LastCopies(Keeper):
    """Keeps the last copy of a version that somebody asks all to `retain`, or reads from afar."""

    def __init__(self, retain: tuple[str, ...] = ()) -> None:
        self.retain = retain

    @classmethod
    def of(cls, retain: Iterable[str | int]) -> Self:
        """Raises: UsageError: One of these names no version."""
        return cls(tuple(str(Wish.parse(version)) for version in retain))

    def ranges(self, keys: Keys, ref: VersionRef, datacenter: str) -> Ranges:
        return keeping_ranges(keys, ref, datacenter)

    def keeping(self, view: View, keys: Keys, ref: VersionRef, given_up: GivenUp) -> Keeping:
        return keeping(view, keys, ref, given_up)

    def unpublish_ranges(self, seat: Seat, ref: VersionRef) -> Ranges:
        needed = keeping_ranges(seat.keys, ref, seat.datacenter)
        return (*needed, seat.keys.shards_of_copies(seat.replica))

    def on_unpublish(
        self, view: View, seat: Seat, call: Call, ref: VersionRef
    ) -> Step[Call | Outcome] | Keeping:
        """Have a copy made first if a retained version would be lost, or far readers want one.

        The rank that decides asks for it in the call's record. Each rank that finds it there, and
        the copy not yet offered, returns the call (`Done`), makes its part, and comes back here.

        Returns: A step that comes first; or a `Keeping`: the tensors may go, under its guards. It
        has none where nobody else has the version and it may be lost (spot, or no copy was made).
        """
        keep = keeping(view, seat.keys, ref, GivenUp(seat.inst, seat.datacenter))
        decides = call.by == seat.rank
        if decides and not call.copy and (with_copy := _copy_first(view, seat, call, ref, keep)):
            return recorded(view, seat, with_copy)
        if call.copy and view.get(seat.copy_holding(ref, call.copy)) is None:
            return Done(call)
        if _may_lose(seat, call):
            return keep if keep.is_elsewhere else replace(keep, guards=())
        if decides and keep.is_needed:
            reason = f"the copy of version {ref.version} in host memory is suspected, or draining"
            return Wait(reason, (*seat.own, *keeping_ranges(seat.keys, ref, seat.datacenter)))
        return keep

    def why_nobody_else(self, view: View, seat: Seat) -> str:
        return "another copy is there" if _has_copy(view, seat) else "no copy could be made"

    def beside(self, who: Applicant) -> tuple[Op, ...]:
        """Return the record of what it retains `@here`; the rest stands in the group's record."""
        here = [str(wish.spec) for wish in map(Wish.parse, self.retain) if wish.is_here]
        own = who.keys.retain(who.datacenter, who.replica)
        return (Put(own, RetainRecord(here).encode(), who.lease_id),) if here else ()


def _copy_first(view: View, seat: Seat, call: Call, ref: VersionRef, keep: Keeping) -> Call | None:
    """The call, asking each rank for its part of a copy. None: the tensors go without one.

    A retained version does not go without. For far readers a copy only saves a wait: it is
    optional, asked for once, and not where memory has another one already.
    """
    if _may_lose(seat, call):
        return None
    with_copy = msgspec.structs.replace(call, copy=k.copy_of(seat.inst, call.number))
    if keep.is_needed:
        return msgspec.structs.replace(with_copy, is_optional=False)
    if keep.is_elsewhere:
        return None
    readers = seat.keys.readers_of_any(ref.run, ref.version, seat.inst)
    is_wanted = near_and_far(view, readers).far or _is_filled_afar(view, seat, ref)
    was_asked_for = call.is_optional
    if not is_wanted or was_asked_for or _has_copy(view, seat):
        return None
    return msgspec.structs.replace(with_copy, is_optional=True)


def do_without(view: View, seat: Seat, number: int) -> Step[None]:
    """This rank cannot make its part of a copy, so call `number` goes on without one on all ranks.

    Not an error: a trainer would stop at each step, for as long as memory is short.
    """
    own_group(view, seat)
    call = find(view, seat, number)
    if call is None or call.outcome is not None or not call.copy:
        return Done(None)  # a peer did without before
    without = msgspec.structs.replace(call, copy="", is_forgone=not call.is_optional)
    return Act(group_txn(view, seat, without), lambda _: None)


def _may_lose(seat: Seat, call: Call) -> bool:
    """Whether the version goes although it is retained, and nobody else has it."""
    return seat.spot or call.is_forgone


def _has_copy(view: View, seat: Seat) -> bool:
    """Whether this incarnation offers a copy already, of this version or an earlier one.

    One with slow readers stays for long, and a trainer that made one at each step for far readers
    would run out of memory. What lingers is none: its shards are of a handle that closes.
    """
    found = keyed(view.within(seat.keys.shards_of_copies(seat.replica)), k.parse_shard)
    return any(k.is_of(inst, seat.inst) and not k.lingers(inst) for _, inst, _ in found)


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """One rank's part of a copy in host memory."""

    copy: str  # the instance that offers it
    call: int  # the number of the call that it was made in
    shard: ShardRecord  # by which readers find it
    at_ms: int = 0  # now


def show_copy(view: View, seat: Seat, kept: Kept, part: CopiedPart) -> Step[bool]:
    """Show this rank's part of the copy; the last rank to do so offers the copy.

    True: it is offered. False: it is of no use, and this rank's part is shown no more.
    """
    own_group(view, seat)
    keys, ref, copy = seat.keys, kept.ref, part.copy
    if view.get(seat.copy_holding(ref, copy)):
        return Done(value=True)
    own = keys.shard(copy, seat.rank)
    shown = {rank for _, rank, _ in keyed(view.within(keys.shards(copy)), k.parse_rank)}
    missing = len({*range(seat.world_size)} - shown)
    if _is_of_no_use(view, seat, ref, part, is_whole=not missing):
        # Guarded, since the rank that decides the call may still ask for this copy again.
        gone = Txn((view.unchanged(seat.decisions),), (Delete(one(own)),))
        return Act(gone, lambda _: False) if view.get(own) else Done(value=False)
    if view.get(own) is None:
        put = Put(own, part.shard.encode(), seat.lease_id)
        guards = (view.unchanged(seat.group), view.unchanged(own))
        return Act(Txn(guards, (put,)), None)  # then look who else shows a part
    if missing:
        reason = f"{missing} of {seat.world_size} ranks have not copied version {ref.version}"
        return Wait(reason, (*seat.own, keys.shards(copy), *releasing_ranges(seat, ref, copy)))
    return Act(_offer(view, seat, kept, part), lambda _: True)


def _offer(view: View, seat: Seat, kept: Kept, part: CopiedPart) -> Txn:
    """Put the holding of the copy, now that all ranks show their parts.

    Two records are put unchanged: the version's, which wakes those that wait for the version, and
    the decisions, whose guard fails for who takes away all holdings and has not seen this one.
    """
    anchor, keys, ref = own_group(view, seat).lease_id, seat.keys, kept.ref
    key, version = seat.copy_holding(ref, part.copy), keys.version(ref.run, ref.version)
    run = keys.run(ref.run)
    size, datacenter = seat.world_size, seat.datacenter
    holding = Holding(ref.uid, part.call, "full", size, datacenter, at_ms=part.at_ms)
    ops: list[Op] = [
        Put(key, holding.encode(), anchor),
        Put(version, kept.record(VersionRecord.at(view, version), seat.replica).encode()),
        Put(seat.decisions, decisions_at(view, seat.decisions).encode(), anchor),
    ]
    if view.get(run) is None:
        ops.append(Put(run, RunRecord(seat.inst, ref.run_number).encode()))
    guards = map(view.unchanged, (seat.group, seat.decisions, key, version, run))
    return Txn(tuple(guards), tuple(ops))


def _is_of_no_use(
    view: View, seat: Seat, ref: VersionRef, part: CopiedPart, *, is_whole: bool
) -> bool:
    """Whether a copy that is not offered never will be: its parts would hold memory for nothing.

    Args:
        is_whole: Whether all ranks show their parts: such a copy is offered again, needed or not.
    """
    record = VersionRecord.at(view, seat.keys.version(ref.run, ref.version))
    if record is not None and record.uid != ref.uid:  # the number stands for another content
        return True
    if is_passed(view, seat.keys, ref):
        return True
    call = find(view, seat, part.call)
    if call is None:  # too long ago: a copy that is offered again under a new seat
        return False
    is_given_up = (call.is_optional or call.is_forgone) and not call.copy
    if is_given_up:  # a rank had no memory for its part
        return True
    if call.outcome is None:  # its ranks are about to offer it
        return False
    if call.copy == part.copy:  # it was offered before the call ended, or the call has failed
        return True
    # Offered again under a new seat: peers may have let go of their parts before.
    return not is_whole and not _keeping_copy(view, seat, ref, part.copy).is_needed


def copying(seat: Seat, kept: Kept, part: CopiedPart) -> Steps[bool]:
    """`show_copy`, to its end."""
    rule, copy = partial(show_copy, seat=seat, kept=kept, part=part), part.copy
    ranges = (*seat.own, *releasing_ranges(seat, kept.ref, copy), seat.keys.shards(copy))
    return settle("copy", ranges, rule)


def release(view: View, seat: Seat, ref: VersionRef, copy: str) -> Step[None]:
    """Offer a copy for as long as it is needed (I4) or read from afar. Every rank runs this.

    Ends when the copy is not offered any more, and nobody reads it. If it is needed again while it
    drains, as when its witness goes, it is offered again.
    """
    own_group(view, seat)
    keys = seat.keys
    key = seat.copy_holding(ref, copy)
    entry = view.get(key)
    if entry is None:
        return Done(None)
    holding, keep = Holding.decode(entry.value, key), _keeping_copy(view, seat, ref, copy)
    wait = Wait("", releasing_ranges(seat, ref, copy))
    guards = (view.unchanged(key), *keep.guards)
    state: Literal["full", "draining"] = "full" if keep.is_needed else "draining"
    if holding.state != state:
        put = Put(key, msgspec.structs.replace(holding, state=state).encode(), entry.lease_id)
        woken = wake(view, keys.version(ref.run, ref.version)) if keep.is_needed else ()
        return Act(Txn(guards, (put, *woken)), None)
    if keep.is_needed:
        return wait
    gone = (Delete(one(key)), Delete(keys.shards(copy)))
    range_ = keys.readers_of(ref.run, ref.version, copy)
    if not any(near_and_far(view, range_)):
        return Act(Txn((*guards, nobody(view, range_)), gone), lambda _: None)
    return WaitAtMost(wait, seat.drain_s, Act(Txn(guards, gone), lambda _: None))


def _keeping_copy(view: View, seat: Seat, ref: VersionRef, copy: str) -> Keeping:
    """Whether a copy is needed: it is retained, or far readers have nobody else to read from.

    Far readers of the tensors count: no unpublish waits for them, since they can come here.
    """
    keys = seat.keys
    keep = keeping(view, keys, ref, GivenUp(copy, seat.datacenter))
    of_copy = keys.readers_of(ref.run, ref.version, copy)
    of_tensors = keys.readers_of_any(ref.run, ref.version, seat.inst)
    is_read = any(near_and_far(view, range_).far for range_ in (of_copy, of_tensors))
    is_read = is_read or (not keep.is_elsewhere and _is_filled_afar(view, seat, ref))
    return replace(keep, is_needed=keep.is_needed or is_read)


def _is_filled_afar(view: View, seat: Seat, ref: VersionRef) -> bool:
    """Whether somebody in another datacenter reads the version, or looks for a source of it.

    The latter has no reader record, and may have been left a moment ago for this holding.
    """
    there = view.within(seat.keys.holdings_of(ref.run, ref.version))
    return any(
        where.datacenter != seat.datacenter
        and holding.uid == ref.uid
        and holding.state == "filling"
        and not holding.is_original
        for _, where, holding, _ in legible.holdings(there)
    )


def releasing(seat: Seat, ref: VersionRef, copy: str) -> Steps[None]:
    """`release`, to its end."""
    rule = partial(release, seat=seat, ref=ref, copy=copy)
    return settle("release", (*seat.own, *releasing_ranges(seat, ref, copy)), rule)


def releasing_ranges(seat: Seat, ref: VersionRef, copy: str) -> Ranges:
    """All that `release` is decided from."""
    keys = seat.keys
    return (
        one(seat.group),
        one(seat.copy_holding(ref, copy)),
        *keeping_ranges(keys, ref, seat.datacenter),
        keys.readers_of(ref.run, ref.version, copy),
        keys.readers_of_any(ref.run, ref.version, seat.inst),
    )
