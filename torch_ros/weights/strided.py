"""Pieces as they lie in memory: where each begins, and how far apart its elements are."""

from dataclasses import dataclass

from torch_ros.weights.columns import Columns, Ints, outermost_first
from torch_ros.weights.tiling import Chunks, Pieces


@dataclass(frozen=True, slots=True, eq=False)
class Strided(Columns):
    """Pieces as they lie in memory, in elements; offsets from the chunk's first element.

    The dimensions of each are ordered by falling source stride.
    """

    source_rank: Ints
    source_chunk: Ints
    target_chunk: Ints
    item_bytes: Ints
    source_offset: Ints
    target_offset: Ints
    sizes: Ints
    source_strides: Ints
    target_strides: Ints


def strided_pieces(offered: Chunks, wanted: Chunks, pieces: Pieces) -> Strided:
    """Return where these pieces of source and target chunks lie."""
    source, target = offered.take(pieces.source), wanted.take(pieces.target)
    return Strided(
        source.rank,
        source.chunk,
        target.chunk,
        target.item_bytes,
        ((pieces.offsets - source.offsets) * source.strides).sum(1),
        ((pieces.offsets - target.offsets) * target.strides).sum(1),
        *outermost_first(source.strides, pieces.sizes, source.strides, target.strides),
    )


def part_offsets(
    strided: Strided, counts: Ints, step: Ints, owner: Ints, ordinal: Ints
) -> tuple[Ints, Ints]:
    """Return both offsets of the `ordinal`-th of the owner's ``counts.prod()`` parts."""
    source, target = strided.source_offset[owner], strided.target_offset[owner]
    for dim in reversed(range(counts.shape[1])):
        if (counts[:, dim] == 1).all():
            continue
        count = counts[owner, dim]
        index = ordinal % count * step[owner, dim]
        ordinal = ordinal // count
        source += index * strided.source_strides[owner, dim]
        target += index * strided.target_strides[owner, dim]
    return source, target
