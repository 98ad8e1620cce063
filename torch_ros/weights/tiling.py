"""Matches parts of source chunks with the target chunks that they fill, and places them in memory.

All chunks are handled at once, as columns: a version can have 70,000 tensors. In a
two-dimensional array the rows are chunks or pieces of them and the columns are dimensions, padded
as in `manifest.Boxes`.

The pieces that leave here hold every element of every target chunk exactly once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from torch_ros.boxes import Box, common, outside
from torch_ros.errors import ManifestMismatch, UsageError
from torch_ros.weights.columns import (
    Columns,
    Ints,
    distinct,
    group_starts,
    numbered,
    outermost_first,
    sum_after,
    sum_before,
)
from torch_ros.weights.manifest import OBJECT, Boxes, Layout, LogicalTensor, item_bytes, logical

# Every copy of a chunk that is used means another process to connect to.
COPIES_MAX = 8


@dataclass(frozen=True, slots=True, eq=False)
class Chunks(Boxes):
    """The chunks of one side that have elements; `tensor` counts those of the target layout."""

    rank: Ints
    chunk: Ints  # index into the chunks of its layout
    item_bytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(Columns):
    """Boxes that a source and a target chunk have in common; sorted by target."""

    source: Ints  # row of the source chunks
    target: Ints  # row of the target chunks
    offsets: Ints  # in the whole tensor
    sizes: Ints


def matched(
    sources: Sequence[Layout], targets: Layout, *, target_rank: int
) -> tuple[Chunks, Chunks, Pieces]:
    """Source chunks, target chunks, and the pieces of source chunks that tile the target chunks.
    Arguments and errors as in `plan.plan`.
    """
    _check_tensors(logical(sources), targets)
    width = max(1, *(layout.boxes.sizes.shape[1] for layout in (targets, *sources)))
    wanted = _chunks([targets], targets, width)
    _refuse_shared_memory(wanted, targets)
    offered = _one_of_equals(_chunks(sources, targets, width), target_rank)
    pieces = _intersections(offered, wanted)
    wrong = untiled(wanted, pieces)  # something is missing, or chunks of ranks overlap in part
    if len(wrong):
        pieces = _cut(offered, wanted, pieces, wrong, targets)
        assert not len(untiled(wanted, pieces))
    return offered, wanted, pieces


def _check_tensors(version: Mapping[str, LogicalTensor], targets: Layout) -> None:
    """Refuse a target that the version lacks, or has with another dtype or shape."""
    for record in targets.tensors:
        found = version.get(record.fqn)
        if found == (record.dtype, record.shape):
            continue
        asked = f"{record.dtype} {list(record.shape)}"
        if found is None:
            raise ManifestMismatch(
                f"tensor {record.fqn!r}",
                f"{asked} as in the target",
                "tensor missing from the version",
                _renamed(record.fqn, version) or "leave it out of the target, or publish it",
            )
        advice = "targets must have the version's shapes"
        if found.dtype != record.dtype:
            advice = "a read does not cast: use targets of the version's dtypes, or files of DCP"
        raise ManifestMismatch(
            f"tensor {record.fqn!r}",
            f"{found.dtype} {list(found.shape)} as in the version",
            f"{asked} in the target",
            advice,
        )


def _renamed(fqn: str, version: Mapping[str, LogicalTensor]) -> str:
    """Advice about a prefix that stands between this name and one of the version; "" if none does.

    DCP puts the keys of a nested state dict before the names of its tensors; a handle does not.
    """
    parts = fqn.split(".")
    for count in range(1, len(parts)):
        if (shorter := ".".join(parts[count:])) in version:
            prefix = ".".join(parts[:count]) + "."
            return f"the version has {shorter!r}: drop the prefix {prefix!r} of the target's names"
    longer = next((name for name in version if name.endswith(f".{fqn}")), "")
    if longer:
        prefix = longer.removesuffix(fqn)
        return f"the version has {longer!r}: put the prefix {prefix!r} before the target's names"
    return ""


def _chunks(layouts: Sequence[Layout], targets: Layout, width: int) -> Chunks:
    """The chunks of the target's tensors, rank after rank, padded to `width` dimensions."""
    numbers = {record.fqn: number for number, record in enumerate(targets.tensors)}
    items = np.array([item_bytes(record.dtype) for record in targets.tensors], np.int64)
    ranks = []
    for rank, layout in enumerate(layouts):
        boxes = layout.boxes
        # The number that the target has for each tensor of this rank; -1: it has none.
        known = np.array([numbers.get(record.fqn, -1) for record in layout.tensors], np.int64)
        rows = np.flatnonzero((known[boxes.tensor] >= 0) & (boxes.sizes > 0).all(1))
        tensor, held = known[boxes.tensor[rows]], boxes.take(rows)
        missing = ((0, 0), (0, width - boxes.sizes.shape[1]))
        ranks.append(
            (
                tensor,
                np.pad(held.offsets, missing),
                np.pad(held.sizes, missing, constant_values=1),
                np.pad(held.strides, missing),
                held.spread,
                np.full(len(rows), rank),
                rows,
                items[tensor],
            )
        )
    return Chunks(*map(np.concatenate, zip(*ranks, strict=True)))


def _refuse_shared_memory(wanted: Chunks, targets: Layout) -> None:
    """Refuse a target whose elements share memory: which of their values stays would be chance."""
    sizes, strides = outermost_first(wanted.strides, wanted.sizes, wanted.strides)
    # Each step must lead past everything that the smaller ones reach.
    shared = ((sizes > 1) & (strides <= sum_after((sizes - 1) * strides))).any(1)
    if shared.any():
        fqn = targets.tensors[wanted.tensor[np.argmax(shared)]].fqn
        raise UsageError(
            f"target tensor {fqn!r} has elements that share memory (expanded, or overlapping "
            "strides); pass a clone()"
        )


def _one_of_equals(chunks: Chunks, target_rank: int) -> Chunks:
    """One row for each box, chosen from those that hold it; sorted by tensor, then offsets.

    Of 8 GB in 4 equal copies, reader 1 takes the first 2 GB from copy 1, then from 2, 3 and 0.
    """
    if not len(chunks.rank):
        return chunks
    box = [chunks.tensor, *chunks.offsets.T, *chunks.sizes.T]
    order = np.lexsort((chunks.rank, *box[::-1]))
    starts = group_starts(*(column[order] for column in box))
    copies = np.diff(starts, append=len(order))
    spread = np.logical_and.reduceat(chunks.spread[order], starts)
    # By bytes, not by boxes: weights and biases often alternate. Not exact, so floats will do.
    first = order[starts]
    size_bytes = chunks.sizes[first].prod(1, dtype=np.float64) * chunks.item_bytes[first]
    share_before = (np.cumsum(size_bytes) - size_bytes) / size_bytes.sum()
    turn = target_rank + (share_before * np.minimum(copies, COPIES_MAX)).astype(np.int64)
    return chunks.take(order[starts + np.where(spread, turn % copies, 0)])


def _intersections(offered: Chunks, wanted: Chunks) -> Pieces:
    """The boxes that target chunks share with chunks of `offered`, which is sorted by tensor."""
    # Pair each target chunk with all source chunks of its tensor, whose rows follow each other.
    counts = np.bincount(offered.tensor, minlength=int(wanted.tensor.max(initial=-1)) + 1)
    target, ordinal = numbered(counts[wanted.tensor])
    source = sum_before(counts)[wanted.tensor[target]] + ordinal
    offsets = np.maximum(offered.offsets[source], wanted.offsets[target])
    ends = np.minimum(
        offered.offsets[source] + offered.sizes[source],
        wanted.offsets[target] + wanted.sizes[target],
    )
    sizes = ends - offsets
    return Pieces(source, target, offsets, sizes).take((sizes > 0).all(1))


def untiled(wanted: Chunks, pieces: Pieces) -> Ints:
    """Rows of `wanted` whose elements are not each in exactly one piece. Exact.

    Each corner of a box has a sign: along each dimension 1 for the lower end, -1 for the upper. The
    signs of a box determine it, and add up. Therefore pieces add up to the target, each element
    once, if and only if their corners do. No chunk is empty, and each piece is inside its own.

    [0, 4) and [4, 9) have the corners 0, -4, 4, -9, which add up to those of [0, 9): 0 and -9. Here
    the target's are subtracted, so that a sum that is left tells.
    """
    count = len(wanted.tensor)
    target = np.concatenate([pieces.target, np.arange(count)])
    lower = pieces.offsets - wanted.offsets[pieces.target]
    lower = np.concatenate([lower, np.zeros_like(wanted.sizes)])
    upper = lower + np.concatenate([pieces.sizes, wanted.sizes])
    sign = np.repeat([1, -1], [len(pieces.target), count])

    # Where every piece is as long as the target, a dimension cannot tell them apart.
    rows, dims = np.nonzero((lower > 0) | (upper < wanted.sizes[target]))
    tells = np.zeros(wanted.sizes.shape, np.bool_)
    tells[target[rows], dims] = True

    # Boxes become corners, a dimension at a time; `position` numbers a corner, row-major.
    box, position = np.arange(len(target)), np.zeros(len(target), np.int64)
    for dim in range(wanted.sizes.shape[1]):
        owner = target[box]
        told = tells[owner, dim]
        position *= np.where(told, wanted.sizes[owner, dim] + 1, 1)
        high = position[told] + upper[box[told], dim]
        low = position + np.where(told, lower[box, dim], 0)
        box, sign = np.concatenate([box, box[told]]), np.concatenate([sign, -sign[told]])
        position = np.concatenate([low, high])
    owner = target[box]
    order = np.lexsort((position, owner))
    starts = group_starts(owner[order], position[order])
    sums = np.add.reduceat(sign[order], starts) if len(starts) else starts
    return distinct(owner[order][starts][sums != 0])


def _cut(offered: Chunks, wanted: Chunks, pieces: Pieces, rows: Ints, targets: Layout) -> Pieces:
    """Cut the pieces of these target rows until none overlaps; the lowest rank's pieces win. A loop
    over boxes is fast enough: ranks seldom cut a tensor in different ways.
    """
    pieces = pieces.take(np.lexsort((offered.rank[pieces.source], pieces.target)))
    cut: list[tuple[int, int, Box]] = []
    for row in rows.tolist():
        left = [_box(wanted.offsets[row], wanted.sizes[row])]
        first, end = np.searchsorted(pieces.target, [row, row + 1]).tolist()
        for piece in range(first, end):
            whole = _box(pieces.offsets[piece], pieces.sizes[piece])
            hit = [(box, common(box, whole)) for box in left]
            cut += [(int(pieces.source[piece]), row, part) for _, part in hit if part]
            left = [rest for box, part in hit for rest in (outside(box, part) if part else [box])]
        if left:
            _raise_missing(targets, int(wanted.tensor[row]), min(left))
    source, target, boxes = zip(*cut, strict=True)
    offsets, sizes = np.array(boxes).swapaxes(0, 1)
    kept = pieces.take(~np.isin(pieces.target, rows))
    mended = Pieces(
        np.concatenate([kept.source, source]),
        np.concatenate([kept.target, target]),
        np.concatenate([kept.offsets, offsets]),
        np.concatenate([kept.sizes, sizes]),
    )
    return mended.take(np.argsort(mended.target, kind="stable"))


def _box(offsets: Ints, sizes: Ints) -> Box:
    return tuple(offsets.tolist()), tuple(sizes.tolist())


def _raise_missing(targets: Layout, tensor: int, box: Box) -> NoReturn:
    record = targets.tensors[tensor]
    dimensions = len(record.shape)
    offsets = box[0][:dimensions]
    ends = [begin + size for begin, size in zip(offsets, box[1], strict=False)]
    raise ManifestMismatch(
        f"{'object' if record.dtype == OBJECT else 'tensor'} {record.fqn!r}",
        "every element on some rank of the version",
        f"no rank that holds the box from {list(offsets)} to {ends}",
        "all ranks that hold a part of it must publish it",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Strided(Columns):
    """Pieces as they lie in memory, in elements; offsets from the chunk's first element. The
    dimensions of each are ordered by falling source stride.
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
    """Place the pieces in the memory of their source and target chunks."""
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
    """The offsets in source and target chunks at which parts of pieces begin. A piece has `counts`
    parts along each dimension, each `step` indices behind the one before. For each part, `owner` is
    its piece, and `ordinal` its row-major number in that.
    """
    source, target = strided.source_offset[owner], strided.target_offset[owner]
    for dim in reversed(range(counts.shape[1])):
        if (counts[:, dim] == 1).all():  # as it mostly is: this is faster
            continue
        count = counts[owner, dim]
        index = ordinal % count * step[owner, dim]
        ordinal = ordinal // count
        source += index * strided.source_strides[owner, dim]
        target += index * strided.target_strides[owner, dim]
    return source, target
