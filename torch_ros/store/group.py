"""One process's place in a replica's group, and the calls that its ranks make together.

No collective and no process group is needed: the ranks meet in the store. Each of them runs the
same rules; the first to make the group's n-th call decides it, the last to be ready completes it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Literal, TypeVar

import msgspec

from torch_ros.errors import (
    BackendError,
    CallAborted,
    CallMismatch,
    ClosedError,
    Contention,
    DeadlineExceeded,
    NotAvailable,
    SelfFenced,
    SourceLost,
    StoreUnavailable,
    TorchRosError,
)
from torch_ros.store import membership, rules, sources
from torch_ros.store.keys import Keys, family, replica_of
from torch_ros.store.kv import KV
from torch_ros.store.latch import Latch
from torch_ros.store.loops import Act, Done, Step, Wait, follow, looking_ahead, settle
from torch_ros.store.membership import Applicant
from torch_ros.store.patience import Outage, Patience
from torch_ros.store.records import (
    Begun,
    Call,
    Failure,
    Kept,
    Kind,
    Outcome,
    Shard,
    Suspect,
    VersionRef,
    mark,
)
from torch_ros.store.rules import Whole
from torch_ros.store.run import Deadline, Reminder, run
from torch_ros.store.seat import CALLS_KEPT, CLOSED, Seat
from torch_ros.store.session import Session
from torch_ros.store.sources import Source
from torch_ros.store.survey import other_models
from torch_ros.store.txn import Part, Put, Range, Steps, Txn, View, Watch, one, some
from torch_ros.store.versions import (
    Spec,
    as_spec,
    first_holders,
    may_cover,
    retentions,
    spec_ranges,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

NOTE_TTL_S = 10  # time enough for every peer to read it
SUSPECT_TTL_S = 10  # a source that failed once is not the first choice for that long
CLOSE_S = 2.0  # for its threads, which are told at once, to end
LEAVE_S = 1.0  # for telling the peers; they notice anyway
GLANCE_S = 2.0  # for a question whose answer nobody depends on
CLEAN_UP_S = 5.0  # for what a failed call leaves in the store; the lease removes the rest
DOES_NOT_WAIT = "it is cut off from etcd, and does not wait"
RETRY_S = 0.5  # between tries to come back, or to read from a source that failed before


class Missed(Exception):
    """In the place of this rank's call the group has an unpublish, which changes what it holds.

    This rank has learned its end; or has to make it too, if it has not ended.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What a rank asks for when it joins its group."""

    keys: Keys
    replica: str
    rank: int
    world_size: int
    nonce: str | None  # the same on all ranks; None: they find each other by the replica's name
    run_name: str | None
    datacenter: str
    spot: bool
    retain: tuple[str, ...]
    ttl_s: int
    drain_s: float
    shard: Shard


class Group:
    """A seat that is kept: lease alive, neighbour watched, taken again when it is lost.

    Life cycle: `Group.join` (all ranks), any number of calls by `make` (all ranks, in the same
    order), `close`. Calls are made one at a time; everything else may come from any thread.

    A rank that loses its lease, or whose neighbour does, comes back by itself: it asks for a new
    lease, takes its seat in a new incarnation of the group, and brings along what it holds and
    which calls it knows the end of. A call in the middle is then made again, under its number.
    """

    def __init__(self, kv: KV, place: Place, session: Session, seat: Seat) -> None:
        self.kv, self._place = kv, place
        self.session, self.seat = session, seat
        self.calls_made = 0
        self.held: Kept | None = None
        """What this replica holds, as far as this rank knows the ends of its calls."""
        self.unfinished: GroupCall | None = None
        """The last call, if its end could not be learned; it is ended before the next."""
        self.caller = ""
        """The call of the caller that the next calls are parts of, if they are."""
        self.told = ""
        """The text of the last call whose failure this rank was told, without a part in it."""
        self.skip: Callable[[Callable[[], None]], None] = lambda learn: learn()
        """Called when this rank skips a call: clears the word, learns the end by what it is given,
        and sets the word again if this rank still holds something."""
        self.is_closed = False
        self._lost: SelfFenced | None = None
        self._alone_since_s: float | None = None  # etcd answers, peers are missing
        self._ended: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._pending = 0
        self._changes = 0  # of what it brings along, while it had no seat
        self._lost_since_s = 0.0
        self._is_away = False  # etcd did not answer when it last tried to come back
        self._has_failed = False  # a call waited for the seat in vain
        self._given_up = ("", "")  # the last call, if it was given up and had done nothing
        self._outage = Reminder()
        self._retained: frozenset[Spec] | None = None  # by anybody, when it last looked
        self._layout = ("", "")  # of what this rank published last, and of what its group did
        self._left_over: tuple[Range, ...] = ()
        self._surprises: set[type[Exception]] = set()
        # Guards what a rank brings along when it comes back: no end is learned while it has lost
        # its seat. A lock in C: `with` takes it and gives it back whatever a signal handler raises.
        self._state = threading.RLock()
        self._settled = Latch()  # a new one whenever the seat is lost: back, or gone for good
        self._calling = threading.Lock()
        self._closing = Latch()
        self._threads: list[threading.Thread] = []
        self._watch()

    @classmethod
    def join(cls, kv: KV, place: Place, deadline: Deadline) -> Group:
        """Take this rank's seat; returns once all ranks have theirs.

        Raises:
            UsageError: The ranks were given different world sizes.
            SelfFenced: Another incarnation took the name meanwhile.
            DeadlineExceeded: Not all ranks came.
        """
        group: Group | None = None
        lost: list[SelfFenced] = []

        def on_lost(reason: str) -> None:
            lost.append(SelfFenced(place.replica, reason, may_return=True))
            if group is not None:
                group.fence(lost[-1], session)

        def check() -> None:
            if lost:
                raise lost[-1]

        left_behind = ""
        while True:
            session = Session(kv, ttl_s=place.ttl_s, on_lost=on_lost, name=place.replica)
            try:
                seat = _take_seat(
                    kv, place, session, deadline, left_behind=left_behind, check=check
                )
            except BaseException as error:
                session.close()
                # Without its lease it loses all races, perhaps before the session notices.
                if error not in lost and not isinstance(error, Contention):
                    raise
                reason = lost.pop().reason if lost else "its lease ended"
                deadline.check(f"replica {place.replica!r} starts over: {reason}")
                # Peers may have seen all ranks in their seats, and gone on.
                left_behind = place.nonce or ""
            else:
                break
        group = cls(kv, place, session, seat)
        if not session.is_valid():  # lost before there was a group to tell
            group.fence(
                SelfFenced(place.replica, "its lease ended while it joined", may_return=True),
                session,
            )
        return group

    # Being in the group

    @property
    def holds(self) -> Kept | None:
        """What this replica may be a source of, for all that this rank knows."""
        return self.held or (self.unfinished.may_hold if self.unfinished else None)

    @property
    def not_waited_for(self) -> VersionRef | None:
        """The version that all ranks unpublish before they go on, whatever became of it."""
        is_open = self.unfinished is not None and self.unfinished.ready is not None
        return self.unfinished.ref if self.unfinished is not None and is_open else None

    def check_open(self) -> None:
        """Raises: ClosedError: This seat was given up."""
        if self.is_closed:
            raise ClosedError(f"the handle of replica {self.seat.replica!r} is closed")

    def check(self) -> None:
        """Raises: SelfFenced, ClosedError: This seat is lost, or given up."""
        self.check_open()
        if self._lost is not None:
            raise SelfFenced(*self._lost.args)

    def pause(self) -> None:
        """Between tries; ends early when the seat is given up."""
        self._closing.wait(RETRY_S)

    def check_final(self) -> None:
        """Raises: SelfFenced, ClosedError: This seat is lost for good, or given up."""
        self.check_open()
        if self._lost is not None and not self._lost.may_return:
            raise SelfFenced(*self._lost.args)

    def await_seat(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Wait until this rank has its seat, if it lost it and may come back.

        Raises:
            SelfFenced: It does not come back, or not in time.
        """
        patience = patience or Patience()
        while not self.is_closed:
            settled = self._settled
            with self._state:
                lost, now_s = self._lost, time.monotonic()
                outage = Outage(
                    self._place.ttl_s,
                    now_s - self._lost_since_s,
                    None if self._alone_since_s is None else now_s - self._alone_since_s,
                    is_away=self._is_away,
                    has_failed=self._has_failed,
                )
            if lost is None:
                break
            left_s = min(deadline.left_s(), patience.left_s(outage, now_s - deadline.started_s))
            if lost.may_return and left_s > 0:
                settled.wait(min(left_s, RETRY_S))
                continue
            if lost.may_return and patience.is_usual:
                # A caller that tries again at once shall not keep a core busy.
                if self._has_failed and settled.wait(RETRY_S):
                    continue
                self._has_failed = True
            raise SelfFenced(*lost.args)
        self.check_open()

    @property
    def state(self) -> Literal["seated", "away", "gone"]:
        """Whether this rank has its seat, takes it again by itself, or has lost it for good."""
        if (lost := self._lost) is None:
            return "seated"
        return "away" if lost.may_return else "gone"

    @property
    def retain(self) -> tuple[str, ...]:
        return self._place.retain

    @property
    def ttl_s(self) -> int:
        return self._place.ttl_s

    @property
    def is_fenced(self) -> bool:
        return self._lost is not None

    def fence(self, lost: SelfFenced, session: Session | None = None) -> None:
        """Lose the seat. What this rank still has in the store goes."""
        if self._lost is not None or self.is_closed:
            return
        # By the thread that sees to what follows: or Ctrl-C might come between, and nobody would.
        is_done = Latch()
        leave = partial(self._leave_seat, lost, session, is_done)
        self.start(f"torch_ros seats {self.seat.replica}", leave)
        while not is_done.wait(RETRY_S):
            pass

    def _leave_seat(self, lost: SelfFenced, session: Session | None, is_done: Latch) -> None:
        try:
            with self._state:
                if self._lost is not None or self.is_closed:
                    return
                if session is not None and session is not self.session:
                    return  # of an earlier seat
                self._settled = Latch()
                self._lost = lost
                self._outage_begins()
        finally:
            is_done.set()
        is_over = lost.reason.endswith(CLOSED)
        level = logging.INFO if is_over else logging.WARNING
        outlook = "it takes its seat again" if lost.may_return else "this handle is fenced"
        log.log(level, "replica %r: %s; %s", self.seat.replica, lost.reason, outlook)
        if lost.may_return:
            self._come_back()
        else:
            self._let_go()

    def _outage_begins(self) -> None:
        self._lost_since_s, self._outage = time.monotonic(), Reminder()
        self._outage.is_due()  # that the seat is lost is said at once
        self._alone_since_s, self._is_away, self._has_failed = None, False, False
        self._given_up = ("", "")

    def close(self, last: Callable[[], bool] = lambda: False) -> None:
        """Give the seat up: the lease is revoked, so all its records go at once. Idempotent.

        That ends the replica for its other ranks too.

        Args:
            last: Done before that, when calls raise already. Whether the group has left by it.
        """
        if self.is_closed:
            return
        with self._state:
            self.is_closed = True
            self._closing.set()
            self._settled.set()
        has_left = False
        try:
            try:
                has_left = last()
            finally:
                is_lost = self._lost is not None and not self._lost.may_return
                if self.seat.world_size > 1 and not (has_left or is_lost):
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
        # The note outlives this rank's lease, which may be the one that the group's records have.
        lease_id, _ = self.kv.grant(NOTE_TTL_S, timeout_s=LEAVE_S)
        rule = partial(membership.leave, seat=self.seat, note_lease_id=lease_id)
        steps = settle("close", membership.leave_ranges(self.seat), rule)
        run(steps, self.kv, Deadline("close", LEAVE_S))

    def _watch(self) -> None:
        self.start(f"torch_ros watches {self.seat.inst}", partial(self._watch_over, self.seat))

    def start(self, name: str, target: Callable[[], None]) -> None:
        """A thread that `close` waits for, a little."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        with self._state:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def _watch_over(self, seat: Seat) -> None:
        forever = Deadline(f"watching over replica {seat.replica!r}", math.inf)
        ranges: tuple[Range, ...] = (one(seat.group), one(membership.follower(seat)))

        def ask(ranges: tuple[Range | Part, ...], rule: Callable[[View], Step[T]]) -> T:
            def check() -> None:
                self.check()
                if self.seat is not seat:
                    raise ClosedError("an earlier seat")

            return run(settle("watch", ranges, rule), self.kv, forever, check=check)

        while True:
            try:
                lost = ask(ranges, partial(membership.watch_over, seat=seat))
                if lost is None:
                    everything = (*seat.own, seat.keys.holdings())
                    lost = ask(everything, partial(membership.expel, seat=seat))
            except (ClosedError, SelfFenced):
                return
            except TorchRosError as error:
                reason = f"it cannot be watched over: {error}"
                lost = SelfFenced(seat.replica, reason, may_return=True)
            except Exception as error:  # noqa: BLE001  # without this thread nobody is watched
                self._surprised(forever.what, error)
                self.pause()
                continue
            break
        if self.seat is seat:
            self.fence(lost)

    def _surprised(self, what: str, error: Exception) -> None:
        """A mistake of ours must not end a thread that nothing replaces. Each kind is said once."""
        if type(error) not in self._surprises:
            self._surprises.add(type(error))
            log.error("%s goes on after an error that was not expected", what, exc_info=error)

    def _let_go(self) -> None:
        with self._calling:  # its ready record says to this rank how the running call ended
            self.session.close()

    def _come_back(self) -> None:
        """Take this rank's seat again, for as long as that takes; until close."""
        self.session.close()
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            pause_s = RETRY_S
            try:
                self._take_seat_again()
            except SelfFenced as lost:
                if not lost.may_return:
                    with self._state:
                        self._lost = lost
                        self._settled.set()
                    log.warning("%s", lost)
                    return
            except (BackendError, NotAvailable) as error:
                self._is_away = True
                if self._outage.is_due():
                    log.warning(
                        "replica %r cannot take its seat, for %.0f s now: %s",
                        self.seat.replica,
                        self._outage.lasts_s,
                        error,
                    )
            except ClosedError:
                return
            except Exception as error:  # noqa: BLE001  # without this thread it never comes back
                self._surprised(f"taking the seat of replica {self.seat.replica!r} again", error)
            else:
                return

    def _take_seat_again(self) -> None:
        old, place = self.seat, self._place
        lost: list[SelfFenced] = []

        def on_lost(reason: str) -> None:
            lost.append(SelfFenced(place.replica, reason, may_return=True))
            self.fence(lost[-1], session)

        self._alone_since_s = None
        session = Session(self.kv, ttl_s=place.ttl_s, on_lost=on_lost, name=place.replica)

        def check() -> None:
            self.check_open()
            if lost:
                raise lost[-1]

        with self._state:
            self._alone_since_s, self._is_away = time.monotonic(), False
            # One whose end is known is not, though it may not have returned yet.
            under_way = self._pending if self._pending > self.calls_made else 0
            pending = self.unfinished.number if self.unfinished else under_way
            shard = msgspec.structs.replace(
                place.shard,
                is_back=True,
                kept=self.held,
                ended=list(self._ended),
                pending=pending,
                ready=self.unfinished.ready if self.unfinished else None,
            )
            changes = self._changes
        try:
            forever = Deadline(f"taking the seat of replica {place.replica!r} again", math.inf)
            place = dataclasses.replace(place, shard=shard)
            seat = _take_seat(
                self.kv, place, session, forever, left_behind=old.nonce, left=old, check=check
            )
        except BaseException:
            session.close()
            raise
        with self._state:
            if self._changes != changes and not lost:
                lost.append(SelfFenced(place.replica, "it made calls meanwhile", may_return=True))
                self._lost_since_s, self._has_failed = time.monotonic(), False  # it is back soon
            is_seated = not (self.is_closed or lost)
            if is_seated:
                self.session, self.seat, self._lost = session, seat, None
                self._settled.set()
        if not is_seated:
            session.close()
            check()
        lasted_s = self._outage.lasts_s
        log.warning(
            "replica %r has its seat again, as %s, after %.1f s", place.replica, seat.inst, lasted_s
        )
        self._watch()

    # Calls

    def run(self, steps: Steps[T], deadline: Deadline) -> T:
        return run(steps, self.kv, deadline, check=self.check)

    def ask(
        self, ranges: tuple[Range | Part, ...], rule: Callable[[View], Step[T]], deadline: Deadline
    ) -> T:
        """A question of this rank alone, fenced or not; nothing is written down."""
        steps = settle(deadline.what, ranges, rule)
        return run(steps, self.kv, deadline, check=self.check_open)

    def hint(self, watch: Watch) -> str:
        """The other models, for who waits for a version of a model that has none."""
        keys = self.seat.keys
        return other_models(self.kv, keys) if keys.versions() in watch.ranges else ""

    def follow(
        self, ranges: tuple[Range, ...], rule: Callable[[View], Done[T] | Wait], deadline: Deadline
    ) -> T:
        """As `ask`, of a question that every change may answer."""
        return run(follow(ranges, rule), self.kv, deadline, check=self.check_open)

    def make(
        self,
        kind: Kind,
        asked: str,
        deadline: Deadline,
        body: Callable[[GroupCall], T],
        *,
        unseated: Callable[[GroupCall], T] | None = None,
        store_wait_s: float | None = None,
    ) -> T:
        """The group's next call. `body` makes it, and makes it again if the seat was lost.

        An exception that it raises ends the call for all ranks. Whatever becomes of it, the call
        has used up one number: on ranks that are cut off from etcd as on those that are not.

        Args:
            unseated: Done by this rank instead, if `store_wait_s` are over and it has no seat.

        Raises:
            Missed: The group has unpublished instead; begin anew what this call is a part of.
        """
        patience = Patience(is_unpublish=kind == "unpublish", store_wait_s=store_wait_s)
        while True:
            try:
                return self._make_next(kind, asked, deadline, body, patience, unseated)
            except Missed as missed:
                if missed.call.kind == "unpublish":
                    raise
                log.warning(
                    "replica %r: this rank did not make call %d, %r, which has failed; going on",
                    self.seat.replica,
                    missed.call.number,
                    missed.call.asked,
                )

    def _make_next(
        self,
        kind: Kind,
        asked: str,
        deadline: Deadline,
        body: Callable[[GroupCall], T],
        patience: Patience,
        unseated: Callable[[GroupCall], T] | None,
    ) -> T:
        with self._calling:
            call: GroupCall | None = None
            try:
                while True:
                    try:
                        self.catch_up(deadline, patience)
                        self.await_seat(deadline, patience)
                        if call is None or not call.is_begun:
                            call = GroupCall(self, self.calls_made + 1, kind, asked, deadline)
                        self._pending = call.number
                        return self._make(call, body, patience)
                    except SelfFenced as lost:
                        if unseated is None or not lost.may_return:
                            raise
                        call = call or self._unbegun(kind, asked, deadline)
                    said = unseated(call)
                    if self._goes_on_without(call):
                        return said
            except Missed:
                raise
            except BaseException as error:
                if call is not None and not call.is_late:
                    call.give_up(error)
                elif call is None:
                    self.pass_over(kind, asked, deadline)
                raise
            finally:
                self._made(call)

    def _made(self, call: GroupCall | None) -> None:
        with self._state:
            if call is not None and call.is_recorded:
                self.calls_made = max(self.calls_made, call.number)
                if not call.has_ended:
                    self.unfinished = call
            self._pending = 0

    def _make(self, call: GroupCall, body: Callable[[GroupCall], T], patience: Patience) -> T:
        while True:
            self.await_seat(call.deadline, patience)
            call.start(self.seat, self.session)
            call.is_begun = True
            try:
                return body(call)
            except SelfFenced as lost:
                self.fence(lost, call.session)
                if call.has_ended or not lost.may_return:
                    raise

    def _unbegun(self, kind: Kind, asked: str, deadline: Deadline) -> GroupCall:
        """A call for which this rank has no seat.

        Made again, word for word, it is the same call, or a rank that tries again and again would
        count further than its peers.
        """
        is_again = self._given_up == (kind, asked)
        return GroupCall(self, self.calls_made + (not is_again), kind, asked, deadline)

    def _goes_on_without(self, call: GroupCall) -> bool:
        """The call is not waited for; False: this rank has its seat again, and makes it there."""
        with self._state:
            if self._lost is None:
                call.ready = None
                if not call.was_ready:
                    call.may_hold, call.is_recorded = None, False
                return False
            if call.ready is None:
                self._note_given_up(call)
                return True
            self.unfinished, self.calls_made, self._pending = call, call.number, 0
            self._given_up = ("", "")
            self._changes += 1
            return True

    def gave_up(self, call: GroupCall) -> bool:
        """Note that a call ended for want of a seat; False: this rank has its seat again."""
        with self._state:
            if self._lost is None or not self._lost.may_return:
                return False
            self._note_given_up(call)
            return True

    def _note_given_up(self, call: GroupCall) -> None:
        call.is_recorded = call.has_ended = True
        if self._given_up == (call.kind, call.asked) and call.number == self.calls_made:
            return
        self._end_without(call)
        self.calls_made = max(self.calls_made, call.number)
        self._given_up = ("", "") if call.is_begun else (call.kind, call.asked)
        self._changes += 1

    def _end_without(self, call: GroupCall) -> None:
        """It ended badly, for all that this rank knows; a peer may know better."""
        outcome = Outcome(call.abandoned)
        self._ended.append(
            Call(call.number, call.kind, call.asked, self.seat.rank, outcome=outcome)
        )

    def pass_over(self, kind: Kind, asked: str, deadline: Deadline) -> None:
        """Use up the number of a call that this rank has no seat to begin."""
        if kind != "unpublish":  # `forget` counts those
            self.gave_up(self._unbegun(kind, asked, deadline))

    def catch_up(self, deadline: Deadline, patience: Patience | None = None) -> None:
        """Learn how a call ended that etcd's absence left open, as the peers have long known."""
        if (call := self.unfinished) is not None:
            self.await_seat(deadline, patience)
            try:
                outcome = call.end(deadline)
            except SelfFenced as lost:
                self.fence(lost, call.session)
                raise
            self.unfinished = None
            if call.ready is not None and outcome.failure is not None:
                reason = outcome.failure.error()
                log.warning("%s, without etcd, came to nothing: %s", call.asked, reason)
        self.clean_up()

    def clean_up(self, ranges: tuple[Range, ...] = ()) -> None:
        """Delete this rank's own records of calls that failed; what etcd does not take now, later.

        Until then they hold a source up that wants to unpublish; at most until the lease ends.
        """
        self._left_over += ranges
        if self._left_over and self._lost is None:  # else they go with the lease
            deadline = Deadline("cleaning up", CLEAN_UP_S)
            try:
                run(settle("clean up", self._left_over, rules.withdraw), self.kv, deadline)
            except TorchRosError as error:
                log.warning("records of a call that failed stay until the next one: %s", error)
            else:
                self._left_over = ()

    def have_all_begun(self, number: int, asked: str) -> bool:
        """Whether all ranks have begun that call of DCP, as this one has; which they learn now."""
        rule = partial(rules.begun, seat=self.seat, mine=Begun(number, asked))
        ranges = (one(self.seat.group), self.seat.keys.all_begun(self.seat.inst))
        return self.run(settle("begun", ranges, rule), Deadline(asked, CLEAN_UP_S))

    def learn(self, call: Call, outcome: Outcome, seat: Seat) -> None:
        """Note how a call ended.

        Raises:
            SelfFenced: The seat is lost. The end counts as unknown, since this rank may have told
                its peers already what it knows; it finds the end among what they know.
        """
        with self._state:
            self.check_open()
            if self._lost is not None and self._lost.may_return:
                raise SelfFenced(*self._lost.args)
            if self.seat is not seat:
                raise SelfFenced(seat.replica, "its seat was lost meanwhile", may_return=True)
            # Here, and not where the call returns: Ctrl-C may come in between.
            self.calls_made = max(self.calls_made, call.number)
            self._ended.append(msgspec.structs.replace(call, outcome=outcome))
            if outcome.failure is not None:
                return
            if call.kind == "unpublish":
                self.held = None
            elif outcome.is_source and call.ref is not None:
                self.held = Kept(call.ref, call.number, outcome.said, call.kind == "publish")

    def suspect(self, insts: Iterable[str], reason: str) -> None:
        """Let this replica and others prefer other sources for a while."""
        ops = tuple(
            Put(self.seat.keys.suspect(inst, self.seat.inst), Suspect(reason).encode(), lease_id)
            for lease_id, _ in [self.kv.grant(SUSPECT_TTL_S, timeout_s=CLEAN_UP_S)]
            for inst in sorted(set(insts))
        )
        self.kv.commit(Txn(ops=ops), timeout_s=CLEAN_UP_S)

    # Copies in host memory

    def host(
        self, kept: Kept, seat: Seat, copy: str, call: int, shard: Shard, deadline: Deadline
    ) -> bool:
        """Offer this rank's part of a copy; whether the copy is now offered by all ranks."""
        rule = partial(rules.copied, seat=seat, kept=kept, copy=copy, call=call, shard=shard)
        return self.run(settle("copy", rules.copied_ranges(seat, kept.ref, copy), rule), deadline)

    def release(self, ref: VersionRef, seat: Seat, copy: str) -> None:
        """Returns once the copy is not needed any more and nobody reads it.

        Raises:
            SelfFenced: The seat is lost, and with it what was offered under it.
        """
        rule = partial(rules.release, seat=seat, ref=ref, copy=copy)
        forever = Deadline(f"keeping version {ref.version}", math.inf)
        self.run(settle("release", rules.release_ranges(seat, ref, copy), rule), forever)

    def forget(self, counted: VersionRef | None = None) -> bool:
        """The owner takes its tensors back while the seat is lost; as if it had unpublished.

        Args:
            counted: The version that peers unpublish in this call, if this rank holds nothing.

        False: this rank has its seat again, and the store what is held. It has to go there too.
        """
        with self._state:
            if self._lost is None:
                return False
            ref = self.holds.ref if self.holds else counted
            if ref is None:
                return True
            number = self.calls_made + 1
            if self.unfinished is not None and self.unfinished.kind == "unpublish":
                number = self.unfinished.number
            elif self.unfinished is not None:
                self._end_without(self.unfinished)
            asked = f"unpublish {ref.version}"
            call = Call(number, "unpublish", asked, self.seat.rank, ref)
            self.calls_made = number
            self._ended.append(msgspec.structs.replace(call, outcome=Outcome()))
            self.held = self.unfinished = None
            self._given_up = ("", "")
            self._changes += 1
            return True

    def must_copy(self) -> int | None:
        """The number under which to copy what `forget` takes back: it may be retained. None: no.

        Nobody can be asked, so what anybody retained when this rank last looked still is, and no
        other replica has it. Nobody can have meant to keep a version that was never offered.
        """
        with self._state:
            lost, kept, unfinished = self._lost, self.holds, self.unfinished
            if lost is None or not lost.may_return or kept is None or self.seat.spot:
                return None
            if self.held is None and unfinished is not None and not unfinished.was_ready:
                return None
            own = {Spec.parse(as_spec(text)) for text in self._place.retain}
            if self._retained is not None and not may_cover(
                {*own, *self._retained}, kept.ref.version
            ):
                return None
            if unfinished is not None and unfinished.kind == "unpublish":
                return unfinished.number
            return self.calls_made + 1

    def look_around(self, view: View) -> None:
        """Remember what is retained, for when nobody can be asked."""
        self._retained = frozenset(retentions(view.seen(self.seat.keys.groups())))

    def layout_of(self, value: str) -> str:
        """The group's layout when this rank's part has that one, as far as known."""
        return self._layout[1] if self._layout[0] == value else value

    def published(self, value: str, said: str) -> None:
        self._layout = (value, said)


class GroupCall:
    """What one rank does in one call of its group."""

    def __init__(
        self, group: Group, number: int, kind: Kind, asked: str, deadline: Deadline
    ) -> None:
        self._group, self.number, self.kind = group, number, kind
        self.asked, self.deadline = asked, deadline
        self.start(group.seat, group.session)
        self._call: Call | None = None
        self._tried = Counter[str]()  # how often each source was lost
        self._sources: set[str] = set()  # for which a reader record may be there
        self._failure: Failure | None = None
        self.reroutes = 0
        self._said = ""
        self.is_recorded = False  # the number is used up
        self._refuses = False
        self.is_late = False  # peers wait in a later call, which this is not to end
        self.has_ended = False  # its outcome is known
        self.is_begun = False  # from a seat; peers may know of it
        self.was_ready = False  # so it may have ended well
        self.ready: Call | None = None  # a publication that was not waited for, as it would end
        self._value = ""  # what this rank said
        self.may_hold: Kept | None = None
        """What the group may be a source of because of this call, for all that is known."""

    def start(self, seat: Seat, session: Session) -> None:
        """It is made from this seat; again, if that was lost."""
        self.seat, self.session = seat, session
        self._seen: View | None = None  # what the next step may begin with: one that is guarded

    @property
    def ref(self) -> VersionRef:
        assert self._call is not None
        assert self._call.ref is not None
        return self._call.ref

    @property
    def fresh_uid(self) -> str:
        """For content that this call publishes; the same on all ranks, and if it is made again."""
        who = f"{self.seat.replica}@{family(self.seat.nonce)}/{self.number}/{self.asked}"
        return blake2b(who.encode(), digest_size=8).hexdigest()

    @property
    def mark(self) -> int:
        """What this process shows with what it has because of this call."""
        return mark(self.ref.uid, self.number)

    @property
    def said(self) -> str:
        """agree: what all ranks said, once it has ended."""
        return self._said

    @property
    def found(self) -> VersionRef | None:
        """update: the version to go to."""
        assert self._call is not None
        return self._call.ref

    def decide(
        self,
        ranges: tuple[Range | Part, ...],
        effects: Callable[[View, Seat, Call], Step[Call]],
        ahead: tuple[Range | Part, ...] = (),
    ) -> None:
        """What the group does in this call; the first rank that asks decides.

        It may have ended already, well, when this rank had lost its seat: see `has_ended`.

        Args:
            ahead: What comes next is decided from, besides the own records of the call.

        Raises:
            CallMismatch: The group's call is another one.
            TorchRosError: The decision was an error, the same on all ranks.
        """
        seat, found = self.seat, None
        ahead = (*seat.own, one(seat.keys.ready(seat.inst, self.number, seat.rank)), *ahead)
        if seat.world_size > 1:
            # Most ranks come second: they need not read what the decision was made from.
            look = partial(rules.look_up, seat=seat, number=self.number)
            found = self._settle(ahead, look, ahead)
        if found is None:
            rule = partial(
                rules.decide,
                seat=seat,
                number=self.number,
                kind=self.kind,
                asked=self.asked,
                effects=lambda view, call: effects(view, seat, call),
            )
            found = self._settle((*ahead, *ranges), rule, ahead)
        self._found(found)
        if found.outcome is not None:
            self._finish(found.outcome)

    def _found(self, call: Call) -> None:
        group, is_first_look = self._group, self._call is None
        text = group.caller or self.asked
        told = group.told if is_first_look else ""
        met = rules.meet(call, self.asked, group.caller, refuses=self._refuses, told=told)
        if met == "same" and is_first_look:
            has_failed = call.outcome is not None and call.outcome.failure is not None
            group.told = text if has_failed and call.by != self.seat.rank else ""
        error = CallMismatch(self.seat.replica, call.number, self.asked, call.asked)
        match met:
            case "to make":
                self.is_recorded = False  # even if it was, before this rank lost its seat
                raise Missed(call)
            case "ahead":
                self.is_late, self.is_recorded = True, False
                raise error
            case _:
                self.is_recorded = True
                self._call = call  # also if it is another one: its end is learned
        match met:
            case "missed":
                assert call.outcome is not None
                self._group.skip(partial(self._learn, call.outcome))
                raise Missed(call)
            case "late":
                self._abort(error)
                raise Missed(call)
            case "other":
                raise error

    def refuse(self, error: BaseException) -> None:
        """Make the call only for it to fail, on all ranks.

        Raises:
            TorchRosError: How it has.
        """
        seat, self._refuses = self.seat, True
        reason = f"{type(error).__name__}: {error}"
        told = CallAborted(seat.replica, self.number, seat.rank, reason)

        def effects(*_: object) -> Step[Call]:
            raise error if isinstance(error, TorchRosError) else told

        self.decide((), effects)
        raise error

    def decide_to_publish(self, version: int) -> None:
        """Decide to publish `version`, or that it cannot be."""
        keys, run = self.seat.keys, self.seat.run
        effects = partial(rules.publish, version=version, fresh_uid=self.fresh_uid)
        own = keys.holding(run, version, self.seat.inst)
        ahead = (one(keys.version(run, version)), one(own), first_holders(keys, run, version))
        self.decide((keys.versions(run), keys.holdings(run)), effects, ahead)

    def decide_to_read(
        self, spec: Spec, floor: VersionRef | None, *, is_relay: bool, sources_max: int = 1
    ) -> None:
        """Decide which version, and claim a source of it, or up to `sources_max` idle ones."""
        tries = 0

        def effects(view: View, seat: Seat, call: Call) -> Step[Call]:
            nonlocal tries
            tries += 1
            return rules.replicate(
                view,
                seat,
                call,
                spec,
                floor,
                is_relay=is_relay,
                sources_max=sources_max if tries == 1 else 0,
            )

        keys = self.seat.keys
        while not self.has_ended:
            self.decide((*spec_ranges(keys), some(keys.readers()), keys.suspects()), effects)
            assert self._call is not None
            if self.has_ended or self._call.sources:
                return
            rule = partial(sources.claim, seat=self.seat, call=self._call)
            claimed = self._settle(sources.source_ranges(self.seat, self.ref), rule)
            if claimed is None:  # the version went away in between
                continue
            self._call = claimed
            if claimed.outcome is not None:
                self._finish(claimed.outcome)
            return

    def read(self, fetch: Callable[[Sequence[Source]], None]) -> None:
        """`fetch` from the sources that were claimed; from those left, or another, if one is lost.

        Args:
            fetch: Reads what is still missing. When it raises, nothing is in flight any more.

        Raises:
            SourceLost: The last source; no other is left.
        """
        assert self._call is not None
        tried = self._tried = Counter[str]()
        insts, attached = list(self._call.sources), dict[str, Source]()
        while True:
            try:
                for inst in insts:
                    if inst not in attached:
                        attached[inst] = self._attach(inst)
                fetch([attached[inst] for inst in insts])
            except SourceLost as lost:
                inst = next((inst for inst in insts if replica_of(inst) == lost.replica), "")
                if not inst:
                    raise  # a peer's, who gave up
                tried[inst] += 1
                insts.remove(inst)
                attached.pop(inst, None)
                self._detach(inst, lost)
                insts = insts or [self._elsewhere(tried, lost)]
                self.reroutes += 1
                log.warning(
                    "%s: lost %r (%s); going on from %s with what there is",
                    self.asked,
                    lost.replica,
                    lost.what,
                    ", ".join(repr(replica_of(inst)) for inst in insts),
                )
            else:
                return

    def _attach(self, inst: str) -> Source:
        assert self._call is not None
        self._sources.add(inst)
        rule = partial(sources.attach, seat=self.seat, call=self._call, source=inst)
        ranges = sources.attach_ranges(self.seat, self._call, inst)
        mine = one(self.seat.keys.ready(self.seat.inst, self.number, self.seat.rank))
        return self._settle(ranges, rule, (*rules.end_ranges(self.seat, self._call), mine))

    def _detach(self, inst: str, lost: SourceLost) -> None:
        assert self._call is not None
        kv, timeout_s = self._group.kv, min(CLEAN_UP_S, max(0.5, self.deadline.left_s()))
        try:
            lease_id, _ = kv.grant(SUSPECT_TTL_S, timeout_s=timeout_s)
            txn = sources.detached(self.seat, self._call, inst, lost.what, lease_id)
            kv.commit(txn, timeout_s=timeout_s)
        except StoreUnavailable as error:  # it holds the source up until this rank withdraws
            log.info("%s: %s was not told: %s", self.asked, inst, error)

    def _elsewhere(self, tried: Counter[str], lost: SourceLost) -> str:
        assert self._call is not None
        rule = partial(
            sources.choose_again, seat=self.seat, call=self._call, tried=tried, lost=lost
        )
        again = self._settle(sources.source_ranges(self.seat, self.ref), rule)
        if tried[again]:
            self.deadline.check(str(lost))
            time.sleep(RETRY_S)
        return again

    def is_there(self, source: Source) -> bool:
        """Whether a source that makes no progress may still make some."""
        assert self._call is not None
        ranges = sources.there_ranges(self.seat, self.ref, source)
        rule = partial(sources.is_there, seat=self.seat, call=self._call, source=source)
        return self._glance((*self.seat.own, *ranges), rule, unknown=True)

    def has_other(self, source: Source) -> bool:
        """Whether there is another source for what is read from one that does not answer."""
        assert self._call is not None
        rule = partial(
            sources.has_other, seat=self.seat, call=self._call, source=source, tried=self._tried
        )
        return self._glance(sources.source_ranges(self.seat, self.ref), rule, unknown=False)

    def _glance(
        self, ranges: tuple[Range | Part, ...], rule: Callable[[View], Step[bool]], *, unknown: bool
    ) -> bool:
        """The store's answer; `unknown` if it does not answer soon: the bytes may come first."""
        within_s = min(GLANCE_S, max(0.0, self.deadline.left_s()))
        brief = Deadline(self.asked, within_s, check_open=self.deadline.check_open)
        try:
            return self._group.run(settle(self.asked, ranges, rule), brief)
        except (DeadlineExceeded, StoreUnavailable):
            return unknown

    def finish(
        self,
        value: str,
        summarise: Callable[[Mapping[int, str]], str],
        whole: Whole = Whole(),  # noqa: B008  # a frozen value
    ) -> Outcome:
        """This rank is ready, and says `value`; returns when all are.

        Args:
            summarise: From what every rank said to the layout that the group holds. Called on
                the last rank only; may take time, and may raise.

        Raises:
            TorchRosError: The outcome was an error, the same on all ranks.
        """
        try:
            outcome = self._finish_or_raise(value, summarise, whole)
        except DeadlineExceeded as error:
            outcome = self._abort(error)
            if outcome.failure is not None:
                raise
        return self._finish(outcome)

    def _finish_or_raise(
        self, value: str, summarise: Callable[[Mapping[int, str]], str], whole: Whole
    ) -> Outcome:
        seat, call = self.seat, self._call
        assert call is not None
        reads = rules.own_records(seat, call, self._sources)[1:]
        ready = partial(rules.put_ready, seat=seat, call=call, value=value, reads=reads)
        mine = one(seat.keys.ready(seat.inst, call.number, seat.rank))
        if call.ref is not None:
            # From here on a peer may complete the call without this rank hearing of it.
            self.may_hold = Kept(call.ref, call.number, value, call.kind == "publish")
            self._value, self.was_ready = value, True
        if seat.world_size == 1:
            layout = summarise({seat.rank: value})
            alone = partial(
                rules.complete, seat=seat, call=call, layout=layout, whole=whole, reads=reads
            )
            return self._settle(rules.end_ranges(seat, call), alone, first=self._seen)
        everyone = (*seat.own, seat.keys.readies(seat.inst, call.number))
        ahead = (
            *rules.end_ranges(seat, call),
            everyone[-1],
            *rules.outcome_ranges(seat, call)[-1:],
        )
        count = self._settle((*seat.own, mine), ready, ahead, self._seen)
        if isinstance(count, Outcome):
            return count
        if count + len(seat.done_by(call)) >= seat.world_size:
            all_ready = partial(rules.readies, seat=seat, call=call)
            said = self._settle(everyone, all_ready, first=self._seen)
            if isinstance(said, Outcome):
                return said
            if said is not None:
                end = partial(
                    rules.complete, seat=seat, call=call, layout=summarise(said), whole=whole
                )
                return self._settle(rules.end_ranges(seat, call), end, first=self._seen)
        # Not `_settle`: if a peer closed after the call's good end, that end still counts.
        ended = settle(
            self.asked,
            rules.outcome_ranges(seat, call),
            partial(rules.await_outcome, seat=seat, call=call),
            self._seen,
        )
        return run(ended, self._group.kv, self.deadline, check=self._group.check_open)

    def unpublish(self, ref: VersionRef, copy: Callable[[str], Shard]) -> None:
        """Returns once nobody reads `ref` from this replica.

        Args:
            copy: Makes this rank's part of the copy of that name in host memory, or says again
                where it is.
        """

        def rule(view: View) -> Step[Call | Outcome]:
            step = rules.unpublish(view, self.seat, self.number, self.asked, ref)
            self._group.look_around(view)
            return step

        while True:
            result = self._settle(rules.unpublish_ranges(self.seat, ref), rule)
            if isinstance(result, Outcome):
                self.is_recorded = True
                self._call = self._call or Call(
                    self.number, "unpublish", self.asked, self.seat.rank, ref
                )
                self._finish(result)
                return
            self._found(result)
            if result.outcome is not None:
                self._finish(result.outcome)
            if not result.copy:
                continue
            kept = self._group.holds
            assert kept is not None
            self._group.host(
                kept, self.seat, result.copy, self.number, copy(result.copy), self.deadline
            )

    def give_up(self, error: BaseException) -> None:
        """End the call for the peers too, and leave no record of this rank behind.

        The caller's transfers have terminated, and what it shows is void.
        """
        if self._group.is_closed:
            return
        self._failure = Failure.of(
            error, replica=self.seat.replica, call=self.number, rank=self.seat.rank
        )
        # Nobody can have completed it without this rank, and peers that still make it should know.
        is_done_with = self.kind != "unpublish" and not self.was_ready
        if not self.has_ended and is_done_with and self._group.gave_up(self):
            return
        if not self.has_ended and isinstance(error, SelfFenced):
            # Peers may have made this call, and may end it well: the number is used up, and its
            # end is learned before the next call.
            self.is_recorded = True
        try:
            if not self.has_ended and not isinstance(error, SelfFenced):
                self._abort(error)
        except TorchRosError as also:
            # Perhaps the store has a decision whose reply was lost: the number is used up.
            self.is_recorded = True
            log.warning("%s: could not tell the other ranks: %s", self.asked, also)
        if self._call is not None:
            self._group.clean_up(rules.own_records(self.seat, self._call, self._sources))

    def go_on_without(self, version: int, value: str) -> None:
        """This rank holds what it publishes; it is offered when all ranks are back.

        Args:
            value: The layout of this rank's part.
        """
        assert not self.has_ended
        seat = self.seat
        ref = self._call.ref if self._call else None
        if ref is None:
            ref = VersionRef(seat.run, version, self.fresh_uid, seat.run_number)
            self._call = Call(self.number, self.kind, self.asked, seat.rank, ref)
        layout = self._group.layout_of(value)
        self.may_hold = Kept(ref, self.number, layout, is_original=True)
        outcome = Outcome(is_source=True, said=layout)
        self.ready = Call(self.number, self.kind, self.asked, 0, ref, outcome=outcome)
        self._failure, self.is_recorded = self.abandoned, True

    @property
    def abandoned(self) -> Failure:
        """How it ends for the peers when this rank does not wait for it."""
        seat = self.seat
        error = CallAborted(seat.replica, self.number, seat.rank, DOES_NOT_WAIT)
        return Failure.of(error, replica=seat.replica, call=self.number, rank=seat.rank)

    def end(self, deadline: Deadline) -> Outcome:
        """Learn or make the end of a call that was given up while etcd was away."""
        assert self._failure is not None
        self.seat, self.session = self._group.seat, self._group.session
        return self._end(self._failure, deadline)

    def _abort(self, error: BaseException) -> Outcome:
        seat = self.seat
        failure = Failure.of(error, replica=seat.replica, call=self.number, rank=seat.rank)
        return self._end(failure, Deadline(f"giving up {self.asked}", CLEAN_UP_S))

    def _end(self, failure: Failure, deadline: Deadline) -> Outcome:
        rule = partial(
            rules.abort,
            seat=self.seat,
            number=self.number,
            kind=self.kind,
            asked=self.asked,
            failure=failure,
        )
        self._call = self._group.run(settle(self.asked, self.seat.own, rule), deadline)
        self.is_recorded = True
        assert self._call.outcome is not None
        self._learn(self._call.outcome)
        return self._call.outcome

    def _learn(self, outcome: Outcome) -> None:
        call = self._call or Call(self.number, self.kind, self.asked, self.seat.rank)
        self._group.learn(call, outcome, self.seat)
        if call.kind == "publish" and self._value and outcome.failure is None:
            self._group.published(self._value, outcome.said)
        self.has_ended, self.may_hold, self._said = True, None, outcome.said

    def _finish(self, outcome: Outcome) -> Outcome:
        self._learn(outcome)
        if outcome.failure is not None:
            raise outcome.failure.error()
        return outcome

    def _settle(
        self,
        ranges: tuple[Range | Part, ...],
        rule: Callable[[View], Step[T]],
        ahead: tuple[Range | Part, ...] = (),
        first: View | None = None,
    ) -> T:
        if ahead:
            rule = looking_ahead(rule, ahead, self._keep)
        return self._group.run(settle(self.asked, ranges, rule, first), self.deadline)

    def _keep(self, view: View) -> None:
        self._seen = view


def _at_most_once(
    create: Callable[[View], Step[bool | None]],
) -> Callable[[View], Step[bool | None]]:
    """`create`, which does not act again.

    If the reply to its first attempt was lost, a group with that nonce may have been there, used by
    another start of the same replica, and replaced since.
    """
    has_acted = False

    def once(view: View) -> Step[bool | None]:
        nonlocal has_acted
        step = create(view)
        if not isinstance(step, Act):
            return step
        if has_acted:
            return Done(None)
        has_acted = True
        return step

    return once


def _take_seat(
    kv: KV,
    place: Place,
    session: Session,
    deadline: Deadline,
    *,
    left_behind: str = "",
    left: Seat | None = None,
    check: Callable[[], None] = lambda: None,
) -> Seat:
    """The seat of this rank in a complete group.

    Args:
        left_behind: The nonce under which it had one before, or may have had.
        left: That seat, if its group was complete.
    """

    def ask(ranges: tuple[Range | Part, ...], rule: Callable[[View], Step[T]]) -> T:
        return run(settle(deadline.what, ranges, rule), kv, deadline, check=check)

    who = Applicant(
        keys=place.keys,
        replica=place.replica,
        rank=place.rank,
        world_size=place.world_size,
        lease_id=session.lease_id,
        shard=place.shard,
        nonce=place.nonce or "",
        is_shared=place.nonce is not None,
        run=left.run if left else place.run_name,
        fresh_run="",
        datacenter=place.datacenter,
        spot=place.spot,
        retain=place.retain,
        run_number=left.run_number if left else 0,
    )
    while True:
        nonce = place.nonce or secrets.token_hex(4)
        if left_behind:
            nonce = f"{family(left_behind)}.{secrets.token_hex(4)}"
        fresh_run = f"run-{secrets.token_hex(4)}"
        who = dataclasses.replace(who, nonce=nonce, left_behind=left_behind, fresh_run=fresh_run)
        found = ask((one(who.group),), partial(membership.find_group, who=who))
        if not found:
            create: Callable[[View], Step[bool | None]]
            create = partial(membership.create_group, who=who)
            if not who.is_shared or left_behind:
                create = _at_most_once(create)  # with this nonce: there are others
            is_replaced = ask(membership.open_ranges(who), create)
            if is_replaced is None:
                left_behind = left_behind or place.nonce or ""
                continue
            if is_replaced:
                there = ask((who.keys.shards_of(who.replica),), membership.processes)
                log.warning(
                    "replica %r was already there, in %s, and is replaced by %s:%d; if both are "
                    "wanted, give them different names",
                    who.replica,
                    ", ".join(there) or "a process that has ended since",
                    place.shard.host,
                    place.shard.pid,
                )
            found = nonce
        ranges = membership.join_ranges(who, found)
        rule = partial(membership.join, who=who, nonce=found)
        while (joined := ask(ranges, rule)) is not None and not joined.is_complete:
            pass
        if joined is not None:
            break
        left_behind = left_behind or place.nonce or ""
    return Seat(
        keys=place.keys,
        replica=place.replica,
        nonce=joined.group.nonce,
        rank=place.rank,
        world_size=place.world_size,
        run=joined.group.run,
        run_number=joined.run_number,
        unwaited=joined.unwaited,
        lease_id=session.lease_id,
        # As the record says, or a rank that was started with another answer would differ.
        datacenter=joined.group.datacenter,
        spot=joined.group.spot,
        drain_s=place.drain_s,
    )
