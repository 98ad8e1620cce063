"""`/ready/MODEL/REPLICA` beside the figures of a process, of the replicas that it is a rank of."""

# feature installs {
from functools import partial

from torch_ros.features.installs.ready import Probe
from torch_ros.fleet import ready_page
from torch_ros.shard.core import open_shards


def ready_here(target: str) -> tuple[int, str]:
    """As `torch_ros.ready_page`, of this process's handles; it tells nothing of other replicas.

    With `?behind=K` it asks the handle's own etcd.
    """
    return ready_page.answer(target, _knows)


def _knows(probe: Probe) -> ready_page.Newest | None:
    for shard in open_shards():
        group = shard.group
        if (shard.model, group.seat.replica) == (probe.model, probe.replica):
            return partial(ready_page.newest_in, group.kv, shard.model)
    return None


# } installs
