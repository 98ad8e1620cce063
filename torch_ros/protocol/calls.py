"""The rules of a group's calls. Pure: a view in, a step out; no clock, no client, no retry.

`store.loops.settle` asks a rule again after each lost race or reply: it then sees what it has done.
I1 to I16 are the invariants of docs/PROTOCOL.md#invariants and of the pages that it names.
"""

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from torch_ros.errors import (
    CallAborted,
    Fenced,
    ManifestMismatch,
    SeatLost,
    TorchRosError,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from torch_ros.printable import some
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import (
    Begun,
    Call,
    Failure,
    Holding,
    Outcome,
    Ready,
    Said,
    VersionRecord,
    VersionRef,
)
from torch_ros.protocol.seat import (
    Seat,
    claims_of,
    find,
    forgotten,
    group_txn,
    holding_put,
    own_group,
    recall,
    recorded,
)
from torch_ros.protocol.sources import choice_ranges
from torch_ros.protocol.versions import (
    AvailableVersion,
    Spec,
    first_holders,
    published,
    resolve,
    shows_all,
    spec_ranges,
)
from torch_ros.store.loops import Act, Done, Step, Wait, WaitAtMost
from torch_ros.store.txn import (
    Count,
    Delete,
    Empty,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Ranges,
    Reply,
    Txn,
    Unseen,
    View,
    one,
)

T = TypeVar("T")
Effects = Callable[[View, Seat, Call], Step[Call]]
"""The effects that a decision writes besides itself."""

DELETES_MAX = 48  # per transaction; etcd allows 128 operations, and as many guards


# Calls of a group


def look_up(view: View, seat: Seat, number: int) -> Step[Call | None]:
    """The group's call of that number; None: no rank has made it yet."""
    own_group(view, seat)
    return Done(recall(view, seat, number))


def find_or_decide(
    view: View, seat: Seat, call: Call, effects: Effects, seen: View | None = None
) -> Step[Call]:
    """The group's call of that number: found, or written with its effects (or their error, I3).

    Args:
        call: As this rank makes it.
        effects: The rule that decides, if no rank has. If it raises, that is the decision.
        seen: A view from before, from which no error is decided: no guard protects one.

    Raises: SeatLost: This incarnation is no longer the living one.
    """
    own_group(view, seat)
    if there := recall(view, seat, call.number):
        return Done(there)
    try:
        step = effects(view, seat, call)
    except TorchRosError as error:
        if view is seen:  # an old view: read anew
            raise Unseen from None
        failure = Failure.of(error, replica=seat.replica, call=call.number, rank=seat.rank)
        return recorded(view, seat, msgspec.structs.replace(call, outcome=Outcome(failure)))
    return watching_group(step, seat)


def watching_group(step: Step[T], seat: Seat) -> Step[T]:
    """`step`; if it waits, also for what peers decide, and for the group's end."""
    if isinstance(step, WaitAtMost):
        return msgspec.structs.replace(step, wait=_with_own(step.wait, seat))
    return _with_own(step, seat) if isinstance(step, Wait) else step


def _with_own(wait: Wait, seat: Seat) -> Wait:
    return msgspec.structs.replace(wait, ranges=(*seat.own, *wait.ranges))


def begun(view: View, seat: Seat, mine: Begun) -> Step[bool]:
    """Record that this rank has begun a call of DCP; then look again, whether all ranks have."""
    own_group(view, seat)
    records = readable(view.within(seat.keys.all_begun(seat.inst)), k.parse_rank, Begun)
    begun_by = {rank: record.number for _, rank, record, _ in records}
    if begun_by.get(seat.rank, 0) < mine.number:
        put = Put(seat.keys.begun(seat.inst, seat.rank), mine.encode(), seat.lease_id)
        return Act(Txn((view.unchanged(seat.group),), (put,)), None)
    return Done(sum(number >= mine.number for number in begun_by.values()) == seat.world_size)


# Effects


def check_publishable(view: View, seat: Seat, call: Call, version: int) -> Step[Call]:
    """Decide, before this replica gives up what it holds, whether a publish would be refused."""
    _refuse_old(view, seat, version)
    _fellow_publisher(view, seat, version)
    return recorded(view, seat, call)


def _refuse_old(view: View, seat: Seat, version: int) -> None:
    newest = max(published(view, seat.keys, seat.run), default=-1)
    if newest > version:
        raise VersionConflict(seat.keys.model, version, seat.run, f"it is already at {newest}")


def announce_version(
    view: View, seat: Seat, call: Call, version: int, fresh_uid: str
) -> Step[Call]:
    """Announce the version; it is offered once every rank is ready. `fresh_uid` is the call's own
    uid: where the record has it, this call is made again.
    """
    _refuse_old(view, seat, version)
    require_nothing_held(view, seat)
    keys, run = seat.keys, seat.run
    key = keys.version(run, version)
    record = VersionRecord.at(view, key)
    is_again = record is not None and record.uid == fresh_uid
    fellow = "" if is_again else _fellow_publisher(view, seat, version)
    if record is None or not (is_again or fellow):  # or the record's content has gone
        record = VersionRecord(fresh_uid, "", call.at_ms, call.traceparent, seat.replica)
    ref = VersionRef(run, version, record.uid, seat.run_number)
    left = _left_by_all(view, seat, key)
    guards: tuple[Guard, ...] = (
        view.unchanged(key),
        # Two versions that are published at once must not both be the newest.
        NoneNewer(keys.versions_above(run, version), view.rev),
        # The fellow must hold it still; nobody may have published what is deleted here.
        *map(view.unchanged, (*left, *((fellow,) if fellow else ()))),
        # A replica that comes back may bring a holding of what everybody has left.
        *map(Empty, left.values()),
    )
    ops: tuple[Op, ...] = (
        Put(key, record.encode()),  # even if it is unchanged: it wakes who waits for it
        *(Delete(one(old)) for old in left),
        holding_put(view, seat, ref, filling(seat, call, ref, is_original=True)),
    )
    return recorded(view, seat, record.brought_by(call, ref), guards, ops)


def _left_by_all(view: View, seat: Seat, besides: str) -> dict[str, Range]:
    """Records, DELETES_MAX at most, of versions that nobody holds, and where holdings would be."""
    keys, run = seat.keys, seat.run
    records = readable(view.within(keys.versions(run)), k.parse_version, VersionRecord)
    holders = ((key, keys.holdings_of(run, number)) for key, (_, number), _, _ in records)
    left = (each for each in holders if each[0] != besides and not any(view.within(each[1])))
    return dict(itertools.islice(left, DELETES_MAX))


def publish_ranges(seat: Seat) -> tuple[Range, ...]:
    return (seat.keys.versions(seat.run), seat.keys.holdings(seat.run))


def first_look(seat: Seat, number: int) -> Ranges:
    """All that a replicate is decided from, if it is call `number`: it may be read ahead."""
    return (*seat.own, one(seat.keys.ready(seat.inst, number, seat.rank)), *spec_ranges(seat.keys))


def _fellow_publisher(view: View, seat: Seat, version: int) -> str:
    """The holding of another publisher of this version, to share its uid; "": nobody holds it.
    Raises: VersionConflict: Only replicas that read it hold it.
    """
    holders = view.within(seat.keys.holdings_of(seat.run, version))
    others = {
        key: holding
        for key, where, holding, _ in legible.holdings(holders)
        if where.inst != seat.inst
    }
    publishers = [key for key, holding in others.items() if holding.is_original]
    if others and not publishers:
        reason = "replicas that read it earlier still hold it, and these bytes may be others"
        raise VersionConflict(seat.keys.model, version, seat.run, reason)
    return publishers[0] if publishers else ""


def require_nothing_held(view: View, seat: Seat) -> None:
    """Raises: UsageError: This replica holds a version in the store. Among many holdings its own
    may not be seen: each of its processes knows by itself, too.
    """
    for _, where, _ in keyed(view.seen(seat.keys.holdings()), k.parse_holding):
        if where.inst == seat.inst:
            raise UsageError(
                f"replica {seat.replica!r} still holds version {where.version} in the store; "
                "unpublish() it first"
            )


def announce_filling(
    view: View, seat: Seat, call: Call, spec: Spec, *, is_relay: bool
) -> Step[Call]:
    """Resolve the version, and announce the holding that this group fills. `sources.claim` follows.

    The claim comes second, so that it sees all that is older than this holding (I13). Others may
    read what has come if `is_relay`, unless the group is a leaf in this call.
    """
    try:
        offer = elsewhere(view, seat, spec)
    except VersionNotFound:
        if not spec.may_miss:
            raise
        return nothing(view, seat, call)
    if isinstance(offer, Wait):
        return nothing(view, seat, call) if spec.may_miss else offer
    require_nothing_held(view, seat)
    ref = offer.ref
    record = VersionRecord.at(view, seat.keys.version(ref.run, ref.version))
    decided = (record or VersionRecord(ref.uid)).brought_by(call, ref)
    decided = seat.leaves.begun(view, seat, decided) if is_relay else decided
    passes_on = is_relay and not seat.leaves.is_leaf(seat, decided)
    held = holding_put(view, seat, ref, filling(seat, call, ref, is_relay=passes_on))
    # Somebody has it now: a version must not be decided on that has just gone.
    guard = view.unchanged(offer.first_key(seat.keys))
    step = recorded(view, seat, decided, (guard,), (held,))
    return msgspec.structs.replace(step, ahead=choice_ranges(seat, ref))  # for the claim


def elsewhere(view: View, seat: Seat, spec: Spec) -> AvailableVersion | Wait:
    """The version that `spec` means now, if another replica than this one can be read from."""
    offer = resolve(view, seat.keys, spec)
    if isinstance(offer, Wait):
        return offer
    if any(not k.is_of(inst, seat.inst) for inst in offer.holdings):
        return offer
    if not shows_all(view, seat.keys, offer):
        raise Unseen  # another replica may be among those that were not seen
    # This one has put it aside for others, and cannot read it into its own tensors.
    reason = f"version {offer.ref.version} is only in this replica's own copy in host memory"
    holders = seat.keys.holdings_of(offer.ref.run, offer.ref.version)
    return Wait(reason, (seat.keys.versions(), holders))


def nothing(view: View, seat: Seat, call: Call) -> Step[Call]:
    """The end of a call in which nothing is to be done: it has no `ref`, and has ended well."""
    return recorded(view, seat, msgspec.structs.replace(call, outcome=Outcome()))


def filling(
    seat: Seat, call: Call, ref: VersionRef, *, is_original: bool = False, is_relay: bool = False
) -> Holding:
    """The holding of this group until all of its ranks have their parts."""
    return Holding(
        ref.uid,
        call.number,
        "filling",
        seat.world_size,
        seat.datacenter,
        is_original=is_original,
        is_relay=is_relay,
        spot=seat.spot,
        at_ms=call.at_ms,
    )


# A rank's part in a call, and the call's end


def own_records(seat: Seat, call: Call, sources: Iterable[str]) -> tuple[Range, ...]:
    """The records that this rank may have because of `call`, besides the group's records."""
    ready = one(seat.keys.ready(seat.inst, call.number, seat.rank))
    return (ready, *reader_records(seat, call, sources))


def reader_records(seat: Seat, call: Call, sources: Iterable[str]) -> tuple[Range, ...]:
    """The keys of this rank's reader records at `sources`; none, if the call brings nothing."""
    if (ref := call.ref) is None:
        return ()
    return tuple(
        one(seat.keys.reader(ref.run, ref.version, source, seat.inst, seat.rank))
        for source in sorted(sources)
    )


def outcome_ranges(seat: Seat, call: Call) -> tuple[Range, ...]:
    ready = seat.keys.ready(seat.inst, call.number, seat.rank)
    return (*seat.own, one(ready), one(seat.keys.shard(seat.inst, seat.rank)))


def withdraw(view: View) -> Step[None]:
    """Delete all that is in view: this rank's own records of a call that failed."""
    if not view.entries:
        return Done(None)
    return Act(Txn(ops=tuple(Delete(one(key)) for key in view.entries)), lambda _: None)


def put_ready(
    view: View, seat: Seat, call: Call, answer: Ready, read_from: Collection[str]
) -> Step[int | Outcome]:
    """This rank has done its part. Returns how many have, counted with it, or the outcome.

    Reads ahead, beside `seat.own`, what the last one to be ready needs next, or those that wait.

    Args:
        read_from: The sources of its reader records, which go now: every byte it read is certified.
    """
    current = open_call(view, seat, call)
    if isinstance(current, Outcome):
        return Done(current)
    key = seat.keys.ready(seat.inst, call.number, seat.rank)
    if view.get(key):  # the reply was lost, and its count: this rank may be the last, so it looks
        return Done(seat.world_size)
    readies = seat.keys.readies(seat.inst, call.number)
    ops: tuple[Op, ...] = (
        Put(key, answer.encode(), seat.lease_id),
        *map(Delete, reader_records(seat, call, read_from)),
        Count(readies),
    )

    def count(reply: Reply) -> int:
        assert isinstance(reply.results[0], int)
        return reply.results[0]

    shard = one(seat.keys.shard(seat.inst, seat.rank))
    ahead = (*version_ranges(seat, call.ref), readies, shard)
    return Act(Txn((view.unchanged(seat.group),), ops), count, ahead)


def open_call(view: View, seat: Seat, call: Call) -> Call | Outcome:
    """The group's call of that number, as it is now; its outcome, if it has ended.
    Raises: SeatLost: The seat is lost, or the call is forgotten.
    """
    own_group(view, seat)
    if (current := find(view, seat, call.number)) is None:
        raise forgotten(seat, call.number)
    return current.outcome or current


def await_outcome(view: View, seat: Seat, call: Call, *, was_counted: bool) -> Step[Outcome]:
    """The outcome; until there is one, wait for the ranks that are not ready yet.

    Args:
        was_counted: This rank's ready record was there, as its reply says.
    """
    current = find(view, seat, call.number)
    if current is not None and current.outcome is not None:
        return Done(current.outcome)
    try:
        own_group(view, seat)
    except SeatLost as lost:
        ready = seat.keys.ready(seat.inst, call.number, seat.rank)
        # The record of the group's calls may have gone with the group. This rank's shard and ready
        # records hang on one lease, and only a good end deletes the ready record alone.
        is_alive = view.get(seat.keys.shard(seat.inst, seat.rank)) is not None
        if was_counted and isinstance(lost, Fenced) and is_alive and view.get(ready) is None:
            return Done(Outcome())
        raise
    if current is None:
        raise forgotten(seat, call.number)
    reason = f"not all {seat.world_size} ranks of replica {seat.replica!r} have come to "
    return Wait(f"{reason}'{call.asked}' (call {call.number})", seat.own)


def lacking(view: View, seat: Seat, call: Call) -> str:
    """The ranks that are not ready, in words; "": all are, or the call is none to be ready for."""
    readies = keyed(view.within(seat.keys.readies(seat.inst, call.number)), k.parse_rank)
    ready = {rank for _, rank, _ in readies} | seat.done_by(call).keys()
    left = [str(rank) for rank in range(seat.world_size) if rank not in ready]
    return f"; missing: rank{'s' if len(left) > 1 else ''} {some(left)}" if left else ""


def readies(view: View, seat: Seat, call: Call) -> Step[Said | Outcome | None]:
    """The answers of all ranks, or the outcome if the call has ended; None: some are not ready."""
    current = open_call(view, seat, call)
    if isinstance(current, Outcome):
        return Done(current)
    records = view.within(seat.keys.readies(seat.inst, call.number))
    answers = {
        rank: Ready.decode(entry.value, key)
        for key, rank, entry in keyed(records, k.parse_rank)
        if rank < seat.world_size
    }
    # Peers that did not wait for a publication have no ready record: their Shard records say it.
    said = seat.done_by(current) | {rank: answer.value for rank, answer in answers.items()}
    is_unproven = any(answer.is_unproven for answer in answers.values())
    return Done(Said(said, is_unproven) if len(said) == seat.world_size else None)


@dataclass(frozen=True, slots=True)
class SourceTerms:
    """The part of a version that a group must have taken to become a source of it."""

    is_required: bool = True  # all of it, or the call fails; else a part will do, and is no source
    is_served: bool = True  # once all is there; else the group is no source in any case
    is_relayed: bool = True  # meanwhile, others may read the part that is there


def complete(
    view: View,
    seat: Seat,
    call: Call,
    end: Outcome,
    terms: SourceTerms = SourceTerms(),
    read_from: Collection[str] = (),
) -> Step[Outcome]:
    """End the call, for which all ranks are ready. An agree ends with what they said.

    `end.said` is the layout that the ranks have every element of: if it is the version's, the group
    becomes a source, as `terms` say. "": they lack some, and never hold the version (I9). A group
    of one has no ready record: its reader records, on what it has `read_from`, go now.
    """
    current = open_call(view, seat, call)
    if isinstance(current, Outcome):
        return Done(current)
    if call.kind == "agree":
        return conclude(view, seat, current, end)
    record, held = _version_and_holding(view, seat, current)
    ref, is_read = current.ref, call.kind == "replicate"
    assert ref is not None
    reads = reader_records(seat, call, read_from) if seat.world_size == 1 else ()
    no_reads = tuple(map(Delete, reads))
    version, holding = seat.keys.version(ref.run, ref.version), seat.holding(ref)
    guards: tuple[Guard, ...] = (view.unchanged(version), view.unchanged(holding))
    has_all = bool(end.said) and record.layout in ("", end.said)  # "": published for the first time
    if not has_all and (terms.is_required or not is_read):
        failure = Failure.of(_other_layout(call, ref), replica="", call=0, rank=seat.rank)
        failed = Outcome(failure, at_ms=end.at_ms)
        return conclude(view, seat, current, failed, guards, (*_undo(seat, current), *no_reads))
    if is_read and not (has_all and terms.is_served):  # it has what it wanted, and is no source
        return conclude(view, seat, current, end, guards, (Delete(one(holding)), *no_reads))
    full = msgspec.structs.replace(held, state="full", at_ms=end.at_ms)
    ops: list[Op] = [holding_put(view, seat, ref, full)]
    # Whatever makes a version available writes its record: nothing else wakes who waits for it.
    others = _offers(view, seat, ref)
    if record.layout and others:  # nobody waits: it is available while that one offers it
        guards = (*guards, view.unchanged(others[0]))
    else:
        ops.append(Put(version, msgspec.structs.replace(record, layout=end.said).encode()))
    outcome = msgspec.structs.replace(end, is_source=True)
    return conclude(view, seat, current, outcome, guards, (*ops, *no_reads))


def _version_and_holding(view: View, seat: Seat, call: Call) -> tuple[VersionRecord, Holding]:
    """The records of the version that the call brings, and of this group's holding of it.
    Raises: VersionNotFound, CallAborted: They are not there any more.
    """
    ref = call.ref
    assert ref is not None
    record = VersionRecord.at(view, seat.keys.version(ref.run, ref.version))
    holding = Holding.at(view, seat.holding(ref))
    if record is None or holding is None:
        reason = f"the records of version {ref.version} vanished from the store meanwhile"
        raise CallAborted(seat.replica, call.number, seat.rank, reason)
    if record.uid != ref.uid:  # no publication replaces what is held; a withdrawal does
        reason = "its publisher withdrew it: it was written to while it was read"
        raise VersionNotFound(seat.keys.model, str(ref.version), reason)
    return record, holding


def end_ranges(seat: Seat, call: Call) -> Ranges:
    return (*seat.own, *version_ranges(seat, call.ref))


def version_ranges(seat: Seat, ref: VersionRef | None) -> Ranges:
    """The version's record, this replica's holding of it, and those who hold it; None: nothing."""
    if ref is None:
        return ()
    run, version = ref.run, ref.version
    own = (one(seat.keys.version(run, version)), one(seat.holding(ref)))
    return (*own, first_holders(seat.keys, run, version))


def _offers(view: View, seat: Seat, ref: VersionRef) -> list[str]:
    """The keys of others' full holdings that are seen; the end of a call may guard on one."""
    there = view.seen(seat.keys.holdings_of(ref.run, ref.version))
    return [
        key
        for key, _, holding, _ in legible.holdings(there)
        if key != seat.holding(ref) and holding.state == "full" and holding.uid == ref.uid
    ]


def _other_layout(call: Call, ref: VersionRef) -> ManifestMismatch:
    """The error of a group whose ranks together have another layout than the version, or a part."""
    if call.kind == "publish":
        return ManifestMismatch(
            f"version {ref.version}",
            "the tensor names, shapes and dtypes that another replica published it with",
            "others",
            "publish it under a new number, or publish the same tensors",
        )
    return ManifestMismatch(
        f"version {ref.version}",
        "every tensor of the version to be registered",
        "some that no rank of this replica registered",
        "register, or read, all of them; a part can be read, and is not served",
    )


def conclude(
    view: View,
    seat: Seat,
    call: Call,
    outcome: Outcome,
    guards: tuple[Guard, ...] = (),
    ops: tuple[Op, ...] = (),
) -> Act[Outcome]:
    """Write the end of the call, and delete the records that it does not need any more."""
    ended = msgspec.structs.replace(call, outcome=outcome)
    # A ready record that is gone says that the call ended well (`await_outcome`).
    readies = (seat.keys.readies(seat.inst, call.number),) if outcome.failure is None else ()
    claims = map(one, claims_of(seat.keys, call, seat.inst))
    tidy = map(Delete, (*readies, *claims))
    return Act(group_txn(view, seat, ended, guards, (*ops, *tidy)), lambda _: outcome)


def _undo(seat: Seat, call: Call) -> tuple[Op, ...]:
    """Delete the holding. Its readers notice: what its ranks show names no call any more."""
    if call.ref is not None and call.kind in ("publish", "replicate"):
        return (Delete(one(seat.holding(call.ref))),)
    return ()


def abort(view: View, seat: Seat, made: Call, failure: Failure) -> Step[Call]:
    """End the group's call of that number with `failure`, for all ranks, unless it has ended. It is
    `made`, this rank's own, unless peers have decided another one. Returns it with its end.
    """
    own_group(view, seat)
    call = recall(view, seat, made.number) or made
    if call.outcome is not None:
        return Done(call)
    outcome = Outcome(failure, at_ms=made.at_ms)
    ended = msgspec.structs.replace(call, outcome=outcome)
    end = conclude(view, seat, call, outcome, (), _undo(seat, call))
    return Act(end.txn, lambda _: ended)
