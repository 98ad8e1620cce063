"""The processes that took seats, also those whose leases have ended. No rule looks. Pure."""

from collections.abc import Mapping

from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import SeenRecord
from torch_ros.store.txn import View

Rank = tuple[str, int]  # of a replica


def all_of(view: View, keys: Keys) -> Mapping[Rank, SeenRecord]:
    """From a view of `keys.seen()`."""
    found = readable(view.within(keys.seen()), k.parse_seen, SeenRecord)
    return {where: seen for _, where, seen, _ in found}


def lost(view: View, keys: Keys) -> Mapping[Rank, SeenRecord]:
    """The processes whose seats nobody has, and that gave none up; from a view with all shards."""
    shards = keyed(view.within(keys.every_shard()), k.parse_shard)
    seated = {(k.replica_of(inst), k.parse_rank(key)) for key, inst, _ in shards}
    return {where: seen for where, seen in all_of(view, keys).items() if where not in seated}
