"""The one loop of the store. It yields requests and never touches a client.

A rule looks at a view and says a `Step`: the loop does it, until that is `Done`. The same generator
runs against etcd in production (`run.run`) and one request at a time, interleaved with others and
with failures, in a simulation.
"""

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from torch_ros.errors import Contention, TorchRosError
from torch_ros.store.txn import (
    UNKNOWN,
    Commit,
    Entry,
    Follow,
    Get,
    Range,
    Ranges,
    Read,
    Reply,
    Steps,
    T,
    Txn,
    Unseen,
    View,
    Watch,
    whole,
)

T_co = TypeVar("T_co", covariant=True)
ATTEMPTS_MAX = 64  # a race is lost only when another process won it
LEASE_LOOK_S = 0.5  # between two tries to put a record under a lease that has ended
LOOKS_MAX = 3  # at samples, before everything is read


class Done(Struct, Generic[T_co], frozen=True):
    value: T_co


class Act(Struct, Generic[T_co], frozen=True):
    """Commit `txn`; if it applied, `then` makes the answer of its reply. Otherwise decide again.
    Without `then` decide again in any case: it was a step on the way.
    """

    txn: Txn
    then: Callable[[Reply], T_co] | None
    ahead: Ranges = ()  # what the next loop will want to see, too, if anything is read ahead


class Wait(Struct, frozen=True):
    """Not yet. `reason` is for people; it ends up in logs and in DeadlineExceeded."""

    reason: str
    ranges: Ranges  # what has to change first
    limit_s: float = math.inf  # in `follow`: then the rule is asked again, since time counts
    until: Callable[[], bool] | None = None  # in `settle`: once true, the rule is asked again


class WaitAtMost(Struct, Generic[T_co], frozen=True):
    """`wait`; but once the loop has spent `limit_s` in such waits, in all, do `otherwise`."""

    wait: Wait
    limit_s: float
    otherwise: Act[T_co] | Done[T_co]


Step = Done[T] | Wait | WaitAtMost[T] | Act[T]


def settle(
    what: object,
    ranges: Ranges,
    rule: Callable[[View], Step[T]],
    first: View | None = None,
    ahead: Ranges = (),
    keep: Callable[[View], None] = lambda _: None,
) -> Steps[T]:
    """Read `ranges`, decide, act; again while others win the race or the rule says to wait.

    After a lost reply the rule decides afresh from what it then finds, so a rule must know its
    own effects when it sees them: repeating it changes nothing (I5). Watching from the revision
    of the view leaves no gap in which a change could be missed (I6).

    Where `ranges` are samples, the rule may ask for others (`Unseen`), or for everything.

    Args:
        what: The call that this is for, for people.
        first: A view from before. If it shows all of `ranges` they are not read, unless the rule
            raises at it. Not for a mere question: an answer is as old as the view; of what is done
            upon it, the guards fail if something has changed since, and a wait ends at once.
        ahead: All that the next loop begins with: the last step reads it, too, a round trip less.
        keep: Given the view that shows `ahead`.
    """
    losses, waited_s = 0, 0.0
    while losses < ATTEMPTS_MAX:
        view, step = yield from _look(ranges, rule, first)
        first = None
        is_limited, left_s = isinstance(step, WaitAtMost), math.inf
        if isinstance(step, WaitAtMost):
            left_s = step.limit_s - waited_s
            step = step.wait if left_s > 0 else step.otherwise
        match step:
            case Done(value):
                if ahead:
                    keep(view)
                return value
            case Wait(reason, watched, _, until):
                took_s = yield Watch(whole(watched), view.rev, reason, left_s, until)
                waited_s += took_s if is_limited else 0.0
            case Act(txn, then):
                wanted = (*ahead, *step.ahead) if ahead and then is not None else ()
                ops = (*txn.ops, *map(Get, wanted))
                reply: Reply = yield Commit(replace(txn, ops=ops, otherwise=ranges))
                if reply.applied and then is not None:
                    if wanted:
                        keep(_read_along(reply, wanted))
                    return then(reply)
                first = reply.view
                has_lost = first is not None  # a guard failed: others have won the race
                losses += has_lost
                if not (reply.applied or has_lost or reply is UNKNOWN):
                    # A lease has ended, and whoever renews it learns of that any moment.
                    yield Watch(whole(ranges), view.rev, "a lease that has ended", LEASE_LOOK_S)
    raise Contention(f"{what}", ATTEMPTS_MAX)


def _look(
    ranges: Ranges, rule: Callable[[View], Step[T]], first: View | None
) -> Steps[tuple[View, Step[T]]]:
    """A view in which the rule sees enough, and its step: `first` if it is one, else a new one."""
    view = first if first is not None and all(map(first.has, ranges)) else None
    asked, looks = ranges, 1
    while True:
        if view is None:
            view = yield Read(asked)
        try:
            return view, rule(view)
        except TorchRosError:
            if view is not first:
                raise
            view = None  # no guard protects an error: it may be as old as the view
        except Unseen as unseen:
            if view is first:  # perhaps only too old: look anew at the same
                view = None
                continue
            if asked == whole(asked):
                raise  # a mistake: it looks at what it did not ask for
            if unseen.more and looks < LOOKS_MAX:
                # All ranges that were whole, and others in place of the samples.
                asked = (*(r for r in ranges if isinstance(r, Range)), *unseen.more)
            else:
                asked = whole(ranges)
            view, looks = None, looks + 1


def _read_along(reply: Reply, wanted: Ranges) -> View:
    """The view of `wanted`, which a transaction has read by its last operations."""
    entries: dict[str, Entry] = {}
    shown: list[Range] = []
    for range_, found in zip(wanted, reply.results[-len(wanted) :], strict=True):
        assert not isinstance(found, int)
        entries.update(found)
        if isinstance(range_, Range):
            shown.append(range_)
        elif not range_.before and len(found) < range_.most:  # there are no others
            shown.append(range_.range)
    return View(reply.rev, entries, tuple(shown), wanted)


def follow(ranges: tuple[Range, ...], rule: Callable[[View], Done[T] | Wait]) -> Steps[T]:
    """As `settle`, for a mere question that is asked again at every change.

    Changes are applied to the view. To read it anew each time would cost everyone who waits as
    much as there is, as often as anybody moves.
    """
    view: View = yield Read(ranges)
    while isinstance(step := rule(view), Wait):
        changes = yield Follow(ranges, view.rev, step.reason, step.limit_s)
        if changes is not None and not changes.entries:
            yield Read(ranges[-1:])  # silence may be a store that is away: go on once it answers
        view = view.after(changes) if changes is not None else (yield Read(ranges))
    return step.value
