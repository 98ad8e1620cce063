"""Fills this process's part of a replica with a version, from whatever sources that takes."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch_ros.errors import (
    BackendError,
    CorruptWeights,
    ManifestMismatch,
    SourceLost,
    TransferFailed,
    UsageError,
)
from torch_ros.exchange import EVERYTHING, Digests, Intake, Offer
from torch_ros.progress import ProgressLine
from torch_ros.reading import BATCH_BYTES, Feed, Patience, Progress, Reading, Supply, connect
from torch_ros.registered import Registered, finish_kernels, mark_written
from torch_ros.store.group import Group, GroupCall
from torch_ros.store.keys import parse_rank, replica_of
from torch_ros.store.loops import Done, Step
from torch_ros.store.readable import keyed
from torch_ros.store.records import Outcome, Shard, Version, VersionRef
from torch_ros.store.rules import Whole
from torch_ros.store.run import Deadline
from torch_ros.store.sources import Source
from torch_ros.store.txn import View, one
from torch_ros.store.versions import Spec
from torch_ros.weights.digest import Depth, first_difference, totals
from torch_ros.weights.manifest import (
    OBJECT,
    ChunkRecord,
    Layout,
    Logical,
    Manifest,
    TensorRecord,
    logical,
    require_all,
)
from torch_ros.weights.pieces import matched

T = TypeVar("T")
log = logging.getLogger(__name__)

SLOW_BYTES = 64 << 20  # from a source on the same host, and slower than this:
SLOW_BYTES_PER_S = 0.25e9
HEAL_TRIES = 2  # a second one, when what was read is not what was published


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What one replicate, update or dcp.load read on this rank."""

    version: int
    source: str  # the replicas read from, separated by commas; of the last ones, if some were lost
    reroutes: int  # how often a source was lost
    bytes_total: int  # of this rank's tensors
    bytes_read: int  # over the wire: more where whole rows were read for a part of them
    elapsed_s: float  # of the whole call
    stages_s: Mapping[str, float]  # decide, manifests, plan, read, commit


@dataclass(slots=True)
class Stopwatch:
    started_s: float = field(default_factory=time.perf_counter)
    stages_s: dict[str, float] = field(default_factory=dict)
    _last_s: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        now_s = time.perf_counter()
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s


class Filling:
    """A version that is being read, over all the sources and seats that this takes.

    Args:
        register: From a source's layouts to what is to be filled.
        bytes_total: About what that is.
        landed: Called when the objects have landed, before a tensor changes, and at the end.
    """

    def __init__(
        self,
        register: Callable[[Sequence[Layout]], Registered],
        bytes_total: int,
        landed: Callable[[], object] = lambda: None,
    ) -> None:
        self.register, self.landed = register, landed
        self.watch = Stopwatch()
        # Each serves at least a batch.
        self.sources_max = max(1, bytes_total // BATCH_BYTES)
        self.ref: VersionRef | None = None
        self.registered: Registered | None = None
        self.progress: Progress | None = None
        self.source = ""
        self.should_be_fast = False  # all of the source is there, on this host
        self.sources: list[str] = []  # instances
        self.expected = Digests()
        self.wanted: Logical | None = None  # all that the version has, if a source has all of it

    def start(self, ref: VersionRef) -> None:
        """Another version than before: nothing of it is here."""
        self.ref, self.registered, self.progress = ref, None, None
        self.expected, self.wanted = Digests(), None

    def resume(self) -> None:
        """What came after the last lap, if anything was read, went into sources that were lost."""
        if self.sources:
            self.watch.lap("read")


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_whole(layouts: Sequence[Layout]) -> bool:
    """Whether these hold every element of every tensor that they name."""
    try:
        everything = logical(layouts)
        tensors = [(f, t) for f, t in sorted(everything.items()) if t.dtype != OBJECT]
        whole = Layout(
            tuple(TensorRecord(fqn, dtype, shape) for fqn, (dtype, shape) in tensors),
            tuple(
                ChunkRecord(number, (0,) * len(shape), shape, _dense(shape), spread=False)
                for number, (_, (_, shape)) in enumerate(tensors)
            ),
        )
        matched(layouts, whole, target_rank=0)
    except UsageError:
        return False
    return True


class Filler:
    """What a rank does in its group's calls, with its own tensors and those of others."""

    def __init__(
        self,
        model: str,
        group: Group,
        offer: Offer,
        intake: Intake,
        reading: Reading,
        *,
        depth: Depth,
        relays: bool,
    ) -> None:
        self._model, self._group, self._offer = model, group, offer
        self._intake, self._reading = intake, reading
        self._depth, self._relays = depth, relays
        self._rank = group.seat.rank
        self.digests = Digests()  # of what is held
        self.last_read: ReadReport | None = None

    def publish(self, call: GroupCall, registered: Registered, deadline: Deadline) -> None:
        """Show the tensors as what was decided on, and say so."""
        self._show(call, registered)
        if not call.has_ended:
            self.finish(call, registered, deadline)

    def publish_without_store(self, call: GroupCall, version: int, registered: Registered) -> None:
        """Show the tensors as what is offered when all ranks are back."""
        call.go_on_without(version, registered.digest)
        self._show(call, registered)

    def _show(self, call: GroupCall, registered: Registered) -> None:
        finish_kernels(registered)
        self.digests = Digests(self._depth, registered.digests(self._depth))
        self._offer.show_digests(self.digests)
        self._offer.serve(call.mark, EVERYTHING)

    def fill(
        self,
        call: GroupCall,
        spec: Spec,
        floor: VersionRef | None,
        filling: Filling,
        whole: Whole,
        deadline: Deadline,
    ) -> int:
        """This rank's part in reading a version, whole or what is still missing of it."""
        filling.resume()
        watch = filling.watch
        is_relay = whole.is_relayed and self._relays
        call.decide_to_read(spec, floor, is_relay=is_relay, sources_max=filling.sources_max)
        if call.has_ended:  # while this rank had no seat; its part was done
            if self._group.held is not None:
                self._offer.serve(call.mark, EVERYTHING)
            self._report(call, filling)
            return call.ref.version
        watch.lap("decide")
        if filling.ref != call.ref:
            self._offer.void()  # it may show a part of another one, from before a seat was lost
            filling.start(call.ref)
        what = f"version {call.ref.version} of {self._model!r}"
        with ProgressLine(what, is_shown=self._rank == 0) as line:
            call.read(partial(self._fetch, call, filling, deadline, line))
        registered, progress = filling.registered, filling.progress
        assert registered is not None
        assert progress is not None
        mark_written(registered)
        watch.lap("read")
        expected = filling.expected
        depth: Depth = expected.depth if self._depth != "off" else "off"
        self.digests = Digests(expected.depth, registered.digests(depth), expected.totals)
        if depth != "off":
            self._offer.show_digests(self.digests)
            watch.lap("digest")
        wanted = filling.wanted if whole.is_required else None
        verify = partial(self._verify, call, filling, deadline)
        outcome = self.finish(call, registered, deadline, whole, verify, wanted)
        watch.lap("commit")
        if not outcome.is_source:
            self._offer.void()
        self._report(call, filling)
        return call.ref.version

    def _fetch(
        self,
        call: GroupCall,
        filling: Filling,
        deadline: Deadline,
        line: ProgressLine,
        sources: Sequence[Source],
    ) -> None:
        filling.resume()
        feeds = [
            connect(
                self._intake,
                [shard.card for shard in source.shards],
                deadline,
                replica=replica_of(source.inst),
                mark=source.mark,
                is_full=source.is_full,
                is_there=partial(call.is_there, source),
                has_other=partial(call.has_other, source),
                check=self._group.check,
            )
            for source in sources
        ]
        filling.watch.lap("manifests")
        filling.source = ", ".join(feed.replica for feed in feeds)
        here = socket.gethostname()
        filling.should_be_fast = all(
            source.is_full and shard.host == here for source in sources for shard in source.shards
        )
        filling.sources += [source.inst for source in sources]
        if filling.registered is None:
            with self._as_published(feeds[0], call.ref, deadline):
                filling.registered = filling.register(feeds[0].layouts)
            filling.progress = Progress(self._offer, filling.registered)
            finish_kernels(filling.registered)  # those that still use the old content
            with self._as_published(feeds[0], call.ref, deadline):
                filling.expected = self._expected(feeds[0], sources[0].inst)
                filling.wanted = logical(feeds[0].layouts) if feeds[0].is_full else None
            self._offer.show_digests(filling.expected)
        registered, progress = filling.registered, filling.progress
        assert progress is not None
        supplies = [
            [self._supply(feed, part.layout, call.ref, deadline) for feed in feeds]
            for part in registered.parts
        ]
        filling.watch.lap("plan")
        progress.serve(call.mark)
        progress.added = line.add
        line.expect(sum(one[0].plan.bytes_read for one in supplies))
        for some, part in zip(supplies, registered.parts, strict=True):
            self._reading.read(some, part, progress, deadline)
            filling.landed()

    @contextmanager
    def _as_published(self, feed: Feed, ref: VersionRef, deadline: Deadline) -> Iterator[None]:
        """Tensors do not fit: this rank's are wrong only if the source shows what was published.

        A relay may be one that reads a part only.
        """
        try:
            yield
        except UsageError as error:
            if self._is_published(feed, ref, deadline):
                raise
            reason = f"it does not show the version: {error}"
            raise SourceLost(feed.replica, reason, 0, 0) from error

    def _is_published(self, feed: Feed, ref: VersionRef, deadline: Deadline) -> bool:
        key = self._group.seat.keys.version(ref.run, ref.version)

        def rule(view: View) -> Step[str]:
            entry = view.get(key)
            return Done("" if entry is None else Version.decode(entry.value, key).layout)

        layout = self._group.ask((one(key),), rule, deadline)
        try:
            return not layout or (
                logical(feed.layouts).digest == layout and _is_whole(feed.layouts)
            )
        except ManifestMismatch:
            return False

    def _supply(self, feed: Feed, target: Layout, ref: VersionRef, deadline: Deadline) -> Supply:
        is_near = self._intake.is_near([agent for agent, _ in feed.manifests])
        with self._as_published(feed, ref, deadline):
            made = self._reading.plan(feed.layouts, target, self._rank, is_near=is_near)
        return Supply(made, feed)

    def _expected(self, feed: Feed, inst: str) -> Digests:
        """What the version's digests are, as far as this source knows."""
        manifests = [manifest for _, manifest in feed.manifests]
        depth = manifests[0].depth if manifests else "off"
        if depth == "off" or self._depth == "off":
            if self._depth != "off":
                log.warning("%s has no digests; what is read from it is not verified", inst)
            # Passed on all the same, for those who verify.
            known = next((m for m in manifests if m.totals), None)
            return Digests(known.depth, (), known.totals) if known else Digests()
        if manifests[0].totals:
            return Digests(depth, (), manifests[0].totals)
        if any(m.depth != depth or len(m.digests) != len(m.layout.chunks) for m in manifests):
            log.warning("not all ranks of %s have digests of one depth; it is not verified", inst)
            return Digests()
        layouts, chunks = [m.layout for m in manifests], [m.digests for m in manifests]
        return Digests(depth, (), totals(layouts, chunks, depth=depth))

    def _verify(self, call: GroupCall, filling: Filling, deadline: Deadline) -> None:
        """By the last rank of a replica that is ready: is what all of them read what it should be?

        Raises: CorruptWeights
        """
        expected = filling.expected
        if self._depth == "off" or expected.depth == "off":
            return
        manifests = self._own_manifests(deadline)
        chunks = [manifest.digests for manifest in manifests]
        if any(len(m.digests) != len(m.layout.chunks) for m in manifests):
            log.warning("not all ranks have digests; version %d is not verified", call.ref.version)
            return
        found = totals([m.layout for m in manifests], chunks, depth=expected.depth)
        if (fqn := first_difference(found, expected.totals)) is not None:
            raise CorruptWeights(self._model, call.ref.version, fqn, filling.source)

    def healing(self, attempt: Callable[[Filling], T], make: Callable[[], Filling]) -> T:
        """What was read and is not what was published is read again, rather from another source.

        All ranks get the same CorruptWeights, so all of them try again.
        """
        for tries_left in reversed(range(HEAL_TRIES)):
            filling = make()
            try:
                return attempt(filling)
            except CorruptWeights as error:
                if not tries_left:
                    raise
                log.warning("%s; reading it again", error)
                try:
                    self._group.suspect(filling.sources, str(error))
                except BackendError as lost:  # which of them is read again is not what matters
                    log.warning("%s may be read from again: %s", filling.source, lost)
        raise AssertionError("the last try returns or raises")

    def _report(self, call: GroupCall, filling: Filling) -> None:
        registered, progress, watch = filling.registered, filling.progress, filling.watch
        assert registered is not None
        assert progress is not None
        bytes_total = registered.bytes_total
        report = ReadReport(
            call.ref.version,
            filling.source,
            call.reroutes,
            bytes_total,
            progress.bytes_read,
            watch.elapsed_s,
            watch.stages_s,
        )
        self.last_read = report
        log.info(
            "version %d of %r from %r: %.1f MB in %.1f ms, %.2f GB/s while reading, "
            "%d re-routed (%s)",
            report.version,
            self._model,
            report.source,
            bytes_total / 1e6,
            1e3 * report.elapsed_s,
            bytes_total / max(watch.stages_s["read"], 1e-9) / 1e9,
            report.reroutes,
            ", ".join(f"{stage} {1e3 * s:.1f} ms" for stage, s in watch.stages_s.items()),
        )
        speed = report.bytes_read / max(watch.stages_s["read"], 1e-9)
        if filling.should_be_fast and report.bytes_read > SLOW_BYTES and speed < SLOW_BYTES_PER_S:
            log.warning(
                "%.2f GB/s from a source on this host is slow: transport='ucx-tcp' and a UCX_TLS "
                "without cma are; cma needs one user for both processes and "
                "kernel.yama.ptrace_scope=0; UCX_LOG_LEVEL=info says what UCX chose",
                speed / 1e9,
            )

    def finish(
        self,
        call: GroupCall,
        registered: Registered,
        deadline: Deadline,
        whole: Whole = Whole(),  # noqa: B008  # a frozen value
        verify: Callable[[], None] = lambda: None,
        wanted: Logical | None = None,
    ) -> Outcome:
        """Ready; returns when, together with the peers, done. `wanted` is what they must hold."""

        def summarise(said: Mapping[int, str]) -> str:
            verify()
            layouts = [registered.layout]
            if len(set(said.values())) > 1:
                # Ranks with different tensors (pipeline stages): together they hold the union.
                layouts = self.layouts(self._group.seat.inst, deadline)
            held = logical(layouts)
            if wanted is not None:
                require_all(call.ref.version, wanted, held)
            return held.digest

        return call.finish(registered.digest, summarise, whole)

    def _manifests(
        self, shards: Sequence[Shard], source: str, deadline: Deadline
    ) -> list[tuple[str, Manifest]]:
        shown = []
        own = source == self._group.seat.replica
        for rank, shard in enumerate(shards):
            mute = Patience(source, deadline, lambda: True, None if own else lambda: True)
            still = partial(mute.look, f"rank {rank} does not answer")
            try:
                shown.append(self._intake.manifest(shard.card, deadline, still))
            except TransferFailed as error:
                self._intake.forget(error.agent)
                raise SourceLost(source, f"rank {rank}: {error.reason}", 0, 0) from error
        return shown

    def layouts(self, inst: str, deadline: Deadline) -> list[Layout]:
        """What the ranks of a replica show now, which may be this one."""
        if inst != self._group.seat.inst:
            shards = self._shards(inst, deadline)
            shown = self._manifests(shards, replica_of(inst), deadline)
            return [manifest.layout for _, manifest in shown]
        return [manifest.layout for manifest in self._own_manifests(deadline)]

    def _own_manifests(self, deadline: Deadline) -> list[Manifest]:
        """What the ranks of this replica show now.

        Raises:
            SourceLost: This one took its tensors back while the store could not be told.
        """
        shards = self._shards(self._group.seat.inst, deadline)
        peers = [shard for rank, shard in enumerate(shards) if rank != self._rank]
        manifests = [m for _, m in self._manifests(peers, self._group.seat.replica, deadline)]
        own = self._offer.manifest
        if own is None:
            reason = f"rank {self._rank} has taken its tensors back"
            raise SourceLost(self._group.seat.replica, reason, 0, 0)
        manifests.insert(self._rank, own)
        return manifests

    def _shards(self, inst: str, deadline: Deadline) -> list[Shard]:
        within = self._group.seat.keys.shards(inst)

        def rule(view: View) -> Step[list[Shard]]:
            found = keyed(view.within(within), parse_rank)
            try:
                return Done([Shard.decode(entry.value, key) for key, _, entry in found])
            except BackendError as error:
                raise SourceLost(replica_of(inst), str(error), 0, 0) from error

        return self._group.ask((within,), rule, deadline)
