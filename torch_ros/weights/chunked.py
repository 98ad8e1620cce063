"""Chunked: a tensor of which a process has certain boxes, each in memory of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_ros.errors import UsageError

Offsets = tuple[int, ...]


class Chunked(torch.Tensor):
    """A tensor of which this process has these boxes, each in memory of its own.

    Stands for a tensor wherever torch_ros and torch.distributed.checkpoint take one: in
    `register`, `publish_copy` and state dicts. A fused or interleaved parameter so goes by the
    names of a checkpoint, and is published from, or read into, the memory that it has:

        heads = fused.view(8, 3, 64, hidden)  # q, k and v of each head, side by side
        boxes = {(64 * head, 0): heads[head, 0] for head in range(8)}
        handle.register({"q_proj.weight": Chunked((512, hidden), fused.dtype, boxes)})

    Each rank has the boxes that it has, perhaps none: the ranks of a replica together must have
    every element. If several have one, the lowest rank's is read. Nothing is computed with it, and
    nothing is copied.

    `shape` is that of the whole tensor, `dtype` that of each box. `chunks` has the memory of each
    box by the offsets at which it begins in the whole tensor; the memory's shape is that of the
    box. Any strides, any device: a view of anything. The boxes must be disjoint, and so must their
    memory. Kept allocated, and not modified but by a read.

    Raises:
        UsageError: No such shape or dtype; offsets that are not whole numbers, or what is not a
            tensor. That boxes fit together is checked where the tensor's name is known.
    """

    chunks: Mapping[Offsets, torch.Tensor]

    # Operations come to the dispatch as they are.
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001  # as DTensor

    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, chunks: Mapping[Offsets, torch.Tensor]
    ) -> Self:
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"Chunked: dtype={dtype!r}: expected a torch.dtype")
        if not isinstance(chunks, Mapping):
            raise UsageError(f"Chunked: found a {type(chunks).__name__}, expected {_EXPECTED}")
        for offsets, box in chunks.items():
            if not _are_whole(offsets) or not isinstance(box, torch.Tensor):
                found = f"{offsets!r}: {type(box).__name__}"
                raise UsageError(f"Chunked: found {found} among its boxes, expected {_EXPECTED}")
        if not _are_whole(shape):
            raise UsageError(f"Chunked: shape={shape!r}: expected whole numbers")
        device = next((box.device for box in chunks.values()), torch.device("cpu"))
        try:
            made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  # as DTensor
                cls, torch.Size(shape), dtype=dtype, device=device
            )
        except (RuntimeError, TypeError) as error:  # more elements than can be counted
            raise UsageError(f"Chunked: no tensor can have shape={shape!r}: {error}") from error
        made.chunks = MappingProxyType({tuple(at): box for at, box in chunks.items()})
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: object) -> NoReturn:
        raise UsageError(
            f"{func} of a Chunked: it only says where the boxes of a tensor are; use its `chunks`"
        )

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise UsageError(f"{self} cannot be pickled: its boxes are this process's memory")

    def __repr__(self) -> str:  # type: ignore[override]  # torch has an argument of its own
        boxes = [f"{list(at)} + {list(box.shape)}" for at, box in self.chunks.items()]
        return f"Chunked({list(self.shape)}, {self.dtype}, boxes: {', '.join(boxes) or 'none'})"

    # The protocol by which torch.distributed.checkpoint saves and loads what has several chunks.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), box.size()) for at, box in self.chunks.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.chunks[tuple(index.offset or ())].detach()


def require_fit(fqn: str, tensor: Chunked) -> None:
    """Check that the boxes of a tensor are parts of it, and apart from each other.

    Raises: UsageError: They are not; names the tensor and the box.
    """
    for at, box in tensor.chunks.items():
        if box.dtype != tensor.dtype:
            reason = f"is {box.dtype}: expected {tensor.dtype}; cast it, or give it another name"
            raise UsageError(f"tensor {fqn!r}: {_named(at, box)} {reason}")
        ends = [start + size for start, size in zip(at, box.shape, strict=False)]
        is_of_rank = len(at) == box.ndim == tensor.ndim
        if not is_of_rank or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            reason = f"is not inside shape {list(tensor.shape)}; offsets count its elements"
            raise UsageError(f"tensor {fqn!r}: {_named(at, box)} {reason}")
    boxes = [(at, box) for at, box in tensor.chunks.items() if box.numel()]
    for one, other in overlapping([(at, tuple(box.shape)) for at, box in boxes]):
        both = f"{_named(*boxes[one])} and {_named(*boxes[other])}"
        raise UsageError(f"tensor {fqn!r}: {both} overlap; give each element once")
    for one, other in _shared(boxes):
        both = f"{_named(*boxes[one])} and {_named(*boxes[other])}"
        raise UsageError(f"tensor {fqn!r}: {both} share memory; clone one of them")


def _named(at: Offsets, box: torch.Tensor) -> str:
    return f"the box of shape {list(box.shape)} at {list(at)}"


def overlapping(boxes: Sequence[tuple[Offsets, Offsets]]) -> Iterator[tuple[int, int]]:
    """Pairs of boxes, by number, that have an element of the whole tensor in common.

    Args:
        boxes: Offsets and sizes; no two are the same, and none is empty.
    """
    dims = range(len(boxes[0][0]) if boxes else 0)
    # Sorted by the dimension that tells most of them apart, for few pairs to be looked at.
    told = max(dims, key=lambda dim: len({at[dim] for at, _ in boxes}), default=None)
    if told is None:  # no box; or a single one, without dimensions
        return
    spans = [[(at[dim], at[dim] + sizes[dim]) for dim in dims] for at, sizes in boxes]
    for one, other in _meeting([span[told] for span in spans]):
        both = zip(spans[one], spans[other], strict=True)
        if all(a < end and start < b for (a, b), (start, end) in both):
            yield one, other


def _shared(boxes: Sequence[tuple[Offsets, torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Pairs of boxes, by number, that have an element of memory in common."""
    memory = [np.asarray(_Memory(box)) for _, box in boxes]
    for one, other in _meeting([byte_bounds(array) for array in memory]):
        is_one_space = boxes[one][1].device == boxes[other][1].device
        if is_one_space and np.shares_memory(memory[one], memory[other]):
            yield one, other


class _Memory:
    """The place of a tensor on any device, for numpy to compute with: nothing is read."""

    def __init__(self, box: torch.Tensor) -> None:
        item_bytes = box.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(box.shape),
            "strides": tuple(stride * item_bytes for stride in box.stride()),
            "typestr": f"|V{item_bytes}",
            "data": (box.data_ptr(), True),
        }


def _meeting(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pairs of spans that overlap, by number."""
    order = sorted(range(len(spans)), key=spans.__getitem__)
    for place, one in enumerate(order):
        for other in order[place + 1 :]:
            if spans[other][0] >= spans[one][1]:
                break
            yield one, other


_EXPECTED = "a mapping of offsets, a tuple of whole numbers each, to tensors"


def _are_whole(numbers: object) -> bool:
    return isinstance(numbers, Sequence) and all(
        type(number) is int and number >= 0 for number in numbers
    )
