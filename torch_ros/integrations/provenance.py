"""The content of memory while a loader runs: which elements of which checkpoint tensors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_ros.boxes import Box, Offsets, common, outside
from torch_ros.integrations.boxes import FRAMES_MAX, Frame, Pair, pairs

Dims = tuple[int | None, ...]


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage it is, among those that are there and those that a `Memory` is of."""
    storage: int = tensor.untyped_storage()._cdata  # noqa: SLF001 (weak references are dear)
    return storage


# Not frozen dataclasses, which take three times as long to make: a loader makes 100,000.
class Plain(NamedTuple):
    """A box of a checkpoint tensor, bit for bit."""

    fqn: str
    offsets: Offsets
    dims: Dims  # for each dimension of the memory, the tensor's; None: size 1

    @property
    def fqns(self) -> frozenset[str]:
        return frozenset((self.fqn,))

    def box(self, sizes: Offsets) -> Box:
        """The same box, in the tensor's dimensions."""
        own_sizes = [1] * len(self.offsets)
        for dim, own in enumerate(self.dims):
            if own is not None:
                own_sizes[own] = sizes[dim]
        return self.offsets, tuple(own_sizes)


class Made(NamedTuple):
    """Anything else: made of these checkpoint tensors, or of none."""

    fqns: frozenset[str]
    reason: str


class Patch(NamedTuple):
    """A box of a memory, and where its content is from."""

    offsets: Offsets
    sizes: Offsets
    origin: Plain | Made
    during: str  # the checkpoint tensor that the loader had asked for last

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def common(self, offsets: Offsets, sizes: Offsets) -> "Patch | None":
        """The part of it in this box."""
        if (offsets, sizes) == (self.offsets, self.sizes):
            return self
        both = common((self.offsets, self.sizes), (offsets, sizes))
        return self._part(*both) if both else None

    def without(self, hole: "Patch") -> Iterator["Patch"]:
        """The parts of it around another patch, disjoint."""
        box = self.offsets, self.sizes
        if (inner := common(box, (hole.offsets, hole.sizes))) is None:
            yield self
        else:
            for part in outside(box, inner):
                yield self._part(*part)

    def _part(self, offsets: Offsets, sizes: Offsets) -> "Patch":
        origin = self.origin
        if isinstance(origin, Plain):
            begin = list(origin.offsets)
            for dim, old, new in zip(origin.dims, self.offsets, offsets, strict=True):
                if dim is not None:
                    begin[dim] += new - old
            origin = Plain(origin.fqn, tuple(begin), origin.dims)
        return Patch(offsets, sizes, origin, self.during)

    def after(self, pair: Pair, during: str) -> "Patch":
        """The same content in the target box of `pair`; it lies in the source box."""
        origin = self.origin
        if isinstance(origin, Plain):
            offsets, sizes, dims = _moved(self.offsets, self.sizes, origin.dims, pair)
            return Patch(offsets, sizes, Plain(origin.fqn, origin.offsets, dims), during)
        offsets, sizes, _ = _moved(self.offsets, self.sizes, (None,) * len(self.sizes), pair)
        return Patch(offsets, sizes, origin, during)


@lru_cache(FRAMES_MAX)
def _moved(
    offsets: Offsets, sizes: Offsets, dims: Dims, pair: Pair
) -> tuple[Offsets, Offsets, Dims]:
    """A box in the source box of `pair`, and its dimensions, as they are in the target box."""
    rank = len(pair.target)
    begin, extent = list(pair.target), [1] * rank
    turned: list[int | None] = [None] * rank
    for one, other, _ in pair.dims:
        begin[other] += offsets[one] - pair.source[one]
        extent[other] = sizes[one]
        turned[other] = dims[one]
    return tuple(begin), tuple(extent), tuple(turned)


def landed(patches: Iterable[Patch]) -> Iterator[tuple[str, Box]]:
    """The boxes of checkpoint tensors that these are, bit for bit."""
    for patch in patches:
        if isinstance(patch.origin, Plain):
            yield patch.origin.fqn, patch.origin.box(patch.sizes)


T = TypeVar("T")


def groups(boxes: Sequence[tuple[Offsets, Offsets, T]]) -> Iterator[list[T]]:
    """Boxes that overlap stay together, in their order; none overlaps one of another group."""
    if len(boxes) == 1:
        yield [boxes[0][2]]
        return
    for dim in range(len(boxes[0][0])):
        parts = list(_split(boxes, dim))
        if len(parts) > 1:
            for part in parts:
                yield from groups(part)
            return
    yield [what for _, _, what in boxes]


def _split(
    boxes: Sequence[tuple[Offsets, Offsets, T]], dim: int
) -> Iterator[list[tuple[Offsets, Offsets, T]]]:
    order = sorted(range(len(boxes)), key=lambda at: boxes[at][0][dim])
    part: list[int] = []
    end = 0
    for at in order:
        offsets, sizes, _ = boxes[at]
        if part and offsets[dim] >= end:
            yield [boxes[one] for one in sorted(part)]
            part = []
        part.append(at)
        end = max(end, offsets[dim] + sizes[dim])
    yield [boxes[one] for one in sorted(part)]


@dataclass(slots=True)
class Memory:
    """The memory of one tensor, as the loader has written it until now."""

    frame: Frame
    dtype: torch.dtype
    storage: StorageWeakRef  # no other storage gets its place as long as this is there
    name: str = ""  # in the engine, if it is the engine's
    is_parameter: bool = False  # or has one in it
    patches: list[Patch] = field(default_factory=list)  # later ones lie over earlier ones
    covered: list[tuple[Patch, Patch]] = field(default_factory=list)  # with who lies over it
    is_settled: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str = "") -> "Memory":
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(Frame.of(tensor), tensor.dtype, storage, name)

    @property
    def whole(self) -> tuple[Offsets, Offsets]:
        return (0,) * len(self.frame.shape), self.frame.shape

    def write(self, patches: Sequence[Patch]) -> None:
        self.patches += patches
        self.is_settled = False

    def settle(self) -> Sequence[Patch]:
        """The patches that lie on top, disjoint."""
        if not self.is_settled and len(self.patches) > 1:
            boxes = [(patch.offsets, patch.sizes, patch) for patch in self.patches]
            self.patches = [top for group in groups(boxes) for top in self._on_top(group)]
        self.is_settled = True
        return self.patches

    def _on_top(self, group: Sequence[Patch]) -> Sequence[Patch]:
        tops: list[Patch] = []
        for patch in group:
            if len(group) > 1:
                hit = [top for top in tops if top.common(patch.offsets, patch.sizes)]
                self.covered += [(top, patch) for top in hit]
                tops = [part for top in tops for part in top.without(patch)]
            tops.append(patch)
        return tops

    def has(self, place_bytes: int) -> bool:
        """Whether an element of it is there, in its storage."""
        return self.frame.coordinates(place_bytes // self.dtype.itemsize) is not None

    def boxes(self, view: torch.Tensor) -> list[tuple[Offsets, Offsets]] | None:
        """Where a view of it lies; None if that cannot be said, or not in few boxes."""
        if not self.frame.is_regular or view.dtype.itemsize != self.dtype.itemsize:
            return None
        frame = Frame.of(view)
        found = pairs(self.frame, frame, self.frame, frame)
        return None if found is None else [(pair.target, pair.target_sizes) for pair in found]

    def read(self, view: torch.Tensor, *, is_exact: bool = False) -> list[Patch]:
        """The content that a view of it has; no patch where nobody has written.

        A patch that covers all of the memory comes whole, unless `is_exact`.
        """
        tops = self.settle()
        is_one = len(tops) == 1 and (tops[0].offsets, tops[0].sizes) == self.whole
        if len(tops) == 0 or (is_one and not is_exact):
            return list(tops)
        boxes = self.boxes(view)
        if boxes is None:  # perhaps all of it
            return list(tops)
        parts = (top.common(*box) for box in boxes for top in tops)
        return [part for part in parts if part is not None]
