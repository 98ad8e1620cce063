"""Which rank of which replica this process is, when the caller does not say."""

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from torch_ros.deadline import Deadline
from torch_ros.errors import BackendError, TorchRosError, UsageError

T = TypeVar("T")

LOOK_S, LOOK_MAX_S = 0.01, 0.2  # between two looks whether rank 0 has chosen: ever longer

_opens: Counter[str] = Counter()  # by model; every rank opens its handles in the same order
_names_taken: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Identity:
    replica: str
    rank: int
    world_size: int
    nonce: str | None  # of this incarnation, if all ranks have been told the same


def identify(
    model: str,
    replica: str | None,
    rank: int | None,
    world_size: int | None,
    *,
    timeout_s: float,
) -> Identity:
    """Fill in what is None: from the process group, else torchrun's environment, else 0 of 1.

    With a process group that has these ranks, its rank 0 chooses for all (through the group's
    store: no collective, and nothing is pickled). Collective in that case.

    Raises:
        UsageError: An impossible rank, or several processes that nothing gives a common name.
        DeadlineExceeded: Rank 0 of the process group did not come.
        BackendError: The store of the process group failed.
    """
    has_group = dist.is_available() and dist.is_initialized()
    group = (dist.get_rank(), dist.get_world_size()) if has_group else None
    launched = _launched(is_needed=group is None and None in (rank, world_size))
    default_rank, default_size = group or launched
    rank = default_rank if rank is None else rank
    world_size = default_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}: expected 0 <= rank < world_size; pass both")
    if world_size == 1:
        return Identity(replica or _unique_name(), rank, world_size, None)
    if group == (rank, world_size):
        replica, nonce = _shared(model, replica, rank, timeout_s)
        return Identity(replica, rank, world_size, nonce)
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") or "none"
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


def _launched(*, is_needed: bool) -> tuple[int, int]:
    """The rank and the world size of torchrun's environment."""
    found = dict[str, int]()
    for name, usual in (("RANK", 0), ("WORLD_SIZE", 1)):
        text = os.environ.get(name) or f"{usual}"
        if not text.isdecimal() and is_needed:
            raise UsageError(
                f"the environment has {name}={text!r}: expected a whole number, as torchrun sets "
                "it; unset it, or pass rank= and world_size="
            )
        found[name] = int(text) if text.isdecimal() else usual
    return (found["RANK"], found["WORLD_SIZE"])


def _unique_name() -> str:  # `UNIQUE` in shard/tally.py knows it
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _shared(model: str, replica: str | None, rank: int, timeout_s: float) -> tuple[str, str]:
    """The name and the nonce that rank 0 of the process group has chosen for all."""
    key = f"torch_ros/open/{model}/{_opens[model]}"
    store, deadline = _get_default_store(), Deadline(f"open({model!r})", timeout_s)
    if rank == 0:
        _asked(store, lambda: store.set(key, f"{secrets.token_hex(4)} {replica or _unique_name()}"))
    # `wait` of some stores does not end by Ctrl-C, and says in a RuntimeError that time is over.
    look_s = LOOK_S
    while not _asked(store, lambda: store.check([key])):
        deadline.check(
            f"rank 0 of the process group has not opened its handle; this is rank {rank}"
        )
        time.sleep(min(look_s, max(0.0, deadline.left_s())))
        look_s = min(2 * look_s, LOOK_MAX_S)
    nonce, _, name = _asked(store, lambda: store.get(key).decode()).partition(" ")
    _opens[model] += 1  # a rank that has waited in vain waits for the same one again
    if replica is not None and replica != name:
        raise UsageError(
            f"replica {replica!r} on rank {rank}, {name!r} on rank 0: all ranks of a process group "
            "open the same replica, with the same calls in the same order"
        )
    return name, nonce


def _asked(store: object, request: Callable[[], T]) -> T:
    """Raises: BackendError: The store of the process group failed."""
    try:
        return request()
    except TorchRosError:
        raise
    except Exception as error:
        raise BackendError(
            f"open: the store of the process group ({type(store).__name__}) failed: "
            f"{type(error).__name__}: {error}; look whether rank 0 still runs, or pass rank=, "
            "world_size= and replica= of another group of processes"
        ) from error
