"""Saves and loads, as torch_ros.dcp and `publish_copy` make them: each of several group calls."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Protocol, TypeVar

from torch_ros.deadline import Deadline
from torch_ros.errors import ContractBroken, CutOff, ManifestMismatch, UsageError
from torch_ros.printable import log_of
from torch_ros.protocol import calls
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.calls import Effects
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import Asked, Outcome
from torch_ros.protocol.seat import recorded
from torch_ros.protocol.versions import Spec, check_version, resolve, shows_all, spec_ranges
from torch_ros.shard.beginnings import Beginning
from torch_ros.shard.collective import collectively
from torch_ros.shard.core import Shard
from torch_ros.shard.finding import PinnedVersion, find
from torch_ros.shard.publishing import Content, publish
from torch_ros.shard.replication import Replication, Target, read_and_heal
from torch_ros.shard.report import ReadReport
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Unseen, View
from torch_ros.transfer.attending import Attendant, Copier
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.left_out import left_out
from torch_ros.weights.local import copy_bits, require_memory
from torch_ros.weights.manifest import Layout, logical

T = TypeVar("T")
TOLD_MAX = 3  # names in a warning

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The tensors that a load will fill, and whether they make a whole version."""

    state: LocalState
    answer: str  # "held": it has the version; "whole" or "a part": to read; "": the ranks differ


class Destination(Protocol):
    """The tensors and objects that are loaded into, such as a state dict."""

    def fill(self, layouts: Sequence[Layout]) -> LocalState:
        """The tensors and objects to read from a source with these layouts, rank by rank."""

    def vet(self) -> None:
        """Raise to refuse the objects. Called when they have landed."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A save.

    Args:
        state: The tensors and objects to publish; or the error that collecting them raised, which
            the save raises on all ranks.
        from_stager: The tensors are a copy that DCP's stager made for this save.
        copier: Publish a copy that it makes instead of them.
        begun: The answer of `begin`, where that was called.
    """

    version: int
    state: LocalState | BaseException
    from_stager: bool = False
    copier: Copier | None = None
    timeout_s: float | None = None
    store_wait_s: float | None = None
    begun: Beginning | None = None

    @property
    def asked(self) -> Asked:
        return Asked.of("save", self.version)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A load.

    Args:
        pinned: The answer of `inspect`. None: each rank asks that itself, within the call.
        is_served: Whether to become a source, if the version is read whole.
        target: The answer of `check`, if it was called on all ranks and passed on all, with what
            all ranks answered (`unanimous`). None: the ranks ask each other.
        begun: The answer of `begin`, where that was called.
        is_partial: A part of the version is read by intention.
    """

    version: int | str
    pinned: PinnedVersion | None
    destination: Destination
    is_served: bool = True
    timeout_s: float | None = None
    target: LoadTarget | None = None
    begun: Beginning | None = None
    verb: str = "load"
    is_partial: bool = False

    @property
    def asked(self) -> Asked:
        return Asked.of(self.verb, self.version)


class Checkpoints:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._stager_memory: set[tuple[int, int]] = set()  # of the stager's copy, if published

    @property
    def registered(self) -> LocalState | None:
        """The tensors that are registered now, by a save, a load or `register`."""
        return self._shard.tensors.registered

    def begin(self, verb: str, version: int | str, storage: object) -> Beginning:
        """Note that DCP begins a save or load on this rank; its `save` or `load` may never come.

        Its number is the group's next one. Calls that this thread began before, and never came to,
        are therefore ended first, each under a number of its own.

        Args:
            storage: DCP's writer or reader. When nobody has it any more, the call will not come.
        """
        shard = self._shard
        made = shard.beginnings.begin(Asked.of(verb, version), storage)

        def end_those_left() -> None:
            shard.end_beginnings(made)
            made.number = shard.group.ledger.calls_made + 1  # those that were ended took some

        if shard.beginnings.left(made):
            shard.busy(end_those_left, is_member=False)
        return made

    def inspect(self, version: int | str, timeout_s: float | None) -> PinnedVersion:
        """Wait for `version`, and find what it contains. Reads no tensor.

        Takes no claim: the bytes that are read later are checked against the digest in etcd.
        """

        def look() -> PinnedVersion:
            require_memory()
            deadline = self._shard.deadline(f"find version {version}", timeout_s)
            return find(self._shard, Spec.parse(version), deadline)

        return self._shard.busy(look)

    def check(self, request: LoadRequest) -> LoadTarget:
        """Check on this rank alone what `load` checks before it changes anything.

        For a caller that already talks to every rank, as DCP does while it plans.
        """
        shard = self._shard
        deadline = shard.deadline(request.asked.check, request.timeout_s)

        def check() -> LoadTarget:
            shard.catch_up(deadline)
            return Load(shard, request, deadline).check()

        return shard.busy(check)

    def save(self, request: SaveRequest) -> bool:
        """Give up what is held, register and publish, checked before. Returns as `publish` does."""
        return self.save_made(request.version, lambda: request, request.timeout_s, request.begun)

    def save_made(
        self,
        version: int,
        made: Callable[[], SaveRequest],
        timeout_s: float | None,
        begun: Beginning | None = None,
    ) -> bool:
        """As `save`; an error of `made`, which makes the request, is one on all ranks."""
        save = _Save(self._shard, made, self._stager_memory)
        return collectively(self._shard, Asked.of("save", version), save.run, timeout_s, begun)

    def load(self, request: LoadRequest) -> ReadReport:
        """Give up what is held, register and read. Checked before anything changes."""

        def flow(deadline: Deadline) -> ReadReport:
            return Load(self._shard, request, deadline).run()

        return collectively(self._shard, request.asked, flow, request.timeout_s, request.begun)


def agree(
    shard: Shard,
    asked: Asked,
    deadline: Deadline,
    check: Callable[[], str],
    effects: Effects | None = None,
    store_wait_s: float | None = None,
) -> str:
    """Go on with `asked` only if a check passes on every rank: its error is raised on all.

    One rank alone asks nobody, unless the records decide, too.

    Args:
        check: This rank's own; a rank that is cut off from etcd asks nobody else.
        effects: Refuses, by the records of the run's versions, what may not go on. One rank alone
            asks then, too.

    Returns:
        What all ranks say; "" if they differ.
    """

    def perform(call: GroupCall) -> str:
        answer = check()
        keys, run = call.seat.keys, call.seat.run
        call.decide((keys.versions(run), keys.holdings(run)), effects or recorded)
        call.finish(answer, lambda said: call.complete(Outcome(said=unanimous(said.values()))))
        return call.said

    def unseated(_: GroupCall) -> str:
        return check()

    if shard.is_alone and effects is None:
        return check()
    return shard.make(GroupTask("agree", asked.check, deadline, perform, store_wait_s, unseated))


def unanimous(answers: Iterable[str]) -> str:
    """The answer of all; "" if they differ."""
    distinct = set(answers)
    return distinct.pop() if len(distinct) == 1 else ""


class _Save:
    """One save on its way.

    Args:
        made: Makes the request, once, within the call.
        stager_memory: Where DCP's stager had the last save, if it is held; this one notes its own.
    """

    def __init__(
        self, shard: Shard, made: Callable[[], SaveRequest], stager_memory: set[tuple[int, int]]
    ) -> None:
        self._shard, self._made = shard, made
        self._state: LocalState | None = None  # what is published: a copy, if one was asked for
        self._registered: LocalState | None = None
        self._attendants: Sequence[Attendant] = ()  # of this copy
        self._stager_memory = stager_memory

    @cached_property
    def _request(self) -> SaveRequest:
        return self._made()

    def run(self, deadline: Deadline) -> bool:
        """Copy if asked to, unpublish, and publish. Whether the version is offered now."""
        shard, request, self._deadline = self._shard, self._request, deadline
        self._transforms = request.copier.transforms if request.copier is not None else ()
        self._registered = None
        if (copier := request.copier) is not None:
            attending = (each.attend(copier, request.version) for each in shard.features)
            self._attendants = [each for each in attending if each is not None]
        self._unpublish_before()
        content, store_wait_s = Content(self._register, self._more), request.store_wait_s
        try:
            is_offered = publish(shard, request.version, content, self._deadline, store_wait_s)
            assert self._state is not None  # by `_register`, which `publish` calls
            self._stager_memory.clear()
            if request.from_stager:
                self._stager_memory.update(self._state.spans)
            if (held := shard.held) is not None:
                for attendant in self._attendants:
                    attendant.published(held.uid, is_offered=is_offered)
            return is_offered
        finally:
            shard.hide_unless_held()

    def _unpublish_before(self) -> None:
        """Unpublish the version that is held, once all ranks have checked that they can save.

        A save that could not succeed would leave the replica with nothing.
        """
        shard, asked, store_wait_s = self._shard, self._request.asked, self._request.store_wait_s
        counted = shard.group.ledger.not_waited_for
        # If ranks transform differently, each could publish, and together they have no version.
        may_differ = bool(self._transforms) and not shard.is_alone
        if shard.held is not None or may_differ:
            shard.begin("agree", asked.check, self._deadline, store_wait_s)
        else:
            shard.begin("publish", asked, self._deadline, store_wait_s)
            if counted is None:  # nor does a peer take anything for held
                return
        try:
            self._check_on_all_ranks()
        except ContractBroken:  # what is held was written to: its readers must not have it
            shard.unpublish(self._deadline, counted=counted)
            raise
        except CutOff:  # of a peer, which goes on alone once it has checked its own part; so do we
            if store_wait_s is None:
                raise
        try:
            shard.unpublish(self._deadline, counted=counted)
        except ContractBroken as broken:
            if self._request.copier is None:
                raise
            # The new copy was whole before, and what the trainer goes on with is not lost.
            log.warning("%s: %s", asked, broken)

    def _check_on_all_ranks(self) -> None:
        """Raises: ManifestMismatch: They were given other transforms. And what checks raise."""
        request = self._request
        effects = partial(calls.check_publishable, version=request.version)
        said = agree(
            self._shard, request.asked, self._deadline, self._check, effects, request.store_wait_s
        )
        if said != self._answer:
            raise ManifestMismatch(
                f"version {request.version}",
                "equal transforms on all ranks",
                f"{list(self._transforms)} on this rank and others on another",
                "pass all ranks the same",
            )

    @property
    def _answer(self) -> str:
        """The digest of this rank's transforms: in etcd's records, ranks compare theirs by it."""
        return blake2b(repr(self._transforms).encode(), digest_size=8).hexdigest()

    def _check(self) -> str:
        """Check on this rank alone that the save can succeed, before what is held is given up."""
        check_version(self._request.version)
        self._state = state = self._gather()
        _ = state.layout  # raises, where it has none
        held = self._shard.held
        is_over_it = not self._stager_memory.isdisjoint(state.spans)  # over what is held
        if self._request.from_stager and is_over_it and held is not None:
            raise ContractBroken(
                held.version,
                "dcp.async_save staged the next one over it; this stager reuses its buffers",
                "call handle.unpublish() before each async_save, or use a stager that does not "
                "keep its buffers",
            )
        return self._answer

    def _gather(self) -> LocalState:
        """The tensors to publish: those of the request, or the copy that is made of them now."""
        state, copier = self._request.state, self._request.copier
        if isinstance(state, BaseException):
            raise state
        if not self._request.from_stager:
            self._shard.tensors.examine(state)
        return state if copier is None else copier.fill(state, self._attendants)

    def _register(self) -> LocalState:
        """The tensors as they are registered for the publish, which may ask more than once."""
        self._state = self._state or self._gather()
        if self._registered is None:
            copier = self._request.copier
            if copier is not None:
                copier.turn()  # first: after Ctrl-C here, no copy is made over what is shown
            is_copy = self._request.from_stager or copier is not None
            registered = self._shard.tensors.show(self._state, is_copy=is_copy)
            self._registered = registered
            if registered.buffer is not None:
                registered.buffer.shown(registered)
            for attendant in self._attendants:
                attendant.shown(registered)
        return self._registered

    def _more(self, uid: str, is_offered: bool) -> Mapping[str, int]:  # `Content.more`
        more: dict[str, int] = {}
        for attendant in self._attendants:
            more.update(attendant.more(uid, is_offered=is_offered))
        return more


class Load(Target):
    """One load on its way; the target of its replication."""

    def __init__(self, shard: Shard, request: LoadRequest, deadline: Deadline) -> None:
        super().__init__(shard)
        self._request, self._deadline = request, deadline
        self._checked, self._pinned = request.target, request.pinned

    def run(self) -> ReadReport:
        """Check on all ranks, give up what is held, and read; unless it is here already."""
        shard, request, asked = self._shard, self._request, self._request.asked
        shard.read_begins(self._deadline)
        shard.begin("agree", asked.check, self._deadline)
        answer = self._agree()
        if answer == "held":
            return self._already_held()
        shard.unpublish(self._deadline, may_forget=False)
        terms = calls.SourceTerms(  # a part is fine, too: the group is no source then
            is_required=False, is_served=request.is_served, is_relayed=answer == "whole"
        )
        spec, has_read = Spec.parse(request.version), False
        try:
            read = Replication(shard, spec, self, self._deadline, terms)
            ref = read_and_heal(shard, asked, read)
            has_read = True
            shard.read_ends(ref, self._deadline)
            return read.report
        finally:
            self.ends(has_read=has_read)

    def ends(self, *, has_read: bool) -> None:
        """The read has ended, well if `has_read`: nothing stays registered that is not held."""
        del has_read
        self._shard.hide_unless_held()

    def _agree(self) -> str:
        if self._request.target is not None:
            return self._request.target.answer
        return agree(self._shard, self._request.asked, self._deadline, self._check_now)

    def _check_now(self) -> str:
        self._checked = self.check()
        return self._checked.answer

    def check(self) -> LoadTarget:
        """Find what the version contains, and whether the state dict fits, on this rank alone.

        Raises: UsageError, ManifestMismatch: It does not, or it cannot be read into.
        """
        shard, request = self._shard, self._request
        pinned = self._pinned or find(shard, Spec.parse(request.version), self._deadline)
        self._pinned = pinned
        state = request.destination.fill(pinned.layouts)
        layout = state.layout
        shard.reading.plan(pinned.layouts, layout, shard.group.seat.rank)
        is_held = request.is_served and shard.held == pinned.ref
        if is_held and shard.tensors.are(state, is_alone=shard.is_alone):  # no tensor is written
            return LoadTarget(state, "held")
        state.require_writable(f"{request.asked}")
        if pinned.is_only_here:
            self._require_another_holder()
        shard.group.ledger.keep_sight(pinned.seat, pinned.seen)  # to decide the next call from it
        is_whole = logical([layout]).digest == logical(pinned.layouts).digest
        if not (is_whole or request.is_partial):
            self._tell_left_out(pinned, layout)
        return LoadTarget(state, "whole" if request.is_served and is_whole else "a part")

    def _tell_left_out(self, pinned: PinnedVersion, layout: Layout) -> None:
        """Warn, once in a handle, of tensors that are not read, though the user may want them."""
        shard, request = self._shard, self._request
        names = left_out(pinned.layouts, layout, is_all=shard.is_alone)
        if not names or not shard.tensors.is_news("a part"):
            return
        log.warning(
            "%s: %d tensors of version %d are not read, beside others that are: %s%s; they stay as "
            "they are. named_parameters() leaves buffers out: pass the module's state_dict(), or "
            "partial=True if a part is meant",
            request.asked,
            len(names),
            pinned.ref.version,
            ", ".join(map(repr, names[:TOLD_MAX])),
            ", ..." if len(names) > TOLD_MAX else "",
        )

    def _require_another_holder(self) -> None:
        """Refuse a load that would lose the version: it first gives up what the replica holds.

        Raises: UsageError: Nobody else holds it.
        """
        group, spec = self._shard.group, Spec.parse(self._request.version)
        keys, own = group.seat.keys, group.seat.inst

        def rule(view: View) -> Step[None]:
            offer = resolve(view, keys, spec)
            if isinstance(offer, Wait) or offer.holdings.keys() - {own}:
                return Done(None)
            if not shows_all(view, keys, offer):
                raise Unseen
            raise UsageError(
                f"this replica is the only one that holds version {offer.ref.version}, and would "
                "give it up first; read with another handle, or once another replica has it"
            )

        if self._shard.held is not None:
            group.ask(spec_ranges(keys), rule, self._deadline)

    def _already_held(self) -> ReadReport:
        """Fill in the objects alone: the registered tensors are these, and have the version."""
        shard, checked = self._shard, self._checked
        held, registered = shard.held, shard.tensors.registered
        assert checked is not None
        assert held is not None
        assert registered is not None
        for fqn, buffer in checked.state.objects.items():
            copy_bits(buffer, registered.objects[fqn])
        self._request.destination.vet()
        log.info("version %d of %r is already here", held.version, shard.model)
        shard.read_ends(held, self._deadline)
        report = ReadReport(held.version, shard.group.seat.replica, 0, 0, 0, 0.0, {}, uid=held.uid)
        shard.reports.add(report)
        return report

    # As the target of a replication

    @property
    def bytes_total(self) -> int:
        return self._checked.state.bytes_total if self._checked else 0

    def prepare(self) -> None:
        pass

    def register(self, layouts: Sequence[Layout]) -> LocalState:
        """Show what was checked, or what is planned anew where the source has other layouts."""
        checked, pinned = self._checked, self._pinned.layouts if self._pinned else ()
        # By identity: while a source shows the same layout, `Peers` gives the same object.
        is_as_checked = bool(pinned) and all(a is b for a, b in zip(layouts, pinned, strict=False))
        if checked is not None and is_as_checked:
            return self._shard.tensors.show(checked.state)
        state = self._request.destination.fill(layouts)
        state.require_writable(f"{self._request.asked}")
        return self._shard.tensors.show(state)

    def vet(self) -> None:
        self._request.destination.vet()
