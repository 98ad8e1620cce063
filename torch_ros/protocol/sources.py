"""Whom a replica reads from: birth order is the topology (docs/PROTOCOL.md#replicate). Pure.

A burst forms chains in which each source feeds one reader. TensorHub calls it a relay, and has a
server decide it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch_ros.errors import BackendError, SourceLost
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, nobody, readable
from torch_ros.protocol.records import (
    NUMBER_MAX,
    Call,
    Holding,
    Reader,
    ShardRecord,
    VersionRef,
)
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

    None: decide again, as nobody has the version any more, or it relays after all. That rank
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
    before = born_before(view, seat, current)
    candidates = candidates_of(view, seat, ref, before)
    if not candidates:
        return Act(seat.taken_back(view, current), lambda _: None)
    if (again := seat.leaves.ended(view, seat, current)) is not None:
        return Act(again, lambda _: None)
    if avoided:
        full = {i: found for i, found in candidates.items() if found.holding.state == "full"}
        candidates = candidates if full.keys() <= {*avoided} else full
    eligible = eligible_of(view, seat, ref, candidates, dict.fromkeys(avoided, 1))
    is_leaf = before == EVER
    insts = [] if is_leaf else _idle(view, seat, ref, eligible, sources_max)
    insts = insts or [_first_choice(view, seat, ref, eligible, is_leaf=is_leaf)]
    places = [k.place(eligible[inst].holding.datacenter, inst) for inst in insts]
    guards = _still_alone(view, seat, ref) if len(insts) > 1 else []
    ops: list[Op] = []
    for inst, place in zip(insts, places, strict=True):
        chosen(inst)
        is_free = not (is_leaf or eligible[inst].readers)
        some, claimed = claim_of(view, seat, current, place, is_free=is_free)
        own = seat.keys.reader(ref.run, ref.version, inst, seat.inst, seat.rank)
        reader = Put(own, claimed.value, seat.lease_id)
        guards += some
        ops += (claimed, reader, Get(seat.keys.shards(inst)))
    ended = current.with_sources(*places)

    attached = partial(_attached, ended, [(inst, eligible[inst]) for inst in insts])
    return Act(group_txn(view, seat, ended, tuple(guards), tuple(ops)), attached)


def _attached(ended: Call, claimed: Sequence[tuple[str, Candidate]], reply: Reply) -> Claimed:
    found = zip(ended.sources, claimed, gotten(reply), strict=True)
    return Claimed(
        ended,
        {
            place: partial(learned, inst, its.holding, its.entry.create_rev, shards)
            for place, (inst, its), shards in found
        },
    )


def claim_of(
    view: View, seat: Seat, call: Call, place: str, *, is_free: bool
) -> tuple[tuple[Guard, ...], Put]:
    """The record that claims the source there, and the guards under which it may."""
    anchor, keys, source = own_group(view, seat).lease_id, seat.keys, k.inst_at(place)
    ref = call.ref
    assert ref is not None
    key = keys.reader_group(ref.run, ref.version, source, seat.inst)
    guards: list[Guard] = [view.unchanged(keys.holding_at(ref.run, ref.version, place))]
    if is_free:
        guards.append(nobody(view, keys.readers_of(ref.run, ref.version, source)))
    return tuple(guards), Put(key, _reader(seat, call, place).encode(), anchor)


def _reader(seat: Seat, call: Call, place: str) -> Reader:
    is_far = place != k.place(seat.datacenter, k.inst_at(place))
    return Reader(call.number, is_far=is_far, is_leaf=seat.leaves.is_leaf(seat, call))


def _idle(
    view: View, seat: Seat, ref: VersionRef, eligible: Mapping[str, Candidate], most: int
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
    if preferred := _preferred(eligible, seat):
        return [preferred] if preferred in near else []
    near.sort(key=lambda inst: eligible[inst].entry.create_rev)
    return near[: min(-(-len(near) // 2), most, SOURCES_MAX)]


def _still_alone(view: View, seat: Seat, ref: VersionRef) -> list[Guard]:
    """Nobody has come since, who would count on the second of several sources."""
    return [NoneNewer(seat.keys.holdings_of(ref.run, ref.version), view.rev)]


def _preferred(candidates: Mapping[str, Candidate], seat: Seat) -> str:
    """The full copy of the replica that this one prefers; "": there is none."""
    full = (i for i, found in candidates.items() if found.holding.state == "full")
    return next((inst for inst in full if k.replica_of(inst) == seat.prefers), "")


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


def is_relaying(holding: Holding) -> bool:
    """Whether others may read the part that is there."""
    return holding.state == "filling" and holding.is_relay


def _is_source(
    seat: Seat, ref: VersionRef, inst: str, holding: Holding, entry: Entry, before: int
) -> bool:
    """Whether it may be read from: full, or a relay that was created before that revision."""
    if holding.uid != ref.uid or k.is_of(inst, seat.inst):
        return False
    return holding.state == "full" or (is_relaying(holding) and entry.create_rev < before)


def born_before(view: View, seat: Seat, call: Call) -> int:
    """The revision before which a relay was created that may be read from in this call.

    A leaf reads from younger ones too: nobody reads from it, so that makes no circle.
    """
    assert call.ref is not None
    own = view.get(seat.holding(call.ref))
    if own is None:
        return 0
    return EVER if seat.leaves.is_leaf(seat, call) else own.create_rev


def shows_whole(view: View, seat: Seat, ref: VersionRef) -> bool:
    keys = seat.keys
    ranges = (keys.holdings_of(ref.run, ref.version), keys.readers_for(ref.run, ref.version))
    return all(map(view.shows, ranges))


def candidates_of(
    view: View, seat: Seat, ref: VersionRef, before: int, lost: Collection[str] = ()
) -> dict[str, Candidate]:
    """Everybody who could be read from; among many, the next older ones and the oldest.

    A leaf, among many, has the youngest and the oldest.

    Args:
        lost: The sources that this call has lost. They count as nobody's readers.

    Raises:
        Unseen: It takes a look at those first, and at their readers.
    """
    holdings = seen_holdings(view, seat, ref)
    found = _known(view, seat, ref, holdings, before, lost)
    if shows_whole(view, seat, ref):
        return found
    _require_neighbours_seen(view, seat, ref, before, holdings, is_empty=not found)
    return found


def _require_neighbours_seen(
    view: View,
    seat: Seat,
    ref: VersionRef,
    before: int,
    holdings: Mapping[str, tuple[Holding, Entry]],
    *,
    is_empty: bool,
) -> None:
    """Among many: the next older holdings and the oldest, and who reads from them.

    Raises: Unseen: The view lacks some; or nobody was found in it.
    """
    there = seat.keys.holdings_in(ref.run, ref.version, seat.datacenter)
    newest, oldest = _neighbours(there)
    older_ones = newest if before == EVER else Sample(there, NEIGHBOURS, before=before)
    here = (inst for inst, (held, _) in holdings.items() if not distance(held.datacenter, seat))
    by_age = sorted(here, key=lambda inst: holdings[inst][1].create_rev)
    older = [inst for inst in by_age if holdings[inst][1].create_rev < before]
    near = {*older[-NEIGHBOURS:], *by_age[:NEIGHBOURS]}
    readers = [seat.keys.readers_of(ref.run, ref.version, inst) for inst in sorted(near)]
    # Where nobody is younger, the newest are those before this one.
    is_youngest = by_age[-1:] == [seat.inst]
    has_older = older_ones in view.asked or (is_youngest and newest in view.asked)
    has_all = has_older and oldest in view.asked and all(map(view.shows, readers))
    if is_empty or not has_all:
        raise Unseen(older_ones, oldest, *readers)


def _known(
    view: View,
    seat: Seat,
    ref: VersionRef,
    holdings: Mapping[str, tuple[Holding, Entry]],
    before: int,
    lost: Collection[str],
) -> dict[str, Candidate]:
    """Those of `holdings` that could be read from, and whose readers are in view.

    Leaves are slow. They count as readers for other leaves only, and some of them as one.
    """
    sources: dict[str, str] = {}  # reader -> whom it reads from
    readers: dict[str, set[str]] = {}
    leaves: dict[str, set[str]] = {}
    seen = view.seen(seat.keys.readers_for(ref.run, ref.version))
    for _, (source, reader, _), entry in keyed(seen, k.parse_reader):
        sources[reader] = source
        if reader not in lost:
            there = leaves if _is_of_leaf(entry) else readers
            there.setdefault(source, set()).add(reader)
    few = LEAVES if before == EVER else NUMBER_MAX
    return {
        inst: Candidate(
            holding,
            entry,
            len(readers.get(inst, ())) + len(leaves.get(inst, ())) // few,
            _depth(inst, sources),
            distance(holding.datacenter, seat),
        )
        for inst, (holding, entry) in holdings.items()
        if _is_source(seat, ref, inst, holding, entry, before)
        and view.shows(seat.keys.readers_of(ref.run, ref.version, inst))
    }


def _is_of_leaf(reader: Entry) -> bool:
    try:
        return Reader.decode(reader.value, "").is_leaf
    except BackendError:
        return False


def eligible_of(
    view: View,
    seat: Seat,
    ref: VersionRef,
    candidates: Mapping[str, Candidate],
    tried: Mapping[str, int],
) -> Mapping[str, Candidate]:
    """Those that were tried least; of these the near ones, if there is one, else far copies.

    So the oldest holding of a datacenter is its seed: the only one that has no near source.

    Raises:
        Unseen: All are far, or were tried before, and there may be others.
    """
    least = min(tried.get(inst, 0) for inst in candidates)
    fresh = {i: found for i, found in candidates.items() if tried.get(i, 0) == least}
    near = {inst: found for inst, found in fresh.items() if not found.distance}
    if (least or not near) and not shows_whole(view, seat, ref):
        raise Unseen
    return near or _far(fresh)


def _far(candidates: Mapping[str, Candidate]) -> Mapping[str, Candidate]:
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


def _first_choice(
    view: View,
    seat: Seat,
    ref: VersionRef,
    candidates: Mapping[str, Candidate],
    *,
    is_leaf: bool,
) -> str:
    """The source that no other newcomer should choose now; else the best."""
    suspected = suspects(view, seat.keys)
    unsuspected = {i: found for i, found in candidates.items() if i not in suspected}
    if preferred := _preferred(unsuspected, seat):
        return preferred
    if is_leaf:
        return leaf_place(candidates, suspected)
    if shows_whole(view, seat, ref):
        choice = _by_count(view, seat, ref, unsuspected)
    else:
        choice = _by_place(view, seat, ref, unsuspected)
    return choice or best_of(candidates, suspected)


def _by_count(
    view: View, seat: Seat, ref: VersionRef, candidates: Mapping[str, Candidate]
) -> str | None:
    """The k-th free candidate, if k - 1 older newcomers look for one: each takes another."""
    own = view.get(seat.holding(ref))
    assert own is not None
    reads = view.within(seat.keys.readers_for(ref.run, ref.version))
    has_source = {reader for _, (_, reader, _), _ in keyed(reads, k.parse_reader)}
    first = _seed_birth(candidates)  # the seed takes none of these
    is_far = any(found.distance for found in candidates.values())
    older_newcomers = sum(
        first < entry.create_rev < own.create_rev
        and is_relaying(holding)  # a leaf takes no place
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
    return free[older_newcomers] if older_newcomers < len(free) else None


def _seed_birth(candidates: Mapping[str, Candidate]) -> int:
    """When the oldest of these was born, which fills itself from others; 0: one is full."""
    if any(found.holding.state == "full" for found in candidates.values()):
        return 0
    return min((found.entry.create_rev for found in candidates.values()), default=0)


def _by_place(
    view: View, seat: Seat, ref: VersionRef, candidates: Mapping[str, Candidate]
) -> str | None:
    """The h-th of those that are older than this replica, from the next one on, if h are full.

    From h full ones come h chains, which take turns by age: who is h older stands in the same one.
    That takes no look at who has found a source already, which among many is a lot to read.
    """
    own = view.get(seat.holding(ref))
    assert own is not None
    heads = sum(found.holding.state == "full" for found in candidates.values())
    older = [i for i, found in candidates.items() if found.entry.create_rev < own.create_rev]
    older.sort(key=lambda inst: candidates[inst].entry.create_rev, reverse=True)
    back = max(0, min(heads, NEIGHBOURS) - 1)
    return next((i for i in (*older[back:], *older[:back]) if not candidates[i].readers), None)


def suspects(view: View, keys: Keys) -> set[str]:
    """The instances from which a transfer failed a moment ago."""
    return {inst for _, inst, _ in keyed(view.within(keys.suspects()), k.parse_suspect)}


def best_of(candidates: Mapping[str, Candidate], suspected: set[str]) -> str:
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


def leaf_place(candidates: Mapping[str, Candidate], suspected: set[str]) -> str:
    """The youngest of those that are read least: in a chain the last one, whom nobody reads."""
    return min(
        candidates,
        key=lambda inst: (
            inst in suspected,
            candidates[inst].readers,
            -candidates[inst].entry.create_rev,
        ),
    )


def attach_ranges(seat: Seat, ref: VersionRef, place: str, *keys: str) -> tuple[Range, ...]:
    held = seat.keys.holding_at(ref.run, ref.version, place)
    return (*map(one, (held, *keys)), seat.keys.shards(k.inst_at(place)))


def offered(
    view: View, seat: Seat, ref: VersionRef, place: str, before: int = 0, *, waits: bool = False
) -> Callable[[Mapping[str, Entry]], Source]:
    """The source there, once its shards are known, if it is full or a relay of `before`.

    Raises:
        SourceLost: It does not offer this content any more (I7). One that `waits` may drain.
    """
    held, source = seat.keys.holding_at(ref.run, ref.version, place), k.inst_at(place)
    entry = view.get(held)
    left = SourceLost(k.replica_of(source), "it left before it was read", 0, 0).orderly()
    if entry is None:
        raise left
    try:
        holding = Holding.decode(entry.value, held)
    except BackendError as error:
        raise SourceLost(k.replica_of(source), str(error), 0, 0) from error
    is_waiting = waits and holding.state == "draining" and holding.uid == ref.uid
    if not (is_waiting or _is_source(seat, ref, source, holding, entry, before)):
        raise left
    return partial(learned, source, holding, entry.create_rev)


def attach(
    view: View,
    shards: Range,
    learn: Callable[[Mapping[str, Entry]], Source],
    reader: Put | None = None,
    guarded: Sequence[str] = (),
) -> Step[Source]:
    """Announce by `reader` that this rank reads from a source; then learn how to reach it.

    Args:
        reader: None: it is there, or nobody is told.

    Raises:
        SourceLost: One of its processes is gone (I7).
    """
    if reader is None:
        return Done(learn(dict(view.within(shards))))
    unchanged = tuple(map(view.unchanged, (*guarded, reader.key)))
    return Act(Txn(unchanged, (reader, Get(shards))), lambda reply: learn(gotten(reply)[0]))


def claimed_ranges(seat: Seat, call: Call, place: str) -> tuple[Range, ...]:
    ref, keys, source = call.ref, seat.keys, k.inst_at(place)
    assert ref is not None
    own = (
        seat.holding(ref),
        keys.ready(seat.inst, call.number, seat.rank),
        keys.reader_group(ref.run, ref.version, source, seat.inst),
        keys.reader(ref.run, ref.version, source, seat.inst, seat.rank),
    )
    return (*seat.own, *attach_ranges(seat, ref, place, *own))


def attach_claimed(view: View, seat: Seat, call: Call, place: str) -> Step[Source]:
    """As `attach`, of a rank whose group reads from there in `call`."""
    ref, keys, source = version_read(view, seat, call), seat.keys, k.inst_at(place)
    current = call_now(view, seat, call)
    claim = keys.reader_group(ref.run, ref.version, source, seat.inst)
    key = keys.reader(ref.run, ref.version, source, seat.inst, seat.rank)
    reader = Put(key, _reader(seat, current, place).encode(), seat.lease_id)
    is_put = view.get(reader.key) is not None  # before, and the reply was lost
    waits, before = is_put or view.get(claim) is not None, born_before(view, seat, current)
    learn = offered(view, seat, ref, place, before, waits=waits)
    # A request that applies late, when this rank is done or has given up, must not leave a record.
    own = (seat.holding(ref), keys.ready(seat.inst, call.number, seat.rank))
    held = keys.holding_at(ref.run, ref.version, place)
    return attach(view, keys.shards(source), learn, None if is_put else reader, (held, *own))


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
    place = holding.call, holding.datacenter, holding.is_original
    return Source(inst, holding.mark, born, is_full, records, *place)
