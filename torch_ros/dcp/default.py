"""The handles of processes that do not bring their own."""

import os
import threading
from typing import Literal

import torch.distributed as dist

from torch_ros import arguments, environment
from torch_ros.errors import UsageError
from torch_ros.face.handle import ShardHandle
from torch_ros.face.opening import open  # noqa: A004

Purpose = Literal["save", "load"]

_lock = threading.Lock()
_handles: dict[Purpose, tuple[int, ShardHandle]] = {}  # with the process that opened it


def default_handle(purpose: Purpose) -> ShardHandle:
    """This process's own handle for saving, or for loading; opened at the first use.

    Two, so that a trainer that resumes with dcp.load goes on serving what it loaded until it
    unpublishes that, and publishes beside it. Collective at the first use, in the same order on
    all ranks if both are used. Closed at exit; after a `close` the next use opens another one.
    One that was fenced goes on saying so until you close it, on all ranks alike.

    The environment names the store and the model: TORCH_ROS_ENDPOINT (else "local") and
    TORCH_ROS_MODEL (else "default"). TORCH_ROS_REPLICA names the replica, with "-save" or
    "-load" behind it, since both may be open. The ranks are those of the default process group;
    without one, this process is alone, as it is for dcp.
    """
    if purpose not in ("save", "load"):
        raise UsageError(f"default_handle({purpose!r}): expected 'save' or 'load'")
    with _lock:
        pid, handle = _handles.get(purpose, (0, None))
        if handle is None or pid != os.getpid() or handle.is_closed:
            alone = not (dist.is_available() and dist.is_initialized())
            name = environment.value(environment.REPLICA)
            handle = open(
                environment.value(environment.MODEL) or environment.DEFAULT_MODEL,
                replica=f"{name}-{purpose}" if name else None,
                rank=0 if alone else None,
                world_size=1 if alone else None,
            )
            _handles[purpose] = (os.getpid(), handle)
        return handle


def require_handle(given: object) -> None:
    """Raises: UsageError: It is neither a handle nor None."""
    arguments.optional(arguments.instance(ShardHandle))("handle", given)


def check_group(handle: ShardHandle, rank: int | None, size: int | None) -> None:
    """Raises: UsageError: dcp was called on another process group than the handle's ranks."""
    expected = (handle.rank, handle.world_size)
    found = (handle.rank if rank is None else rank, handle.world_size if size is None else size)
    if found != expected:
        raise UsageError(
            f"dcp was called on a process group in which this process is rank {found[0]} of "
            f"{found[1]}, its handle is rank {expected[0]} of {expected[1]}; call dcp on the group "
            "that the handle was opened for (and without no_dist), or open a handle with that "
            "rank and world_size"
        )
