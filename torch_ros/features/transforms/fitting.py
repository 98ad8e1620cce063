"""The largest absolute values of tensors, of which other ranks have parts."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ros.errors import UsageError
from torch_ros.weights.chunked import Chunked
from torch_ros.weights.local import LocalTensor, local_chunks

Split = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions over which tensors are split."""


def largest_of(box: torch.Tensor) -> torch.Tensor:
    """One float32, where the box is; NaN if the box has one."""
    return torch.stack(torch.aminmax(box)).abs().amax().float()


def largest_of_all(
    named_tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> Mapping[str, float]:
    """Those of whole tensors, by name. Waits for a GPU once, and for the ranks that have parts.

    Args:
        group: Gathers all names and values of these ranks, too.

    Raises: UsageError: There is no group, and a `Chunked` of which this rank has only a part.
    """
    together: dict[Split | torch.device, list[LocalTensor]] = {}
    for tensor in local_chunks(named_tensors):
        if group is None:
            _require_all(tensor, named_tensors[tensor.fqn])
        split = _split(named_tensors[tensor.fqn])
        together.setdefault(split or _device(tensor), []).append(tensor)
    found: dict[str, float] = {}
    for where, tensors in together.items():
        if isinstance(where, torch.device):
            largest = _stacked(tensors, where)
        else:
            mesh, dims = where
            largest = _stacked(tensors, torch.device(mesh.device_type))
            for dim in dims if mesh.get_coordinate() is not None else ():
                dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group(dim))
        found |= zip((tensor.fqn for tensor in tensors), largest.tolist(), strict=True)
    return found if group is None else _gathered(found, group)


def _require_all(local: LocalTensor, tensor: torch.Tensor) -> None:
    here = sum(chunk.tensor.numel() for chunk in local.chunks)
    if isinstance(tensor, Chunked) and here < math.prod(local.shape):
        raise UsageError(
            f"{local.fqn!r} is a Chunked of which this rank has {here:,} of "
            f"{math.prod(local.shape):,} elements: expected a group to find the largest of all; "
            "pass group=, on all ranks"
        )


def _split(tensor: torch.Tensor) -> Split | None:
    if not isinstance(tensor, DTensor):
        return None
    dims = [dim for dim, each in enumerate(tensor.placements) if not each.is_replicate()]
    return (tensor.device_mesh, tuple(dims)) if dims else None


def _device(tensor: LocalTensor) -> torch.device:
    return tensor.chunks[0].tensor.device if tensor.chunks else torch.device("cpu")


def _stacked(tensors: Sequence[LocalTensor], device: torch.device) -> torch.Tensor:
    """The largest elements that this rank has of each."""
    nothing = torch.zeros((), dtype=torch.float32, device=device)
    each = (
        [nothing, *(largest_of(chunk.tensor).to(device) for chunk in tensor.chunks)]
        for tensor in tensors
    )
    return torch.stack([torch.stack(some).amax() for some in each])


def _gathered(found: Mapping[str, float], group: dist.ProcessGroup) -> Mapping[str, float]:
    everywhere: list[Mapping[str, float]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, found, group)
    names = sorted({fqn for some in everywhere for fqn in some})
    return {fqn: max(some.get(fqn, 0.0) for some in everywhere) for fqn in names}
