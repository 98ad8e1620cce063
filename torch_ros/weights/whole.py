"""The boxes of source chunks that make up the tensors of a version, each element once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
class Tile:
    """A box of a tensor, and where it begins in memory: in which chunk of which rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rank: int
    chunk: int
    start: int  # in elements, from the chunk's first


@lru_cache(maxsize=UNIONS_MAX)
def tiles(layouts: Sequence[Layout]) -> Mapping[TensorRecord, Sequence[Tile]]:
    """The tensors of a version, and of each the boxes that it consists of; objects are left out.

    Args:
        layouts: Those of all ranks of one replica, in rank order.

    Raises:
        ManifestMismatch: A part of a tensor is on no rank. Names the fqn.
    """
    whole = whole_layout(layouts)
    records = whole.tensors
    offered, wanted, pieces = matched(layouts, whole, target_rank=0)
    inside = pieces.offsets - offered.offsets[pieces.source]
    starts = (inside * offered.strides[pieces.source]).sum(1)
    found: dict[TensorRecord, list[Tile]] = {record: [] for record in records}
    for row, (source, target) in enumerate(zip(pieces.source, pieces.target, strict=True)):
        record = records[wanted.tensor[target]]
        shown = slice(len(record.shape))
        found[record].append(
            Tile(
                tuple(pieces.offsets[row, shown].tolist()),
                tuple(pieces.sizes[row, shown].tolist()),
                tuple(offered.strides[source, shown].tolist()),
                int(offered.rank[source]),
                int(offered.chunk[source]),
                int(starts[row]),
            )
        )
    return found


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
