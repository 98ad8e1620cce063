"""The meaning of a call of the group to a rank that is about to make its own. Pure.

docs/protocol/steps.md#ranks-that-are-out-of-step has the rules.
"""

from enum import Enum
from itertools import takewhile

from torch_ros.errors import CallMismatch, DeadlineExceeded
from torch_ros.protocol.records import Asked, Call, Failure
from torch_ros.protocol.seat import Seat, calls_of
from torch_ros.store.txn import View

STEPS = ("publish", "save")  # whose versions tell which of two ranks is behind


class Meeting(Enum):
    """Found by a rank in the place of its own call, and what the rank does then."""

    SAME = "its own call: it goes on in it, or raises how it has ended"
    MISSED = "one that its peers have ended: it skips that, and makes its own under the next number"
    TO_MAKE = "an unpublish that its peers are in: it makes that, and begins its own anew"
    LATE = "a step of peers that are behind: it ends that for all, and makes its own after it"
    AHEAD = "a call of peers that are ahead, or elsewhere: it raises, and comes to that call again"
    OTHER = "none of these: it raises, which ends the call for all"


class Missed(Exception):
    """In the place of this rank's call the group has an unpublish, which changes what it holds.

    This rank has learned its end; or has to make it too, if it has not ended.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


def is_left_out(view: View, seat: Seat, own: Call, told: Asked | None) -> bool:
    """Whether the call that `own` meets is part of one that this rank has left out.

    A rank that is late is waited for in the call that it comes to. So it has, if peers wait in a
    later call like its caller's, or have waited in a later part of this one, in vain, and this
    rank was told that of the call before.
    """
    later = [call for call in calls_of(view, seat) if call.number > own.number]
    later.sort(key=lambda call: call.number)
    if told == own.caller:
        rest = takewhile(lambda call: call.continues and call.caller == own.caller, later)
        if any(_is_waited_out(call) for call in rest):
            return True
    begun = [call for call in later if not call.continues]
    is_open = bool(later) and later[-1].outcome is None
    return is_open and bool(begun) and begun[-1].caller == own.caller


def behind(view: View, seat: Seat, number: int) -> int:
    """How many calls the group has made after that number."""
    return sum(call.number > number for call in calls_of(view, seat))


def meet(
    call: Call,
    own: Call,
    *,
    refuses: bool = False,
    told: Asked | None = None,
    block: Asked | None = None,
    left_out: bool = False,
) -> Meeting:
    """The meaning of `call` to a rank that is about to make its own of that number.

    Args:
        refuses: It makes that only to end the call of the caller, whatever its peers have come to.
        told: The call of its caller of which it was last told a failure that it had no part in.
            Told again, of one in which its peers waited in vain, it is one try behind.
        block: The call that ends what it is in, between calls: a peer has given that up.
        left_out: If `call` has ended, it is one that this rank has left out.
    """
    has_ended, failure = call.outcome is not None, call.failure
    is_told_again = _is_waited_out(call) and told == own.caller
    is_in_block = own.asked == block and not own.continues  # else all have come to its end
    if refuses and not _is_of_caller(call, own) and not is_in_block:
        return Meeting.AHEAD
    if not refuses and (is_told_again or (left_out and has_ended and not own.continues)):
        return Meeting.MISSED
    if failure is not None:
        return Meeting.SAME if _is_told(call, failure, own, block) else Meeting.MISSED
    is_refused = refuses and _is_of_caller(call, own) and call.kind != "unpublish"
    if call.asked == own.asked or is_refused:
        return Meeting.SAME
    if call.kind == "unpublish":
        return Meeting.MISSED if has_ended else Meeting.TO_MAKE
    if not has_ended:
        return _between_steps(call.asked, own.asked)
    return Meeting.OTHER


def _between_steps(there: Asked, own: Asked) -> Meeting:
    """The meaning of another call that is open, also of the check before a step."""
    is_step = own.verb in STEPS and there.verb == own.verb
    if not is_step or not isinstance(own.version, int) or not isinstance(there.version, int):
        return Meeting.OTHER
    if own.version == there.version:
        return Meeting.OTHER
    return Meeting.LATE if own.version > there.version else Meeting.AHEAD


def _is_waited_out(call: Call) -> bool:
    return call.failure is not None and call.failure.kind == DeadlineExceeded.__name__


def _is_of_caller(call: Call, own: Call) -> bool:
    """Whether both are parts of one call of the caller, and not of two that are alike."""
    is_one = call.caller == own.caller or _is_with_other_arguments(call, own)
    return is_one and own.continues >= call.continues


def _is_with_other_arguments(call: Call, own: Call) -> bool:
    """Whether both begin one call, to which the ranks have given different arguments.

    Two numbers are two steps: one of the ranks is behind.
    """
    here, there = own.caller, call.caller
    if own.continues or call.continues or here.verb != there.verb:
        return False
    are_numbers = isinstance(here.version, int) and isinstance(there.version, int)
    return here.version == there.version or not are_numbers


def _is_told(call: Call, failure: Failure, own: Call, block: Asked | None) -> bool:
    """Whether the failure of `call` is one of the call that `own` is a part of."""
    if _is_of_caller(call, own) or call.asked == block:
        return True
    if failure.kind == CallMismatch.__name__ and call.continues and call.asked == call.caller:
        return True  # a peer has found that the ranks are out of step, and tells all
    return call.kind == "unpublish" and call.asked == own.asked  # which counts for any caller
