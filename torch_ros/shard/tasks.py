"""Calls of the group that a handle and DCP's saves and loads both make."""

import logging
from collections.abc import Callable, Iterable

from torch_ros.deadline import Deadline
from torch_ros.protocol import calls
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.records import Call
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import check_version
from torch_ros.shard.core import Shard
from torch_ros.store.loops import Step
from torch_ros.store.txn import View
from torch_ros.transfer.registered import Registered

log = logging.getLogger(__name__)


def publication(
    shard: Shard,
    version: int,
    tensors: Callable[[], Registered],
    asked: str,
    deadline: Deadline,
    store_wait_s: float | None,
) -> GroupTask[bool]:
    """Offer tensors as a version; the answer is whether they are offered now.

    Args:
        tensors: Registers them, or says where the registered ones are. Called within the call.
    """

    def perform(call: GroupCall) -> bool:
        if call.may_hold is None:
            shard.word.void_unless_held()  # the last call may have ended badly
        registered = tensors()
        call.decide_to_publish(check_version(version))
        shard.offer_all(call, registered)
        with call.ending():
            if not call.has_ended and (said := call.finish(registered.digest)):
                call.complete(shard.manifests.together(registered, said, deadline).digest)
        log.info("published version %d of %r", version, shard.model)
        return True

    def unseated(call: GroupCall) -> bool:
        registered = tensors()
        call.go_on_without(check_version(version), registered.digest)
        shard.offer_all(call, registered)
        log.info("version %d of %r is held, and offered when etcd is back", version, shard.model)
        return False

    return GroupTask("publish", asked, deadline, perform, store_wait_s, unseated)


def agreement(
    asked: str,
    deadline: Deadline,
    check: Callable[[], str],
    effects: Callable[[View, Seat, Call], Step[Call]] = calls.agree,
    store_wait_s: float | None = None,
) -> GroupTask[str]:
    """Go on only if a check passes on every rank. Answers what all ranks say; "" if they differ.

    Args:
        effects: Decides by the records of the run's versions whether the ranks may go on.
    """

    def perform(call: GroupCall) -> str:
        answer = check()
        keys, run = call.seat.keys, call.seat.run
        call.decide((keys.versions(run), keys.holdings(run)), effects)
        with call.ending():
            if not call.has_ended and (said := call.finish(answer)):
                call.complete(unanimous(said.values()))
        return call.said

    # A rank that is cut off asks itself.
    return GroupTask("agree", asked, deadline, perform, store_wait_s, lambda _: check())


def unanimous(answers: Iterable[str]) -> str:
    """The answer of all; "" if they differ."""
    distinct = set(answers)
    return distinct.pop() if len(distinct) == 1 else ""
