"""Turns the tensors of a process into the chunks it offers or wants. Views, never copies."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeGuard

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ros.errors import UsageError
from torch_ros.weights.chunked import Chunked, require_fit
from torch_ros.weights.columns import Ints
from torch_ros.weights.manifest import (
    DIMENSIONS_MAX,
    OBJECT,
    ChunkRecord,
    Layout,
    TensorRecord,
    dtype_name,
)

# Equal in width to what is copied: torch has no copy kernels for some dtypes. It has no 16-byte
# integer, but copies complex numbers bit by bit.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """A chunk and the memory that holds it: `tensor` is a detached view of the user's."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The part of one tensor that this process has; no chunk if it has none."""

    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # global
    chunks: tuple[LocalChunk, ...]  # none is empty
    spread: bool  # equal on all ranks by construction


def local_chunks(named_tensors: Mapping[str, torch.Tensor]) -> list[LocalTensor]:
    """The part of each tensor that this process holds, in the order given.

    A DTensor stands for its local shard, which a rank outside its mesh does not have, a `Chunked`
    for its boxes. Any other tensor is whole. Only a DTensor is sure to be equal on all ranks.

    The views share the memory of `named_tensors` and keep it allocated. A tensor whose elements
    share memory (`expand`) can be published; `plan` refuses it as a target.

    Raises: UsageError: No mapping, a key that is not a string, a value that is not a tensor, or a
        tensor that is not plain bytes in memory at regular strides; boxes of a `Chunked` that do
        not fit together. Names the fqn and the box.
    """
    if not isinstance(named_tensors, Mapping):
        raise UsageError(
            f"tensors: found a {type(named_tensors).__name__}, expected a mapping of names to "
            "tensors; pass a state_dict()"
        )
    require_memory()
    with torch.no_grad():  # `to_local` then returns the local tensor itself
        return [_local_tensor(fqn, tensor) for fqn, tensor in named_tensors.items()]


def require_memory() -> None:
    """Raises: UsageError: torch makes tensors without memory here, buffers of ours included."""
    made = type(torch.empty(0, dtype=torch.uint8, device="cpu"))
    if made is not torch.Tensor:
        raise UsageError(
            f"torch makes a {made.__name__} of every tensor here, which has no memory to publish "
            "or read into; make this call outside of FakeTensorMode, with real tensors"
        )


def build(
    tensors: Sequence[LocalTensor],
    objects: Mapping[str, torch.Tensor],
    *,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> tuple[Layout, list[torch.Tensor]]:
    """The layout of a shard, and the memory of each of its chunks, in the same order.

    Sorted by fqn, then offsets, so the order of the arguments does not matter.

    Args:
        tensors: As `local_chunks` returned them.
        objects: Pickled objects by fqn, each a contiguous 1-d uint8 tensor.
        paths: Where the state dict had a tensor or object before it was flattened, by fqn.

    Raises: UsageError: A tensor and an object have the same fqn.
    """
    everything = {tensor.fqn: tensor for tensor in tensors}
    if both := everything.keys() & objects.keys():
        raise UsageError(f"{min(both)!r} is both a tensor and an object; rename one of them")
    everything |= {fqn: _object(fqn, pickled) for fqn, pickled in objects.items()}
    records, chunks, memory = [], [], []
    for index, fqn in enumerate(sorted(everything)):
        tensor = everything[fqn]
        dtype = OBJECT if fqn in objects else dtype_name(tensor.dtype)
        records.append(TensorRecord(fqn, dtype, tensor.shape, (paths or {}).get(fqn)))
        for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
            sizes, strides = tuple(chunk.tensor.shape), chunk.tensor.stride()
            chunks.append(ChunkRecord(index, chunk.offsets, sizes, strides, tensor.spread))
            memory.append(chunk.tensor)
    return Layout(tuple(records), tuple(chunks)), memory


def packed(layout: Layout) -> Layout:
    """The same chunks, each contiguous in memory of its own."""
    chunks = []
    for chunk in layout.chunks:
        strides = tuple(math.prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes)))
        chunks.append(msgspec.structs.replace(chunk, strides=strides))
    return Layout(layout.tensors, tuple(chunks))


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first element, and bytes from there to the end of the last; 0 if empty."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), reach * tensor.element_size()


def copy_bits(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy bits between two tensors of one shape and dtype; torch need not support the dtype."""
    word = WORDS[target.element_size()]
    target.view(word).copy_(source.view(word), non_blocking=non_blocking)


def _local_tensor(fqn: str, tensor: torch.Tensor) -> LocalTensor:
    """The chunks of one tensor of the user's that are here. Raises as `local_chunks`."""
    if not isinstance(fqn, str):
        raise UsageError(f"key {fqn!r} is not a string; fqns are")
    if not isinstance(tensor, torch.Tensor):
        advice = ""
        if isinstance(tensor, Mapping):
            advice = "; flatten it, with keys joined by dots as torch.distributed.checkpoint does"
        raise UsageError(f"{fqn!r} is a {type(tensor).__name__}, not a tensor{advice}")
    if tensor.ndim > DIMENSIONS_MAX:
        raise UsageError(
            f"{fqn!r} has {tensor.ndim} dimensions: expected at most {DIMENSIONS_MAX}; reshape it"
        )
    _require_utf8(fqn)
    if isinstance(tensor, DTensor):
        chunks = tuple(_shard_chunks(fqn, tensor))
    elif isinstance(tensor, Chunked):
        chunks = tuple(_boxes(fqn, tensor))
    else:
        readable = _readable(f"tensor {fqn!r}", tensor)
        chunks = (LocalChunk((0,) * readable.ndim, readable.detach()),)
    return LocalTensor(
        fqn,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(chunk for chunk in chunks if chunk.tensor.numel()),
        spread=isinstance(tensor, DTensor),
    )


def _require_utf8(fqn: str) -> None:
    try:
        fqn.encode()
    except UnicodeEncodeError as error:  # a manifest is UTF-8
        raise UsageError(f"name {fqn!r}: expected text that UTF-8 can write; {error}") from error


def _object(fqn: str, pickled: torch.Tensor) -> LocalTensor:
    _require_utf8(fqn)
    chunks = (LocalChunk((0,), pickled),) if pickled.numel() else ()
    return LocalTensor(fqn, torch.uint8, tuple(pickled.shape), chunks, spread=False)


def _shard_chunks(fqn: str, tensor: DTensor) -> Iterator[LocalChunk]:
    """The chunks of a DTensor that this rank has: none, if it is outside of the mesh."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{fqn!r} is a DTensor with a pending reduction {tensor.placements}; "
            "redistribute it to Shard or Replicate first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return
    if is_strided(tensor):
        yield from _strided_chunks(fqn, tensor)
        return
    for chunk in tensor.__create_chunk_list__():  # type: ignore[no-untyped-call]
        index = MetadataIndex(fqn, chunk.offsets)
        local = tensor.__get_tensor_shard__(index)  # type: ignore[no-untyped-call]
        _agree(fqn, tuple(chunk.sizes), local)
        yield LocalChunk(tuple(chunk.offsets), _readable(f"tensor {fqn!r}", local).detach())


def is_strided(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor whose local tensor may be several separate parts of the whole."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, _StridedShard) for placement in tensor.placements
    )


def _strided_chunks(fqn: str, tensor: DTensor) -> Iterator[LocalChunk]:
    """The chunks of a strided shard, for which torch gives one offset: it may be several parts."""
    held = [_held(tensor, dim) for dim in range(tensor.ndim)]
    local = tensor.to_local()
    _agree(fqn, tuple(map(len, held)), local)
    local = _readable(f"tensor {fqn!r}", local).detach()
    for parts in product(*map(_parts, held)):
        chunk = local
        for dim, (_, start, size) in enumerate(parts):
            chunk = chunk.narrow(dim, start, size)
        yield LocalChunk(tuple(offset for offset, _, _ in parts), chunk)


def _held(tensor: DTensor, dim: int) -> Ints:
    """The global indices along `dim` that the local tensor has, in its order."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    indices = torch.arange(tensor.shape[dim], device="cpu")
    for mesh_dim, placement in enumerate(tensor.placements):
        # The same placements, of a tensor with this one dimension.
        flat: Shard | _StridedShard
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            flat = _StridedShard(0, split_factor=placement.split_factor)
        elif isinstance(placement, Shard) and placement.dim == dim:
            flat = Shard(0)
        else:
            continue
        count = tensor.device_mesh.size(mesh_dim)
        split = flat._split_tensor  # noqa: SLF001 (what distribute_tensor itself uses)
        shards, _ = split(indices, count, with_padding=False, contiguous=False)
        indices = shards[coordinate[mesh_dim]]
    return indices.numpy()


def _parts(indices: Ints) -> list[tuple[int, int, int]]:
    """Maximal runs of consecutive indices: the first index, its position, how many."""
    starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    sizes = np.diff(starts, append=len(indices))
    return list(zip(indices[starts].tolist(), starts.tolist(), sizes.tolist(), strict=True))


def _agree(fqn: str, sizes: tuple[int, ...], local: torch.Tensor) -> None:
    """Check a local tensor against its placements: DTensor.from_local believes what it is told."""
    if tuple(local.shape) != sizes:
        raise UsageError(
            f"the local tensor of DTensor {fqn!r} has shape {list(local.shape)}, but its "
            f"placements make that {list(sizes)}; pass shape= and stride= to from_local"
        )


def _boxes(fqn: str, tensor: Chunked) -> Iterator[LocalChunk]:
    for at, box in tensor.chunks.items():
        _readable(f"tensor {fqn!r}: the box at {list(at)}", box)  # a lazy one has no shape to fit
    require_fit(fqn, tensor)
    yield from (LocalChunk(at, box.detach()) for at, box in tensor.chunks.items())


def _readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, if its elements are bytes in memory at regular strides."""
    if reason := next(_obstacles(tensor), None):
        raise UsageError(f"{name} {reason}")
    return tensor


def _obstacles(tensor: torch.Tensor) -> Iterator[str]:
    """Take only the first: a later check may fail on a tensor that an earlier one refused."""
    if is_lazy(tensor):
        yield "is not initialised yet; run the lazy module once"
    if tensor.layout is not torch.strided or tensor.is_nested:
        yield f"is not dense (nested, or layout {tensor.layout}); pass its parts as tensors"
    if tensor.is_quantized:
        yield "is quantized; pass its int_repr() and its scales as tensors"
    if tensor.is_conj() or tensor.is_neg():
        yield "is a lazy conjugate or negative; call .resolve_conj().resolve_neg() on it"
    if is_traceable_wrapper_subclass(tensor):
        yield f"is a {type(tensor).__name__}, which wraps other tensors; pass those"
    try:
        has_memory = not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:
        yield (
            f"is a {type(tensor).__name__} that stands for others within torch.func (vmap, grad), "
            "or a trace, and has no memory; pass the tensor that was given to it, outside of it"
        )
        return
    if tensor.is_meta or not has_memory:
        advice = "materialise it first"
        if isinstance(tensor, torch.nn.Parameter) and not tensor.is_meta:
            advice = (
                "FSDP2 frees it after each forward, and keeps the shards: register the module "
                "itself, or its state_dict()"
            )
        yield f"is a {type(tensor).__name__} without memory of its own; {advice}"
