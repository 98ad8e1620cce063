"""Whom a replica reads from: birth order is the topology (docs/PROTOCOL.md#replicate). Pure.

A burst forms chains in which each source feeds one reader. TensorHub calls it a relay, and has a
server decide it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch_ros.errors import BackendError, SourceLost
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, nobody, readable
from torch_ros.protocol.records import NUMBER_MAX, Call, Holding, Reader, ShardRecord, VersionRef
from torch_ros.protocol.seat import Seat, call_now, find, group_txn, own_group, version_read
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
LEAVES = 3  # that get as much of a source as one that is not slow
EVER = NUMBER_MAX  # a revision after all others


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
    is_original: bool = False  # the publisher's own tensors

    @property
    def insts(self) -> tuple[str, str]:
        """Its name, and the one under which the same processes offer the same when it has ended."""
        return self.inst, k.lingering_of(self.inst, self.call)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A holding that this replica could read from, with all that a choice depends on."""

    holding: Holding
    born: int  # the revision that created it, by which all are ordered
    readers: int
    depth: int  # how many hops away a source is that reads from nobody
    distance: int  # 0: near

    @property
    def is_full(self) -> bool:
        return self.holding.state == "full"


Candidates = Mapping[str, Candidate]  # by instance, as the next
Seen = Mapping[str, tuple[Holding, int]]  # holdings, and the revisions that created them


def distance(datacenter: str, seat: Seat) -> int:
    """How far away a replica is from a process: nearer sources are preferred."""
    return int(datacenter != seat.datacenter)


def source_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    """All that a source is chosen from, where few replicas have the version."""
    some = map(sample, _holdings_and_readers(seat, ref))
    return (*seat.own, one(seat.holding(ref)), *some, seat.keys.suspects())


def _holdings_and_readers(seat: Seat, ref: VersionRef) -> tuple[Range, Range]:
    keys = seat.keys
    return keys.holdings_of(ref.run, ref.version), keys.readers_for(ref.run, ref.version)


def choice_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    """As `source_ranges`, in the transaction that makes the own holding, which is the newest."""
    return (*source_ranges(seat, ref), *_newest_and_oldest(near_range(seat, ref)))


def _newest_and_oldest(here: Range) -> tuple[Sample, Sample]:
    """Samples of the holdings before one that is just made, and that one; and of the oldest."""
    return Sample(here, NEIGHBOURS + 1), Sample(here, NEIGHBOURS, is_oldest=True)


def seen_holdings(view: View, seat: Seat, ref: VersionRef) -> Seen:
    """The holdings of a number that are in view, with the revisions that created them."""
    found = legible.holdings(view.seen(seat.keys.holdings_of(ref.run, ref.version)))
    return {where.inst: (holding, entry.create_rev) for _, where, holding, entry in found}


def near_range(seat: Seat, ref: VersionRef) -> Range:
    """The holdings of that version in the own datacenter."""
    return seat.keys.holdings_in(ref.run, ref.version, seat.datacenter)


def seen_near(view: View, seat: Seat, ref: VersionRef) -> dict[str, Holding]:
    """The holdings of this content in the own datacenter, as far as they were seen."""
    found = legible.holdings(view.seen(near_range(seat, ref)))
    return {where.inst: holding for _, where, holding, _ in found if holding.uid == ref.uid}


def shows_whole(view: View, seat: Seat, ref: VersionRef) -> bool:
    """Whether all holdings and readers are in view, so that who is not seen is not there."""
    return all(map(view.shows, _holdings_and_readers(seat, ref)))


def suspects(view: View, keys: Keys) -> set[str]:
    """The instances from which a transfer failed a moment ago."""
    return {inst for _, inst, _ in keyed(view.within(keys.suspects()), k.parse_suspect)}


def who_knows(view: View, seat: Seat, offer: AvailableVersion) -> list[str]:
    """The holders that can say what a version contains: near ones, then the seed here, far ones.

    The seed of a datacenter is the first there that fills: it knows as much, and is near.
    """
    full = {inst: distance(held.datacenter, seat) for inst, held in sorted(offer.holdings.items())}
    near = [inst for inst, is_far in full.items() if not is_far]
    far = [inst for inst, is_far in full.items() if is_far]
    seeds = [
        (born, inst)
        for inst, (held, born) in seen_holdings(view, seat, offer.ref).items()
        if is_relaying(held) and held.uid == offer.ref.uid
        if not distance(held.datacenter, seat) and not k.is_of(inst, seat.inst)
    ]
    seed = [inst for _, inst in sorted(seeds)[:1]] if far else []  # else near ones are enough
    return [*near, *seed, *far]


def is_relaying(holding: Holding) -> bool:
    """Whether others may read the part that is there."""
    return holding.state == "filling" and holding.is_relay


def _is_source(
    seat: Seat, ref: VersionRef, inst: str, holding: Holding, born: int, before: int
) -> bool:
    """Whether `inst` may be read from: full, or a relay that was created before that revision."""
    if holding.uid != ref.uid or k.is_of(inst, seat.inst):
        return False
    return holding.state == "full" or (is_relaying(holding) and born < before)


def born_before(view: View, seat: Seat, call: Call) -> int:
    """The revision `before`: only relays created before it may be read from in this call.

    It is the own birth: if each of two relays could read from the other, both would wait for ever.
    For a leaf it is `EVER`: nobody reads from a leaf, so it may read from younger ones too.
    """
    assert call.ref is not None
    own = view.get(seat.holding(call.ref))
    if own is None:
        return 0  # no relay at all: without a holding there is no order
    return EVER if seat.leaves.is_leaf(seat, call) else own.create_rev


def candidates_of(
    view: View, seat: Seat, ref: VersionRef, before: int, lost: Collection[str] = ()
) -> Candidates:
    """Everybody who could be read from; among many, the next older ones and the oldest.

    Those that this call has `lost` count as nobody's readers: what they read from is free again.

    Raises: Unseen: Not all of those, or of their readers, are in view: it names what to look at.
    """
    holdings = seen_holdings(view, seat, ref)
    found = _known(view, seat, ref, holdings, before, lost)
    if shows_whole(view, seat, ref):
        return found
    neighbours, are_seen = _neighbours(view, seat, ref, holdings, before)
    if not (found and are_seen):
        raise Unseen(*neighbours)
    return found


def _neighbours(
    view: View, seat: Seat, ref: VersionRef, holdings: Seen, before: int
) -> tuple[Ranges, bool]:
    """The near holdings that a choice among many is made from, with their readers; are all in view?

    The next ones born `before` this replica, and the oldest: where all take the next older one,
    each is read by few, and the oldest are full.
    """
    here = near_range(seat, ref)
    newest, oldest = _newest_and_oldest(here)
    next_older = newest if before == EVER else Sample(here, NEIGHBOURS, before=before)
    held_here = {i: born for i, (it, born) in holdings.items() if not distance(it.datacenter, seat)}
    by_age = sorted(held_here, key=lambda inst: held_here[inst])
    older = [inst for inst in by_age if held_here[inst] < before]
    near = {*older[-NEIGHBOURS:], *by_age[:NEIGHBOURS]}
    readers = [seat.keys.readers_of(ref.run, ref.version, inst) for inst in sorted(near)]
    # If nobody is younger, the newest, which `choice_ranges` has, are those before this one.
    is_youngest = by_age[-1:] == [seat.inst]
    has_older = next_older in view.asked or (is_youngest and newest in view.asked)
    are_seen = has_older and oldest in view.asked and all(map(view.shows, readers))
    return (next_older, oldest, *readers), are_seen


def _known(
    view: View, seat: Seat, ref: VersionRef, holdings: Seen, before: int, lost: Collection[str]
) -> Candidates:
    """Those of `holdings` that could be read from, and whose readers are in view.

    Leaves take little of a source: for another leaf, LEAVES of them count as one reader; for others
    none does.
    """
    seen = keyed(view.seen(seat.keys.readers_for(ref.run, ref.version)), k.parse_reader)
    reads = dict.fromkeys((source, who, _is_of_leaf(entry)) for _, (source, who, _), entry in seen)
    source_of = {who: source for source, who, _ in reads}
    readers = Counter((source, is_leaf) for source, who, is_leaf in reads if who not in lost)
    few = LEAVES if before == EVER else NUMBER_MAX  # so many leaves count as one: never so many
    return {
        inst: Candidate(
            holding,
            born,
            readers[inst, False] + readers[inst, True] // few,
            _depth(inst, source_of),
            distance(holding.datacenter, seat),
        )
        for inst, (holding, born) in holdings.items()
        if _is_source(seat, ref, inst, holding, born, before)
        and view.shows(seat.keys.readers_of(ref.run, ref.version, inst))
    }


def _is_of_leaf(reader: Entry) -> bool:
    """Whether the reader's record says that it is a leaf; if it cannot be read, it is none."""
    try:
        return Reader.decode(reader.value, "").is_leaf
    except BackendError:
        return False


def _depth(inst: str, source_of: Mapping[str, str]) -> int:
    """How many hops `inst` is from one that reads from nobody; DEPTH_MAX: so many, or more."""
    depth = 0
    while (inst := source_of.get(inst, "")) and depth < DEPTH_MAX:
        depth += 1
    return depth


def eligible_of(
    view: View, seat: Seat, ref: VersionRef, candidates: Candidates, tried: Mapping[str, int]
) -> Candidates:
    """Those that this call has tried least; of these the near ones, if there are any, else `_far`.

    So the oldest holding of a datacenter is its seed: the only one that has no near source.

    Raises: Unseen: All in view are far, or were tried before, and there may be others.
    """
    least = min(tried.get(inst, 0) for inst in candidates)
    fresh = {i: found for i, found in candidates.items() if tried.get(i, 0) == least}
    near = {inst: found for inst, found in fresh.items() if not found.distance}
    if (least or not near) and not shows_whole(view, seat, ref):
        raise Unseen
    return near or _far(fresh)


def _far(candidates: Candidates) -> Candidates:
    """Those to read across a slow link: full ones, if there are any, which wait for nobody.

    Copies come before trainers, which would be held up by the link.
    """
    full = {i: found for i, found in candidates.items() if found.is_full}
    copies = {i: found for i, found in full.items() if not found.holding.is_original}
    return copies or full or candidates


def _first_choice(
    view: View, seat: Seat, ref: VersionRef, own_birth: int, candidates: Candidates
) -> str:
    """The source that no other newcomer should choose now; else the best.

    Newcomers of a burst see the same free sources: without an order among them all would claim the
    same one, and all but one have to choose again. A leaf stands in no order: nobody reads from it,
    so it may read from younger ones, too, and `own_birth` is `EVER`.
    """
    suspected = suspects(view, seat.keys)
    unsuspected = {i: found for i, found in candidates.items() if i not in suspected}
    if preferred := _preferred(unsuspected, seat):
        return preferred
    if own_birth == EVER:
        return best_of(candidates, suspected, is_leaf=True)
    if shows_whole(view, seat, ref):
        choice = _kth_free(view, seat, ref, own_birth, unsuspected)
    else:
        choice = _by_place(own_birth, unsuspected)
    return choice or best_of(candidates, suspected)


def _preferred(candidates: Candidates, seat: Seat) -> str:
    """The full copy that the replica `seat.prefers` has, to be read first; "": there is none."""
    full = (i for i, found in candidates.items() if found.is_full)
    return next((inst for inst in full if k.replica_of(inst) == seat.prefers), "")


def _kth_free(
    view: View, seat: Seat, ref: VersionRef, own_birth: int, candidates: Candidates
) -> str:
    """The k-th free candidate, if k - 1 older newcomers look for one: each takes another.

    "": not enough are free. Full ones, which start at once, are taken first, then older ones.
    `candidates` are all near or all far.
    """
    free = sorted(
        (not found.is_full, found.born, inst)
        for inst, found in candidates.items()
        if not found.readers and found.depth < DEPTH_MAX
    )
    older = _older_newcomers(view, seat, ref, own_birth, candidates)
    return free[older][-1] if older < len(free) else ""


def _older_newcomers(
    view: View, seat: Seat, ref: VersionRef, own_birth: int, candidates: Candidates
) -> int:
    """How many older newcomers, relays that read from nobody yet, look for one of these, too.

    If none of these is full, the oldest is the seed, and only newcomers younger than that count:
    the seed reads from afar, and takes none of these.
    """
    reads = view.within(seat.keys.readers_for(ref.run, ref.version))
    has_source = {reader for _, (_, reader, _), _ in keyed(reads, k.parse_reader)}
    has_full = any(found.is_full for found in candidates.values())
    oldest_birth = min((found.born for found in candidates.values()), default=0)
    # For near candidates only newcomers of this datacenter compete, for far ones all of them.
    are_far = any(found.distance for found in candidates.values())
    return sum(
        born < own_birth
        and (has_full or born > oldest_birth)
        and is_relaying(holding)  # a leaf takes no place
        and inst not in has_source
        and (are_far or not distance(holding.datacenter, seat))
        for inst, (holding, born) in seen_holdings(view, seat, ref).items()
    )


def _by_place(own_birth: int, candidates: Candidates) -> str:
    """A free candidate by its place in the order of births; "": none is free.

    From h full ones come h chains, in which newcomers stand in turn: the h-th before this replica,
    from the next older one on, is in the same chain. If that has a reader already, an older one
    without is taken, else a younger one. Unlike `_kth_free` this does not look who has found a
    source: among many that is a lot to read.
    """
    older = [i for i, found in candidates.items() if found.born < own_birth]
    older.sort(key=lambda inst: candidates[inst].born, reverse=True)
    # The view has no more than NEIGHBOURS of the next older ones.
    chains = min(sum(found.is_full for found in candidates.values()), NEIGHBOURS)
    first = max(0, chains - 1)  # the h-th before this replica, counted from 0
    turns = (*older[first:], *older[:first])
    return next((inst for inst in turns if not candidates[inst].readers), "")


def best_of(candidates: Candidates, suspected: set[str], *, is_leaf: bool = False) -> str:
    """The least read of those that are not suspected, nor at the end of a long chain.

    If all are, one of these: two flaky readers shall not fail a trainer. For a leaf it is the
    youngest of the least read: in a chain the last one, for whom nobody waits.
    """

    def cost(inst: str) -> tuple[int, ...]:
        it = candidates[inst]
        if is_leaf:
            return (inst in suspected, it.readers, -it.born)
        return (inst in suspected, it.depth >= DEPTH_MAX, it.readers, not it.is_full, it.born)

    return min(candidates, key=cost)


def _idle(view: View, seat: Seat, ref: VersionRef, eligible: Candidates, most: int) -> list[str]:
    """Idle near sources to read from at the same time: `most` at most, and the older half at most.

    Empty if anybody else is seen to fill: each should have a source of its own first.
    """
    holdings = seen_holdings(view, seat, ref)
    if any(held.state == "filling" and inst != seat.inst for inst, (held, _) in holdings.items()):
        return []
    suspected = suspects(view, seat.keys)
    idle = sorted(
        (found.born, inst)
        for inst, found in eligible.items()
        if not found.readers and not found.distance and inst not in suspected
    )
    near = [inst for _, inst in idle]
    if preferred := _preferred(eligible, seat):
        return [preferred] if preferred in near else []
    half = -(-len(near) // 2)
    return near[: min(half, most, SOURCES_MAX)]


@dataclass(frozen=True, slots=True)
class Offered:
    """A holding that this rank may read from."""

    key: str
    inst: str
    holding: Holding
    born: int


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

    None: nobody has the version any more, and the decision is undone: decide again.

    Args:
        avoided: Sources whose bytes were wrong a moment ago: others come first, even far ones, and
            before those that still fill, since these may be filling themselves with such bytes.
        sources_max: How many idle ones to claim, if nobody else is looking.
        chosen: Is told the instances before they are claimed: if the reply is lost, reader records
            may be there, which have to be deleted if the call fails.
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is None:  # undone, by the rank that decided it
        return Done(None)
    if current.sources or current.outcome is not None:
        return Done(Claimed(current))
    if current.by != seat.rank:
        return Wait(f"rank {current.by} chooses a source", seat.own)
    assert current.ref is not None
    before = born_before(view, seat, current)
    candidates = candidates_of(view, seat, current.ref, before)
    if not candidates:  # nobody has it any more
        return Act(seat.taken_back(view, current), lambda _: None)
    if (relaying := seat.leaves.ended(view, seat, current)) is not None:
        return Act(relaying, None)  # it is no leaf any more, and chooses as a relay
    if avoided:
        full = {inst: found for inst, found in candidates.items() if found.is_full}
        candidates = full if full.keys() - {*avoided} else candidates  # if any other is full
    eligible = eligible_of(view, seat, current.ref, candidates, dict.fromkeys(avoided, 1))
    idle = _idle(view, seat, current.ref, eligible, sources_max) if before != EVER else []
    insts = idle or [_first_choice(view, seat, current.ref, before, eligible)]
    for inst in insts:
        chosen(inst)
    return _claiming(view, seat, current, {inst: eligible[inst] for inst in insts})


def _claiming(view: View, seat: Seat, call: Call, chosen: Candidates) -> Act[Claimed | None]:
    """Claim these sources, and attach this rank to them.

    In one transaction: a request of its own for this rank's reader record could arrive late, when
    the call has gone on, and the record would hold its source up.
    """
    ref, keys = call.ref, seat.keys
    assert ref is not None
    # If there are several, a newcomer that has come since would count on the second.
    guards: list[Guard] = []
    if len(chosen) > 1:
        guards.append(NoneNewer(keys.holdings_of(ref.run, ref.version), view.rev))
    ops: list[Op] = []
    offers: dict[str, Offered] = {}  # by place
    is_leaf = seat.leaves.is_leaf(seat, call)
    for inst, found in chosen.items():
        place = k.place(found.holding.datacenter, inst)
        is_free = not (is_leaf or found.readers)
        own_guards, claim_put = claim_of(view, seat, call, place, is_free=is_free)
        guards += own_guards
        mine, _ = reads_of(seat, ref, inst)
        ops += (claim_put, Put(mine, claim_put.value, seat.lease_id), Get(keys.shards(inst)))
        held = keys.holding_at(ref.run, ref.version, place)
        offers[place] = Offered(held, inst, found.holding, found.born)
    with_sources = call.with_sources(*offers)

    def claimed(reply: Reply) -> Claimed:
        got = zip(offers.items(), _shards_got(reply), strict=True)
        # Each is called when it is attached to: it raises if that source is lost.
        attached = {place: partial(source_from, offer, shards) for (place, offer), shards in got}
        return Claimed(with_sources, attached)

    return Act(group_txn(view, seat, with_sources, tuple(guards), tuple(ops)), claimed)


def claim_of(
    view: View, seat: Seat, call: Call, place: str, *, is_free: bool
) -> tuple[tuple[Guard, ...], Put]:
    """The guards under which this group may claim the source there, and the record that does."""
    anchor, keys, source = own_group(view, seat).lease_id, seat.keys, k.inst_at(place)
    ref = call.ref
    assert ref is not None
    _, key = reads_of(seat, ref, source)
    guards: list[Guard] = [view.unchanged(keys.holding_at(ref.run, ref.version, place))]
    if is_free:  # it was chosen because nobody reads from it, and that has to be true still
        guards.append(nobody(view, keys.readers_of(ref.run, ref.version, source)))
    return tuple(guards), Put(key, _reader(seat, call, place).encode(), anchor)


def reads_of(seat: Seat, ref: VersionRef, source: str) -> tuple[str, str]:
    """The keys of the records by which this rank, and its group, read from that source."""
    mine = seat.keys.reader(ref.run, ref.version, source, seat.inst, seat.rank)
    return mine, seat.keys.reader_group(ref.run, ref.version, source, seat.inst)


def _reader(seat: Seat, call: Call, place: str) -> Reader:
    """The record of this replica as a reader there, which says what it costs the source."""
    is_far = place != k.place(seat.datacenter, k.inst_at(place))
    return Reader(call.number, is_far=is_far, is_leaf=seat.leaves.is_leaf(seat, call))


def attach_ranges(seat: Seat, ref: VersionRef, place: str, *keys: str) -> tuple[Range, ...]:
    """All that `offered` and `attach` are decided from, and these `keys`."""
    held = seat.keys.holding_at(ref.run, ref.version, place)
    return (*map(one, (held, *keys)), seat.keys.shards(k.inst_at(place)))


def offered(
    view: View, seat: Seat, ref: VersionRef, place: str, before: int = 0, *, waits: bool = False
) -> Offered:
    """The holding there, if it is full, or a relay that was created before that revision.

    Args:
        waits: It waits for this rank or group, whose record it has: then it may be draining.

    Raises: SourceLost: It does not offer this content any more (I7).
    """
    held, source = seat.keys.holding_at(ref.run, ref.version, place), k.inst_at(place)
    entry = view.get(held)
    left = SourceLost(k.replica_of(source), "it left before it was read").orderly()
    if entry is None:
        raise left
    try:
        holding = Holding.decode(entry.value, held)
    except BackendError as error:
        raise SourceLost(k.replica_of(source), str(error)) from error
    is_waiting = waits and holding.state == "draining" and holding.uid == ref.uid
    if not (is_waiting or _is_source(seat, ref, source, holding, entry.create_rev, before)):
        raise left
    return Offered(held, source, holding, entry.create_rev)


def attach(
    view: View, seat: Seat, offer: Offered, reader: Put | None = None, own: Sequence[str] = ()
) -> Step[Source]:
    """Announce by `reader` that this rank reads from a source; then learn how to reach it.

    Args:
        reader: The record to put; None: it is there already, or this read is not announced.
        own: Keys of this rank's that must not have changed, beside the source's holding.

    Raises: SourceLost: One of its processes is gone (I7).
    """
    shards = seat.keys.shards(offer.inst)
    if reader is None:
        return Done(source_from(offer, dict(view.within(shards))))
    unchanged = tuple(map(view.unchanged, (offer.key, *own, reader.key)))
    ops = (reader, Get(shards))
    return Act(Txn(unchanged, ops), lambda reply: source_from(offer, _shards_got(reply)[0]))


def claimed_ranges(seat: Seat, call: Call, place: str) -> tuple[Range, ...]:
    """All that `attach_claimed` is decided from."""
    assert call.ref is not None
    ready = seat.keys.ready(seat.inst, call.number, seat.rank)
    mine, claim = reads_of(seat, call.ref, k.inst_at(place))
    own = (seat.holding(call.ref), ready, claim, mine)
    return (*seat.own, *attach_ranges(seat, call.ref, place, *own))


def attach_claimed(view: View, seat: Seat, call: Call, place: str) -> Step[Source]:
    """As `attach`, of a rank that reads from `place` in `call`: by its group's claim, or alone."""
    ref, current = version_read(view, seat, call), call_now(view, seat, call)
    mine, claim = reads_of(seat, ref, k.inst_at(place))
    is_put = view.get(mine) is not None  # before, and the reply was lost
    # A source that drains waits for those that have a record at it.
    waits = is_put or view.get(claim) is not None
    offer = offered(view, seat, ref, place, born_before(view, seat, current), waits=waits)
    if is_put:
        return attach(view, seat, offer)  # announced already: only learn how to reach it
    reader = Put(mine, _reader(seat, current, place).encode(), seat.lease_id)
    # A request that applies late, when this rank is done or has given up, must not leave a record.
    own = (seat.holding(ref), seat.keys.ready(seat.inst, call.number, seat.rank))
    return attach(view, seat, offer, reader, own)


def _shards_got(reply: Reply) -> list[Mapping[str, Entry]]:
    """The shards of the sources that a transaction attached to, in its order."""
    return [found for found in reply.results if not isinstance(found, int)]


def source_from(offer: Offered, shards: Mapping[str, Entry]) -> Source:
    """The source, by the `shards` that were read when this rank's reader record was put.

    Raises: SourceLost: One of its processes is gone (I7).
    """
    holding = offer.holding
    found = {rank: s for _, rank, s, _ in readable(shards.items(), k.parse_rank, ShardRecord)}
    records = tuple(found[rank] for rank in range(holding.world_size) if rank in found)
    if len(records) < holding.world_size:
        reason = f"{len(records)} of its {holding.world_size} processes are alive"
        raise SourceLost(k.replica_of(offer.inst), reason)
    is_full, call, datacenter = holding.state != "filling", holding.call, holding.datacenter
    return Source(
        offer.inst,
        holding.mark,
        offer.born,
        is_full,
        records,
        call,
        datacenter,
        holding.is_original,
    )
