"""Which boxes of one tensor become which boxes of another in a copy, by sizes and strides alone."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import torch

from torch_ros.boxes import Box, Offsets, common, outside

PAIRS_MAX = 4096  # of one copy; above, landing box by box gains nothing
FRAMES_MAX = 4096  # kept

Steps = list[tuple[int, int, int]]  # of a copy: size, stride at the source, stride at the target


class _Strided(NamedTuple):
    shape: Offsets
    strides: Offsets  # in elements, as the offset
    offset: int


class Frame(_Strided):  # a tuple, since it is hashed at each copy
    """Where the elements of a tensor lie in its storage."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Frame":
        return _frame(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @cached_property
    def by_stride(self) -> tuple[tuple[int, int, int], ...]:
        """Dimensions of more than one element, outermost first: stride, size, which."""
        dims = zip(self.strides, self.shape, range(len(self.shape)), strict=True)
        return tuple(sorted((dim for dim in dims if dim[1] > 1), reverse=True))

    @cached_property
    def along(self) -> dict[int, int]:
        """By stride, the dimension that has it."""
        return {stride: dim for stride, _, dim in self.by_stride}

    @cached_property
    def end(self) -> int:
        """The place after the last element."""
        return self.offset + 1 + sum((size - 1) * stride for stride, size, _ in self.by_stride)

    @cached_property
    def is_spread(self) -> bool:
        """Whether a stride of 0 shows one element in several places."""
        return any(stride == 0 for stride, _, _ in self.by_stride)

    @cached_property
    def is_regular(self) -> bool:
        """Whether no two elements share a place, and outer dimensions go around inner ones."""
        reach = 1
        for stride, size, _ in reversed(self.by_stride):
            if stride < reach:
                return False
            reach = stride * size
        return True

    def coordinates(self, place: int) -> Offsets | None:
        """Coordinates of the element that lies there; None if none does."""
        index, rest = [0] * len(self.shape), place - self.offset
        for stride, size, dim in self.by_stride:
            index[dim], rest = divmod(rest, stride)
            if not 0 <= index[dim] < size:
                return None
        return None if rest else tuple(index)


@lru_cache(FRAMES_MAX)
def _frame(shape: Offsets, strides: Offsets, offset: int) -> Frame:
    """Thousands of experts have a few frames, and what is asked of one is found out once."""
    return Frame(tuple(shape), strides, offset)


class Pair(NamedTuple):
    """A box of the source and a box of the target that a copy makes equal."""

    source: Offsets
    target: Offsets
    dims: tuple[tuple[int, int, int], ...]  # at the source, at the target, size; others have size 1
    source_sizes: Offsets
    target_sizes: Offsets

    @classmethod
    def of(cls, source: Offsets, target: Offsets, dims: Iterable[tuple[int, int, int]]) -> "Pair":
        dims = tuple(dims)
        source_sizes, target_sizes = [1] * len(source), [1] * len(target)
        for one, other, size in dims:
            source_sizes[one] = target_sizes[other] = size
        return cls(source, target, dims, tuple(source_sizes), tuple(target_sizes))


@lru_cache(FRAMES_MAX)  # experts of all layers lie alike
def pairs(source: Frame, copied: Frame, target: Frame, written: Frame) -> Sequence[Pair] | None:
    """The boxes of two tensors that a copy of a view of one to a view of the other makes equal.

    Args:
        source: The frame of a whole tensor; `copied` is that of a view of it, of `written`'s shape.
        target: The same of `written`.

    Returns:
        Boxes that are disjoint at the target; None if there are more than `PAIRS_MAX`, or if a
        view leaves its tensor.
    """
    if 0 in copied.shape:
        return []
    as_copied = [
        (size, one, other)
        for size, one, other in zip(copied.shape, copied.strides, written.strides, strict=True)
        if size > 1
    ]
    left = [(copied.offset, written.offset, as_copied)]
    found: list[Pair] = []
    while left:
        source_at, target_at, steps = left.pop()
        begin, end = source.coordinates(source_at), target.coordinates(target_at)
        if begin is None or end is None or len(left) + len(found) >= PAIRS_MAX:
            return None
        parts = list(_parts(source, begin, target, end, steps))
        if not parts:
            dims = ((source.along[one], target.along[other], size) for size, one, other in steps)
            found.append(Pair.of(begin, end, dims))
        elif steps is as_copied and len(merged := _merged(steps)) < len(steps):
            left.append((source_at, target_at, merged))
        else:
            left += [(source_at + one, target_at + other, rest) for one, other, rest in parts]
    return found


def _merged(steps: Steps) -> Steps:
    """The same elements in as few steps as there can be, outermost at the source first."""
    merged: Steps = []
    for size, source, target in sorted(steps, key=lambda step: step[1], reverse=True):
        if size > 1 and merged and merged[-1][1:] == (size * source, size * target):
            merged.append((size * merged.pop()[0], source, target))
        elif size > 1:
            merged.append((size, source, target))
    return merged


def _parts(
    source: Frame, begin: Offsets, target: Frame, end: Offsets, steps: Steps
) -> Iterator[tuple[int, int, Steps]]:
    """The same elements, a step nearer to boxes; nothing if they are one box on both sides.

    Each part says how far from here it begins, at the source and at the target.
    """
    for position, (size, one, other) in enumerate(steps):
        rest = steps[:position] + steps[position + 1 :]
        for frame, index, stride in ((source, begin, one), (target, end, other)):
            together, lap = _run(frame, index, stride, size)
            if together < size:
                yield 0, 0, _with(rest, together, one, other)
                yield together * one, together * other, _with(rest, size - together, one, other)
                return
            if lap < size:
                yield 0, 0, [*rest, (size // lap, lap * one, lap * other), (lap, one, other)]
                return
    is_box = all(len({step[side] for step in steps}) == len(steps) for side in (1, 2))
    if not is_box:  # overlapping windows: two steps along one dimension
        size, one, other = steps[-1]
        yield 0, 0, steps[:-1]
        yield one, other, _with(steps[:-1], size - 1, one, other)


def _with(steps: Steps, size: int, one: int, other: int) -> Steps:
    return [*steps, (size, one, other)] if size > 1 else steps


def _run(frame: Frame, index: Offsets, step: int, size: int) -> tuple[int, int]:
    """How many of `size` elements to keep together, and how many of these are one lap.

    A lap goes once along a dimension; both are `size` if the step stays within one.
    """
    if (dim := frame.along.get(step, -1)) >= 0 and index[dim] + size <= frame.shape[dim]:
        return size, size
    stride, extent, dim = next(
        (found for found in frame.by_stride if 0 < found[0] <= step and step % found[0] == 0),
        (0, 0, 0),
    )
    if not stride:  # a diagonal, or one element again and again
        return 1, 1
    jump = step // stride
    if jump == 1 and index[dim]:
        return extent - index[dim], 1
    lap = extent // jump
    if extent % jump or index[dim] >= jump or not 1 < lap < size:
        return 1, 1
    return size // lap * lap, lap


def uncovered(shape: Offsets, boxes: Iterable[Box]) -> int:
    """How many elements of a tensor are in none of these boxes, which may overlap."""
    left: list[Box] = [((0,) * len(shape), shape)] if prod(shape) else []
    for box in sorted(set(boxes)):  # in order, so that few parts are left at any time
        hit = [(part, common(part, box)) for part in left]
        left = [
            rest for part, hole in hit for rest in ([part] if hole is None else outside(part, hole))
        ]
    return sum(prod(sizes) for _, sizes in left)
