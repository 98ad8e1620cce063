"""The meaning of a call of the group to a rank that is about to make its own. Pure.

docs/PROTOCOL.md#ranks-that-are-out-of-step has the rules.
"""

import re
from typing import Literal

from torch_ros.errors import CallMismatch, DeadlineExceeded
from torch_ros.protocol.calls import CHECK
from torch_ros.protocol.records import Call, Failure
from torch_ros.protocol.seat import Seat, calls_of
from torch_ros.store.txn import View

_STEP = re.compile(rf"(?:{CHECK})?(?P<verb>publish|save) (?P<version>\d+)")

Meeting = Literal["same", "missed", "to make", "late", "ahead", "other"]
"""Found by a rank in the place of its own call: that one; one that its peers have ended, or one
that it has to make too; one that is behind, or ahead of, its own; none of these."""


def is_awaited(view: View, seat: Seat, own: Call) -> bool:
    """Whether peers wait in a later call like its caller's, of which `own` is no part.

    This rank left one out then: a rank that is late is waited for in the one that it comes to.
    """
    later = [call for call in calls_of(view, seat) if call.number > own.number]
    later.sort(key=lambda call: call.number)
    begun = [call for call in later if not call.continues]
    is_open = bool(later) and later[-1].outcome is None
    return is_open and bool(begun) and begun[-1].caller == own.caller != ""


def behind(view: View, seat: Seat, number: int) -> int:
    """How many calls the group has made after that number."""
    return sum(call.number > number for call in calls_of(view, seat))


def meet(
    call: Call,
    own: Call,
    *,
    refuses: bool = False,
    told: str = "",
    block: str = "",
    is_awaited: bool = False,
) -> Meeting:
    """The meaning of `call` to a rank that is about to make its own of that number.

    Args:
        refuses: It makes that only to end the call of the caller, whatever its peers have come to.
        told: The call of its caller, or its own, of which it was last told a failure that it had no
            part in. Told again, of one in which its peers waited in vain, it is one try behind.
        block: The text of the call that ends the install that it is in: a peer has given that up.
        is_awaited: Its peers wait for it in a later call that is like its own.
    """
    asked, has_ended = own.asked, call.outcome is not None
    failure = call.outcome.failure if call.outcome is not None else None
    is_waited_out = failure is not None and failure.kind == DeadlineExceeded.__name__
    is_told_again = is_waited_out and told != "" and told == (own.caller or asked)
    if refuses and not _is_of_caller(call, own) and asked != block:
        return "ahead"
    if not refuses and (is_told_again or (is_awaited and has_ended and not own.continues)):
        return "missed"
    if failure is not None:
        return "same" if _is_told(call, failure, own, block) else "missed"
    if call.asked == asked or (refuses and _is_of_caller(call, own) and call.kind != "unpublish"):
        return "same"
    if call.kind == "unpublish":
        return "missed" if has_ended else "to make"
    here, there = _STEP.fullmatch(asked), _STEP.fullmatch(call.asked)
    if not has_ended and here and there and here["verb"] == there["verb"]:
        behind = int(here["version"]) - int(there["version"])
        return "late" if behind > 0 else "ahead" if behind < 0 else "other"
    return "other"


def _is_of_caller(call: Call, own: Call) -> bool:
    """Whether both are parts of one call of the caller, and not of two with one text."""
    return call.caller == own.caller != "" and own.continues >= call.continues


def _is_told(call: Call, failure: Failure, own: Call, block: str) -> bool:
    """Whether the failure of `call` is one of the call that `own` is a part of."""
    if _is_of_caller(call, own) or call.asked == block:
        return True
    if failure.kind == CallMismatch.__name__ and call.continues and call.asked == call.caller:
        return True  # a peer has found that the ranks are out of step, and tells all
    is_alone = not call.caller or call.kind == "unpublish"  # which counts for any caller
    return is_alone and call.asked == own.asked
