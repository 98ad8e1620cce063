"""The versions that calls of one handle bring in, for the install that they are a part of."""

from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.protocol.policy import NEWEST, Policy
from torch_ros.protocol.records import VersionRef
from torch_ros.shard.core import Shard
from torch_ros.shard.seams import Feature


class Intake(Feature):
    """Told by each call that reads, where it begins and where it has brought everything.

    Attached to a handle that installs.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._policy: Policy | None = None  # the shard's, meanwhile
        self.seen: VersionRef | None = None  # by the last look at a version's contents
        self.refs: set[VersionRef] | None = None  # in the block of an install; None: outside
        self.torn: set[Deadline] = set()  # of calls that have not brought all that was asked for
        shard.attach(self)

    def opens(self) -> None:
        """An install has entered a version, which its block has to bring: no policy has a say."""
        if self._policy is None:
            self._policy, self._shard.policy = self._shard.policy, NEWEST
        self.refs, self.torn = set(), set()

    def shuts(self) -> None:
        self.refs = None
        if self._policy is not None:
            self._shard.policy, self._policy = self._policy, None

    def read_begins(self, call: Deadline) -> None:
        """Raises: UsageError: It belongs into an install: others believe what the engine uses."""
        self.torn.add(call)
        if self.refs is None:
            raise UsageError(
                f"{call.what}: this handle was opened with installs=True, and reads within "
                "`with handle.installing(version):` only"
            )

    def read_ends(self, ref: VersionRef | None, call: Deadline) -> None:
        """No other call mends one that has not brought all."""
        self.torn.discard(call)
        if self.refs is not None and ref is not None:
            self.refs.add(ref)

    def looked_at(self, ref: VersionRef) -> None:
        self.seen = ref
