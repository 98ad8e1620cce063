"""A bucket below all runs, as one rank falls back to it: docs/protocol/fallback.md."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    BucketError,
    DeadlineExceeded,
    ManifestMismatch,
    SeatLost,
    TorchRosError,
    UnreadableVersion,
)
from torch_ros.features.fallback.rules import (
    NAME,
    Stored,
    Unheld,
    fall_back,
    highest,
    is_filled,
    manifest_of,
    may_fall_back,
)
from torch_ros.printable import log_of
from torch_ros.protocol import calls
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.calls import Effects
from torch_ros.protocol.reaching import glance
from torch_ros.protocol.records import Call, VersionRef
from torch_ros.protocol.seat import Seat, version_read
from torch_ros.protocol.versions import Spec, spec_ranges
from torch_ros.shard.core import Shard
from torch_ros.shard.seams import Feature
from torch_ros.store.latch import Latch
from torch_ros.store.loops import Done, Step, Wait, settle
from torch_ros.store.txn import Ranges, View, whole
from torch_ros.transfer.feed import Progress
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.meter import Meter
from torch_ros.transfer.registered import finish_kernels

if TYPE_CHECKING:
    from torch_ros.features.fallback.stored import FallbackBucket

T = TypeVar("T")
log: logging.Logger = log_of(__name__)

LOOK_S = 1.0  # who waits for a bucket looks this often whether to go on
RUN_S = 10.0  # `open` waits as long for the name of a run, which it can do without


class Fallback(Feature):
    """The bucket that `open` was given, below all runs, for one shard."""

    def __init__(self, shard: Shard, below: FallbackBucket) -> None:
        self._shard, self.below = shard, below

    def supplier(self, spec: Spec, deadline: Deadline) -> FallingBack:
        return FallingBack(self._shard, self.below, spec, deadline)


def bucket_below(url: str, model: str) -> FallbackBucket | None:
    """The bucket below a model's runs; None: no URL is given.

    Raises: UsageError: It is no URL of a store, or the extra `bucket` is not installed.
    """
    if not url:
        return None
    from torch_ros.features.fallback.stored import FallbackBucket  # noqa: PLC0415  # an extra

    return FallbackBucket(url, model)


def asks_for(below: FallbackBucket | None, deadline: Deadline) -> dict[str, Any]:
    """The fields of an applicant for a seat that falls back to that bucket."""
    return {} if below is None else {"find_former_run": partial(newest_run, below, deadline)}


class FallingBack:
    """One rank's way to the bucket in one call of its caller, over all seats and tries.

    One rank alone waits, lists and decides. Its peers wait for what it decides, and read too.
    """

    called: str = "a bucket"

    def __init__(self, shard: Shard, below: FallbackBucket, spec: Spec, deadline: Deadline) -> None:
        self._shard, self._below, self._deadline = shard, below, deadline
        self.where: str = below.url
        ledger = shard.group.ledger
        self._is_open = may_fall_back(spec, ledger, decides=_decides(shard.group.seat))
        self._asked, self._spec = spec, replace(spec, may_miss=False) if self._is_open else spec
        self._avoided = set[str]()  # manifests of versions that could not be read
        self._standing: int | None = None  # the highest number that the own run has
        self._unheld: Unheld | None = None
        self._inst = ""  # whose time it is
        self._found: Stored | None = None
        self._has_none = False  # it was asked, and that is the answer
        self._failure: UnreadableVersion | None = None

    # Deciding

    def choose(
        self, call: GroupCall, rule: Callable[..., Step[Call]], claim: Callable[[Effects], None]
    ) -> None:
        """Decide by `rule` while somebody has a version; when nobody has, for long, by the bucket.

        Raises: BucketError: It does not answer, where "none" might be the answer; or nothing is
            left of what can be read.
        """
        effects = partial(self._effects, rule)
        while True:
            try:
                claim(effects)
            except _IsUnheld:
                self._ask(call)
            else:
                return

    def _effects(
        self, rule: Callable[..., Step[Call]], view: View, seat: Seat, call: Call
    ) -> Step[Call]:
        step = rule(view, seat, call, spec=self._spec)
        if not isinstance(step, Wait) or not _decides(seat) or not self._is_open:
            return step
        unheld = self._unheld_of(seat, call.number)
        if not unheld.has_lasted(view, seat, now_s := time.monotonic()):
            self._found, self._has_none = None, False
            if is_filled(view, seat):
                return step
            if unheld.outlasts_the_dead(now_s):  # they live, and write when it is available
                return rule(view, seat, call, spec=self._asked)
            may_end = lambda: unheld.may_end(time.monotonic())  # noqa: E731
            return Wait(step.reason, step.ranges, step.limit_s, may_end)
        if self._found is not None:
            self._standing = highest(view, seat)
            return fall_back(view, seat, call, self._found)
        if self._has_none:
            return calls.nothing(view, seat, call)
        raise _IsUnheld

    def _unheld_of(self, seat: Seat, number: int) -> Unheld:
        if self._unheld is None or self._inst != seat.inst:
            self._inst = seat.inst
            self._unheld = Unheld(seat, number, self._shard.group.applicant.ttl_s)
        return self._unheld

    def _ask(self, call: GroupCall) -> None:
        """Find a version in the bucket, or that there is none, or that it has to be asked again."""
        shard, below, unheld = self._shard, self._below, self._unheld_of(call.seat, call.number)
        log.info("%s: nobody has a version of %r; asking %s", call.asked, shard.model, below.url)
        layout, avoided = shard.tensors.require("replicate").layout, frozenset(self._avoided)
        choose = partial(below.choose, layout, avoided, is_alone=shard.is_alone)
        try:
            found = _left_alone(choose, partial(self._look_at_store, call, unheld))
        except _IsHeld:
            return
        except BucketError as error:
            if isinstance(error, UnreadableVersion) and self._failure is not None:
                raise self._failure from error  # there were more, and they are corrupt
            if self._asked.may_miss:
                raise
            log.warning("%s: %s; it waits on, and asks again", call.asked, error)
            unheld.begin()
            return
        if found is not None:
            self._found = found
        elif self._failure is not None:
            raise self._failure
        elif self._asked.may_miss:
            self._has_none = True
        else:
            log.info("%s: %s has no version that fits; it waits on", call.asked, below.url)
            unheld.begin()

    def _look_at_store(self, call: GroupCall, unheld: Unheld) -> None:
        """While a bucket is listed: time goes on for as long as the store answers."""
        self._check(call, "the list")
        if unheld.must_ask(time.monotonic()):
            seat = call.seat
            rule = lambda view: Done(unheld.has_lasted(view, seat, time.monotonic()))  # noqa: E731
            _glance(call, whole(spec_ranges(seat.keys)), rule)
            if not unheld.has_begun:
                raise _IsHeld

    def _check(self, call: GroupCall, awaited: str) -> None:
        group = self._shard.group
        group.ledger.check()
        if group.seat is not call.seat:
            raise SeatLost(call.seat.replica, "its seat was lost meanwhile")
        self._deadline.check(f"{awaited} of {self.where}")

    # Reading

    def fill(self, call: GroupCall, meter: Meter) -> Progress:
        """Fill the registered tensors with what was decided, and show them. The word is clear.

        Raises: BucketError, UnreadableVersion, ManifestMismatch: As `BucketVersion.fill`.
        """
        shard = self._shard
        shard.digests = Digests()  # those that are shown are of what was here before
        shard.mailbox.show_digests(shard.digests)
        registered = shard.tensors.require("replicate")
        tensors = registered.phases[-1]  # of tied ones the first, as in each read
        total = sum(memory.nbytes for memory in tensors.memory)
        log.info("%s: reading version %d from %s", call.asked, call.ref.version, self.where)
        if self._standing is not None and self._standing >= call.ref.version:
            log.warning(
                '%s: run %r has had versions up to %d; to publish from %d on, open with run="new"',
                call.asked,
                call.seat.run,
                self._standing,
                call.ref.version,
            )
        manifest = manifest_of(call.decided)
        assert manifest is not None
        fetch = partial(self._below.contents, manifest)
        contents = _left_alone(fetch, partial(self._check, call, "the manifest"))
        finish_kernels(registered.cuda_devices)  # those that still use the old content
        meter.expect(total)
        done_bytes, looked_s = 0, time.monotonic()

        def look(size_bytes: int) -> None:
            nonlocal done_bytes, looked_s
            done_bytes += size_bytes
            meter.add(size_bytes)
            awaited = f"{done_bytes} of {total} bytes are here (all have to be, in one call)"
            self._check(call, awaited)
            if not shard.is_alone and time.monotonic() - looked_s >= shard.group.applicant.ttl_s:
                looked_s = time.monotonic()
                self._require_wanted(call)

        try:
            size_bytes = contents.fill(tensors.layout, tensors.memory, look)
        finally:
            finish_kernels(registered.cuda_devices)  # those that copy what has come
        progress = Progress(shard.mailbox, registered)
        progress.done[:] = True
        progress.bytes_read, progress.ways["bucket"] = size_bytes, size_bytes
        progress.serve(call.mark)
        return progress

    def _require_wanted(self, call: GroupCall) -> None:
        """Raises: TorchRosError: A peer has ended the call meanwhile."""
        seat, decided = call.seat, call.decided

        def rule(view: View) -> Step[VersionRef]:
            return Done(version_read(view, seat, decided))

        _glance(call, seat.own, rule)

    def is_passed_over(self, decided: Call, error: TorchRosError) -> bool:
        """Note that a version of the bucket could not be read. Whether to make the call once more.

        Args:
            decided: The call that failed.
        """
        manifest = manifest_of(decided)
        if manifest is None or not isinstance(error, UnreadableVersion | ManifestMismatch):
            return False
        if isinstance(error, UnreadableVersion):  # else it has none that fits
            self._failure = error
        self._found = None
        self._avoided.add(manifest)
        if self._unheld is not None:
            self._unheld.is_over = True  # nobody but this replica held anything
        log.warning("%s; trying the version before it", error)
        return True


def newest_run(below: FallbackBucket, deadline: Deadline) -> tuple[int, str]:
    """The number and the name of the bucket's newest run; (0, ""): none, or it does not answer."""
    brief = Deadline(deadline.what, min(RUN_S, deadline.left_s()), check_open=deadline.check_open)
    try:
        return _left_alone(below.newest_run, lambda: brief.check(f"the list of {below.url}"))
    except (BucketError, DeadlineExceeded) as error:
        deadline.check(f"the list of {below.url}")
        log.warning("%s; a new run is begun, which is not the bucket's", error)
        return 0, ""


def _decides(seat: Seat) -> bool:
    """Whether this rank does: the first that has a bucket, so that others than rank 0 ask it too.

    Those that have none end the call then, and name the option.
    """
    return seat.knows_first(NAME)


class _IsHeld(Exception):
    """Somebody holds something by now."""


class _IsUnheld(Exception):
    """Nobody has held anything for long, and the bucket was not asked yet."""


def _left_alone(job: Callable[[], T], look: Callable[[], object]) -> T:
    """The answer of `job`, by a thread that is left alone if `look` raises."""
    answers: list[T] = []
    errors: list[BaseException] = []
    is_done = Latch()

    def work() -> None:
        try:
            answers.append(job())
        except BaseException as error:  # noqa: BLE001  # raised by who waits for it
            errors.append(error)
        finally:
            is_done.set()

    threading.Thread(target=work, name="torch_ros asks a bucket", daemon=True).start()
    while not is_done.wait(LOOK_S):
        look()
    if errors:
        raise errors[0]
    return answers[0]


def _glance(call: GroupCall, ranges: Ranges, rule: Callable[[View], Step[object]]) -> None:
    """Ask the store, if it answers soon."""
    steps = partial(settle, call.asked, ranges, rule)
    glance(lambda brief: call.seating.run(steps(), brief), call.deadline, unknown=None)
