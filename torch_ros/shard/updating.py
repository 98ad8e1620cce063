"""Going to a newer version that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import VersionNotFound
from torch_ros.protocol.call import GroupCall, Passing, Sight
from torch_ros.protocol.calls import watching_group
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.policy import NEWEST, Next, Policy, decided_next, next_of
from torch_ros.protocol.records import Asked, Call, Outcome, VersionRef
from torch_ros.protocol.seat import Seat, own_group, recorded
from torch_ros.protocol.unpublish import unpublish_ranges
from torch_ros.protocol.versions import Spec, newer_ranges
from torch_ros.shard.collective import collectively
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import Target, replicate
from torch_ros.store.loops import Act, Done, Step
from torch_ros.store.txn import T, View

End = Callable[[Next], Act[T] | Done[T]]  # ends the search: makes the step for what was found


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The update that a caller asks for."""

    version: int | str
    timeout_s: float | None = None
    policy: Callable[[Policy], Policy] = lambda own: own  # the one to go by, given the shard's


def update(shard: Shard, request: UpdateRequest) -> VersionRef | None:
    """Go to the version of `request` if it is newer than what is held; None: it is not."""
    asked, flow = Asked.of("update", request.version), partial(update_at_once, shard, request)
    return collectively(shard, asked, flow, request.timeout_s)


def update_at_once(shard: Shard, request: UpdateRequest, deadline: Deadline) -> VersionRef | None:
    """Find a newer version on all ranks, give up what is held, and read it.

    A replica that holds nothing goes on to read at once, without asking first; except where its
    policy has versions that it does not go to.
    """
    search = Search(shard, request, deadline)
    search.begin()
    is_asked = search.held is not None or search.policy.is_asked_first
    found = search.run() if is_asked else Next()
    if is_asked and found.goes_to is None:
        shard.read_ends(search.held, deadline)
        return None
    if search.held:
        search.all_go_on(deadline)  # a rank that does not come would leave the replica with nothing
    with search.given_up(deadline) as target:
        *preferred, last = search.to_read(found)
        for spec in preferred:
            with suppress(VersionNotFound):  # it has gone meanwhile
                return replicate(shard, spec, target, deadline)
        return replicate(shard, last, target, deadline)


class Search:
    """One rank's part in going to a version: to find one that is there, and to agree on it."""

    def __init__(self, shard: Shard, request: UpdateRequest, deadline: Deadline) -> None:
        self.shard, self.deadline = shard, deadline
        self.spec, self.held = Spec.parse(request.version), shard.held
        self._sight: Sight | None = None
        is_chosen = self.spec.absolute is not None  # the user names a number: no policy decides
        self.policy = NEWEST if is_chosen else request.policy(shard.policy)

    def begin(self) -> None:
        self.shard.read_begins(self.deadline)
        self.shard.begin("update", self.shard.asked, self.deadline)
        self.held = self.shard.held

    def run(self) -> Next:
        """The step to take, the same on all ranks."""
        found = self._find()
        self.shard.observed.heard_of(found.ref)
        self.policy.took(found, self.held, self.deadline)
        return found

    def to_read(self, found: Next) -> Sequence[Spec]:
        return self.policy.to_read(self.spec, found.ref)

    # What another search does in its own way

    def looks(self) -> None:
        """A look begins; another one, if the seat was lost meanwhile."""

    def step(self, view: View, seat: Seat, end: End[T]) -> Step[T]:
        """The step upon this view: `end` with what is found, or wait first. Pure."""
        return end(self.policy.next_version(view, seat, self.spec, self.held))

    def objection(self) -> str:
        """The reason for which this rank does not go on, which ends the update on all."""
        return ""

    # Calls of the group

    def all_go_on(self, deadline: Deadline) -> bool:
        """Whether no rank objects. Returns when all have come, and still hold what they held."""
        held = self.held

        def ask(call: GroupCall) -> bool:
            call.decide((), recorded)

            def sum_up(said: Mapping[int, str]) -> None:
                end = Outcome(said=max(said.values()))  # an objection, if there is one
                call.complete(end, ahead=unpublish_ranges(call.seat, held) if held else ())

            call.finish(self.objection(), sum_up)
            self._sight = (call.seat, call.seen) if call.seen else None
            return not call.said

        made = GroupTask("agree", self.shard.asked.check, deadline, ask)
        return self.shard.is_alone or self.shard.make(made)

    @contextmanager
    def given_up(self, deadline: Deadline) -> Iterator[Target]:
        """Give up what is held; the replicate within may decide by what that has read along."""
        shard, passing = self.shard, Passing(self._sight, replicates=True)
        target = Target(shard, shard.base())
        shard.unpublish(deadline, may_forget=False, passing=passing)
        try:
            yield target
        finally:  # a later call must not: `latest` may mean another version by then
            shard.group.ledger.take_sight(shard.group.seat)

    def _find(self) -> Next:
        """Look for a newer version: as a call of the group, or, in a group of one, by one read."""
        shard, group, deadline = self.shard, self.shard.group, self.deadline
        ranges = newer_ranges(group.seat.keys, self.held)
        if not shard.is_alone:

            def search(call: GroupCall) -> Next:
                self.looks()
                call.decide(ranges, self._effects, is_cheap=True)
                return next_of(call.decided)

            return shard.make(GroupTask("update", shard.asked, deadline, search))

        def rule(view: View) -> Step[Next]:
            own_group(view, group.seat)
            return watching_group(self._step(view, group.seat, Done), group.seat)

        def look() -> Next:  # nobody could decide otherwise: one read, nothing written
            self.looks()
            return group.ask((*group.seat.own, *ranges), rule, deadline)

        return group.from_seat(look, deadline)

    def _effects(self, view: View, seat: Seat, call: Call) -> Step[Call]:
        return self._step(view, seat, partial(decided_next, view, seat, call))

    def _step(self, view: View, seat: Seat, end: End[T]) -> Step[T]:  # `step`, features told
        held = self.held
        if held is not None:
            for feature in self.shard.features:
                feature.seeks(view, held)
        return self.step(view, seat, end)
