"""The publishers of a version: whom a rank prefetches from, and compares its own with. Pure.

docs/protocol/prefetch.md, docs/protocol/publishers.md.
"""

from typing import NamedTuple

from torch_ros.errors import SourceLost
from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.records import Holding, VersionRef
from torch_ros.protocol.seat import Seat, own_group
from torch_ros.protocol.sources import NEIGHBOURS, Source, learned, seen_holdings
from torch_ros.protocol.versions import Spec, first_holders, newer
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Ranges, Sample, Unseen, View, one


class Original(NamedTuple):
    """A version, and its publisher, who may have deltas to it."""

    ref: VersionRef
    place: str


def oldest_original(view: View, seat: Seat, spec: Spec, held: VersionRef) -> Step[Original | None]:
    """What an update would go to, and its oldest publisher among the oldest holdings here.

    None: nothing is newer, or nobody among them has published it.

    Raises:
        VersionNotFound: An absolute version that is gone.
    """
    offer = newer(view, seat.keys, spec, held)
    if offer is None or offer.ref.uid == held.uid:
        return Done(None)
    ref = offer.ref
    there = seat.keys.holdings_in(ref.run, ref.version, seat.datacenter)
    oldest = Sample(there, NEIGHBOURS, is_oldest=True)
    if not view.has(oldest):
        raise Unseen(oldest, first_holders(seat.keys, ref.run, ref.version))
    found = (
        (entry.create_rev, inst)
        for inst, (holding, entry) in seen_holdings(view, seat, ref).items()
        if _may_be_read(holding, ref, seat) and not k.is_of(inst, seat.inst)
    )
    inst = min(found, default=(0, ""))[1]
    return Done(Original(ref, k.place(seat.datacenter, inst)) if inst else None)


def _may_be_read(holding: Holding, ref: VersionRef, seat: Seat) -> bool:
    is_whole = holding.state == "full" and holding.uid == ref.uid
    return is_whole and holding.is_original and holding.datacenter == seat.datacenter


def reach_ranges(seat: Seat, original: Original) -> Ranges:
    ref, place = original
    return (
        one(seat.keys.holding_at(ref.run, ref.version, place)),
        seat.keys.shards(k.inst_at(place)),
    )


def reach(view: View, seat: Seat, original: Original) -> Step[Source]:
    """How to reach its processes. Nothing is written, so nobody waits for this rank.

    Raises:
        SourceLost: It does not offer this content any more, or one of its processes is gone.
    """
    ref, inst = original.ref, k.inst_at(original.place)
    key = seat.keys.holding_at(ref.run, ref.version, original.place)
    held, entry = Holding.at(view, key), view.get(key)
    if held is None or entry is None or not _may_be_read(held, ref, seat):
        raise SourceLost(k.replica_of(inst), "it left before it was read", 0, 0).orderly()
    return Done(learned(inst, held, entry.create_rev, dict(view.within(seat.keys.shards(inst)))))


def elder_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    return (*seat.own, seat.keys.holdings_of(ref.run, ref.version))


class Elder(NamedTuple):
    """An older publisher of what a replica is about to offer."""

    inst: str
    world_size: int


def elder(view: View, seat: Seat, ref: VersionRef) -> Step[Elder | None]:
    """An older publisher of this content, as whose this replica is about to offer its own.

    None: there is none, or it has gone. Only older ones are waited for, so that nobody waits for
    whoever waits for him; and each has been compared with one that is older still.
    """
    own_group(view, seat)
    mine = view.get(seat.holding(ref))
    born = mine.create_rev if mine is not None else 0
    older = sorted(
        (entry.create_rev, Elder(where.inst, holding.world_size), holding.state)
        for _, where, holding, entry in legible.holdings(
            view.within(seat.keys.holdings_of(ref.run, ref.version))
        )
        if holding.uid == ref.uid and holding.is_original and entry.create_rev < born
    )
    full = [there for _, there, state in older if state == "full"]
    if full:
        return Done(full[0])
    if any(state == "filling" for _, _, state in older):
        first = k.replica_of(older[0][1].inst)
        reason = f"{first!r} publishes version {ref.version} too, and first"
        return Wait(reason, elder_ranges(seat, ref))
    return Done(None)
