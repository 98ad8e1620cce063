"""Whether a rank stays with a source, and where it goes on (docs/PROTOCOL.md#replicate). Pure."""

from collections.abc import Callable, Mapping

from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.sources import (
    Candidate,
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
    """Where the holdings of a source are, also when its processes have taken their seats again."""
    keys = (
        seat.keys.holding(ref.run, ref.version, source.datacenter, k.first_of(inst))
        for inst in source.insts
    )
    return tuple(range_ for key in keys for range_ in (one(key), under(f"{key}.")))


def still_offers(view: View, seat: Seat, ref: VersionRef, source: Source) -> bool:
    """Whether what its processes show is held still, by whatever name."""
    for range_ in there_ranges(seat, ref, source):
        for _, where, holding, entry in legible.holdings(view.within(range_)):
            # Processes that came back with all of it show it with the mark that they had; those
            # that are filling are younger than their readers then.
            is_born_then = (where.inst, entry.create_rev) == (source.inst, source.born)
            is_same = source.is_full or is_born_then or k.lingers(where.inst)
            is_same &= holding.state != "filling" or holding.is_relay
            if is_same and holding.mark == source.mark:
                return True
    return False


def choose_again(
    view: View,
    seat: Seat,
    ref: VersionRef,
    candidates: Mapping[str, Candidate],
    tried: Mapping[str, int],
    best: Callable[[Mapping[str, Candidate], set[str]], str],
) -> str:
    """Where the source is that this rank goes on from; "": nowhere. Others may choose others."""
    left = {inst: it for inst, it in candidates.items() if tried.get(inst, 0) < TRIES_MAX}
    if not left:
        if not shows_whole(view, seat, ref):
            raise Unseen
        return ""
    inst = best(eligible_of(view, seat, ref, left, tried), suspects(view, seat.keys))
    return k.place(left[inst].holding.datacenter, inst)


def is_to_be_left(
    view: View,
    seat: Seat,
    source: Source,
    tried: Mapping[str, int],
    silent_s: float,
    candidates: Mapping[str, Candidate],
) -> bool:
    """Whether one of the candidates, which failed no more often than `source`, is better than that.

    A far one is better than a near one only if that cannot be thought to be slow.
    """
    others = candidates.keys() - {source.inst} - suspects(view, seat.keys)
    farthest = max(distance(source.datacenter, seat), int(silent_s > FAR_SILENCE_S))
    tries = tried.get(source.inst, 0)
    return any(tried.get(i, 0) <= tries and candidates[i].distance <= farthest for i in others)
