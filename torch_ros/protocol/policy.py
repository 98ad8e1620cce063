"""The version that an update goes to. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.protocol.records import Call, Outcome, VersionRef
from torch_ros.protocol.seat import Seat, recorded
from torch_ros.protocol.versions import Spec, newer
from torch_ros.store.loops import Act
from torch_ros.store.txn import Ranges, View


@dataclass(frozen=True, slots=True)
class Next:
    """The step of an update: to `ref`, unless `said` is why not yet. `ref` None: none is newer."""

    ref: VersionRef | None = None
    said: str = ""
    until: Callable[[], bool] | None = None  # true: decide again, for a reason in no record

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

    is_asked_first: ClassVar[bool] = False  # also by a replica that holds nothing

    def next_version(self, view: View, seat: Seat, spec: Spec, held: VersionRef | None) -> Next:
        """The step of a replica. One rank decides it for all."""
        assert held is not None
        offer = newer(view, seat.keys, spec, held)
        return Next(offer.ref if offer else None)

    def watched(self, view: View, seat: Seat, held: VersionRef | None) -> Ranges:  # noqa: ARG002
        """The records, beside versions' ones, whose change may lead to another step."""
        return ()

    def took(self, found: Next, held: VersionRef | None, deadline: Deadline) -> None:  # noqa: ARG002
        """Act on the step that was decided. Called on all ranks, before any of them goes on.
        Raises: UsageError: It has a version and a reason against it, as another policy's has.
        """
        if found.ref is not None and found.said:
            raise UsageError(
                f"the ranks update by different policies: one of them says {found.said!r}; give "
                "the same options to open on all of them"
            )

    def to_read(self, asked: Spec, chosen: VersionRef | None) -> Sequence[Spec]:
        """The versions to read, once `chosen` was; each only if the one before it has gone."""
        return (replace(asked, floor=chosen),)


NEWEST = Policy()
