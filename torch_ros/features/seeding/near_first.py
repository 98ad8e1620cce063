"""Updates that pass by versions that are far, or only just coming here."""

from collections.abc import Sequence

from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.features.seeding.forerunner import Forerunner
from torch_ros.features.seeding.rules import COMING, FETCHED, Skipping, newer_near, next_version
from torch_ros.protocol.keys import DEFAULT_DATACENTER
from torch_ros.protocol.policy import NEWEST, Next, Policy
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec
from torch_ros.shard.core import Shard
from torch_ros.store.txn import Ranges, View


class NearFirst(Policy):
    """The policy of one handle: the newest version that is in its datacenter.

    Args:
        forerunner: Fetches one that is far; None: the replica itself goes to it.
    """

    def __init__(self, shard: Shard, forerunner: Forerunner | None) -> None:
        self._shard, self.forerunner = shard, forerunner
        self._passed_by: VersionRef | None = None  # held while another replica read a newer one

    def is_for(self, skip: bool | None) -> bool:
        """Whether an update skips; the same on all ranks, whatever datacenter each was given."""
        is_named = self._shard.group.seat.datacenter != DEFAULT_DATACENTER
        return is_named or self.forerunner is not None if skip is None else skip

    def next_version(self, view: View, seat: Seat, spec: Spec, held: VersionRef | None) -> Next:
        assert held is not None
        forerunner = self.forerunner
        may_fetch = forerunner.is_idle if forerunner else None
        skipping = Skipping(may_fetch, self._passed_by == held)
        found = next_version(view, seat, spec, held, skipping)
        if forerunner is None:
            return found
        if found.ref is not None and found.said == FETCHED:
            forerunner.require_fit(found.ref)
        return found if may_fetch else Next(found.ref, found.said, until=lambda: forerunner.is_idle)

    def watched(self, view: View, seat: Seat, held: VersionRef | None) -> Ranges:
        return newer_near(view, seat, held) if held is not None else ()

    def took(self, found: Next, held: VersionRef | None, deadline: Deadline) -> None:
        if found.said == COMING:
            self._passed_by = held
        if found.ref is None or found.said != FETCHED:
            return
        if self.forerunner is None:
            raise UsageError("seeding='host' was given to open on some ranks only; give it to all")
        self.forerunner.fetch(found.ref, deadline)

    def to_read(self, asked: Spec, chosen: VersionRef | None) -> Sequence[Spec]:
        wherever = NEWEST.to_read(asked, chosen)
        return wherever if chosen is None else (Spec.at_hand(chosen), *wherever)


def policy_for(policy: Policy, skip: bool | None) -> Policy:
    """The policy of one update.

    Raises: UsageError: The handle's is one of the user's own.
    """
    if isinstance(policy, NearFirst):
        return policy if policy.is_for(skip) else NEWEST
    if skip is not None and policy is not NEWEST:
        raise UsageError(f"skip={skip!r}: open was given a policy, which decides that")
    return policy
