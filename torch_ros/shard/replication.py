"""Reading a version: one rank's part in it, from the choice of sources to the report."""

import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    BackendError,
    CorruptWeights,
    SourceLost,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.printable import log_of
from torch_ros.protocol import calls
from torch_ros.protocol.call import SERVED, GroupCall
from torch_ros.protocol.calls import SourceTerms
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.keys import replica_of
from torch_ros.protocol.reaching import ClaimedSources, Sources, suspect
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.sources import Source
from torch_ros.protocol.versions import Spec
from torch_ros.shard.core import Shard
from torch_ros.shard.publishers import ReadFrom
from torch_ros.shard.report import ReadReport, Stopwatch, Via
from torch_ros.shard.seams import Base, Change, Supplier
from torch_ros.shard.verification import Verification
from torch_ros.transfer.batches import sources_max
from torch_ros.transfer.feed import Feed, FeedSource, Judging, Progress, Supply, connect
from torch_ros.transfer.meter import Meter
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.registered import LocalState, finish_kernels, mark_written
from torch_ros.weights.manifest import Layout

log: logging.Logger = log_of(__name__)

SLOW_BYTES = 64 << 20  # from a source on the same host, and slower than this:
SLOW_BYTES_PER_S = 0.25e9
HEAL_TRIES = 2  # in full; the second one after CorruptWeights
SPANS = {"update": "update", "follow": "update", "read": "read", "load": "load", "fetch": "fetch"}


def reach(
    peers: Peers,
    sources: Sources,
    source: Source,
    check: Callable[[], None],
    judging: Judging | None = None,
) -> Feed:
    """Connect to a source's processes. `check` raises when nothing is to be read any more."""
    is_there, has_other = partial(sources.is_there, source), partial(sources.has_other, source)
    shows = replica_of(source.inst), source.mark, source.is_full
    feed_source = FeedSource(*shows, is_there, has_other, check, judging)
    return connect(peers, [shard.card for shard in source.shards], feed_source, sources.deadline)


class Target:
    """The tensors that a version is read into: those of the handle's `register`.

    Args:
        base: What they had until this call. None after the first source: they are a mixture then.
    """

    def __init__(self, shard: Shard, base: Base | None = None) -> None:
        self._shard, self.base = shard, base
        self.supplier: Supplier | None = None  # of versions that no replica has

    @property
    def bytes_total(self) -> int:
        registered = self._shard.tensors.registered
        return registered.bytes_total if registered else 0

    def prepare(self) -> None:
        """Check that they may be written to. Called whenever the call begins, or begins again."""
        self._shard.ready("replicate").require_writable("replicate")
        self._shard.tensors.require_in_use("replicate")
        for feature in self._shard.features:
            feature.overwrites()

    def register(self, _: Sequence[Layout]) -> LocalState:
        """Register the tensors that a version with these layouts, rank by rank, is read into."""
        return self._shard.tensors.require("replicate")

    def vet(self) -> None:
        """Check the objects when they have landed, before a tensor changes."""

    def came(self, verification: Verification) -> None:
        """All of it is there, and the call has ended well."""


def replicate(shard: Shard, spec: Spec, target: Target, deadline: Deadline) -> VersionRef | None:
    """Read a whole version into the registered tensors.

    None, where `spec` may miss it: there is no such version, or it went before the read began.

    Raises: VersionNotFound: It went when a part of it had been read.
    """
    shard.read_begins(deadline)
    offers = (feature.supplier(spec, deadline) for feature in shard.features)
    target.supplier = supplier = next(filter(None, offers), None)
    version = f"{spec}" if spec.absolute is None else spec.absolute
    floor = spec.floor.version if spec.floor else None
    # Ranks without the supplier would answer that there is none, where the others read it.
    or_in = supplier.called if supplier is not None and spec.may_miss else ""
    asked = Asked("replicate", version, floor=floor, if_there=spec.may_miss, or_in=or_in)
    read = Replication(shard, spec, target, deadline)
    ref = read_and_heal(shard, asked, read)
    if ref is None and read.has_begun:
        reason = "it went while it was read; the tensors' content is undefined, and nothing is held"
        raise VersionNotFound(shard.model, f"{spec}", reason)
    shard.read_ends(ref, deadline)
    return ref


def read_and_heal(shard: Shard, asked: Asked, read: "Replication") -> VersionRef | None:
    """Read a version; once more after CorruptWeights, preferring other sources.

    Where a part was made of what the tensors had, that may have been wrong: the error blames no
    source then, and the same ones are read in full, which does not count as a try. Where a supplier
    has another version for one that cannot be read, go to that, until it has none. All ranks get
    the same error, so all try again.
    """
    with shard.tracing.around(SPANS.get(shard.asked.verb, "replicate")):
        avoided: Collection[str] = ()
        tries_left = HEAL_TRIES - 1
        while True:
            read.begin(avoided)
            try:
                return shard.make(GroupTask("replicate", asked, read.deadline, read.perform))
            except CorruptWeights as error:
                shard.observed.tally.corrupt += 1
                for feature in shard.features:
                    feature.has_read_wrong()
                if error.source and not tries_left:
                    shard.observed.tally.failed(error)
                    raise
                log.warning("%s; reading it again", error)
                if error.source:
                    tries_left, avoided = tries_left - 1, read.sources
                    read.suspect_sources(error)
            except TorchRosError as error:
                known = read.known_failure(error)
                if not read.is_passed_over(known):
                    shard.observed.tally.failed(known)
                    if known is error:
                        raise
                    raise known from error


class Replication:
    """One rank's part in reading a version, over all the sources and seats that it takes.

    `perform` has the steps; a call that begins again repeats it, a lost source repeats `_fetch`,
    and neither reads again the blocks that are there.
    """

    verification: Verification  # of `ref`
    report: ReadReport  # of what was read

    def __init__(
        self,
        shard: Shard,
        spec: Spec,
        target: Target,
        deadline: Deadline,
        terms: SourceTerms = SERVED,
    ) -> None:
        self._shard, self.spec, self._terms = shard, spec, terms
        self._target, self.deadline = target, deadline
        self.has_begun: bool = False  # the target may have a part of a version

    def begin(self, avoided: Collection[str]) -> None:
        """Begin a try, with nothing read yet, that prefers others to the sources `avoided`."""
        self.avoided, self._watch = avoided, Stopwatch()
        self.ref: VersionRef | None = None
        self.progress: Progress | None = None  # of the tensors that are registered for it
        self.source: str = ""  # the replicas that are read from now
        self.sources: list[str] = []  # the instances that were read from
        judges = (feature.judges() for feature in self._shard.features)
        self._judges = next(filter(None, judges), None)
        self._should_be_fast = False  # all of the source is there, on this host
        self._via = Via()  # what has brought all of `progress`
        self._call: GroupCall | None = None

    def suspect_sources(self, error: CorruptWeights) -> None:
        """Let all readers prefer others for a while. Untold, they find the wrong bytes, too."""
        try:
            if self.sources:  # a bucket, say, is no replica
                suspect(self._shard.group, self.sources, str(error))
        except BackendError as lost:
            log.warning("%s may be read from again: %s", self.source, lost)

    def known_failure(self, error: TorchRosError) -> TorchRosError:
        """The error that ended the call for all ranks, if this rank's may be its own supplier's.

        Whether they pass a version over is to be decided by the same error on all ranks.
        """
        call = self._call
        if call is None or not call.is_decided or not call.decided.must:
            return error
        if not isinstance(error, BackendError | UsageError):
            return error
        outcome = call.decided.outcome
        return outcome.failure.error() if outcome and outcome.failure else error

    def is_passed_over(self, error: TorchRosError) -> bool:
        """Whether the call is made once more, for another version: the supplier says."""
        supplier, call = self._target.supplier, self._call
        if supplier is None or call is None or not call.is_decided:
            return False
        return supplier.is_passed_over(call.decided, error)

    def perform(self, call: GroupCall) -> VersionRef | None:
        """Make this rank's part, once more each time the call begins again. None: no version."""
        self._target.prepare()
        self._book_lost_time()
        self.choose(call)
        if call.decided.ref is None:
            return None
        self._shard.tracing.link(call.decided.traceparent)
        if call.has_ended:  # while this rank had no seat; its part was done
            self._shard.word.serve_held()
        else:
            self._read(call)
        self._report(call)
        return call.ref

    def choose(self, call: GroupCall) -> None:
        """Decide which version, and claim sources of it, or let the supplier bring it."""
        self._call, supplier = call, self._target.supplier
        is_relay = self._terms.is_relayed and self._shard.settings.relay
        rule = partial(calls.announce_filling, spec=self.spec, is_relay=is_relay)
        claim = partial(
            call.decide_and_claim,
            sources_max=sources_max(self._target.bytes_total),
            avoided=self.avoided,
        )
        if supplier is None:
            claim(rule)
        else:
            supplier.choose(call, rule, claim)

    def _read(self, call: GroupCall) -> None:
        """Bring what was decided, from sources or the supplier; end the call with the peers."""
        shard = self._shard
        self._watch.lap("decide")
        if self.ref != call.ref:
            shard.word.void()  # it may show a part of another one, from before a seat was lost
            self.start(call.ref)
        what = f"version {call.ref.version} of {shard.model!r}"
        with closing(Meter(shard.settings.displays(what, shard.group.seat.rank))) as meter:
            if call.decided.must:  # what a rank without that supplier could not bring
                self._read_from_elsewhere(call, meter)
            else:
                self._read_from_sources(call, meter)
        self._commit(call)

    def _read_from_elsewhere(self, call: GroupCall, meter: Meter) -> None:
        """Have the supplier bring all of it: it does not go on where another try stopped."""
        supplier = self._target.supplier
        assert supplier is not None  # this rank knows what the call asks for
        self._shard.word.void()
        self.start(call.ref)
        self.source, self._should_be_fast = supplier.where, False
        self.progress = supplier.fill(call, meter)

    def _read_from_sources(self, call: GroupCall, meter: Meter) -> None:
        """Read from the claimed sources, and from others in place of those that are lost."""
        claimed, before = ClaimedSources(call), _count_lost(call)
        if self.progress is not None:  # this decision, made anew, may say otherwise who relays
            (self.progress.hush if claimed.is_leaf else self.progress.speak)()
        try:
            claimed.read(call.decided.sources, partial(self._fetch, claimed, meter))
        finally:
            self._shard.observed.tally.reroutes += _count_lost(call) - before

    def start(self, ref: VersionRef) -> None:
        """Begin with another version than before: nothing of it is here."""
        self.ref, self.progress, self._via, self.has_begun = ref, None, Via(), True
        self.verification = Verification(self._shard, ref, self.deadline)
        self._read_from = ReadFrom(self._shard, ref.version)

    def _book_lost_time(self) -> None:
        """Book the time since the last lap under `read`: it was spent on sources that failed."""
        if self.sources:
            self._watch.lap("read")

    def _fetch(self, claimed: ClaimedSources, meter: Meter, sources: Sequence[Source]) -> None:
        """Read the blocks that are missing, objects first; called again when a source is lost."""
        self._book_lost_time()
        feeds = [self._feed_of(claimed, source) for source in sources]
        self._watch.lap("manifests")
        self._note_sources(sources, feeds)
        has_some = self.progress is not None and self.progress.bytes_read > 0
        self.progress = progress = self.progress or self._register(sources[0], feeds[0])
        if claimed.is_leaf:
            progress.hush()
        phases = progress.target.phases
        try:
            supplies = [[self._plan(feed, phase.layout) for feed in feeds] for phase in phases]
        except SourceLost:
            if not progress.bytes_read:  # forget the names and digests that the lost source told
                self._shard.word.void()
                self.start(claimed.ref)
            raise
        self._watch.lap("plan")
        is_compared = self.verification.compares
        self._read_from.note(sources, has_some=has_some, is_compared=is_compared)
        progress.serve(claimed.call.mark)
        meter.expect(sum(of_phase[0].plan.bytes_read for of_phase in supplies))
        self._fill_otherwise(progress, supplies[-1])
        for of_phase, phase in zip(supplies, phases, strict=True):
            self._shard.reading.read(of_phase, phase, progress, self.deadline, meter.add)
            if phase is phases[0]:  # the objects, if there are any
                self._target.vet()

    def _fill_otherwise(self, progress: Progress, supplies: Sequence[Supply]) -> None:
        """Let features fill the tensors from what they had until now: once in a call."""
        shard, base, change = self._shard, self._target.base, None
        self._target.base = None
        is_there = base is not None and base.registered is progress.target
        if base is not None and is_there and self.verification.proves_all:  # a wrong byte is found
            ref, deadline = self.verification.ref, self.deadline
            change = Change(base, ref, supplies, shard.reading, deadline, hurries=True)
            self._should_be_fast = False
        for feature in shard.features:
            via = feature.fill(progress, change, self._watch)
            if via is not None:
                self._via, change = via, None

    def _feed_of(self, claimed: ClaimedSources, source: Source) -> Feed:
        judge = self._judges.of(claimed, source) if self._judges else None
        check = self._shard.group.ledger.check
        return reach(self._shard.reading.peers, claimed, source, check, judge)

    def _note_sources(self, sources: Sequence[Source], feeds: Sequence[Feed]) -> None:
        """Note whom is read from, for reports, and whether that should be fast."""
        self.source = ", ".join(feed.source.replica for feed in feeds)
        here = socket.gethostname()
        self._should_be_fast = all(
            source.is_full and shard.host == here for source in sources for shard in source.shards
        )
        self.sources += [source.inst for source in sources]

    def _register(self, source: Source, feed: Feed) -> Progress:
        """Register the target's tensors, for what the first source shows; nothing is there yet."""
        with self.verification.as_published(feed):
            registered = self._target.register(feed.layouts)
        finish_kernels(registered.cuda_devices)  # those that still use the old content
        self.verification.expect(feed, source)
        return Progress(self._shard.mailbox, registered)

    def _plan(self, feed: Feed, target: Layout) -> Supply:
        with self.verification.as_published(feed):
            return self._shard.reading.supply(feed, target, self._shard.group.seat.rank)

    def _commit(self, call: GroupCall) -> None:
        """Digest what is there, and end the call with the peers."""
        progress, verification, watch = self.progress, self.verification, self._watch
        assert progress is not None
        registered = progress.target
        mark_written(registered)  # for autograd; features are told that nobody may write now
        self._shard.tensors.offered()
        watch.lap("read")
        if verification.digest(registered):
            watch.lap("digest")

        def sum_up(said: Mapping[int, str]) -> None:
            end = verification.end_of(registered, said, self._terms)
            verification.verify(self.source, is_unproven=call.is_unproven)
            call.complete(end, self._terms)

        call.finish(registered.sharding.digest, sum_up, is_unproven=progress.is_unproven)
        progress.prove()  # what was unproven is told to readers only now
        watch.lap("commit")

    def _report(self, call: GroupCall) -> None:
        """Report a read that has ended well, and warn of one that was slower than copying is."""
        progress, watch = self.progress, self._watch
        assert progress is not None
        self.report = report = ReadReport(
            call.ref.version,
            self.source,
            _count_lost(call),
            progress.target.bytes_total,
            progress.bytes_read,
            watch.elapsed_s,
            watch.stages_s,
            dict(progress.ways),
            call.number,
            watch.began_ms,
            call.ref.uid,
            *self._via,
            call.turns,
        )
        self._shard.reports.add(report)
        self._target.came(self.verification)
        log.info("%s", report.line(self._shard.model))
        speed = report.bytes_read / max(watch.stages_s["read"], 1e-9)
        if self._should_be_fast and report.bytes_read > SLOW_BYTES and speed < SLOW_BYTES_PER_S:
            log.warning(
                "%.2f GB/s from a source on this host is slow: the kernel copies if both have "
                "transport='auto' or 'tcp', UCX_TLS unset or with cma, one user and one pid "
                "namespace, and kernel.yama.ptrace_scope is 0",
                speed / 1e9,
            )


def _count_lost(call: GroupCall) -> int:
    return call.turns.get("lost source", 0)
