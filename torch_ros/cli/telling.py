"""A fleet as the live page gets it: values for JSON, and what differs between two of them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_ros.cli import lines
from torch_ros.fleet.fleet import Fleet, Published
from torch_ros.protocol.records import VersionRef

VERSIONS_MAX = 32  # the newest, beside those that somebody has

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """A fleet in two parts: what is small and comes each time, and a line for each replica."""

    head: Values
    lines: Mapping[str, Values]


def told(fleet: Fleet) -> Told:
    there = lines.lines(fleet)
    latest = fleet.latest
    spread = lines.spread(there, latest)
    held = {each.ref for each in fleet.held}
    shown = [
        each
        for place, each in enumerate(fleet.versions)
        if place < VERSIONS_MAX or each.ref in held
    ]
    head = {
        "model": fleet.model,
        "revision": fleet.revision,
        "latest": _name(latest),
        "spread": [spread.held, spread.filling, spread.total],
        "witnesses": len({each.replica for each in fleet.holders(latest) if not each.spot})
        if latest
        else 0,
        "versions": [_version(each) for each in shown],
    }
    return Told(head, {each.replica: _line(each) for each in there})


def difference(before: Told | None, after: Told) -> Values:
    """All of `after`, or what a page that shows `before` needs in order to show it."""
    if before is None:
        return {**after.head, "all": True, "lines": list(after.lines.values()), "gone": []}
    changed = [line for name, line in after.lines.items() if before.lines.get(name) != line]
    gone = [name for name in before.lines if name not in after.lines]
    return {**after.head, "all": False, "lines": changed, "gone": gone}


def _version(each: Published) -> Values:
    return {
        "id": _name(each.ref),
        "run": each.ref.run,
        "number": each.ref.version,
        "offered": each.is_offered,
        "bytes": each.size_bytes,
        "tensors": each.tensor_count,
        "at": each.at_ms,
    }


def _line(line: lines.Line) -> Values:
    return {
        "replica": line.replica,
        "holds": _name(line.holds),
        "fills": _name(line.fills),
        "state": line.state,
        "how": line.how,
        "datacenter": line.datacenter,
        "ranks": line.world_size,
        "also": list(map(_name, line.also)),
        "uses": line.uses,
        "sources": line.sources,
        "readers": line.readers,
        "suspected": line.is_suspected,
        "behind": line.behind,
        "since": line.since_ms,
    }


def _name(ref: VersionRef | None) -> str | None:
    return f"{ref.run}/{ref.version}" if ref is not None else None
