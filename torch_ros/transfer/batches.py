"""Divides the blocks of a target into batches, and prepares the transfers that fill each.

The blocks of a batch are read from one source, and begin to count together: after its last byte
the reader asks the source's ranks whether they still serve the content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from torch_ros.p2p.transport import Transfer
from torch_ros.spans import Spans
from torch_ros.transfer.feed import Feed, Supply
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.posting import close_all
from torch_ros.transfer.registered import Phase
from torch_ros.transfer.staging_buffers import StagedGroup, Staging, routes
from torch_ros.weights.columns import Ints, distinct, numbered, sum_before
from torch_ros.weights.manifest import BLOCK_BYTES, Blocks
from torch_ros.weights.plan import DirectSpans, ReadPlan, Route
from torch_ros.weights.staging import StagedCopy

BATCH_BYTES = 64 << 20  # read between two questions whether it counts
STEP_BYTES = 4 << 20  # the same, across a network: it is what each hop of a chain adds


def sources_max(bytes_total: int) -> int:
    """Return how many sources a read of that size may have: each serves at least a batch."""
    return max(1, bytes_total // BATCH_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    supply: int  # the number of its source among those of the read
    blocks: Ints
    needs: Mapping[int, int]  # source rank -> how many of its blocks have to be there
    transfers: Sequence[Transfer]
    staged: Sequence[StagedGroup]
    is_repeated: bool  # some staged blocks are there already, and may be read from

    @property
    def size_bytes(self) -> int:
        """The bytes that are read for it."""
        staged = (transfer for group in self.staged for transfer in group.transfers)
        return sum(transfer.size_bytes for transfer in (*self.transfers, *staged))


def close_batches(batches: Sequence[Batch]) -> None:
    direct = [transfer for batch in batches for transfer in batch.transfers]
    groups = [group for batch in batches for group in batch.staged]
    close_all(direct + [transfer for group in groups for transfer in group.transfers])


class Preparation:
    """Prepares the batches of one read of a phase: its objects, or its tensors."""

    def __init__(self, peers: Peers, staging: Staging, phase: Phase) -> None:
        self._peers, self._staging = peers, staging
        self._target, self._memory = phase.layout.blocks, phase.memory
        self._prepared: list[Transfer] = []

    def batches(self, supplies: Sequence[Supply], missing: Ints) -> Sequence[Batch]:
        """Return the batches that fill the blocks `missing`, in order. The caller closes them."""
        target = self._target
        staged = {piece.target_chunk for supply in supplies for piece in supply.plan.staged}
        # By block, the first of its group: a staged piece is copied into its chunk as a whole.
        firsts = np.arange(target.total)
        for chunk in staged:
            start = target.starts[chunk]
            firsts[start : start + target.counts[chunk]] = start
        firsts = firsts[missing]
        sizes = _block_bytes(target, self._memory)[missing]
        # Each source in turn has as many blocks as make a batch.
        turns = _as_one(sum_before(sizes) // BATCH_BYTES % len(supplies), firsts)
        batches: list[Batch] = []
        try:
            for index, supply in enumerate(supplies):
                own = turns == index
                if own.any():
                    batches += self._from_one(index, supply, missing[own], firsts[own])
        except BaseException:
            close_all(self._prepared)  # of all batches, also of one that is not whole yet
            raise
        # In order, as this rank tells its own readers of the blocks before the first missing one.
        return sorted(batches, key=lambda batch: int(batch.blocks[0]))

    def _from_one(self, index: int, supply: Supply, missing: Ints, firsts: Ints) -> Iterator[Batch]:
        """Yield the batches of these blocks, all of one source; `firsts` as in `_as_one`."""
        target, feed, staged = self._target, supply.feed, supply.plan.staged
        direct, block = _by_block(supply.plan.direct, target)
        chunk_of_piece = np.array([piece.target_chunk for piece in staged], np.int64)
        # The bytes that are read for a block; a piece counts for the first block of its chunk.
        bytes_of = np.zeros(target.total, np.int64)
        np.add.at(bytes_of, block, direct.size_bytes)
        np.add.at(bytes_of, target.starts[chunk_of_piece], [piece.size_bytes for piece in staged])
        is_near = self._peers.is_near([state.agent for state in feed.states])
        most = BATCH_BYTES if is_near else STEP_BYTES
        batch_of = np.full(target.total, -1, np.int64)  # -1: this block is not read
        batch_of[missing] = _as_one(sum_before(bytes_of[missing]) // most, firsts)
        # The blocks of a chunk with pieces are in one batch, as far as they are missing.
        batch_of_piece = np.maximum.reduceat(batch_of, target.starts)[chunk_of_piece]
        is_partly_there = np.minimum.reduceat(batch_of, target.starts)[chunk_of_piece] < 0
        spans_in, pieces_in = _rows_by(batch_of[block]), _rows_by(batch_of_piece)
        bound = self._binding(feed)
        for number in distinct(batch_of[missing]).tolist():
            only, rows = direct.take(spans_in(number)), pieces_in(number)
            pieces = [staged[row] for row in rows.tolist()]
            yield Batch(
                index,
                missing[batch_of[missing] == number],
                _needs(feed, only, pieces),
                self._transfers(bound(replace(supply.plan, direct=only, staged=())), feed),
                self._groups(pieces, feed),
                bool(is_partly_there[rows].any()),
            )

    def _binding(self, feed: Feed) -> Callable[[ReadPlan], Mapping[Route, Spans]]:
        """Return what binds plans to where the chunks lie, which is the same for all batches."""
        manifests, memory = [manifest for _, manifest in feed.manifests], self._memory
        return partial(
            ReadPlan.bind,
            source_addresses=[np.array(each.addresses, np.uint64) for each in manifests],
            target_addresses=np.array([chunk.data_ptr() for chunk in memory], np.uint64),
            source_devices=[np.array(each.devices, np.int64) for each in manifests],
            target_devices=np.array([chunk.get_device() for chunk in memory], np.int64),
        )

    def _groups(self, pieces: Sequence[StagedCopy], feed: Feed) -> list[StagedGroup]:
        """Give pieces places in the staging buffers, and prepare the transfers that go there."""
        manifests = [manifest for _, manifest in feed.manifests]
        return [
            StagedGroup(buffer, places, self._transfers(routes(buffer, places, manifests), feed))
            for buffer, places in self._staging.placed(pieces, self._memory)
        ]

    def _transfers(self, routes: Mapping[Route, Spans], feed: Feed) -> list[Transfer]:
        """Prepare the transfers of these spans; noted in `_prepared`, in case a later one fails."""
        manifests, first = feed.manifests, len(self._prepared)
        for route, rows in routes.items():
            self._prepared += self._peers.prepare(
                *manifests[route.source_rank],
                rows,
                source_device=route.source_device,
                target_device=route.target_device,
            )
        return self._prepared[first:]


def _rows_by(numbers: Ints) -> Callable[[int], Ints]:
    """Return what finds the rows with a number. Numbers never fall from row to row, -1 aside."""
    rows = np.flatnonzero(numbers >= 0)
    rising = numbers[rows]
    return lambda number: rows[slice(*np.searchsorted(rising, [number, number + 1]))]


def _as_one(values: Ints, firsts: Ints) -> Ints:
    """Give blocks that stay together, which are equal in `firsts`, the value of the first one."""
    _, first, inverse = np.unique(firsts, return_index=True, return_inverse=True)
    return values[first][inverse]


def _block_bytes(blocks: Blocks, memory: Sequence[torch.Tensor]) -> Ints:
    """Return each block's bytes: the last one of a chunk has what is left of the chunk."""
    owner, ordinal = numbered(blocks.counts)
    sizes = np.fromiter((tensor.nbytes for tensor in memory), np.int64, len(memory))[owner]
    is_last = ordinal == blocks.counts[owner] - 1
    return np.where(is_last, sizes - ordinal * BLOCK_BYTES, BLOCK_BYTES)


def _by_block(direct: DirectSpans, target: Blocks) -> tuple[DirectSpans, Ints]:
    """Cut the spans where a block of the target ends; return them, and the block of each."""
    starts, ends = direct.target_offset_bytes, direct.target_offset_bytes + direct.size_bytes
    first = target.at(direct.target_chunk, starts)
    last = target.at(direct.target_chunk, ends - 1)
    owner, ordinal = numbered(last - first + 1)
    block = first[owner] + ordinal
    cut = direct.take(owner)
    begin = (block - target.starts[cut.target_chunk]) * BLOCK_BYTES
    # The last one may be longer than others: a chunk with gaps is one block.
    end = np.where(block == last[owner], ends[owner], begin + BLOCK_BYTES)
    begin = np.maximum(begin, starts[owner])
    return replace(
        cut,
        source_offset_bytes=cut.source_offset_bytes + begin - starts[owner],
        target_offset_bytes=begin,
        size_bytes=end - begin,
    ), block


def _needs(feed: Feed, direct: DirectSpans, staged: Sequence[StagedCopy]) -> dict[int, int]:
    """Return how many blocks, in its own order, each rank must have before this is read from it."""
    blocks = [layout.blocks for layout in feed.layouts]
    needs: dict[int, int] = {}
    for rank in distinct(direct.source_rank).tolist():
        spans = direct.take(direct.source_rank == rank)
        ends = spans.source_offset_bytes + spans.size_bytes - 1
        needs[rank] = int(blocks[rank].at(spans.source_chunk, ends).max()) + 1
    for piece in staged:
        rank, end = piece.source_rank, piece.source_offset_bytes + piece.size_bytes - 1
        at = blocks[rank].at(np.array([piece.source_chunk]), np.array([end]))
        needs[rank] = max(needs.get(rank, 0), int(at[0]) + 1)
    return needs
