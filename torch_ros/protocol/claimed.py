"""Read from the sources that a group claimed; from others, if those are lost."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn, TypeVar, cast

import msgspec

from torch_ros.deadline import Deadline
from torch_ros.errors import DeadlineExceeded, SourceLost, StoreUnavailable, TorchRosError
from torch_ros.printable import log_of
from torch_ros.protocol import calls, elsewhere, presence, sources
from torch_ros.protocol.call import CLEAN_UP_S, GroupCall
from torch_ros.protocol.keys import inst_at, replica_of
from torch_ros.protocol.records import Call, Suspect
from torch_ros.protocol.seating import Seating
from torch_ros.protocol.sources import Source
from torch_ros.store.loops import Done, Step, settle
from torch_ros.store.txn import Delete, Put, Ranges, Txn, View, one

T = TypeVar("T")
log: logging.Logger = log_of(__name__)

SUSPECT_TTL_S = 10  # a source that failed once is not the first choice for that long
GLANCE_S = 2.0  # for a question whose answer nobody depends on
RETRY_S = 0.5  # between tries to read from a source that failed before


class _Left(SourceLost):
    """A source is left that is not lost, for the one at `place`."""

    place = ""


class ClaimedSources:
    """The sources that a group claimed in `call`, as one of its ranks reads from them."""

    def __init__(self, call: GroupCall) -> None:
        self.call = call
        # The call as this rank acts by it, which may hear late of its own deeds.
        self.known: Call = call.decided
        self.tried = Counter[str]()  # how often each was lost
        self.is_displaced = False  # it has its source in the place of one that went away
        self._come = (0, 0)  # the bytes that have come, of how many, when a source was lost

    def read(self, fetch: Callable[[Sequence[Source]], None]) -> None:
        """`fetch` from the sources that were claimed; from those left, or another, if one is lost.

        Args:
            fetch: Reads what is still missing. When it raises, nothing is in flight any more.

        Raises:
            SourceLost: The last source; no other is left.
        """
        places, attached = list(self.call.decided.sources), dict[str, Source]()
        while True:
            try:
                for place in places:
                    if place not in attached:
                        attached[place] = self._attach(place)
                fetch([attached[place] for place in places])
            except SourceLost as lost:
                left = (place for place in places if _replica_at(place) == lost.replica)
                place = next(left, "")
                if not place:
                    raise  # a peer's, who gave up
                places.remove(place)
                attached.pop(place, None)
                self._detach(inst_at(place), lost)
                self.is_displaced = lost.is_orderly
                self._come = max(self._come, (lost.bytes_done, lost.bytes_total))
                if isinstance(lost, _Left):
                    places = [lost.place]
                else:
                    self.tried[inst_at(place)] += 1
                    places = places or [self._elsewhere(lost)]
                self.call.begins_again("lost source", f"{lost.replica}: {lost.what}")
                log.warning(
                    "%s: lost %r (%s); going on from %s with what there is",
                    self.call.asked,
                    lost.replica,
                    lost.what,
                    ", ".join(repr(_replica_at(place)) for place in places),
                )
            else:
                return

    def _attach(self, place: str) -> Source:
        call, seat = self.call, self.call.seat
        if learn := call.attached.pop(place, None):
            return learn()
        call.read_from.add(inst_at(place))
        ranges = sources.attach_ranges(seat, call.decided, place)
        # From where the claim was found, if that shows enough: the rule asks for all that it needs.
        first = call.seen and msgspec.structs.replace(call.seen, asked=ranges)
        attach = partial(sources.attach, seat=seat, call=call.decided, place=place)
        rule = calls.sure(attach, first)
        mine = one(seat.keys.ready(seat.inst, call.number, seat.rank))
        return call.settle(ranges, rule, (*calls.end_ranges(seat, call.decided), mine), first)

    def _detach(self, inst: str, lost: SourceLost) -> None:
        """Leave a source that failed; others shall prefer another for a while (I8, load only)."""
        call = self.call
        gone = tuple(Delete(one(key)) for key in self.reads(inst))
        timeout_s = min(CLEAN_UP_S, max(0.5, call.deadline.left_s()))
        insts = [] if lost.is_orderly else [inst]
        try:
            suspect(call.seating, insts, lost.what, gone, timeout_s=timeout_s)
        except StoreUnavailable as error:  # it holds the source up until this rank withdraws
            log.info("%s: %s was not told: %s", call.asked, inst, error)

    def reads(self, inst: str) -> tuple[str, str]:
        """The keys of the records by which this rank, and its group, read from that source."""
        keys, me, ref = self.call.seat.keys, self.call.seat, self.call.ref
        mine = keys.reader(ref.run, ref.version, inst, me.inst, me.rank)
        return mine, keys.reader_group(ref.run, ref.version, inst, me.inst)

    def _elsewhere(self, lost: SourceLost) -> str:
        call, tried = self.call, self.tried
        last = SourceLost(lost.replica, lost.what, *self._come)
        last.is_orderly = lost.is_orderly
        rule = partial(
            elsewhere.choose_again, seat=call.seat, call=self.known, tried=tried, lost=last
        )
        again = call.settle(sources.source_ranges(call.seat, call.ref), rule)
        if tried[inst_at(again)]:
            call.deadline.check(str(lost))
            time.sleep(RETRY_S)
        return again

    def is_there(self, source: Source) -> bool:
        call, seat = self.call, self.call.seat
        ranges = (*seat.own, *presence.there_ranges(seat, call.ref, source))
        rule = partial(presence.is_there, seat=seat, call=call.decided, source=source)
        return self.glance(ranges, rule, unknown=True)

    def has_other(self, source: Source, silent_s: float) -> bool:
        """Whether there is another source for what is read from one that does not answer."""
        call = self.call
        rule = partial(
            elsewhere.has_other,
            seat=call.seat,
            call=self.known,
            source=source,
            tried=self.tried,
            silent_s=silent_s,
        )
        return self.glance(sources.source_ranges(call.seat, call.ref), rule, unknown=False)

    def leave(self, source: Source, place: str, why: str) -> NoReturn:
        """Go on from the source at `place` instead, though this one is not lost.

        Raises: SourceLost: For `read`.
        """
        left = _Left(replica_of(source.inst), why, 0, 0).orderly()
        left.place = place
        raise left

    def glance(self, ranges: Ranges, rule: Callable[[View], Step[T]], *, unknown: T) -> T:
        """The store's answer, if it answers soon; see `glance`."""
        seating = self.call.seating
        steps = settle(self.call.asked, ranges, partial(_answer, rule))
        nothing = cast("T | TorchRosError", unknown)
        found = glance(partial(seating.run, steps), self.call.deadline, unknown=nothing)
        if isinstance(found, TorchRosError):
            raise found
        return found


def _answer(rule: Callable[[View], Step[T]], view: View) -> Step[T | TorchRosError]:
    """The step of the rule; its error is an answer, too.

    A peer may have ended the call, with a DeadlineExceeded of its own, which must not be taken for
    that of a look at etcd.
    """
    try:
        return rule(view)
    except TorchRosError as error:
        return Done(error)


def _replica_at(place: str) -> str:
    return replica_of(inst_at(place))


def glance(ask: Callable[[Deadline], T], deadline: Deadline, *, unknown: T) -> T:
    """The store's answer; `unknown` if it does not answer soon: the bytes may come first."""
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
    """Let this replica and others prefer other sources for a while."""
    seat, lease_id = seating.seat, 0
    if insts:
        lease_id, _ = seating.kv.grant(SUSPECT_TTL_S, timeout_s=timeout_s)
    puts = (
        Put(seat.keys.suspect(inst, seat.inst), Suspect(reason).encode(), lease_id)
        for inst in sorted(set(insts))
    )
    seating.kv.commit(Txn(ops=(*ops, *puts)), timeout_s=timeout_s)
