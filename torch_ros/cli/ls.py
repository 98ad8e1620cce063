"""`torch-ros ls`: who has which version. Pure: rows of text out of fleets."""

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING

from torch_ros.cli import headway, lines
from torch_ros.cli.headway import Headway
from torch_ros.deadline import wall_ms
from torch_ros.fleet.fleet import Fleet, Held
from torch_ros.printable import some

if TYPE_CHECKING:  # both take torch
    from torch_ros.checkpoints.compared import Deviation, Difference

Rows = list[Sequence[str]]
MODELS = ("MODEL", "RUN", "LATEST", "SIZE", "HELD BY", "READING", "REPLICAS", "LAST PUBLISH", "")
VERSIONS = ("VERSION", "STATE", "SIZE", "REPLICA", "RANKS", "WHERE", "HOW", "SINCE", "READS FROM")
DIFFERENCES = ("TENSOR", "CHANGED", "OF", "")
UNVERIFIED = ("TENSOR", "REPLICA", "")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TIMES = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def models(fleets: Iterable[Fleet]) -> Rows:
    """A line for each model: its newest version that can be read."""
    return [_model(fleet) for fleet in fleets]


def _model(fleet: Fleet) -> Sequence[str]:
    ref = fleet.latest
    alive = str(sum(each.state == "complete" for each in fleet.replicas.values()))
    if ref is None:
        return (fleet.model, next(iter(fleet.runs), "-"), "-", "-", "0", "-", alive, "-", "")
    newest = next(each for each in fleet.versions if each.ref == ref)
    holders = fleet.holders(ref)
    reading = sum(each.ref == ref and each.state == "filling" for each in fleet.held)
    alone = "! only copy" if fleet.has_only_copy else ""
    row = (fleet.model, ref.run, str(ref.version), size(newest.size_bytes))
    ago = f"{age(newest.at_ms)} ago" if newest.at_ms else "-"
    return (*row, str(len(holders)), str(reading), alive, ago, alone)


def versions(
    fleet: Fleet, only: int | None = None, made: Mapping[str, Headway] | None = None
) -> Rows:
    """A line for each holding, newest versions first; and one for a version that nobody holds.

    Args:
        made: How far those are that fill, by `inst`.
    """
    rows: Rows = []
    for published in fleet.versions:
        if only is not None and published.ref.version != only:
            continue
        there = [each for each in fleet.held if each.ref == published.ref]
        number, size_text = str(published.ref.version), size(published.size_bytes)
        if not there:
            rows.append((number, "gone", size_text, *("-",) * 5, ""))
        for each in there:
            rows.append((number, *_holding(each, size_text, (made or {}).get(each.inst))))
            number = size_text = ""
    return rows


def without_version(fleet: Fleet, lost: Mapping[str, Sequence[int]]) -> Rows:
    """A line for each replica that holds nothing, or has lost its seat.

    Args:
        lost: The ranks of those whose leases have ended, as `asking.lost` tells.
    """
    holders = {each.replica for each in fleet.held}
    rows: Rows = [
        ("-", at.state, "-", at.replica, str(at.world_size), at.datacenter, at.how, "-", "")
        for at in lines.lines(fleet)
        if at.replica not in holders
    ]
    gone = sorted(lost.keys() - holders)
    return [*rows, *(("-", "lost its seat", "-", name, *("-",) * 4, "") for name in gone)]


def _holding(each: Held, size_text: str, made: Headway | None) -> Sequence[str]:
    full = "full" if each.is_offered else "full, not offered"
    state = full if each.state == "full" else each.state
    state = headway.text(made) if made else state
    ranks, sources = str(each.world_size), some(each.sources)
    reads = sources or (f"(read by {some(each.readers)})" if each.readers else "")
    kind = "relay" if each.state == "filling" and each.is_relay else each.kind
    how = f"{kind}, spot" if each.spot else kind
    row = (state, size_text, each.replica, ranks, each.datacenter, how)
    return (*row, age(each.since_ms), reads)


def behind(fleet: Fleet) -> list[str]:
    """The replicas that are not complete, or that hold nothing or something older, in words."""
    found = []
    holders = {each.replica for each in fleet.held}
    there = fleet.replicas.values()
    if empty := [each.name for each in there if each.name not in holders | _absent(fleet)]:
        ask = f"torch-ros why {quote(fleet.model)} {quote(empty[0])}"
        found.append(f"{some(empty)}: no version; to see why: {ask}")
    held = {each.replica: each.ref for each in reversed(fleet.held) if each.state != "filling"}
    for replica in fleet.replicas.values():
        ref = held.get(replica.name)
        if replica.state not in {"complete", "gone"}:
            found.append(f"{replica.name}: {replica.state}, of {replica.world_size} ranks")
        elif fleet.latest is not None and ref is not None and ref.order < fleet.latest.order:
            where = "" if ref.run == fleet.latest.run else f" of run {ref.run}"
            found.append(f"{replica.name}: holds {ref.version}{where}")
    return found


def _absent(fleet: Fleet) -> set[str]:
    return {each.name for each in fleet.replicas.values() if each.state in {"left", "gone"}}


def differences(found: "Iterable[Difference]") -> Rows:
    """A line for each tensor that differs."""
    rows: Rows = []
    for each in found:
        if each.changed is None:
            rows.append((each.name, "-", "-", each.why))
        else:
            share = f"{each.changed / each.count:.3%}"
            rows.append((each.name, str(each.changed), str(each.count), share))
    return rows


def unverified(found: "Iterable[Deviation]", odd: "Iterable[Difference]") -> Rows:
    """A line for each tensor of each replica that is not what others have."""
    rows: Rows = [(each.name, each.replica, f"unlike {some(each.others)}") for each in found]
    return [*rows, *((each.name, "all", each.why) for each in odd)]


def age(at_ms: int | None, now_ms: int | None = None) -> str:
    """How long ago that was, by this host's clock; never negative, since clocks differ."""
    if at_ms is None:
        return "-"
    passed_s = max(0, (wall_ms() if now_ms is None else now_ms) - at_ms) // 1000
    unit, length_s = next((each for each in TIMES if passed_s >= each[1]), TIMES[-1])
    return f"{passed_s // length_s} {unit}"


def size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{size_bytes} B"
