"""A Chrome trace, as Perfetto reads it: a track for each host, a row for each rank. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

Event = Mapping[str, Any]
Values = Mapping[str, Any]


class Row(NamedTuple):
    """The place of slices. Hosts of one name are two tracks if their clocks are."""

    host: str
    name: str
    clock: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    row: Row
    name: str
    began_ns: int
    took_ns: int
    args: Values = field(default_factory=dict)

    @property
    def ended_ns(self) -> int:
        return self.began_ns + self.took_ns


class Reach(NamedTuple):
    """How many replicas have a model's newest version, and how many reads are under way."""

    model: str
    at_ns: int
    held_by: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Slices, arrows from a source's slice to its reader's, and counts. Moments are since 1970."""

    slices: Sequence[Slice]
    arrows: Sequence[tuple[Slice, Slice]]
    counts: Sequence[Reach]


def source_of(read: Slice, there: Iterable[Slice]) -> Slice | None:
    """The slice of a source that its reader's arrow comes from.

    Either the first that lasts while it reads, or the last before.
    """
    before = [each for each in there if each.began_ns <= read.ended_ns]
    beside = [each for each in before if each.ended_ns > read.began_ns]
    if beside:
        return min(beside, key=lambda each: each.began_ns)
    return max(before, key=lambda each: each.began_ns, default=None)


def trace(timeline: Timeline, told: Values) -> Values:
    """The trace as values for JSON. `told`: what else is to be known of it."""
    moments = [each.began_ns for each in timeline.slices]
    moments += [each.at_ns for each in timeline.counts]
    began_ns = min(moments, default=0)
    return {
        "displayTimeUnit": "ms",
        "otherData": {**told, "began_ms": began_ns // 1_000_000},
        "traceEvents": list(_events(timeline, began_ns)),
    }


def _events(timeline: Timeline, since_ns: int) -> Iterator[Event]:
    numbers = count(1)  # no two things have the same, whatever they are
    tracks: dict[tuple[str, str], int] = {}
    places: dict[Slice, tuple[int, int]] = {}
    of_row: dict[Row, list[Slice]] = {}
    for each in timeline.slices:
        of_row.setdefault(each.row, []).append(each)
    for row in sorted(of_row, key=_natural):
        if row[::2] not in tracks:
            tracks[row[::2]] = next(numbers)
            yield _named("process_name", tracks[row[::2]], 0, row.host)
        pid = tracks[row[::2]]
        for place, lane in enumerate(_lanes(of_row[row])):
            tid = next(numbers)
            yield _named(
                "thread_name", pid, tid, f"{row.name} ({place + 1})" if place else row.name
            )
            for each in lane:
                places[each] = pid, tid
                yield _slice(each, pid, tid, since_ns)
    for number, (source, read) in enumerate(timeline.arrows, 1):
        yield from _arrow(number, (source, places[source]), (read, places[read]), since_ns)
    yield from _counters(timeline.counts, numbers, since_ns)


def _natural(row: Row) -> tuple[str, ...]:
    """Names in the order of people: 2 before 10."""
    texts = (row.host, row.clock, row.name)
    return tuple(re.sub("[0-9]+", lambda found: found[0].zfill(20), text) for text in texts)


def _lanes(slices: Iterable[Slice]) -> Sequence[Sequence[Slice]]:
    """Slices that overlap are no slices of one row: the later one goes into a row below."""
    lanes: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: (each.began_ns, each.ended_ns)):
        free = next((lane for lane in lanes if lane[-1].ended_ns <= each.began_ns), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return lanes


def _slice(each: Slice, pid: int, tid: int, since_ns: int) -> Event:
    event = {"ph": "X", "name": each.name, "pid": pid, "tid": tid}
    event |= {"ts": (each.began_ns - since_ns) / 1e3, "dur": each.took_ns / 1e3}
    return {**event, "args": each.args} if each.args else event


def _arrow(
    number: int,
    source: tuple[Slice, tuple[int, int]],
    read: tuple[Slice, tuple[int, int]],
    since_ns: int,
) -> Iterator[Event]:
    """Both ends lie in their slices, and none goes back in time; one that had to is left out."""
    (from_, (its_pid, its_tid)), (to, (pid, tid)) = source, read
    leaves_ns = min(max(to.began_ns, from_.began_ns), from_.ended_ns - 1)
    comes_ns = max(to.began_ns, leaves_ns)
    if leaves_ns < from_.began_ns or comes_ns >= to.ended_ns:
        return
    flow = {"cat": "read", "name": "read from", "id": number}
    leaves = {"ph": "s", "pid": its_pid, "tid": its_tid, "ts": (leaves_ns - since_ns) / 1e3}
    comes = {"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": (comes_ns - since_ns) / 1e3}
    yield {**leaves, **flow}
    yield {**comes, **flow}


def _counters(counts: Iterable[Reach], numbers: Iterator[int], since_ns: int) -> Iterator[Event]:
    pids: dict[str, int] = {}
    last: dict[tuple[str, str], int] = {}
    for each in sorted(counts, key=lambda each: each.at_ns):
        if each.model not in pids:
            pids[each.model] = next(numbers)
            yield _named("process_name", pids[each.model], 0, f"model {each.model}")
        for name, value in (("held_by", each.held_by), ("in_flight", each.in_flight)):
            if last.get((each.model, name)) != value:
                last[each.model, name] = value
                event = {"ph": "C", "name": name, "pid": pids[each.model], "tid": 0}
                yield {**event, "ts": (each.at_ns - since_ns) / 1e3, "args": {name: value}}


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
