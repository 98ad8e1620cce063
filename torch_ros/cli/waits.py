"""The wait-graph: from a replica down to the process, or the name, that holds it up. Pure.

A wait leaves traces in etcd: calls that have not ended, ranks that are not ready, readers, copies
without all their parts, installs. A call that waits for a version to come leaves none, so that a
replica which makes no call is told apart from one that waits by what there is to be had.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch_ros.cli.ls import age
from torch_ros.errors import CallMismatch, DeadlineExceeded, SourceLost
from torch_ros.fleet import seen
from torch_ros.fleet.fleet import Fleet, Held
from torch_ros.printable import some
from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import (
    Call,
    GroupRecord,
    ShardRecord,
    VersionRecord,
    VersionRef,
    extension,
)
from torch_ros.protocol.seat import decisions_at
from torch_ros.protocol.sources import suspects
from torch_ros.store.txn import View

Kind = Literal["process", "gone", "version", "cycle", "nothing"]


@dataclass(frozen=True, slots=True)
class Hop:
    """A replica on the way, and its wait."""

    replica: str
    text: str


@dataclass(frozen=True, slots=True)
class Blamed:
    """A process.

    Attributes:
        host: "": it has not come, or has closed its handle.
        is_seated: False: it had the seat last, and its lease has ended.
        since_ms: When it took the seat, by its clock; 0: nobody knows.
        state: As `torch_ros why` sees it from its own host; "": nobody has looked.
    """

    replica: str
    rank: int
    host: str
    pid: int
    is_seated: bool = True
    since_ms: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True)
class Why:
    """The way from a replica to the one that holds it up.

    Attributes:
        hops: The replica that was asked about, then whom each waits for.
        kind: "process": `processes` hold it up. "gone": the last replica has closed, or lost
            its seat. "version": nobody has what it wants. "cycle": the last hop is there before.
            "nothing": it has the newest version, and nobody to wait for.
        processes: To look at, of the last replica. Of "nothing": the publisher's.
    """

    hops: tuple[Hop, ...]
    kind: Kind
    processes: tuple[Blamed, ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    """One step: the end of the way, or the replica that is waited for."""

    text: str
    kind: Kind = "process"
    ranks: Sequence[int] = ()
    onto: str = ""  # the replica that this one waits for
    source: str = ""  # the instance of that one, if it is read from
    reader: str = ""  # the incarnation of that one, if it reads


def why(
    view: View, keys: Keys, replica: str, version: int | None = None, *, now_ms: int = 0
) -> Why:
    """The reason for which a replica does not get on.

    Args:
        view: A view of all records of the model.
        version: The one that it should have; None: the newest that can be read.
        now_ms: The wall clock; 0: no age is told.
    """
    there = _Records(view, keys, now_ms)
    hops: list[Hop] = []
    found = _of_replica(there, replica, version)
    while True:
        hops.append(Hop(replica, found.text))
        if not found.onto:
            inst = found.source or found.reader or there.inst_of(replica)
            ranks = found.ranks or (there.lost_ranks(replica) if found.kind == "gone" else ())
            return Why(tuple(hops), found.kind, there.processes(replica, inst, ranks))
        replica = found.onto
        if replica in {hop.replica for hop in hops}:
            return Why((*hops, Hop(replica, "waits for that itself")), "cycle")
        if found.reader:
            found = _of_reader(there, found.reader, found.ranks)
        elif found.source:
            found = _of_source(there, replica, found.source)
        else:
            found = _of_replica(there, replica, None)


class _Records:
    """The records of one view, as far as they can be read."""

    def __init__(self, view: View, keys: Keys, now_ms: int) -> None:
        self.view, self.keys, self.fleet = view, keys, Fleet.of(view, keys)
        self.now_ms, self.seen, self.lost = now_ms, seen.all_of(view, keys), seen.lost(view, keys)
        groups = readable(view.within(keys.groups()), k.parse_group, GroupRecord)
        self.groups: Mapping[str, GroupRecord] = {name: group for _, name, group, _ in groups}
        self.suspected = suspects(view, keys)
        self.reads: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
        # By all incarnations of a source, or of a copy: the memory is the same.
        self.readers: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
        for _, (source, reader, who), _ in keyed(view.within(keys.readers()), k.parse_reader):
            rank = None if who == "group" else int(who)
            self.reads[reader].append((source, rank))
            self.readers[source.partition("@")[0]].append((reader, rank))

    def inst_of(self, replica: str) -> str:
        group = self.groups.get(replica)
        return k.instance(replica, group.nonce) if group else ""

    def shards(self, inst: str) -> dict[int, ShardRecord]:
        found = self.view.within(self.keys.shards(inst)) if inst else ()
        return {rank: shard for _, rank, shard, _ in readable(found, k.parse_rank, ShardRecord)}

    def calls(self, inst: str) -> Sequence[Call]:
        return decisions_at(self.view, self.keys.decisions(inst)).calls

    def ready(self, inst: str, number: int) -> set[int]:
        there = self.view.within(self.keys.readies(inst, number))
        return {rank for _, rank, _ in keyed(there, k.parse_rank)}

    def held(self, inst: str) -> Held | None:
        return next((each for each in self.fleet.held if each.inst == inst), None)

    def is_lost(self, source: str) -> bool:
        """Whether it is gone, or somebody found a moment ago that it does not answer."""
        held = self.held(source)
        is_whole = held is not None and len(self.shards(source)) >= held.world_size
        return not is_whole or source in self.suspected

    def processes(self, replica: str, inst: str, ranks: Sequence[int]) -> tuple[Blamed, ...]:
        # A stream's shards, and those of a reader that is a copy, are its owner's.
        shards = self.shards(inst) or (self.shards(k.owner_of(inst)) if inst else {})
        return tuple(self._process(replica, rank, shards.get(rank)) for rank in ranks)

    def _process(self, replica: str, rank: int, shard: ShardRecord | None) -> Blamed:
        where = (replica, rank)
        last, is_seated = self.seen.get(where), where not in self.lost
        there = shard or last
        if there is None:
            return Blamed(replica, rank, "", 0)
        since_ms = last.at_ms if last else 0
        return Blamed(replica, rank, there.host, there.pid, bool(shard) or is_seated, since_ms)

    def lost_ranks(self, replica: str) -> list[int]:
        """The ranks whose leases ended, and that closed no handle."""
        return sorted(rank for name, rank in self.lost if name == replica)

    def published(self, ref: VersionRef) -> VersionRecord:
        """The version's record, which may say of its publication nothing."""
        record = VersionRecord.at(self.view, self.keys.version(ref.run, ref.version))
        return record or VersionRecord(ref.uid)

    def ago(self, at_ms: int) -> str:
        return f" {age(at_ms, self.now_ms)} ago" if at_ms and self.now_ms else ""


def _of_replica(there: _Records, name: str, version: int | None) -> _Found:
    group = there.groups.get(name)
    if group is None:
        if lost := there.lost_ranks(name):
            return _Found(seat_lost(lost), "gone", lost)
        return _Found("has closed, or died", "gone")
    if group.left is not None:
        return _Found(f"rank {group.left} has closed its handle", "gone", [group.left])
    if group.refusal is not None:
        return _Found(f"cannot open: {group.refusal.error()}", ranks=[group.refusal.rank])
    inst = there.inst_of(name)
    if missing := sorted(set(range(group.world_size)) - there.shards(inst).keys()):
        what = "died, or lost the lease" if group.is_complete else "not there yet"
        return _Found(f"{what}: {_ranks(missing)} of {group.world_size}", ranks=missing)
    calls = there.calls(inst)
    if open_ := next((call for call in calls if call.outcome is None), None):
        found = _in_call(there, inst, group.world_size, open_)
        before = next((call for call in calls if call.number == open_.number - 1), None)
        # Ranks that were told of different calls do not come; one that was not goes on alone.
        differed = _differed(before, calls) if before is not None and not found.onto else None
        return differed or found
    return _at_rest(there, name, calls, version)


# In a call


def _in_call(there: _Records, inst: str, world_size: int, call: Call) -> _Found:
    ready = there.ready(inst, call.number)
    waited_for = sorted(set(range(world_size)) - ready) or list(range(world_size))
    what = f"call {call.number}, '{call.asked}'"
    if call.kind == "unpublish":
        return _draining(there, inst, what, call, range(world_size))
    if call.must and call.ref is not None:
        [name, *_] = call.must
        of = f"version {call.ref.version} from a {name} ({extension(call.must, name, str)})"
        return _Found(f"{what}: reads {of}: {_ranks(waited_for)}", ranks=waited_for)
    if call.kind == "replicate" and call.ref is not None:
        return _reading(there, inst, what, call, waited_for)
    return _Found(f"{what}: waits for {_ranks(waited_for)} of {world_size}", ranks=waited_for)


def _draining(there: _Records, inst: str, what: str, call: Call, everyone: Sequence[int]) -> _Found:
    is_offered = call.copy and there.held(call.copy) is not None
    if call.copy and not is_offered:
        lacking = sorted(set(everyone) - there.shards(call.copy).keys())
        text = f"{what}: waits for the copy of {_ranks(lacking)} in host memory"
        return _Found(text, ranks=lacking or everyone)
    readers = there.readers[inst.partition("@")[0]]
    if not readers:
        return _Found(f"{what}: rank {call.by} has nobody to wait for", ranks=[call.by])
    # A rank says itself what it reads; a claim alone may be of one that has not begun.
    reader = min(readers, key=lambda each: (each[1] is None, each))[0]
    ranks = sorted({rank for inst, rank in readers if inst == reader and rank is not None})
    names = sorted({k.replica_of(k.owner_of(each)) for each, _ in readers})
    onto = k.replica_of(k.owner_of(reader))
    return _Found(
        f"{what}: waits until {some(names)} have read", "process", ranks, onto, "", reader
    )


def _of_reader(there: _Records, inst: str, ranks: Sequence[int]) -> _Found:
    """A replica, or a stream, that is read for by a source which wants to give a version up."""
    shards = there.shards(k.owner_of(inst))
    lacking = [rank for rank in ranks if rank not in shards]
    if lacking or not shards:
        return _Found("reads, and has died", "gone", lacking, reader=inst)
    ranks = ranks or sorted(shards)
    return _Found(f"still reads: {_ranks(ranks)}", ranks=ranks, reader=inst)


def _reading(
    there: _Records, inst: str, what: str, call: Call, waited_for: Sequence[int]
) -> _Found:
    sources = [source for source, _ in there.reads[inst]]
    claimed = [*sources, *map(k.inst_at, call.sources)]
    if lost := next((each for each in claimed if there.is_lost(each)), None):
        return _from(f"{what}: reads, or has read,", lost)
    by_rank = {rank: source for source, rank in there.reads[inst] if rank is not None}
    away = [rank for rank in waited_for if rank not in by_rank]
    if sources and not away:
        source = by_rank[waited_for[0]]
        return _from(f"{what}: reads ({_ranks(waited_for)})", source)
    if by_rank or (sources and len(waited_for) < len(there.shards(inst))):
        return _Found(f"{what}: not there to read yet: {_ranks(away)}", ranks=away)
    if sources:
        return _from(f"{what}: has claimed a source", sources[0])
    assert call.ref is not None
    if (other := _has_it(there, call.ref, inst)) is None:
        lost = _publisher_lost(there, k.replica_of(inst), call.ref.version)
        text = f"{what}: nobody has version {call.ref.version} any more"
        return _Found(text, onto=lost) if lost else _Found(text, "version")
    return _from(f"{what}: looks for a source", other.inst)


def _from(text: str, source: str) -> _Found:
    replica = k.replica_of(k.owner_of(source))
    return _Found(f"{text} from {replica}", onto=replica, source=source)


def _has_it(there: _Records, ref: VersionRef, but: str) -> Held | None:
    """A holding of it by somebody else, full where there is one."""
    others = [each for each in there.fleet.held if each.ref == ref and each.inst != but]
    return min(others, key=lambda each: not each.is_offered, default=None)


def _of_source(there: _Records, name: str, inst: str) -> _Found:
    held, shards = there.held(inst), there.shards(inst)
    lacking = sorted(set(range(held.world_size)) - shards.keys()) if held else []
    if held is None or lacking:
        why = f"died, or lost the lease: {_ranks(lacking)};" if lacking else "is gone;"
        return _Found(f"{why} was read from", "gone", lacking, source=inst)
    if held.state == "filling":
        return _of_replica(there, name, None)
    return _Found("has all of it, and is slow, or stopped", ranks=sorted(shards), source=inst)


# Between calls


def _at_rest(there: _Records, name: str, calls: Sequence[Call], version: int | None) -> _Found:
    fleet, inst = there.fleet, there.inst_of(name)
    held, everyone = there.held(inst), sorted(there.shards(inst))
    if begun := _begun(there, inst, len(everyone)):
        return begun
    last = max(calls, key=lambda call: call.number, default=None)
    if last is not None and (failed := _failed(there, last, calls)):
        return failed
    wanted = next((each for each in fleet.versions if each.ref.version == version), None)
    ref = fleet.latest if version is None else wanted.ref if wanted and wanted.is_offered else None
    if version is None and held is None and (keeping := _keeping(there, name)):
        return keeping
    if ref is None:
        return _nobody_has(there, name, version)
    if held is None and there.published(ref).by == name:
        said = f"published version {ref.version}, the newest, has let go of it"
        return _Found(f"{said}, and waits for nobody", "nothing", everyone)
    if held is None or held.state != "full" or held.ref.order < ref.order:
        verb = "fills" if held and held.state == "filling" else "has"
        has = f"{verb} version {held.ref.version}" if held else "has no version"
        asks = f"{has}, makes no call, and has not asked for {ref.version}"
        return _Found(asks, ranks=everyone)
    # feature installs {
    for replica in fleet.replicas.values():
        using = replica.install
        if replica.name != name and using is not None and using.active != ref:
            text = f"has version {ref.version}; {replica.name} does not use it yet"
            return _Found(text, onto=replica.name)
    # } installs
    if version is not None:
        return _Found(f"has version {held.ref.version}, and waits for nobody", "nothing")
    return _up_to_date(there, name, held.ref, everyone)


def _up_to_date(there: _Records, name: str, ref: VersionRef, everyone: Sequence[int]) -> _Found:
    """Follow a replica that waits for nobody but the one who publishes."""
    record, what = there.published(ref), f"has version {ref.version}"
    ago = there.ago(record.at_ms)
    if record.by == name:
        told = f"{what}, which it published{ago}, and waits for nobody"
        return _Found(told, "nothing", everyone)
    if record.by and (record.by in there.groups or there.lost_ranks(record.by)):
        told = f"{what}, the newest, which {record.by} published{ago}"
        # Who waits for this one to be told of it, or to use it, is not what holds it up.
        if _of_replica(there, record.by, None).onto != name:
            return _Found(told, onto=record.by)
        return _Found(f"{told}, and waits for nobody", "nothing")
    return _Found(f"{what}, and waits for nobody", "nothing")


def _keeping(there: _Records, name: str) -> _Found | None:
    """A copy in host memory waits until a replica that is not spot has the version."""
    held = there.fleet.held
    copy = next((each for each in held if (each.replica, each.kind) == (name, "copy")), None)
    if copy is None:
        return None
    what = f"keeps a copy of version {copy.ref.version} in host memory"
    others = [e for e in held if e.ref == copy.ref and e.replica != name and not e.spot]
    if not others:
        return _Found(f"{what}, which no replica that is not spot takes", "version")
    other = min(others, key=lambda each: each.inst)
    ranks = [rank for source, rank in there.reads[other.inst] if source == copy.inst]
    reader = other.inst if ranks else ""
    there_now = sorted(rank for rank in ranks if rank is not None)
    return _Found(f"{what} for {other.replica}", "process", there_now, other.replica, "", reader)


def _begun(there: _Records, inst: str, world_size: int) -> _Found | None:
    found = there.view.within(there.keys.all_begun(inst))
    begun = {rank for _, rank, _ in keyed(found, k.parse_rank)}
    away = sorted(set(range(world_size)) - begun)
    if not begun or not away:
        return None
    return _Found(f"not there yet for the save or load of the peers: {_ranks(away)}", ranks=away)


def _differed(call: Call, calls: Sequence[Call]) -> _Found | None:
    failure = call.failure
    if failure is None or not isinstance(error := failure.error(), CallMismatch):
        return None
    # A rank that was told of the difference in an earlier call decides the next one itself.
    first = next((each for each in calls if each.number == error.call), call)
    ranks = sorted({first.by, failure.rank})
    return _Found(f"call {error.call}: different calls of {_ranks(ranks)}: {error}", ranks=ranks)


def _failed(there: _Records, call: Call, calls: Sequence[Call]) -> _Found | None:
    failure = call.failure
    error = failure.error() if failure else None
    if failure is None or isinstance(error, DeadlineExceeded):  # what it waited for is looked at
        return None
    what = f"call {call.number}, '{call.asked}', failed: {error}"
    if differed := _differed(call, calls):
        return differed
    if isinstance(error, SourceLost):
        return _Found(what, onto=error.replica, source=there.inst_of(error.replica))
    return _Found(what, ranks=[failure.rank])


def _nobody_has(there: _Records, name: str, version: int | None) -> _Found:
    """Somebody may be about to publish it, or have come with some ranks only."""
    what = "any version" if version is None else f"version {version}"
    for other, group in there.groups.items():
        calls = there.calls(there.inst_of(other))
        is_publishing = any(call.kind == "publish" and call.outcome is None for call in calls)
        is_coming = not group.is_complete or group.refusal is not None
        if other != name and (is_publishing or is_coming):
            return _Found(f"nobody has {what} yet", onto=other)
    if by := _publisher_lost(there, name, version):
        return _Found(f"nobody has {what}; its publisher has no seat", onto=by)
    return _Found(f"nobody has {what}, and nobody publishes it", "version")


def _publisher_lost(there: _Records, name: str, version: int | None) -> str:
    """Who published it, or the last one, and has lost its seat; "": nobody did."""
    known = [each for each in there.fleet.versions if version in {None, each.ref.version}]
    by = there.published(known[0].ref).by if known else ""
    if not by and there.groups.keys() <= {name}:  # nobody is left who might publish
        others = {where: seen for where, seen in there.lost.items() if where[0] != name}
        by = max(others, key=lambda where: others[where].at_ms, default=("", 0))[0]
    return by if there.lost_ranks(by) and by != name else ""


def seat_lost(ranks: Sequence[int]) -> str:
    """A sentence about ranks whose leases ended without a `close`."""
    return f"lost its seat: the lease of {_ranks(ranks)} has ended, and etcd was told of no close"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some([*map(str, ranks)])}"
