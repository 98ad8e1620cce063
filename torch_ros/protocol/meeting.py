"""The meaning of a call of the group to a rank that is about to make its own. Pure.

docs/protocol/steps.md#ranks-that-are-out-of-step has the rules.
"""

import re
from itertools import takewhile
from typing import Literal

from torch_ros.errors import CallMismatch, DeadlineExceeded
from torch_ros.protocol.calls import CHECK
from torch_ros.protocol.records import Call, Failure
from torch_ros.protocol.seat import Seat, calls_of, own_group
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import View

_STEP = re.compile(rf"(?:{CHECK})?(?P<verb>publish|save) (?P<version>\d+)")
_NUMBERED = re.compile(r"[a-z]+ [0-9]{1,19}")  # longer ones are refused

Meeting = Literal["same", "missed", "to make", "late", "ahead", "other"]
"""Found by a rank in the place of its own call: that one; one that its peers have ended, or one
that it has to make too; one that is behind, or ahead of, its own; none of these."""


def is_left_out(view: View, seat: Seat, own: Call, told: str) -> bool:
    """Whether the call that `own` meets is part of one that this rank has left out.

    A rank that is late is waited for in the call that it comes to. So it has, if peers wait in a
    later call like its caller's, or have waited in a later part of this one, in vain, and this
    rank was told that of the call before.
    """
    later = [call for call in calls_of(view, seat) if call.number > own.number]
    later.sort(key=lambda call: call.number)
    if told != "" and told == own.caller:
        rest = takewhile(lambda call: call.continues and call.caller == own.caller, later)
        if any(_is_waited_out(call) for call in rest):
            return True
    begun = [call for call in later if not call.continues]
    is_open = bool(later) and later[-1].outcome is None
    return is_open and bool(begun) and begun[-1].caller == own.caller != ""


def gone_on(view: View, seat: Seat, number: int, asked: str) -> Step[bool]:
    """Whether the peers go on with the caller's call `asked`, of which `number` was the last part.

    Waits until the group has made another call.
    """
    own_group(view, seat)
    later = [call for call in calls_of(view, seat) if call.number > number]
    if not later:
        return Wait("", seat.own)
    found = min(later, key=lambda call: call.number)
    return Done(found.continues and found.caller == asked)


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
    left_out: bool = False,
) -> Meeting:
    """The meaning of `call` to a rank that is about to make its own of that number.

    Args:
        refuses: It makes that only to end the call of the caller, whatever its peers have come to.
        told: The call of its caller, or its own, of which it was last told a failure that it had no
            part in. Told again, of one in which its peers waited in vain, it is one try behind.
        block: The text of the call that ends the install that it is in: a peer has given that up.
        left_out: If `call` has ended, it is one that this rank has left out.
    """
    asked, has_ended = own.asked, call.outcome is not None
    failure = call.outcome.failure if call.outcome is not None else None
    is_told_again = _is_waited_out(call) and told != "" and told == (own.caller or asked)
    is_in_block = asked == block and not own.continues  # else all have come to its end
    if refuses and not _is_of_caller(call, own) and not is_in_block:
        return "ahead"
    if not refuses and (is_told_again or (left_out and has_ended and not own.continues)):
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


def _is_waited_out(call: Call) -> bool:
    failure = call.outcome.failure if call.outcome is not None else None
    return failure is not None and failure.kind == DeadlineExceeded.__name__


def _is_of_caller(call: Call, own: Call) -> bool:
    """Whether both are parts of one call of the caller, and not of two with one text."""
    is_one = call.caller == own.caller or _is_with_other_arguments(call, own)
    return is_one and own.caller != "" and own.continues >= call.continues


def _is_with_other_arguments(call: Call, own: Call) -> bool:
    """Whether both begin one call, to which the ranks have given different arguments.

    Two numbers are two steps: one of the ranks is behind.
    """
    if own.continues or call.continues or call.caller.split(" ")[0] != own.caller.split(" ")[0]:
        return False
    return not (_NUMBERED.fullmatch(call.caller) and _NUMBERED.fullmatch(own.caller))


def _is_told(call: Call, failure: Failure, own: Call, block: str) -> bool:
    """Whether the failure of `call` is one of the call that `own` is a part of."""
    if _is_of_caller(call, own) or call.asked == block:
        return True
    if failure.kind == CallMismatch.__name__ and call.continues and call.asked == call.caller:
        return True  # a peer has found that the ranks are out of step, and tells all
    is_alone = not call.caller or call.kind == "unpublish"  # which counts for any caller
    return is_alone and call.asked == own.asked
