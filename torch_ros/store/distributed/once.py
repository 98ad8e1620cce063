"""Writes that apply at most once, however often they are sent and however late they arrive.

`docs/DISTRIBUTED.md` ("How it works") tells how marks do that.
"""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from torch_ros.deadline import Deadline
from torch_ros.store.txn import (
    UNKNOWN,
    Commit,
    Delete,
    Entry,
    Get,
    Guard,
    Op,
    Put,
    Range,
    Reply,
    Steps,
    T,
    Txn,
    Unchanged,
    View,
    one,
)

BACK_OFF_S_MIN, BACK_OFF_S_MAX = 0.01, 0.1


@dataclass(frozen=True, slots=True)
class Plan(Generic[T]):
    """One attempt to write, and what the call answers if it applies. Without `ops`: an answer."""

    answer: T
    guards: tuple[Guard, ...] = ()
    ops: tuple[Op, ...] = ()
    made: tuple[Range, ...] = ()  # put for it before; garbage unless it applies


@dataclass(slots=True)
class _Slot:
    """A mark, for one write at a time: threads that write at once have one each."""

    key: str  # the mark of one write at a time
    rev: int = 0  # of the mark, as far as is known
    attempts: int = 0  # of all its writes: each puts its number into the mark


def ask(*ops: Op) -> Steps[Reply]:
    """Perform `ops`, which change nothing, at one revision."""
    while True:
        reply: Reply = yield Commit(Txn(ops=ops))
        if reply.applied:
            return reply


def look(*gets: Get) -> Steps[View]:
    """The entries of `gets` at one revision."""
    reply = yield from ask(*gets)
    entries: dict[str, Entry] = {}
    for found in reply.results:
        assert not isinstance(found, int)
        entries.update(found)
    return View(reply.rev, entries)


class Writer:
    """Writes at most once. Any number of threads may write.

    Args:
        mark: The key of this writer's n-th mark.
        lease_id: The lease that marks hang on.
    """

    def __init__(self, mark: Callable[[int], str], lease_id: int) -> None:
        self._mark, self._lease_id = mark, lease_id
        self._numbers = itertools.count()
        self._free: list[_Slot] = []

    def write(
        self,
        gets: tuple[Get, ...],
        plan: Callable[[View], Steps[Plan[T] | None]],
        deadline: Deadline,
        *,
        first: Plan[T] | None = None,
    ) -> Steps[T]:
        """Look, plan, commit; again while others win the race or the plan is None.

        Args:
            first: To be tried without looking.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(self._mark(next(self._numbers)))
        try:
            return (yield from self._write(slot, gets, plan, deadline, first))
        finally:
            self._free.append(slot)

    def _write(
        self,
        slot: _Slot,
        gets: tuple[Get, ...],
        plan: Callable[[View], Steps[Plan[T] | None]],
        deadline: Deadline,
        first: Plan[T] | None,
    ) -> Steps[T]:
        """Make the attempts of one write, each of which guards and renews the slot's mark.

        So once the mark is another, all attempts before it fail, however late they arrive; and an
        attempt whose reply was lost (`is_open`) has applied if the mark is its number.
        """
        attempts: dict[bytes, Plan[T]] = {}  # by the mark that each puts
        planned, is_open, losses = first, False, 0
        while True:
            if planned is None:
                view = yield from look(Get(one(slot.key)), *gets)
                mark = view.entries.get(slot.key)
                slot.rev = mark.mod_rev if mark else 0
                if mark is not None and mark.value in attempts:  # one whose reply was lost
                    applied = attempts[mark.value]
                    break
                planned = yield from plan(view)
            if planned is None:
                deadline.check("it was always changed while it was read")
                continue
            if not planned.ops and not is_open:
                applied = planned
                break
            # An answer too is written down while an earlier attempt may still be on its way.
            reply: Reply = yield Commit(self._marked(slot, planned, attempts))
            if reply.applied:
                slot.rev, applied = reply.rev, planned
                break
            if reply is UNKNOWN:
                is_open = True
            elif planned is not first:  # which only guessed: nobody was faster
                losses += 1
                _back_off(losses, deadline)
            planned = None
        garbage = {made for attempt in attempts.values() for made in attempt.made}
        for made in garbage - {*applied.made}:  # those attempts can apply no more
            yield Commit(Txn(ops=(Delete(made),)))
        return applied.answer

    def _marked(self, slot: _Slot, planned: Plan[T], attempts: dict[bytes, Plan[T]]) -> Txn:
        """The transaction of an attempt, which is noted in `attempts`: it renews the mark."""
        slot.attempts += 1
        mark = str(slot.attempts).encode()
        attempts[mark] = planned
        guards = (Unchanged(slot.key, slot.rev), *planned.guards)
        return Txn(guards, (*planned.ops, Put(slot.key, mark, self._lease_id)))


def _back_off(losses: int, deadline: Deadline) -> None:
    """Let others go first: each round has one winner, and those who lost it lose the next too."""
    deadline.check("other clients were always faster")
    longest_s = min(BACK_OFF_S_MAX, BACK_OFF_S_MIN * 2 ** min(losses, 10))
    time.sleep(random.uniform(0, longest_s))  # noqa: S311  # no secret
