"""The weights that a `WeightSource` of vLLM has on one rank, whichever release it is of.

Up to 0.32 a source is iterated; from 0.33 on it has modes, `iter_full` and `iter_local`, of which
it implements one at least. Imports nothing of vLLM.
"""

from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import Any

import torch

import torch_ros
from torch_ros.errors import UsageError

Named = Iterator[tuple[str, torch.Tensor]]


def tensors_of(source: Any, rank: int) -> Named:
    """The tensors to publish on this rank. Collective where the source gathers.

    Together the ranks have each of them. Of full tensors that several ranks have, one rank keeps
    its own; pieces are published where they lie.
    """
    if not hasattr(source, "iter_full"):
        return _iterated(source, rank)
    if source.implements_iter_local():
        return _pieces(source, rank)
    if source.implements_iter_full():
        return _full(source, rank)
    raise UsageError(
        f"{type(source).__name__} has neither iter_full nor iter_local: implement one of them"
    )


def _iterated(source: Any, rank: int) -> Named:
    is_mine = rank == 0 or source.held_names() is not None
    for name, tensor in source:  # gathers on all ranks
        if is_mine and tensor is not None:
            yield name, tensor


def _full(source: Any, rank: int) -> Named:
    first = {meta.name: (meta.owners or (0,))[0] for meta in source.metadata}
    for name, tensor in source.iter_full():
        if first[name] == rank:
            yield name, tensor


def _pieces(source: Any, rank: int) -> Named:
    metas = {meta.name: meta for meta in source.metadata}
    for name, piece in source.iter_local():
        meta = metas[name]
        offsets, sizes = _box(meta, rank)
        if tuple(piece.shape) != sizes:
            raise UsageError(
                f"{name!r}: iter_local gives {list(piece.shape)} on rank {rank}, expected "
                f"{list(sizes)} by its metadata"
            )
        boxes = {offsets: piece} if prod(sizes) else {}
        yield name, torch_ros.Chunked(meta.shape, piece.dtype, boxes)


def _box(meta: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a rank's piece: each mesh axis, the outermost first, cuts as `chunk`."""
    offsets, sizes = [0] * len(meta.shape), list(meta.shape)
    if meta.owners is None or meta.placements is None:
        return tuple(offsets), tuple(sizes)
    place = meta.owners.index(rank)
    for axis, placement in enumerate(meta.placements):
        below = prod(islice(meta.mesh_shape, axis + 1, None))
        at = place // below % meta.mesh_shape[axis]
        if (dim := getattr(placement, "dim", None)) is not None:
            each = -(-sizes[dim] // meta.mesh_shape[axis])
            begin = min(at * each, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + begin, min(each, sizes[dim] - begin)
    return tuple(offsets), tuple(sizes)
