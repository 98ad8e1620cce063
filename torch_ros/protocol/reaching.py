"""Reach the sources of a version, one after the other, until all that is missing has come."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec

from torch_ros.deadline import Deadline
from torch_ros.errors import DeadlineExceeded, SourceLost, StoreUnavailable, TorchRosError
from torch_ros.printable import log_of
from torch_ros.protocol import calls, lost_source, sources
from torch_ros.protocol.call import CLEAN_UP_S, GroupCall
from torch_ros.protocol.keys import inst_at, replica_of
from torch_ros.protocol.keys import place as place_at
from torch_ros.protocol.records import Call, Suspect, VersionRef
from torch_ros.protocol.seat import Seat, version_read
from torch_ros.protocol.seating import Seating
from torch_ros.protocol.sources import Candidate, Source
from torch_ros.store.loops import Done, Step, settle
from torch_ros.store.txn import Delete, Put, Ranges, T, Txn, Unseen, View, one

log: logging.Logger = log_of(__name__)

SUSPECT_TTL_S = 10  # a source that failed once is not the first choice for that long
GLANCE_S = 2.0  # for a question whose answer nobody depends on
RETRY_S = 0.5  # between tries to read from a source that failed before


class Sources:
    """The sources that one rank reads a version from: one at a time, or several that take turns.

    Here a source that is lost is replaced by no other. A subclass says how one is attached to and
    left, and where there are others ("Of each kind", below).
    """

    def __init__(self, seating: Seating, seat: Seat, ref: VersionRef, deadline: Deadline) -> None:
        self.seating, self.seat, self.ref, self.deadline = seating, seat, ref, deadline
        self.tried = Counter[str]()  # how often each was lost
        self.attached: dict[str, Source] = {}  # by place

    def read(self, places: Sequence[str], fetch: Callable[[Sequence[Source]], object]) -> None:
        """`fetch` from the sources at `places`; from those left, or another, if one is lost.

        Args:
            fetch: Reads what is still missing. When it raises, nothing is in flight any more.

        Raises: SourceLost: The last source; no other is left.
        """
        while True:
            try:
                for place in places:
                    if place not in self.attached:
                        self.attached[place] = self.attach(place)
                fetch([self.attached[place] for place in places])
            except SourceLost as lost:
                gone = next((p for p in places if replica_of(inst_at(p)) == lost.replica), "")
                if not gone:
                    raise  # none of these: a peer has lost its last one, and ended the call
                self.attached.pop(gone, None)
                self.detach(gone, lost)
                places = self.go_on([place for place in places if place != gone], gone, lost)
                log.warning(
                    "%s: lost %r (%s); going on from %s with what there is",
                    self.deadline.what,
                    lost.replica,
                    lost.what,
                    ", ".join(repr(replica_of(inst_at(place))) for place in places),
                )
            else:
                return

    def is_there(self, source: Source) -> bool:
        """Whether a source that makes no progress still holds what it shows, and may make some."""
        ranges = (*self.seat.own, *lost_source.there_ranges(self.seat, self.ref, source))

        def rule(view: View) -> Done[bool]:
            return Done(lost_source.still_offers(view, self.seat, self.wanted(view), source))

        return self.glance(ranges, rule, unknown=True)

    def has_other(self, source: Source, silent_s: float) -> bool:
        """Whether there is a better source than one that has not answered for so long."""

        def rule(view: View) -> Step[bool]:
            others = self.candidates(view)
            is_left = lost_source.is_to_be_left(
                view, self.seat, source, self.tried, silent_s, others
            )
            if not (is_left or sources.shows_whole(view, self.seat, self.ref)):
                raise Unseen  # a sample hides far ones, and full ones older than many that fill
            return Done(is_left)

        return self.glance(self.ranges, rule, unknown=False)

    def another(self, lost: TorchRosError) -> str:
        """The place to go on from, once the last source is lost; raises `lost` if there is none."""

        def rule(view: View) -> Done[str]:
            eligible = lost_source.eligible_again(
                view, self.seat, self.ref, self.candidates(view), self.tried
            )
            if not eligible:
                return Done("")
            inst = self.best(eligible, sources.suspects(view, self.seat.keys))
            return Done(place_at(eligible[inst].holding.datacenter, inst))

        place = self.ask(self.ranges, rule, self.deadline)
        if not place:
            raise lost
        if self.tried[inst_at(place)]:  # it failed before: not again at once
            self.deadline.check(str(lost))
            time.sleep(RETRY_S)
        return place

    def go_on(self, left: list[str], gone: str, lost: SourceLost) -> list[str]:
        """The places to read from, once `gone` is lost: those `left`, or else one other, if any."""
        self.tried[inst_at(gone)] += 1
        return left or [self.another(lost)]

    def glance(self, ranges: Ranges, rule: Callable[[View], Step[T]], *, unknown: T) -> T:
        """The rule's answer by a brief look at etcd; `unknown` if etcd is slow or away.

        An error of the rule is its answer, too, and is raised here: a peer may have ended the call
        with a DeadlineExceeded, which is not that of the look.
        """
        asks = partial(self.ask, ranges, partial(_answer, rule))
        found = glance(asks, self.deadline, unknown=cast("T | TorchRosError", unknown))
        if isinstance(found, TorchRosError):
            raise found
        return found

    def suspect(self, insts: Iterable[str], reason: str, ops: tuple[Delete, ...] = ()) -> None:
        """As the function `suspect`, within the deadline; past that it gets 0.5 s still."""
        timeout_s = min(CLEAN_UP_S, max(0.5, self.deadline.left_s()))
        suspect(self.seating, insts, reason, ops, timeout_s=timeout_s)

    # Of each kind

    @property
    def ranges(self) -> Ranges:
        """The keys by which another source is chosen."""
        return sources.source_ranges(self.seat, self.ref)

    def ask(self, ranges: Ranges, rule: Callable[[View], Step[T]], deadline: Deadline) -> T:
        """The store's answer."""
        return self.seating.ask(ranges, rule, deadline)

    def wanted(self, view: View) -> VersionRef:  # noqa: ARG002
        """The version that is read, unless a peer has ended the call: its error is raised."""
        return self.ref

    def candidates(self, view: View) -> Mapping[str, Candidate]:  # noqa: ARG002
        """Those that could be read from."""
        return {}

    def best(self, candidates: Mapping[str, Candidate], suspected: set[str]) -> str:
        """The one to read from, of those that are near and were lost least."""
        return sources.best_of(candidates, suspected)

    def attach(self, place: str) -> Source:
        """The source at `place`, once a record makes it wait for this rank."""
        raise NotImplementedError

    def detach(self, place: str, lost: SourceLost) -> None:
        """Delete the record by which the source at `place` waits for this rank."""


class Left(SourceLost):
    """Raised to leave a source that is not lost, but slow, for the better one at `place`."""

    is_orderly = True
    place = ""


class ClaimedSources(Sources):
    """The sources that a group claimed in `call`, as one of its ranks reads from them."""

    def __init__(self, call: GroupCall) -> None:
        super().__init__(call.seating, call.seat, call.ref, call.deadline)
        self.call = call
        # The call as this rank acts by it: as it was decided, or as a feature has changed it since.
        self.known: Call = call.decided
        self.is_displaced = False  # its source stands in for one that went away in order
        self._come = (0, 0)  # the bytes that have come, of how many, when a source was lost

    @property
    def is_leaf(self) -> bool:
        """Whether the group passes nothing on, by the call as this rank knows it: see `Leaves`."""
        return self.seat.leaves.is_leaf(self.seat, self.known)

    def attach(self, place: str) -> Source:
        """Put this rank's reader record, and learn the source, unless the claim did both."""
        call, seat = self.call, self.call.seat
        if learn := call.attached.pop(place, None):
            return learn()
        call.read_from.add(inst_at(place))
        ranges = sources.claimed_ranges(seat, call.decided, place)
        rule = partial(sources.attach_claimed, seat=seat, call=call.decided, place=place)
        # It tries the view that showed the claim first, as if that had been asked for `ranges`: if
        # a record that the rule needs is not in it, the rule asks for it.
        first = call.seen and msgspec.structs.replace(call.seen, asked=ranges)
        watched = (*calls.end_ranges(seat, call.decided), call.own_ready)
        return call.settle(ranges, rule, watched, first)

    def detach(self, place: str, lost: SourceLost) -> None:
        """Leave a source that failed; others shall prefer another for a while (I8, load only)."""
        call, inst = self.call, inst_at(place)
        records = sources.reads_of(call.seat, call.ref, inst)
        insts = [] if lost.is_orderly else [inst]
        try:
            self.suspect(insts, lost.what, tuple(Delete(one(key)) for key in records))
        except StoreUnavailable as error:  # it holds the source up until this rank withdraws
            log.info("%s: %s was not told: %s", call.asked, inst, error)

    def go_on(self, left: list[str], gone: str, lost: SourceLost) -> list[str]:
        """As in `Sources`, but to the place that a `Left` names. If no source is left, the error
        says how much had come when the last ones were lost.
        """
        self.is_displaced = lost.is_orderly
        self._come = max(self._come, (lost.bytes_done, lost.bytes_total))
        lost.bytes_done, lost.bytes_total = self._come
        lost.args = (lost.replica, lost.what, *self._come)  # which peers are told
        places = [lost.place] if isinstance(lost, Left) else super().go_on(left, gone, lost)
        self.call.begins_again("lost source", f"{lost.replica}: {lost.what}")
        return places

    def wanted(self, view: View) -> VersionRef:
        return version_read(view, self.seat, self.known)

    def candidates(self, view: View) -> Mapping[str, Candidate]:
        ref, before = self.wanted(view), sources.born_before(view, self.seat, self.known)
        return sources.candidates_of(view, self.seat, ref, before, {*self.tried})

    def best(self, candidates: Mapping[str, Candidate], suspected: set[str]) -> str:
        return sources.best_of(candidates, suspected, is_leaf=self.is_leaf)

    def ask(self, ranges: Ranges, rule: Callable[[View], Step[T]], deadline: Deadline) -> T:
        """The store's answer to a rank that has its seat; without, it must not go on reading."""
        return self.seating.run(settle(deadline.what, ranges, rule), deadline)


def _answer(rule: Callable[[View], Step[T]], view: View) -> Step[T | TorchRosError]:
    """The step of the rule; if it raises an error of ours, that is the answer."""
    try:
        return rule(view)
    except TorchRosError as error:
        return Done(error)


def glance(ask: Callable[[Deadline], T], deadline: Deadline, *, unknown: T) -> T:
    """The answer that `ask` gets from etcd; `unknown` if that takes long: bytes may come first."""
    within_s = min(GLANCE_S, max(0.0, deadline.left_s()))
    try:
        return ask(Deadline(deadline.what, within_s, check_open=deadline.check_open))
    except (DeadlineExceeded, StoreUnavailable):
        return unknown


def suspect(
    seating: Seating,
    insts: Iterable[str],
    reason: str,
    ops: tuple[Delete, ...] = (),
    *,
    timeout_s: float = CLEAN_UP_S,
) -> None:
    """Let this replica and others prefer other sources to `insts` for a while; do `ops`, too."""
    seat, lease_id = seating.seat, 0
    if insts:
        lease_id, _ = seating.kv.grant(SUSPECT_TTL_S, timeout_s=timeout_s)
    puts = (
        Put(seat.keys.suspect(inst, seat.inst), Suspect(reason).encode(), lease_id)
        for inst in sorted(set(insts))
    )
    seating.kv.commit(Txn(ops=(*ops, *puts)), timeout_s=timeout_s)
