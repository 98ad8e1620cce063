"""The handles of processes that do not bring their own."""

from __future__ import annotations

import os
import threading
from typing import Literal

import torch.distributed as dist

from torch_ros.errors import UsageError
from torch_ros.handle import ShardHandle, open  # torch_ros.open

MODEL_VARIABLE = "TORCH_ROS_MODEL"
DEFAULT_MODEL = "default"

Purpose = Literal["save", "load"]

_lock = threading.Lock()
_handles: dict[Purpose, tuple[int, ShardHandle]] = {}  # with the process that opened it


def default_handle(purpose: Purpose) -> ShardHandle:
    """This process's own handle for saving, or for loading; opened at the first use.

    Two, so that a trainer that resumes with dcp.load goes on serving what it loaded until it
    unpublishes that, and publishes beside it. Collective at the first use. Closed at exit.

    The environment names the store and the model: TORCH_ROS_ENDPOINT (else "local") and
    TORCH_ROS_MODEL (else "default"). The ranks are those of the default process group; without
    one, this process is alone, as it is for dcp.
    """
    if purpose not in ("save", "load"):
        raise UsageError(f"default_handle({purpose!r}): expected 'save' or 'load'")
    with _lock:
        pid, handle = _handles.get(purpose, (0, None))
        if handle is None or pid != os.getpid() or not handle.is_usable:
            alone = not (dist.is_available() and dist.is_initialized())
            handle = open(
                os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
                rank=0 if alone else None,
                world_size=1 if alone else None,
            )
            _handles[purpose] = (os.getpid(), handle)
        return handle


def check_group(handle: ShardHandle, rank: int | None, size: int | None) -> None:
    """Raises: UsageError: dcp was called on another process group than the handle's ranks."""
    if (rank is not None and rank != handle.rank) or (
        size is not None and size != handle.world_size
    ):
        raise UsageError(
            f"this call's process group has this process as rank {handle.rank if rank is None else rank}"
            f"{'' if size is None else f' of {size}'}, the handle is rank {handle.rank} of "
            f"{handle.world_size}; call dcp on the group that the handle was opened for "
            "(and without no_dist), or open a handle with that rank and world_size"
        )
