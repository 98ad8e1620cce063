"""Asking for a place in a replica's group."""

from collections.abc import Callable
from dataclasses import dataclass

from torch_ros.protocol.keeping import NO_KEEPER, Keeper
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import SeenRecord, ShardRecord
from torch_ros.protocol.seat import NO_LEAVES, Leaves


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that wants a place in a replica's group."""

    keys: Keys
    replica: str
    rank: int
    world_size: int
    shard: ShardRecord
    run: str | None  # None: the newest live one; "new": a new one
    datacenter: str
    spot: bool
    shared_nonce: str = ""  # given to all ranks alike; "": they find each other by the name
    ttl_s: int = 10
    drain_s: float = 60.0
    leaves: Leaves = NO_LEAVES
    keeper: Keeper = NO_KEEPER
    seen: SeenRecord | None = None  # this process, as people find it; None: as in `shard`
    prefers: str = ""  # the replica whose full copy it reads first, and alone
    find_former_run: Callable[[], tuple[int, str]] | None = None  # asks a bucket; may take a while
    # For each try to take a seat:
    lease_id: int = 0
    nonce: str = ""  # for a new incarnation; with `is_shared`, the only one it may join
    fresh_run: str = ""  # the name of a new run
    former_run: tuple[int, str] = (0, "")  # of which etcd knows nothing: its number, and its name
    left_behind: str = ""  # of one that comes back: the nonce under which it had its last seat
    run_number: int = 0  # of one that comes back, and had been in a complete group
    at_ms: int = 0  # the wall clock

    @property
    def is_shared(self) -> bool:
        return bool(self.shared_nonce)

    @property
    def group(self) -> str:
        return self.keys.group(self.replica)
