"""Brings versions into an engine: what lands in place, and what goes through its own loader."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, get_args

import torch

import torch_ros
from torch_ros import arguments
from torch_ros.errors import (
    CallAborted,
    InstallRejected,
    ManifestMismatch,
    TorchRosError,
    VersionNotFound,
)
from torch_ros.integrations.drafts import DraftFirst
from torch_ros.integrations.fit import NAMED_MAX, require_fit
from torch_ros.integrations.from_bucket import BucketVersions
from torch_ros.integrations.landing_plan import (
    SAME,
    LandingPlan,
    Obstacle,
    Place,
    chunked,
    has_nan,
    homeless,
    misplaced,
    named_alike,
    no_numbers,
    places,
    plan_landings,
    small_with_nan,
)
from torch_ros.integrations.landings import Recording
from torch_ros.integrations.seams import Alone, Contents, Engine, EngineRanks, Weights
from torch_ros.integrations.together import Together
from torch_ros.integrations.tries import FIRST_S, IN_A_ROW, LONGEST_S, Tries
from torch_ros.printable import log_of, some

log: logging.Logger = log_of(__name__)

Direct = Literal["auto", "proven", "never"]
OnFailure = Literal["reread", "keep", "refuse"]
TOLD_S = 30.0  # for all ranks to say that an engine has no version any more
Versions = torch_ros.ShardHandle | BucketVersions


@dataclass(frozen=True, slots=True)
class InstallOptions:
    """How versions are brought in.

    Attributes:
        buffer_bytes: The size of each of the two host buffers through which staged tensors go; a
            larger tensor has a buffer of its own size.
        direct: "auto": read in place where the engine is known to use its parameters as they were
            loaded; "proven": also where a version that the engine has loaded turns out to lie bit
            for bit as it would land, such as experts on FlashInfer's kernels; "never": load
            everything.
        relay: The engine's parameters are a source for others once a version is whole in place.
        on_failure: Of an install that has begun to write. "reread": bring back the last version,
            from anybody who has it; "keep": from a copy in host memory, made each time before the
            first byte; "refuse": leave the engine without a version.
        cast: Load tensors of another dtype than the engine's, with a warning: its loader casts.
        ignore: Names of tensors that the engine may be without, or patterns such as "vision.*". A
            version with an element of any other that lands nowhere is refused.
    """

    buffer_bytes: int = 256 << 20
    direct: Direct = "auto"
    relay: bool = True
    on_failure: OnFailure = "reread"
    cast: bool = True
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        arguments.whole(1, 1 << 50)("buffer_bytes", self.buffer_bytes)
        arguments.one_of(get_args(Direct))("direct", self.direct)
        arguments.yes_or_no("relay", self.relay)
        arguments.one_of(get_args(OnFailure))("on_failure", self.on_failure)
        arguments.yes_or_no("cast", self.cast)
        arguments.texts("ignore", self.ignore)

    def ignores(self, fqn: str) -> bool:
        return any(fnmatchcase(fqn, pattern) for pattern in self.ignore)


@dataclass(frozen=True, slots=True)
class InstallReport:
    """How a version got into this rank's engine."""

    version: int
    direct: tuple[str, ...]  # read into the engine's own parameters
    direct_bytes: int
    staged: Mapping[str, str]  # loaded by the engine's own loader: the reason for each
    staged_bytes: int
    ignored: Mapping[str, str]  # the engine's loader fails for them, and needs none of them
    stages_s: Mapping[str, float]  # look, read, load, prove

    @property
    def direct_share(self) -> float:
        return self.direct_bytes / max(1, self.direct_bytes + self.staged_bytes)

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for fqn, reason in self.staged.items():
            reasons.setdefault(reason, []).append(fqn)
        megabytes = (self.direct_bytes + self.staged_bytes) / 1e6
        took = ", ".join(f"{stage} {1e3 * s:.0f} ms" for stage, s in self.stages_s.items())
        parts = [
            f"version {self.version}: {len(self.direct)} tensors in place",
            f"{100 * self.direct_share:.2f} % of {megabytes:.1f} MB ({took})",
            *(f"staged, {reason}: {', '.join(fqns)}" for reason, fqns in reasons.items()),
            *([f"ignored: {', '.join(self.ignored)}"] if self.ignored else []),
        ]
        return "; ".join(parts)


@dataclass(slots=True)
class Laps:
    """The time that an install has left, and what it took until now."""

    until_s: float
    stages_s: dict[str, float] = field(default_factory=dict)
    last_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        return max(0.001, self.until_s - time.perf_counter())

    def lap(self, stage: str) -> None:
        now_s = time.perf_counter()
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - self.last_s
        self.last_s = now_s


@dataclass(slots=True)
class _Recorded:
    """Where the tensors of versions like the last one go, and what was found out since."""

    contents: Contents
    recording: Recording
    is_whole: bool = False  # all ranks together have every element
    proven: set[str] = field(default_factory=set)  # parameters whose obstacles are gone
    refuted: dict[str, str] = field(default_factory=dict)  # those whose obstacles stay, and why
    obstacles: Mapping[str, Obstacle] | None = None  # when it was planned last
    plan: LandingPlan = field(init=False)  # for these obstacles


@dataclass(frozen=True, slots=True)
class _Laid:
    """The tensors of a plan as they lie in the engine's parameters, for as long as these stay.

    A handle that gets the very same tensors again looks at their places, and no further.
    """

    plan: LandingPlan
    places: Mapping[str, Place]  # by parameter
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, plan: LandingPlan, state: Mapping[str, torch.Tensor], before: "_Laid | None"
    ) -> "_Laid":
        """The same objects as before, where these lie as they did."""
        names = {box.parameter for landing in plan.direct.values() for box in landing.boxes}
        now, old = places(names, state), before.places if before else {}
        stayed = {name for name, place in now.items() if old.get(name) == place}
        made = chunked(plan.direct, state)
        for fqn, landing in plan.direct.items():
            is_same = before is not None and before.plan.direct.get(fqn) == landing
            if before and is_same and stayed.issuperset(box.parameter for box in landing.boxes):
                made[fqn] = before.tensors[fqn]
        return cls(plan, now, made)

    def are_of(self, plan: LandingPlan, state: Mapping[str, torch.Tensor]) -> bool:
        return self.plan is plan and self.have_stayed(state)

    def have_stayed(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether all of these parameters are where they were."""
        return places(self.places, state) == self.places


@dataclass(frozen=True, slots=True)
class _Extent:
    """How much of it lands in place, on all ranks together."""

    is_direct: bool  # something, somewhere
    is_whole: bool  # everything, everywhere
    is_staged: bool  # a rank loads something
    is_provable: bool  # and has something to prove


class Installer:
    """Brings versions into one engine, by a handle that nothing else uses.

    Args:
        teller: The handle, if it was opened with `installs=True`: who waits for a version is told.
        draft: Of an engine's draft model, which gets each version first: if it does not fit there,
            it is refused before a byte is written to the engine. With other parameters than this.
            One with a handle of another model goes to the latest version of that.
    """

    options: InstallOptions

    def __init__(
        self,
        handle: Versions,
        engine: Engine,
        options: InstallOptions,
        peers: EngineRanks | None = None,
        *,
        teller: "torch_ros.ShardHandle | None" = None,
        draft: "Installer | None" = None,
    ) -> None:
        self.handle, self.options, self._teller = handle, options, teller
        self.active: int | None = None
        """The version that the engine has; None: none, or nobody knows."""
        self.uid = ""
        """Of the content of the last version that the engine has had."""
        self.report: InstallReport | None = None
        """The report of the last install that ended well."""
        self._engine, self._all = engine, Together(handle.rank, peers or Alone(), teller)
        is_part = draft is not None and draft.handle.model == handle.model
        self._draft = DraftFirst(draft, self._all, is_part=is_part)
        self._recorded: _Recorded | None = None
        self._laid: _Laid | None = None
        self._has_written = False  # perhaps, since the last install began
        self._tries = Tries()  # rank 0's decide

    def install(self, version: int | str, timeout_s: float) -> InstallReport:
        """Bring a version into the engine of all ranks. Collective; all raise if one does.

        All that can be refused is refused on all ranks before the first byte is written on any.
        After an error, `active` is what the engine has. Nothing is read if the engine has this
        version, and is a source of it. A content that failed three times in a row is refused with
        its last error for 1 s, and after each further failure for twice as long, up to 60 s.

        Args:
            version: As for `replicate`.
            timeout_s: For all of it, and again for bringing back what was there before.

        Raises:
            ManifestMismatch: The version lacks something that the engine has, or would be cast
                though it must not. Nothing has changed.
            TorchRosError: As `contents`, `read` and `serve`.
        """
        watch = Laps(time.perf_counter() + timeout_s)

        def find() -> torch_ros.Contents | None:  # rank 0: another may know of a newer one
            if self.handle.rank != 0:
                return None
            found = self.handle.contents(version, timeout_s=timeout_s)
            if (refusal := self._tries.refusal(found.uid, time.monotonic())) is not None:
                raise refusal.with_traceback(None)
            return found

        found = self._all.step(find)
        number, uid = self._all.gather((found.version, found.uid) if found else (0, ""))[0]
        is_served = self.active == self.handle.version == number  # and nobody writes to it
        mine = (self.active, is_served and uid == self.uid)
        active, serve = zip(*self._all.gather(mine), strict=True)
        if self.report and all(serve):
            return self.report
        before, kept = self.active if len(set(active)) == 1 else None, dict[str, torch.Tensor]()
        self.active, self._has_written = None, False

        def bring() -> InstallReport:
            look = self._all.step(lambda: self._look(number, watch, found, uid))
            self._require_places(number, look)
            if self.options.on_failure == "keep":
                kept.update(self._all.step(lambda: _copy(self._engine.state())))
            extent = self._extent(look)
            self._draft.go_to(number, watch.left_s)
            return self._write(number, look, extent, watch)

        try:
            report = self._all.told(number, watch.left_s, bring)
        except Exception as error:
            if before is not None:
                self._bring_back(before, kept, timeout_s)
            if not self._draft.is_to_blame:
                self._note(number, uid, error)
            self._draft.go_back()
            raise
        self._draft.stay()
        self.active, self.uid, self.report, self._tries = number, uid, report, Tries()
        return report

    def remember(self) -> Callable[[], None]:
        """Copy what this rank's engine has into host memory; a call of the answer puts it back."""
        kept, had = _copy(self._engine.state()), (self.active, self.uid, self.report)

        def put_back() -> None:
            self._put_back(kept)
            self.active, self.uid, self.report = had

        return put_back

    def settle(self, timeout_s: float) -> bool:
        """Serve the version that the first install has read in place, if it lies there still.

        Collective. For an engine that makes something else of some of its weights once they are
        loaded: it has done so, its `obstacles` are the final ones, and nothing was served before.
        A rank whose engine has other memory by now lets go of that which was read into.

        Returns:
            Whether the engine is a source of the version.
        """
        stayed = self._all.step(self._has_stayed)
        if not stayed:
            self.let_go()
        if not all(self._all.gather(stayed)) or not self.options.relay:
            return False
        try:
            self._all.step(lambda: self._offer(Laps(time.perf_counter() + timeout_s)))
        except (TorchRosError, RuntimeError) as error:  # as when nobody else has it any more
            log.warning("version %s is not offered to others: %s", self.active, error)
        return self.handle.version is not None

    def let_go(self) -> None:
        """Keep no memory of this rank's engine: it is no source of what was read there."""
        self._laid = None
        self.handle.unregister()

    def forget(self) -> None:
        """Look again where the engine's loader puts things, by the names of now."""
        self._recorded = self._laid = None

    def _has_stayed(self) -> bool:
        """Whether all of the version lies in the engine where it was read."""
        look, laid = self._recorded, self._laid
        if self.active is None or look is None or laid is None:
            return False
        self._plan(look)
        return look.plan.is_whole(look.contents) and laid.have_stayed(self._engine.state())

    @property
    def has_lost(self) -> bool:
        """Whether this rank's engine has weights that are no version: perhaps a part of one."""
        return self.active is None and self._has_written

    def withdraw(self, reason: str) -> None:
        """Offer the engine to nobody, and say that it has no version. On all ranks.

        Before somebody else writes to it. Others are told within `TOLD_S`, or a warning says that
        they are not.

        Raises: As `ShardHandle.unpublish`: somebody may still read from the engine.
        """
        self.handle.unpublish()
        before, self.active = self.active, None
        teller = self._teller
        if before is None or teller is None:
            return
        told = CallAborted(teller.replica, 0, teller.rank, reason)
        try:
            with teller.installing(before, timeout_s=TOLD_S):
                raise told
        except TorchRosError as error:
            if error is not told and not isinstance(error, InstallRejected):
                log.warning("others take the engine to have version %d: %s", before, error)

    # Before

    def _look(
        self,
        version: int,
        watch: Laps,
        found: torch_ros.Contents | None = None,
        uid: str | None = None,
    ) -> _Recorded:
        """The plan for this version; refuses what cannot be installed.

        Args:
            found: What it contains, if this rank has asked already.
            uid: The content that another rank has found.
        """
        found = found or self.handle.contents(version, timeout_s=watch.left_s)
        if uid not in (None, found.uid):
            reason = "it was published again meanwhile; ask anew"
            raise VersionNotFound(self.handle.model, str(version), reason)
        contents = found.tensors
        recorded = self._recorded
        if recorded is None or dict(recorded.contents) != dict(contents):
            recorded = _Recorded(contents, self._engine.record(contents))
            name, casts = f"version {version} of model {self.handle.model!r}", self.options.cast
            require_fit(name, recorded.recording, self._engine.state(), casts=casts)
        self._recorded = recorded
        self._plan(recorded)
        watch.lap("look")
        return recorded

    def _plan(self, recorded: _Recorded) -> None:
        """Plan it for the obstacles that there are now."""
        obstacles = self._obstacles(recorded)
        if recorded.obstacles != obstacles:
            recorded.plan = plan_landings(recorded.recording, obstacles)
            recorded.obstacles = obstacles

    def _require_places(self, version: int, recorded: _Recorded) -> None:
        """Refuse a version with elements that land on no rank. All ranks call this, and raise."""
        if all(self._all.gather(recorded.is_whole)):
            return
        options, engine = self.options, self._engine
        mine = {
            fqn: boxes
            for fqn, boxes in recorded.recording.partial.items()
            if not options.ignores(fqn) and not engine.may_lack(fqn)
        }
        lost = homeless(recorded.contents, self._all.gather(mine))
        if lost:
            reasons = recorded.recording.staged
            shapes = {fqn: list(recorded.contents[fqn][1]) for fqn in lost}
            parts = [
                f"{fqn} {shapes[fqn]}: {count} elements {reasons.get(fqn, '')}".strip()
                for fqn, count in lost.items()
            ]
            raise ManifestMismatch(
                f"version {version} of model {self.handle.model!r} in this engine",
                "a place for every element",
                f"none for {some(parts, NAMED_MAX)}",
                "publish a model of this engine's shapes, or name the tensors that it may be "
                "without in ignore=[...]",
            )
        recorded.is_whole = True

    def _obstacles(self, recorded: _Recorded) -> dict[str, Obstacle]:
        if self.options.direct == "never":
            return {name: Obstacle("direct='never'") for name in self._engine.state()}
        found = dict(self._engine.obstacles(recorded.recording))
        for name, one in list(found.items()):
            if one.is_provable and name in recorded.refuted:
                found[name] = Obstacle(recorded.refuted[name])
            elif one.is_provable and name in recorded.proven:
                del found[name]
        return found

    def _extent(self, look: _Recorded) -> _Extent:
        plan = look.plan
        whole = plan.is_whole(look.contents)
        mine = (bool(plan.direct), whole, bool(plan.staged), bool(plan.provable))
        direct, every, staged, provable = zip(*self._all.gather(mine), strict=True)
        return _Extent(any(direct), all(every), any(staged), any(provable))

    # Writing

    def _write(self, version: int, look: _Recorded, extent: _Extent, watch: Laps) -> InstallReport:
        """Read, load, and offer. All ranks call this, and all raise if one fails."""
        self._all.step(lambda: self._read(version, look.plan, extent, watch))
        return self._all.step(lambda: self._load(version, look, extent, watch))

    def _read(self, version: int, plan: LandingPlan, extent: _Extent, watch: Laps) -> None:
        if extent.is_direct:
            self._has_written = True
            targets = self._targets(plan)
            self.handle.read(version, targets, partial=True, timeout_s=watch.left_s)
            if (fqn := small_with_nan(targets)) is not None:
                raise no_numbers(fqn, version, self.handle.model)
        else:
            self.handle.unpublish(timeout_s=watch.left_s)  # the engine's loader writes to it
        watch.lap("read")

    def _load(self, version: int, look: _Recorded, extent: _Extent, watch: Laps) -> InstallReport:
        plan, contents = look.plan, look.contents
        if extent.is_staged:
            with self._stream(version, plan.staged, watch) as weights:
                if plan.staged:
                    self._engine.load(plan.modules, self._vetted(version, weights))
        watch.lap("load")
        if extent.is_provable:
            self._prove(version, look, watch)
            watch.lap("prove")
        if self.options.relay and extent.is_whole:
            self._offer(watch)
        return InstallReport(
            version,
            tuple(plan.direct),
            plan.direct_bytes,
            plan.staged,
            sum(
                prod(shape) * dtype.itemsize
                for dtype, shape in map(contents.__getitem__, plan.staged)
            ),
            plan.ignored,
            watch.stages_s,
        )

    def _offer(self, watch: Laps) -> None:
        try:
            self.handle.serve(timeout_s=watch.left_s)
        except ManifestMismatch as error:  # as of experts that several engines share
            log.info("not offered to others: %s", error)
        watch.lap("serve")

    def _targets(self, plan: LandingPlan) -> Mapping[str, torch.Tensor]:
        """The engine's memory that the plan reads into; the same objects while it stays there."""
        state, laid = self._engine.state(), self._laid
        if laid is None or not laid.are_of(plan, state):
            self._laid = laid = _Laid.of(plan, state, laid)
        return laid.tensors

    def _stream(
        self, version: int, fqns: Iterable[str], watch: Laps
    ) -> AbstractContextManager[Weights]:
        """These tensors, one buffer read while another is used. All ranks call this, or none."""
        size_bytes = self.options.buffer_bytes
        return self.handle.stream(version, fqns, buffer_bytes=size_bytes, timeout_s=watch.left_s)

    def _vetted(self, version: int, weights: Weights) -> Weights:
        """The staged tensors; refuses one with a NaN, which stays in caches of an engine."""
        for fqn, tensor in weights:
            if has_nan(tensor):
                raise no_numbers(fqn, version, self.handle.model)
            self._has_written = True
            yield fqn, tensor

    def _prove(self, version: int, look: _Recorded, watch: Laps) -> None:
        """Find out whether the engine has what it has just loaded where it would land."""
        landings, state = look.plan.provable, self._engine.state()
        with self._stream(version, landings, watch) as published:
            found = misplaced(landings, state, published)
        left = set[str]()
        for fqn, reason in found.items():
            names = named_alike((box.parameter for box in landings[fqn].boxes), state)
            left |= names
            if reason != SAME:
                look.refuted |= dict.fromkeys(names, reason)
        tried = (box.parameter for landing in landings.values() for box in landing.boxes)
        look.proven |= named_alike(tried, state) - left

    # After a failure

    def _note(self, version: int, uid: str, error: Exception) -> None:
        """Count a failure; a warning says once that the next tries come later."""
        before, self._tries = self._tries, self._tries.failed(uid, error, time.monotonic())
        if self.handle.rank == 0 and self._tries is not before and self._tries.is_told():
            log.warning(
                "version %d of model %r has failed %d times in a row, now with %s: %s; the same "
                "is tried again after %g s, and later ever more rarely, up to %g s; publish "
                "another version, which is tried at once",
                version,
                self.handle.model,
                IN_A_ROW,
                type(error).__name__,
                error,
                FIRST_S,
                LONGEST_S,
            )

    def _bring_back(self, version: int, kept: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        """Give the engine the version that it had; after an error it has none, or still that."""
        is_there = self.handle.version == version or not self._has_written
        is_intact = all(self._all.gather(is_there))  # it failed before the first byte
        if self.options.on_failure == "refuse" and not is_intact:
            return
        watch = Laps(time.perf_counter() + timeout_s)

        def bring() -> None:
            if kept and not is_intact:
                self._all.step(lambda: self._put_back(kept))
            elif not is_intact:
                look = self._all.step(lambda: self._look(version, watch))
                extent = self._extent(look)
                self._write(version, look, extent, watch)

        try:
            self._all.told(version, watch.left_s, bring)
        except Exception:
            if is_intact:  # as when another engine has taken its name
                self.active = version
                log.exception("the engine has version %d still, and cannot tell others", version)
                return
            log.exception("the engine has no version: version %d cannot be brought back", version)
        else:
            self.active = version
            log.warning("the engine has version %d again", version)

    def _put_back(self, kept: Mapping[str, torch.Tensor]) -> None:
        self.handle.unpublish()
        state = self._engine.state()
        for name, tensor in kept.items():
            state[name].data.copy_(tensor)


def _copy(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of it in host memory; of tensors in one memory, one."""
    places = {(one.data_ptr(), tuple(one.shape)): name for name, one in state.items()}
    return {name: state[name].detach().to("cpu", copy=True) for name in places.values()}
