"""A slow reader passes nothing on (docs/protocol/pace.md). Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from torch_ros.protocol import keys as k
from torch_ros.protocol import sources
from torch_ros.protocol.records import Call, Holding, Reader, VersionRef, extended, extension
from torch_ros.protocol.seat import (
    Leaves,
    Seat,
    call_now,
    calls_of,
    group_txn,
    holding_put,
    version_read,
)
from torch_ros.protocol.sources import EVER, Source, is_relaying, seen_near, suspects
from torch_ros.store.loops import Act, Done, Step
from torch_ros.store.txn import Put, Txn, View

NAME = "pace"  # in `Call.more`
Mode = Literal["slow", "rests"]
"""The group steps aside in this replicate; it did so in the one before."""


def _pace(call: Call) -> Mode | None:
    return extension(call.more, NAME, Mode)  # type: ignore[arg-type]  # a Literal is a type to msgspec


def _paced(call: Call, pace: Mode | None) -> Call:
    return msgspec.structs.replace(call, more=extended(call.more, NAME, pace))


def is_aside(call: Call) -> bool:
    """Whether its group relays nothing in it any more, or has not begun to."""
    return NAME in call.more


def rests(call: Call) -> bool:
    """Whether its group relays nothing in it from the beginning."""
    return _pace(call) == "rests"


class SlowOnes(Leaves):
    """The groups that have stepped aside, in the call in which they did and in the one after it."""

    def is_leaf(self, seat: Seat, call: Call) -> bool:
        """Some of several ranks that stepped aside in the middle may be read from still."""
        return rests(call) or (_pace(call) == "slow" and seat.world_size == 1)

    def begun(self, view: View, seat: Seat, call: Call) -> Call:
        assert call.ref is not None
        return _paced(call, "rests") if _shall_rest(view, seat, call.ref) else call

    def ended(self, view: View, seat: Seat, call: Call) -> Txn | None:
        if not rests(call):
            return None
        assert call.ref is not None
        if _may_rest(view, seat, call.ref):
            return None
        own = Holding.at(view, seat.holding(call.ref))
        assert own is not None
        return _put(view, seat, _paced(call, None), own, is_relay=True)


def step_aside(view: View, seat: Seat, call: Call, reads: Sequence[str]) -> Step[Call]:
    """The call, with a `pace` if its group relays nothing in it any more.

    Without one too few of those that fill here would relay. A seed has no near source, and is
    never told to step aside.

    Args:
        reads: The keys of the records by which this rank reads from its source.
    """
    ref = version_read(view, seat, call)
    own = Holding.at(view, seat.holding(ref))
    if own is None or not is_relaying(own):
        return Done(call_now(view, seat, call))
    relays, others = _filling(view, seat, ref)
    if others + 1 > relays - 1:
        return Done(call)
    slow = _paced(call_now(view, seat, call), "slow")
    txn = _put(view, seat, slow, own, is_relay=False)
    if seat.leaves.is_leaf(seat, slow):  # newcomers find its source free, also if it stays there
        reader = Reader(call.number, is_leaf=True).encode()  # of a near one: no other is judged
        there = [(key, entry.lease_id) for key in reads if (entry := view.get(key)) is not None]
        guards = (view.unchanged(key) for key, _ in there)
        puts = (Put(key, reader, lease_id) for key, lease_id in there)
        txn = msgspec.structs.replace(txn, guards=(*txn.guards, *guards), ops=(*txn.ops, *puts))
    return Act(txn, lambda _: slow)


def another(
    view: View, seat: Seat, call: Call, source: Source, tried: Mapping[str, int]
) -> Step[str]:
    """Where a near source is that is better than `source`, of which this rank gets too little.

    For a relay it comes before `source`, as if that were lost, so the order of births holds; for a
    leaf it is read less. "": there is none. Nobody goes far away for speed.
    """
    ref = version_read(view, seat, call)
    before = sources.born_before(view, seat, call)
    is_leaf = before == EVER
    lost = {*tried, seat.inst if is_leaf else source.inst}
    suspected = suspects(view, seat.keys)
    near = {
        inst: found
        for inst, found in sources.candidates_of(view, seat, ref, before, lost).items()
        if not (found.distance or tried.get(inst) or inst in suspected)
    }
    if is_leaf:
        best = sources.best_of(near, suspected, is_leaf=True) if near else ""
    else:
        older = {
            inst: found for inst, found in near.items() if found.is_full or found.born < source.born
        }
        older.pop(source.inst, None)
        best = sources.best_of(older, suspected) if older else ""
    if best in ("", source.inst):
        return Done("")
    return Done(k.place(near[best].holding.datacenter, best))


def _shall_rest(view: View, seat: Seat, ref: VersionRef) -> bool:
    """Whether the group is to rest: it stepped aside the last time, and is not the first here."""
    reads = (
        call for call in reversed(calls_of(view, seat)) if call.kind == "replicate" and call.ref
    )
    last = next(reads, None)
    return last is not None and _pace(last) == "slow" and bool(_near(view, seat, ref))


def _may_rest(view: View, seat: Seat, ref: VersionRef) -> bool:
    """Whether it may go on resting, now that all older holdings are seen.

    Not if it has to be the seed, nor if most of those that fill here would pass nothing on.
    """
    relays, others = _filling(view, seat, ref)
    return bool(_near(view, seat, ref)) and others <= max(1, relays)


def _put(view: View, seat: Seat, call: Call, own: Holding, *, is_relay: bool) -> Txn:
    assert call.ref is not None
    held = holding_put(view, seat, call.ref, msgspec.structs.replace(own, is_relay=is_relay))
    return group_txn(view, seat, call, (view.unchanged(held.key),), (held,))


def _near(view: View, seat: Seat, ref: VersionRef) -> list[Holding]:
    """Those that are seen here and could be read from."""
    return [
        holding
        for inst, holding in seen_near(view, seat, ref).items()
        if inst != seat.inst and (holding.state == "full" or is_relaying(holding))
    ]


def _filling(view: View, seat: Seat, ref: VersionRef) -> tuple[int, int]:
    """How many of those that are seen to fill here are relays, and how many are not."""
    near = seen_near(view, seat, ref).values()
    fill = [held.is_relay for held in near if held.state == "filling"]
    return fill.count(True), fill.count(False)
