"""The reads of a forerunner: of one version each, in full."""

from collections.abc import Collection
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.features.seeding.rules import fetch
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.calls import SourceTerms
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.versions import Spec
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import Replication, Target, healed


def fetch_version(shard: Shard, wanted: VersionRef, asked: Asked, deadline: Deadline) -> bool:
    """Read it into a forerunner, unless it is in its datacenter already, or coming."""
    made = partial(Fetching, shard, wanted, deadline)
    is_there: bool = healed(shard, asked, deadline, made, lambda fetching: fetching.fetch)
    return is_there


class Fetching(Replication):
    """A forerunner's: of one version, unless that is in its datacenter already, or coming."""

    def __init__(
        self, shard: Shard, wanted: VersionRef, deadline: Deadline, avoided: Collection[str]
    ) -> None:
        spec = Spec.at_hand(wanted)
        super().__init__(shard, spec, SourceTerms(), Target(shard), deadline, avoided)
        self._wanted = wanted

    def fetch(self, call: GroupCall) -> bool:
        """Whether it was fetched."""
        self._target.prepare()
        self._book_lost_time()
        call.decide_and_claim(partial(fetch, wanted=self._wanted), avoided=self._avoided)
        if call.decided.ref is None:
            return False
        self.read(call)
        return True
