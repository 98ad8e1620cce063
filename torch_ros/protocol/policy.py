"""Which version an update goes to. Pure.

docs/protocol/following.md#policies has the rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import msgspec

from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.protocol.records import Call, Outcome, VersionRef
from torch_ros.protocol.seat import Seat, recorded
from torch_ros.protocol.versions import Spec, newer, newest_record, offered
from torch_ros.store.loops import Act
from torch_ros.store.txn import Ranges, Unseen, View


@dataclass(frozen=True, slots=True)
class Next:
    """The step of an update: to `ref`, unless it says why not yet."""

    ref: VersionRef | None = None
    said: str = ""
    until: Callable[[], bool] | None = None  # true: it may be another one, which no record tells

    @property
    def goes_to(self) -> VersionRef | None:
        return None if self.said else self.ref


def decided_next(view: View, seat: Seat, call: Call, found: Next) -> Act[Call]:
    """The end of an update, written down, so that all ranks do the same (I3)."""
    outcome = Outcome(said=found.said)
    return recorded(view, seat, msgspec.structs.replace(call, ref=found.ref, outcome=outcome))


def next_of(call: Call) -> Next:
    return Next(call.ref, call.outcome.said if call.outcome is not None else "")


class Policy:
    """Chooses the version that an update goes to: here the newest, wherever it is."""

    is_asked_first: ClassVar[bool] = False  # while nothing is held, too

    def next_version(self, view: View, seat: Seat, spec: Spec, held: VersionRef | None) -> Next:
        """The step of a replica. One rank decides it for all."""
        assert held is not None
        offer = newer(view, seat.keys, spec, held)
        return Next(offer.ref if offer else None)

    def watched(self, view: View, seat: Seat, held: VersionRef | None) -> Ranges:  # noqa: ARG002
        """The records, beside those of versions, of which a change may make it another one."""
        return ()

    def took(self, found: Next, held: VersionRef | None, deadline: Deadline) -> None:  # noqa: ARG002
        """Act on the step that was decided. Called on all ranks, before any of them goes on.

        Raises:
            UsageError: It is another policy's.
        """
        if found.ref is not None and found.said:
            raise UsageError(
                f"the ranks update by different policies: one of them says {found.said!r}; give "
                "the same options to open on all of them"
            )

    def to_read(self, asked: Spec, chosen: VersionRef | None) -> Sequence[Spec]:
        """The reads when `chosen` was; each of these if the one before is there no more."""
        return (replace(asked, floor=chosen),)


NEWEST = Policy()


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
