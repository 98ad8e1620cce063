"""Keep one process's seat in its replica's group: take it, watch a neighbour, come back, leave."""

import dataclasses
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar

from torch_ros.deadline import Deadline, wall_ms
from torch_ros.errors import (
    AccessDenied,
    BackendError,
    ClosedError,
    Contention,
    Fenced,
    NotAvailable,
    SeatLost,
    StoreAlarm,
    StoreUnavailable,
    TorchRosError,
)
from torch_ros.printable import log_of
from torch_ros.protocol import keys as k
from torch_ros.protocol import membership, runs
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.ledger import Ledger, SeatState, Standing
from torch_ros.protocol.membership import GroupMade
from torch_ros.protocol.outage import Outage, Patience
from torch_ros.protocol.records import Failure
from torch_ros.protocol.seat import Seat
from torch_ros.store.kv import KV
from torch_ros.store.latch import Latch
from torch_ros.store.loops import Act, Done, Step, Wait, follow, settle
from torch_ros.store.run import OnFailure, Reminder, run
from torch_ros.store.session import Session
from torch_ros.store.txn import Range, Ranges, Steps, View, one

T = TypeVar("T")
Create = Callable[[View], Step[GroupMade]]
log: logging.Logger = log_of(__name__)

NOTE_TTL_S = 10  # time enough for every peer to read it
CLOSE_S = 2.0  # for its threads, which are told at once, to end
LEAVE_S = 1.0  # for telling the peers; they notice anyway
RETRY_S = 0.5  # between tries to come back


class Seating:
    """A seat that is kept: lease alive, neighbour watched, taken again when it is lost.

    It knows the ledger that a rank brings along when it comes back, and no call.
    """

    kv: KV
    applicant: Applicant
    session: Session

    def __init__(self, kv: KV, applicant: Applicant, session: Session, seat: Seat) -> None:
        self.kv, self.applicant, self.session = kv, applicant, session
        self.ledger: Ledger = Ledger(seat)
        self._outage, self._reminder = Outage(applicant.ttl_s), Reminder()
        self._surprises: set[type[Exception]] = set()
        self._settled = Latch()  # a new one whenever the seat is lost: back, or gone for good
        self._calling = threading.Lock()  # held while this rank makes a call
        self._threads: list[threading.Thread] = []
        self._watch()

    @classmethod
    def join(cls, kv: KV, applicant: Applicant, deadline: Deadline) -> Self:
        """Take this rank's seat; returns once all ranks have theirs.

        Raises:
            UsageError: The ranks were given different world sizes.
            SeatLost: Another incarnation took the name meanwhile.
            DeadlineExceeded: Not all ranks came.
        """
        left_behind = ""
        while True:
            taking = _Taking(kv, applicant, deadline)
            try:
                seat = taking.take(applicant, left_behind)
                seating = cls(kv, applicant, taking.session, seat)
            except BaseException as error:
                taking.end(error)
                # Others won all races, or its lease ended: it starts over with another.
                if error is not taking.lost and not isinstance(error, Contention):
                    raise
                reason = taking.lost.reason if taking.lost else "its lease ended"
                deadline.check(f"replica {applicant.replica!r} starts over: {reason}")
                # Peers may have seen all ranks in their seats, and gone on.
                left_behind = applicant.shared_nonce
            else:
                break
        taking.fence = seating.fence_at_last
        if not taking.session.is_valid():  # lost before there was anybody to tell
            reason = "its lease ended while it joined"
            seating.fence(SeatLost(applicant.replica, reason), taking.session)
        return seating

    # Having a seat

    @property
    def seat(self) -> Seat:
        return self.ledger.seat

    @property
    def state(self) -> SeatState:
        return self.ledger.standing.state

    @property
    def store_answers(self) -> bool:
        """Whether etcd answered the last request for this seat. Any thread may ask."""
        return self.session.answers if self.state == "seated" else not self._outage.is_away

    def check_final(self) -> None:
        """Raises: SeatLost, ClosedError: This seat is lost for good, or given up."""
        if self.state != "away":
            self.ledger.check()
        self.ledger.check_open()

    def pause(self) -> None:
        """Between tries; ends early when the seat is given up."""
        self.ledger.closing.wait(RETRY_S)

    def run(
        self,
        steps: Steps[T],
        deadline: Deadline,
        patience: Patience | None = None,
        *,
        check: Callable[[], None] | None = None,
    ) -> T:
        """Perform what needs the seat.

        Args:
            check: None: whether it is there.

        Raises:
            SeatLost, ClosedError: It is lost, or given up. Or etcd has failed for longer than the
                patience of a call lasts that can do without it: the caller loses the seat then.
        """
        check, on_failure = check or self.ledger.check, self._bearing(patience)
        return run(steps, self.kv, deadline, check=check, on_failure=on_failure)

    def _bearing(self, patience: Patience | None) -> OnFailure | None:
        """How a call bears an etcd that fails while the lease is renewed.

        docs/protocol/unattended.md#an-etcd-that-refuses has the rules.
        """
        ttl_s, replica = self.applicant.ttl_s, self.seat.replica

        def on_failure(error: StoreUnavailable | AccessDenied, lasts_s: float) -> None:
            is_refused = isinstance(error, StoreAlarm | AccessDenied)
            if lasts_s >= bears_s(ttl_s, is_refused=is_refused):
                raise SeatLost(replica, f"it is given up, since etcd fails: {error}") from error

        if patience is None or patience.is_usual:
            return None
        bears_s = patience.bears_s
        return on_failure

    def ask(self, ranges: Ranges, rule: Callable[[View], Step[T]], deadline: Deadline) -> T:
        """A question of this rank alone, seated or not; nothing is written down."""
        steps = settle(deadline.what, ranges, rule)
        return run(steps, self.kv, deadline, check=self.ledger.check_open)

    def follow(
        self, ranges: tuple[Range, ...], rule: Callable[[View], Done[T] | Wait], deadline: Deadline
    ) -> T:
        """As `ask`, of a question that every change may answer."""
        return run(follow(ranges, rule), self.kv, deadline, check=self.ledger.check_open)

    def await_seat(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Wait until this rank has its seat, if it lost it and may come back.

        Raises:
            SeatLost: It does not come back, or not in time.
        """
        patience = patience or Patience()
        while not self.ledger.is_closed:
            settled = self._settled
            with self.ledger.lock:
                standing, now_s = self.ledger.standing, time.monotonic()
                left_s = patience.left_s(self._outage, deadline.started_s, now_s)
            if standing.state == "seated":
                break
            if standing.state == "gone":
                raise standing.error(self.seat.replica)
            left_s = min(deadline.left_s(), left_s)
            if left_s > 0:
                settled.wait(min(left_s, RETRY_S))
            elif patience.is_usual and self._outage.has_failed and settled.wait(RETRY_S):
                continue  # a caller that tries again at once shall not keep a core busy
            else:
                self._outage.has_failed |= patience.is_usual
                raise standing.error(self.seat.replica)
        self.ledger.check_open()

    # Watching over a neighbour

    def _watch(self) -> None:
        seat = self.seat
        watch_over = partial(self._watch_over, seat, self.session)
        self.start(f"torch_ros watches {seat.inst}", watch_over)

    def start(self, name: str, target: Callable[[], None]) -> None:
        """A thread that `close` waits for, a little."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self.ledger.lock:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def _watch_over(self, seat: Seat, session: Session) -> None:
        forever = Deadline(f"watching over replica {seat.replica!r}", math.inf)
        ranges: tuple[Range, ...] = (one(seat.group), one(membership.follower(seat)))

        def ask(ranges: Ranges, rule: Callable[[View], Step[T]]) -> T:
            def check() -> None:
                self.ledger.check()
                if self.seat is not seat:
                    raise ClosedError("an earlier seat")

            return run(settle("watch", ranges, rule), self.kv, forever, check=check)

        while True:
            try:
                lost = ask(ranges, partial(membership.watch_over, seat=seat))
                if lost is None:
                    everything = (*seat.own, seat.keys.holdings())
                    lost = ask(everything, partial(membership.expel, seat=seat))
            except (ClosedError, SeatLost):
                return
            except TorchRosError as error:
                reason = f"it cannot be watched over: {error}"
                lost = SeatLost(seat.replica, reason)
            except Exception as error:  # noqa: BLE001  # without this thread nobody is watched
                self._surprised(forever.what, error)
                self.pause()
                continue
            break
        self.fence_at_last(lost, session)

    def _surprised(self, what: str, error: Exception) -> None:
        """A mistake of ours must not end a thread that nothing replaces. Each kind is said once."""
        if type(error) not in self._surprises:
            self._surprises.add(type(error))
            log.error("%s goes on after an error that was not expected", what, exc_info=error)

    # Losing the seat, and taking it again

    def fence(self, lost: SeatLost, session: Session | None = None) -> None:
        """Lose the seat. The records that this rank still has in the store go."""
        if self.state != "seated" or self.ledger.is_closed:
            return
        # By the thread that sees to what follows: or Ctrl-C might come between, and nobody would.
        is_done = Latch()
        leave = partial(self._leave_seat, lost, session, is_done)
        self.start(f"torch_ros seats {self.seat.replica}", leave)
        while not is_done.wait(RETRY_S):
            pass

    def fence_at_last(self, lost: SeatLost, session: Session) -> None:
        """As `fence`, by a thread of ours, which nobody calls again if it fails."""
        self._patiently(partial(self.fence, lost, session))

    def _patiently(self, start: Callable[[], None]) -> None:
        """Start a thread as soon as one is to be had: a container allows so many."""
        while not self.ledger.is_closed:
            try:
                start()
            except (RuntimeError, MemoryError):
                self.pause()
            else:
                return

    def _leave_seat(self, lost: SeatLost, session: Session | None, is_done: Latch) -> None:
        try:
            with self.ledger.lock:
                if self.state != "seated" or self.ledger.is_closed:
                    return
                if session is not None and session is not self.session:
                    return  # of an earlier seat
                self._settled = Latch()
                self.ledger.lose(lost)
                self._outage = Outage(self.applicant.ttl_s, time.monotonic())
                self._reminder = Reminder()
                self._reminder.is_due()  # that the seat is lost is said at once
        finally:
            is_done.set()
        is_gone = isinstance(lost, Fenced)
        level = logging.INFO if isinstance(lost, Fenced) and lost.is_orderly else logging.WARNING
        outlook = "this handle is fenced" if is_gone else "it takes its seat again"
        log.log(level, "replica %r: %s; %s", self.seat.replica, lost.reason, outlook)
        if not is_gone:
            self._come_back()
            return
        with self._calling:  # its ready record says to this rank how the running call ended
            self.session.close()

    def _come_back(self) -> None:
        """Take this rank's seat again, for as long as that takes; until close."""
        self.session.close()
        while not self.ledger.is_closed:
            try:
                self._take_seat_again()
            except ClosedError:
                return
            except Fenced as lost:
                with self.ledger.lock:
                    self.ledger.standing = Standing.of(lost)
                    self._settled.set()
                log.warning("%s", lost)
                return
            except SeatLost as lost:
                log.debug("replica %r: the seat is lost again: %s", self.seat.replica, lost.reason)
            except (BackendError, NotAvailable, RuntimeError) as error:
                # RuntimeError: no thread is to be had, since a container allows so many.
                self._outage.is_away = not isinstance(error, RuntimeError)
                if self._reminder.is_due():
                    log.warning(
                        "replica %r cannot take its seat, for %.0f s now: %s",
                        self.seat.replica,
                        self._reminder.lasts_s,
                        error,
                    )
            except Exception as error:  # noqa: BLE001  # without this thread it never comes back
                self._surprised(f"taking the seat of replica {self.seat.replica!r} again", error)
            else:
                self._patiently(self._watch)
                return
            self.pause()

    def _take_seat_again(self) -> None:
        """Raises: SeatLost: It is lost again, or this rank knows more by now than it has told."""
        old, applicant, outage = self.seat, self.applicant, self._outage
        outage.alone_since_s = None
        what = f"taking the seat of replica {applicant.replica!r} again"
        deadline = Deadline(what, math.inf, check_open=self.ledger.check_open)
        taking = _Taking(self.kv, applicant, deadline, self.fence_at_last)
        with self.ledger.lock:
            outage.alone_since_s, outage.is_away = time.monotonic(), False
            shard, told = self.ledger.brought(applicant.shard)
        back = dataclasses.replace(applicant, shard=shard, run=old.run, run_number=old.run_number)
        try:
            seat = taking.take(back, left_behind=old.nonce)
            with self.ledger.lock:
                taking.check()
                if self.ledger.has_changed(told):
                    outage.lost_since_s, outage.has_failed = time.monotonic(), False  # back soon
                    reason = "it made calls meanwhile"
                    raise SeatLost(applicant.replica, reason)
                self.session = taking.session
                self.ledger.regain(seat)
                self._settled.set()
        except BaseException:
            taking.session.close()
            raise
        log.warning(
            "replica %r has its seat again, as %s, after %.1f s",
            applicant.replica,
            seat.inst,
            self._reminder.lasts_s,
        )

    # Giving the seat up

    def close(self, last: Callable[[], bool] = lambda: False) -> None:
        """Give the seat up: the lease is revoked, so all its records go at once. Idempotent.

        This ends the replica for its other ranks too.

        Args:
            last: Done before that, when calls raise already. Whether the group has left by it.
        """
        if self.ledger.is_closed:
            return
        with self.ledger.lock:
            self.ledger.closing.set()
            self._settled.set()
        has_left = False
        try:
            try:
                has_left = last()
            finally:
                if not (has_left or self.state == "gone"):
                    self._leave()
        except TorchRosError as error:
            log.info("replica %r: its peers were not told: %s", self.seat.replica, error)
        finally:  # nobody calls this again, should Ctrl-C come
            self.session.close()
            self.kv.close()
        # One that is inside grpc when the interpreter ends takes the process down with it.
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _leave(self) -> None:
        if self.seat.world_size == 1:
            if self.store_answers:  # else nothing of this is worth a wait
                self.kv.commit(membership.leave_alone(self.seat), timeout_s=LEAVE_S)
            return
        # The note outlives this rank's lease, which may be the one that the group's records have.
        lease_id, _ = self.kv.grant(NOTE_TTL_S, timeout_s=LEAVE_S)
        rule = partial(membership.leave, seat=self.seat, note_lease_id=lease_id)
        steps = settle("close", membership.leave_ranges(self.seat), rule)
        run(steps, self.kv, Deadline("close", LEAVE_S))


class _Taking:
    """A seat that is taken on a new lease. Until it is, losing the lease only ends the taking."""

    def __init__(
        self,
        kv: KV,
        applicant: Applicant,
        deadline: Deadline,
        fence: Callable[[SeatLost, Session], None] = lambda *_: None,
    ) -> None:
        self.lost: SeatLost | None = None
        self.fence, self._kv, self._deadline = fence, kv, deadline
        self._replica, self._granting = applicant.replica, threading.Lock()
        self._who = dataclasses.replace(applicant, nonce=applicant.shared_nonce)
        with self._granting:
            self.session = Session(
                kv, ttl_s=applicant.ttl_s, on_lost=self._on_lost, name=applicant.replica
            )

    def check(self) -> None:
        """Raises: ClosedError, SeatLost: The handle was closed, or the lease ended."""
        self._deadline.check_open()
        if self.lost is not None:
            raise self.lost

    def _on_lost(self, reason: str) -> None:
        with self._granting:  # a lease that was granted late may have ended before it is here
            self.lost = SeatLost(self._replica, reason)
        self.fence(self.lost, self.session)

    def take(self, applicant: Applicant, left_behind: str = "") -> Seat:
        """The seat of this rank in a complete group.

        Args:
            left_behind: The nonce under which it had one before, or may have had.
        """
        shared = applicant.shared_nonce
        while True:
            nonce = shared or secrets.token_hex(4)
            if left_behind:
                nonce = f"{k.family(left_behind)}.{secrets.token_hex(4)}"
            who = dataclasses.replace(
                applicant,
                nonce=nonce,
                left_behind=left_behind,
                lease_id=self.session.lease_id,
                fresh_run=f"run-{secrets.token_hex(4)}",
                at_ms=wall_ms(),
            )
            self._who = who
            find = partial(membership.find_group, who=who)
            found = self._ask(membership.find_ranges(who), find) or self._create(self._told(who))
            self._who = dataclasses.replace(who, nonce=found or nonce)
            if found and (seat := self._join(who, found)) is not None:
                return seat
            left_behind = left_behind or shared

    def end(self, error: BaseException) -> None:
        """Give up. Peers that wait for this rank are told of an error that is none of ours."""
        try:
            if self._who.world_size > 1 and not isinstance(error, TorchRosError):
                self._call_off(self._who, error)
        except TorchRosError as untold:
            log.info("replica %r: its peers were not told: %s", self._replica, untold)
        finally:
            self.session.close()

    def _call_off(self, who: Applicant, error: BaseException) -> None:
        failure = Failure.of(error, replica=who.replica, call=0, rank=who.rank)
        lease_id, _ = self._kv.grant(NOTE_TTL_S, timeout_s=LEAVE_S)
        call_off = partial(membership.call_off, who=who, failure=failure, note_lease_id=lease_id)
        steps = settle("open", membership.call_off_ranges(who), call_off)
        run(steps, self._kv, Deadline("open", LEAVE_S))

    def _ask(self, ranges: Ranges, rule: Callable[[View], Step[T]]) -> T:
        steps = settle(self._deadline.what, ranges, rule)
        return run(steps, self._kv, self._deadline, check=self.check)

    def _told(self, who: Applicant) -> Applicant:
        """It knows the newest run of before, if it might have to go on with that."""
        if who.find_former_run is None or who.run is not None:
            return who
        rule = partial(runs.is_any_trained, who=who)
        if self._ask(membership.open_ranges(who), rule):
            return who
        return dataclasses.replace(who, former_run=who.find_former_run())

    def _create(self, who: Applicant) -> str:
        """The nonce of the group that was made, or that a peer made; "": another is needed."""
        create: Create = partial(membership.create_group, who=who)
        if not who.is_shared or who.left_behind:
            create = _at_most_once(create)  # with this nonce: there are others
        made = self._ask(membership.open_ranges(who), create)
        if made is GroupMade.REPLACES:
            there = self._ask((who.keys.shards_of(who.replica),), membership.processes)
            log.warning(
                "replica %r was already there, in %s, and is replaced by %s:%d; if both are "
                "wanted, give them different names",
                who.replica,
                ", ".join(there) or "a process that has ended since",
                who.shard.host,
                who.shard.pid,
            )
        return "" if made is GroupMade.NO else who.nonce

    def _join(self, who: Applicant, nonce: str) -> Seat | None:
        """This rank's seat, once all ranks have theirs; None: that group is gone."""
        shards = who.keys.shards(k.instance(who.replica, nonce))
        ranges = (one(who.group), shards, who.keys.runs(), who.keys.versions())
        return self._ask(ranges, partial(membership.join, who=who, nonce=nonce))


def _at_most_once(create: Create) -> Create:
    """`create`, which does not act again.

    If the reply to its first attempt was lost, a group with that nonce may have been there, used by
    another start of the same replica, and replaced since.
    """
    has_acted = False

    def once(view: View) -> Step[GroupMade]:
        nonlocal has_acted
        step = create(view)
        if not isinstance(step, Act):
            return step
        if has_acted:
            return Done(GroupMade.NO)
        has_acted = True
        return step

    return once
