"""A timeline of what a watch of etcd shows, while it lasts. Pure.

Moments are those at which this process was told, by one clock; no process of the fleet is asked.
Something that begins and ends between two fleets is not seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_ros.cli.timeline import Reach, Row, Slice, Timeline, source_of
from torch_ros.protocol.fleet import Fleet, Held
from torch_ros.protocol.keys import is_forerunner
from torch_ros.protocol.records import VersionRef

NOBODY = "host not known"  # of a replica that had gone when it was asked for


@dataclass(slots=True)
class _Open:
    """A holding in one state, until that changes."""

    held: Held  # as it was seen first
    began_ns: int
    was_there: bool  # when the recording began
    sources: dict[str, None] = field(default_factory=dict)  # all that were seen, in order


@dataclass(frozen=True, slots=True)
class _Closed:
    seen: _Open
    ended_ns: int
    then: str  # the next state; "": it is gone; "?": the recording ended


class FleetRecording:
    """Made from one fleet after the other; `only`: the number of the version that counts."""

    def __init__(self, only: int | None = None) -> None:
        self._only = only
        self._open: dict[tuple[str, VersionRef], _Open] = {}
        self._closed: list[_Closed] = []
        self._reaches: list[Reach] = []
        self._sizes: dict[VersionRef, int] = {}

    def __len__(self) -> int:
        return len(self._closed) + len(self._reaches)

    def see(self, fleet: Fleet, at_ns: int) -> None:
        was_there = not self._reaches
        now = {
            (held.inst, held.ref): held
            for held in fleet.held
            if self._only in {None, held.ref.version}
        }
        for key, seen in list(self._open.items()):
            held = now.get(key)
            if held is None or held.state != seen.held.state:
                self._closed.append(_Closed(self._open.pop(key), at_ns, held.state if held else ""))
        for key, held in now.items():
            seen = self._open.setdefault(key, _Open(held, at_ns, was_there))
            seen.sources |= dict.fromkeys(held.sources)
        self._sizes |= {
            each.ref: each.size_bytes for each in fleet.versions if each.size_bytes is not None
        }
        reads = sum(each.state == "filling" and each.kind != "original" for each in fleet.held)
        names = {each.replica for each in fleet.holders(fleet.latest)} if fleet.latest else set()
        if was_there or self._reaches[-1][2:] != (len(names), reads):
            self._reaches.append(Reach(fleet.model, at_ns, len(names), reads))

    def end(self, at_ns: int, hosts: Mapping[str, str]) -> Timeline:
        """All that was seen. `hosts`: of the replicas."""
        closed = [*self._closed, *(_Closed(seen, at_ns, "?") for seen in self._open.values())]
        slices = [(each, self._slice(each, hosts)) for each in closed]
        there: dict[tuple[VersionRef, str], list[Slice]] = {}
        for each, made in slices:
            held = each.seen.held
            there.setdefault((held.ref, held.replica), []).append(made)
        arrows = [
            (found, made)
            for each, made in slices
            if each.seen.held.state == "filling"
            for source in each.seen.sources
            if (found := source_of(made, there.get((each.seen.held.ref, source), ())))
        ]
        return Timeline([made for _, made in slices], arrows, self._reaches)

    def _slice(self, each: _Closed, hosts: Mapping[str, str]) -> Slice:
        seen, held = each.seen, each.seen.held
        is_copy = held.kind in {"copy", "lingering"}
        name = f"{held.replica} ({held.kind})" if is_copy else held.replica
        row = Row(hosts.get(held.replica, NOBODY), name)
        took_ns = each.ended_ns - seen.began_ns
        args: dict[str, object] = {"version": held.ref.version}
        if held.state == "filling":
            args |= self._read(each, took_ns)
        if seen.was_there:
            args["began"] = "before"
        if each.then == "?":
            args["end"] = "later"
        return Slice(row, _name(held), seen.began_ns, took_ns, args)

    def _read(self, each: _Closed, took_ns: int) -> dict[str, object]:
        """The figures of something that was filled; of a rate, if its beginning was seen."""
        seen, args = each.seen, dict[str, object]()
        is_read = seen.held.kind != "original"
        if is_read:
            args["source"] = ", ".join(seen.sources)
        if not each.then:
            args["end"] = "given up"
        size_bytes = self._sizes.get(seen.held.ref)
        if size_bytes is not None and each.then == "full":
            args["GB"] = size_bytes / 1e9
            if is_read and not seen.was_there:
                args["GB/s"] = round(size_bytes / max(took_ns, 1), 3)
        return args


def _name(held: Held) -> str:
    match held.state:
        case "filling":
            return "publish" if held.kind == "original" else "read"
        case "full":
            return "hold"
        case "draining":
            return "drain"


def is_everywhere(fleet: Fleet, number: int) -> bool:
    """Whether each replica has the version of that number, or a newer one, of the newest run.

    One that fetches for another has nothing most of the time, and is not asked.
    """
    if fleet.latest is None:
        return False
    has = {
        each.replica
        for each in fleet.held
        if each.ref.run == fleet.latest.run
        and each.ref.version >= number
        and each.state != "filling"
    }
    there = (each for each in fleet.replicas.values() if each.state == "complete")
    return has >= {each.name for each in there if not is_forerunner(each.inst)}
