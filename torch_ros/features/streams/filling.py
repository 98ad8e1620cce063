"""Fills the buffers of one stream, in a thread of its own: docs/protocol/streams.md.

It knows its consumer by two numbers: how many buffers were asked for, and how many count. Each is
written by one side only, and a bell wakes the other; so no signal, and no consumer that is dropped
anywhere, leaves either of them waiting.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    ClosedError,
    CorruptWeights,
    ManifestMismatch,
    NotSupported,
    SourceLost,
    UsageError,
)
from torch_ros.features.streams.buffers import BUFFERS, Buffers, Lane, Named, Part
from torch_ros.features.streams.leased import LeasedSources, Wanted
from torch_ros.printable import log_of
from torch_ros.protocol.keys import replica_of
from torch_ros.protocol.sources import Source
from torch_ros.shard.beside import Bell, Dropped
from torch_ros.shard.core import Shard
from torch_ros.shard.publishers import ReadFrom
from torch_ros.shard.replication import reach
from torch_ros.shard.tally import tallies
from torch_ros.shard.verification import digests_of
from torch_ros.store.latch import Latch
from torch_ros.transfer.feed import Arrivals, Feed, Supply
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.registered import Phase
from torch_ros.weights.digest import chunk_digests
from torch_ros.weights.manifest import OBJECT, logical

log: logging.Logger = log_of(__name__)

IDLE_S = 5.0  # for which a source waits for a consumer that does not ask for a buffer
LOOK_S = 2.0  # who waits looks this often, whatever he heard
HEAL_TRIES = 2  # of a buffer whose digests differ


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
        self._dropped = Latch()
        # For others to ask: who keeps this does not keep the buffers that are handed out.
        self._check: Callable[[], None] = partial(_check, self._dropped)
        self.error: Exception | None = None  # raised by the consumer once `over`
        self.over: Latch = Latch()
        self._news, self._wishes = Bell(), Bell()
        self._asked_s = time.monotonic()
        self._replica = ""  # the source that was reached last
        self._at: tuple[Source, Supply] | None = None  # attached to, with the plan for all
        self.published: Digests = Digests()  # of the version, from the first source that knows them
        self._read_from = ReadFrom(shard, wanted.ref.version)
        self._memory: list[torch.Tensor] = []  # of the buffers, to be handed out
        self._tally = tallies.begin(shard.observed.tally.whose)
        first = self._deadline("a source")
        self._sources = LeasedSources(self._group, wanted, self._tally, first)
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
        self._dropped.set()
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
        self._sources.fill(self._deadline("a source"), self._reach)
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
            self._replica,
            self.bytes_read / 1e6,
            len(self.parts),
            self._tally.reroutes,
        )

    def _deadline(self, what: str) -> Deadline:
        """The deadline of one step of this thread; the consumer's own time does not count."""
        text = f"{self.wanted.what}: {what}"
        return Deadline(text, self.wanted.timeout_s, check_open=self._check)

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

        def read(source: Source) -> None:
            whole = self._reach(source)
            supply = Supply(self._lane.plan(number, whole.plan), whole.feed)
            began_s = time.perf_counter()
            self._lane.reading.read([supply], phase, arrivals, deadline)
            self.read_s += time.perf_counter() - began_s

        for tries_left in reversed(range(HEAL_TRIES)):
            arrivals = Arrivals(phase.layout.blocks.total)
            self._sources.fill(deadline, read)
            self.bytes_read += arrivals.bytes_read
            if (fqn := self._first_difference(phase)) is None:
                return
            self._tally.corrupt += 1
            version = self.wanted.ref.version
            wrong = CorruptWeights(self._shard.model, version, fqn, self._replica)
            if not tries_left:
                raise wrong
            self._sources.lose([*self._sources.attached], str(wrong))

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

    def _leave(self) -> None:
        """Nothing is read, nor in flight; what its source shows keeps no buffer either."""
        self._at = None
        self._sources.end()

    def _reach(self, source: Source) -> Supply:
        """The feed of what it shows, with the plan for all that is wanted: once an attachment."""
        if self._at is not None and self._at[0] is source:
            return self._at[1]
        self._replica, sources = replica_of(source.inst), self._sources
        lane, reading = self._lane, self._lane.reading
        feed = reach(reading.peers, sources, source, self._check)
        if sources.layout and _digest_of(feed) != sources.layout:
            raise SourceLost(self._replica, "it does not show the version")
        if not self.is_planned:
            lane.divide(self._named(feed), self.wanted.buffer_bytes)
            self.parts = lane.parts
        try:
            supply = reading.supply(feed, lane.target, self._group.seat.rank)
        except UsageError as error:
            raise SourceLost(self._replica, f"it does not show it all: {error}") from error
        if self.published.depth == "off":
            self.published = self._digests_of(feed)
        is_compared = "off" not in {self.published.depth, self._shard.settings.depth}
        self._read_from.note([source], has_some=self.is_planned, is_compared=is_compared)
        self._at = source, supply
        return supply

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


def _check(dropped: Latch) -> None:
    if dropped.is_set():
        raise Dropped


def _digest_of(feed: Feed) -> str:
    try:
        return logical(feed.layouts).digest
    except ManifestMismatch as error:
        raise SourceLost(feed.source.replica, str(error)) from error
