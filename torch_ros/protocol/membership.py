"""Membership in a replica's group, from joining to the end. Pure, like `calls`."""

from collections.abc import Iterable, Mapping, Sequence
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
    """The seat of this rank in a group, once its peers' shards show what they bring along."""
    ends = _ends_of(shards.values())
    last = _last_change(ends)
    return Seat(
        keys=who.keys,
        replica=who.replica,
        nonce=group.nonce,
        rank=who.rank,
        world_size=who.world_size,
        run=group.run,
        run_number=run_number,
        # These ranks have shown a publication without etcd: they do not come to that call again.
        unwaited=tuple((r, s.ready, s.answer) for r, s in shards.items() if s.ready is not None),
        unpublished_by=last if last and ends[last].kind == "unpublish" else 0,
        lease_id=who.lease_id,
        # By the group's record, or a rank that was started with other options would differ.
        datacenter=group.datacenter,
        spot=group.spot,
        drain_s=who.drain_s,
        prefers=who.prefers,
        leaves=who.leaves,
        keeper=who.keeper,
        knows=tuple((rank, frozenset(shard.knows)) for rank, shard in shards.items()),
    )


def find_ranges(who: Applicant) -> tuple[Range, ...]:
    """All that `find_group` is decided from."""
    return (one(who.group), one(who.keys.schema()))


def find_group(view: View, who: Applicant) -> Step[str]:
    """The nonce of the group that waits for this rank; "": there is none, and it creates one.

    Raises:
        SeatLost: This rank comes back, and its replica has ended.
        BackendError: Another release has written the model's records.
    """
    schema.require_own(view, who.keys)
    group = GroupRecord.at(view, who.group)
    _require_may_come_back(group, who)
    return Done(group.nonce if group and _is_open_to(group, who) else "")


def _require_may_come_back(group: GroupRecord | None, who: Applicant) -> None:
    """Raise if this rank comes back, but its replica was closed, or another start has the name now.

    It would wait for peers that have closed, or replace that start.
    """
    if group is None or not who.left_behind:
        return
    is_own = k.family(group.nonce) == k.family(who.left_behind)
    if is_own and group.left is not None:
        raise Fenced(who.replica, f"rank {group.left} {CLOSED}", is_orderly=True)
    if is_own and group.refusal is not None:
        raise group.refusal.error()
    if not is_own and group.left is None:
        raise Fenced(who.replica, f"another start has taken its name ({group.nonce})")


def _is_open_to(group: GroupRecord, who: Applicant) -> bool:
    """Whether the group still waits for ranks, and for such as this one, as its nonce tells.

    It is "family.digits" where ranks come back: a newcomer lacks what these remember. Else it was
    given to all ranks of one start (`is_shared`); or it is random, for any that know the name.
    """
    if group.is_complete or group.left is not None:
        return False
    if who.left_behind:
        is_own = k.family(group.nonce) == k.family(who.left_behind)
        return is_own and group.nonce != who.left_behind  # not the one that it lost its seat in
    if who.is_shared or group.is_shared:
        return who.is_shared and k.family(group.nonce) == who.nonce
    return "." not in group.nonce and not _is_called_off(group)


def _is_called_off(group: GroupRecord) -> bool:
    """Whether a rank was interrupted before all had come: a newcomer, which may be of the next
    start, makes a group anew. Any other refusal, as of a world size, it shall meet and raise, too.
    """
    return group.refusal is not None and group.refusal.kind == CallAborted.__name__


def open_ranges(who: Applicant) -> Ranges:
    """All that `create_group` is decided from, the choice of a run included."""
    keys = who.keys
    seats = keys.shards(k.instance(who.replica, who.nonce))
    own = (*find_ranges(who), keys.decisions_of(who.replica), seats)
    return (*own, *spec_ranges(keys), sample(keys.groups()), keys.archives())


def create_group(view: View, who: Applicant) -> Step[GroupMade]:
    """Put this replica's group record, and its run's; the records of an incarnation before it go.

    A nonce under which anybody has sat is not used again (`GroupMade.NO`): late requests of that
    incarnation would be taken for this one's. A group that waits for this rank stays as it is.
    """
    old = GroupRecord.at(view, who.group)
    _require_may_come_back(old, who)
    # A group under the nonce that all ranks of this start were given is no predecessor, even if it
    # is complete, or was left: `join` says so.
    is_given = who.is_shared and not who.left_behind
    is_of_peers = old is not None and is_given and k.family(old.nonce) == who.nonce
    if old and (is_of_peers or _is_open_to(old, who)):
        return Done(GroupMade.YES)
    seats = who.keys.shards(k.instance(who.replica, who.nonce))
    if any(view.within(seats)):
        return Done(GroupMade.NO)
    run, run_ops, run_guards = choose_run(view, who)
    group = GroupRecord(
        who.nonce,
        who.world_size,
        run,
        is_shared=who.is_shared,
        spot=who.spot,
        datacenter=who.datacenter,
        retain=list(who.keeper.retain),
    )
    schema_ops, schema_guards = schema.put_own(view, who.keys)
    ops: list[Op] = [Put(who.group, group.encode(), who.lease_id), *run_ops, *schema_ops]
    ops += map(Delete, who.keys.seen_beside(who.replica))  # else they grow with each name
    ops += who.keeper.beside(who)
    guards = (view.unchanged(who.group), Empty(seats), *schema_guards, *run_guards)
    if old:
        inst = k.instance(who.replica, old.nonce)
        decisions = who.keys.decisions(inst)
        # A call that is decided meanwhile may bring a holding, which would be left over.
        guards = (*guards, view.unchanged(decisions))
        ops += [Delete(one(decisions)), *to_delete(view, who.keys, inst)]
    # For the log: a rank that comes back only replaces what its own start has left.
    is_living = old is not None and old.left is None and old.refusal is None
    made = GroupMade.REPLACES if is_living and not who.left_behind else GroupMade.YES
    return Act(Txn(guards, tuple(ops)), lambda _: made)


def processes(view: View) -> Step[list[str]]:
    """The hosts and pids of the ranks whose shard records are in view, to name them to people."""
    there = readable(view.entries.items(), k.parse_rank, ShardRecord)
    return Done([f"{shard.host}:{shard.pid}" for _, _, shard, _ in there])


def join(view: View, who: Applicant, nonce: str) -> Step[Seat | None]:
    """This rank's seat in group `nonce`, once all ranks have theirs. None: look for another group.

    It sits down first, by its Shard record. The first row of the table in
    docs/PROTOCOL.md#membership that is true counts.
    """
    group = GroupRecord.at(view, who.group)
    if group is None or group.nonce != nonce:
        return Done(None)
    if group.refusal is not None:
        raise group.refusal.error()
    inst = k.instance(who.replica, nonce)
    own = who.keys.shard(inst, who.rank)
    seated = view.get(own)
    is_own = seated is not None and seated.lease_id == who.lease_id
    if group.left is not None:
        _require_may_come_back(group, who)
        if is_own:  # its peers had their seats, and have closed since
            raise Fenced(who.replica, f"rank {group.left} {CLOSED}", is_orderly=True)
        return Done(None)
    if group.world_size != who.world_size:
        return _refuse(view, who, group)
    if seated is not None and not is_own:
        holder = ShardRecord.decode(seated.value, own)
        reason = f"rank {who.rank} of replica {who.replica!r} is {holder.host}:{holder.pid}"
        return Wait(reason, (one(own), one(who.group)))
    if seated is None and group.is_complete:
        return Done(None)  # the seat of a rank that died, in a group that has made calls
    if seated is None:
        return _sit_down(view, who, own)
    return _await_peers(view, who, group, inst)


def _await_peers(view: View, who: Applicant, group: GroupRecord, inst: str) -> Step[Seat | None]:
    """The seat of a rank with its Shard record, once all peers have theirs; the last completes."""
    there = keyed(view.within(who.keys.shards(inst)), k.parse_rank)
    shards = {
        rank: ShardRecord.decode(entry.value, key)
        for key, rank, entry in there
        if rank < who.world_size
    }
    # A wiped store has no record of the run until those that come back complete the group.
    number = run_numbers(view, who.keys).get(group.run) or max(1, who.run_number)
    seat = seat_of(who, group, number, shards)
    if group.is_complete:
        return Done(seat)
    if len(shards) == who.world_size:
        return _complete(view, who, group, shards, seat)
    reason = f"replica {who.replica!r} has ranks {list(shards)} of {who.world_size}"
    # A newcomer among ranks that come back has to notice by itself that it is strange.
    may_be_strange = "." in group.nonce and not who.shard.is_back
    seats = (who.keys.shards(inst),) if may_be_strange else ()
    return Wait(reason, (one(who.group), *seats))


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


def _sit_down(view: View, who: Applicant, own: str) -> Act[Seat | None]:
    """Put the Shard record, by which peers know this rank, and that in `seen/`, for people."""
    process = who.seen or SeenRecord(who.shard.host, who.shard.pid)
    seen = msgspec.structs.replace(process, at_ms=who.at_ms)
    puts = (
        Put(own, who.shard.encode(), who.lease_id),
        Put(who.keys.seen_at(who.replica, who.rank), seen.encode()),
    )
    return Act(Txn((view.unchanged(who.group), view.unchanged(own)), puts), None)


def _complete(
    view: View, who: Applicant, group: GroupRecord, shards: Mapping[int, ShardRecord], seat: Seat
) -> Step[Seat | None]:
    """All ranks have sat down: say so, and write what those that come back bring along.

    Not beside a strange rank: it would take part in calls without what its peers hold.
    """
    records = [shards[rank] for rank in sorted(shards)]
    if strange := _strange(records):
        reason = (
            f"replica {who.replica!r}: ranks {strange} were started again, alone, among peers that "
            "have made calls and hold what they brought; start all ranks of the replica again"
        )
        if not who.shard.is_back:
            raise UsageError(reason)
        return Wait(reason, (one(who.group), who.keys.shards(seat.inst)))
    anchor = view.entries[who.group].lease_id
    complete = msgspec.structs.replace(group, is_complete=True)
    ops, guards = _adopt(view, who, group, anchor, records)
    put = Put(who.group, complete.encode(), anchor)
    for feature, value in adopted_values(records).items():
        ops.append(Put(who.keys.carried_at(seat.inst, feature), bytes(value), anchor))
    return Act(Txn((view.unchanged(who.group), *guards), (put, *ops)), lambda _: seat)


def _strange(shards: Sequence[ShardRecord]) -> list[int]:
    """The ranks that were started again, alone: they lack what their peers have brought about.

    It shows where peers bring the good end of a call that takes all ranks, or what a feature
    says since such a call. A group that has made none takes anybody.
    """
    takes_all = ("agree", "publish", "replicate")
    has_carried = any(one.number for shard in shards for one in shard.carries.values())
    have_called = (call.kind in takes_all and call.has_ended_well for call in adopted(shards)[0])
    if not has_carried and not any(have_called):
        return []
    return [rank for rank, shard in enumerate(shards) if not shard.is_back]


def adopted(shards: Sequence[ShardRecord]) -> tuple[list[Call], Kept | None]:
    """The calls that have ended, and the version held, by what all ranks know together.

    One rank does not know all: it may have lost its seat before it heard how the last call ended.
    Ranks that know the last call which changed the holding decide what it is. Each other rank must
    have kept the same, or have done its part in that call and missed its end; else None is held, or
    the group would offer parts of two versions.
    """
    ends = _ends_of(shards)
    calls = [ends[number] for number in sorted(ends)][-CALLS_KEPT:]
    last = _last_change(ends)
    knowing = [s for s in shards if any(c.number == last and c.has_ended_well for c in s.ended)]
    kept = (knowing or shards)[0].kept
    if kept is None:
        return calls, None
    agree = all(
        kept.is_as(shard.kept) or (shard not in knowing and _has_not_heard(shard, kept))
        for shard in shards
    )
    return calls, kept if agree else None


def _ends_of(shards: Iterable[ShardRecord]) -> dict[int, Call]:
    """How each call ended, by its number.

    If any rank knows a good end, that counts: one that gave the call up could not hear of it.
    """
    ends: dict[int, Call] = {}
    for call in (call for shard in shards for call in shard.ended):
        if call.number not in ends or not ends[call.number].has_ended_well:
            ends[call.number] = call
    return ends


def _last_change(ends: Mapping[int, Call]) -> int:
    return max((number for number, call in ends.items() if _changes_holding(call)), default=0)


def _changes_holding(call: Call) -> bool:
    """Whether the replica holds another version, or none, since this call."""
    return call.kind in ("publish", "replicate", "unpublish") and call.has_ended_well


def _has_not_heard(shard: ShardRecord, kept: Kept) -> bool:
    """Whether this rank did its part in the call that brought `kept`, and missed only its end.

    A publication of something else that it has shown since without etcd is no such part.
    """
    return shard.pending == kept.call and (shard.ready is None or shard.ready.ref == kept.ref)


def adopted_values(shards: Sequence[ShardRecord]) -> dict[str, msgspec.Raw]:
    """The newest that each feature says of the replica, of all that its ranks carry.

    If several are as new, the weightiest counts, then that of the lowest rank.
    """
    carried = [one for shard in reversed(shards) for one in shard.carries.items()]
    by_order = sorted(carried, key=lambda one: one[1].order)  # the last of each feature stays
    return {feature: one.value for feature, one in by_order}


def not_waited_for(shards: Sequence[ShardRecord]) -> Call | None:
    """The publication that all ranks have shown without etcd, with its end; None: there is none.

    None, too, if a rank knows an end of that call, or of a later one that changed the holding; or
    if no rank had learned that ranks with these answers have every element together (I9).
    """
    shown = [shard.ready for shard in shards if shard.ready is not None]
    are_same = len({(call.number, call.asked, call.ref) for call in shown}) == 1
    if len(shown) < len(shards) or not are_same:
        return None
    number, ends = shown[0].number, _ends_of(shards)
    if number in ends or any(n > number and _changes_holding(call) for n, call in ends.items()):
        return None
    answers = answers_of({rank: shard.answer for rank, shard in enumerate(shards)})
    is_known = (c for c in shown if c.outcome is not None and c.outcome.answers == answers)
    return next(is_known, None)


def _adopt(
    view: View, who: Applicant, group: GroupRecord, anchor: int, shards: Sequence[ShardRecord]
) -> tuple[list[Op], tuple[Guard, ...]]:
    """Write the calls that have ended and the version that is held, as all ranks know together.

    Without that, a rank would make a call again that its peers know has ended.
    """
    calls, kept = adopted(shards)
    ops: list[Op] = []
    guards: tuple[Guard, ...] = ()
    if (shown := not_waited_for(shards)) is not None:
        ended_late, published, guards = _published_late(view, who, shown)
        calls, kept = [*calls, ended_late][-CALLS_KEPT:], published or kept
    if calls:
        are_all = len(calls) < CALLS_KEPT  # else older ones may be left out: nobody makes them anew
        known = Decisions(tuple(calls), forgotten_below=0 if are_all else calls[0].number)
        decisions = who.keys.decisions(k.instance(who.replica, group.nonce))
        ops.append(Put(decisions, known.encode(), anchor))
    if kept is not None and not _is_superseded(view, who.keys, kept.ref):
        held_ops, held_guards = _hold_again(view, who, group, anchor, kept)
        ops, guards = [*ops, *held_ops], (*guards, *held_guards)
    return ops, guards


def _hold_again(
    view: View, who: Applicant, group: GroupRecord, anchor: int, kept: Kept
) -> tuple[list[Op], tuple[Guard, ...]]:
    """Put the holding with its old call, whose mark the ranks still show; its version, its run.

    The version's record is put even if it is unchanged: that wakes who waits for the version.
    """
    ref = kept.ref
    version = who.keys.version(ref.run, ref.version)
    run_ops, run_guards = restored_run(view, who, ref.run, ref.run_number)
    record = kept.record(VersionRecord.at(view, version), who.replica)
    holding = Holding(
        ref.uid,
        kept.call,
        "full",
        group.world_size,
        group.datacenter,
        is_original=kept.is_original,
        spot=group.spot,
        at_ms=who.at_ms,
    )
    inst = k.instance(who.replica, group.nonce)
    held = who.keys.holding(ref.run, ref.version, group.datacenter, inst)
    # The bucket's run has one version: another may replace it until this is written.
    newer = [NoneNewer(who.keys.versions(ref.run), view.rev)] if ref.run == k.OUTSIDE else []
    ops = [*run_ops, Put(version, record.encode()), Put(held, holding.encode(), anchor)]
    return ops, (*newer, view.unchanged(version), *run_guards)


def _is_superseded(view: View, keys: Keys, ref: VersionRef) -> bool:
    """Whether its number, or the bucket's run, has another content by now, which stays as it is."""
    record = VersionRecord.at(view, keys.version(ref.run, ref.version))
    return (record is not None and record.uid != ref.uid) or is_passed(view, keys, ref)


def _published_late(
    view: View, who: Applicant, shown: Call
) -> tuple[Call, Kept | None, tuple[Guard, ...]]:
    """A publication that was shown without etcd, as it ends now; and what the group holds by it.

    It ends with VersionConflict if others have published meanwhile: numbers do not go back.
    """
    ref, outcome = shown.ref, shown.outcome
    assert ref is not None
    assert outcome is not None
    guards = (NoneNewer(who.keys.versions_above(ref.run, ref.version), view.rev),)
    why = _conflict(view, who.keys, ref, outcome.said)
    if not why:
        return shown, Kept.of(shown, outcome.said), guards
    error = VersionConflict(who.keys.model, ref.version, ref.run, why)
    failure = Failure.of(error, replica=who.replica, call=shown.number, rank=who.rank)
    return msgspec.structs.replace(shown, outcome=Outcome(failure)), None, guards


def _conflict(view: View, keys: Keys, ref: VersionRef, layout: str) -> str:
    """Why a version that was published without the store cannot be offered; "": it can."""
    above = view.within(keys.versions_above(ref.run, ref.version))
    found = readable(above, k.parse_version, VersionRecord)
    newer = [number for _, (_, number), record, _ in found if record.layout]
    if newer:
        return f"it is already at {max(newer)}"
    record = VersionRecord.at(view, keys.version(ref.run, ref.version))
    is_same = record is None or (record.uid == ref.uid and record.layout in ("", layout))
    return "" if is_same else "another replica has published it meanwhile"


def call_off_ranges(who: Applicant) -> tuple[Range, ...]:
    """All that `call_off` is decided from."""
    keys = who.keys
    places = (keys.shards_of(who.replica), keys.decisions_of(who.replica))
    return (one(who.group), *places, keys.holdings())


def call_off(view: View, who: Applicant, failure: Failure, note_lease_id: int) -> Step[None]:
    """This rank ends by an error of its own before it has its seat: let no peer wait for it.

    It puts `failure` into the record of the group that it has joined or was about to (by its
    nonce), on `note_lease_id`, a lease of some seconds for peers to read. Where its place is
    another process's, nobody waits for this one.
    """
    group = GroupRecord.at(view, who.group)
    has_ended = group is None or group.refusal is not None or group.left is not None
    if group is None or has_ended or who.left_behind:  # peers of one that comes back have returned
        return Done(None)
    own = who.keys.shard(k.instance(who.replica, group.nonce), who.rank)
    seated = view.get(own)
    if seated is not None and seated.lease_id != who.lease_id:
        return Done(None)
    if group.is_complete and seated is not None:  # peers have returned, and make calls
        return leave(view, seat_of(who, group, 0, {}), note_lease_id)
    if group.is_complete or (group.nonce != who.nonce and not _is_open_to(group, who)):
        return Done(None)
    refused = msgspec.structs.replace(group, refusal=failure)
    put = Put(who.group, refused.encode(), note_lease_id)
    seen = Delete(who.keys.seen_of(who.replica))
    guards = (view.unchanged(who.group), view.unchanged(own))
    return Act(Txn(guards, (put, seen)), lambda _: None)


def follower(seat: Seat) -> str:
    """The shard record of the next rank, which this one watches: so each rank is watched by one."""
    return seat.keys.shard(seat.inst, (seat.rank + 1) % seat.world_size)


def watch_over(view: View, seat: Seat) -> Step[SeatLost | None]:
    """Wait until this incarnation ends; returns why. None: the next rank is gone, now `expel`."""
    try:
        own_group(view, seat)
    except SeatLost as lost:
        return Done(lost)
    key = follower(seat)
    return Wait("", (one(seat.group), one(key))) if view.get(key) else Done(None)


def expel(view: View, seat: Seat) -> Step[SeatLost]:
    """Take a replica with a dead process out of the store, for everyone and at once (I7)."""
    try:
        own_group(view, seat)
    except SeatLost as lost:
        return Done(lost)
    reason = f"rank {(seat.rank + 1) % seat.world_size} died, or lost its lease"
    died = SeatLost(seat.replica, reason)
    ops = (*map(Delete, seat.own), *to_delete(view, seat.keys, seat.inst))
    # A call that is decided meanwhile may bring another holding.
    guards = (view.unchanged(seat.group), view.unchanged(seat.decisions))
    return Act(Txn(guards, ops), lambda _: died)


def leave_ranges(seat: Seat) -> tuple[Range, ...]:
    """All that `leave` is decided from."""
    return (one(seat.group), seat.keys.decisions_of(seat.replica), seat.keys.holdings())


def leave(view: View, seat: Seat, note_lease_id: int) -> Step[None]:
    """This rank closes its handle, so the replica ends; say so, or it looks like a crash.

    The note stands on `note_lease_id`, a lease of some seconds, for peers to read. The incarnation
    that ends is the one in the record: a rank that closes while it takes its seat again knows an
    earlier one. Its decisions stay, for peers that wait for an outcome; `seen/` goes, by which
    people find processes that lost their seats (docs/protocol/leftovers.md).
    """
    group = GroupRecord.at(view, seat.group) or GroupRecord(seat.nonce, seat.world_size, seat.run)
    if k.family(group.nonce) != k.family(seat.nonce) or group.left is not None:
        return Done(None)
    inst = k.instance(seat.replica, group.nonce)
    left = msgspec.structs.replace(group, left=seat.rank)
    guards = (view.unchanged(seat.group), view.unchanged(seat.keys.decisions(inst)))
    put = Put(seat.group, left.encode(), note_lease_id)
    seen = Delete(seat.keys.seen_of(seat.replica))
    return Act(Txn(guards, (put, seen, *to_delete(view, seat.keys, inst))), lambda _: None)


def to_delete(view: View, keys: Keys, inst: str) -> list[Delete]:
    """The deletions of all that an incarnation, or a copy of its, holds, claims and carries.

    These hang on the anchor, and would stay for as long as that rank's lease lives.
    """
    held = keyed(view.within(keys.holdings()), k.parse_holding)
    holdings = [key for key, where, _ in held if k.is_of(where.inst, inst)]
    decided = decisions_at(view, keys.decisions(inst)).calls
    is_open = (call for call in decided if call.outcome is None)
    claims = (claim for call in is_open for claim in claims_of(keys, call, inst))
    return [*map(Delete, map(one, (*holdings, *claims))), Delete(keys.carried_by(inst))]
