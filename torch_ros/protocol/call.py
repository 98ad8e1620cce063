"""One rank's part in one call of its group: decide, read, finish, give up."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b

from msgspec.structs import replace

from torch_ros.deadline import Deadline, wall_ms
from torch_ros.errors import (
    CallMismatch,
    Fenced,
    SeatLost,
    StoreUnavailable,
    TorchRosError,
    UsageError,
)
from torch_ros.printable import log_of
from torch_ros.protocol import calls, meeting, sources, unpublish
from torch_ros.protocol.calls import Effects, SourceTerms
from torch_ros.protocol.keys import family
from torch_ros.protocol.ledger import Attempt, BeginsAgain
from torch_ros.protocol.life import WAS_READY, CallEvent
from torch_ros.protocol.meeting import Meeting, Missed
from torch_ros.protocol.records import (
    Asked,
    Call,
    Failure,
    Kept,
    Kind,
    Outcome,
    Ready,
    Said,
    VersionRef,
    mark,
)
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.seating import Seating
from torch_ros.protocol.sources import Claimed, Source
from torch_ros.protocol.versions import spec_ranges
from torch_ros.store.loops import Done, Step, WaitAtMost, settle
from torch_ros.store.run import run
from torch_ros.store.session import Session
from torch_ros.store.txn import Range, Ranges, Read, T, View, one

Rule = Callable[[View], Step[T]]
SumUp = Callable[[Mapping[int, str]], None]
"""Ends a call by what every rank has said."""
Sight = tuple[Seat, View]
"""The view that was read from that seat before a call, for its decision."""
log: logging.Logger = log_of(__name__)

SERVED = SourceTerms()
GLANCE_S = 2.0  # for a question whose answer is a word in an error
CLEAN_UP_S = 5.0  # for what a failed call leaves in the store; the lease removes the rest


@dataclass(frozen=True, slots=True)
class Passing:
    """The place of an unpublish that is a part of another call.

    Args:
        sight: May be decided from in place of a new view: guards protect all that is done upon it.
        replicates: A replicate comes next, within the same user's call.
    """

    sight: Sight | None = None
    replicates: bool = False


ALONE = Passing()


@dataclass(frozen=True, slots=True)
class Parting:
    """A rank's acts beside its part in an unpublish.

    Args:
        sees: Told of each view that the unpublish is decided from.
        acts: Does what the call, as it is recorded, asks of each rank before readers are awaited.
    """

    sees: Callable[[View], object] = lambda _: None
    acts: Callable[[Call], object] = lambda _: None


NO_PARTING = Parting()


class GroupCall(Attempt):
    """One rank's part in one call of its group: `decide`, its own work, `finish`; or `give_up`."""

    def __init__(
        self, seating: Seating, number: int, kind: Kind, asked: Asked, deadline: Deadline
    ) -> None:
        super().__init__(seating.seat, number, kind, asked)
        self.seating: Seating = seating
        self._ledger, self.deadline = seating.ledger, deadline
        self.start(seating.seat, seating.session)
        # Marked now with the user's call: its end may be made within a later one (`end`).
        self.part = self._ledger.part(Call(number, kind, asked, self.seat.rank))
        self._call: Call | None = None  # the group's call, as this rank found it last
        self.read_from: set[str] = set()  # the sources for which a reader record may be there
        self._ends_by: Failure | None = None  # for `end`, if nothing else has ended it by then
        self.is_unproven = False  # the part of a rank is, as its `Ready` says
        self.refuses = False  # it is made only to end a user's call: see `meeting.meet`
        self.said: str = ""  # agree: by all ranks, once it has ended
        self.waited_for: set[str] = set()  # unpublish, on the rank that decided: replicas
        self.left_behind: set[str] = set()  # those that had not done when its time was over
        self.at_ms: int = wall_ms()  # when it began
        self.traceparent: str = ""  # the span in which it publishes

    def start(self, seat: Seat, session: Session) -> None:
        """Begin from this seat; if another was lost before, forget what was seen from that one."""
        self.seat, self.session = seat, session
        self.seen: View | None = None  # what the next step may begin with, if guards protect it
        self._was_counted = False  # this rank knows that its ready record was put
        self.attached: dict[str, Callable[[], Source]] = {}  # along with the claim; by place

    @property
    def is_decided(self) -> bool:
        """Whether this rank knows what the group does in the call."""
        return self._call is not None

    @property
    def decided(self) -> Call:
        assert self._call is not None
        return self._call

    @property
    def ref(self) -> VersionRef:
        assert self.decided.ref is not None
        return self.decided.ref

    @cached_property
    def fresh_uid(self) -> str:
        """For content that this call publishes; the same on all ranks, and if it is made again."""
        who = f"{self.seat.replica}@{family(self.seat.nonce)}/{self.number}/{self.asked}"
        return blake2b(who.encode(), digest_size=8).hexdigest()

    @property
    def own_ready(self) -> Range:
        """The key of this rank's ready record."""
        return one(self.seat.keys.ready(self.seat.inst, self.number, self.seat.rank))

    def _fresh_ref(self, version: int) -> VersionRef:
        return VersionRef(self.seat.run, version, self.fresh_uid, self.seat.run_number)

    @property
    def own_call(self) -> Call:
        """The call as this rank makes it."""
        return replace(self.part, at_ms=self.at_ms, traceparent=self.traceparent)

    def mismatch(self, found: Call) -> CallMismatch:
        """The error of a rank that finds that call in the place of its own."""
        seat, called = self.seat, (f"{self.asked}", f"{found.asked}")
        behind = meeting.behind(self.seen, seat, found.number) if self.seen else 0
        return CallMismatch(seat.replica, found.number, *called, seat.rank, behind)

    @property
    def mark(self) -> int:
        return mark(self.ref.uid, self.number)

    def decide(
        self, ranges: Ranges, effects: Effects, ahead: Ranges = (), *, is_cheap: bool = False
    ) -> None:
        """Decide what the group does in this call: the first rank that asks does.

        It may have ended already, well, when this rank had lost its seat: see `has_ended`.

        Args:
            ranges: All that `effects` decides from.
            ahead: The ranges of the next step, besides the own records of the call.
            is_cheap: `ranges` are so little that each rank may read them.

        Raises:
            CallMismatch: The group's call is another one.
            TorchRosError: The decision was an error, the same on all ranks.
        """
        seat, own, found = self.seat, self.own_call, None
        seen = self._ledger.take_sight(seat)
        ahead = (*seat.own, self.own_ready, *ahead)
        if seat.world_size > 1 and seen is None and not is_cheap:
            # Most ranks come second: they need not read what the decision was made from.
            found = self.settle(ahead, partial(calls.look_up, seat=seat, number=self.number), ahead)
        if found is None:
            rule = partial(calls.find_or_decide, seat=seat, call=own, effects=effects, seen=seen)
            found = self.settle((*ahead, *ranges), rule, ahead, seen)
        self._enter(found)

    def _enter(self, call: Call) -> None:
        """Take part in the group's call of this number, or do what it means to this rank.

        Raises:
            Missed: It is not this rank's. Its end is learned, unless this rank has to make it, too.
            CallMismatch: The ranks are out of step.
            TorchRosError: The call has ended so.
        """
        met = self._meaning(call)
        if met in (Meeting.TO_MAKE, Meeting.AHEAD):  # this rank will come to it: no number is used
            self.become(CallEvent.MET_ANOTHER)
            raise Missed(call) if met is Meeting.TO_MAKE else self.mismatch(call)
        self.become(CallEvent.COUNTED)
        self._call = call  # also if it is another one: its end is learned
        self.note_decided(call.ref)
        # An unpublish counts as a part of this user's call. Noted first: who is interrupted below
        # refuses its own call from there on, and not the one that it skips.
        if met is Meeting.LATE or (met is Meeting.MISSED and call.kind != "unpublish"):
            self._ledger.skipped(self.number)
        match met:
            case Meeting.SAME:
                _require_known(self, call)
                if call.outcome is not None:
                    self._finish(call.outcome)
            case Meeting.MISSED:
                assert call.outcome is not None
                self._ledger.skip(partial(self._learn, call.outcome))
                raise Missed(call)
            case Meeting.LATE:  # ends the peers' step for all
                self._abort(self.mismatch(call))
                raise Missed(call)
            case Meeting.OTHER:
                raise self.mismatch(call)

    def _meaning(self, call: Call) -> Meeting:
        """The meaning of the group's call to this rank.

        Only what it sees first may be a call that it left out, or a peer's failure that it is told:
        later it has a part in it. The ledger notes what was told, for the meeting of the next call.
        """
        ledger, own, is_first_look = self._ledger, self.own_call, self._call is None
        told, seen = (ledger.told, self.seen) if is_first_look else (None, None)
        left_out = False
        if seen is not None and call.outcome is not None:
            left_out = meeting.is_left_out(seen, self.seat, own, told)
        met = meeting.meet(
            call, own, refuses=self.refuses, told=told, block=ledger.block, left_out=left_out
        )
        if is_first_look and met is Meeting.SAME:
            is_told = call.failure is not None and call.by != self.seat.rank
            ledger.told = own.caller if is_told else None
        return met

    def decide_to_publish(self, version: int, traceparent: str = "") -> None:
        """Decide to publish; with it, read what the call's end is written upon."""
        self.traceparent = traceparent

        def effects(view: View, seat: Seat, call: Call) -> Step[Call]:
            return calls.announce_version(view, seat, call, version, self.fresh_uid)

        ahead = calls.version_ranges(self.seat, self._fresh_ref(version))
        self.decide(calls.publish_ranges(self.seat), effects, ahead)

    def decide_and_claim(
        self, effects: Effects, *, sources_max: int = 1, avoided: Collection[str] = ()
    ) -> None:
        """Decide which version, by this rule; then claim a source of it, or several idle ones.

        Args:
            sources_max: How many at most.
            avoided: Sources whose bytes were wrong: others come first.

        Raises: BeginsAgain: The version went away before it was claimed.
        """
        if not self.has_ended:
            self.decide(spec_ranges(self.seat.keys), effects)
        if self.has_ended or self.decided.sources or self.decided.must:
            return  # nothing to claim, a peer has claimed, or it is brought from elsewhere
        claimed = self._claim(sources_max, avoided)
        self._call, self.attached = claimed.call, dict(claimed.attached)
        self.note_decided(claimed.call.ref)  # None: the version went, and the call has ended
        if self._call.outcome is not None:
            self._finish(self._call.outcome)

    def _claim(self, sources_max: int, avoided: Collection[str]) -> Claimed:
        """Claim sources of what was decided, or learn which ones a peer has claimed."""
        seat, call, chosen = self.seat, self.decided, self.read_from.add

        def rule(view: View) -> Step[Claimed | None]:
            step = sources.claim(view, seat, call, avoided, sources_max=sources_max, chosen=chosen)
            if isinstance(step, Done):  # a peer has claimed: this rank attaches from what it saw
                self.seen = view
            return step

        ranges = (*sources.source_ranges(seat, self.ref), self.own_ready)
        claimed = self.settle(ranges, rule, first=self.seen)
        if claimed is None:
            raise BeginsAgain("lost race", "the version went away before it was claimed")
        return claimed

    def finish(self, value: str, sum_up: SumUp, *, is_unproven: bool = False) -> None:
        """This rank is ready, and says `value`. Returns when all are, and the call has ended.

        Returns at once if it has ended already, well, while this rank had no seat.

        Args:
            sum_up: Called on the rank that is ready last with what every rank said. It may take
                time, may fail, and calls `complete`. `self.is_unproven` says by then whether the
                part of any rank is.
            is_unproven: This rank's part was made of bytes that it had before: see `Ready`.

        Raises: TorchRosError: The outcome was an error, the same on all ranks.
        """
        if self.has_ended:
            return
        try:
            self._end_as_all_say(Ready(value, is_unproven), sum_up)
        except Fenced:
            if self.has_ended:
                raise
            # This incarnation may have gone right after the call's good end, which still counts.
            self._finish(self._await_outcome(Deadline(f"{self.asked}", CLEAN_UP_S)))

    def _end_as_all_say(self, answer: Ready, sum_up: SumUp) -> None:
        """Say `answer`; then sum up, if all ranks have said theirs; else learn the outcome."""
        try:
            found = self._be_ready(answer)
            if isinstance(found, Said):
                self.is_unproven = found.is_unproven
                sum_up(found.by_rank)
            else:
                self._finish(found)
        except (SeatLost, StoreUnavailable):
            raise  # no verdict: the next seat makes the call again, or `give_up` ends it
        except TorchRosError as error:
            if self.has_ended:
                raise  # it is the outcome
            self._fail(error)

    def _fail(self, error: TorchRosError) -> None:
        """End the call with this rank's error, unless it has ended well meanwhile. A rank whose
        reply was lost may sum up beside the last one, which may have closed since.
        """
        failure = self._abort(error).failure
        if failure is None:
            log.warning("%s: it has ended well meanwhile: %s", self.asked, error)
        elif failure == self.failure_of(error):
            raise error
        else:
            raise failure.error() from error

    def complete(self, end: Outcome, terms: SourceTerms = SERVED, ahead: Ranges = ()) -> None:
        """End the call, of which this rank knows that all are ready.

        Args:
            end: The layout that the ranks have all of, with their answers; agree: what they said.
            terms: The part of the version that makes the group a source. SERVED: all of it.
            ahead: The ranges that this rank's next call begins with: see `seen`.

        Raises: TorchRosError: The outcome was an error, the same on all ranks.
        """
        seat, call, end = self.seat, self.decided, replace(end, at_ms=wall_ms())
        if self.may_hold is not None:  # noted before: the reply to a good end may be lost
            self.may_hold = replace(self.may_hold, layout=end.said)
        rule = partial(
            calls.complete, seat=seat, call=call, end=end, terms=terms, read_from=self.read_from
        )
        self._finish(self.settle(calls.end_ranges(seat, call), rule, ahead, self.seen))

    def conclude(self, ranges: Ranges, rule: Rule[Outcome]) -> None:
        """As `complete`, by a rule of the call's own."""
        self._finish(self.settle(ranges, rule))

    def _be_ready(self, answer: Ready) -> Outcome | Said:
        """Put this rank's ready record: the answers of all if it is last, else the call's end."""
        seat, call, value = self.seat, self.decided, answer.value
        if call.ref is not None and call.kind != "agree":  # an agree changes nothing that is held
            layout = self._ledger.end_of(value).said  # "": this rank did not say the same before
            self.may_end_well(call, value, layout)
        if seat.world_size == 1:
            return Said({seat.rank: value}, answer.is_unproven)
        count = self._count_ready(answer)
        if isinstance(count, Outcome):
            return count
        self._was_counted = True
        # Peers that did not wait for a publication count, too: they do not come again.
        if count + len(seat.done_by(call)) >= seat.world_size:
            rule = partial(calls.readies, seat=seat, call=call)
            readies = seat.keys.readies(seat.inst, call.number)
            said = self.settle((*seat.own, readies), rule, first=self.seen)
            if said is not None:  # None: one is not ready; `count` was a guess after a lost reply
                return said
        return self._await_outcome(self.deadline, self.seen)

    def _count_ready(self, answer: Ready) -> int | Outcome:
        """How many ranks are ready, with this one; or how the call has ended."""
        seat, call, read_from = self.seat, self.decided, self.read_from
        rule = partial(calls.put_ready, seat=seat, call=call, answer=answer, read_from=read_from)
        return self.settle((*seat.own, self.own_ready), rule, seat.own, self.seen)

    def _await_outcome(self, deadline: Deadline, first: View | None = None) -> Outcome:
        """Wait until the peers are ready, or one of them has given up."""
        seat, call = self.seat, self.decided
        within = dataclasses.replace(deadline, hint=partial(_missing, self))
        rule = partial(calls.await_outcome, seat=seat, call=call, was_counted=self._was_counted)
        ended = settle(self.asked, calls.outcome_ranges(seat, call), rule, first)
        # Not `self.settle`, which raises where the seat is lost: if a peer closed after the call's
        # good end, that end still counts.
        return self.seating.run(ended, within, self.patience, check=self._ledger.check_open)

    def unpublish(
        self, ref: VersionRef, passing: Passing = ALONE, parting: Parting = NO_PARTING
    ) -> None:
        """Returns once nobody reads `ref` from this replica who is to be waited for.

        `rule` answers with the outcome that this rank has written; or with the call, which a peer
        has ended, which is another one, or which first asks each rank for an act (`parting`).
        """
        seat, made, is_told = self.seat, self.own_call, False

        def rule(view: View) -> Step[Call | Outcome]:
            nonlocal is_told
            step = unpublish.unpublish(view, seat, made, ref, wall_ms())
            parting.sees(view)
            is_draining = isinstance(step, WaitAtMost)
            self.left_behind = unpublish.awaited(view, seat, ref) if is_draining else set()
            self.waited_for |= self.left_behind
            if isinstance(step, WaitAtMost) and not is_told:
                is_told = True
                log.info("%s: %s", self.asked, step.wait.reason)
            return step

        ranges = unpublish.unpublish_ranges(seat, ref)
        ahead = _looks_ahead(self, passing, self._ledger.holds)
        first = passing.sight[1] if passing.sight and passing.sight[0] is seat else None
        while True:
            self.seen = None
            found = self.settle(ranges, rule, ahead, first)
            first = None
            if isinstance(found, Outcome):
                if ahead and self.seen is not None and all(map(self.seen.has, ahead)):
                    self._ledger.keep_sight(seat, self.seen)
                self.become(CallEvent.COUNTED)
                self._call = self._call or replace(made, ref=ref)
                self._finish(found)
                return
            self._enter(found)
            if self.has_ended:
                return
            parting.acts(found)

    def give_up(self, error: BaseException) -> None:
        """End the call for the peers too, and leave no record of this rank behind. By now this
        rank's transfers have terminated, and what it shows is void.
        """
        if self._ledger.is_closed:
            return
        self._ends_by = self.failure_of(error)
        if not self.has_ended:
            # Without a seat the ledger notes that it has ended badly, which peers that still make
            # it learn: nobody can have completed it. Not of an unpublish, or a call for which this
            # rank was ready: these may have ended well.
            needs_all = self.kind != "unpublish" and self.life not in WAS_READY
            if needs_all and self._ledger.gave_up(self):
                return
            self._end_or_count(error)
        if self._call is not None:
            clean_up(self.seating, calls.own_records(self.seat, self._call, self.read_from))

    def _end_or_count(self, error: BaseException) -> None:
        """End the call by this rank's error; or use its number up, and learn its end later. Peers
        may have made it, or the store has a decision whose reply was lost.
        """
        try:
            if not isinstance(error, SeatLost):
                self._abort(error)
                return
        except TorchRosError as also:
            log.warning("%s: could not tell the other ranks: %s", self.asked, also)
        self.become(CallEvent.COUNTED)

    def go_on_without(self, version: int, value: str, end: Outcome) -> None:
        """Publish without a seat: this rank holds the version, which is offered when all are back.

        Args:
            value: The sharding of this rank's part.
            end: The layout that the ranks have all of, with their answers, as far as it knows.

        Raises: CallMismatch: The group has made another call under this number: its readers would
            take this rank's bytes for that one's.
        """
        if self._call is not None and self._call.asked != self.asked:
            raise self.mismatch(self._call)
        if self._call is None or self._call.ref is None:  # etcd went before anything was decided
            ref = self._fresh_ref(version)
            self._call = replace(self.own_call, ref=ref, published_ms=self.at_ms)
        self.become(CallEvent.SHOWN)
        self.value, self.may_hold = value, Kept.of(self._call, end.said)
        # Its next seat brings this along. If those of all ranks do, the call ends so, decided by no
        # rank (`by`). If not, `end` makes `_ends_by` its end, before this rank's next call.
        outcome = replace(end, is_source=True, at_ms=wall_ms())
        self.ready = replace(self._call, by=0, outcome=outcome, sources=[])
        self._ends_by = self.abandoned

    def end(self, seat: Seat, session: Session, deadline: Deadline) -> Outcome:
        """How this call, given up or not waited for, has ended; if it had not, by `_ends_by`. Asked
        from the seat that this rank has now, before its next call.
        """
        assert self._ends_by is not None
        self.seat, self.session = seat, session
        return self._end(self._ends_by, deadline)

    def _abort(self, error: BaseException) -> Outcome:
        """End it for all ranks by `error`, unless it has ended; how it has."""
        return self._end(self.failure_of(error), Deadline(f"giving up {self.asked}", CLEAN_UP_S))

    def _end(self, failure: Failure, deadline: Deadline) -> Outcome:
        """End the call for all ranks with `failure`, unless it has ended; the end that it has."""
        made = replace(self.own_call, at_ms=wall_ms())
        rule = partial(calls.abort, seat=self.seat, made=made, failure=failure)
        steps = settle(self.asked, self.seat.own, rule)
        self._call = self.seating.run(steps, deadline, self.patience)
        self.become(CallEvent.COUNTED)
        assert self._call.outcome is not None
        self._learn(self._call.outcome)
        return self._call.outcome

    def _learn(self, outcome: Outcome) -> None:
        """Note that it has ended so, well or not."""
        self._ledger.learn(self._call or self.own_call, outcome, self.seat, self.value)
        self.become(CallEvent.ENDS)
        self.said = outcome.said

    def _finish(self, outcome: Outcome) -> None:
        """Note that it has ended so. Raises: TorchRosError: It has ended badly."""
        self._learn(outcome)
        if outcome.failure is not None:
            raise outcome.failure.error()

    def settle(
        self, ranges: Ranges, rule: Rule[T], ahead: Ranges = (), first: View | None = None
    ) -> T:
        """Perform a step of the call; with it, read `ahead`, which `seen` shows to the next one."""
        steps = settle(self.asked, ranges, rule, first, ahead, self._see)
        return self.seating.run(steps, self.deadline, self.patience)

    def _see(self, view: View) -> None:
        self.seen = view


def _require_known(made: GroupCall, call: Call) -> None:
    """Raises: UsageError: It is open, and was decided by an option that this rank does not have."""
    if call.outcome is not None:
        return
    known = dict(made.seat.knows).get(made.seat.rank, frozenset())
    if unknown := sorted(call.must.keys() - known):
        raise UsageError(
            f"{made.asked}: rank {made.seat.rank} was opened without {unknown[0]}=..., and rank "
            f"{call.by}, which decided, with it; all ranks must be given the same"
        )


def _looks_ahead(call: GroupCall, passing: Passing, kept: Kept | None) -> Ranges:
    """All that the call after this unpublish is decided from, if it is known which one comes."""
    seat = call.seat
    if passing.replicates:
        return calls.first_look(seat, call.number + 1)
    if kept is not None and kept.is_original:  # a trainer publishes next
        ready = one(seat.keys.ready(seat.inst, call.number + 1, seat.rank))
        return (*seat.own, ready, *calls.publish_ranges(seat))
    return ()


def clean_up(seating: Seating, ranges: tuple[Range, ...] = ()) -> None:
    """Delete this rank's own records of calls that failed; what etcd does not take now, later.

    Until then they hold a source up that wants to unpublish; at most until the lease ends.
    """
    ledger = seating.ledger
    ledger.left_over += ranges
    if ledger.left_over and seating.state == "seated":  # else they go with the lease
        deadline = Deadline("cleaning up", CLEAN_UP_S)
        try:
            run(settle("clean up", ledger.left_over, calls.withdraw), seating.kv, deadline)
        except TorchRosError as error:
            log.warning("records of a call that failed stay until the next one: %s", error)
        else:
            ledger.left_over = ()


def _missing(call: GroupCall, _: object) -> str:
    """The peers that `call` waits for, as etcd knows now, in words for people."""
    ranges = (call.seat.keys.readies(call.seat.inst, call.number),)
    try:
        view = call.seating.kv.read(Read(ranges), timeout_s=GLANCE_S)
    except TorchRosError:
        return ""
    return calls.lacking(view, call.seat, call.decided)
