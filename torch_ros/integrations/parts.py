"""A version's tensors for a loader that takes them one by one, some of them in memory at a time."""

from collections.abc import Iterator, Sequence

import torch

import torch_ros


def parts(contents: torch_ros.Contents, size_bytes: int) -> Iterator[list[str]]:
    """The names in order, as many at a time as fit into so many bytes; at least one."""
    part: list[str] = []
    left = size_bytes
    for fqn, (dtype, shape) in contents.tensors.items():
        size = shape.numel() * dtype.itemsize
        if part and size > left:
            yield part
            part, left = [], size_bytes
        part.append(fqn)
        left -= size
    if part:
        yield part


def read_part(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    part: Sequence[str],
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """Read these into new memory: a loader may keep tensors until it has its last, or longer.

    Collective, as `ShardHandle.read` is, and raises as that does.
    """
    tensors = {}
    for fqn in part:
        dtype, shape = contents.tensors[fqn]
        tensors[fqn] = torch.empty(shape, dtype=dtype, device=device)
    handle.read(contents.version, tensors)
    return tensors
