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
    """Keeps the last copy of a version that somebody retains, or reads from afar.

    Args:
        retain: The versions that this replica asks everybody to keep.
    """

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
        keep = keeping(view, seat.keys, ref, GivenUp(seat.inst, seat.datacenter))
        is_own = call.by == seat.rank
        if is_own and not call.copy and (with_copy := _copy_first(view, seat, call, ref, keep)):
            return recorded(view, seat, with_copy)
        if call.copy and view.get(seat.copy_holding(ref, call.copy)) is None:
            return Done(call)
        may_lose = _may_lose(seat, call)
        if is_own and keep.is_needed and not may_lose:
            reason = f"the copy of version {ref.version} in host memory is suspected, or draining"
            return Wait(reason, (*seat.own, *keeping_ranges(seat.keys, ref, seat.datacenter)))
        return replace(keep, guards=()) if may_lose and not keep.is_elsewhere else keep

    def why_nobody_else(self, view: View, seat: Seat) -> str:
        return "another copy is there" if _has_copy(view, seat) else "no copy could be made"

    def beside(self, who: Applicant) -> tuple[Op, ...]:
        here = [str(wish.spec) for wish in map(Wish.parse, self.retain) if wish.is_here]
        own = who.keys.retain(who.datacenter, who.replica)
        return (Put(own, RetainRecord(here).encode(), who.lease_id),) if here else ()


def _copy_first(view: View, seat: Seat, call: Call, ref: VersionRef, keep: Keeping) -> Call | None:
    """The call with a copy to be made: for those who retain it, or who read it from afar."""
    if _may_lose(seat, call):
        return None
    with_copy = msgspec.structs.replace(call, copy=k.copy_of(seat.inst, call.number))
    if keep.is_needed:
        return msgspec.structs.replace(with_copy, is_optional=False)
    if keep.is_elsewhere:
        return None
    readers = seat.keys.readers_of_any(ref.run, ref.version, seat.inst)
    is_wanted = near_and_far(view, readers)[1] or _is_filled_afar(view, seat, ref)
    if not is_wanted or call.is_optional or _has_copy(view, seat):
        return None
    return msgspec.structs.replace(with_copy, is_optional=True)


def do_without(view: View, seat: Seat, number: int) -> Step[bool]:
    """This rank cannot make its part of a copy; True: it is needed, so the version may be lost.

    A trainer that raised instead would stop at each step, for as long as memory is short.
    """
    own_group(view, seat)
    call = find(view, seat, number)
    if call is None or call.outcome is not None or not call.copy:
        return Done(value=False)
    is_needed = not call.is_optional
    without = msgspec.structs.replace(call, copy="", is_forgone=is_needed)
    return Act(group_txn(view, seat, without), lambda _: is_needed)


def _may_lose(seat: Seat, call: Call) -> bool:
    """Whether the version goes although it is retained, and nobody else has it."""
    return seat.spot or call.is_forgone


def _has_copy(view: View, seat: Seat) -> bool:
    """Whether this incarnation has put a copy aside before, which is still read or retained."""
    found = keyed(view.within(seat.keys.shards_of_copies(seat.replica)), k.parse_shard)
    return any(k.is_of(inst, seat.inst) and not k.lingers(inst) for _, inst, _ in found)


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """One rank's part of a copy in host memory.

    Attributes:
        copy: The instance that offers it.
        call: The number of the call that it was made in.
        at_ms: Now.
    """

    copy: str
    call: int
    shard: ShardRecord
    at_ms: int = 0


def copied(view: View, seat: Seat, kept: Kept, part: CopiedPart) -> Step[bool]:
    """This rank's part of the copy is there; True: all of it is offered. False: it is of no use."""
    copy, call = part.copy, part.call
    anchor = own_group(view, seat).lease_id
    keys, ref = seat.keys, kept.ref
    key, version = seat.copy_holding(ref, copy), keys.version(ref.run, ref.version)
    if view.get(key):
        return Done(value=True)
    own, parts = keys.shard(copy, seat.rank), keyed(view.within(keys.shards(copy)), k.parse_rank)
    missing = seat.world_size - sum(rank < seat.world_size for _, rank, _ in parts)
    if _is_of_no_use(view, seat, ref, copy, call, is_whole=not missing):
        # As long as a part is shown, no other copy is made.
        gone = Txn((view.unchanged(seat.decisions),), (Delete(one(own)),))
        return Act(gone, lambda _: False) if view.get(own) else Done(value=False)
    if view.get(own) is None:
        put = Put(own, part.shard.encode(), seat.lease_id)
        return Act(Txn((view.unchanged(seat.group), view.unchanged(own)), (put,)), None)
    if missing:
        reason = f"{missing} of {seat.world_size} ranks have not copied version {ref.version}"
        return Wait(reason, (*seat.own, keys.shards(copy), *releasing_ranges(seat, ref, copy)))
    holding = Holding(ref.uid, call, "full", seat.world_size, seat.datacenter, at_ms=part.at_ms)
    # The version's record even if it is unchanged: it wakes who waits for the version.
    # The decisions too: who takes this incarnation's holdings away must have seen this one.
    ops: list[Op] = [
        Put(key, holding.encode(), anchor),
        Put(version, kept.record(VersionRecord.at(view, version), seat.replica).encode()),
        Put(seat.decisions, decisions_at(view, seat.decisions).encode(), anchor),
    ]
    run = keys.run(ref.run)
    if view.get(run) is None:
        ops.append(Put(run, RunRecord(seat.inst, ref.run_number).encode()))
    guards = map(view.unchanged, (seat.group, seat.decisions, key, version, run))
    return Act(Txn(tuple(guards), tuple(ops)), lambda _: True)


def _is_of_no_use(
    view: View, seat: Seat, ref: VersionRef, copy: str, number: int, *, is_whole: bool
) -> bool:
    """Whether nothing will come of the parts of a copy that is not offered."""
    record = VersionRecord.at(view, seat.keys.version(ref.run, ref.version))
    if (record is not None and record.uid != ref.uid) or is_passed(view, seat.keys, ref):
        return True
    call = find(view, seat, number)
    if call is None:
        return False
    is_over = call.outcome is not None
    is_taken_back = (call.is_optional or call.is_forgone) and not call.copy
    if (is_over and call.copy == copy) or is_taken_back:
        return True
    # Peers may have let go of their parts before seats were lost.
    return is_over and not is_whole and not _keeping_copy(view, seat, ref, copy).is_needed


def copying(seat: Seat, kept: Kept, part: CopiedPart) -> Steps[bool]:
    """`copied`, to its end."""
    rule, copy = partial(copied, seat=seat, kept=kept, part=part), part.copy
    ranges = (*seat.own, *releasing_ranges(seat, kept.ref, copy), seat.keys.shards(copy))
    return settle("copy", ranges, rule)


def release(view: View, seat: Seat, ref: VersionRef, copy: str) -> Step[None]:
    """Give a copy up that is not needed any more (I4), nor read from afar. Every rank runs this.

    It returns when the copy is not offered and nobody reads it.
    """
    own_group(view, seat)
    keys = seat.keys
    key = seat.copy_holding(ref, copy)
    entry = view.get(key)
    if entry is None:
        return Done(None)
    holding, keep = Holding.decode(entry.value, key), _keeping_copy(view, seat, ref, copy)
    wait = Wait("", releasing_ranges(seat, ref, copy))
    if keep.is_needed and holding.state == "full":
        return wait
    state: Literal["full", "draining"] = "full" if keep.is_needed else "draining"
    if holding.state != state:
        put = Put(key, msgspec.structs.replace(holding, state=state).encode(), entry.lease_id)
        woken = wake(view, keys.version(ref.run, ref.version)) if state == "full" else ()
        return Act(Txn((view.unchanged(key), *keep.guards), (put, *woken)), None)
    gone = (Delete(one(key)), Delete(keys.shards(copy)))
    guards, readers = (
        (view.unchanged(key), *keep.guards),
        keys.readers_of(ref.run, ref.version, copy),
    )
    if not any(near_and_far(view, readers)):
        return Act(Txn((*guards, nobody(view, readers)), gone), lambda _: None)
    return WaitAtMost(wait, seat.drain_s, Act(Txn(guards, gone), lambda _: None))


def _keeping_copy(view: View, seat: Seat, ref: VersionRef, copy: str) -> Keeping:
    """Whether it is retained, or somebody reads from afar, and what makes that true."""
    keys = seat.keys
    keep = keeping(view, keys, ref, GivenUp(copy, seat.datacenter))
    of_copy = keys.readers_of(ref.run, ref.version, copy)
    of_tensors = keys.readers_of_any(ref.run, ref.version, seat.inst)
    is_read = any(near_and_far(view, readers)[1] for readers in (of_copy, of_tensors))
    is_read = is_read or (not keep.is_elsewhere and _is_filled_afar(view, seat, ref))
    return replace(keep, is_needed=keep.is_needed or is_read)


def _is_filled_afar(view: View, seat: Seat, ref: VersionRef) -> bool:
    """Whether somebody in another datacenter reads the version; also one who looks for a source."""
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
    keys = seat.keys
    return (
        one(seat.group),
        one(seat.copy_holding(ref, copy)),
        *keeping_ranges(keys, ref, seat.datacenter),
        keys.readers_of(ref.run, ref.version, copy),
        keys.readers_of_any(ref.run, ref.version, seat.inst),
    )
