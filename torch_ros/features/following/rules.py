"""Looking out for a version to go to, where there may be none yet, and loops that are left. Pure.

docs/protocol/following.md has the rules.
"""

from collections.abc import Callable

from torch_ros.protocol import calls, legible
from torch_ros.protocol import keys as k
from torch_ros.protocol.policy import Next, Policy
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.seat import Seat, calls_of, own_group
from torch_ros.protocol.versions import Spec
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Unseen, View


def look_out(
    view: View,
    seat: Seat,
    spec: Spec,
    held: VersionRef | None,
    policy: Policy,
    until: Callable[[], bool] | None = None,
) -> tuple[Next, Wait | None]:
    """The step to take, and the wait for a better one, if there is no version to go to.

    Args:
        until: When it is true, the wait is over for this rank.
    """
    keys = seat.keys
    if held is None and not policy.is_asked_first:
        offer = calls.elsewhere(view, seat, spec)
        if isinstance(offer, Wait):
            return Next(), Wait(offer.reason, offer.ranges, until=until)
        return Next(offer.ref), None
    found = policy.next_version(view, seat, spec, held)
    ranges = [keys.versions(), *policy.watched(view, seat, held)]
    if (ref := found.goes_to) is not None and not _is_elsewhere(view, seat, ref):
        ranges.append(keys.holdings_of(ref.run, ref.version))
    elif found.ref is not None:
        return found, None
    elif held is not None and spec.absolute is not None:  # who reads it now may be the last
        ranges.append(keys.holdings_of(held.run, spec.absolute))
    ends = [end for end in (until, found.until) if end is not None]
    is_over = (lambda: any(end() for end in ends)) if ends else None
    return Next(said=found.said), Wait("", tuple(ranges), until=is_over)


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


def gone_on(view: View, seat: Seat, number: int, asked: Asked) -> Step[bool]:
    """Whether the peers go on with the caller's call `asked`, of which `number` was the last part.

    Waits until the group has made another call.
    """
    own_group(view, seat)
    later = [call for call in calls_of(view, seat) if call.number > number]
    if not later:
        return Wait("", seat.own)
    found = min(later, key=lambda call: call.number)
    return Done(found.continues and found.caller == asked)
