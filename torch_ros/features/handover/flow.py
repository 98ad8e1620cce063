"""A handle hands over what only its replica has, before it gives up its seat."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from torch_ros.deadline import Deadline
from torch_ros.errors import DeadlineExceeded, Fenced, SeatLost, StoreUnavailable, TorchRosError
from torch_ros.features.handover import rules
from torch_ros.features.handover.rules import Awaited, Gone, Leaving, Moved
from torch_ros.printable import log_of
from torch_ros.protocol.group import Group
from torch_ros.protocol.records import VersionRef
from torch_ros.shard.core import Shard, shard_of
from torch_ros.shard.seams import Feature, Shown
from torch_ros.store.loops import Step, settle
from torch_ros.store.run import run
from torch_ros.store.session import Session
from torch_ros.store.txn import Ranges, View

T = TypeVar("T")
log: logging.Logger = log_of(__name__)

LOOK_S = 1.0  # for etcd to say whether anything is needed, or to be told that it goes
QUIET_S = 3.0  # of waiting, before a line says so to everybody


class Handover(Feature):
    """One shard's part in the closing of its replica, which a `Closing` performs."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._closing: Closing | None = None
        self._hurries = False  # somebody does not wait for `close` any more

    def nobody_waits(self) -> None:
        self._hurries = True
        if self._closing is not None:
            self._closing.stop()

    def leaves(self, linger_s: float, *, drains: bool) -> bool:
        """Hand over; whether the group has left by that (see `Feature.leaves`)."""
        shard = self._shard
        has_nothing = shard.group.ledger.held is None and not any(self._beside())
        # A call in another thread ends first.
        if has_nothing or not shard.lock.acquire(timeout=max(0.0, linger_s)):
            return False
        try:
            leaving = self._all()
        finally:
            shard.lock.release()
        linger_s = 0.0 if self._hurries else linger_s
        self._closing = Closing(shard.group, leaving, linger_s, drains=drains)
        if self._hurries:  # also if that came only now
            self._closing.stop()
        return self._closing.hand_over()

    def _beside(self) -> Iterator[Shown]:
        for feature in self._shard.features:
            yield from feature.shows()

    def _all(self) -> list[Leaving]:
        """All that this rank would hand over: what it holds, and what it shows beside that."""
        group, shown = self._shard.group, [*self._beside()]
        seat, ledger = group.seat, group.ledger
        # A version that is not certainly held may be half there.
        if ledger.held is not None and not ledger.unfinished:
            held = ledger.held
            shown.append(Shown(held.ref, held.call, seat.inst, self._shard.mailbox))
        return [
            Leaving(
                seat.keys,
                each.ref,
                each.call,
                seat.datacenter,
                each.inst,
                shard_of(each.mailbox),
                seat.keeper,
            )
            for each in shown
        ]


class Closing:
    """One rank's end: `hand_over`, once, while its lease still lives and its calls have ended.

    Args:
        drains: Readers of what does not linger are let finish, for `linger_s` too.
    """

    def __init__(
        self, group: Group, leaving: Sequence[Leaving], linger_s: float, *, drains: bool = False
    ) -> None:
        self._group, self._leaving, self._linger_s = group, leaving, linger_s
        self._drains = drains and linger_s > 0
        self._seat = group.seat
        self._until_s = time.monotonic() + linger_s
        self._lease: Session | None = None
        # Somebody wants it to end now; a last look is under way; what is left lingers.
        self._is_over = self._is_last = self._has_moved = False
        self._said = ""  # what people were told is waited for
        self._told: set[VersionRef] = set()  # that they are lost

    def stop(self) -> None:
        """Somebody else wants it to end now."""
        self._is_over = True

    def hand_over(self) -> bool:
        """Stay with what others should have and have not; whether the group has left already.

        Takes as long as `linger_s` at most, and some seconds where etcd does not answer. The
        tensors that are offered meanwhile must not be written to.
        """
        group = self._group
        if (
            not self._leaving
            or (self._seat.spot and not self._drains)
            or group.state != "seated"
            or not group.session.is_valid()
        ):
            return False
        try:
            if self._drains:
                self._tell(self._let_finish())
            if self._seat.spot:  # nobody counts on what it has
                return False
            step = self._give_up(LOOK_S)
            if isinstance(step, Awaited):
                log.info("%s: waiting up to %.0f s for %s", self._who, self._linger_s, step.reason)
                self._lease = Session(
                    group.kv, ttl_s=group.applicant.ttl_s, on_lost=lambda _: None, name=self._who
                )
                step = self._come()
            if isinstance(step, Gone):
                self._tell(step)
            if isinstance(step, Moved):
                self._has_moved = True
                group.session.close()
                self._linger()
        except SeatLost as lost:
            # The first one that leaves knows what is lost.
            is_orderly = isinstance(lost, Fenced) and lost.is_orderly
            level = logging.DEBUG if is_orderly else logging.WARNING
            log.log(level, "%s: %s; what only it had may be lost", self._who, lost.reason)
        except TorchRosError as error:
            log.warning("%s: %s; what only it had may be lost", self._who, error)
        finally:
            if self._lease is not None:
                self._lease.close()
        return self._has_moved

    def _let_finish(self) -> Gone:
        """Let readers finish; after `linger_s` the rest are left, and nothing lingers either."""
        ranges = rules.let_finish_ranges(self._seat, self._leaving)
        rule = partial(rules.let_finish, seat=self._seat, leaving=self._leaving)
        try:
            return self._patiently(partial(self._run, ranges, rule))
        except DeadlineExceeded:
            self._linger_s, self._is_last = 0.0, True
            return self._run(ranges, partial(rule, is_patient=False), LOOK_S)
        finally:
            self._drains = False

    def _come(self) -> Awaited | Moved | Gone:
        """Wait for all ranks to close, and move; after `linger_s`, let go of what is needed."""
        try:
            return self._patiently(self._give_up)
        except DeadlineExceeded:
            self._linger_s, self._is_last = 0.0, True
            return self._give_up(LOOK_S)

    @property
    def _who(self) -> str:
        return f"replica {self._seat.replica!r}"

    def _give_up(self, timeout_s: float) -> Awaited | Moved | Gone:
        """Perform `rules.give_up`, which asks for a lease at first, and waits once there is one."""
        rule = partial(
            rules.give_up,
            seat=self._seat,
            leaving=self._leaving,
            calls_made=self._group.ledger.calls_made,
            lease_id=self._lease.lease_id if self._lease else 0,
            is_patient=self._linger_s > 0,
        )
        return self._run(rules.give_up_ranges(self._seat, self._leaving), rule, timeout_s)

    def _linger(self) -> None:
        """Stay with each version in turn, until it is not needed or the time is over."""
        for each in self._leaving:
            ranges = rules.linger_ranges(each)
            stay = partial(rules.linger, each=each, world_size=self._seat.world_size)
            try:
                self._tell(self._patiently(partial(self._run, ranges, stay)))
            except DeadlineExceeded:
                self._is_last = True  # this look is not cut short, or nobody learns what is lost
                self._tell(self._run(ranges, partial(rules.stop, each=each), LOOK_S))

    def _patiently(self, attempt: Callable[[float], T]) -> T:
        """Try until the time is over; after QUIET_S say, once, what is waited for."""
        left_s = self._until_s - time.monotonic()
        if left_s > QUIET_S:
            try:
                return attempt(QUIET_S)
            except DeadlineExceeded as slow:
                if slow.reason != self._said:
                    limit = "%s: waiting up to %.0f s for %s"
                    log.warning(limit, self._who, self._linger_s, slow.reason)
                self._said = slow.reason
            except StoreUnavailable:
                pass  # it may be back before the lease ends
        return attempt(max(0.0, self._until_s - time.monotonic()))

    def _run(self, ranges: Ranges, rule: Callable[[View], Step[T]], timeout_s: float) -> T:
        deadline = Deadline(f"close of {self._who}", timeout_s)
        return run(settle(deadline.what, ranges, rule), self._group.kv, deadline, check=self._check)

    def _check(self) -> None:
        """Raises: DeadlineExceeded, Fenced: It is to end now; or a lease of it has ended."""
        # Only waits are cut short: first and last looks say what is needed, and what is lost.
        is_waiting = self._drains or self._lease is not None
        if self._is_over and is_waiting and not self._is_last:
            raise DeadlineExceeded("close", self._linger_s, "it is closed at once")
        seat = None if self._has_moved else self._group.session
        if not all(each.is_valid() for each in (seat, self._lease) if each):
            raise Fenced(self._seat.replica, "its lease ended while it closed")

    def _tell(self, gone: Gone) -> None:
        """Warn of each version that is lost, once: several steps find the same."""
        latest = "no version is left" if gone.latest is None else f"latest is now {gone.latest}"
        for ref in dict.fromkeys((*gone.lost, *gone.lost_here)):
            if ref in self._told:
                continue
            self._told.add(ref)
            is_far = ref in gone.lost_here
            where = f" in datacenter {self._seat.datacenter!r}" if is_far else ""
            text = "%s: version %d was held nowhere else%s and is gone; %s"
            log.warning(text, self._who, ref.version, where, latest)
