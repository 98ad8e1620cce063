"""Fills the buffers of one stream, in a thread of its own: docs/protocol/streams.md.

It knows its consumer by two numbers: how many buffers were asked for, and how many count. Each is
written by one side only, and a bell wakes the other; so no signal, and no consumer that is dropped
anywhere, leaves either of them waiting.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    ClosedError,
    CorruptWeights,
    ManifestMismatch,
    NotSupported,
    SourceLost,
    StoreUnavailable,
    TorchRosError,
    UsageError,
)
from torch_ros.features.streams import rules
from torch_ros.features.streams.buffers import BUFFERS, Buffers, Lane, Named, Part
from torch_ros.printable import log_of
from torch_ros.protocol.call import CLEAN_UP_S
from torch_ros.protocol.claimed import GLANCE_S, RETRY_S, glance, suspect
from torch_ros.protocol.keys import inst_at, replica_of, stream_of
from torch_ros.protocol.presence import offers, there_ranges
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.sources import Source
from torch_ros.shard.beside import Bell, Dropped
from torch_ros.shard.core import Shard
from torch_ros.shard.publishers import ReadFrom
from torch_ros.shard.tally import tallies
from torch_ros.shard.verification import digests_of
from torch_ros.store.latch import Latch
from torch_ros.store.loops import Step, settle
from torch_ros.store.run import run
from torch_ros.store.session import Session
from torch_ros.store.txn import Ranges, View
from torch_ros.transfer.feed import Arrivals, Feed, FeedSource, Supply, connect
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.registered import Phase
from torch_ros.weights.digest import chunk_digests
from torch_ros.weights.manifest import OBJECT, logical
from torch_ros.weights.plan import ReadPlan

log: logging.Logger = log_of(__name__)

IDLE_S = 5.0  # for which a source waits for a consumer that does not ask for a buffer
LOOK_S = 2.0  # who waits looks this often, whatever he heard
HEAL_TRIES = 2  # of a buffer whose digests differ


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stream, as it was asked for and decided."""

    ref: VersionRef
    fqns: Sequence[str]
    buffer_bytes: int
    timeout_s: float  # for each buffer, while it is filled
    number: int  # of this stream among those of this rank
    only: str = ""  # the replica to read from; "": whichever is best

    @property
    def what(self) -> str:
        return f"stream {self.ref.version}"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A source that this rank has a reader record at, and what it shows."""

    source: Source
    feed: Feed
    plan: ReadPlan


class Filling:
    """Reads what is wanted, ahead of the consumer by one buffer.

    Args:
        begun: Called by its thread: gives it what it reads with.
        ended: Called at its end, with nothing in flight: takes that back.
    """

    _lane: Lane
    _buffers: Buffers

    def __init__(
        self,
        shard: Shard,
        wanted: Wanted,
        begun: Callable[["Filling"], Lane],
        ended: Callable[["Filling", Lane | None], None],
    ) -> None:
        self._shard, self._group = shard, shard.group
        self.wanted: Wanted = wanted
        self._begun, self._ended = begun, ended
        self.asked: int = 0  # buffers, by the consumer
        self.landed: int = 0  # buffers that count
        self.parts: Sequence[Part] = ()  # known once it is planned
        self.is_planned: bool = False
        self.is_dropped: bool = False
        self.error: Exception | None = None  # raised by the consumer once `over`
        self.over: Latch = Latch()
        self._news, self._wishes = Bell(), Bell()
        self._asked_s = time.monotonic()
        self._name = stream_of(self._group.seat.inst, wanted.number)
        self._session: Session | None = None
        self._inst = ""  # the source that was chosen last
        self._tried = Counter[str]()  # how often each was lost, of the buffer under way
        self._at: Attachment | None = None
        self.published: Digests = Digests()  # of the version, from the first source that knows them
        self._read_from = ReadFrom(shard, wanted.ref.version)
        self._memory: list[torch.Tensor] = []  # of the buffers, to be handed out
        self._tally = tallies.begin(shard.observed.tally.whose)
        self.bytes_read: int = 0
        self.read_s: float = 0.0  # in which they came

    # Called by the consumer

    def plan(self) -> None:
        """Wait until a source was found, and has what is wanted."""
        self._await(lambda: self.is_planned)

    def take(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """Give up the buffer before `number`, and wait for this one."""
        self._asked_s = time.monotonic()
        self.asked = max(self.asked, number + 1)
        self._wishes.ring()
        self._await(lambda: self.landed > number)
        return self.parts[number].views(self._memory[number % BUFFERS])

    def forget(self) -> None:
        """Take nothing any more, so that the next stream may have the buffers."""
        self._memory = []

    def drop(self) -> None:
        """End it, soon. May be called by a finalizer, in any thread."""
        self.is_dropped = True
        self._wishes.ring()

    def _await(self, is_there: Callable[[], bool]) -> None:
        while True:
            latch = self._news.latch
            if is_there():
                return
            if self.over.is_set():
                raise self.error or ClosedError(f"{self.wanted.what}: it was closed")
            latch.wait(LOOK_S)

    # Its thread

    def run(self) -> None:
        """Fill all; then, or when it is dropped or fails, leave nothing behind."""
        lane = None
        try:
            lane = self._lane = self._begun(self)
            self._fill_all()
        except Dropped:
            pass
        except Exception as error:  # noqa: BLE001  # the consumer gets it
            self.error = error
        finally:
            try:
                self._leave()
                self._ended(self, lane)
            finally:
                tallies.end(self._tally)
                self.over.set()
                self._news.ring()

    def _fill_all(self) -> None:
        wanted = self.wanted
        self._check()
        self._with_source(self._deadline("a source"), lambda _: None)
        self._buffers = self._lane.buffers(self._shard.transport, self._shard.pages)
        self._memory = self._buffers.lend()
        self.is_planned = True
        self._news.ring()
        for number in range(len(self.parts)):
            self._await_room(number)
            self._fill(number)
            self.landed = number + 1
            self._news.ring()
        log.info(
            "version %d of %r streamed from %r: %.1f MB in %d buffers, %d re-routed",
            wanted.ref.version,
            self._shard.model,
            replica_of(self._inst),
            self.bytes_read / 1e6,
            len(self.parts),
            self._tally.reroutes,
        )

    def _deadline(self, what: str) -> Deadline:
        """The deadline of one step of this thread; the consumer's own time does not count."""
        text = f"{self.wanted.what}: {what}"
        return Deadline(text, self.wanted.timeout_s, check_open=self._check)

    def _check(self) -> None:
        if self.is_dropped:
            raise Dropped

    def _check_with(self, session: Session) -> None:
        self._check()
        if not session.is_valid():
            raise _LeaseEnded

    def _await_room(self, number: int) -> None:
        """Wait until the consumer has done with what lies where buffer `number` comes to lie."""
        while number >= BUFFERS:
            latch = self._wishes.latch
            self._check()
            if self.asked >= number:
                return
            left_s = self._asked_s + IDLE_S - time.monotonic()
            if left_s <= 0:
                self._leave()  # nobody is held up by a consumer that stands still
            latch.wait(left_s if left_s > 0 else LOOK_S)

    def _fill(self, number: int) -> None:
        phase, deadline = self._buffers.phase(number), self._deadline(f"buffer {number}")
        if not phase.memory:
            return

        def read(at: Attachment) -> None:
            supply = Supply(self._lane.plan(number, at.plan), at.feed)
            began_s = time.perf_counter()
            self._lane.reading.read([supply], phase, arrivals, deadline)
            self.read_s += time.perf_counter() - began_s

        for tries_left in reversed(range(HEAL_TRIES)):
            arrivals = Arrivals(phase.layout.blocks.total)
            self._with_source(deadline, read)
            self.bytes_read += arrivals.bytes_read
            if (fqn := self._first_difference(phase)) is None:
                return
            self._tally.corrupt += 1
            source = replica_of(self._inst)
            wrong = CorruptWeights(self._shard.model, self.wanted.ref.version, fqn, source)
            if not tries_left:
                raise wrong
            self._lose(str(wrong), deadline)

    def _first_difference(self, phase: Phase) -> str | None:
        """The fqn of a tensor in a buffer that is not what was published, where that is known."""
        digests = self.published
        if "off" in {digests.depth, self._shard.settings.depth}:
            return None
        found = chunk_digests(phase.layout, phase.memory, depth=digests.depth)
        for chunk, digest in zip(phase.layout.chunks, found, strict=True):
            fqn = phase.layout.tensors[chunk.tensor].fqn
            if digests.totals.get(fqn) != digest:
                return fqn
        return None

    # Its sources

    def _with_source(self, deadline: Deadline, use: Callable[[Attachment], None]) -> None:
        """`use` a source; when that is lost, another. When `use` raises, nothing is in flight."""
        self._tried, lost = Counter[str](), None
        while True:
            at, chosen = self._at, ("", "")
            if at is None or self._session is None or not self._session.is_valid():
                self._leave()
                at, chosen = None, self._choose(lost, deadline)
            try:
                if at is None:
                    self._at = at = self._attach(*chosen, deadline)
                use(at)
            except SourceLost as error:
                lost = error
                self._tried[self._inst] += 1
                log.warning("%s: lost %r (%s)", deadline.what, lost.replica, lost.what)
                self._lose(lost.what, deadline, has_failed=not lost.is_orderly)
            else:
                return

    def _choose(self, lost: SourceLost | None, deadline: Deadline) -> tuple[str, str]:
        seat, ref, tried = self._group.seat, self.wanted.ref, self._tried
        only = self.wanted.only
        rule = partial(rules.choose, seat=seat, ref=ref, tried=tried, lost=lost, only=only)
        place, layout = self._group.ask(rules.choice_ranges(seat, ref), rule, deadline)
        if tried[inst_at(place)]:
            deadline.check(str(lost))
            time.sleep(RETRY_S)
        return place, layout

    def _attach(self, place: str, layout: str, deadline: Deadline) -> Attachment:
        self._inst = inst = inst_at(place)
        source = self._announce(place, deadline)
        there = FeedSource(
            replica_of(inst),
            source.mark,
            is_full=True,
            is_there=partial(self._is_there, source),
            has_other=partial(self._has_other, source),
            check=self._check,
        )
        cards = [shard.card for shard in source.shards]
        lane, reading = self._lane, self._lane.reading
        feed = connect(reading.peers, cards, there, deadline)
        if layout and _digest_of(feed) != layout:
            raise SourceLost(replica_of(inst), "it does not show the version", 0, 0)
        if not self.is_planned:
            lane.divide(self._named(feed), self.wanted.buffer_bytes)
            self.parts = lane.parts
        costs = reading.peers.costs([agent for agent, _ in feed.manifests])
        rank = self._group.seat.rank
        try:
            plan = reading.plan(feed.layouts, lane.target, rank, costs)
        except UsageError as error:
            raise SourceLost(replica_of(inst), f"it does not show it all: {error}", 0, 0) from error
        if self.published.depth == "off":
            self.published = self._digests_of(feed)
        is_compared = "off" not in {self.published.depth, self._shard.settings.depth}
        self._read_from.note([source], has_some=self.is_planned, is_compared=is_compared)
        return Attachment(source, feed, plan)

    def _announce(self, place: str, deadline: Deadline) -> Source:
        """Put the reader record, on a lease that ends with this attachment."""
        group, ref, inst = self._group, self.wanted.ref, inst_at(place)
        while True:
            self._leave()
            session = self._session = self._lease(deadline)
            key = group.seat.keys.reader(ref.run, ref.version, inst, self._name, group.seat.rank)
            rule = partial(
                rules.attach,
                seat=group.seat,
                ref=ref,
                place=place,
                reader=key,
                lease_id=session.lease_id,
            )
            steps = settle(deadline.what, rules.attach_ranges(group.seat, ref, place, key), rule)
            try:
                return run(steps, group.kv, deadline, check=partial(self._check_with, session))
            except _LeaseEnded:
                deadline.check("the lease of its reader record has ended")

    def _lease(self, deadline: Deadline) -> Session:
        group = self._group
        while True:
            try:
                return Session(
                    group.kv,
                    ttl_s=group.applicant.ttl_s,
                    on_lost=lambda _: None,
                    name=replica_of(self._name),
                )
            except StoreUnavailable as error:
                deadline.check(str(error))
                time.sleep(RETRY_S)

    def _leave(self) -> None:
        """Take the reader record back, if there is one: nothing is read, nor in flight."""
        self._at = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def _lose(self, reason: str, deadline: Deadline, *, has_failed: bool = True) -> None:
        """Leave a source; if it has failed, others shall prefer another for a while."""
        self._leave()
        self._tally.reroutes += 1
        if not has_failed:
            return
        timeout_s = min(CLEAN_UP_S, max(0.5, deadline.left_s()))
        with suppress(TorchRosError):  # load, not safety
            suspect(self._group, [self._inst], reason, timeout_s=timeout_s)

    def _named(self, feed: Feed) -> Named:
        contents = logical(feed.layouts)
        for fqn in self.wanted.fqns:
            found = contents.get(fqn)
            if found is None or found.dtype == OBJECT:
                raise ManifestMismatch(
                    f"version {self.wanted.ref.version}",
                    f"a tensor {fqn!r}, to be streamed",
                    "no such name" if found is None else "an object that DCP has pickled",
                    "contents() tells what there is; dcp.load reads objects",
                )
        return [(fqn, contents[fqn]) for fqn in self.wanted.fqns]

    def _digests_of(self, feed: Feed) -> Digests:
        try:
            return digests_of([manifest for _, manifest in feed.manifests])
        except NotSupported:  # overlapping parts: their digests do not add up
            if self._shard.settings.depth != "off":
                raise
            return Digests()

    def _is_there(self, source: Source) -> bool:
        seat, ref = self._group.seat, self.wanted.ref
        rule = partial(offers, seat=seat, ref=ref, source=source)
        return self._glance(there_ranges(seat, ref, source), rule, unknown=True)

    def _has_other(self, source: Source, silent_s: float) -> bool:
        if self.wanted.only:
            return False
        seat, ref = self._group.seat, self.wanted.ref
        rule = partial(
            rules.has_other,
            seat=seat,
            ref=ref,
            source=source,
            tried=self._tried,
            silent_s=silent_s,
        )
        return self._glance(rules.choice_ranges(seat, ref), rule, unknown=False)

    def _glance(self, ranges: Ranges, rule: Callable[[View], Step[bool]], *, unknown: bool) -> bool:
        deadline = Deadline(self.wanted.what, GLANCE_S, check_open=self._check)
        return glance(partial(self._group.ask, ranges, rule), deadline, unknown=unknown)


class _LeaseEnded(Exception):
    pass


def _digest_of(feed: Feed) -> str:
    try:
        return logical(feed.layouts).digest
    except ManifestMismatch as error:
        raise SourceLost(feed.source.replica, str(error), 0, 0) from error
