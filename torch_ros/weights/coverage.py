"""Coverage: whether ranks together hold every element of the tensors that they name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from torch_ros.digests import digest_of
from torch_ros.errors import ManifestMismatch, UsageError
from torch_ros.weights.local import packed
from torch_ros.weights.manifest import (
    OBJECT,
    UNIONS_MAX,
    ChunkRecord,
    Layout,
    TensorRecord,
    logical,
)
from torch_ros.weights.tiling import matched


@dataclass(frozen=True, slots=True)
class Sharding:
    """A layout's tensors, and the boxes of each, by a digest: no strides, no sizes of objects."""

    digest: str
    is_whole: bool  # every tensor is one chunk, or has no elements


@lru_cache(maxsize=UNIONS_MAX)
def sharding(layout: Layout) -> Sharding:
    """The sharding of one rank. Recent ones are cached, because layouts seldom change."""
    boxes: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in layout.tensors]
    for chunk in layout.chunks:
        boxes[chunk.tensor].append((chunk.offsets, chunk.sizes))
    rows = [
        (record.fqn, record.dtype, (), ())
        if record.dtype == OBJECT
        else (record.fqn, record.dtype, record.shape, sorted(held))
        for record, held in zip(layout.tensors, boxes, strict=True)
    ]
    is_whole = all(
        record.dtype == OBJECT
        or 0 in record.shape
        or any(sizes == record.shape for _, sizes in held)
        for record, held in zip(layout.tensors, boxes, strict=True)
    )
    return Sharding(digest_of(msgspec.msgpack.encode(rows)).hex(), is_whole)


def require_whole(layouts: Sequence[Layout]) -> None:
    """Check that ranks with these layouts have every element of the tensors that they name.

    Raises: ManifestMismatch: One is missing; names its tensor and a box. Or two ranks have a
        tensor with different dtypes or shapes.
    """
    whole = whole_layout(layouts)
    try:
        matched(layouts, whole, target_rank=0)
    except ManifestMismatch as lack:
        raise ManifestMismatch(
            lack.what,
            "the ranks of this replica to have every element together",
            lack.found,
            "register, or read, all of it on some rank; a part can be read, and is not served",
        ) from None


def whole_layout(layouts: Sequence[Layout]) -> Layout:
    """Every tensor that these ranks name, as one chunk without gaps; objects are left out.

    Raises: ManifestMismatch: Two ranks have a tensor with different dtypes or shapes.
    """
    tensors = [(f, t) for f, t in sorted(logical(layouts).items()) if t.dtype != OBJECT]
    whole = Layout(
        tuple(TensorRecord(fqn, dtype, shape) for fqn, (dtype, shape) in tensors),
        tuple(
            ChunkRecord(number, (0,) * len(shape), shape, (), spread=False)
            for number, (_, (_, shape)) in enumerate(tensors)
        ),
    )
    return packed(whole)


def is_whole(layouts: Sequence[Layout]) -> bool:
    """Whether `require_whole` has nothing to raise."""
    try:
        require_whole(layouts)
    except UsageError:
        return False
    return True
