"""Whom a rank reads from when it has left a source (docs/PROTOCOL.md#replicate). Pure.

A call is given as the rank knows it, and not looked up: a leaf reads from younger relays only when
it passes nothing on, which it learns later than the store.
"""

from collections.abc import Mapping

from torch_ros.errors import SourceLost
from torch_ros.protocol import keys as k
from torch_ros.protocol import sources
from torch_ros.protocol.records import Call
from torch_ros.protocol.seat import Seat, version_read
from torch_ros.protocol.sources import EVER, Source, distance, suspects
from torch_ros.store.loops import Done, Step
from torch_ros.store.txn import Unseen, View

TRIES_MAX = 3  # with one source; a failure may have been the way and not the source
FAR_SILENCE_S = 12.0  # of a near source, until a far one is better: most leases end before that


def choose_again(
    view: View, seat: Seat, call: Call, tried: Mapping[str, int], lost: SourceLost
) -> Step[str]:
    """Where another source for this rank is, whose last one was `lost`. Others may choose others.

    Raises:
        SourceLost: There is none, or the peers have ended the call.
    """
    ref = version_read(view, seat, call)
    before = sources.born_before(view, seat, call)
    candidates = {
        inst: found
        for inst, found in sources.candidates_of(view, seat, ref, before, {*tried}).items()
        if tried.get(inst, 0) < TRIES_MAX
    }
    if not candidates:
        if not sources.shows_whole(view, seat, ref):
            raise Unseen
        raise lost
    eligible = sources.eligible_of(view, seat, ref, candidates, tried)
    best = (sources.leaf_place if before == EVER else sources.best_of)(
        eligible, suspects(view, seat.keys)
    )
    return Done(k.place(eligible[best].holding.datacenter, best))


def has_other(
    view: View, seat: Seat, call: Call, source: Source, tried: Mapping[str, int], silent_s: float
) -> Step[bool]:
    """Whether `source`, which has not answered for so long, is to be left for somebody else."""
    ref = version_read(view, seat, call)
    before = sources.born_before(view, seat, call)
    found = sources.candidates_of(view, seat, ref, before)
    there = {inst: candidate.distance for inst, candidate in found.items()}
    is_left = is_to_be_left(view, seat, source, tried, silent_s, there)
    if not (is_left or sources.shows_whole(view, seat, ref)):
        raise Unseen  # far ones may be there
    return Done(is_left)


def is_to_be_left(
    view: View,
    seat: Seat,
    source: Source,
    tried: Mapping[str, int],
    silent_s: float,
    there: Mapping[str, int],
) -> bool:
    """Whether one of those `there`, who are so far away, failed no more often than `source`.

    A far one is better than a near one only if that cannot be thought to be slow.
    """
    others = there.keys() - {source.inst} - suspects(view, seat.keys)
    farthest = max(distance(source.datacenter, seat), int(silent_s > FAR_SILENCE_S))
    tries = tried.get(source.inst, 0)
    return any(tried.get(i, 0) <= tries and there[i] <= farthest for i in others)
