"""The journals of many processes as one timeline. Pure.

Clocks of hosts differ. They are aligned by what must have come before what: each moment of a clock
is moved later, by the least that this takes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, TypeVar

from torch_ros.cli.timeline import Reach, Row, Slice, Timeline, source_of
from torch_ros.protocol.journal import Author, Journal, Journaled

REST = 0.01  # of a call's time: more than this has a slice of its own, if no stage has it


class RankCall(NamedTuple):
    """A call of one rank, and who told of it."""

    author: Author
    done: Journaled

    @property
    def clock(self) -> str:
        return self.author.clock or self.author.host

    @property
    def group(self) -> tuple[str, str, str, int]:
        """The same for all ranks of a call."""
        return (self.done.model, self.done.replica, self.done.start, self.done.call)

    @property
    def content(self) -> tuple[str, str]:
        return (self.done.model, self.done.uid)

    @property
    def decided_ns(self) -> int:
        """The end of its first stage, in which the source is chosen."""
        return self.done.began_ns + int(1e9 * self.done.stages_s.get("decide", 0.0))

    @property
    def committing_ns(self) -> int:
        """The beginning of its last stage, in which its source learns that it has done."""
        return self.done.ended_ns - int(1e9 * self.done.stages_s.get("commit", 0.0))


@dataclass(frozen=True, slots=True)
class Aligned:
    """By how much the clock of each host was moved.

    Attributes:
        left_ns: How far some calls are out of order all the same, since clocks changed meanwhile.
    """

    moved_ns: Mapping[str, int]
    left_ns: int


def calls(journals: Iterable[Journal], model: str | None) -> list[RankCall]:
    """Those of a model, or all. A load that found its version in place took no time."""
    return [
        RankCall(journal.author, done)
        for journal in journals
        if journal.author is not None
        for done in journal.done
        if done.elapsed_s and model in {None, done.model}
    ]


def aligned(there: Sequence[RankCall]) -> Aligned:
    clocks = {call.clock for call in there}
    least: dict[tuple[str, str], int] = {}
    for (one, before_ns), (other, after_ns) in _orders(there):
        if one != other:
            pair = one, other
            least[pair] = max(least.get(pair, before_ns - after_ns), before_ns - after_ns)
    moved = dict.fromkeys(clocks, 0)
    for _ in clocks:
        for (one, other), by_ns in least.items():
            moved[other] = max(moved[other], moved[one] + by_ns)
    left = (moved[one] + by_ns - moved[other] for (one, other), by_ns in least.items())
    return Aligned(moved, max(0, max(left, default=0)))


Moment = tuple[str, int]  # a clock, and what it showed


def _orders(there: Sequence[RankCall]) -> Iterator[tuple[Moment, Moment]]:
    """Pairs of which the first cannot have come after the second."""
    publications = _by(there, "publish", lambda call: call.content)
    reads = _by(there, "read", lambda call: (*call.content, call.done.replica))
    for kind in ("publish", "read"):
        for ranks in _by(there, kind, lambda call: call.group).values():
            yield from _together(ranks)
    for call in there:
        if call.done.kind == "read":
            yield from _published_before(publications.get(call.content, ()), call)
            yield from _sources_before(reads, call)
        elif call.done.kind == "drain":
            yield from _readers_before(reads, call)


K = TypeVar("K")


def _by(
    there: Iterable[RankCall], kind: str, key: Callable[[RankCall], K]
) -> Mapping[K, Sequence[RankCall]]:
    found: dict[K, list[RankCall]] = defaultdict(list)
    for call in there:
        if call.done.kind == kind:
            found[key(call)].append(call)
    return found


def _is_one(ranks: Iterable[RankCall]) -> bool:
    """Whether they made one call together. Nobody says which of two was meant."""
    return len({call.group for call in ranks}) == 1


def _together(ranks: Sequence[RankCall]) -> Iterator[tuple[Moment, Moment]]:
    """A call ends for all ranks when all have begun it."""
    if all(call.done.is_offered for call in ranks):
        begins, ends = dict[str, int](), dict[str, int]()
        for call in ranks:
            clock, done = call.clock, call.done
            begins[clock] = max(begins.get(clock, done.began_ns), done.began_ns)
            ends[clock] = min(ends.get(clock, done.ended_ns), done.ended_ns)
        for begun in begins.items():
            for ended in ends.items():
                yield begun, ended


def _published_before(
    publications: Sequence[RankCall], read: RankCall
) -> Iterator[tuple[Moment, Moment]]:
    """A version is chosen when its publication has begun, on all ranks."""
    if _is_one(publications):
        for call in publications:
            yield (call.clock, call.done.began_ns), (read.clock, read.decided_ns)


def _sources_before(
    reads: Mapping[tuple[str, str, str], Sequence[RankCall]], read: RankCall
) -> Iterator[tuple[Moment, Moment]]:
    """A relay has chosen its own source before the last one that reads from it has done."""
    for source in read.done.sources:
        relay = reads.get((*read.content, source), ())
        if _is_one(relay):
            for call in relay:
                yield (call.clock, call.decided_ns), (read.clock, read.done.ended_ns)


def _readers_before(
    reads: Mapping[tuple[str, str, str], Sequence[RankCall]], drain: RankCall
) -> Iterator[tuple[Moment, Moment]]:
    """A drain that waited for a reader ends when that one has done, or has gone elsewhere."""
    for reader in {*drain.done.waited_for} - {*drain.done.left_behind}:
        there = reads.get((*drain.content, reader), ())
        if _is_one(there):
            for call in there:
                if not call.done.reroutes and drain.done.replica in call.done.sources:
                    yield (call.clock, call.committing_ns), (drain.clock, drain.done.ended_ns)


def timeline(there: Sequence[RankCall], moved_ns: Mapping[str, int]) -> Timeline:
    slices: list[Slice] = []
    offering: dict[tuple[str, str, str], list[tuple[int, Slice]]] = defaultdict(list)
    reading: list[tuple[RankCall, Slice]] = []
    is_alone = len({call.done.model for call in there}) == 1
    for call in there:
        done, by_ns = call.done, moved_ns[call.clock]
        name = f"{done.replica} rank {done.rank}"
        row = Row(call.author.host, name if is_alone else f"{done.model}: {name}", call.clock)
        made = list(_slices(row, done, done.began_ns + by_ns))
        slices += made
        shown = next((each for each in made if each.name in {"publish", "read"}), None)
        if shown is not None:
            offering[*call.content, done.replica].append((done.rank, shown))
            if done.kind == "read":
                reading.append((call, shown))
    arrows = []
    for call, read in reading:
        for source in call.done.sources:
            ranks = offering.get((*call.content, source), [])
            lowest = min((rank for rank, _ in ranks), default=0)
            found = source_of(read, (each for rank, each in ranks if rank == lowest))
            if found is not None:
                arrows.append((found, read))
    return Timeline(slices, arrows, list(_counts(there, moved_ns)))


def _slices(row: Row, done: Journaled, began_ns: int) -> Iterator[Slice]:
    version = {"version": done.version}
    match done.kind:
        case "publish":
            stages = {stage: round(1e3 * took_s, 3) for stage, took_s in done.stages_s.items()}
            args = {**version, "GB": done.size_bytes / 1e9, "offered": done.is_offered}
            yield Slice(row, "publish", began_ns, done.took_ns, {**args, "stages_ms": stages})
        case "drain":
            waits = {"waited_for": done.waited_for, "left_behind": done.left_behind}
            yield Slice(row, "drain", began_ns, done.took_ns, {**version, **waits})
        case "read":
            yield from _stages(row, done, began_ns)


def _stages(row: Row, done: Journaled, began_ns: int) -> Iterator[Slice]:
    """One after the other. A stage that came twice is one."""
    at_ns, ends_ns = began_ns, began_ns + done.took_ns
    for stage, took_s in done.stages_s.items():
        took_ns = min(int(1e9 * took_s), ends_ns - at_ns)
        args: dict[str, object] = {"version": done.version}
        if stage == "read":
            args |= {
                "source": ", ".join(done.sources),
                "GB": done.size_bytes / 1e9,
                "GB/s": round(done.size_bytes / max(took_ns, 1), 3),
                "way": ", ".join(sorted(done.ways, key=done.ways.__getitem__, reverse=True)),
                "reroutes": done.reroutes,
            }
        yield Slice(row, stage, at_ns, took_ns, args)
        at_ns += took_ns
    if ends_ns - at_ns > REST * done.took_ns:
        yield Slice(row, "other", at_ns, ends_ns - at_ns, {"version": done.version})


def _counts(there: Sequence[RankCall], moved_ns: Mapping[str, int]) -> Iterator[Reach]:
    """Replicas that have published the newest version, or read it, and not given it up since."""
    groups: dict[tuple[str, str, str, int], list[RankCall]] = defaultdict(list)
    for call in there:
        groups[call.group].append(call)
    changes: list[tuple[int, bool, Journaled]] = []  # True: it has ended
    for group in groups.values():
        done = group[0].done
        begun = (call.decided_ns if done.kind == "read" else call.done.began_ns for call in group)
        clocks = [moved_ns[call.clock] for call in group]
        changes.append((min(map(add, begun, clocks)), False, done))
        changes.append((max(map(add, (call.done.ended_ns for call in group), clocks)), True, done))
    models: dict[str, _Spread] = defaultdict(_Spread)
    for at_ns, has_ended, done in sorted(changes, key=lambda change: change[:2]):
        spread = models[done.model]
        spread.change(done, has_ended=has_ended)
        held_by = spread.holders[spread.newest[1]]
        yield Reach(done.model, at_ns, held_by, spread.in_flight)


class _Spread:
    """A model at one moment."""

    def __init__(self) -> None:
        self.newest = (-1, "")  # version and content
        self.holders = Counter[str]()  # by content
        self.in_flight = 0
        self._holds: dict[str, str] = {}

    def change(self, done: Journaled, *, has_ended: bool) -> None:
        if done.kind == "read":
            self.in_flight += -1 if has_ended else 1
        if done.kind == "drain" and not has_ended and self._holds.get(done.replica) == done.uid:
            self._hold(done.replica, "")
        if done.kind != "drain" and has_ended:
            self._hold(done.replica, done.uid)
            if done.kind == "publish" or done.version > self.newest[0]:
                self.newest = (done.version, done.uid)

    def _hold(self, replica: str, uid: str) -> None:
        self.holders[self._holds.get(replica, "")] -= 1
        self._holds[replica] = uid
        self.holders[uid] += bool(uid)
