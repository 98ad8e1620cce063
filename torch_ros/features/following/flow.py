"""Going to newer versions: to one that is there, or that comes while a call waits for it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch_ros import arguments
from torch_ros.deadline import Deadline, is_cancelled, unless_cancelled
from torch_ros.errors import (
    CallAborted,
    ClosedError,
    Fenced,
    SeatLost,
    SourceLost,
    StoreUnavailable,
    TorchRosError,
    VersionNotFound,
)
from torch_ros.features.following.rules import gone_on, look_out
from torch_ros.printable import log_of
from torch_ros.protocol.policy import Next
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.shard.collective import collectively, end_for_all
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import replicate
from torch_ros.shard.updating import End, Search, UpdateRequest, update_at_once
from torch_ros.store.loops import Step, WaitAtMost
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


class LookingOut(Search):
    """A search that waits until there is a version to go to."""

    def __init__(
        self, shard: Shard, request: UpdateRequest, deadline: Deadline, lookout: Lookout
    ) -> None:
        super().__init__(shard, request, lookout.beside(deadline))
        self._lookout, self._left_s = lookout, 0.0

    def looks(self) -> None:
        self._left_s = self._lookout.left_s  # the loop counts by itself how long it waits

    def step(self, view: View, seat: Seat, end: End[T]) -> Step[T]:
        lookout = self._lookout
        if lookout.is_told():
            return end(Next(said=STOPPED))
        until = lookout.is_told if lookout.stop is not None else None
        found, wait = look_out(view, seat, self.spec, self.held, self.policy, until)
        return end(found) if wait is None else WaitAtMost(wait, self._left_s, end(found))

    def objection(self) -> str:
        return STOPPED if self._lookout.is_told() else ""


def update(shard: Shard, request: UpdateRequest, wait_s: float) -> VersionRef | None:
    """Go to `request` if it is newer than what is held; None: it is not.

    With a `wait_s`: when it is, or when there is one, if nothing is held.
    """
    waits = not isinstance(wait_s, int | float) or wait_s > 0
    lookout: Lookout | None = None

    def flow(deadline: Deadline) -> VersionRef | None:
        nonlocal lookout
        arguments.seconds("wait_s", wait_s)
        if not waits:
            return update_at_once(shard, request, deadline)
        lookout = lookout or Lookout(wait_s)  # counted from here on: no other call is under way
        return _update_within(shard, request, lookout)

    what = Asked.of("update", request.version, waits=waits)
    return collectively(shard, what, flow, request.timeout_s)


def _update_within(shard: Shard, request: UpdateRequest, lookout: Lookout) -> VersionRef | None:
    ref, has_given_up, what = None, False, shard.asked
    while ref is None:
        search = LookingOut(shard, request, shard.deadline(what, request.timeout_s), lookout)
        search.begin()
        found = search.run()
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
            with search.given_up(deadline) as target:
                ref = replicate(shard, replace(spec, may_miss=True), target, deadline)
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
        pause_s = PAUSE_TTLS * shard.group.applicant.ttl_s if losses else 0.0
        flow = partial(_follow, shard, request, lookout, time.monotonic() + pause_s)
        try:
            ref = collectively(shard, what, flow, request.timeout_s, continues=continues)
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


def _follow(
    shard: Shard, request: UpdateRequest, lookout: Lookout, begins_s: float, _: Deadline
) -> VersionRef | None:
    if time.monotonic() < begins_s:  # within the call, so that Ctrl-C ends it for the peers too
        _pause(shard, lookout, begins_s)
    return _update_within(shard, request, lookout)


def _pause(shard: Shard, lookout: Lookout, until_s: float) -> None:
    is_cut = is_cancelled.get() or (lambda: False)  # the peers are told in the next call
    while time.monotonic() < until_s and not (lookout.is_told() or is_cut() or shard.is_closed):
        shard.group.pause()


def leave(shard: Shard, asked: Asked, reason: str) -> None:
    """This rank leaves `asked` between two of its parts. Peers that go on are told that it has.

    Returns at once: a thread waits until the group makes another call, which costs nothing where
    all ranks leave alike. So the garbage collector may call this.
    """
    seat, number = shard.group.seat, shard.group.ledger.calls_made
    error = CallAborted(seat.replica, number + 1, seat.rank, reason)
    with suppress(ClosedError, RuntimeError):  # it is a fork; the interpreter ends
        shard.require_usable()
        if not shard.is_alone:
            end = partial(_end_if_peers_go_on, shard, asked, error, number)
            shard.group.start(f"torch_ros leaves {seat.inst}", end)


def _end_if_peers_go_on(shard: Shard, asked: Asked, error: CallAborted, number: int) -> None:
    group, forever = shard.group, Deadline(f"leaving {asked}", math.inf)
    have_gone_on = False

    def end() -> None:
        if group.ledger.calls_made == number:  # this rank makes no other call meanwhile
            log.warning("%s", error)
            end_for_all(shard, asked, error, number + 1, continues=True)

    try:
        group.pause()  # mostly another call comes, or the end
        while not have_gone_on and group.ledger.calls_made == number:
            try:
                group.await_seat(forever)
                rule = partial(gone_on, seat=group.seat, number=number, asked=asked)
                have_gone_on = group.ask(group.seat.own, rule, forever)
                if not have_gone_on:
                    return
            except SeatLost as lost:
                if isinstance(lost, Fenced):
                    return
                group.pause()
        shard.busy(end, is_member=False)
    except (ClosedError, SeatLost) as failed:  # which tells them
        log.debug("%s: %s", forever.what, failed)
    except TorchRosError as failed:
        log.warning("%s: peers may wait for this rank until their deadline: %s", asked, failed)
