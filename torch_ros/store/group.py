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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch_ros.errors import ClosedError, DeadlineExceeded, SelfFenced, TorchRosError
from torch_ros.store import membership, rules
from torch_ros.store.keys import Keys, instance
from torch_ros.store.kv import KV
from torch_ros.store.loops import Step, settle
from torch_ros.store.membership import Applicant
from torch_ros.store.records import Call, Failure, Kind, Outcome, Shard, VersionRef
from torch_ros.store.rules import Seat, Whole
from torch_ros.store.run import Deadline, run
from torch_ros.store.session import Session
from torch_ros.store.txn import Created, Range, Steps, View, one

T = TypeVar("T")
log = logging.getLogger(__name__)

NOTE_TTL_S = 10  # time enough for every peer to read it
LEAVE_S = 1.0  # for telling the peers; they notice anyway
CLEAN_UP_S = 5.0  # for what a failed call leaves in the store; the lease removes the rest


class Group:
    """A seat that is kept: lease alive, neighbour watched.

    Life cycle: `Group.join` (all ranks), any number of `call`s (all ranks, in the same order),
    `close`. Calls are made one at a time; everything else may come from any thread.
    """

    def __init__(self, kv: KV, session: Session, seat: Seat) -> None:
        self.kv, self.session, self.seat = kv, session, seat
        self.calls_made = 0
        self._fenced_because: str | None = None
        self.is_closed = False
        self._calling = threading.Lock()
        self.unfinished: GroupCall | None = None
        """The last call, if its end could not be learned; `GroupCall.end` it before the next."""
        self._watcher = threading.Thread(
            target=self._watch_over, name=f"torch_ros watches {seat.inst}", daemon=True
        )

    @classmethod
    def join(
        cls,
        kv: KV,
        *,
        keys: Keys,
        replica: str,
        nonce: str | None,
        rank: int,
        world_size: int,
        run_name: str | None,
        datacenter: str,
        spot: bool,
        shard: Shard,
        ttl_s: int,
        deadline: Deadline,
    ) -> Group:
        """Take this rank's seat; returns once all ranks have theirs.

        Raises:
            UsageError: The ranks were given different world sizes.
            SelfFenced: Another incarnation took the name meanwhile.
            DeadlineExceeded: Not all ranks came.
        """
        group: Group | None = None
        session = Session(
            kv,
            ttl_s=ttl_s,
            on_lost=lambda reason: group.fence(reason) if group else None,
            name=replica,
        )
        try:
            who = Applicant(
                keys,
                replica,
                rank,
                world_size,
                session.lease_id,
                shard,
                nonce or "",
                nonce is not None,
                run_name,
                "",
                datacenter,
                spot,
            )
            joined = _take_seat(kv, who, deadline)
        except BaseException:
            session.close()
            raise
        seat = Seat(
            keys,
            replica,
            joined.nonce,
            rank,
            world_size,
            joined.run,
            session.lease_id,
            datacenter,
        )
        group = cls(kv, session, seat)
        if not session.is_valid():  # lost before there was a group to tell
            group.fence("its lease ended while it joined")
        group._watcher.start()
        return group

    # Being in the group

    def check_open(self) -> None:
        """Raises: ClosedError: This seat was given up."""
        if self.is_closed:
            raise ClosedError(f"the handle of replica {self.seat.replica!r} is closed")

    def check(self) -> None:
        """Raises: SelfFenced, ClosedError: This seat is lost, or given up."""
        self.check_open()
        if self._fenced_because is not None:
            raise SelfFenced(self.seat.replica, self._fenced_because)

    @property
    def is_fenced(self) -> bool:
        return self._fenced_because is not None

    @property
    def is_over(self) -> bool:
        """Whether a peer closed its handle: an orderly end of the replica."""
        return self.is_fenced and str(self._fenced_because).endswith(rules.CLOSED)

    def fence(self, reason: str) -> None:
        """Lose the seat. What this rank still has in the store goes, after its running call."""
        if self._fenced_because is None and not self.is_closed:
            self._fenced_because = reason
            level = logging.INFO if reason.endswith(rules.CLOSED) else logging.WARNING
            log.log(level, "replica %r: %s; this handle is fenced", self.seat.replica, reason)
            if self._calling.acquire(blocking=False):
                self._calling.release()
                self.session.close()

    def close(self) -> None:
        """Give the seat up: the lease is revoked, so all its records go at once. Idempotent.

        That ends the replica for its other ranks too.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self.seat.world_size > 1 and not self.is_fenced:
            try:
                self._leave()
            except TorchRosError as error:
                log.info("replica %r: its peers were not told: %s", self.seat.replica, error)
        self.session.close()
        self.kv.close()

    def _leave(self) -> None:
        # The note outlives this rank's lease, which may be the one that the group's records have.
        lease_id, _ = self.kv.grant(NOTE_TTL_S, timeout_s=LEAVE_S)
        rule = partial(membership.leave, seat=self.seat, note_lease_id=lease_id)
        ranges = (*self.seat.own, self.seat.keys.holdings())
        run(settle("close", ranges, rule), self.kv, Deadline("close", LEAVE_S))

    def _watch_over(self) -> None:
        forever = Deadline(f"watching over replica {self.seat.replica!r}", math.inf)
        ranges: tuple[Range, ...] = (one(self.seat.group), one(membership.follower(self.seat)))
        try:
            reason = self.run(
                settle("watch", ranges, partial(membership.watch_over, seat=self.seat)), forever
            )
            if not reason:
                ranges = (*self.seat.own, self.seat.keys.holdings())
                reason = self.run(
                    settle("expel", ranges, partial(membership.expel, seat=self.seat)), forever
                )
            self.fence(reason)
        except (ClosedError, SelfFenced):
            pass
        except TorchRosError as error:
            self.fence(f"it can no longer be watched over: {error}")

    # Calls

    def run(self, steps: Steps[T], deadline: Deadline) -> T:
        return run(steps, self.kv, deadline, check=self.check)

    def ask(
        self, ranges: tuple[Range, ...], rule: Callable[[View], Step[T]], deadline: Deadline
    ) -> T:
        """A question of this rank alone, fenced or not; nothing is written down."""
        steps = settle(deadline.what, ranges, rule)
        return run(steps, self.kv, deadline, check=self.check_open)

    @contextmanager
    def call(self, kind: Kind, asked: str, deadline: Deadline) -> Iterator[GroupCall]:
        """The group's next call. An exception in the block ends it for all ranks."""
        self.check()
        assert self.unfinished is None, "the caller ends it first"
        try:
            with self._calling:
                made = GroupCall(self, self.calls_made + 1, kind, asked, deadline)
                try:
                    yield made
                except BaseException as error:
                    if isinstance(error, SelfFenced):
                        self.fence(error.reason)
                    made.give_up(error)
                    raise
                finally:
                    self.calls_made += made.is_recorded
                    if made.is_recorded and not made.has_ended and not self.is_fenced:
                        self.unfinished = made
        finally:
            if self.is_fenced:
                self.session.close()


class GroupCall:
    """What one rank does in one call of its group."""

    def __init__(
        self, group: Group, number: int, kind: Kind, asked: str, deadline: Deadline
    ) -> None:
        self._group, self._number, self._kind = group, number, kind
        self._asked, self._deadline = asked, deadline
        self._call: Call | None = None
        self._guards: tuple[Created, ...] = ()
        self._failure: Failure | None = None
        self.is_recorded = False  # the number is used up
        self.has_ended = False  # its outcome is known
        self.may_hold: VersionRef | None = None
        """What the group may be a source of because of this call, for all that is known."""

    @property
    def seat(self) -> Seat:
        return self._group.seat

    @property
    def ref(self) -> VersionRef:
        assert self._call is not None
        assert self._call.ref is not None
        return self._call.ref

    @property
    def source(self) -> str:
        assert self._call is not None
        return self._call.source

    def decide(
        self, ranges: tuple[Range, ...], effects: Callable[[View, Seat, Call], Step[Call]]
    ) -> Call:
        """What the group does in this call; the first rank that asks decides.

        Raises:
            CallMismatch: The group's call is another one.
            TorchRosError: The decision was an error, the same on all ranks.
        """
        seat, found = self.seat, None
        if seat.world_size > 1:
            # Most ranks come second: they need not read what the decision was made from.
            look = partial(rules.look_up, seat=seat, number=self._number)
            found = self._settle(seat.own, look)
        if found is None:
            rule = partial(
                rules.decide,
                seat=seat,
                number=self._number,
                kind=self._kind,
                asked=self._asked,
                effects=lambda view, call: effects(view, seat, call),
            )
            found = self._settle((*seat.own, *ranges), rule)
        self._found(found)
        if found.outcome is not None:
            self._finish(found.outcome)
        return found

    def _found(self, call: Call) -> None:
        self.is_recorded = True
        if error := rules.mismatch(self.seat, call, self._asked):
            raise error
        self._call = call

    def attach(self) -> list[Shard]:
        """Announce this rank as a reader of the source; from now on its addresses are frozen."""
        assert self._call is not None
        ranges = rules.attach_ranges(self.seat, self._call)
        rule = partial(rules.attach, seat=self.seat, call=self._call)
        shards, self._guards = self._settle(ranges, rule)
        return shards

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
        mine = one(seat.keys.ready(seat.inst, call.number, seat.rank))
        ready = partial(rules.put_ready, seat=seat, call=call, value=value, guards=self._guards)
        guarded = tuple(one(guard.key) for guard in self._guards)
        # From here on a peer may complete the call without this rank hearing of it.
        self.may_hold = call.ref
        count = self._settle((*seat.own, mine, *guarded), ready)
        if isinstance(count, Outcome):
            return count
        if count >= seat.world_size:
            everyone = (*seat.own, seat.keys.readies(seat.inst, call.number))
            said = self._settle(everyone, partial(rules.readies, seat=seat, call=call))
            if isinstance(said, Outcome):
                return said
            if said is not None:
                end = partial(
                    rules.complete, seat=seat, call=call, layout=summarise(said), whole=whole
                )
                return self._settle(self._ends_at(call), end)
        # Not `_settle`: if a peer closed after the call's good end, that end still counts.
        ended = settle(
            self._asked,
            rules.outcome_ranges(seat, call),
            partial(rules.await_outcome, seat=seat, call=call),
        )
        return run(ended, self._group.kv, self._deadline, check=self._group.check_open)

    def _ends_at(self, call: Call) -> tuple[Range, ...]:
        if call.ref is None:
            return self.seat.own
        version = self.seat.keys.version(call.ref.run, call.ref.version)
        return (*self.seat.own, one(version), one(self.seat.holding(call.ref)))

    def unpublish(self, ref: VersionRef) -> None:
        """Returns once nobody reads `ref` from this replica."""
        rule = partial(
            rules.unpublish, seat=self.seat, number=self._number, asked=self._asked, ref=ref
        )
        while True:
            result = self._settle(rules.unpublish_ranges(self.seat, ref), rule)
            if isinstance(result, Outcome):
                self.is_recorded = True
                self._finish(result)
                return
            self._found(result)

    def give_up(self, error: BaseException) -> None:
        """End the call for the peers too, and leave no record of this rank behind.

        The caller's transfers have terminated.
        """
        if self._group.is_closed:
            return
        self._failure = Failure.of(
            error, replica=self.seat.replica, call=self._number, rank=self.seat.rank
        )
        try:
            if not self.has_ended and not isinstance(error, SelfFenced):
                self._abort(error)
        except TorchRosError as also:
            log.warning("%s: could not tell the other ranks: %s", self._asked, also)
        try:
            self._withdraw()
        except TorchRosError as also:
            log.warning("%s: this rank's records stay until its lease ends: %s", self._asked, also)

    def end(self, deadline: Deadline) -> None:
        """Learn or make the end of a call that was given up while etcd was away."""
        assert self._failure is not None
        self._end(self._failure, deadline)

    def _abort(self, error: BaseException) -> Outcome:
        seat = self.seat
        failure = Failure.of(error, replica=seat.replica, call=self._number, rank=seat.rank)
        return self._end(failure, Deadline(f"giving up {self._asked}", CLEAN_UP_S))

    def _end(self, failure: Failure, deadline: Deadline) -> Outcome:
        rule = partial(
            rules.abort,
            seat=self.seat,
            number=self._number,
            kind=self._kind,
            asked=self._asked,
            failure=failure,
        )
        outcome = self._group.run(settle(self._asked, self.seat.own, rule), deadline)
        self.is_recorded = True
        self._learn(outcome)
        return outcome

    def _withdraw(self) -> None:
        if self._call is not None:
            ranges = rules.own_records(self.seat, self._call)
            deadline = Deadline(f"cleaning up after {self._asked}", CLEAN_UP_S)
            run(settle(self._asked, ranges, rules.withdraw), self._group.kv, deadline)

    def _learn(self, outcome: Outcome) -> None:
        self.has_ended = True
        is_held = outcome.failure is None and outcome.is_source and self._call is not None
        self.may_hold = self._call.ref if is_held and self._call else None

    def _finish(self, outcome: Outcome) -> Outcome:
        self._learn(outcome)
        if outcome.failure is not None:
            raise outcome.failure.error()
        return outcome

    def _settle(self, ranges: tuple[Range, ...], rule: Callable[[View], Step[T]]) -> T:
        return self._group.run(settle(self._asked, ranges, rule), self._deadline)


def _take_seat(kv: KV, who: Applicant, deadline: Deadline) -> membership.Joined:
    def ask(ranges: tuple[Range, ...], rule: Callable[[View], Step[T]]) -> T:
        return run(settle(deadline.what, ranges, rule), kv, deadline)

    shared = who.nonce
    while True:
        nonce = shared or secrets.token_hex(4)
        who = dataclasses.replace(who, nonce=nonce, fresh_run=f"run-{secrets.token_hex(4)}")
        found = ask((one(who.group),), partial(membership.find_group, who=who))
        if not found:
            if ask(membership.open_ranges(who), partial(membership.create_group, who=who)):
                log.warning("replica %r was already there and is replaced", who.replica)
            found = nonce
        ranges = (one(who.group), who.keys.shards(instance(who.replica, found)))
        joined: membership.Joined | None = membership.Joined(found, "", is_complete=False)
        while joined is not None and not joined.is_complete:
            joined = ask(ranges, partial(membership.join, who=who, nonce=found))
        if joined is not None:
            return joined
        if shared:
            raise SelfFenced(who.replica, "another incarnation took its name while it joined")


def spec_ranges(keys: Keys) -> tuple[Range, ...]:
    """What a version is resolved from."""
    return (keys.runs(), keys.versions(), keys.holdings())
