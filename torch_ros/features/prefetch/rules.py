"""The publisher of a newer version, from whom a rank prefetches. Pure.

docs/protocol/prefetch.md.
"""

from typing import NamedTuple

from torch_ros.protocol import keys as k
from torch_ros.protocol.records import Holding, VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.sources import NEIGHBOURS, near_range, seen_holdings
from torch_ros.protocol.versions import Spec, first_holders, newer
from torch_ros.store.loops import Done, Step
from torch_ros.store.txn import Sample, Unseen, View


class Original(NamedTuple):
    """A version, and its publisher, who may have changes up to it."""

    ref: VersionRef
    place: str


def oldest_original(view: View, seat: Seat, spec: Spec, held: VersionRef) -> Step[Original | None]:
    """The next version of an update, and its oldest publisher among the oldest holdings here.

    None: nothing is newer, or nobody among them has published it.

    Raises: VersionNotFound: An absolute version that is gone.
    """
    offer = newer(view, seat.keys, spec, held)
    if offer is None or offer.ref.uid == held.uid:
        return Done(None)
    ref = offer.ref
    oldest = Sample(near_range(seat, ref), NEIGHBOURS, is_oldest=True)
    if not view.has(oldest):
        raise Unseen(oldest, first_holders(seat.keys, ref.run, ref.version))
    found = (
        (born, inst)
        for inst, (holding, born) in seen_holdings(view, seat, ref).items()
        if _may_be_read(holding, ref, seat) and not k.is_of(inst, seat.inst)
    )
    inst = min(found, default=(0, ""))[1]
    return Done(Original(ref, k.place(seat.datacenter, inst)) if inst else None)


def _may_be_read(holding: Holding, ref: VersionRef, seat: Seat) -> bool:
    is_whole = holding.state == "full" and holding.uid == ref.uid
    return is_whole and holding.is_original and holding.datacenter == seat.datacenter
