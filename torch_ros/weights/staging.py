"""Short strided runs: which pieces are read by whole rows, and how these are copied out again.

`transfer.staging_buffers` has the buffer between. Further out a cut reads more in vain, further in
it needs more spans; `Costs` estimates what is faster.
"""

from dataclasses import dataclass

import numpy as np
import torch

from torch_ros.costs import Costs
from torch_ros.weights.columns import Columns, Floats, Ints, numbered, sum_after
from torch_ros.weights.local import WORDS
from torch_ros.weights.tiling import Strided, part_offsets


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """A span to read into staging, and the strided copy from there into a target chunk. Counted in
    elements where not in bytes. The span starts with the first element to copy.
    """

    source_rank: int
    source_chunk: int
    source_offset_bytes: int
    size_bytes: int
    target_chunk: int
    target_offset: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowCut(Columns):
    """How to cut a piece into spans: one dimension in groups, those outside it one by one."""

    seconds: Floats  # infinite if it cannot be cut small enough
    dim: Ints
    group: Ints  # indices of `dim` per span; the last may have fewer


def cheapest_cut(strided: Strided, useful_bytes: Ints, staging_bytes: int, costs: Costs) -> RowCut:
    """For each piece, try each dimension: the cut of which the reads and copies take least.

    4 columns of a matrix [1000, 16], in a buffer for 1,000 elements: spans of 63 rows, cut along
    dimension 0, are 16 that read 12 elements between two rows in vain; cut along dimension 1, they
    are 1,000 of 4 elements.
    """
    sizes, strides = strided.sizes, strided.source_strides
    item_bytes = strided.item_bytes[:, None]
    inner = 1 + sum_after((sizes - 1) * strides)  # elements that one index of the dimension spans
    room = staging_bytes // item_bytes - inner  # for further indices; < 0: not even for one
    group = np.clip(room // np.maximum(strides, 1) + 1, 1, sizes)
    parts = -(-sizes // group)  # spans along the dimension
    outside = sizes.cumprod(1) // sizes  # indices of all dimensions outside together
    read = outside * ((sizes - parts) * strides + parts * inner)
    seconds = costs.staged_s(outside * parts, read * item_bytes, useful_bytes[:, None])
    seconds[room < 0] = np.inf
    dim = seconds.argmin(1)
    row = np.arange(len(dim))
    return RowCut(seconds[row, dim], dim, group[row, dim])


def staged_copies(strided: Strided, cut: RowCut) -> tuple[StagedCopy, ...]:
    """A copy for each span of each piece: by one index outside the cut, all that is inside it."""
    dims, dim = np.arange(strided.sizes.shape[1]), cut.dim[:, None]
    group = np.where(dims == dim, cut.group[:, None], 1)
    counts = np.where(dims > dim, 1, -(-strided.sizes // group))  # of spans along each dimension
    owner, ordinal = numbered(counts.prod(1))
    source_offset, target_offset = part_offsets(strided, counts, group, owner, ordinal)

    shape = np.where(dims < dim, 1, strided.sizes)[owner]
    row, at = np.arange(len(owner)), cut.dim[owner]
    # The last span along the cut has what is left. `ordinal` counts along the cut fastest, as each
    # dimension inside it is one part.
    passed = ordinal % counts[owner, at] * cut.group[owner]
    shape[row, at] = np.minimum(cut.group[owner], shape[row, at] - passed)
    strides = strided.source_strides[owner]
    item_bytes = strided.item_bytes[owner]
    columns = (
        strided.source_rank[owner],
        strided.source_chunk[owner],
        source_offset * item_bytes,
        (1 + ((shape - 1) * strides).sum(1)) * item_bytes,
        strided.target_chunk[owner],
        target_offset,
        map(tuple, shape.tolist()),
        map(tuple, strides.tolist()),
        map(tuple, strided.target_strides[owner].tolist()),
    )
    lists = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
    return tuple(StagedCopy(*fields) for fields in zip(*lists, strict=True))


def copy_staged(staging: torch.Tensor, staged: StagedCopy, target: torch.Tensor) -> None:
    """Copy a staged span to the place where it belongs in `target`, its chunk's local tensor.

    `staging`, on the same device, is 1-d uint8 and begins with the span, at a multiple of the
    element size.
    """
    word = WORDS[target.element_size()]
    source = staging[: staged.size_bytes].view(word)
    start = target.storage_offset() + staged.target_offset
    into = target.view(word).as_strided(staged.shape, staged.target_strides, start)
    into.copy_(source.as_strided(staged.shape, staged.source_strides))
