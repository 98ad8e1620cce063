"""Looking out for a version to go to, where there may be none yet. Pure.

docs/protocol/following.md#updates-that-wait has the rules.
"""

from collections.abc import Callable

from torch_ros.protocol import calls, legible
from torch_ros.protocol import keys as k
from torch_ros.protocol.forerunners import FETCHED, Next, Skipping, near_range, next_version
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec, newer_refs
from torch_ros.store.loops import Wait
from torch_ros.store.txn import Unseen, View


def look_out(
    view: View,
    seat: Seat,
    spec: Spec,
    held: VersionRef | None,
    skipping: Skipping | None,
    until: Callable[[], bool] | None = None,
) -> tuple[Next, Wait | None]:
    """The step to take, and the wait for a better one, if there is no version to go to.

    Args:
        until: When it is true, the wait is over for this rank.
    """
    keys = seat.keys
    if held is None:
        offer = calls.elsewhere(view, seat, spec)
        if isinstance(offer, Wait):
            return Next(), Wait(offer.reason, offer.ranges, until=until)
        return Next(offer.ref), None
    found = next_version(view, seat, spec, held, skipping)
    ranges = [keys.versions()]
    if found.ref is not None and found.said != FETCHED and not _is_elsewhere(view, seat, found.ref):
        ranges.append(keys.holdings_of(found.ref.run, found.ref.version))
    elif found.ref is not None:
        return found, None
    if skipping is not None:
        ranges += [near_range(seat, ref) for ref in newer_refs(view, keys, held)]
    return Next(said=found.said), Wait("", tuple(ranges), until=until)


def _is_elsewhere(view: View, seat: Seat, ref: VersionRef) -> bool:
    """Whether another replica offers it: the own copy in host memory is no source."""
    holders = seat.keys.holdings_of(ref.run, ref.version)
    for _, where, holding, _ in legible.holdings(view.seen(holders)):
        is_offered = holding.state == "full" and holding.uid == ref.uid
        if is_offered and not k.is_of(where.inst, seat.inst):
            return True
    if not view.shows(holders):
        raise Unseen
    return False
