"""Keep one process's seat in its replica's group: take it, watch a neighbour, come back, leave."""

import dataclasses
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

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
from torch_ros.store.run import Reminder, run
from torch_ros.store.session import Session
from torch_ros.store.txn import Delete, Range, Ranges, Steps, T, Txn, View, one

Create = Callable[[View], Step[GroupMade]]
Fence = Callable[[SeatLost, Session], None]
log: logging.Logger = log_of(__name__)

NOTE_TTL_S = 10  # time enough for every peer to read it
CLOSE_S = 2.0  # for its threads, which are told at once, to end
LEAVE_S = 1.0  # for telling the peers; they notice anyway
RETRY_S = 0.5  # between tries to come back


class Seating:
    """A seat that is kept: lease alive, neighbour watched, taken again when it is lost.

    `close` gives it up. It knows the ledger that a rank brings along, and makes no call itself.
    """

    kv: KV
    applicant: Applicant
    session: Session

    def __init__(self, kv: KV, applicant: Applicant, session: Session, seat: Seat) -> None:
        self.kv, self.applicant, self.session = kv, applicant, session
        self.ledger: Ledger = Ledger(seat)
        # A lost seat: what is known of the outage, and when it is worth another line in the log.
        self._outage, self._reminder = Outage(applicant.ttl_s), Reminder()
        self._surprises: set[type[Exception]] = set()  # kinds of our mistakes that were logged
        self._settled = Latch()  # a new one whenever the seat is lost: back, or gone for good
        self._calling = threading.Lock()  # held while this rank makes a call
        self._threads: list[threading.Thread] = []
        self._watch()  # over the next rank, in a thread

    @classmethod
    def join(cls, kv: KV, applicant: Applicant, deadline: Deadline) -> Self:
        """Take this rank's seat; returns once all ranks have theirs.

        It starts over on another lease if its own ends meanwhile, or others win all races.

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
                if error is not taking.lost and not isinstance(error, Contention):
                    raise
                reason = taking.lost.reason if taking.lost else "others won all races for a seat"
                deadline.check(f"replica {applicant.replica!r} starts over: {reason}")
                # Peers with that nonce may have seen all ranks in their seats, and gone on.
                left_behind = applicant.shared_nonce
            else:
                break
        taking.fence = seating.fence_at_last
        if not taking.session.is_valid():  # lost before there was anybody to tell
            reason = "its lease ended while it joined"
            seating.fence(SeatLost(applicant.replica, reason), taking.session)
        return seating

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
        """Raise if this seat is given up (ClosedError) or lost for good (SeatLost), not if away."""
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
        """Perform requests that need the seat.

        Args:
            patience: How long a call that has another way bears that etcd fails; None: it has none.
            check: Called between requests; None: it raises if the seat is not there.

        Raises: SeatLost, ClosedError: The seat is lost, or given up. Or etcd has failed for longer
            than `patience` lasts: then the seat is still there, and has to be lost by `fence`.
        """
        bear = partial(self._bear, patience) if patience and not patience.is_usual else None
        check = check or self.ledger.check
        return run(steps, self.kv, deadline, check=check, on_failure=bear)

    def _bear(
        self, patience: Patience, error: StoreUnavailable | AccessDenied, lasts_s: float
    ) -> None:
        """Called when etcd has failed for `lasts_s`: returns if this call's `patience` bears that.

        Else raises SeatLost, though the seat may be there, so that the call takes its other way: a
        full etcd renews leases and refuses the rest, so the seat would never be lost, and the call
        would wait to its deadline (docs/protocol/unattended.md#an-etcd-that-refuses).
        """
        is_refused = isinstance(error, StoreAlarm | AccessDenied)
        if lasts_s >= patience.bears_s(self.applicant.ttl_s, is_refused=is_refused):
            reason = f"it is given up, since etcd fails: {error}"
            raise SeatLost(self.seat.replica, reason) from error

    def ask(self, ranges: Ranges, rule: Callable[[View], Step[T]], deadline: Deadline) -> T:
        """A question of this rank alone, seated or not; nothing is written down."""
        steps = settle(deadline.what, ranges, rule)
        return run(steps, self.kv, deadline, check=self.ledger.check_open)

    def follow(
        self, ranges: tuple[Range, ...], rule: Callable[[View], Done[T] | Wait], deadline: Deadline
    ) -> T:
        """As `ask`, of a question that any change may answer: one watch follows them all."""
        return run(follow(ranges, rule), self.kv, deadline, check=self.ledger.check_open)

    def await_seat(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Wait until this rank has its seat, if it has lost it and takes it again.

        Raises: SeatLost: It is lost for good; or not back by the deadline, or within `patience`.
        """
        patience = patience or Patience()
        while not self.ledger.is_closed:
            settled = self._settled
            with self.ledger.lock:
                standing, outage = self.ledger.standing, self._outage
                left_s = patience.left_s(outage, deadline.started_s, time.monotonic())
            if standing.state == "seated":
                break
            if standing.state == "gone":
                raise standing.error(self.seat.replica)
            if (left_s := min(left_s, deadline.left_s())) > 0:
                settled.wait(min(left_s, RETRY_S))
                continue
            if patience.is_usual:
                # After a first failure `left_s` is 0 in the next calls: a loop of them is slowed.
                if outage.has_failed and settled.wait(RETRY_S):
                    continue
                outage.has_failed = True
            raise standing.error(self.seat.replica)
        self.ledger.check_open()

    def _watch(self) -> None:
        watch_over = partial(self._watch_over, self.seat, self.session)
        self.start(f"torch_ros watches {self.seat.inst}", watch_over)

    def start(self, name: str, target: Callable[[], None]) -> None:
        """A thread that `close` waits for, a little."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self.ledger.lock:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def _watch_over(self, seat: Seat, session: Session) -> None:
        """Wait until the next rank or the incarnation is gone; expel the rest; lose the seat."""
        forever = Deadline(f"watching over replica {seat.replica!r}", math.inf)
        watched: tuple[Range, ...] = (one(seat.group), one(membership.follower(seat)))
        look = partial(membership.watch_over, seat=seat)
        everything, expel = (*seat.own, seat.keys.holdings()), partial(membership.expel, seat=seat)
        check = partial(self._check_is_had, seat)
        while True:
            try:
                lost = run(settle("watch", watched, look), self.kv, forever, check=check)
                if lost is None:  # the next rank is gone, over which no other watches
                    lost = run(settle("watch", everything, expel), self.kv, forever, check=check)
            except (ClosedError, SeatLost):
                return  # by `check`: this seat is not had any more
            except TorchRosError as error:
                lost = SeatLost(seat.replica, f"it cannot be watched over: {error}")
            except Exception as error:  # noqa: BLE001  # without this thread nobody is watched
                self._surprised(forever.what, error)
                self.pause()
                continue
            break
        self.fence_at_last(lost, session)

    def _check_is_had(self, seat: Seat) -> None:
        """Raises: SeatLost, ClosedError: That seat is lost, though another may be had by now."""
        self.ledger.check()
        if self.seat is not seat:
            raise ClosedError("an earlier seat")

    def _surprised(self, what: str, error: Exception) -> None:
        """A mistake of ours must not end a thread that nothing replaces. Each kind is said once."""
        if type(error) not in self._surprises:
            self._surprises.add(type(error))
            log.error("%s goes on after an error that was not expected", what, exc_info=error)

    def fence(self, lost: SeatLost, session: Session | None = None) -> None:
        """Lose the seat, and its records with the lease; then come back, unless it is for good.

        A thread does all of that: Ctrl-C, which may raise anywhere in this one, would leave a rank
        that has lost its seat and does not come back.

        Args:
            session: The one that was lost, if that is known: a later seat is not lost with it.
        """
        if self.state != "seated" or self.ledger.is_closed:
            return
        is_noted = Latch()
        lose = partial(self._lose, lost, session, is_noted)
        self.start(f"torch_ros seats {self.seat.replica}", lose)
        while not is_noted.wait(RETRY_S):
            pass  # else a call that follows at once would find the seat still there

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

    def _lose(self, lost: SeatLost, session: Session | None, is_noted: Latch) -> None:
        """The thread of `fence`, which returns as soon as the loss is noted."""
        try:
            with self.ledger.lock:
                if self.state != "seated" or self.ledger.is_closed:
                    return
                if session is not None and session is not self.session:
                    return  # an earlier seat's
                self._settled = Latch()
                self.ledger.lose(lost)
                self._outage = Outage(self.applicant.ttl_s, time.monotonic())
                self._reminder = Reminder()
                self._reminder.is_due()  # that the seat is lost is said at once
        finally:
            is_noted.set()
        is_gone = isinstance(lost, Fenced)
        level = logging.INFO if isinstance(lost, Fenced) and lost.is_orderly else logging.WARNING
        outlook = "this handle is fenced" if is_gone else "it takes its seat again"
        log.log(level, "replica %r: %s; %s", self.seat.replica, lost.reason, outlook)
        if not is_gone:
            self._come_back()
            return
        with self._calling:  # the running call may have to learn its end by records on this lease
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
        """Take a seat on a new lease, and bring along what this rank knows of its group's calls.

        Raises: SeatLost: It is lost again. Or this rank has made calls since it told what it knows,
            which its peers have adopted without those: it has to start over.
        """
        old, applicant, outage = self.seat, self.applicant, self._outage
        outage.alone_since_s = None  # etcd may not answer `_Taking`, which asks for a lease
        what = f"taking the seat of replica {applicant.replica!r} again"
        deadline = Deadline(what, math.inf, check_open=self.ledger.check_open)
        taking = _Taking(self.kv, applicant, deadline, self.fence_at_last)
        with self.ledger.lock:
            outage.alone_since_s, outage.is_away = time.monotonic(), False  # etcd has answered
            shard, changes_told = self.ledger.brought(applicant.shard)
        back = dataclasses.replace(applicant, shard=shard, run=old.run, run_number=old.run_number)
        try:
            seat = taking.take(back, left_behind=old.nonce)
            with self.ledger.lock:
                taking.check()
                if self.ledger.changes != changes_told:
                    outage.lost_since_s, outage.has_failed = time.monotonic(), False  # as if anew
                    raise SeatLost(applicant.replica, "it made calls meanwhile")
                self.session = taking.session
                self.ledger.regain(seat)
                self._settled.set()
        except BaseException:
            taking.session.close()
            raise
        name, lasts_s = applicant.replica, self._reminder.lasts_s
        log.warning("replica %r has its seat again, as %s, after %.1f s", name, seat.inst, lasts_s)

    def close(self, last: Callable[[], bool] = lambda: False) -> None:
        """Give the seat up: the lease is revoked, so all its records go at once. Idempotent.

        This ends the replica for its other ranks too.

        Args:
            last: Called before that, when calls raise already. Returns whether the group has left,
                so that peers need not be told.
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
        # A thread that is inside grpc when the interpreter ends takes the process down with it.
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _leave(self) -> None:
        """Tell the peers that this replica ends: or they would take it for a crash."""
        if self.seat.world_size == 1:  # no peers
            # `seen/` hangs on no lease: left, it would look as if the process had lost its seat.
            if self.store_answers:  # else nothing of this is worth a wait: its lease ends by itself
                seen = self.seat.keys.seen_of(self.seat.replica)
                self.kv.commit(Txn(ops=(Delete(seen),)), timeout_s=LEAVE_S)
            return
        # The note outlives this rank's lease, which may be the one that the group's records have.
        lease_id, _ = self.kv.grant(NOTE_TTL_S, timeout_s=LEAVE_S)
        rule = partial(membership.leave, seat=self.seat, note_lease_id=lease_id)
        steps = settle("close", membership.leave_ranges(self.seat), rule)
        run(steps, self.kv, Deadline("close", LEAVE_S))


class _Taking:
    """A seat that is taken on a new lease. Until it is, losing the lease only ends the taking.

    Args:
        fence: Called when the lease is lost, even after the seat is taken.
    """

    def __init__(
        self, kv: KV, applicant: Applicant, deadline: Deadline, fence: Fence = lambda *_: None
    ) -> None:
        self.lost: SeatLost | None = None
        self.fence, self._kv, self._deadline = fence, kv, deadline
        self._replica, self._granting = applicant.replica, threading.Lock()
        self._who = dataclasses.replace(applicant, nonce=applicant.shared_nonce)  # for `end`
        with self._granting:  # `_on_lost` may come before there is a session
            self.session = Session(
                kv, ttl_s=applicant.ttl_s, on_lost=self._on_lost, name=applicant.replica
            )

    def check(self) -> None:
        """Raises: ClosedError, SeatLost: The handle was closed, or the lease ended."""
        self._deadline.check_open()
        if self.lost is not None:
            raise self.lost

    def _on_lost(self, reason: str) -> None:
        with self._granting:
            self.lost = SeatLost(self._replica, reason)
        self.fence(self.lost, self.session)

    def take(self, applicant: Applicant, left_behind: str = "") -> Seat:
        """The seat of this rank: in the group that waits for it, else in one that it creates.

        Again from the start if that group is gone, or was left, before all ranks had their seats.

        Args:
            left_behind: The nonce under which this rank had a seat, or may have had; "": it is new.
        """
        while True:
            who = dataclasses.replace(
                applicant,
                nonce=_nonce_to_create(applicant.shared_nonce, left_behind),
                left_behind=left_behind,
                lease_id=self.session.lease_id,
                fresh_run=f"run-{secrets.token_hex(4)}",
                at_ms=wall_ms(),
            )
            self._who = who
            find = partial(membership.find_group, who=who)
            # "": the nonce of `who` is used up, so that the next round tries another one.
            nonce = self._ask(membership.find_ranges(who), find) or self._create(who)
            self._who = dataclasses.replace(who, nonce=nonce or who.nonce)
            if nonce and (seat := self._join(who, nonce)) is not None:
                return seat
            # If all ranks were given a nonce, it is used up: peers may have gone on under it. This
            # rank comes back to them from here on, by another nonce of the family.
            left_behind = left_behind or applicant.shared_nonce

    def end(self, error: BaseException) -> None:
        """Give up before there is a seat; tell peers that wait for it of Ctrl-C, or of a bug.

        Not of an error of ours: after a lost lease or race this rank starts over, and a refusal, a
        deadline or an etcd that fails each peer meets by itself.
        """
        who = self._who
        try:
            if who.world_size > 1 and not isinstance(error, TorchRosError):
                failure = Failure.of(error, replica=who.replica, call=0, rank=who.rank)
                note, _ = self._kv.grant(NOTE_TTL_S, timeout_s=LEAVE_S)
                rule = partial(membership.call_off, who=who, failure=failure, note_lease_id=note)
                steps = settle("open", membership.call_off_ranges(who), rule)
                run(steps, self._kv, Deadline("open", LEAVE_S))
        except TorchRosError as untold:
            log.info("replica %r: its peers were not told: %s", self._replica, untold)
        finally:
            self.session.close()

    def _ask(self, ranges: Ranges, rule: Callable[[View], Step[T]]) -> T:
        steps = settle(self._deadline.what, ranges, rule)
        return run(steps, self._kv, self._deadline, check=self.check)

    def _with_former_run(self, who: Applicant) -> Applicant:
        """`who`, with a bucket's newest run, which is asked for only if etcd has none to choose."""
        if who.find_former_run is None or who.run is not None:
            return who
        if self._ask(membership.open_ranges(who), partial(runs.is_any_trained, who=who)):
            return who
        return dataclasses.replace(who, former_run=who.find_former_run())

    def _create(self, who: Applicant) -> str:
        """`who.nonce`, once this rank or a peer has made its group; "": that is used up."""
        create: Create = partial(membership.create_group, who=self._with_former_run(who))
        if not who.is_shared or who.left_behind:  # the nonce is this rank's alone
            create = _at_most_once(create)
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


def _nonce_to_create(shared_nonce: str, left_behind: str) -> str:
    """The nonce of the group that a rank creates if it finds none.

    It tells peers whether they belong there: they compare its family, all before the first ".".

    Args:
        shared_nonce: Given to all ranks alike; "": they find each other by the replica's name.
        left_behind: As of `_Taking.take`: the family stays.
    """
    if left_behind:
        return f"{k.family(left_behind)}.{secrets.token_hex(4)}"
    return shared_nonce or secrets.token_hex(4)


def _at_most_once(create: Create) -> Create:
    """The rule `create`, which does not act a second time, but asks for another nonce.

    If the reply to its first attempt was lost, the group may have been made, and been replaced by
    another start of the replica since. Made again, it would replace that start.
    """
    acts: list[Act[GroupMade]] = []

    def once(view: View) -> Step[GroupMade]:
        step = create(view)
        if isinstance(step, Act):
            if acts:
                return Done(GroupMade.NO)
            acts.append(step)
        return step

    return once
