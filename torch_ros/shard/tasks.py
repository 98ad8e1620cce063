"""The group's calls, each an object whose `perform` is one rank's part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch_ros.deadline import Deadline
from torch_ros.protocol import calls
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import Call, VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec, check_version, newer_ranges
from torch_ros.store.loops import Step
from torch_ros.store.txn import View
from torch_ros.transfer.registered import Registered

if TYPE_CHECKING:
    from torch_ros.shard.core import Shard

log = logging.getLogger(__name__)


class Publication(GroupTask[bool]):
    """Offer tensors as a version; the answer is whether they are offered now.

    Args:
        tensors: Registers them, or says where the registered ones are. Called within the call.
    """

    kind = "publish"

    def __init__(
        self,
        shard: Shard,
        version: int,
        tensors: Callable[[], Registered],
        asked: str,
        deadline: Deadline,
        store_wait_s: float | None,
    ) -> None:
        super().__init__(asked, deadline, store_wait_s)
        self._shard, self._version, self._tensors = shard, version, tensors

    def perform(self, call: GroupCall) -> bool:
        shard = self._shard
        if call.may_hold is None:
            shard.word.void_unless_held()  # the last call may have ended badly
        registered = self._tensors()
        call.decide_to_publish(check_version(self._version))
        shard.offer_all(call, registered)
        if not call.has_ended and (said := call.finish(registered.digest)):
            call.complete(shard.manifests.together(registered, said, self.deadline).digest)
        log.info("published version %d of %r", self._version, shard.model)
        return True

    def unseated(self, call: GroupCall) -> bool:
        registered = self._tensors()
        call.go_on_without(check_version(self._version), registered.digest)
        self._shard.offer_all(call, registered)
        log.info(
            "version %d of %r is held, and offered when etcd is back",
            self._version,
            self._shard.model,
        )
        return False


class Unpublication(GroupTask[None]):
    """Stop offering `held`; ends once nobody reads it."""

    kind = "unpublish"

    def __init__(self, shard: Shard, held: VersionRef, asked: str, deadline: Deadline) -> None:
        super().__init__(asked, deadline)
        self._shard, self._held = shard, held

    def perform(self, call: GroupCall) -> None:
        call.unpublish(self._held, lambda _: self._shard.copy_to_host(call.number))


class Agreement(GroupTask[str]):
    """Go on only if a check passes on every rank. Answers what all ranks say; "" if they differ.

    Args:
        effects: Decides by the records of the run's versions whether the ranks may go on.
    """

    kind = "agree"

    def __init__(
        self,
        asked: str,
        deadline: Deadline,
        check: Callable[[], str],
        effects: Callable[[View, Seat, Call], Step[Call]] = calls.agree,
        store_wait_s: float | None = None,
    ) -> None:
        super().__init__(asked, deadline, store_wait_s)
        self._check, self._effects = check, effects

    def perform(self, call: GroupCall) -> str:
        answer = self._check()
        keys, run = call.seat.keys, call.seat.run
        call.decide((keys.versions(run), keys.holdings(run)), self._effects)
        if not call.has_ended and (said := call.finish(answer)):
            call.complete(unanimous(said.values()))
        return call.said

    def unseated(self, call: GroupCall) -> str:  # noqa: ARG002  # a rank that is cut off asks itself
        return self._check()


class Refusal(GroupTask[None]):
    """End the call with `error`, on all ranks."""

    kind = "agree"

    def __init__(self, asked: str, deadline: Deadline, error: BaseException) -> None:
        super().__init__(asked, deadline)
        self._error = error

    def perform(self, call: GroupCall) -> None:
        call.refuse(self._error)


class Search(GroupTask[VersionRef | None]):
    """Find the version to which `update` goes from `held`; None: none."""

    kind = "update"

    def __init__(self, spec: Spec, held: VersionRef, deadline: Deadline) -> None:
        super().__init__(deadline.what, deadline)
        self._spec, self._held = spec, held

    def perform(self, call: GroupCall) -> VersionRef | None:
        effects = partial(calls.update, spec=self._spec, held=self._held)
        call.decide(newer_ranges(call.seat.keys), effects)
        return call.decided.ref


def unanimous(answers: Iterable[str]) -> str:
    """The answer of all; "" if they differ."""
    distinct = set(answers)
    return distinct.pop() if len(distinct) == 1 else ""
