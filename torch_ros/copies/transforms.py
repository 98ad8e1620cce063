"""Transforms: the tensors of a published copy, made of those that it is a copy of."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, Protocol, Self, runtime_checkable

import torch

from torch_ros import arguments
from torch_ros.errors import TorchRosError, UsageError
from torch_ros.weights.local import LocalChunk, LocalTensor, copy_bits

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes."""


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that a transform makes of another.

    Args:
        dtype: The dtype of its elements.
        per: The sizes of the box of the other tensor for which it has one element. All ones: it has
            the other's shape. (128, 128): one for each box of that size, and for the smaller ones
            at the ends.
        is_single: It has one element, and the shape (1,). Each box that is made has it, so that
            `fill` writes the same for all. With the whole shape as `per` there is one such box: a
            shard is refused.
    """

    dtype: torch.dtype
    per: Shape
    is_single: bool = False

    def __post_init__(self) -> None:
        arguments.instance(torch.dtype)("MadeTensor: dtype", self.dtype)
        for size in self.per:
            arguments.whole(1, 1 << 62)("MadeTensor: per", size)

    @property
    def is_elementwise(self) -> bool:
        """Whether it has the other's shape."""
        return not self.is_single and max(self.per, default=1) == 1

    def made_of(self, offsets: Shape, sizes: Shape) -> Box:
        """The box that is made of a box which cuts none of `per`."""
        if self.is_single:
            return (0,), (1,)
        if self.is_elementwise:
            return offsets, sizes
        bounds = zip(offsets, sizes, self.per, strict=True)
        edges = [(start // per, -(-(start + size) // per)) for start, size, per in bounds]
        return tuple(start for start, _ in edges), tuple(end - start for start, end in edges)


@lru_cache(64)  # thousands of tensors are made of as many
def elementwise(dtype: torch.dtype, dims: int) -> MadeTensor:
    return MadeTensor(dtype, (1,) * dims)


@runtime_checkable
class Transform(Protocol):
    """Says which tensors a copy has in the place of one, and makes them.

    The ranks of a replica are given equal ones: before anything is given up they compare the
    `repr`, which therefore says all that matters, as that of a frozen dataclass does.
    """

    def outputs(self, fqn: str, dtype: torch.dtype, shape: Shape) -> Mapping[str, MadeTensor]:
        """The tensors to make of one, by their names.

        Args:
            shape: The whole tensor's, on each rank, however it is sharded.

        Returns:
            Depends on the arguments alone. Nothing: the tensor is left to the next transform, and
            by the last one copied as it is.
        """

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Write the parts of the outputs that are made of one box of the tensor.

        Called for one box after another, on the device of the tensor. An error on one rank ends
        the publication on all.

        Args:
            box: The published tensor's own memory: read, never written. Cuts no box that an element
                of an output stands for.
            made: The part of each output.
        """


SAID = (TorchRosError, MemoryError, torch.OutOfMemoryError)  # errors that say enough


class _AsIs:
    def outputs(self, fqn: str, dtype: torch.dtype, shape: Shape) -> Mapping[str, MadeTensor]:
        return {fqn: elementwise(dtype, len(shape))}

    def fill(self, fqn: str, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        copy_bits(made[fqn], box)


AS_IS = _AsIs()


@dataclass(frozen=True)
class Making:
    """One tensor, and those that a copy has in its place."""

    tensor: LocalTensor
    transform: Transform
    outputs: Mapping[str, MadeTensor]

    @classmethod
    def of(cls, tensor: LocalTensor, transforms: Sequence[Transform]) -> Self:
        """Made by the first transform that makes something of it; else it is copied as it is.

        Raises: UsageError: A transform raised, or makes something that cannot be.
        """
        for transform in (*transforms, AS_IS):
            try:
                outputs = transform.outputs(tensor.fqn, tensor.dtype, tensor.shape)
            except SAID:
                raise
            except Exception as error:
                raise _failed(transform, tensor.fqn, error) from error
            if outputs:
                _require_fit(transform, tensor, outputs)
                break
        return cls(tensor, transform, outputs)

    def boxes(self, chunk: LocalChunk) -> Mapping[str, Box]:
        """The part of each output that is made of a chunk.

        Raises: UsageError: The chunk cuts a box that an element of an output stands for.
        """
        offsets, sizes = chunk.offsets, tuple(chunk.tensor.shape)
        for name, output in self.outputs.items():
            if not output.is_elementwise:
                self._require_whole(name, output, offsets, sizes)
        return {name: output.made_of(offsets, sizes) for name, output in self.outputs.items()}

    def _require_whole(self, name: str, output: MadeTensor, offsets: Shape, sizes: Shape) -> None:
        for dim, (per, whole) in enumerate(zip(output.per, self.tensor.shape, strict=True)):
            for edge in (offsets[dim], offsets[dim] + sizes[dim]):
                if edge % per and edge != whole:
                    self._refuse(name, f"of shape {list(sizes)} at {list(offsets)}", dim, edge)

    def _refuse(self, name: str, shard: str, dim: int, edge: int) -> NoReturn:
        output, transform = self.outputs[name], self.transform
        if output.is_single:
            raise UsageError(
                f"tensor {self.tensor.fqn!r}: {name!r} is made of the whole tensor, of which this "
                f"rank has the shard {shard}; expected all of it in one box, or that {transform!r} "
                "is told what it would find there; else leave it out of that"
            )
        per, whole = output.per[dim], self.tensor.shape[dim]
        start = edge // per * per
        raise UsageError(
            f"tensor {self.tensor.fqn!r}: the shard {shard} cuts dimension {dim} at {edge}, inside "
            f"of block {edge // per} (from {start} to {min(start + per, whole)}), for which "
            f"{name!r} has one element; expected edges of shards between blocks: shard it "
            f"otherwise, or leave it out of {transform!r}"
        )

    def output(self, name: str, chunks: Sequence[LocalChunk]) -> LocalTensor:
        """The output of that name, of which this rank has these chunks."""
        output, tensor = self.outputs[name], self.tensor
        _, shape = output.made_of((0,) * len(tensor.shape), tensor.shape)
        return LocalTensor(name, output.dtype, shape, tuple(chunks), tensor.spread)

    def fill(self, box: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Raises: UsageError: The transform raised."""
        try:
            self.transform.fill(self.tensor.fqn, box, made)
        except SAID:
            raise
        except Exception as error:
            raise _failed(self.transform, self.tensor.fqn, error) from error


def makings(tensors: Sequence[LocalTensor], transforms: Sequence[Transform]) -> Sequence[Making]:
    """The tensors that a copy has in the place of each of these.

    Raises: UsageError: As `Making.of`; or two tensors are made under one name.
    """
    made = [Making.of(tensor, transforms) for tensor in tensors]
    first: dict[str, str] = {}
    for each in made:
        for name in each.outputs:
            if name in first:
                raise UsageError(
                    f"{name!r} is made of {first[name]!r} and of {each.tensor.fqn!r}; expected one "
                    f"tensor of each name: rename one, or have {each.transform!r} use another name"
                )
            first[name] = each.tensor.fqn
    return made


def _require_fit(transform: Transform, tensor: LocalTensor, outputs: object) -> None:
    dims = len(tensor.shape)
    if not isinstance(outputs, Mapping) or not all(
        isinstance(name, str) and isinstance(made, MadeTensor) and len(made.per) == dims
        for name, made in outputs.items()
    ):
        raise UsageError(
            f"tensor {tensor.fqn!r} of shape {list(tensor.shape)}: {transform!r} makes "
            f"{outputs!r}, expected names, and for each a MadeTensor with a `per` of {dims} sizes"
        )


def _failed(transform: Transform, fqn: str, error: Exception) -> UsageError:
    reason = f"{type(error).__name__}: {error}"
    return UsageError(f"tensor {fqn!r}: {transform!r} failed ({reason}); leave it out of that")


def part(tensor: torch.Tensor, offsets: Shape, sizes: Shape) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def units(outputs: Mapping[str, MadeTensor]) -> Shape:
    """The sizes of the smallest box that has whole elements of all of them."""
    sizes = zip(*(output.per for output in outputs.values()), strict=True)
    return tuple(math.lcm(*each) for each in sizes)


def pieces(
    outputs: Mapping[str, MadeTensor],
    box: torch.Tensor,
    made: Mapping[str, torch.Tensor],
    most_bytes: int,
) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Cut a box and what is made of it into smaller ones of so many bytes, or of one unit."""
    if box.nbytes <= most_bytes:
        yield box, made
        return
    for offsets, sizes in cut(tuple(box.shape), units(outputs), most_bytes // box.itemsize):
        parts = {
            name: part(made[name], *output.made_of(offsets, sizes))
            for name, output in outputs.items()
        }
        yield part(box, offsets, sizes), parts


def cut(sizes: Shape, units: Shape, most: int) -> Iterator[Box]:
    """Boxes of whole units that are all of this one, of at most so many elements, or one unit."""
    if not sizes:
        yield (), ()
        return
    step = max(1, most // (units[0] * math.prod(sizes[1:]))) * units[0]
    for start in range(0, sizes[0], step):
        size = min(step, sizes[0] - start)
        for offsets, rest in cut(sizes[1:], units[1:], most // size):
            yield (start, *offsets), (size, *rest)
