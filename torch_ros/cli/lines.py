"""A line for each replica: what it holds, and what it does. Pure: `top` and `web` draw them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch_ros.cli.headway import Headway
from torch_ros.fleet.fleet import Fleet, Held, Replica
from torch_ros.protocol.records import VersionRef


@dataclass(frozen=True, slots=True)
class Line:
    """One replica.

    Attributes:
        holds: The newest version that it has and does not fill.
        fills: The version that it reads.
        state: For people. "full" is only said of what a reader would be given.
        also: Further versions that it has, copies in host memory among them.
        uses: The version that its engine uses, if it says so.
        sources, readers: Names of the replicas that it reads from, and that read from it.
        since_ms: Since when it reads, or has, what stands there first; by its own clock.
        behind: How many versions are newer than what it holds, up to the newest that is offered.
        headway: How far its read is; None: nobody has asked.
    """

    replica: str
    holds: VersionRef | None
    fills: VersionRef | None
    state: str
    how: str
    datacenter: str
    world_size: int
    also: tuple[VersionRef, ...]
    uses: int | None
    sources: tuple[str, ...]
    readers: tuple[str, ...]
    is_suspected: bool
    behind: int
    since_ms: int | None
    headway: Headway | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """How far a version has come: so many of the replicas that are there have it, or read it."""

    held: int
    filling: int
    total: int


def lines(fleet: Fleet, made: Mapping[str, Headway] | None = None) -> list[Line]:
    """By name of the replica; `made` by `inst`."""
    held: dict[str, list[Held]] = {name: [] for name in fleet.replicas}
    for each in fleet.held:
        held[each.replica].append(each)
    newer = _newer(fleet)
    found = made or {}
    return [_line(replica, held[name], newer, found) for name, replica in fleet.replicas.items()]


def _newer(fleet: Fleet) -> Mapping[VersionRef, int]:
    """How many versions follow each one, up to the newest that is offered."""
    if fleet.latest is None:
        return {}
    upto = [each.ref for each in fleet.versions if each.ref.order <= fleet.latest.order]
    return {ref: place for place, ref in enumerate(upto)}


def _line(
    replica: Replica,
    there: Sequence[Held],
    newer: Mapping[VersionRef, int],
    made: Mapping[str, Headway],
) -> Line:
    """`there`: its holdings, newest versions first."""
    fills = next((each for each in there if each.state == "filling"), None)
    rest = [each for each in there if each.state != "filling"]
    holds = rest[0] if rest else None
    shown = holds or fills
    active: VersionRef | None = None
    active = replica.install.active if replica.install else None  # feature installs
    return Line(
        replica=replica.name,
        holds=holds.ref if holds else None,
        fills=fills.ref if fills else None,
        state=_state(replica, holds, fills),
        how=_how(replica, shown, fills),
        datacenter=replica.datacenter,
        world_size=replica.world_size,
        also=tuple(dict.fromkeys(each.ref for each in rest if each.ref != rest[0].ref)),
        uses=active.version if active else None,
        sources=fills.sources if fills else (),
        readers=tuple(sorted({name for each in there for name in each.readers})),
        is_suspected=replica.is_suspected,
        behind=newer.get(holds.ref, 0) if holds else 0,
        since_ms=now.since_ms if (now := fills or holds) else None,
        headway=made.get(fills.inst) if fills else None,
    )


def _state(replica: Replica, holds: Held | None, fills: Held | None) -> str:
    if fills is not None:
        return "publishing" if fills.kind == "original" else "filling"
    if replica.state != "complete" and (holds is None or holds.kind != "lingering"):
        return replica.state
    if holds is None:
        return "empty"
    if holds.state == "draining":
        return "draining"
    if holds.kind == "lingering":
        return "lingering"
    return "full" if holds.is_offered else "not offered"


def _how(replica: Replica, shown: Held | None, fills: Held | None) -> str:
    if fills is not None and fills.is_relay:
        kind: str = "relay"
    else:
        kind = shown.kind if shown is not None else "-"
    return f"{kind}, spot" if replica.spot else kind


def spread(there: Iterable[Line], ref: VersionRef | None) -> Spread:
    alive = [each for each in there if each.state not in {"left", "gone"}]
    has = sum(ref in {each.holds, *each.also} for each in alive) if ref else 0
    reading = sum(each.fills == ref for each in alive) if ref else 0
    return Spread(has, reading, len(alive))
