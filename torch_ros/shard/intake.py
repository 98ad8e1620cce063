"""The versions that calls of one handle bring in, for the install that they are a part of."""

from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.protocol.ledger import Ledger
from torch_ros.protocol.records import VersionRef


class Intake:
    """Told by each call that reads, where it begins and where it has brought everything."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.found: VersionRef | None = None  # by the last look at a version's contents
        self.refs: set[VersionRef] | None = None  # in the block of an install; None: outside
        self.has_waited = False
        """Whether an update has passed by a version that another replica here was reading."""
        self.torn: set[Deadline] = set()  # of calls that have not brought all that was asked for

    def begins(self, call: Deadline) -> None:
        """Raises: UsageError: It belongs into an install: others believe what the engine uses."""
        self.torn.add(call)
        if self._ledger.install is not None and self.refs is None:
            raise UsageError(
                f"{call.what}: this handle was opened with installs=True, and reads within "
                "`with handle.installing(version):` only"
            )

    def ends(self, ref: VersionRef | None, call: Deadline) -> None:
        """It has brought all; None: there was nothing. No other call mends one that has not."""
        self.torn.discard(call)
        if self.refs is not None and ref is not None:
            self.refs.add(ref)
