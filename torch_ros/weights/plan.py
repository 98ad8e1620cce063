"""Plans which bytes of which rank go where, for a shard that is cut differently from its sources.

Pure: layouts in, a plan without addresses out. A plan is computed once and bound to new addresses
at every read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torch_ros.costs import HOST_COSTS, Costs
from torch_ros.spans import HOST, Spans
from torch_ros.weights.columns import Columns, Ints, group_starts, numbered, sum_before
from torch_ros.weights.manifest import Layout
from torch_ros.weights.staging import StagedCopy, cheapest_cut, staged_copies
from torch_ros.weights.tiling import Strided, matched, part_offsets, strided_pieces


@dataclass(frozen=True, slots=True, eq=False)
class DirectSpans(Columns):
    """Spans read straight into the target; by target chunk, then offset. Equal lengths. Offsets
    count from the first element of the chunk.
    """

    source_rank: Ints
    source_chunk: Ints  # index into the chunks of that rank's layout
    source_offset_bytes: Ints
    target_chunk: Ints
    target_offset_bytes: Ints
    size_bytes: Ints


class Route(NamedTuple):
    source_rank: int
    source_device: int = HOST
    target_device: int = HOST


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """The spans and copies that fill a target layout. It holds no addresses: bind it per read."""

    direct: DirectSpans
    staged: tuple[StagedCopy, ...]  # by target chunk
    bytes_total: int  # of the target chunks
    bytes_read: int  # includes the gaps that staged spans read in vain

    @property
    def span_count(self) -> int:
        return len(self.direct.size_bytes) + len(self.staged)

    def bind(
        self,
        source_addresses: Sequence[npt.ArrayLike],
        target_addresses: npt.ArrayLike,
        *,
        source_devices: Sequence[npt.ArrayLike] | None = None,
        target_devices: npt.ArrayLike | None = None,
    ) -> dict[Route, Spans]:
        """The direct spans, by route, each in the order of `direct`. Addresses are of each chunk's
        first element, and devices HOST if not given; those of the sources per rank.
        """
        direct = self.direct
        ranks = [np.asarray(addresses, np.uint64) for addresses in source_addresses]
        firsts = np.cumsum([0, *map(len, ranks)])
        sources = firsts[direct.source_rank] + direct.source_chunk  # among the chunks of all ranks
        targets = np.asarray(target_addresses, np.uint64)
        spans = np.empty((len(direct.size_bytes), 3), np.uint64)
        # In place: numpy adds int64 and uint64 as floating point.
        spans[:, 0] = direct.source_offset_bytes
        spans[:, 0] += np.concatenate([*ranks, np.empty(0, np.uint64)])[sources]
        spans[:, 1] = direct.target_offset_bytes
        spans[:, 1] += targets[direct.target_chunk]
        spans[:, 2] = direct.size_bytes

        keys = np.full((len(spans), 3), HOST, np.int64)
        keys[:, 0] = direct.source_rank
        if source_devices is not None:
            devices = [np.asarray(devices, np.int64) for devices in source_devices]
            keys[:, 1] = np.concatenate([*devices, np.empty(0, np.int64)])[sources]
        if target_devices is not None:
            keys[:, 2] = np.asarray(target_devices, np.int64)[direct.target_chunk]
        order = np.lexsort(keys.T[::-1])  # stable: each route keeps the order of `direct`
        starts = group_starts(*keys[order].T)
        parts = np.split(spans[order], starts[1:]) if len(spans) else []
        routes = keys[order][starts].tolist()
        return {Route(*route): part for route, part in zip(routes, parts, strict=True)}


def plan(
    sources: Sequence[Layout],
    targets: Layout,
    *,
    staging_bytes: int,
    target_rank: int = 0,
    costs: Costs = HOST_COSTS,
) -> ReadPlan:
    """How to fill `targets` from `sources`.

    If several ranks have equal chunks, one is read: the lowest rank's, unless the chunks are
    `spread`. The choice among spread chunks depends on `target_rank` and changes along the version,
    so that readers load all copies. Where chunks overlap in part, the lowest rank's counts.

    Args:
        sources: One layout per rank of the version, in rank order.
        targets: The layout to fill. It may have fewer tensors than the version, and other cuts.
        staging_bytes: Limit of every staged span; 0 plans direct spans only.
        target_rank: The number of this reader among those that read at the same time.
        costs: Decide for each piece whether it is read directly or staged.

    Raises:
        ManifestMismatch: A target tensor is not in the version, has another dtype or shape there,
            or part of it is on no source; or the sources disagree. Names the fqn.
        UsageError: A target's elements share memory with each other. Names the fqn.
    """
    strided = strided_pieces(*matched(sources, targets, target_rank=target_rank))
    useful_bytes = strided.sizes.prod(1) * strided.item_bytes
    runs = _runs(strided)
    cut = cheapest_cut(strided, useful_bytes, staging_bytes, costs)
    # Equal costs read directly: no staging memory, no copy.
    is_staged = cut.seconds < costs.direct_s(runs.prod(1), useful_bytes)

    direct = _direct(strided.take(~is_staged), runs[~is_staged])
    staged = staged_copies(strided.take(is_staged), cut.take(is_staged))
    return ReadPlan(
        direct=direct,
        staged=staged,
        bytes_total=int(useful_bytes.sum()),
        bytes_read=int(direct.size_bytes.sum()) + sum(copy.size_bytes for copy in staged),
    )


def _runs(strided: Strided) -> Ints:
    """The number of contiguous runs along each dimension; 1 for a dimension inside a run.

    Of 4 rows of 6, contiguous in the target: 4 and 1 if the source's rows are longer, else 1 and 1.
    """
    counts = strided.sizes.copy()
    run = np.ones(len(counts), np.int64)
    for dim in reversed(range(counts.shape[1])):
        inside = strided.source_strides[:, dim] == run
        inside &= strided.target_strides[:, dim] == run
        counts[inside, dim] = 1
        run[inside] *= strided.sizes[inside, dim]
    return counts


def _direct(strided: Strided, runs: Ints) -> DirectSpans:
    """The spans of these pieces, one for each of their contiguous runs, merged where they touch."""
    owner, ordinal = numbered(runs.prod(1))
    source_offset, target_offset = part_offsets(strided, runs, np.ones_like(runs), owner, ordinal)
    run_bytes = (strided.sizes // runs).prod(1) * strided.item_bytes
    item_bytes = strided.item_bytes[owner]
    spans = DirectSpans(
        strided.source_rank[owner],
        strided.source_chunk[owner],
        source_offset * item_bytes,
        strided.target_chunk[owner],
        target_offset * item_bytes,
        run_bytes[owner],
    )
    return _merged(spans.take(np.lexsort((spans.target_offset_bytes, spans.target_chunk))))


def _merged(spans: DirectSpans) -> DirectSpans:
    """Merge spans that touch on both sides: pieces may lie behind each other."""
    if not len(spans.size_bytes):
        return spans
    starts = group_starts(
        spans.source_rank,
        spans.source_chunk,
        spans.target_chunk,
        # Constant from span to span as long as they touch.
        spans.source_offset_bytes - sum_before(spans.size_bytes),
        spans.target_offset_bytes - sum_before(spans.size_bytes),
    )
    size_bytes = np.add.reduceat(spans.size_bytes, starts)
    return replace(spans.take(starts), size_bytes=size_bytes)
