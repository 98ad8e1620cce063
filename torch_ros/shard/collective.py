"""A user's call, as one call of all ranks: whatever ends it on one of them ends it on all.

docs/protocol/steps.md#calls-of-a-caller has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch_ros.deadline import Deadline
from torch_ros.errors import CallAborted, ClosedError, SeatLost, TorchRosError, UsageError
from torch_ros.printable import log_of
from torch_ros.protocol.call import CLEAN_UP_S, GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.meeting import Missed
from torch_ros.protocol.records import Asked, Call
from torch_ros.shard.beginnings import Beginning
from torch_ros.store.loops import Step
from torch_ros.weights.local import require_memory

if TYPE_CHECKING:
    from torch_ros.shard.core import Shard

T = TypeVar("T")
log: logging.Logger = log_of(__name__)

TAKES_BACK = ("unpublish", "release")  # which a rank may do whose seat is lost for good


def collectively(
    shard: Shard,
    asked: Asked,
    flow: Callable[[Deadline], T],
    timeout_s: float | None = None,
    begun: Beginning | None = None,
    *,
    continues: bool = False,
) -> T:
    """Make a user's call, with all of the group's calls that are its parts.

    Args:
        asked: The call, as all ranks make it.
        flow: Checks the user's arguments, and makes the parts. It begins anew, with the same
            deadline, when this rank finds that its peers have unpublished.
        timeout_s: As for `Shard.deadline`.
        begun: The call's beginning, if it is one of DCP: others that never came are ended.
        continues: It goes on with a user's call of which all ranks have made parts before.
    """
    ledger, first = shard.group.ledger, 0  # the number of its first part; 0: it has not begun

    def make() -> T:
        nonlocal first
        shard.end_beginnings(begun)
        first = ledger.calls_made + 1
        ledger.caller, ledger.first = asked, 0 if continues else first
        try:
            require_memory()
            return _until_made(asked, flow, shard.deadline(asked, timeout_s))
        finally:
            # Later than it was, if this rank has skipped calls of its peers before.
            first, ledger.caller = max(first, ledger.first), None

    try:
        make_in_time = make if begun is None else partial(begun.come, make)
        return shard.busy(make_in_time, is_member=asked.verb not in TAKES_BACK)
    except BaseException as error:
        # Before it has begun, an error of ours is this rank's alone; Ctrl-C ends it for peers, too.
        if first or not isinstance(error, TorchRosError):
            first = first or ledger.calls_made + 1
            end = partial(end_for_all, shard, asked, error, first, continues=continues)
            with suppress(ClosedError):  # by another thread, meanwhile
                shard.busy(end, is_member=False)
        raise


def checked(shard: Shard, asked: Asked, check: Callable[[], T]) -> T:
    """The answer of `check`, of a user's arguments. Its error ends `asked` for all ranks."""
    try:
        return check()
    except UsageError:
        return collectively(shard, asked, lambda _: check())


def _until_made(asked: Asked, flow: Callable[[Deadline], T], deadline: Deadline) -> T:
    """Start `flow` again when this rank finds that its peers have unpublished."""
    while True:
        try:
            return flow(deadline)
        except Missed as missed:
            log.warning("%s: %r came first, made by the peers", asked, f"{missed.call.asked}")


def end_for_all(
    shard: Shard, asked: Asked, error: BaseException, first: int, *, continues: bool = False
) -> None:
    """End, after `error`, the parts of the user's call that the peers still make, or would.

    Args:
        first: The number of its first part.
        continues: As for `collectively`.
    """
    seat, ledger = shard.group.seat, shard.group.ledger
    is_away = shard.group.state != "seated" or ledger.unfinished is not None
    if shard.is_alone or is_away or isinstance(error, SeatLost | ClosedError):
        return  # the peers learn of it from the store, or by the next call
    if ledger.is_told(error, first):  # a part has ended so, and all know
        return
    if not isinstance(error, TorchRosError):
        reason = f"{type(error).__name__}: {error}"
        error = CallAborted(seat.replica, ledger.calls_made + 1, seat.rank, reason)
    deadline = Deadline(f"giving up {asked}", CLEAN_UP_S)
    refusal = GroupTask("agree", asked, deadline, partial(_refuse, error))
    ledger.caller, ledger.first = asked, 0 if continues else first
    try:
        while True:  # once more for each part that the peers have ended well without this rank
            _until_made(asked, lambda _: shard.make(refusal), deadline)
            deadline.check("the peers go on")
    except TorchRosError as ended:
        log.info("%s: ended for all ranks: %s", asked, ended)
    finally:
        ledger.caller = None


def _refuse(error: TorchRosError, call: GroupCall) -> None:
    """Let a part of the user's call fail on all ranks with `error`, unless it has ended well.

    A rule that raises is decided as a failure, for all that come to the call.

    Raises: TorchRosError: It has failed now, or before. CallMismatch: the peers are elsewhere.
    """

    def fail(*_: object) -> Step[Call]:
        raise error

    call.refuses = True
    call.decide((), fail)
    if not call.has_ended:  # the peers are in it, and are told as this rank gives it up
        raise error
    # The part has ended well. The peers may have begun it with another argument: the next part, to
    # be refused like it, is one of their user's call.
    call.seating.ledger.caller = call.decided.caller


def end_for_peers(shard: Shard, asked: Asked, error: BaseException) -> None:
    """End `asked` for the peers, of which this rank makes no part."""
    end_for_all(shard, asked, error, shard.group.ledger.calls_made + 1)
