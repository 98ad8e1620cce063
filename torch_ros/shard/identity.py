"""Which rank of which replica this process is, when the caller does not say."""

import itertools
import os
import re
import secrets
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from torch_ros.errors import DeadlineExceeded, UsageError

UNIQUE = re.compile(r"-\d+-[0-9a-f]{6}$")  # the end of a name that nobody chose

_opens = itertools.count()  # every rank opens its handles in the same order
_names_taken: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Identity:
    replica: str
    rank: int
    world_size: int
    nonce: str | None  # of this incarnation, if all ranks have been told the same


def identify(
    replica: str | None, rank: int | None, world_size: int | None, *, timeout_s: float
) -> Identity:
    """Fill in what is None: from the process group, else torchrun's environment, else 0 of 1.

    With a process group that has these ranks, its rank 0 chooses for all (through the group's
    store: no collective, and nothing is pickled). Collective in that case.

    Raises:
        UsageError: An impossible rank, or several processes that nothing gives a common name.
        DeadlineExceeded: Rank 0 of the process group did not come.
    """
    has_group = dist.is_available() and dist.is_initialized()
    group = (dist.get_rank(), dist.get_world_size()) if has_group else None
    launched = (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    default_rank, default_size = group or launched
    rank = default_rank if rank is None else rank
    world_size = default_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}: expected 0 <= rank < world_size; pass both")
    if world_size == 1:
        return Identity(replica or _unique_name(), rank, world_size, None)
    if group == (rank, world_size):
        replica, nonce = _shared(replica, rank, timeout_s)
        return Identity(replica, rank, world_size, nonce)
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if replica is None and launched == (rank, world_size) and run_id != "none":
        name = f"{run_id}-{os.environ.get('ROLE_NAME', 'default')}"
        _names_taken[name] += 1
        earlier = _names_taken[name] - 1
        replica = f"{name}-{earlier}" if earlier else name
    if replica is None:
        raise UsageError(
            f"rank {rank} of {world_size} has no process group and no torchrun run id to agree on "
            "a name with its peers; pass the same replica='...' on all of them"
        )
    return Identity(replica, rank, world_size, None)


def _unique_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def without_pid(replica: str) -> str:
    """The host of a name that nobody chose, for labels; any other as it is."""
    return UNIQUE.sub("", replica)


def _shared(replica: str | None, rank: int, timeout_s: float) -> tuple[str, str]:
    key = f"torch_ros/open/{next(_opens)}"
    store = _get_default_store()
    if rank == 0:
        store.set(key, f"{secrets.token_hex(4)} {replica or _unique_name()}")
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        reason = "rank 0 of the process group has not opened its handle"
        raise DeadlineExceeded("open", timeout_s, reason) from error
    nonce, _, name = store.get(key).decode().partition(" ")
    if replica is not None and replica != name:
        raise UsageError(
            f"replica {replica!r} on rank {rank}, {name!r} on rank 0: all ranks of a process group "
            "open the same replica, with the same calls in the same order"
        )
    return name, nonce
