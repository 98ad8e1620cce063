"""Staging the change to a newer version beside what is held: docs/protocol/prefetch.md."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch_ros.deadline import Deadline
from torch_ros.errors import CorruptDelta, DeadlineExceeded, SourceLost, UsageError
from torch_ros.features.prefetch.kept import Ahead, Prefetched
from torch_ros.features.prefetch.rules import Original, oldest_original
from torch_ros.printable import log_of
from torch_ros.protocol import sources
from torch_ros.protocol.reaching import RETRY_S, Sources
from torch_ros.protocol.sources import Source
from torch_ros.protocol.versions import Spec, newer_ranges
from torch_ros.shard.beside import Dropped
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import reach
from torch_ros.shard.report import Stopwatch, Via
from torch_ros.shard.seams import Base, Change, Feature, Staged
from torch_ros.store.loops import Step
from torch_ros.store.txn import View
from torch_ros.transfer.feed import Progress
from torch_ros.transfer.reading import Reading

T = TypeVar("T")
log: logging.Logger = log_of(__name__)

TRIES_MAX = 3  # to find a source that stays: a trainer gives its version up for the next one
TURN_S = 0.02  # between looks whether those before have ended, or this one is of no use
CLOSE_S = 5.0  # for reads in flight to end, when the handle closes


class _Visited(Sources):
    """A source that is told nothing, so it does not wait."""

    def attach(self, place: str) -> Source:
        ranges = sources.attach_ranges(self.seat, self.ref, place)

        def rule(view: View) -> Step[Source]:
            offer = sources.offered(view, self.seat, self.ref, place)
            return sources.attach(view, self.seat, offer)

        return self.ask(ranges, rule, self.deadline)

    def has_other(self, source: Source, silent_s: float) -> bool:  # noqa: ARG002
        return True  # a read in full, by the update


class Prefetching(Feature):
    """The prefetches of one handle, one at a time."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self.ahead = shard, Ahead()
        self._reading: Reading | None = None  # connected; for prefetches alone
        shard.observed.staged["prefetched"] = lambda: self.held_bytes
        shard.attach(self)

    @property
    def held_bytes(self) -> int:
        """Any thread may ask."""
        kept, reading = self.ahead.kept, self._reading
        fetched = reading.staging_bytes if reading is not None else 0
        return fetched + (kept.staged.size_bytes if kept is not None else 0)

    def prefetch(self, version: int | str, timeout_s: float | None) -> int | None:
        """Stage what leads there; the number of the version, if it is staged."""
        shard, spec = self._shard, Spec.parse(version)
        if shard.settings.depth != "full":
            raise UsageError(
                f"prefetch: this handle was opened with digests={shard.settings.depth!r}, and "
                "deltas are proven by digests of all bytes; open it with digests='full'"
            )
        shard.require_usable()
        shard.refuse_nested("used")
        deadline = shard.deadline(f"prefetch {version}", timeout_s)
        return self._in_turn(deadline, partial(self._counted, spec, deadline))

    def _in_turn(self, deadline: Deadline, call: Callable[[], T]) -> T:
        """Make `call` when those have ended that came before. Ctrl-C leaves nobody in the line."""
        line, me = self._shard.beside, threading.get_ident()
        try:
            line.append(me)
            while line[0] != me:
                deadline.check("another prefetch is under way")
                time.sleep(TURN_S)
            try:
                return call()
            finally:
                self._put_away()
        finally:
            line.remove(me)

    def _put_away(self) -> None:
        if self._reading is not None:
            self._reading.close_rooms()  # what is staged stays, and is nobody else's
        if self._shard.is_closed and self._reading is not None:
            reading, self._reading = self._reading, None
            reading.close()
            reading.peers.close()

    def _counted(self, spec: Spec, deadline: Deadline) -> int | None:
        self._shard.require_usable()
        tally = self._shard.observed.tally
        try:
            staged = self._prefetch(spec, deadline)
        except BaseException as error:  # Ctrl-C, too
            tally.ended["prefetches"][type(error).__name__] += 1
            raise
        tally.ended["prefetches"]["nothing" if staged is None else "staged"] += 1
        return staged

    def _prefetch(self, spec: Spec, deadline: Deadline) -> int | None:
        shard = self._shard
        turn, base = self.ahead.turn, shard.base()  # the older of both decides
        if base is None:
            return None
        deadline = replace(deadline, check_open=partial(self._check, turn, deadline))
        try:
            return self._found(spec, base, turn, deadline)
        except Dropped:
            shard.require_usable()
            return None

    def _check(self, turn: int, deadline: Deadline) -> None:
        deadline.check_open()
        if self.ahead.turn != turn:
            raise Dropped("prefetch: what it leads from is not held any more")

    def _found(self, spec: Spec, base: Base, turn: int, deadline: Deadline) -> int | None:
        group = self._shard.group
        seat, lost = group.seat, None
        rule = partial(oldest_original, seat=seat, spec=spec, held=base.ref)
        for _ in range(TRIES_MAX):
            if lost is not None:
                self._pause(lost, deadline)
            original = group.ask(newer_ranges(seat.keys, base.ref), rule, deadline)
            if original is None:
                return None
            kept = self.ahead.kept
            if kept is not None and kept.leads(base, original.ref):
                return original.ref.version
            self.ahead.forget()  # no memory for two
            try:
                found = self._staged(original, base, deadline)
            except SourceLost as error:
                log.info("%s: lost %r (%s)", deadline.what, error.replica, error.what)
                lost = error
            else:
                is_kept = found is not None and self.ahead.keep(found, turn)
                return original.ref.version if is_kept else None
        assert lost is not None
        raise lost

    def _pause(self, lost: SourceLost, deadline: Deadline) -> None:
        """Before another look; not longer than anybody has a use for that."""
        until_s = time.monotonic() + RETRY_S
        while time.monotonic() < until_s:
            deadline.check(str(lost))
            time.sleep(TURN_S)

    def _staged(self, original: Original, base: Base, deadline: Deadline) -> Prefetched | None:
        """The changes, if its publisher shows a chain of them that is worth it."""
        shard, ref, target = self._shard, original.ref, base.registered
        if self._reading is None:
            self._reading = shard.reading.beside()
        reading, rank = self._reading, shard.group.seat.rank
        visited = _Visited(shard.group, shard.group.seat, ref, deadline)
        check = partial(deadline.check, "it prefetches")
        feed = reach(reading.peers, visited, visited.attach(original.place), check)
        if any(manifest.depth != "full" for _, manifest in feed.manifests):
            return None
        supply = reading.supply(feed, target.phases[-1].layout, rank)
        change = Change(base, ref, [supply], reading, deadline, hurries=False)
        try:
            staged = self._changed(change)
        except (CorruptDelta, MemoryError) as error:
            log.warning("%s: nothing is staged: %s", deadline.what, error)
            return None
        if staged is None:
            return None
        log.info(
            "staged for version %d of %r, from %r: %s",
            ref.version,
            shard.model,
            feed.source.replica,
            staged.line,
        )
        return Prefetched(base, ref, staged)

    def _changed(self, change: Change) -> Staged | None:
        """The change, by the first feature that can bring it."""
        found = (feature.stage(change) for feature in self._shard.features)
        return next((staged for staged in found if staged is not None), None)

    # The update, or whatever comes instead

    def fill(self, progress: Progress, change: Change | None, watch: Stopwatch) -> Via | None:
        """Apply what was staged, if it leads there. It is gone then, and the base is."""
        ahead = self.ahead.take()
        if change is None or ahead is None or not ahead.leads(change.base, change.ref):
            return None
        via = ahead.staged.apply(progress)
        watch.lap("delta")
        return via._replace(prefetched=True) if via is not None else None

    def gives_up(self) -> None:
        self.ahead.take()

    def closes(self) -> None:
        self.ahead.take()

    def has_closed(self) -> None:
        """Wait for the one that is under way, which has been told to end; disconnect."""
        with suppress(DeadlineExceeded):  # it does so itself, when it ends
            self._in_turn(Deadline("close", CLOSE_S), lambda: None)
