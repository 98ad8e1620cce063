"""The reads of a forerunner: of one version each, in full."""

from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.features.seeding.rules import fetch
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.records import Asked, VersionRef
from torch_ros.protocol.versions import Spec
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import Replication, Target, read_and_heal


def fetch_version(shard: Shard, wanted: VersionRef, asked: Asked, deadline: Deadline) -> bool:
    """Read it into a forerunner, unless it is in its datacenter already, or coming."""
    fetching = Fetching(shard, Spec.at_hand(wanted), Target(shard), deadline)
    return read_and_heal(shard, asked, fetching) is not None


class Fetching(Replication):
    """A read of one version, unless that is in its datacenter already, or coming."""

    def choose(self, call: GroupCall) -> None:
        assert self.spec.only is not None
        call.decide_and_claim(partial(fetch, wanted=self.spec.only), avoided=self.avoided)
