"""Membership in a replica's group, from joining to the end. Pure, like `calls`."""

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from torch_ros.errors import CallAborted, Fenced, SeatLost, UsageError, VersionConflict
from torch_ros.protocol import keys as k
from torch_ros.protocol import schema
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import (
    Call,
    Decisions,
    Failure,
    GroupRecord,
    Holding,
    Kept,
    Outcome,
    SeenRecord,
    ShardRecord,
    VersionRecord,
    VersionRef,
    answers_of,
)
from torch_ros.protocol.runs import choose_run, restored_run
from torch_ros.protocol.seat import CALLS_KEPT, CLOSED, Seat, claims_of, decisions_at, own_group
from torch_ros.protocol.versions import is_passed, run_numbers, spec_ranges
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.txn import (
    Delete,
    Empty,
    Entry,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Ranges,
    Txn,
    View,
    one,
    sample,
)


class GroupMade(Enum):
    """Whether a group's record is made under the nonce that a rank has for it."""

    YES = "by this rank, or by a peer that was faster"
    REPLACES = "by this rank, in the place of a living incarnation"
    NO = "peers have had seats under this nonce, which is not used again"


def seat_of(
    who: Applicant, group: GroupRecord, run_number: int, shards: Mapping[int, ShardRecord]
) -> Seat:
    """The seat of this rank among peers that have theirs, with what those bring along."""
    return Seat(
        keys=who.keys,
        replica=who.replica,
        nonce=group.nonce,
        rank=who.rank,
        world_size=who.world_size,
        run=group.run,
        run_number=run_number,
        # It does not come again to what peers did not wait for.
        unwaited=tuple((r, s.ready, s.answer) for r, s in shards.items() if s.ready is not None),
        lease_id=who.lease_id,
        # As the record says, or a rank that was started with another answer would differ.
        datacenter=group.datacenter,
        spot=group.spot,
        drain_s=who.drain_s,
        prefers=who.prefers,
        leaves=who.leaves,
        keeper=who.keeper,
        knows=tuple((rank, frozenset(shard.knows)) for rank, shard in shards.items()),
    )


def open_ranges(who: Applicant) -> Ranges:
    keys = who.keys
    own = (*find_ranges(who), keys.decisions_of(who.replica))
    seats = keys.shards(k.instance(who.replica, who.nonce))
    return (*own, seats, *spec_ranges(keys), sample(keys.groups()), keys.archives())


def find_ranges(who: Applicant) -> tuple[Range, ...]:
    return (one(who.group), one(who.keys.schema()))


def find_group(view: View, who: Applicant) -> Step[str]:
    """The nonce of the group that waits for this rank; "": there is none.

    Raises:
        SeatLost: It comes back, and another start of the replica has taken its name.
        BackendError: Another release has written the model's records.
    """
    schema.require_own(view, who.keys)
    group = GroupRecord.at(view, who.group)
    if group and who.left_behind:
        require_own(group, who)
    return Done(group.nonce if group and _is_open_to(group, who) else "")


def require_own(group: GroupRecord, who: Applicant) -> None:
    is_own = k.family(group.nonce) == k.family(who.left_behind)
    if is_own and group.left is not None:
        raise Fenced(who.replica, f"rank {group.left} {CLOSED}", is_orderly=True)
    if is_own and group.refusal is not None:
        raise group.refusal.error()
    if not is_own and group.left is None:
        raise Fenced(who.replica, f"another start has taken its name ({group.nonce})")


def _is_open_to(group: GroupRecord, who: Applicant) -> bool:
    if group.is_complete or group.left is not None:
        return False
    if who.left_behind:
        return k.family(group.nonce) == k.family(who.left_behind) and group.nonce != who.left_behind
    if who.is_shared or group.is_shared:
        return who.is_shared and k.family(group.nonce) == who.nonce
    return "." not in group.nonce and not _is_called_off(group)


def _is_called_off(group: GroupRecord) -> bool:
    """Whether it says so only to peers that wait: a newcomer may be of the next start."""
    return group.refusal is not None and group.refusal.kind == CallAborted.__name__


def create_group(view: View, who: Applicant) -> Step[GroupMade]:
    """Make this replica's group record, and its run; the records of an incarnation before it go."""
    old = GroupRecord.at(view, who.group)
    if old and who.left_behind:
        require_own(old, who)
    if old and (_is_open_to(old, who) or _is_of_peers(old, who)):
        return Done(GroupMade.YES)
    seats = who.keys.shards(k.instance(who.replica, who.nonce))
    if any(view.within(seats)):
        return Done(GroupMade.NO)
    run, run_ops, run_guards = _run_of(view, who)
    group = GroupRecord(
        who.nonce,
        who.world_size,
        run,
        is_shared=who.is_shared,
        spot=who.spot,
        datacenter=who.datacenter,
        retain=list(who.keeper.retain),
    )
    numbered, is_new = schema.put_own(view, who.keys)
    ops: list[Op] = [Put(who.group, group.encode(), who.lease_id), *run_ops, *numbered]
    ops += map(Delete, who.keys.seen_beside(who.replica))
    ops += who.keeper.beside(who)
    guards = (view.unchanged(who.group), Empty(seats), *is_new, *run_guards)
    if old:
        inst = k.instance(who.replica, old.nonce)
        decisions = who.keys.decisions(inst)
        # What is decided meanwhile may bring a holding that would be left over.
        guards = (*guards, view.unchanged(decisions))
        ops += [Delete(one(decisions)), *records_of(view, who.keys, inst)]
    is_living = old is not None and old.left is None and old.refusal is None
    made = GroupMade.REPLACES if is_living and not who.left_behind else GroupMade.YES
    return Act(Txn(guards, tuple(ops)), lambda _: made)


def _run_of(view: View, who: Applicant) -> tuple[str, list[Op], tuple[Guard, ...]]:
    """The run that the group had before the store was wiped, or else the one to publish in."""
    if not who.run_number:
        return choose_run(view, who)
    assert who.run is not None
    return who.run, *restored_run(view, who, who.run, who.run_number)


def _is_of_peers(group: GroupRecord, who: Applicant) -> bool:
    """Whether peers made it under the nonce that they share with this rank, which starts."""
    return who.is_shared and not who.left_behind and k.family(group.nonce) == who.nonce


def processes(view: View) -> Step[list[str]]:
    there = readable(view.entries.items(), k.parse_rank, ShardRecord)
    return Done([f"{shard.host}:{shard.pid}" for _, _, shard, _ in there])


def join(view: View, who: Applicant, nonce: str) -> Step[Seat | None]:
    """This rank's seat in group `nonce`, once all ranks have theirs. None: it is gone, look again.

    Its first step is to sit down, by its Shard record; the last who does completes the group.
    """
    group = GroupRecord.at(view, who.group)
    if group is None or group.nonce != nonce:
        return Done(None)
    if group.refusal is not None:
        raise group.refusal.error()
    inst = k.instance(who.replica, nonce)
    own = who.keys.shard(inst, who.rank)
    taken = view.get(own)
    is_seated = taken is not None and taken.lease_id == who.lease_id
    if group.left is not None:
        return _look_again(group, who, was_there=is_seated)
    if group.world_size != who.world_size:
        return _refuse(view, who, group)
    if taken is not None and not is_seated:
        holder = ShardRecord.decode(taken.value, own)
        reason = f"rank {who.rank} of replica {who.replica!r} is {holder.host}:{holder.pid}"
        return Wait(reason, (one(own), one(who.group)))
    if taken is None and group.is_complete:
        return Done(None)  # the seat of a rank that died, in a group that has made calls
    if taken is None:
        return _sit_down(view, who, inst)
    shards = _shards(view, who, inst)
    number = run_numbers(view, who.keys).get(group.run) or max(1, who.run_number)
    seat = seat_of(who, group, number, shards)
    if group.is_complete:
        return Done(seat)
    if len(shards) < who.world_size:
        reason = f"replica {who.replica!r} has ranks {list(shards)} of {who.world_size}"
        # A stranger among those that come back has to notice by itself: see `_completed`.
        may_be_strange = "." in group.nonce and not who.shard.is_back
        seats = (who.keys.shards(inst),) if may_be_strange else ()
        return Wait(reason, (one(who.group), *seats))
    return _completed(view, who, group, shards, seat)


def _look_again(group: GroupRecord, who: Applicant, *, was_there: bool) -> Step[None]:
    """For another group, since this one was left; unless this rank was one of it when it was."""
    if who.left_behind:
        require_own(group, who)
    if was_there:
        raise Fenced(who.replica, f"rank {group.left} {CLOSED}", is_orderly=True)
    return Done(None)


def _shards(view: View, who: Applicant, inst: str) -> dict[int, ShardRecord]:
    there = keyed(view.within(who.keys.shards(inst)), k.parse_rank)
    return {
        rank: ShardRecord.decode(entry.value, key)
        for key, rank, entry in there
        if rank < who.world_size
    }


def _completed(
    view: View, who: Applicant, group: GroupRecord, shards: Mapping[int, ShardRecord], seat: Seat
) -> Step[Seat | None]:
    """All ranks are there: say so, with what they bring along."""
    records = [shards[rank] for rank in sorted(shards)]
    if strange := _strange(records):
        reason = (
            f"replica {who.replica!r}: ranks {strange} were started again, alone, among peers that "
            "have made calls and hold what they brought; start all ranks of the replica again"
        )
        if not who.shard.is_back:
            raise UsageError(reason)
        return Wait(reason, (one(who.group), who.keys.shards(seat.inst)))
    entry = view.entries[who.group]
    complete = msgspec.structs.replace(group, is_complete=True)
    ops, guards = _adopt(view, who, group, entry, records)
    put = Put(who.group, complete.encode(), entry.lease_id)
    for feature, value in adopted_values(records).items():
        key = who.keys.carried_at(seat.inst, feature)
        ops.append(Put(key, bytes(value), entry.lease_id))
    return Act(Txn((view.unchanged(who.group), *guards), (put, *ops)), lambda _: seat)


def _sit_down(view: View, who: Applicant, inst: str) -> Act[Seat | None]:
    own = who.keys.shard(inst, who.rank)
    process = who.seen or SeenRecord(who.shard.host, who.shard.pid)
    seen = msgspec.structs.replace(process, at_ms=who.at_ms)
    puts = (
        Put(own, who.shard.encode(), who.lease_id),
        Put(who.keys.seen_at(who.replica, who.rank), seen.encode()),
    )
    return Act(Txn((view.unchanged(who.group), view.unchanged(own)), puts), None)


def adopted(shards: Sequence[ShardRecord]) -> tuple[list[Call], Kept | None]:
    """The knowledge of a group whose ranks come back: the calls that ended, and what it holds.

    docs/PROTOCOL.md#coming-back says why these ends and this holding are right.
    """
    calls = _ends_of(shards)
    ended = [calls[n] for n in sorted(calls)][-CALLS_KEPT:]
    last = max((n for n, call in calls.items() if _changed_holding(call)), default=0)
    knowing = [
        shard
        for shard in shards
        if any(call.number == last and call.has_ended_well for call in shard.ended)
    ]
    kept = (knowing or shards)[0].kept
    if kept is None:
        return ended, None
    agree = all(
        kept.is_as(shard.kept) or (shard not in knowing and _waits_for_end_of(shard, kept))
        for shard in shards
    )
    return ended, kept if agree else None


def _ends_of(shards: Sequence[ShardRecord]) -> dict[int, Call]:
    """The calls that ended, by number: as one that was told a good end of it knows it, if any."""
    calls: dict[int, Call] = {}
    for call in (call for shard in shards for call in shard.ended):
        if call.number not in calls or not calls[call.number].has_ended_well:
            calls[call.number] = call
    return calls


def _waits_for_end_of(shard: ShardRecord, kept: Kept) -> bool:
    """Whether this rank was in the call that brought `kept`, and was not told its good end."""
    is_of_it = shard.ready is None or shard.ready.ref == kept.ref
    return shard.pending == kept.call and is_of_it


def adopted_values(shards: Sequence[ShardRecord]) -> dict[str, msgspec.Raw]:
    """The values that count of what a group's ranks carry, by feature."""
    carried = [one for shard in reversed(shards) for one in shard.carries.items()]
    by_order = sorted(carried, key=lambda one: one[1].order)
    return {feature: one.value for feature, one in by_order}


def _changed_holding(call: Call) -> bool:
    return call.kind in ("publish", "replicate", "unpublish") and call.has_ended_well


def not_waited_for(shards: Sequence[ShardRecord]) -> Call | None:
    """A publication that nobody waited for, as it ends now: all ranks still hold what it offers."""
    ends = [shard.ready for shard in shards if shard.ready is not None]
    calls = {call.number: call for shard in shards for call in shard.ended}
    are_same = len({(end.number, end.asked, end.ref) for end in ends}) == 1
    if len(ends) < len(shards) or not are_same or ends[0].number in calls:
        return None
    is_over = any(n > ends[0].number and _changed_holding(call) for n, call in calls.items())
    answers = answers_of({rank: shard.answer for rank, shard in enumerate(shards)})
    known = (end for end in ends if end.outcome is not None and end.outcome.answers == answers)
    return None if is_over else next(known, None)  # else nobody knows that they have all of it (I9)


def _strange(shards: Sequence[ShardRecord]) -> list[int]:
    """Ranks that cannot have taken part in the calls that their peers bring along."""
    needed_all = ("agree", "publish", "replicate")
    has_carried = any(one.number for shard in shards for one in shard.carries.values())
    have_called = (call.kind in needed_all and call.has_ended_well for call in adopted(shards)[0])
    if not has_carried and not any(have_called):
        return []
    return [rank for rank, shard in enumerate(shards) if not shard.is_back]


def _adopt(
    view: View, who: Applicant, group: GroupRecord, entry: Entry, shards: Sequence[ShardRecord]
) -> tuple[list[Op], tuple[Guard, ...]]:
    """Write what the group brings along: its calls, and the version that it holds."""
    calls, kept = adopted(shards)
    inst = k.instance(who.replica, group.nonce)
    ops: list[Op] = []
    guards: tuple[Guard, ...] = ()
    if (ready := not_waited_for(shards)) is not None:
        ready, published, guards = _published_late(view, who, ready)
        calls, kept = [*calls, ready][-CALLS_KEPT:], published or kept
    if calls:
        are_all = len(calls) < CALLS_KEPT
        known = Decisions(tuple(calls), forgotten_below=0 if are_all else calls[0].number)
        ops.append(Put(who.keys.decisions(inst), known.encode(), entry.lease_id))
    if kept is None or _is_superseded(view, who.keys, kept.ref):
        return ops, guards
    ref, version = kept.ref, who.keys.version(kept.ref.run, kept.ref.version)
    if ref.run == k.OUTSIDE:
        guards = (*guards, NoneNewer(who.keys.versions(ref.run), view.rev))
    run_ops, run_guards = restored_run(view, who, ref.run, ref.run_number)
    # Even if it is unchanged: it wakes who waits for the version.
    record = kept.record(VersionRecord.at(view, version), who.replica)
    held = who.keys.holding(ref.run, ref.version, group.datacenter, inst)
    ops += (
        *run_ops,
        Put(version, record.encode()),
        Put(held, _brought(who, group, kept).encode(), entry.lease_id),
    )
    return ops, (*guards, view.unchanged(version), *run_guards)


def _published_late(
    view: View, who: Applicant, ready: Call
) -> tuple[Call, Kept | None, tuple[Guard, ...]]:
    """A publication that was not waited for, as it ends now; and what the group holds by it."""
    ref, outcome = ready.ref, ready.outcome
    assert ref is not None
    assert outcome is not None
    guards = (NoneNewer(who.keys.versions_above(ref.run, ref.version), view.rev),)
    why = _conflict(view, who, ref, outcome.said)
    if not why:
        return ready, Kept.of(ready, outcome.said), guards
    error = VersionConflict(who.keys.model, ref.version, ref.run, why)
    failure = Failure.of(error, replica=who.replica, call=ready.number, rank=who.rank)
    return msgspec.structs.replace(ready, outcome=Outcome(failure)), None, guards


def _is_superseded(view: View, keys: Keys, ref: VersionRef) -> bool:
    """Whether its number stands for another version by now, which stays as it is."""
    record = VersionRecord.at(view, keys.version(ref.run, ref.version))
    return (record is not None and record.uid != ref.uid) or is_passed(view, keys, ref)


def _brought(who: Applicant, group: GroupRecord, kept: Kept) -> Holding:
    return Holding(
        kept.ref.uid,
        kept.call,
        "full",
        group.world_size,
        group.datacenter,
        is_original=kept.is_original,
        spot=group.spot,
        at_ms=who.at_ms,
    )


def _conflict(view: View, who: Applicant, ref: VersionRef, layout: str) -> str:
    """Why a version that was published without the store cannot be offered; "": it can."""
    keys = who.keys
    above = view.within(keys.versions_above(ref.run, ref.version))
    found = readable(above, k.parse_version, VersionRecord)
    newer = [number for _, (_, number), record, _ in found if record.layout]
    if newer:
        return f"it is already at {max(newer)}"
    key = keys.version(ref.run, ref.version)
    record = VersionRecord.at(view, key)
    is_same = record is None or (record.uid == ref.uid and record.layout in ("", layout))
    return "" if is_same else "another replica has published it meanwhile"


def _refuse(view: View, who: Applicant, group: GroupRecord) -> Act[Seat | None]:
    """The ranks disagree about their number: nobody shall wait for a group that cannot be."""
    error = UsageError(
        f"replica {who.replica!r}: rank {who.rank} was opened with world_size={who.world_size}, "
        f"its peers with world_size={group.world_size}; all ranks must be given the same"
    )
    if group.is_complete:
        raise error
    failure = Failure.of(error, replica=who.replica, call=0, rank=who.rank)
    refused = msgspec.structs.replace(group, refusal=failure)
    put = Put(who.group, refused.encode(), view.entries[who.group].lease_id)

    def fail(_: object) -> Seat | None:
        raise error

    return Act(Txn((view.unchanged(who.group),), (put,)), fail)


def call_off_ranges(who: Applicant) -> tuple[Range, ...]:
    keys = who.keys
    places = (keys.shards_of(who.replica), keys.decisions_of(who.replica))
    return (one(who.group), *places, keys.holdings())


def call_off(view: View, who: Applicant, failure: Failure, note_lease_id: int) -> Step[None]:
    """This rank ends by an error of its own before it has its seat: let no peer wait for it.

    Args:
        who: With the nonce of the group that it has joined, or was about to make. Its place there
            may be another process's: then nobody waits for this one.
    """
    group = GroupRecord.at(view, who.group)
    if group is None or group.refusal is not None or group.left is not None or who.left_behind:
        return Done(None)
    own = who.keys.shard(k.instance(who.replica, group.nonce), who.rank)
    taken = view.get(own)
    if taken is not None and taken.lease_id != who.lease_id:
        return Done(None)
    if group.is_complete and taken is not None:  # peers have returned
        return leave(view, seat_of(who, group, 0, {}), note_lease_id)
    if group.is_complete or (group.nonce != who.nonce and not _is_open_to(group, who)):
        return Done(None)
    refused = msgspec.structs.replace(group, refusal=failure)
    put = Put(who.group, refused.encode(), note_lease_id)
    seen = Delete(who.keys.seen_of(who.replica))
    guards = (view.unchanged(who.group), view.unchanged(own))
    return Act(Txn(guards, (put, seen)), lambda _: None)


def watch_over(view: View, seat: Seat) -> Step[SeatLost | None]:
    """Why this incarnation is no more; None: the next rank is gone, and `expel` is called for."""
    try:
        own_group(view, seat)
    except SeatLost as fenced:
        return Done(fenced)
    key = follower(seat)
    return Wait("", (one(seat.group), one(key))) if view.get(key) else Done(None)


def follower(seat: Seat) -> str:
    return seat.keys.shard(seat.inst, (seat.rank + 1) % seat.world_size)


def expel(view: View, seat: Seat) -> Step[SeatLost]:
    """Take a replica with a dead process out of the store, for everyone and at once (I7)."""
    try:
        own_group(view, seat)
    except SeatLost as lost:
        return Done(lost)
    reason = f"rank {(seat.rank + 1) % seat.world_size} died, or lost its lease"
    fenced = SeatLost(seat.replica, reason)
    records = (*map(Delete, seat.own), *records_of(view, seat.keys, seat.inst))
    # A call that is decided meanwhile may bring another holding.
    guards = (view.unchanged(seat.group), view.unchanged(seat.decisions))
    return Act(Txn(guards, records), lambda _: fenced)


def leave_ranges(seat: Seat) -> tuple[Range, ...]:
    return (one(seat.group), seat.keys.decisions_of(seat.replica), seat.keys.holdings())


def leave(view: View, seat: Seat, note_lease_id: int) -> Step[None]:
    """This rank closes its handle, so the replica ends; say so, or it looks like a crash."""
    found = GroupRecord.at(view, seat.group)
    group = found or GroupRecord(seat.nonce, seat.world_size, seat.run)
    if k.family(group.nonce) != k.family(seat.nonce) or group.left is not None:
        return Done(None)
    # Perhaps another one than this rank knows: it may close while it takes its seat again.
    inst = k.instance(seat.replica, group.nonce)
    left = msgspec.structs.replace(group, left=seat.rank)
    # The decisions stay, for peers that wait for an outcome.
    txn = Txn(
        (view.unchanged(seat.group), view.unchanged(seat.keys.decisions(inst))),
        (
            Put(seat.group, left.encode(), note_lease_id),
            Delete(seat.keys.seen_of(seat.replica)),
            *records_of(view, seat.keys, inst),
        ),
    )
    return Act(txn, lambda _: None)


def leave_alone(seat: Seat) -> Txn:
    """As `leave`, of a replica of one rank: the end of its lease does the rest."""
    return Txn(ops=(Delete(seat.keys.seen_of(seat.replica)),))


def records_of(view: View, keys: Keys, inst: str) -> list[Delete]:
    """Deletes the holdings of an incarnation and its copies, its open claims, and what it carries.

    They hang on the anchor, whose rank may live on, and come back under the same lease.
    """
    held = keyed(view.within(keys.holdings()), k.parse_holding)
    holdings = [key for key, where, _ in held if k.is_of(where.inst, inst)]
    is_open = (
        call for call in decisions_at(view, keys.decisions(inst)).calls if call.outcome is None
    )
    claims = (claim for call in is_open for claim in claims_of(keys, call, inst))
    return [*map(Delete, map(one, (*holdings, *claims))), Delete(keys.carried_by(inst))]
