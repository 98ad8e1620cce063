"""Whether a rank stays with a source, and where it goes on (docs/PROTOCOL.md#replicate). Pure."""

from collections.abc import Mapping

from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.sources import (
    Candidates,
    Source,
    distance,
    eligible_of,
    shows_whole,
    suspects,
)
from torch_ros.store.txn import Range, Unseen, View, one, under

TRIES_MAX = 3  # with one source; a failure may have been the way and not the source
FAR_SILENCE_S = 12.0  # of a near source, until a far one is better: most leases end before that


def there_ranges(seat: Seat, ref: VersionRef, source: Source) -> tuple[Range, ...]:
    """The ranges where a source's holdings are, also when its processes have taken new seats."""
    keys = (
        seat.keys.holding(ref.run, ref.version, source.datacenter, k.first_of(inst))
        for inst in source.insts
    )
    return tuple(range_ for key in keys for range_ in (one(key), under(f"{key}.")))


def still_offers(view: View, seat: Seat, ref: VersionRef, source: Source) -> bool:
    """Whether the content that the source's processes show is still held, by whatever name.

    A full holding may be another one by now: the same processes come back with all of it, and show
    it with the mark that they had. One that fills must be the same, or linger from its incarnation:
    made anew, it is younger than this rank, and might read from this rank.
    """
    for range_ in there_ranges(seat, ref, source):
        for _, where, holding, entry in legible.holdings(view.within(range_)):
            is_same = (where.inst, entry.create_rev) == (source.inst, source.born)
            may_serve = source.is_full or is_same or k.lingers(where.inst)
            has_stopped = holding.state == "filling" and not holding.is_relay
            if may_serve and not has_stopped and holding.mark == source.mark:
                return True
    return False


def eligible_again(
    view: View, seat: Seat, ref: VersionRef, found: Candidates, tried: Mapping[str, int]
) -> Candidates:
    """The candidates that a rank may go on from when it has lost its last source, if any.

    Each is tried a few times at most, or a rank whose own link is broken would go round for ever.

    Raises: Unseen: None of those in view are left.
    """
    left = {inst: it for inst, it in found.items() if tried.get(inst, 0) < TRIES_MAX}
    if left:
        return eligible_of(view, seat, ref, left, tried)
    if not shows_whole(view, seat, ref):
        raise Unseen
    return {}


def is_to_be_left(
    view: View,
    seat: Seat,
    source: Source,
    tried: Mapping[str, int],
    silent_s: float,
    found: Candidates,
) -> bool:
    """Whether a source that does not answer is to be left, since one of those `found` is better.

    Better is one that is not suspected, was lost no more often, and is as near; or far, once the
    source is silent for longer than a slow one would be.
    """
    # 0: near, 1: far
    max_distance = max(distance(source.datacenter, seat), int(silent_s > FAR_SILENCE_S))
    tries_max = tried.get(source.inst, 0)
    others = found.keys() - {source.inst} - suspects(view, seat.keys)
    return any(
        tried.get(inst, 0) <= tries_max and found[inst].distance <= max_distance for inst in others
    )
