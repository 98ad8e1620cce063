"""Going to newer versions: to one that is there, or that comes while a call waits for it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch_ros import arguments
from torch_ros.deadline import Deadline, is_cancelled, unless_cancelled
from torch_ros.errors import (
    Fenced,
    SeatLost,
    SourceLost,
    StoreUnavailable,
    TorchRosError,
    VersionNotFound,
)
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall, Passing, Sight
from torch_ros.protocol.calls import hearing
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.lookout import look_out
from torch_ros.protocol.policy import NEWEST, Next, Policy, decided_next, next_of
from torch_ros.protocol.records import Asked, Call, Outcome, VersionRef
from torch_ros.protocol.seat import Seat, own_group, recorded
from torch_ros.protocol.unpublish import unpublish_ranges
from torch_ros.protocol.versions import Spec, newer_ranges
from torch_ros.protocol.withdrawal import is_withdrawn
from torch_ros.shard.collective import collectively, leave
from torch_ros.shard.contract import tell_withdrawn
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import Target, replicate, replicate_if_there
from torch_ros.store.loops import Act, Done, Step, WaitAtMost
from torch_ros.store.txn import View

T = TypeVar("T")
Stop = Callable[[], bool]
log: logging.Logger = log_of(__name__)

STOPPED = "stopped"  # said by an update: a rank was told to
STOP_S = 5.0  # to tell the peers; if etcd is away for so long, nobody can be told
# A process that died is offered for up to a TTL, so what is lost is tried again, and for longer.
LOSSES_MAX, PAUSE_TTLS = 6, 0.5
LEFT = (
    "it left its loop over the versions by break, an error or close(), and its peers go on; leave "
    "it on all ranks after the same version, as `stop` does"
)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The update that a caller asks for."""

    version: int | str
    timeout_s: float | None = None
    policy: Callable[[Policy], Policy] = lambda own: own  # of the shard's, the one to go by


class Lookout:
    """The time for which a call looks out for a version.

    Args:
        stop: Ends it for all ranks when it is true on one. None: nobody is asked.
    """

    stop: Stop | None

    def __init__(self, wait_s: float, stop: Stop | None = None) -> None:
        self._wait_s, self._began_s = wait_s, time.monotonic()
        self.stop, self._told_s = stop, math.inf

    @property
    def left_s(self) -> float:
        return self._began_s + self._wait_s - time.monotonic()

    def is_told(self) -> bool:
        """Whether this rank was told to stop."""
        if self.stop is not None and self._told_s == math.inf and self.stop():
            self._told_s = time.monotonic()
        return self._told_s < math.inf

    def is_over(self) -> bool:
        """Whether etcd is not waited for any longer either."""
        return self.is_told() and time.monotonic() > self._told_s + STOP_S

    def beside(self, deadline: Deadline) -> Deadline:
        """The end of looking out: the call's own time begins with what it leads to."""
        timeout_s = max(0.0, self.left_s) + deadline.timeout_s
        if self.stop is None:
            return replace(deadline, timeout_s=timeout_s)
        is_cut = deadline.is_cut or (lambda: False)
        return replace(deadline, timeout_s=timeout_s, is_cut=lambda: is_cut() or self.is_over())


def update(shard: Shard, request: UpdateRequest, wait_s: float) -> VersionRef | None:
    """Go to `request` if it is newer than what is held; None: it is not.

    With a `wait_s`: when it is, or when there is one, if nothing is held.
    """
    waits = not isinstance(wait_s, int | float) or wait_s > 0
    what = Asked.of("update", request.version, waits=waits)

    def begin() -> Callable[[], VersionRef | None]:
        arguments.seconds("wait_s", wait_s)
        if waits:
            return _looking_out(shard, request, Lookout(wait_s), what)
        return partial(_update_now, shard, request, shard.deadline(what, request.timeout_s))

    return collectively(shard, what, begin)


def _update_now(shard: Shard, request: UpdateRequest, deadline: Deadline) -> VersionRef | None:
    search = _Search(shard, request, deadline)
    search.begin()
    is_asked = search.held is not None or search.policy.is_asked_first
    found = search.run() if is_asked else Next()
    if is_asked and found.goes_to is None:
        shard.read_ends(search.held, deadline)
        return None
    if search.held:
        search.all_go_on(deadline)  # before that is given up
    with _given_up(search, deadline) as target:
        *firsts, last = search.to_read(found)
        for spec in firsts:
            with suppress(VersionNotFound):
                return replicate(shard, spec, target, deadline)
        return replicate(shard, last, target, deadline)


@contextmanager
def _given_up(search: _Search, deadline: Deadline) -> Iterator[Target]:
    """Give up what is held; within, a call may be decided from what that has read along."""
    shard, passing = search.shard, Passing(search.sight, replicates=True)
    target = Target(shard, shard.base())
    shard.unpublish(deadline, may_forget=False, passing=passing)
    try:
        yield target
    finally:  # no later call: `latest` may mean another version by then
        shard.group.ledger.take_sight(shard.group.seat)


def _looking_out(
    shard: Shard, request: UpdateRequest, lookout: Lookout, what: Asked, *, pauses: bool = False
) -> Callable[[], VersionRef | None]:
    if pauses:  # within the call, so that Ctrl-C ends it for the peers too
        _pause(shard, lookout)
    return partial(_update_within, shard, request, lookout, what)


def _update_within(
    shard: Shard, request: UpdateRequest, lookout: Lookout, what: Asked
) -> VersionRef | None:
    ref, has_given_up = None, False
    while ref is None:
        search = _Search(shard, request, lookout.beside(shard.deadline(what, request.timeout_s)))
        search.begin()
        found = search.run(lookout)
        shard.read_ends(search.held, search.deadline)
        if found.ref is None and has_given_up and lookout.stop is None:
            reason = "it went before it was read, and what was held is given up"
            raise VersionNotFound(shard.model, f"{request.version}", reason)
        deadline = shard.deadline(what, request.timeout_s)
        if found.ref is None:
            if found.said == STOPPED:  # nobody leaves, and closes, before all know
                search.all_go_on(deadline)
            return None
        if found.goes_to is not None:
            shard.read_begins(deadline)
            if not search.all_go_on(deadline):
                shard.read_ends(None, deadline)
                return None
            spec = search.to_read(found)[0]
            with _given_up(search, deadline) as target:
                ref = replicate_if_there(shard, spec, target, deadline)
            has_given_up = has_given_up or (ref is None and search.held is not None)
    return ref


def newer_versions(shard: Shard, request: UpdateRequest, stop: Stop) -> Iterator[int]:
    """Go to each newer version; yields its number when it is here, and no call is open."""
    what = Asked.of("follow", request.version)
    try:
        yield from _newer_versions(shard, request, stop, what)
    except BaseException as error:
        if not isinstance(error, TorchRosError):  # those end it on all ranks
            is_left = isinstance(error, GeneratorExit)
            leave(shard, what, LEFT if is_left else f"{type(error).__name__}: {error}")
        raise


def _newer_versions(shard: Shard, request: UpdateRequest, stop: Stop, what: Asked) -> Iterator[int]:
    losses, continues = 0, False
    while True:
        lookout = Lookout(math.inf, stop)
        begin = partial(_looking_out, shard, request, lookout, what, pauses=losses > 0)
        try:
            ref = collectively(shard, what, begin, continues=continues)
        except (SourceLost, VersionNotFound) as lost:
            losses, continues = losses + 1, True
            if losses == LOSSES_MAX:
                raise
            log.warning("%s: %s; it tries again", what, lost)
            continue
        except (SeatLost, StoreUnavailable) as away:
            # Alone it has nobody to agree with, and etcd comes back.
            if isinstance(away, Fenced) or not shard.is_alone:
                raise
            unless_cancelled()()  # its time is over then, and so etcd was not waited for
            if lookout.is_told():
                return
            log.warning("%s: %s; it goes on", what, away)
            continue
        if ref is None:
            return
        losses, continues = 0, True
        yield ref.version


def _pause(shard: Shard, lookout: Lookout) -> None:
    until_s = time.monotonic() + PAUSE_TTLS * shard.group.applicant.ttl_s
    is_cut = is_cancelled.get() or (lambda: False)  # the peers are told in the next call
    while time.monotonic() < until_s and not (lookout.is_told() or is_cut() or shard.is_closed):
        shard.group.pause()


class _Search:
    """One rank's part in finding a version to go to."""

    def __init__(self, shard: Shard, request: UpdateRequest, deadline: Deadline) -> None:
        self.shard, self.deadline = shard, deadline
        self._spec, self.held = Spec.parse(request.version), shard.held
        self._lookout: Lookout | None = None
        self.sight: Sight | None = None
        self._left_s = 0.0
        is_chosen = self._spec.absolute is not None
        self.policy = NEWEST if is_chosen else request.policy(shard.policy)

    def begin(self) -> None:
        self.shard.read_begins(self.deadline)
        self.shard.begin("update", self.shard.asked, self.deadline)
        self.held = self.shard.held

    def run(self, lookout: Lookout | None = None) -> Next:
        """The step to take, the same on all ranks."""
        self._lookout = lookout
        found = self._find()
        self.shard.observed.heard_of(found.ref)
        self.policy.took(found, self.held, self.deadline)
        return found

    def to_read(self, found: Next) -> Sequence[Spec]:
        return self.policy.to_read(self._spec, found.ref)

    def all_go_on(self, deadline: Deadline) -> bool:
        """Whether no rank was told to stop. Returns when all have come, who hold what they held."""
        held, lookout = self.held, self._lookout

        def ask(call: GroupCall) -> bool:
            call.decide((), recorded)

            def sum_up(said: Mapping[int, str]) -> None:
                end = Outcome(said=max(said.values()))
                call.complete(end, ahead=unpublish_ranges(call.seat, held) if held else ())

            is_told = lookout is not None and lookout.is_told()
            call.finish(STOPPED if is_told else "", sum_up)
            self._see(call)
            return call.said != STOPPED

        made = GroupTask("agree", self.shard.asked.check, deadline, ask)
        return self.shard.is_alone or self.shard.make(made)

    def _see(self, call: GroupCall) -> None:
        self.sight = (call.seat, call.seen) if call.seen else None

    def _find(self) -> Next:
        shard, group, deadline = self.shard, self.shard.group, self.deadline
        ranges = newer_ranges(group.seat.keys, self.held)
        if not shard.is_alone:

            def search(call: GroupCall) -> Next:
                self._note_left()
                call.decide(ranges, self._effects, is_cheap=True)
                return next_of(call.decided)

            return shard.make(GroupTask("update", shard.asked, deadline, search))

        def rule(view: View) -> Step[Next]:
            own_group(view, group.seat)
            return hearing(self._step(view, group.seat, Done), group.seat)

        def look() -> Next:  # nobody could decide otherwise: one read, nothing written
            self._note_left()
            return group.ask((*group.seat.own, *ranges), rule, deadline)

        return group.from_seat(look, deadline)

    def _note_left(self) -> None:
        """A loop counts how long it waits by itself."""
        self._left_s = self._lookout.left_s if self._lookout else 0.0

    def _effects(self, view: View, seat: Seat, call: Call) -> Step[Call]:
        return self._step(view, seat, partial(decided_next, view, seat, call))

    def _step(
        self, view: View, seat: Seat, end: Callable[[Next], Act[T] | Done[T]]
    ) -> Act[T] | Done[T] | WaitAtMost[T]:
        shard, policy, held, lookout = self.shard, self.policy, self.held, self._lookout
        if held is not None and is_withdrawn(view, seat.keys, held):
            tell_withdrawn(shard, held)
        if lookout is None:
            return end(policy.next_version(view, seat, self._spec, held))
        if lookout.is_told():
            return end(Next(said=STOPPED))
        until = lookout.is_told if lookout.stop is not None else None
        found, wait = look_out(view, seat, self._spec, held, policy, until)
        return end(found) if wait is None else WaitAtMost(wait, self._left_s, end(found))
