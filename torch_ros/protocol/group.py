"""The calls that the ranks of a replica's group make together: the ranks meet in the store.

The first to make the group's n-th call decides it, the last to be ready completes it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic

from torch_ros.deadline import Deadline
from torch_ros.errors import Fenced, SeatLost
from torch_ros.printable import log_of
from torch_ros.protocol import calls
from torch_ros.protocol.call import CLEAN_UP_S, GroupCall, clean_up
from torch_ros.protocol.ledger import BeginsAgain
from torch_ros.protocol.life import IS_UNWAITED, CallLife
from torch_ros.protocol.meeting import Missed
from torch_ros.protocol.outage import Patience
from torch_ros.protocol.records import Asked, Begun, Kind
from torch_ros.protocol.seating import Seating
from torch_ros.store.loops import settle
from torch_ros.store.txn import T, one

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class GroupTask(Generic[T]):
    """One rank's part in a call of its group.

    Args:
        perform: Makes the call; once more each time it begins again.
        store_wait_s: How long to wait for etcd; then `unseated` stands in for `perform`. None: as
            long as the deadline allows.
        unseated: Does this rank's part without etcd. None: nothing can.
    """

    kind: Kind
    asked: Asked
    deadline: Deadline
    perform: Callable[[GroupCall], T]
    store_wait_s: float | None = None
    unseated: Callable[[GroupCall], T] | None = None


class Group(Seating):
    """A kept seat, and the calls that are made from it.

    Life cycle: `Group.join` (all ranks), any number of calls by `make` (all ranks, in the same
    order), `close`. Calls are made one at a time; everything else may come from any thread. A call
    in the middle of which the seat was lost is made again from the next, under its number.
    """

    def make(self, task: GroupTask[T]) -> T:
        """The group's next call. `task` makes it, and makes it again if the seat was lost.

        An exception that it raises ends the call for all ranks. Whatever becomes of it, the call
        has used up one number: on ranks that are cut off from etcd as on those that are not.

        Raises: Missed: The group has unpublished instead; begin anew what this call is a part of.
        """
        call: GroupCall | None = None
        with self._calling:
            try:
                while True:
                    call, has_seat = self._begun(call, task)
                    if not has_seat and task.unseated is not None:
                        said = task.unseated(call)
                        if self.ledger.goes_on_without(call):
                            return said
                        call.begins_again("wait", "it has its seat again")
                        continue
                    try:
                        return task.perform(call)
                    except (SeatLost, Missed, BeginsAgain) as why:
                        call = self._again(call, why)
            except BaseException as error:
                if call is None:  # there was no seat to begin it from
                    self.pass_over(task.kind, task.asked, task.deadline)
                # Peers that are at another call have nothing of this one that could be ended.
                elif not isinstance(error, Missed) and call.life is not CallLife.PASSED:
                    call.give_up(error)
                raise
            finally:
                self.ledger.made(call)

    def _again(self, call: GroupCall, why: SeatLost | Missed | BeginsAgain) -> GroupCall | None:
        """The call, which is made again; None: another one is made, under the next number.

        Raises:
            SeatLost: The call has ended, or the seat is lost for good.
            Missed: The peers have unpublished, or are about to: the user's call begins anew.
        """
        match why:
            case SeatLost():
                self.fence(why, call.session)
                if call.has_ended or isinstance(why, Fenced):
                    raise why
                call.begins_again("lost seat", why.reason)
            case BeginsAgain():
                call.begins_again(why.why, why.what)
            case Missed():
                if why.call.kind == "unpublish":  # the user's call begins anew, from nothing held
                    raise why
                log.warning(
                    "replica %r: this rank did not make call %d, %r, which has ended; going on",
                    self.seat.replica,
                    why.call.number,
                    f"{why.call.asked}",
                )
                self.ledger.made(call)
                return None
        return call

    def _begun(self, call: GroupCall | None, task: GroupTask[T]) -> tuple[GroupCall, bool]:
        """The call, begun from this rank's seat; or, and False, to be made without one.

        It is `call`, made again; or, at the first try and after one without a seat, a new one under
        the number that peers give the next call.

        Raises: SeatLost: This rank has none, and nothing does its part without.
        """
        patience = Patience(is_unpublish=task.kind == "unpublish", store_wait_s=task.store_wait_s)
        try:
            self.catch_up(task.deadline, patience)
            self.await_seat(task.deadline, patience)
        except SeatLost as lost:
            can_do_without = task.store_wait_s is not None and task.unseated is not None
            if not can_do_without or isinstance(lost, Fenced):
                raise
            return call or self._unbegun(task.kind, task.asked, task.deadline), False
        if call is None or not call.is_begun:
            number = self.ledger.calls_made + 1
            call = GroupCall(self, number, task.kind, task.asked, task.deadline)
        self.ledger.pending = call.number
        call.patience = patience
        call.start(self.seat, self.session)
        call.is_begun = True
        return call, True

    def from_seat(self, ask: Callable[[], T], deadline: Deadline) -> T:
        """The answer of `ask`, which needs this rank's seat: again, if that is lost meanwhile."""
        while True:
            self.await_seat(deadline)
            session = self.session
            try:
                return ask()
            except SeatLost as lost:
                self.fence(lost, session)

    def _unbegun(self, kind: Kind, asked: Asked, deadline: Deadline) -> GroupCall:
        return GroupCall(self, self.ledger.number_unbegun(kind, asked), kind, asked, deadline)

    def pass_over(self, kind: Kind, asked: Asked, deadline: Deadline) -> None:
        """Use up the number of a call that this rank has no seat to begin, as its peers do."""
        if kind != "unpublish":  # `forget` counts those
            self.ledger.gave_up(self._unbegun(kind, asked, deadline))

    def catch_up(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Learn, or make, the end of a call that etcd's absence left open, before any other call.
        Otherwise the next call would be made from what this rank only believes to hold.
        """
        if (call := self.ledger.unfinished) is not None and call.has_ended:
            self.ledger.unfinished = None  # Ctrl-C came when its end had been learned
        elif call is not None:
            self.await_seat(deadline, patience)
            seat, session, is_unwaited = self.seat, self.session, call.life in IS_UNWAITED
            try:
                call.patience = patience
                outcome = call.end(seat, session, deadline)
            except SeatLost as lost:
                self.fence(lost, session)
                raise
            self.ledger.unfinished = None
            if is_unwaited and outcome.failure is not None:  # its publish has returned before
                reason = outcome.failure.error()
                log.warning("%s, without etcd, came to nothing: %s", call.asked, reason)
        self.ledger.forget_with_peers()
        clean_up(self)  # what failed calls could not delete: it holds sources up

    def have_all_begun(self, number: int, asked: Asked) -> bool:
        """Whether all ranks have begun that call of DCP, as this one has; which they learn now."""
        rule = partial(calls.begun, seat=self.seat, mine=Begun(number, asked))
        ranges = (one(self.seat.group), self.seat.keys.all_begun(self.seat.inst))
        return self.run(settle("begun", ranges, rule), Deadline(f"{asked}", CLEAN_UP_S))
