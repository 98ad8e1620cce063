"""The seams at which features meet a shard: docs/ARCHITECTURE.md#features.

The core calls them, and names no feature. A feature has those that it needs.
"""

from collections.abc import Callable
from typing import Protocol

from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.protocol.call import Effects, GroupCall
from torch_ros.protocol.records import Call
from torch_ros.protocol.versions import Spec
from torch_ros.store.loops import Step
from torch_ros.transfer.feed import Progress
from torch_ros.transfer.meter import Meter


class Supplier(Protocol):
    """One rank's way to a version that no replica has, in one replicate of its caller.

    It lasts over all seats and tries.
    """

    where: str  # for reports
    called: str  # as what is asked names it, or ranks that have none would differ silently

    def decide(
        self, call: GroupCall, rule: Callable[..., Step[Call]], claim: Callable[[Effects], None]
    ) -> None:
        """Decide, and claim, by `rule`, or that the version is brought from elsewhere.

        Args:
            rule: The rule for versions that replicas have. It takes another `spec`.
        """

    def fill(self, call: GroupCall, meter: Meter) -> Progress:
        """Fill the registered tensors with what was decided, and show them. The word is clear."""

    def is_passed_over(self, decided: Call, error: TorchRosError) -> bool:
        """Note that what was decided could not be read. Whether to make the call once more."""


class Feature:
    """Told of what happens to the shard that it is attached to. Each method does nothing here.

    Called in the order in which features were attached, by the thread that makes the call under
    way, unless a method says otherwise.
    """

    def supplier(self, spec: Spec, deadline: Deadline) -> Supplier | None:
        """A replicate begins. A way of the feature's own to what it reads; None: it has none."""
        del spec, deadline
        return None

    def closes(self) -> None:
        """The handle is about to be closed, and all is as it was. Any thread calls."""

    def has_closed(self) -> None:
        """Nothing is shown any more, and no call is under way; the transport goes next."""
