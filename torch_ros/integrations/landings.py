"""Where a version's tensors go in an engine: the values that a recording consists of."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch

from torch_ros.boxes import Box, Offsets
from torch_ros.errors import UsageError


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which goes through 100,000 notes again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class LandedBox:
    """A box of a checkpoint tensor, and the box of an engine's parameter that is equal to it."""

    offsets: Offsets  # in the checkpoint tensor
    sizes: Offsets
    parameter: str  # or buffer: its full name in the engine
    within: Offsets  # the parameter's shape
    at: Offsets  # in the parameter
    dims: tuple[int | None, ...]  # for each dimension here, the parameter's; None: of size 1

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The box, as a view of the parameter's memory in the checkpoint tensor's dimensions."""
        strides = parameter.stride()
        begin = sum(at * stride for at, stride in zip(self.at, strides, strict=True))
        steps = [1 if dim is None else strides[dim] for dim in self.dims]
        return parameter.detach().as_strided(self.sizes, steps, parameter.storage_offset() + begin)


@dataclass(frozen=True, slots=True)
class Landing:
    """The boxes of one checkpoint tensor that this rank's engine has; disjoint at both ends."""

    fqn: str
    dtype: torch.dtype
    shape: Offsets
    boxes: tuple[LandedBox, ...]

    @property
    def size_bytes(self) -> int:
        return sum(prod(box.sizes) for box in self.boxes) * self.dtype.itemsize

    def chunks(self, parameters: Mapping[str, torch.Tensor]) -> list[tuple[Offsets, torch.Tensor]]:
        """Offsets and memory of each box: what a `Chunked` of this shape and dtype consists of.

        Raises:
            UsageError: A parameter has another shape or dtype than when it was recorded.
        """
        for box in self.boxes:
            now = parameters[box.parameter]
            if (tuple(now.shape), now.dtype) != (box.within, self.dtype):
                raise UsageError(
                    f"{box.parameter!r} is {now.dtype} of shape {list(now.shape)}: expected "
                    f"{self.dtype} of shape {list(box.within)}, as it was recorded for "
                    f"{self.fqn!r}; load that tensor by the engine's own loader"
                )
        return [(box.offsets, box.view(parameters[box.parameter])) for box in self.boxes]


@dataclass(frozen=True, slots=True)
class Recording:
    """Where a version's tensors go in an engine, and what has to go through its loader.

    Names of tensors are in the order of the version; each is in one of `landings`, `staged` and
    `unused`. Counts are of elements.
    """

    landings: Mapping[str, Landing]
    staged: Mapping[str, str]  # the reason for each name
    failed: frozenset[str]  # those of `staged` for which the loader itself raised
    targets: Mapping[str, tuple[str, ...]]  # of `staged`: where it goes, as far as that was seen
    unused: tuple[str, ...]  # the loader puts nothing of them anywhere
    unwritten: Mapping[str, int]  # elements of parameters that nothing was written to
    filled: Mapping[str, int]  # elements that get something of no checkpoint tensor: padding
    replaced: tuple[str, ...]  # parameters and buffers to which the loader gives other memory
    buffers: tuple[str, ...]  # those that nothing was written to: derived, or a constant
    # Tensors of which elements go nowhere, failed and unused ones among them: what goes somewhere.
    partial: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
