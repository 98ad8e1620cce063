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
    AHEAD = "a call of peers that are ahead: it raises, and comes to that call again"
    OTHER = "none of these: it raises, which ends the call for all"


class Missed(Exception):
    """The group has `call` in the place of this rank's own, which is begun anew after it.

    This rank has learned how `call` ended; or has to make it too: an unpublish that has not ended.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


def is_left_out(view: View, seat: Seat, own: Call, told: Asked | None) -> bool:
    """Whether the ended call in the place of `own` is one that this rank has left out.

    Two calls of a user that ask the same look alike: this rank would take the end of the one it
    left out for that of its own, and stay one behind. It has left one out if its peers wait in a
    later call that asks the same; or if they waited in vain in a later part of this one, and this
    rank was `told` of the failure of such a call before, in which it had no part either.
    """
    later = [call for call in calls_of(view, seat) if call.number > own.number]
    later.sort(key=lambda call: call.number)
    # The later parts of the user's call that the met one begins.
    rest = takewhile(lambda call: call.continues and call.caller == own.caller, later)
    if told == own.caller and any(map(_is_waited_out, rest)):
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
    """The meaning of `call` to a rank that finds it in the place of its own; by the first of these:

    1. The rank refuses, and `call` is none of what it would refuse: AHEAD.
    2. It is behind: it left `call` out, or is told again that peers waited in vain: MISSED.
    3. `call` has failed: SAME, if this rank is to raise that failure, too; else MISSED.
    4. Both ask the same, or `call` is a part of what the rank refuses: SAME.
    5. `call` is an unpublish: MISSED, if it has ended; else TO_MAKE.
    6. It has ended: OTHER. Else their versions tell (`_between_steps`).

    Args:
        refuses: This rank has failed, and makes `own` only so that the user's call fails on all.
        told: The last user's call whose failure this rank was told without a part in it.
        block: The call that ends the block, as of an install, that this rank is in; None: in none.
        left_out: This rank did not make `call`, now ended, when its peers did (`is_left_out`).
    """
    has_ended, is_of_caller = call.outcome is not None, _is_of_caller(call, own)
    if refuses:
        # A refusal of its block's end ends whatever call of the block the peers are in. One that
        # `continues` comes after that end has been made: the block is over.
        is_in_block = own.asked == block and not own.continues
        if not (is_of_caller or is_in_block):
            return Meeting.AHEAD  # the peers have ended what it would refuse
    else:
        # It was told so of its last call, too: it is one try behind, and its peers wait in vain.
        is_told_again = _is_waited_out(call) and told == own.caller
        if is_told_again or (left_out and has_ended and not own.continues):
            return Meeting.MISSED
    if call.failure is not None:
        return Meeting.SAME if _is_told(call, call.failure, own, block) else Meeting.MISSED
    # A refusal ends any part of the user's call, but no unpublish: tensors would stay offered.
    is_refused = refuses and is_of_caller and call.kind != "unpublish"
    if call.asked == own.asked or is_refused:
        return Meeting.SAME
    if call.kind == "unpublish":
        return Meeting.MISSED if has_ended else Meeting.TO_MAKE
    return Meeting.OTHER if has_ended else _between_steps(call.asked, own.asked)


def _between_steps(there: Asked, own: Asked) -> Meeting:
    """The meaning of an open call that is another step, or the check before one. Versions grow, so
    they tell which of two ranks is behind; of other calls nothing does.
    """
    is_step = own.verb in STEPS and there.verb == own.verb
    if not is_step or not isinstance(own.version, int) or not isinstance(there.version, int):
        return Meeting.OTHER
    if own.version == there.version:
        return Meeting.OTHER
    return Meeting.LATE if own.version > there.version else Meeting.AHEAD


def _is_waited_out(call: Call) -> bool:
    """Whether a rank waited in `call` to its deadline, for one that did not come."""
    return call.failure is not None and call.failure.kind == DeadlineExceeded.__name__


def _is_of_caller(call: Call, own: Call) -> bool:
    """Whether both are parts of one user's call. Where `call` is no first part, `own` must be none
    either: else this rank begins another user's call.
    """
    is_one = call.caller == own.caller or _is_with_other_arguments(call, own)
    return is_one and own.continues >= call.continues


def _is_with_other_arguments(call: Call, own: Call) -> bool:
    """Whether both begin one user's call, to which the ranks have given different arguments. Two
    numbers are two steps: one of the ranks is behind.
    """
    here, there = own.caller, call.caller
    if own.continues or call.continues or here.verb != there.verb:
        return False
    are_numbers = isinstance(here.version, int) and isinstance(there.version, int)
    return here.version == there.version or not are_numbers


def _is_told(call: Call, failure: Failure, own: Call, block: Asked | None) -> bool:
    """Whether this rank, too, raises the failure of `call`; else it is another call's."""
    if _is_of_caller(call, own) or call.asked == block:
        return True
    if failure.kind == CallMismatch.__name__ and call.continues and call.asked == call.caller:
        return True  # a peer has found that the ranks are out of step, and tells all
    return call.kind == "unpublish" and call.asked == own.asked  # whatever it is a part of
