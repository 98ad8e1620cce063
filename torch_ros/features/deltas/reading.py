"""Fills a target by deltas from one full source: docs/protocol/deltas.md#reading-by-deltas.

No element of the target changes before all bytes have landed, the word of each process that they
came from was seen after that, and all of them have passed their checks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from torch_ros.codec.delta import Delta, Piece, apply, pieces
from torch_ros.codec.table import (
    NAME,
    TABLE_BYTES,
    Chain,
    DeltaEntry,
    DeltaHead,
    DeltaTable,
)
from torch_ros.costs import Costs
from torch_ros.deadline import Deadline
from torch_ros.errors import CorruptDelta
from torch_ros.features.deltas.rules import DeltaWork, Extent, are_faster, reaches, wait_s
from torch_ros.features.deltas.side_room import SideRead, SideRoom, SourceSpan
from torch_ros.printable import log_of
from torch_ros.transfer.feed import TORN_S, Supply
from torch_ros.transfer.registered import LocalState
from torch_ros.transfer.stall import SourceWait

log: logging.Logger = log_of(__name__)

COMING_S, COMING_S_MAX = 0.005, 0.05  # between looks for a delta that is being made

DeltasOf = Mapping[tuple[int, int], Sequence[Delta]]
"""The deltas of source chunks, by rank and chunk, the oldest first."""


class _Link(NamedTuple):
    rank: int
    entry: DeltaEntry
    head: DeltaHead


class DeltaRead:
    """One rank's attempt to fill `target` by deltas of a full source.

    `find`, `stage` and `scatter`, in this order. The first two leave the target as it is, and
    raise SourceLost, as any read from that source, CorruptDelta: it shows what it should not, or
    MemoryError.

    Args:
        supply: The source, with the plan of a read in full.
        costs: Of reads from it.
    """

    def __init__(
        self,
        room: SideRoom,
        supply: Supply,
        target: LocalState,
        rank: int,
        costs: Costs,
        deadline: Deadline,
    ) -> None:
        self._feed, self._target = supply.feed, target
        self._rank, self._costs, self._deadline = rank, costs, deadline
        self.reads = SideRead(room, supply, target.bytes_total, deadline)
        self.links = self.changed = 0

    @cached_property
    def _pieces(self) -> tuple[Piece, ...]:
        layout = self._target.phases[-1].layout
        return pieces(self._feed.layouts, layout, target_rank=self._rank)

    @cached_property
    def _reaches(self) -> Mapping[int, Mapping[int, Extent]]:
        return reaches(self._pieces)

    def is_possible(self) -> bool:
        """Whether the source shows deltas, and the target is one that they can be applied to."""
        target = self._target
        is_plain = not (target.objects or target.cuda_devices or target.overlaps is not None)
        shows = self._feed.source.is_full and all(
            NAME in each.more for _, each in self._feed.manifests
        )
        return is_plain and shows and bool(self._pieces)

    # Chains

    def find(self, base: str, uid: str, *, hurries: bool) -> Mapping[int, Chain] | None:
        """The chains of the source's ranks from one uid to the other, if there are.

        If the last link is being made, waits for that.

        Args:
            hurries: Not for longer than it may pay: an engine stands still meanwhile.
        """
        source, pause_s = self._feed.source, COMING_S
        wait = SourceWait(source.replica, self._deadline, source.is_there)
        until_s = time.monotonic() + (self._worth_s() if hurries else math.inf)
        while True:
            found = {rank: table.chain(base, uid) for rank, table in self._tables().items()}
            chains = {rank: chain for rank, chain in found.items() if chain is not None}
            is_whole = len(chains) == len(found)
            if is_whole and not any(chain.is_coming for chain in chains.values()):
                return chains
            self._certify(found)  # else it has gone on, and makes this one no more
            if not is_whole or time.monotonic() >= until_s:
                return None
            wait.look(f"{source.replica!r} is making a delta")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, COMING_S_MAX)

    def _worth_s(self) -> float:
        """For how long a delta that is being made is worth a wait: each rank makes its own."""
        copies = (self._feed.layouts[rank].blocks.sizes.sum() for rank in self._reaches)
        return wait_s(int(max(copies)), self._target.bytes_total, self._costs)

    def _tables(self) -> dict[int, DeltaTable]:
        manifests, ranks = self._feed.manifests, list(self._reaches)
        places = [SourceSpan(rank, manifests[rank][1].more[NAME], TABLE_BYTES) for rank in ranks]
        until_s = time.monotonic() + TORN_S
        while True:
            landed = [DeltaTable.decode(content.tobytes()) for content in self.reads.land(places)]
            tables = {n: table for n, table in zip(ranks, landed, strict=True) if table is not None}
            if len(tables) == len(ranks):
                return tables
            if time.monotonic() > until_s:
                raise CorruptDelta("a table of deltas", "its digest to fit", "that it does not")
            time.sleep(COMING_S)

    # Staging

    def stage(self, chains: Mapping[int, Chain]) -> DeltasOf | None:
        """Read what is needed, ask each word after that, then check it. None: full is faster."""
        entries = (entry for chain in chains.values() for entry in chain.links)
        head_bytes = sum(entry.head_bytes for entry in entries)
        if not self._are_faster(DeltaWork(head_bytes, 0, 0)):
            return None
        wanted = [
            (link, chunk, segments)
            for link in self._heads(chains)
            for chunk, reach in self._reaches[link.rank].items()
            if (segments := link.head.segments(chunk, *reach)) is not None
        ]
        places = [
            SourceSpan(link.rank, link.entry.address + offset, size_bytes)
            for link, _, segments in wanted
            for offset, size_bytes in (segments.gaps, segments.values)
        ]
        self.links = max(len(chain.links) for chain in chains.values())
        self.changed = sum(segments.changed for _, _, segments in wanted)
        staged_bytes = head_bytes + sum(place.size_bytes for place in places)
        if not self._are_faster(
            DeltaWork(staged_bytes, self.changed, self.links * len(self._pieces))
        ):
            return None
        arrays = self.reads.land(places)
        self._certify(chains)
        staged: dict[tuple[int, int], list[Delta]] = {}
        for (link, chunk, segments), gaps, values in zip(
            wanted, arrays[::2], arrays[1::2], strict=True
        ):
            staged.setdefault((link.rank, chunk), []).append(segments.received(gaps, values))
        return staged

    def _are_faster(self, deltas: DeltaWork) -> bool:
        return are_faster(deltas, self._target.bytes_total, self._costs)

    def _certify(self, ranks: Iterable[int]) -> None:
        """All that was read of these ranks is what they had under the mark of the source."""
        self.reads.certify(ranks)

    def _heads(self, chains: Mapping[int, Chain]) -> list[_Link]:
        layouts = self._feed.layouts
        entries = [(rank, entry) for rank, chain in chains.items() for entry in chain.links]
        places = [
            SourceSpan(rank, entry.address + entry.body_bytes, entry.head_bytes)
            for rank, entry in entries
        ]
        for rank, entry in entries:
            entry.require_head_fits(layouts[rank])
        return [
            _Link(rank, entry, DeltaHead.decode(content.tobytes(), entry, layouts[rank]))
            for (rank, entry), content in zip(entries, self.reads.land(places), strict=True)
        ]

    # Applying

    def scatter(self, staged: DeltasOf) -> None:
        """Write the changes into the target, which is half-applied if this raises."""
        memory = self._target.phases[-1].memory
        for piece in self._pieces:
            for delta in staged.get((piece.source_rank, piece.source_chunk), ()):
                apply(delta, memory[piece.target_chunk], piece)
