"""Waits until replicas use a version: docs/protocol/installs.md."""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch_ros import arguments
from torch_ros.deadline import Deadline
from torch_ros.errors import (
    InstallRejected,
)
from torch_ros.features.installs import rules
from torch_ros.features.installs.installing import Installs
from torch_ros.printable import log_of
from torch_ros.store.loops import Done, Wait
from torch_ros.store.txn import View, one

log: logging.Logger = log_of(__name__)

LOOK_S = 1.0  # between two looks while a replica is missing
TTLS = 2  # for which a replica is missing, before it is gone


@dataclass(frozen=True, slots=True)
class Installed:
    """The answers to a version, each replica's.

    Attributes:
        active: When it was seen to use that version, or a newer one: seconds after the wait began.
        rejected: The rank that failed, and its reason.
        gone: Replicas that were there, and are no more.
    """

    version: int
    active: Mapping[str, float]
    rejected: Mapping[str, tuple[int, str]]
    gone: tuple[str, ...] = ()


class Waiting:
    """One wait until replicas use a version."""

    def __init__(
        self, installs: Installs, version: int, replicas: Iterable[str] | None, deadline: Deadline
    ) -> None:
        shard = installs.shard
        self._installs, self._deadline, self._group = installs, deadline, shard.group
        if replicas is not None and not isinstance(replicas, str):
            replicas = tuple(replicas)
        arguments.optional(arguments.texts)("replicas", replicas)
        self._named = replicas
        seat, kept = shard.group.seat, shard.group.ledger.held
        is_own = kept is not None and kept.is_original and kept.ref.version == version
        uid = kept.ref.uid if kept is not None and is_own else ""
        self._keys, self._goal = seat.keys, rules.Goal(seat.keys, seat.run, version, uid)
        self._by_hand: frozenset[str] = frozenset()
        self._active: dict[str, float] = {}

    def run(self) -> Installed:
        while True:
            ranges = (*map(one, sorted(self._by_hand)), *self._goal.ranges)
            found = self._group.follow(ranges, self._rule, self._deadline)
            if isinstance(found, Installed):
                break
            self._by_hand = found
        if self._named is None:
            self._installs.forget(found.gone)  # said once
        return found

    def _rule(self, view: View) -> Done[Installed | frozenset[str]] | Wait:
        if (by_hand := rules.put_by_hand(view, self._keys)) != self._by_hand:
            return Done(by_hand)
        self._goal = self._goal.known(view)
        there = rules.installs_of(view, self._keys)
        self._installs.note(there)
        counted = self._installs.heard_of() if self._named is None else self._named
        gone_s = TTLS * self._group.applicant.ttl_s
        gone = tuple(name for name in counted if self._installs.missing_s(name) > gone_s)
        answers = self._goal.answers({name: there[name] for name in counted if name in there})
        now_s = time.monotonic() - self._deadline.started_s
        uses = (name for name, answer in answers.items() if answer == "active")
        self._active = {name: self._active.get(name, now_s) for name in uses}
        rejected = {
            name: (found.rank, found.reason)
            for name, answer in answers.items()
            if answer == "rejected" and (found := there[name].rejected)
        }
        left = [name for name in counted if name not in {*self._active, *rejected, *gone}]
        if self._active and not left:
            return Done(Installed(self._goal.version, self._active, rejected, gone))
        if rejected and not left:
            raise self._rejected(rejected)
        missing = [name for name in left if name not in there]
        reason = self._reason(left, missing, rejected)
        return Wait(reason, self._goal.ranges, LOOK_S if missing else math.inf)

    def _rejected(self, rejected: Mapping[str, tuple[int, str]]) -> InstallRejected:
        reasons = [f"rank {rank} of {name!r}: {why}" for name, (rank, why) in rejected.items()]
        rank = next(iter(rejected.values()))[0]
        return InstallRejected(", ".join(rejected), self._goal.version, rank, "; ".join(reasons))

    def _reason(self, left: Iterable[str], missing: Iterable[str], rejected: Iterable[str]) -> str:
        parts = [
            f"{name!r} {'is missing, and was' if name in missing else 'is'} "
            f"{rules.at(self._installs.last(name))}"
            for name in left
        ]
        parts += [f"{name!r} has rejected it" for name in rejected]
        return "; ".join(parts) or "no replica is there that installs"
