"""The largest absolute values of tensors, of which other ranks have parts."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ros.errors import TorchRosError, UsageError
from torch_ros.weights.chunked import Chunked
from torch_ros.weights.local import LocalTensor

Split = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and those of its dimensions over which tensors are split."""


def largest_of(box: torch.Tensor) -> torch.Tensor:
    """One float32, where the box is; NaN if the box has one."""
    # Of a box with gaps, aminmax makes a copy.
    ends = torch.aminmax(box) if box.is_contiguous() else (box.amin(), box.amax())
    return torch.stack(ends).abs().amax().float()


def largest_of_all(
    named_tensors: Mapping[str, torch.Tensor],
    taken: Callable[[], Sequence[LocalTensor]],
    group: dist.ProcessGroup | None,
) -> Mapping[str, float]:
    """Those of whole tensors, by name. Waits for a GPU, and for the ranks that have parts.

    All of these raise if one does: without a group, those with which it shares a mesh.

    Args:
        named_tensors: Of which some are taken.
        taken: The parts of these that this rank has.
        group: Gathers all names and values of these ranks, too.

    Raises: UsageError: There is no group, and a `Chunked` of which this rank has only a part; or
        another rank has failed.
    """
    together: dict[Split | torch.device, list[LocalTensor]] = {}
    here: dict[Split | torch.device, torch.Tensor] = {}
    failed: Exception | None = None
    try:
        for tensor in taken():
            if group is None:
                _require_all(tensor, named_tensors[tensor.fqn])
            split = _split(named_tensors[tensor.fqn])
            together.setdefault(split or _device(tensor), []).append(tensor)
        for where, tensors in together.items():
            device = where if isinstance(where, torch.device) else where[0].device_type
            here[where] = _stacked(tensors, torch.device(device))
    except Exception as error:  # noqa: BLE001  # raised below, on all ranks
        failed = error
    _raise_together(failed, named_tensors, group)
    found: dict[str, float] = {}
    for where, largest in here.items():
        if not isinstance(where, torch.device):
            _most(largest, where)
        names = (tensor.fqn for tensor in together[where])
        found |= zip(names, largest.tolist(), strict=True)
    return found if group is None else _gathered(found, group)


def _raise_together(
    failed: Exception | None,
    named_tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Raise if this rank, or another that it would wait for, has failed."""
    first: Exception | None = None
    if group is not None:
        is_ours = failed is None or isinstance(failed, TorchRosError)
        told = failed if is_ours else UsageError(f"another rank has failed: {failed!r}")
        everywhere: list[Exception | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, told, group)
        first = next(filter(None, everywhere), None)
    elif isinstance(named_tensors, Mapping):
        splits = dict.fromkeys(filter(None, map(_split, named_tensors.values())))
        for split in splits:  # of all, so that it depends on no pattern of a rank
            is_failing, device = (failed or first) is not None, split[0].device_type
            flag = torch.full((), float(is_failing), dtype=torch.float32, device=device)
            _most(flag, split)
            if flag.item() and first is None:
                first = UsageError(
                    "another rank could not find the largest elements of its shards: its own "
                    "error says why; expected all ranks of a mesh to find theirs"
                )
    if (error := failed or first) is not None:
        raise error


def _most(values: torch.Tensor, split: Split) -> None:
    """Make each the largest that a rank of the mesh has; a rank outside of it has its own."""
    mesh, dims = split
    for dim in dims if mesh.get_coordinate() is not None else ():
        dist.all_reduce(values, dist.ReduceOp.MAX, mesh.get_group(dim))


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
