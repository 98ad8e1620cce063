"""Whom a replica reads from: birth order is the topology (docs/PROTOCOL.md#replicate). Pure.

A burst forms chains in which each source feeds one reader. TensorHub calls it a relay, and has a
server decide it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from torch_ros.errors import BackendError, SourceLost
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, nobody, readable
from torch_ros.protocol.records import Call, Holding, Reader, ShardRecord, VersionRef
from torch_ros.protocol.seat import Seat, find, group_txn, own_group
from torch_ros.protocol.versions import AvailableVersion
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.txn import (
    Entry,
    Get,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Ranges,
    Reply,
    Sample,
    Txn,
    Unseen,
    View,
    one,
    sample,
)

DEPTH_MAX = 32  # of a chain; a relay adds the time of a batch to what the last one waits
SOURCES_MAX = 4  # that one replica reads from at the same time
NEIGHBOURS = 8  # among many replicas, a source is chosen from so many older ones
TRIES_MAX = 3  # with one source; a failure may have been the way and not the source
FAR_SILENCE_S = 12.0  # of a near source, until a far one is better: most leases end before that


@dataclass(frozen=True, slots=True)
class Source:
    """A source, as it was when this rank put its reader record."""

    inst: str
    mark: int  # what its processes show with what they have
    born: int  # when its holding was created; one that is made anew has another place
    is_full: bool
    shards: tuple[ShardRecord, ...]
    call: int = 0  # of its group, that made the holding
    datacenter: str = "default"

    @property
    def insts(self) -> tuple[str, str]:
        """Its name, and the one under which the same processes offer the same when it has ended."""
        return self.inst, k.lingering_of(self.inst, self.call)


@dataclass(frozen=True, slots=True)
class _Candidate:
    holding: Holding
    entry: Entry
    readers: int
    depth: int
    distance: int


def distance(datacenter: str, seat: Seat) -> int:
    """How far away a replica is from a process: nearer sources are preferred."""
    return int(datacenter != seat.datacenter)


def source_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    keys = seat.keys
    return (
        *seat.own,
        one(seat.holding(ref)),
        sample(keys.holdings_of(ref.run, ref.version)),
        sample(keys.readers_for(ref.run, ref.version)),
        keys.suspects(),
    )


def choice_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    """As `source_ranges`, in the transaction that makes the own holding, which is the newest."""
    there = seat.keys.holdings_in(ref.run, ref.version, seat.datacenter)
    return (*source_ranges(seat, ref), *_neighbours(there))


def _neighbours(there: Range) -> tuple[Sample, Sample]:
    return Sample(there, NEIGHBOURS + 1), Sample(there, NEIGHBOURS, is_oldest=True)


@dataclass(frozen=True, slots=True)
class Claimed:
    """The call with its sources; and how to reach those that this rank has attached to with it."""

    call: Call
    attached: Mapping[str, Callable[[], Source]] = field(default_factory=dict)  # by place


def claim(
    view: View,
    seat: Seat,
    call: Call,
    avoided: Collection[str] = (),
    *,
    sources_max: int = 1,
    chosen: Callable[[str], object] = lambda _: None,
) -> Step[Claimed | None]:
    """The call with the group's first sources, chosen by the rank that decided it.

    None: nobody has the version any more and the decision is taken back, so decide again. That rank
    attaches in the same transaction: like the claim it cannot apply once the call has gone on.

    Args:
        avoided: Sources whose bytes were wrong a moment ago: others come first, even far ones, and
            before those that still fill, since these may be filling themselves with such bytes.
        sources_max: How many idle ones to claim, if nobody else is looking.
        chosen: Is told the instances first: their records may be there, whatever is answered.
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is None:
        return Done(None)
    if current.sources or current.outcome is not None:
        return Done(Claimed(current))
    if current.by != seat.rank:
        return Wait(f"rank {current.by} chooses a source", seat.own)
    ref = current.ref
    assert ref is not None
    candidates = _candidates(view, seat, ref)
    if not candidates:
        return Act(seat.taken_back(view, current), lambda _: None)
    if avoided:
        full = {i: found for i, found in candidates.items() if found.holding.state == "full"}
        candidates = candidates if full.keys() <= {*avoided} else full
    eligible = _eligible(view, seat, ref, candidates, dict.fromkeys(avoided, 1))
    insts = _idle(view, seat, ref, eligible, sources_max) or [_predicted(view, seat, ref, eligible)]
    places = [k.place(eligible[inst].holding.datacenter, inst) for inst in insts]
    guards = _still_alone(view, seat, ref) if len(insts) > 1 else []
    ops: list[Op] = []
    for inst, place in zip(insts, places, strict=True):
        chosen(inst)
        is_free = not eligible[inst].readers
        some, claimed = claim_of(view, seat, call.number, ref, place, is_free=is_free)
        own = seat.keys.reader(ref.run, ref.version, inst, seat.inst, seat.rank)
        reader = Put(own, claimed.value, seat.lease_id)
        guards += some
        ops += (claimed, reader, Get(seat.keys.shards(inst)))
    ended = current.with_sources(*places)

    def attached(reply: Reply) -> Claimed:
        return Claimed(
            ended,
            {
                place: partial(learned, inst, found.holding, found.entry.create_rev, shards)
                for inst, place, shards in zip(insts, places, gotten(reply), strict=True)
                for found in [eligible[inst]]
            },
        )

    return Act(group_txn(view, seat, ended, tuple(guards), tuple(ops)), attached)


def claim_of(
    view: View, seat: Seat, number: int, ref: VersionRef, place: str, *, is_free: bool
) -> tuple[tuple[Guard, ...], Put]:
    """The record that claims the source there, and the guards under which it may."""
    anchor, keys, source = own_group(view, seat).lease_id, seat.keys, k.inst_at(place)
    key = keys.reader_group(ref.run, ref.version, source, seat.inst)
    guards: list[Guard] = [view.unchanged(keys.holding_at(ref.run, ref.version, place))]
    if is_free:
        guards.append(nobody(view, keys.readers_of(ref.run, ref.version, source)))
    return tuple(guards), Put(key, _reader(seat, number, place).encode(), anchor)


def _reader(seat: Seat, number: int, place: str) -> Reader:
    return Reader(number, is_far=place != k.place(seat.datacenter, k.inst_at(place)))


def _idle(
    view: View, seat: Seat, ref: VersionRef, eligible: Mapping[str, _Candidate], most: int
) -> list[str]:
    """At most half of the idle near sources, if nobody else is seen looking for one."""
    holdings = seen_holdings(view, seat, ref)
    if any(held.state == "filling" and inst != seat.inst for inst, (held, _) in holdings.items()):
        return []
    suspected = suspects(view, seat.keys)
    near = [
        inst
        for inst, found in eligible.items()
        if not found.readers and not found.distance and inst not in suspected
    ]
    if own := _own_copy(eligible, seat):
        return [own] if own in near else []
    near.sort(key=lambda inst: eligible[inst].entry.create_rev)
    return near[: min(-(-len(near) // 2), most, SOURCES_MAX)]


def _still_alone(view: View, seat: Seat, ref: VersionRef) -> list[Guard]:
    """Nobody has come since, who would count on the second of several sources."""
    return [NoneNewer(seat.keys.holdings_of(ref.run, ref.version), view.rev)]


def _own_copy(candidates: Mapping[str, _Candidate], seat: Seat) -> str:
    """The copy that this replica's forerunner has in the same processes; "": there is none."""
    name = k.forerunner_of(seat.replica)
    full = (i for i, found in candidates.items() if found.holding.state == "full")
    return next((inst for inst in full if k.replica_of(inst) == name), "")


def seen_holdings(view: View, seat: Seat, ref: VersionRef) -> dict[str, tuple[Holding, Entry]]:
    found = view.seen(seat.keys.holdings_of(ref.run, ref.version))
    return {where.inst: (holding, entry) for _, where, holding, entry in legible.holdings(found)}


def who_knows(view: View, seat: Seat, offer: AvailableVersion) -> list[str]:
    """The holders that can say what a version contains: near ones, then the seed here, far ones."""
    there = seen_holdings(view, seat, offer.ref)
    far = {inst: distance(held.datacenter, seat) for inst, held in offer.holdings.items()}
    seeds = [
        (entry.create_rev, inst)
        for inst, (held, entry) in there.items()
        if held.state == "filling" and held.is_relay and held.uid == offer.ref.uid
        if not distance(held.datacenter, seat) and not k.is_of(inst, seat.inst)
    ]
    seed = [inst for _, inst in sorted(seeds)[:1]] if any(far.values()) else []
    full = sorted(far)
    near = [inst for inst in full if not far[inst]]
    return [*near, *seed, *(inst for inst in full if far[inst])]


def _is_source(
    seat: Seat, ref: VersionRef, inst: str, holding: Holding, entry: Entry, own: Entry | None
) -> bool:
    """Whether it may be read from: full, or a relay that is older than this replica."""
    if holding.uid != ref.uid or k.is_of(inst, seat.inst):
        return False
    is_older = own is not None and entry.create_rev < own.create_rev
    return holding.state == "full" or (holding.state == "filling" and holding.is_relay and is_older)


def _is_whole(view: View, seat: Seat, ref: VersionRef) -> bool:
    keys = seat.keys
    ranges = (keys.holdings_of(ref.run, ref.version), keys.readers_for(ref.run, ref.version))
    return all(map(view.shows, ranges))


def _candidates(
    view: View, seat: Seat, ref: VersionRef, lost: Collection[str] = ()
) -> dict[str, _Candidate]:
    """Everybody who could be read from; among many, the next older ones and the oldest.

    Args:
        lost: The sources that this call has lost. They count as nobody's readers.

    Raises:
        Unseen: It takes a look at those first, and at their readers.
    """
    own, holdings = view.get(seat.holding(ref)), seen_holdings(view, seat, ref)
    found = _known(view, seat, ref, holdings, own, lost)
    if _is_whole(view, seat, ref):
        return found
    born = own.create_rev if own else 0
    there = seat.keys.holdings_in(ref.run, ref.version, seat.datacenter)
    newest, oldest = _neighbours(there)
    samples = (Sample(there, NEIGHBOURS, before=born), oldest)
    here = (inst for inst, (held, _) in holdings.items() if not distance(held.datacenter, seat))
    by_age = sorted(here, key=lambda inst: holdings[inst][1].create_rev)
    older = [inst for inst in by_age if holdings[inst][1].create_rev < born]
    near = sorted({*older[-NEIGHBOURS:], *by_age[:NEIGHBOURS]})
    # Where nobody is younger, the newest are those before this one.
    is_youngest = by_age[-1:] == [seat.inst]
    seen_before = samples[0] in view.asked or (is_youngest and newest in view.asked)
    readers = [seat.keys.readers_of(ref.run, ref.version, inst) for inst in near]
    is_seen = seen_before and oldest in view.asked
    if not found or not is_seen or not all(map(view.shows, readers)):
        raise Unseen(*samples, *readers)
    return found


def _known(
    view: View,
    seat: Seat,
    ref: VersionRef,
    holdings: Mapping[str, tuple[Holding, Entry]],
    own: Entry | None,
    lost: Collection[str] = (),
) -> dict[str, _Candidate]:
    """Those of `holdings` that could be read from, and whose readers are in view."""
    sources: dict[str, str] = {}  # reader -> whom it reads from
    readers: dict[str, set[str]] = {}
    seen = view.seen(seat.keys.readers_for(ref.run, ref.version))
    for _, (source, reader, _), _ in keyed(seen, k.parse_reader):
        sources[reader] = source
        if reader not in lost:
            readers.setdefault(source, set()).add(reader)
    return {
        inst: _Candidate(
            holding,
            entry,
            len(readers.get(inst, ())),
            _depth(inst, sources),
            distance(holding.datacenter, seat),
        )
        for inst, (holding, entry) in holdings.items()
        if _is_source(seat, ref, inst, holding, entry, own)
        and view.shows(seat.keys.readers_of(ref.run, ref.version, inst))
    }


def _eligible(
    view: View,
    seat: Seat,
    ref: VersionRef,
    candidates: Mapping[str, _Candidate],
    tried: Mapping[str, int],
) -> Mapping[str, _Candidate]:
    """Those that were tried least; of these the near ones, if there is one, else far copies.

    So the oldest holding of a datacenter is its seed: the only one that has no near source.

    Raises:
        Unseen: All are far, or were tried before, and there may be others.
    """
    least = min(tried.get(inst, 0) for inst in candidates)
    fresh = {i: found for i, found in candidates.items() if tried.get(i, 0) == least}
    near = {inst: found for inst, found in fresh.items() if not found.distance}
    if (least or not near) and not _is_whole(view, seat, ref):
        raise Unseen
    return near or _far(fresh)


def _far(candidates: Mapping[str, _Candidate]) -> Mapping[str, _Candidate]:
    """Those to read across a slow link: none that waits for another one, if some do not.

    Full ones come first, and copies before trainers, which would be held up by the link.
    """
    full = {i: found for i, found in candidates.items() if found.holding.state == "full"}
    copies = {i: found for i, found in full.items() if not found.holding.is_original}
    return copies or full or candidates


def _depth(inst: str, sources: Mapping[str, str]) -> int:
    depth = 0
    while (inst := sources.get(inst, "")) and depth < DEPTH_MAX:
        depth += 1
    return depth


def _predicted(
    view: View, seat: Seat, ref: VersionRef, candidates: Mapping[str, _Candidate]
) -> str:
    """The source that no other newcomer should choose now; else the best."""
    suspected = suspects(view, seat.keys)
    unsuspected = {i: found for i, found in candidates.items() if i not in suspected}
    if own := _own_copy(unsuspected, seat):
        return own
    if _is_whole(view, seat, ref):
        choice = _by_count(view, seat, ref, unsuspected)
    else:
        choice = _by_place(view, seat, ref, unsuspected)
    return choice or _best(candidates, suspected)


def _by_count(
    view: View, seat: Seat, ref: VersionRef, candidates: Mapping[str, _Candidate]
) -> str | None:
    """The k-th free candidate, if this is the k-th that is looking for one."""
    own = view.get(seat.holding(ref))
    assert own is not None
    reads = view.within(seat.keys.readers_for(ref.run, ref.version))
    has_source = {reader for _, (_, reader, _), _ in keyed(reads, k.parse_reader)}
    first = _seed_birth(candidates)  # the seed takes none of these
    is_far = any(found.distance for found in candidates.values())
    before = sum(
        first < entry.create_rev < own.create_rev
        and holding.state == "filling"
        and inst not in has_source
        and (is_far or not distance(holding.datacenter, seat))
        for inst, (holding, entry) in seen_holdings(view, seat, ref).items()
    )
    free = [i for i, found in candidates.items() if not found.readers and found.depth < DEPTH_MAX]
    # A full one starts at once.
    free.sort(
        key=lambda inst: (
            candidates[inst].holding.state != "full",
            candidates[inst].entry.create_rev,
        )
    )
    return free[before] if before < len(free) else None


def _seed_birth(candidates: Mapping[str, _Candidate]) -> int:
    """When the oldest of these was born, which fills itself from others; 0: one is full."""
    if any(found.holding.state == "full" for found in candidates.values()):
        return 0
    return min((found.entry.create_rev for found in candidates.values()), default=0)


def _by_place(
    view: View, seat: Seat, ref: VersionRef, candidates: Mapping[str, _Candidate]
) -> str | None:
    """The h-th of those that are older than this replica, from the next one on, if h are full.

    That takes no look at who has found a source already, which among many is a lot to read.
    """
    own = view.get(seat.holding(ref))
    assert own is not None
    heads = sum(found.holding.state == "full" for found in candidates.values())
    older = [i for i, found in candidates.items() if found.entry.create_rev < own.create_rev]
    older.sort(key=lambda inst: candidates[inst].entry.create_rev, reverse=True)
    turn = max(0, min(heads, NEIGHBOURS) - 1)
    return next((i for i in (*older[turn:], *older[:turn]) if not candidates[i].readers), None)


def suspects(view: View, keys: Keys) -> set[str]:
    """The instances from which a transfer failed a moment ago."""
    return {inst for _, inst, _ in keyed(view.within(keys.suspects()), k.parse_suspect)}


def _best(candidates: Mapping[str, _Candidate], suspected: set[str]) -> str:
    """A suspicion is a preference, never a verdict: two flaky readers do not fail a trainer."""
    return min(
        candidates,
        key=lambda inst: (
            inst in suspected,
            candidates[inst].depth >= DEPTH_MAX,
            candidates[inst].readers,
            candidates[inst].holding.state != "full",
            candidates[inst].entry.create_rev,
        ),
    )


def choose_again(
    view: View, seat: Seat, call: Call, tried: Mapping[str, int], lost: SourceLost
) -> Step[str]:
    """Where another source for this rank is, whose last one was `lost`. Others may choose others.

    Raises:
        SourceLost: There is none, or the peers have ended the call.
    """
    ref = version_read(view, seat, call)
    candidates = {
        inst: found
        for inst, found in _candidates(view, seat, ref, {*tried}).items()
        if tried.get(inst, 0) < TRIES_MAX
    }
    if not candidates:
        if not _is_whole(view, seat, ref):
            raise Unseen
        raise lost
    eligible = _eligible(view, seat, ref, candidates, tried)
    best = _best(eligible, suspects(view, seat.keys))
    return Done(k.place(eligible[best].holding.datacenter, best))


def version_read(view: View, seat: Seat, call: Call) -> VersionRef:
    """The version that the group still reads.

    Raises: SeatLost, TorchRosError: It does not; a peer gave up.
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is not None and current.outcome is not None and current.outcome.failure is not None:
        raise current.outcome.failure.error()
    assert call.ref is not None
    return call.ref


def attach_ranges(seat: Seat, call: Call, place: str) -> tuple[Range, ...]:
    ref, keys, source = call.ref, seat.keys, k.inst_at(place)
    assert ref is not None
    return (
        *seat.own,
        one(keys.holding_at(ref.run, ref.version, place)),
        one(seat.holding(ref)),
        one(keys.ready(seat.inst, call.number, seat.rank)),
        one(keys.reader_group(ref.run, ref.version, source, seat.inst)),
        one(keys.reader(ref.run, ref.version, source, seat.inst, seat.rank)),
        keys.shards(source),
    )


def attach(view: View, seat: Seat, call: Call, place: str) -> Step[Source]:
    """Announce that this rank reads from the source there; then learn how to reach its processes.

    Raises:
        SourceLost: The source, or one of its processes, is gone (I7).
    """
    ref, keys = version_read(view, seat, call), seat.keys
    held, source = keys.holding_at(ref.run, ref.version, place), k.inst_at(place)
    entry, own = view.get(held), view.get(seat.holding(ref))
    is_claimed = view.get(keys.reader_group(ref.run, ref.version, source, seat.inst)) is not None
    left = SourceLost(k.replica_of(source), "it left before it was read", 0, 0).orderly()
    if entry is None:
        raise left
    try:
        holding, born = Holding.decode(entry.value, held), entry.create_rev
    except BackendError as error:
        raise SourceLost(k.replica_of(source), str(error), 0, 0) from error
    is_waiting = holding.state == "draining" and is_claimed
    if not (is_waiting or _is_source(seat, ref, source, holding, entry, own)):
        raise left

    learn = partial(learned, source, holding, born)
    key = keys.reader(ref.run, ref.version, source, seat.inst, seat.rank)
    if view.get(key):  # put before, and the reply was lost
        return Done(learn(dict(view.within(keys.shards(source)))))
    # A request that applies late, when this rank is done or has given up, must not leave a record.
    ready = keys.ready(seat.inst, call.number, seat.rank)
    unchanged = (held, seat.holding(ref), ready, key)
    txn = Txn(
        tuple(map(view.unchanged, unchanged)),
        (
            Put(key, _reader(seat, call.number, place).encode(), seat.lease_id),
            Get(keys.shards(source)),
        ),
    )
    return Act(txn, lambda reply: learn(gotten(reply)[0]))


def gotten(reply: Reply) -> list[Mapping[str, Entry]]:
    """The shards of the sources that a transaction attached to, as it got them."""
    return [found for found in reply.results if not isinstance(found, int)]


def learned(inst: str, holding: Holding, born: int, shards: Mapping[str, Entry]) -> Source:
    """The source, once this rank's reader record is there.

    Raises:
        SourceLost: One of its processes is gone (I7).
    """
    found = {rank: s for _, rank, s, _ in readable(shards.items(), k.parse_rank, ShardRecord)}
    records = tuple(found[rank] for rank in range(holding.world_size) if rank in found)
    if len(records) < holding.world_size:
        reason = f"{len(records)} of its {holding.world_size} processes are alive"
        raise SourceLost(k.replica_of(inst), reason, 0, 0)
    is_full = holding.state != "filling"
    return Source(inst, holding.mark, born, is_full, records, holding.call, holding.datacenter)


def another(
    view: View, seat: Seat, call: Call, source: Source, tried: Mapping[str, int]
) -> Step[str]:
    """Where a near source is that comes before `source`, which gives too little; "": nowhere.

    As if `source` were lost, so the order of births holds; but nobody goes far away for speed.
    """
    ref = version_read(view, seat, call)
    candidates = _candidates(view, seat, ref, {*tried, source.inst})
    suspected = suspects(view, seat.keys)
    before = {
        inst: found
        for inst, found in candidates.items()
        if not (found.distance or tried.get(inst) or inst in suspected or inst == source.inst)
        if found.holding.state == "full" or found.entry.create_rev < source.born
    }
    best = _best(before, suspected) if before else ""
    return Done(k.place(before[best].holding.datacenter, best) if best else "")


def step_aside(view: View, seat: Seat, call: Call) -> Step[bool]:
    """Relay nothing in this call any more; False: too few of those that fill here would.

    A seed has no near source, and is never told to.
    """
    ref = version_read(view, seat, call)
    key, rests = seat.holding(ref), {True: 0, False: 0}
    entry = view.get(key)
    if entry is None:
        return Done(value=False)
    for holding, _ in seen_holdings(view, seat, ref).values():
        if holding.state == "filling" and not distance(holding.datacenter, seat):
            rests[not holding.is_relay] += 1
    own = Holding.decode(entry.value, key)
    if own.state != "filling" or not own.is_relay:
        return Done(value=True)
    if rests[True] + 1 > rests[False] - 1:
        return Done(value=False)
    put = Put(key, msgspec.structs.replace(own, is_relay=False).encode(), entry.lease_id)
    return Act(Txn((view.unchanged(seat.group), view.unchanged(key)), (put,)), lambda _: True)


def has_other(
    view: View, seat: Seat, call: Call, source: Source, tried: Mapping[str, int], silent_s: float
) -> Step[bool]:
    """Whether `source`, which has not answered for so long, is to be left for somebody else."""
    ref = version_read(view, seat, call)
    there = {i: found.distance for i, found in _candidates(view, seat, ref).items()}
    is_left = is_to_be_left(view, seat, source, tried, silent_s, there)
    if not (is_left or _is_whole(view, seat, ref)):
        raise Unseen  # far ones may be there
    return Done(is_left)


def is_to_be_left(
    view: View,
    seat: Seat,
    source: Source,
    tried: Mapping[str, int],
    silent_s: float,
    there: Mapping[str, int],
) -> bool:
    """Whether one of those `there`, who are so far away, failed no more often than `source`.

    A far one is better than a near one only if that cannot be thought to be slow.
    """
    others = there.keys() - {source.inst} - suspects(view, seat.keys)
    farthest = max(distance(source.datacenter, seat), int(silent_s > FAR_SILENCE_S))
    tries = tried.get(source.inst, 0)
    return any(tried.get(i, 0) <= tries and there[i] <= farthest for i in others)
