"""One rank's knowledge of its group's calls, which it brings along when it comes back.

One lock guards that knowledge together with the rank's standing: no end of a call is learned while
the seat is lost, since the rank may have told its peers already what it knows. Asks no store, and
starts no thread.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from torch_ros.deadline import Deadline
from torch_ros.errors import ClosedError, CutOff, Fenced, SeatLost
from torch_ros.printable import log_of
from torch_ros.protocol import life
from torch_ros.protocol.keys import OUTSIDE
from torch_ros.protocol.life import CallEvent, CallLife
from torch_ros.protocol.outage import Patience
from torch_ros.protocol.records import (
    Asked,
    Call,
    Carried,
    Failure,
    Kept,
    Kind,
    Outcome,
    ShardRecord,
    VersionRef,
)
from torch_ros.protocol.seat import CALLS_KEPT, Seat
from torch_ros.store.latch import Latch
from torch_ros.store.session import Session
from torch_ros.store.txn import Range, View

log: logging.Logger = log_of(__name__)

Turn = Literal["lost seat", "lost source", "lost race", "wait"]
SeatState = Literal["seated", "away", "gone"]
ANSWERS_KEPT = 8  # a group that saves and loads a few state dicts in turn looks once at each


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a rank has its seat, takes it again by itself, or has lost it for good."""

    state: SeatState = "seated"
    reason: str = ""

    @classmethod
    def of(cls, lost: SeatLost) -> Standing:
        return cls("gone" if isinstance(lost, Fenced) else "away", lost.reason)

    def error(self, replica: str) -> SeatLost:
        return (SeatLost if self.state == "away" else Fenced)(replica, self.reason)


class BeginsAgain(Exception):
    """The call is made again, from where it begins, under its number."""

    def __init__(self, why: Turn, what: str) -> None:
        super().__init__(why, what)
        self.why, self.what = why, what


class Attempt(ABC):
    """One rank's attempt at a call, as its ledger knows it."""

    seat: Seat
    number: int
    asked: Asked
    part: Call  # the call as this rank makes it, marked as a part of the user's call

    def __init__(self, seat: Seat, number: int, kind: Kind, asked: Asked) -> None:
        self.seat, self.number, self.kind, self.asked = seat, number, kind, asked
        self.life = CallLife.NEW
        self.is_begun = False  # from a seat; peers may know of it
        self.ready: Call | None = None
        """A publication that was not waited for, as it would end. None: `life` is not unwaited."""
        self.may_hold: Kept | None = None
        """The version that the group may hold because of this call. None: `life` says of none."""
        self.value: str = ""  # what this rank said, or would have: since it was ready, or unwaited
        self.patience: Patience | None = None  # with an etcd that fails
        self.turns: dict[str, int] = {}  # how often it began again, by reason

    def begins_again(self, why: Turn, what: str) -> None:
        """Note that the call begins again, or the read that it makes."""
        self.turns[why] = self.turns.get(why, 0) + 1
        log.debug("%s (call %d) begins again: %s: %s", self.asked, self.number, why, what)

    def become(self, event: CallEvent) -> None:
        """Go to the state that `event` leads to; forget `may_hold` and `ready` if it has none."""
        self.life = life.after(self.life, event)
        if self.life not in life.MAY_HOLD:
            self.may_hold = None
        if self.life not in life.IS_UNWAITED:
            self.ready = None

    @property
    def has_ended(self) -> bool:
        return self.life is CallLife.ENDED

    def note_decided(self, ref: VersionRef | None) -> None:
        """Note that the call is decided to bring `ref`. If this rank was ready for another version,
        the call has been decided anew, and so the group cannot hold that one because of it.
        """
        if self.may_hold and ref != self.may_hold.ref:
            self.become(CallEvent.CHANGED)

    def may_end_well(self, call: Call, value: str, layout: str) -> None:
        """Note, before this rank says that it is ready, what the group may hold then.

        A peer may end the call well, and this rank may lose its seat before it hears of that.

        Args:
            value: This rank's answer, as in its Ready record.
            layout: The layout that the ranks have every element of; "": this rank does not know.
        """
        self.become(CallEvent.SAID)
        self.may_hold, self.value = Kept.of(call, layout), value

    @property
    def abandoned(self) -> Failure:
        """The failure by which the call ends for peers when this rank does not wait for it."""
        return self.failure_of(CutOff(self.seat.replica, self.number, self.seat.rank))

    def failure_of(self, error: BaseException) -> Failure:
        seat = self.seat
        return Failure.of(error, replica=seat.replica, call=self.number, rank=seat.rank)

    @abstractmethod
    def end(self, seat: Seat, session: Session, deadline: Deadline) -> Outcome:
        """Learn or make the end of a call that was given up while etcd was away."""


class Carrier(Protocol):
    """A feature's say about the replica, as this rank knows it. Asked and told under the lock."""

    @property
    def carried(self) -> Mapping[str, Carried]:
        """By the feature's name; nothing where its option was not given."""

    def learned(self, call: Call, outcome: Outcome) -> None:
        """A call has ended so, well."""


class Ledger:
    """The calls that one rank knows of, and its standing, under one lock."""

    seat: Seat
    standing: Standing

    def __init__(self, seat: Seat) -> None:
        self.seat, self.standing, self.closing = seat, Standing(), Latch()
        # In C: `with` takes it and gives it back whatever a signal handler raises.
        self.lock: threading.RLock = threading.RLock()
        self.seats_lost: int = 0
        self.calls_made: int = 0
        self.pending: int = 0  # the number of the call that is under way; 0: none
        self.ended: deque[Call] = deque(maxlen=CALLS_KEPT)
        self.held: Kept | None = None
        """The version that this replica holds, as far as this rank knows the ends of its calls."""
        self.has_held = False
        """Whether it has held, or shown, a version that a replica published."""
        self.unfinished: Attempt | None = None
        """The last call, if its end could not be learned; it is ended before the next."""
        self.caller: Asked | None = None
        self.first: int = 0
        """The user's call that the next calls are parts of, and the number of its first part; 0: an
        earlier one has gone before."""
        self.block: Asked | None = None
        """The call that ends the block, as of an install, that this rank is in; None: none is."""
        self.carriers: list[Carrier] = []
        self.told: Asked | None = None
        """The last user's call whose failure this rank was told without a part in it."""
        self.skip: Callable[[Callable[[], None]], None] = lambda learn: learn()
        """Called when this rank skips a call: clears the word, calls `learn`, and sets the word
        again if this rank still holds something."""
        self.left_over: tuple[Range, ...] = ()
        """Where this rank may still have records of calls that failed."""
        self.changes = 0  # of what it brings along, while it had no seat: see `brought`
        self._given_up: tuple[Kind, Asked] | None = None
        """The last call, if it was given up and had done nothing."""
        self._ends: dict[str, tuple[Outcome, str]] = {}
        """The last good ends with answers, by those, and what this rank said in each."""
        self._sight: tuple[Seat, View] | None = None  # read before a call, for its decision

    @property
    def is_closed(self) -> bool:
        return self.closing.is_set()

    def check_open(self) -> None:
        """Raises: ClosedError: This seat was given up."""
        if self.is_closed:
            raise ClosedError(f"the handle of replica {self.seat.replica!r} is closed")

    def check(self) -> None:
        """Raises: SeatLost, ClosedError: This seat is lost, or given up."""
        self.check_open()
        if (standing := self.standing).state != "seated":
            raise standing.error(self.seat.replica)

    def lose(self, lost: SeatLost) -> None:
        """The seat is lost. Called under the lock."""
        self.seats_lost += 1
        self.standing, self._given_up = Standing.of(lost), None

    def brought(self, shard: ShardRecord) -> tuple[ShardRecord, int]:
        """The shard record of a rank that comes back, with all that it knows; and its `changes`. If
        these grow before it has its seat, it has told its peers too little.
        """
        with self.lock:
            # A call whose end is known is not under way, though it may not have returned yet.
            under_way = self.pending if self.pending > self.calls_made else 0
            told = msgspec.structs.replace(
                shard,
                is_back=True,
                kept=self.held,
                carries=shard.carries | self.carries,
                ended=list(self.ended),
                pending=self.unfinished.number if self.unfinished else under_way,
                ready=self.unfinished.ready if self.unfinished else None,
                answer=self.unfinished.value if self.unfinished and self.unfinished.ready else "",
            )
            return told, self.changes

    def regain(self, seat: Seat) -> None:
        """The seat is taken again. Called under the lock."""
        self.seat, self.standing = seat, Standing()

    def forget_with_peers(self) -> None:
        """Hold nothing, if a peer took its tensors back in a call that this rank has passed."""
        with self.lock:
            held, number = self.held, self.seat.unpublished_by
            if held is not None and held.call < number <= self.calls_made:
                self.held = None
                log.warning("replica %r holds nothing: a peer took it back", self.seat.replica)

    @property
    def holds(self) -> Kept | None:
        """The version that this replica holds; or may, by a call that this rank was ready for."""
        return self.held or (self.unfinished.may_hold if self.unfinished else None)

    @property
    def not_waited_for(self) -> VersionRef | None:
        """The version shown without etcd: all ranks unpublish it, whatever became of that call."""
        ready = self.unfinished.ready if self.unfinished else None
        return ready.ref if ready else None

    def learn(self, call: Call, outcome: Outcome, seat: Seat, value: str = "") -> None:
        """Note how a call ended, in which this rank said `value`; and what it holds since then.

        Raises: SeatLost: That seat is lost, and peers may have been told that this rank does not
            know the end. What all know together says it, when the seat is taken again.
        """
        with self.lock:
            self.check_still(seat)
            # Here, and not where the call returns: Ctrl-C may come in between.
            self.calls_made = max(self.calls_made, call.number)
            self.ended.append(msgspec.structs.replace(call, outcome=outcome))
            if outcome.failure is not None:
                return
            if outcome.answers:
                self._ends.pop(outcome.answers, None)  # so that it comes last: the first one goes
                self._ends[outcome.answers] = (outcome, value)
                while len(self._ends) > ANSWERS_KEPT:
                    del self._ends[next(iter(self._ends))]
            for carrier in self.carriers:
                carrier.learned(call, outcome)
            if call.kind == "unpublish":
                self.held = None
            elif outcome.is_source and call.ref is not None:
                self.held = Kept.of(call, outcome.said)
                self.has_held = self.has_held or call.ref.run != OUTSIDE

    @property
    def carries(self) -> dict[str, Carried]:
        return {name: one for each in self.carriers for name, one in each.carried.items()}

    def changed(self) -> None:
        """This rank carries something new, by no call. Called under the lock."""
        self.changes += self.standing.state != "seated"

    def check_still(self, seat: Seat) -> None:
        """Raises: SeatLost: That seat is lost: peers may have been told already that this rank does
        not know what it would learn now. Called under the lock.
        """
        self.check_open()
        if self.standing.state == "away":
            raise self.standing.error(seat.replica)
        if self.seat is not seat:
            raise SeatLost(seat.replica, "its seat was lost meanwhile")

    def made(self, call: Attempt | None) -> None:
        """Note that the call under way has returned, its end known or not; None: none was begun."""
        with self.lock:
            if call is not None and call.life not in life.NUMBER_IS_FREE:
                self.calls_made = max(self.calls_made, call.number)
                if not call.has_ended:
                    self.unfinished = call
            self.pending = 0

    def part(self, call: Call) -> Call:
        """`call`, the next one, marked as a part of the user's call that is under way (`caller`).

        `part_of` is left out where `call` asks the same itself. It `continues` the user's call if
        an earlier part has used a number.
        """
        if self.caller is None:
            return call
        part_of = None if self.caller == call.caller else self.caller
        continues = self.calls_made >= self.first
        return msgspec.structs.replace(call, part_of=part_of, continues=continues)

    def skipped(self, number: int) -> None:
        """Note that this rank skips the peers' call of that number: if its user's call was to begin
        there, that begins after it.
        """
        if self.first == number:
            self.first = number + 1

    def is_told(self, error: BaseException, first: int) -> bool:
        """Whether peers know this error: the last call, from `first` on, has ended with it."""
        last = self.ended[-1] if self.ended else None
        if last is None or last.number < first or last.outcome is None:
            return False
        known, seat = last.outcome.failure, self.seat
        own = Failure.of(error, replica=seat.replica, call=last.number, rank=seat.rank)
        return known is not None and (known.kind, known.fields) == (own.kind, own.fields)

    def number_unbegun(self, kind: Kind, asked: Asked) -> int:
        """The number of a call that this rank makes without a seat. The last one's if that was
        given up, and is made again: it is one call on the peers.
        """
        is_again = self._given_up == (kind, asked)
        return self.calls_made + (not is_again)

    def goes_on_without(self, call: Attempt) -> bool:
        """Note that this rank has done its part without etcd: its call may return, unfinished.
        False: it has its seat again, and has to make the call from there.
        """
        with self.lock:
            if self.standing.state == "seated":
                call.become(CallEvent.SEATED)
                return False
            if call.life not in life.IS_UNWAITED:  # a check before it, which shows nothing
                self._note_given_up(call)
                return True
            self._end_unfinished()
            self.unfinished, self.calls_made, self.pending = call, call.number, 0
            self.has_held = True
            self._given_up = None
            self.changes += 1
            return True

    def gave_up(self, call: Attempt) -> bool:
        """Note that a call ended for want of a seat; False: this rank is seated, or fenced."""
        with self.lock:
            if self.standing.state != "away":
                return False
            self._note_given_up(call)
            return True

    def _note_given_up(self, call: Attempt) -> None:
        """Note that it ended badly, and used up one number, as on peers, which may have made it."""
        call.become(CallEvent.CUT_OFF)
        if self._given_up == (call.kind, call.asked) and call.number == self.calls_made:
            return  # the user has tried again: it is one call still
        self._end_without(call)
        self.calls_made = max(self.calls_made, call.number)
        # If peers may know of this call, the next try is another one.
        self._given_up = None if call.is_begun else (call.kind, call.asked)
        self.changes += 1

    def _end_without(self, call: Attempt) -> None:
        """Note that it ended badly, for all that this rank knows; a peer may know better."""
        self.ended.append(msgspec.structs.replace(call.part, outcome=Outcome(call.abandoned)))

    def _end_unfinished(self) -> None:
        """Note that the unfinished call has ended badly: this rank goes on past it, and peers would
        wait in it for ever. Not an unpublish: that counts whatever becomes of it.
        """
        if self.unfinished is not None and self.unfinished.kind != "unpublish":
            self._end_without(self.unfinished)

    def forget(self, counted: VersionRef | None = None) -> bool:
        """Note, without a seat, that the owner takes its tensors back: as if it had unpublished.

        Args:
            counted: The version that peers unpublish in this call, if this rank holds nothing.

        Returns:
            Whether that is all. False: this rank has its seat again, and must tell the store.
        """
        with self.lock:
            if self.standing.state == "seated":
                return False
            ref = self.holds.ref if self.holds else counted
            if ref is None:
                return True
            number = self.unpublish_number
            self._end_unfinished()
            call = Call(number, "unpublish", Asked("unpublish", ref.version), self.seat.rank, ref)
            self.calls_made = number
            self.ended.append(msgspec.structs.replace(call, outcome=Outcome()))
            self.held = self.unfinished = None
            self._given_up = None
            self.changes += 1
            return True

    @property
    def unpublish_number(self) -> int:
        """The number of an unpublish that comes next, or that is unfinished."""
        if self.unfinished is not None and self.unfinished.kind == "unpublish":
            return self.unfinished.number
        return self.calls_made + 1

    def layout_of(self, answers: str) -> str | None:
        """The layout that ranks with these answers have every element of (I9). "": They lack some.
        None: no call has ended with them that this rank knows of.
        """
        end = self._ends.get(answers)
        return end[0].said if end else None

    def end_of(self, value: str) -> Outcome:
        """The end of the last good call that had a layout; an empty one, if this rank did not say
        `value` in that. A call in which all ranks say again what they said in it ends the same.
        """
        wholes = (each for each in reversed(self._ends.values()) if each[0].said)
        end, said = next(wholes, (Outcome(), ""))
        return end if said == value else Outcome()

    def keep_sight(self, seat: Seat, view: View) -> None:
        """Remember what was read before a call, for its decision."""
        self._sight = (seat, view)

    def take_sight(self, seat: Seat) -> View | None:
        """The view that was read from this seat before the call; given once."""
        sight, self._sight = self._sight, None
        return sight[1] if sight is not None and sight[0] is seat else None
