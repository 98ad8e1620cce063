"""The publishers of a version, with which a replica compares its own: docs/protocol/publishers.md.

Pure.
"""

from typing import NamedTuple

from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.seat import Seat, own_group
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Ranges, View


def elder_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    return (*seat.own, seat.keys.holdings_of(ref.run, ref.version))


class Elder(NamedTuple):
    """An older publisher of what a replica is about to offer."""

    inst: str
    world_size: int


def elder(view: View, seat: Seat, ref: VersionRef) -> Step[Elder | None]:
    """An older publisher of `ref`, with whose bytes this replica's have to be compared first.

    The oldest that is full; while none is, one that fills is waited for. None: there is none, or it
    has gone. Nobody waits for a younger one, so no two wait for each other; and one older publisher
    is enough, since each was compared with one that is older still.
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
