"""What may happen to versions and to a group's calls. Pure: a view in, a step out.

No clock, no client, no retry. `docs/PROTOCOL.md` tells the same in words, with the invariants:

  I1  A replica never becomes full with bytes that differ from what was published.
  I2  After unpublish returns, no read from that memory can end up in a full holding.
  I3  All ranks of a group act on the same decision for the same call.
  I5  Repeating an operation whose reply was lost changes nothing.
  I6  Nobody who waits sleeps while what they wait for is there; every wait ends by its deadline.
  I7  Within the lease's TTL, a replica is offered to readers only while all its shards are alive.

Places that later releases fill are marked "later:"; until then the options are refused at `open`.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from torch_ros.errors import (
    CallAborted,
    CallMismatch,
    ManifestMismatch,
    SelfFenced,
    SourceLost,
    TorchRosError,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from torch_ros.store import keys as k
from torch_ros.store.keys import Keys
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.records import (
    Call,
    Decisions,
    Failure,
    Group,
    Holding,
    Kind,
    Outcome,
    Reader,
    Ready,
    Shard,
    Version,
    VersionRef,
)
from torch_ros.store.txn import (
    Count,
    Created,
    Delete,
    Empty,
    Entry,
    Get,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Txn,
    View,
    one,
)

CALLS_KEPT = 64  # a rank that is further behind its peers than this is lost
CLOSED = "closed its handle"  # an orderly end
DELETES_MAX = 64  # per transaction; etcd allows 128 operations


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in the group of a replica."""

    keys: Keys
    replica: str
    nonce: str
    rank: int
    world_size: int
    run: str
    lease_id: int
    datacenter: str

    @property
    def inst(self) -> str:
        return k.instance(self.replica, self.nonce)

    @property
    def group(self) -> str:
        return self.keys.group(self.replica)

    @property
    def decisions(self) -> str:
        return self.keys.decisions(self.inst)

    @property
    def own(self) -> tuple[Range, ...]:
        """What every step of a call looks at."""
        return (one(self.group), one(self.decisions))

    def holding(self, ref: VersionRef) -> str:
        return self.keys.holding(ref.run, ref.version, self.inst)


# Versions: what `latest` means


@dataclass(frozen=True, slots=True)
class Spec:
    """Which version: an absolute number, or the `back`-th newest that is available."""

    absolute: int | None = None
    back: int = 0

    @classmethod
    def parse(cls, version: int | str) -> Spec:
        if isinstance(version, int) and not isinstance(version, bool):
            return cls(absolute=check_version(version))
        if isinstance(version, str) and (m := re.fullmatch(r"latest(?:-(\d{1,9}))?", version)):
            return cls(back=int(m[1] or 0))
        raise UsageError(f"version {version!r}: expected a number >= 0, 'latest' or 'latest-<k>'")

    def __str__(self) -> str:
        if self.absolute is not None:
            return str(self.absolute)
        return f"latest-{self.back}" if self.back else "latest"


def check_version(version: object) -> int:
    if isinstance(version, bool) or not isinstance(version, int):
        raise UsageError(f"version {version!r}: expected an int, found {type(version).__name__}")
    if not 0 <= version <= k.VERSION_MAX:
        raise UsageError(f"version {version}: expected 0 <= version <= {k.VERSION_MAX}")
    return version


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that can be read now, and from whom."""

    ref: VersionRef
    order: tuple[int, int]  # newer versions compare greater, across runs
    holdings: Mapping[str, Holding]  # inst -> its full holding


def offered(view: View, keys: Keys) -> list[list[Offer]]:
    """The available versions: runs from the newest, versions from the newest, none empty."""
    full: dict[tuple[str, int], dict[str, Holding]] = {}
    for key, entry in view.within(keys.holdings()):
        holding, where = Holding.decode(entry.value), k.parse_holding(key)
        if holding.state == "full":
            full.setdefault((where.run, where.version), {})[where.inst] = holding
    by_run: dict[str, list[Offer]] = {}
    for key, entry in view.within(keys.versions()):
        run, number = k.parse_version(key)
        uid = Version.decode(entry.value).uid
        holdings = {i: h for i, h in full.get((run, number), {}).items() if h.uid == uid}
        if holdings:
            order = (_born(view, keys, run), number)
            by_run.setdefault(run, []).append(Offer(VersionRef(run, number, uid), order, holdings))
    runs = sorted(by_run.values(), key=lambda offers: offers[0].order[0], reverse=True)
    return [sorted(offers, key=lambda offer: offer.order, reverse=True) for offers in runs]


def listing(view: View, keys: Keys) -> dict[int, set[str]]:
    """The available versions of the newest run that has one, and the replicas that hold them."""
    newest = next(iter(offered(view, keys)), [])
    return {o.ref.version: {k.replica_of(inst) for inst in o.holdings} for o in newest}


def resolve(view: View, keys: Keys, spec: Spec, floor: VersionRef | None = None) -> Offer | Wait:
    """The version that `spec` means now, never one older than `floor`.

    Raises:
        VersionNotFound: An absolute version that is gone; waiting would not bring it back.
    """
    newest = next(iter(offered(view, keys)), [])
    if spec.absolute is None:
        return _relative(view, keys, spec, newest, floor)
    for offer in newest:
        if offer.ref.version == spec.absolute:
            return offer
    run = newest[0].ref.run if newest else _newest_run(view, keys)
    published = [k.parse_version(key)[1] for key, _ in _published(view, keys, run)]
    is_coming = any(
        k.parse_holding(key).version == spec.absolute
        and Holding.decode(entry.value).state == "filling"
        for key, entry in view.within(keys.holdings(run))
    )
    if is_coming or spec.absolute > max(published, default=-1):
        return _wait_for_version(view, keys, f"version {spec.absolute} is not published yet")
    there = sorted(offer.ref.version for offer in newest)
    reason = f"it was published before and no replica holds it now; available: {there or 'none'}"
    raise VersionNotFound(keys.model, str(spec.absolute), reason)


def _published(view: View, keys: Keys, run: str) -> Iterator[tuple[str, Entry]]:
    """The version records of a run, less those of publications that never came to be."""
    held = {k.parse_holding(key).version for key, _ in view.within(keys.holdings(run))}
    for key, entry in view.within(keys.versions(run)):
        if Version.decode(entry.value).layout or k.parse_version(key)[1] in held:
            yield key, entry


def _relative(
    view: View, keys: Keys, spec: Spec, newest: list[Offer], floor: VersionRef | None
) -> Offer | Wait:
    if len(newest) <= spec.back:
        have = f"{len(newest)} available" if newest else "none is available yet"
        return _wait_for_version(view, keys, f"{spec} of model {keys.model!r}: {have}")
    offer = newest[spec.back]
    if floor is not None and offer.order < (_born(view, keys, floor.run), floor.version):
        return _wait_for_version(
            view, keys, f"{spec}: version {floor.version} is not available again"
        )
    return offer


def _wait_for_version(view: View, keys: Keys, reason: str) -> Wait:
    # Every publication writes its version's record when it begins. Holdings change far more
    # often; they matter only while somebody fills one, which may make a version available.
    is_filling = any(
        Holding.decode(entry.value).state == "filling" for _, entry in view.within(keys.holdings())
    )
    return Wait(reason, (keys.versions(), *((keys.holdings(),) if is_filling else ())))


def _newest_run(view: View, keys: Keys) -> str:
    runs = {k.parse_run(key): entry.create_rev for key, entry in view.within(keys.runs())}
    return max(runs, key=lambda run: runs[run], default="")


def _born(view: View, keys: Keys, run: str) -> int:
    entry = view.entries.get(keys.run(run))
    return entry.create_rev if entry else 0


def choose_source(view: View, seat: Seat, offer: Offer) -> str:
    """The full holder with the fewest readers, in this datacenter if there is one (I8).

    Ties are broken by a hash of both names, so that a burst spreads over equal sources.
    later: filling holders in birth order, and suspects.
    """
    readers = Counter(
        source
        for source, _, who in (k.parse_reader(key) for key, _ in view.within(seat.keys.readers()))
        if who == "group"
    )
    return min(
        offer.holdings,
        key=lambda inst: (
            offer.holdings[inst].datacenter != seat.datacenter,
            readers[inst],
            zlib.crc32(f"{seat.inst} {inst}".encode()),
        ),
    )


# Calls of a group


def own_group(view: View, seat: Seat) -> Entry:
    """The group's record. Its lease is the anchor: all group-level records hang on it.

    Raises:
        SelfFenced: This incarnation is no longer the living one.
    """
    entry = view.entries.get(seat.group)
    if entry is None:
        reason = "its group record is gone (a rank died, or etcd lost its lease)"
        raise SelfFenced(seat.replica, reason)
    group = Group.decode(entry.value)
    if group.nonce != seat.nonce:
        raise SelfFenced(seat.replica, f"another incarnation ({group.nonce}) has taken its name")
    if group.left is not None:
        raise SelfFenced(seat.replica, f"rank {group.left} {CLOSED}")
    return entry


def find(view: View, seat: Seat, number: int) -> Call | None:
    return next((call for call in _calls(view, seat) if call.number == number), None)


def _calls(view: View, seat: Seat) -> list[Call]:
    entry = view.entries.get(seat.decisions)
    return Decisions.decode(entry.value).calls if entry else []


def _record(view: View, seat: Seat, call: Call) -> Put:
    calls = [c for c in _calls(view, seat) if c.number != call.number] + [call]
    return Put(
        seat.decisions,
        Decisions(calls[-CALLS_KEPT:]).encode(),
        own_group(view, seat).lease_id,
    )


def _group_txn(
    view: View, seat: Seat, call: Call, guards: tuple[Guard, ...] = (), ops: tuple[Op, ...] = ()
) -> Txn:
    """A transaction that writes `call` and everything that comes with it, or nothing (I3)."""
    own = (view.unchanged(seat.group), view.unchanged(seat.decisions))
    return Txn((*own, *guards), (_record(view, seat, call), *ops))


def _recorded(
    view: View, seat: Seat, call: Call, guards: tuple[Guard, ...] = (), ops: tuple[Op, ...] = ()
) -> Act[Call]:
    return Act(_group_txn(view, seat, call, guards, ops), lambda _: call)


def look_up(view: View, seat: Seat, number: int) -> Step[Call | None]:
    """What the group has decided for its call `number`, if it has."""
    own_group(view, seat)
    return Done(find(view, seat, number))


def decide(
    view: View,
    seat: Seat,
    number: int,
    kind: Kind,
    asked: str,
    effects: Callable[[View, Call], Step[Call]],
) -> Step[Call]:
    """The group's call `number`: found, or written together with its effects.

    An error of the effects is a decision too: all ranks must get it (I3).

    Raises:
        SelfFenced: This incarnation is no longer the living one.
    """
    own_group(view, seat)
    if call := find(view, seat, number):
        return Done(call)
    call = Call(number, kind, asked, by=seat.rank)
    try:
        step = effects(view, call)
    except TorchRosError as error:
        failure = Failure.of(error, replica=seat.replica, call=number, rank=seat.rank)
        return _recorded(view, seat, msgspec.structs.replace(call, outcome=Outcome(failure)))
    if isinstance(step, Wait):
        return Wait(step.reason, (*seat.own, *step.ranges))
    return step


def mismatch(seat: Seat, call: Call, asked: str) -> CallMismatch | None:
    if call.asked == asked:
        return None
    return CallMismatch(seat.replica, call.number, asked, call.asked)


# effects: what a decision writes besides itself


def agree(view: View, seat: Seat, call: Call) -> Step[Call]:
    """A call of which only the outcome matters: did every rank pass its checks?"""
    return _recorded(view, seat, call)


def check_publishable(view: View, seat: Seat, call: Call, version: int) -> Step[Call]:
    """Would `publish` be refused, once this replica has given up what it holds?"""
    _refuse_old(view, seat, version)
    _fellow_publisher(view, seat, version)
    return _recorded(view, seat, call)


def _refuse_old(view: View, seat: Seat, version: int) -> None:
    published = _published(view, seat.keys, seat.run)
    newest = max((k.parse_version(key)[1] for key, _ in published), default=-1)
    if newest > version:
        raise VersionConflict(seat.keys.model, version, seat.run, f"it is already at {newest}")


def publish(view: View, seat: Seat, call: Call, version: int, fresh_uid: str) -> Step[Call]:
    """Announce the version; it is offered once every rank is ready.

    The version's record outlives its holdings for as long as it is the newest, so that numbers
    cannot go back when nobody holds anything. Published again when nobody holds it, it gets a
    new uid: the bytes may be others.
    """
    _refuse_old(view, seat, version)
    _refuse_second(view, seat)
    keys, run = seat.keys, seat.run
    key, above = keys.version(run, version), keys.versions_above(run, version)
    fellow = _fellow_publisher(view, seat, version)
    record = Version.decode(view.entries[key].value) if fellow else Version(fresh_uid)
    held = {k.parse_holding(key).version for key, _ in view.within(keys.holdings(run))}
    forgotten = [
        old
        for old, _ in view.within(keys.versions(run))
        if old != key and k.parse_version(old)[1] not in held
    ][:DELETES_MAX]
    ref = VersionRef(run, version, record.uid)
    holding = Holding(record.uid, call.number, "filling", seat.world_size, seat.datacenter)
    return _recorded(
        view,
        seat,
        msgspec.structs.replace(call, ref=ref),
        # The ranged guard keeps two versions published at once from both being the newest.
        (
            view.unchanged(key),
            NoneNewer(above, view.rev),
            *map(view.unchanged, (*forgotten, *((fellow,) if fellow else ()))),
        ),
        (
            Put(key, record.encode()),  # even if it is unchanged: it wakes who waits for it
            *(Delete(one(old)) for old in forgotten),
            _held(view, seat, ref, holding),
        ),
    )


def _fellow_publisher(view: View, seat: Seat, version: int) -> str:
    """The holding of another publisher of this version, to share its uid; "": nobody holds it.

    Raises:
        VersionConflict: Only replicas that read it hold it: its publisher has gone on, and these
            bytes may be others.
    """
    others = {
        key: Holding.decode(entry.value)
        for key, entry in view.within(seat.keys.holdings(seat.run))
        if (where := k.parse_holding(key)).version == version and where.inst != seat.inst
    }
    publishers = [key for key, holding in others.items() if not holding.source]
    if others and not publishers:
        reason = "replicas that read it earlier still hold it, and these bytes may be others"
        raise VersionConflict(seat.keys.model, version, seat.run, reason)
    return publishers[0] if publishers else ""


def _refuse_second(view: View, seat: Seat) -> None:
    for key, _ in view.within(seat.keys.holdings()):
        if (where := k.parse_holding(key)).inst == seat.inst:
            raise UsageError(
                f"replica {seat.replica!r} still holds version {where.version} in the store; "
                "unpublish() it first"
            )


def replicate(
    view: View, seat: Seat, call: Call, spec: Spec, floor: VersionRef | None
) -> Step[Call]:
    """Resolve the version, choose and claim a source, announce the filling holding: at once."""
    offer = resolve(view, seat.keys, spec, floor)
    if isinstance(offer, Wait):
        return offer
    _refuse_second(view, seat)
    ref, source = offer.ref, choose_source(view, seat, offer)
    holding = Holding(ref.uid, call.number, "filling", seat.world_size, seat.datacenter, source)
    claim = Put(
        seat.keys.reader_group(ref.run, ref.version, source, seat.inst),
        Reader(call.number).encode(),
        own_group(view, seat).lease_id,
    )
    decided = msgspec.structs.replace(call, ref=ref, source=source)
    return _recorded(
        view,
        seat,
        decided,
        # Still full: a source that began to drain meanwhile must not get a new reader.
        (view.unchanged(seat.keys.holding(ref.run, ref.version, source)),),
        (_held(view, seat, ref, holding), claim),
    )


def update(view: View, seat: Seat, call: Call, spec: Spec, held: VersionRef) -> Step[Call]:
    """Whether to go to another version; written down, so that all ranks do the same (I3)."""
    offer = newer(view, seat.keys, spec, held)
    ref = offer.ref if offer else None
    return _recorded(view, seat, msgspec.structs.replace(call, ref=ref, outcome=Outcome()))


def newer(view: View, keys: Keys, spec: Spec, held: VersionRef) -> Offer | None:
    """What `spec` means now, if that is newer than `held` (absolute: another one). Never waits."""
    if spec.absolute == held.version:
        return None
    offer = resolve(view, keys, spec)
    return offer if isinstance(offer, Offer) and _is_wanted(view, keys, offer, spec, held) else None


def _is_wanted(view: View, keys: Keys, offer: Offer, spec: Spec, held: VersionRef) -> bool:
    if spec.absolute is not None:
        return offer.ref != held
    return offer.order > (_born(view, keys, held.run), held.version)


def _held(view: View, seat: Seat, ref: VersionRef, holding: Holding) -> Put:
    return Put(seat.holding(ref), holding.encode(), own_group(view, seat).lease_id)


# A rank's part in a call, and the call's end


def attach(view: View, seat: Seat, call: Call) -> Step[tuple[list[Shard], tuple[Created, ...]]]:
    """Announce that this rank reads from the source; then learn how to reach its processes.

    Addresses are read after the record is there: they cannot change while it is.
    Returns the source's shards and the guards under which bytes read from it count.

    Raises:
        SourceLost: The source, or one of its processes, is gone.
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is not None and current.outcome is not None and current.outcome.failure is not None:
        raise current.outcome.failure.error()  # a peer gave up
    ref, keys = call.ref, seat.keys
    assert ref is not None
    claim = view.entries.get(keys.reader_group(ref.run, ref.version, call.source, seat.inst))
    source_key = keys.holding(ref.run, ref.version, call.source)
    source, own = view.entries.get(source_key), view.entries.get(seat.holding(ref))
    if claim is None or source is None or own is None:
        raise SourceLost(k.replica_of(call.source), "it left before it was read", 0, 0)
    source_size = Holding.decode(source.value).world_size
    key = keys.reader(ref.run, ref.version, call.source, seat.inst, seat.rank)
    still = (
        Created(seat.holding(ref), own.create_rev),
        # A source that was fenced lets its owner mutate without draining us.
        Created(source_key, source.create_rev),
    )

    def learn(
        shards: Mapping[str, Entry], record_rev: int
    ) -> tuple[list[Shard], tuple[Created, ...]]:
        if len(shards) < source_size:
            reason = f"{len(shards)} of its {source_size} processes are alive"
            raise SourceLost(k.replica_of(call.source), reason, 0, 0)
        records = [Shard.decode(shards[key].value) for key in sorted(shards)]
        return records, (Created(key, record_rev), *still)

    record = view.entries.get(key)
    if record is not None:  # put before, and the reply was lost
        return Done(learn(dict(view.within(keys.shards(call.source))), record.create_rev))
    txn = Txn(
        (view.unchanged(seat.group), view.unchanged(key), *still),
        (
            Put(key, Reader(call.number).encode(), seat.lease_id),
            Get(keys.shards(call.source)),
        ),
    )
    return Act(txn, lambda reply: learn(_entries(reply.results[0]), reply.rev))


def attach_ranges(seat: Seat, call: Call) -> tuple[Range, ...]:
    ref, keys = call.ref, seat.keys
    assert ref is not None
    return (
        *seat.own,
        keys.shards(call.source),
        one(keys.holding(ref.run, ref.version, call.source)),
        one(seat.holding(ref)),
        one(keys.reader_group(ref.run, ref.version, call.source, seat.inst)),
        one(keys.reader(ref.run, ref.version, call.source, seat.inst, seat.rank)),
    )


def _entries(result: Mapping[str, Entry] | int) -> Mapping[str, Entry]:
    assert not isinstance(result, int)
    return result


def own_records(seat: Seat, call: Call) -> tuple[Range, ...]:
    """What this rank may have in the store because of `call`, besides the group's records."""
    ready = one(seat.keys.ready(seat.inst, call.number, seat.rank))
    if call.ref is None or not call.source:
        return (ready,)
    ref = call.ref
    return (
        ready,
        one(seat.keys.reader(ref.run, ref.version, call.source, seat.inst, seat.rank)),
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
    view: View, seat: Seat, call: Call, value: str, guards: tuple[Created, ...]
) -> Step[int | Outcome]:
    """This rank has done its part. Returns how many have, counted with it, or the outcome.

    Args:
        guards: The records under which what was read counts.

    Raises:
        SourceLost: One of them is gone: what was read may have been written to meanwhile (I1).
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is None or current.outcome is not None:
        return Done(_outcome_of(current, seat, call))
    key = seat.keys.ready(seat.inst, call.number, seat.rank)
    if key in view.entries:  # the reply was lost; perhaps nobody knows that all are ready
        return Done(seat.world_size)
    for guard in guards:
        kept = view.entries.get(guard.key)
        if kept is None or kept.create_rev != guard.create_rev:
            reason = "it left, or was replaced, while it was read"
            raise SourceLost(k.replica_of(call.source), reason, 0, 0)
    ops: tuple[Op, ...] = (
        Put(key, Ready(value).encode(), seat.lease_id),
        *(Delete(record) for record in own_records(seat, call)[1:]),
        Count(seat.keys.readies(seat.inst, call.number)),
    )
    return Act(
        Txn((view.unchanged(seat.group), *guards), ops), lambda reply: _count(reply.results[0])
    )


def _count(result: Mapping[str, Entry] | int) -> int:
    assert isinstance(result, int)
    return result


def _outcome_of(current: Call | None, seat: Seat, call: Call) -> Outcome:
    if current is not None and current.outcome is not None:
        return current.outcome
    reason = f"call {call.number} is older than the {CALLS_KEPT} calls that the group remembers"
    raise SelfFenced(seat.replica, reason)


def await_outcome(view: View, seat: Seat, call: Call) -> Step[Outcome]:
    """Wait for the ranks that are not ready yet.

    A good end deletes the readies, a bad one leaves them to their ranks. So if a peer closed its
    handle right after the end, and took the group's records along, it can still be told.
    """
    current = find(view, seat, call.number)
    if current is not None and current.outcome is not None:
        return Done(current.outcome)
    try:
        own_group(view, seat)
    except SelfFenced:
        ready = seat.keys.ready(seat.inst, call.number, seat.rank)
        # Both records hang on this rank's lease.
        is_alive = seat.keys.shard(seat.inst, seat.rank) in view.entries
        if is_alive and ready not in view.entries:
            return Done(Outcome())
        raise
    if current is None:
        return Done(_outcome_of(current, seat, call))
    reason = f"not all {seat.world_size} ranks of replica {seat.replica!r} have come to "
    return Wait(f"{reason}{call.asked!r} (call {call.number})", seat.own)


def readies(view: View, seat: Seat, call: Call) -> Step[dict[int, str] | Outcome | None]:
    """What the ranks say, once all have said it; None: not yet."""
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is None or current.outcome is not None:
        return Done(_outcome_of(current, seat, call))
    said = {
        int(key.rpartition("/")[2]): Ready.decode(entry.value).value
        for key, entry in view.within(seat.keys.readies(seat.inst, call.number))
    }
    return Done(said if len(said) == seat.world_size else None)


@dataclass(frozen=True, slots=True)
class Whole:
    """What a group must have taken of a version to become a source of it."""

    is_required: bool = True  # else taking a part is fine, and the group is no source
    is_served: bool = True  # else the group is no source in any case


def complete(
    view: View, seat: Seat, call: Call, layout: str, whole: Whole = Whole()
) -> Step[Outcome]:
    """All ranks are ready and together hold content of `layout` (agree: said so): the end.

    The end flips the holding by compare-and-swap in the same transaction, so all ranks see the
    same end (I3), and a repeated one finds it done (I5).
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is None or current.outcome is not None:
        return Done(_outcome_of(current, seat, call))
    if call.kind == "agree":
        return _end(view, seat, current, Outcome(said=layout))
    ref = current.ref
    assert ref is not None
    version, own = (
        view.entries.get(seat.keys.version(ref.run, ref.version)),
        view.entries.get(seat.holding(ref)),
    )
    if version is None or own is None or Version.decode(version.value).uid != ref.uid:
        reason = f"the records of version {ref.version} vanished from the store meanwhile"
        raise CallAborted(seat.replica, call.number, seat.rank, reason)
    expected = Version.decode(version.value).layout
    guards = (
        view.unchanged(seat.keys.version(ref.run, ref.version)),
        view.unchanged(seat.holding(ref)),
    )
    if expected and expected != layout:
        if call.kind == "replicate" and not whole.is_required:
            return _end(view, seat, current, Outcome(), guards, (Delete(one(seat.holding(ref))),))
        failure = Failure.of(_other_layout(call, ref), replica="", call=0, rank=seat.rank)
        return _end(view, seat, current, Outcome(failure), guards, _undo(seat, current))
    if call.kind == "replicate" and not whole.is_served:
        return _end(view, seat, current, Outcome(), guards, (Delete(one(seat.holding(ref))),))
    full = msgspec.structs.replace(Holding.decode(own.value), state="full")
    ops: list[Op] = [_held(view, seat, ref, full)]
    if not expected:
        key = seat.keys.version(ref.run, ref.version)
        ops.append(Put(key, Version(ref.uid, layout).encode()))
    return _end(view, seat, current, Outcome(is_source=True), guards, tuple(ops))


def _other_layout(call: Call, ref: VersionRef) -> ManifestMismatch:
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
        "register all of them, or load a part with dcp.load",
    )


def _end(
    view: View,
    seat: Seat,
    call: Call,
    outcome: Outcome,
    guards: tuple[Guard, ...] = (),
    ops: tuple[Op, ...] = (),
) -> Act[Outcome]:
    ended = msgspec.structs.replace(call, outcome=outcome)
    tidy: list[Op] = []
    if outcome.failure is None:
        tidy.append(Delete(seat.keys.readies(seat.inst, call.number)))
    if call.ref is not None and call.source:
        ref = call.ref
        claim = seat.keys.reader_group(ref.run, ref.version, call.source, seat.inst)
        tidy.append(Delete(one(claim)))
    return Act(_group_txn(view, seat, ended, guards, (*ops, *tidy)), lambda _: outcome)


def _undo(seat: Seat, call: Call) -> tuple[Op, ...]:
    """What takes back the effects of a decision that did not come to a good end."""
    if call.ref is not None and call.kind in ("publish", "replicate"):
        # later: a filling holding that has readers of its own drains them first.
        return (Delete(one(seat.holding(call.ref))),)
    return ()


def abort(
    view: View, seat: Seat, number: int, kind: Kind, asked: str, failure: Failure
) -> Step[Outcome]:
    """End the call for all ranks with `failure`, unless it has ended: then that outcome."""
    own_group(view, seat)
    call = find(view, seat, number) or Call(number, kind, asked, by=seat.rank)
    if call.outcome is not None:
        return Done(call.outcome)
    return _end(view, seat, call, Outcome(failure), (), _undo(seat, call))


def unpublish(
    view: View, seat: Seat, number: int, asked: str, ref: VersionRef
) -> Step[Call | Outcome]:
    """Take the holding out of what is offered, wait for its readers, delete it (I2).

    Without readers that is one transaction, guarded on there being none. Only the rank that
    decided watches the readers; the others wait for the outcome.
    later: a drain that takes too long evicts its readers; retained versions need a witness.
    """
    own_group(view, seat)
    readers = seat.keys.readers_of(ref.run, ref.version, seat.inst)
    reading = [k.parse_reader(key) for key, _ in view.within(readers)]
    own_key = seat.holding(ref)
    call = find(view, seat, number)
    if call is not None and call.asked != asked:
        return Done(call)
    if call is not None and call.outcome is not None:
        return Done(call.outcome)
    if call is not None and call.by != seat.rank:
        return Wait(f"rank {call.by} waits for readers of version {ref.version}", seat.own)
    fresh = call is None
    call = call or Call(number, "unpublish", asked, seat.rank, ref)
    if own_key not in view.entries:
        return _end(view, seat, call, Outcome())
    guards = (view.unchanged(own_key),)
    if not reading:
        gone = (Delete(one(own_key)),)
        return _end(view, seat, call, Outcome(), (*guards, Empty(readers)), gone)
    holding = Holding.decode(view.entries[own_key].value)
    if fresh or holding.state != "draining":
        draining = msgspec.structs.replace(holding, state="draining")
        return _recorded(view, seat, call, guards, (_held(view, seat, ref, draining),))
    who = sorted({k.replica_of(reader) for _, reader, _ in reading})
    return Wait(
        f"version {ref.version} is still read by {', '.join(who)} ({len(reading)} records)",
        (*seat.own, readers),
    )


def unread(view: View, seat: Seat, ref: VersionRef) -> Step[None]:
    """Wait until nobody reads `ref` from this incarnation, which is over."""
    readers = seat.keys.readers_of(ref.run, ref.version, seat.inst)
    if reading := list(view.within(readers)):
        return Wait(f"version {ref.version} has {len(reading)} reader records", (readers,))
    return Done(None)


def unpublish_ranges(seat: Seat, ref: VersionRef) -> tuple[Range, ...]:
    readers = seat.keys.readers_of(ref.run, ref.version, seat.inst)
    return (*seat.own, one(seat.holding(ref)), readers)
