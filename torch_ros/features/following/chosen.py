"""Policies of the user's own. Pure.

docs/protocol/following.md#policies has the rules.
"""

from collections.abc import Sequence
from typing import Protocol

from torch_ros.errors import UsageError
from torch_ros.protocol.policy import Next, Policy
from torch_ros.protocol.records import VersionRef
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec, newest_record, offered
from torch_ros.store.txn import Unseen, View


class UpdatePolicy(Protocol):
    """Chooses the version that `update` and `follow` go to: given to `open`."""

    def choose(self, available: Sequence[int], held: int | None, /) -> int | None:
        """The version that an `update` or `follow` of this replica goes to.

        Asked on one rank, which decides for all, while there are versions that are newer than
        what is held, perhaps more than once for an update. An error that it raises ends the update
        on all ranks, which keep what they hold.

        Args:
            available: The versions that can be read now, the newest first: of one run, newer than
                what is held, and no newer than what `update` was asked for.
            held: The version of that run that is held, if there is one.

        Returns:
            One of `available`. None: to stay at what is held.
        """


class Chosen(Policy):
    """The choice of a policy of the user's own."""

    is_asked_first = True

    def __init__(self, policy: UpdatePolicy) -> None:
        self._policy = policy

    def next_version(self, view: View, seat: Seat, spec: Spec, held: VersionRef | None) -> Next:
        keys = seat.keys
        if held is not None and newest_record(view, keys) == held:
            return Next()
        if not view.shows(keys.holdings()):
            raise Unseen
        of_run = [offer.ref for offer in next(iter(offered(view, keys)), [])[spec.back :]]
        if held is not None:
            of_run = [ref for ref in of_run if ref.order >= held.order and ref != held]
        refs = {ref.version: ref for ref in of_run}
        if not refs:
            return Next()
        is_same_run = held is not None and held.run == of_run[0].run
        number = self._policy.choose(tuple(refs), held.version if held and is_same_run else None)
        if number is not None and number not in refs:
            raise UsageError(
                f"policy: {self._policy!r} has chosen {number!r}; expected one of {list(refs)}, or "
                "None"
            )
        return Next(None if number is None else refs[number])

    def to_read(self, asked: Spec, chosen: VersionRef | None) -> Sequence[Spec]:
        return (Spec.at_hand(chosen),) if chosen is not None else (asked,)
