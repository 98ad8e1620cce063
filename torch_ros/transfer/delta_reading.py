"""Fills a target by deltas from one full source: docs/protocol/deltas.md#reading-by-deltas.

No element of the target changes before all bytes have landed, the word of each process that they
came from was seen after that, and all of them have passed their checks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.allocation import allocating
from torch_ros.costs import Costs
from torch_ros.deadline import Deadline
from torch_ros.errors import CorruptDelta, TransferFailed
from torch_ros.p2p.huge_pages import HugePages
from torch_ros.p2p.transport import Registration, Transfer, Transport
from torch_ros.printable import log_of
from torch_ros.spans import Region, Spans
from torch_ros.transfer.feed import TORN_S, Arrivals, Following, Supply
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.posting import FLIGHT, TRANSFER_BYTES, Watcher, close_all, perform
from torch_ros.transfer.registered import Registered
from torch_ros.transfer.stall import SILENCE_S, SourceWait
from torch_ros.weights.delta import Delta, Piece, apply, pieces
from torch_ros.weights.delta_choice import Deltas, Extent, are_faster, reaches, wait_s
from torch_ros.weights.delta_table import (
    ALIGNMENT_BYTES,
    TABLE_BYTES,
    Chain,
    DeltaEntry,
    DeltaHead,
    DeltaTable,
    padded,
)
from torch_ros.weights.manifest import Manifest

log: logging.Logger = log_of(__name__)

COMING_S, COMING_S_MAX = 0.005, 0.05  # between looks for a delta that is being made

FLYING = 16  # transfers at a time: they are short, and of many ranks
SLOW_BYTES_PER_S = 20e6  # at which what is in flight may come before a source counts as silent

Bytes = npt.NDArray[np.uint8]
Staged = Mapping[tuple[int, int], Sequence[Delta]]
"""The deltas of source chunks, by rank and chunk, the oldest first."""


class SourceSpan(NamedTuple):
    """Bytes in the memory of a source's rank."""

    rank: int
    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


class DeltaRoom:
    """Host memory in which parts of deltas land; kept for the next ones until `close`."""

    def __init__(self, transport: Transport, peers: Peers, pages: HugePages) -> None:
        self._transport, self._pages, self.peers = transport, pages, peers
        self._buffer: torch.Tensor | None = None
        self._registration: Registration | None = None
        self._flying: dict[str, list[Transfer]] = {}  # by agent; closed by whoever comes first

    @property
    def held_bytes(self) -> int:
        """Any thread may ask."""
        buffer = self._buffer
        return 0 if buffer is None else buffer.nbytes

    def of(self, size_bytes: int) -> Bytes:
        """So much of it, aligned. What lay there before is gone.

        Raises:
            MemoryError: There is too little.
        """
        if self._buffer is None or self._buffer.nbytes < size_bytes + ALIGNMENT_BYTES:
            self.close()
            room_bytes = size_bytes + size_bytes // 8 + ALIGNMENT_BYTES
            with allocating("what is read by deltas", room_bytes):
                self._buffer = torch.empty(room_bytes, dtype=torch.uint8, device="cpu")
            region = Region(self._buffer.data_ptr(), self._buffer.nbytes)
            self._pages.ask([region])
            self._registration = self._transport.register([region])
        start = -self._buffer.data_ptr() % ALIGNMENT_BYTES
        return self._buffer.numpy()[start : start + size_bytes]

    def prepare(self, agent: str, manifest: Manifest, spans: Spans) -> list[Transfer]:
        """Reads that end with `forget`, or before their peer is disconnected."""
        prepared = self.peers.prepare(agent, manifest, spans)
        self._flying.setdefault(agent, []).extend(prepared)
        return prepared

    def forget(self, agent: str | None = None) -> None:
        """End the reads from an agent, or all. None of their bytes lands after this."""
        for each in [*self._flying] if agent is None else [agent]:
            close_all(self._flying.get(each, ()))
            self._flying.pop(each, None)

    def close(self) -> None:
        self.forget()
        if self._registration is not None:
            self._registration.close()
        self._buffer = self._registration = None


class _Landing(Watcher):
    def __init__(self, source: Following) -> None:
        super().__init__(source.look)
        self._source = source

    def landed(self, _: Sequence[Transfer]) -> None:
        self._source.silence.reset()


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
        room: DeltaRoom,
        supply: Supply,
        target: Registered,
        rank: int,
        costs: Costs,
        deadline: Deadline,
    ) -> None:
        self._room, self._feed, self._target = room, supply.feed, target
        self._rank, self._costs, self._deadline = rank, costs, deadline
        in_flight = min(FLIGHT * TRANSFER_BYTES, target.bytes_total)
        limit_s = SILENCE_S + in_flight / SLOW_BYTES_PER_S
        self._source = Following(room.peers, supply, Arrivals(0), deadline, limit_s)
        self.links = self.changed = self.bytes_read = 0
        self.ways: Counter[str] = Counter()

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
        shows = self._feed.source.is_full and all(each.deltas for _, each in self._feed.manifests)
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
        places = [SourceSpan(rank, manifests[rank][1].deltas, TABLE_BYTES) for rank in ranks]
        until_s = time.monotonic() + TORN_S
        while True:
            landed = [DeltaTable.decode(content.tobytes()) for content in self._land(places)]
            tables = {n: table for n, table in zip(ranks, landed, strict=True) if table is not None}
            if len(tables) == len(ranks):
                return tables
            if time.monotonic() > until_s:
                raise CorruptDelta("a table of deltas", "its digest to fit", "that it does not")
            time.sleep(COMING_S)

    # Staging

    def stage(self, chains: Mapping[int, Chain]) -> Staged | None:
        """Read what is needed, ask each word after that, then check it. None: full is faster."""
        entries = (entry for chain in chains.values() for entry in chain.links)
        head_bytes = sum(entry.head_bytes for entry in entries)
        if not self._are_faster(Deltas(head_bytes, 0, 0)):
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
        if not self._are_faster(Deltas(staged_bytes, self.changed, self.links * len(self._pieces))):
            return None
        arrays = self._land(places)
        self._certify(chains)
        staged: dict[tuple[int, int], list[Delta]] = {}
        for (link, chunk, segments), gaps, values in zip(
            wanted, arrays[::2], arrays[1::2], strict=True
        ):
            staged.setdefault((link.rank, chunk), []).append(segments.received(gaps, values))
        return staged

    def _are_faster(self, deltas: Deltas) -> bool:
        return are_faster(deltas, self._target.bytes_total, self._costs)

    def _certify(self, ranks: Iterable[int]) -> None:
        """All that was read of these ranks is what they had under the mark of the source."""
        with self._losing():
            for rank in ranks:
                self._source.ask(rank)
        self._feed.source.check()

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
            for (rank, entry), content in zip(entries, self._land(places), strict=True)
        ]

    def _land(self, places: Sequence[SourceSpan]) -> list[Bytes]:
        """Read these; they are valid until the next ones are read. Nothing is in flight then."""
        runs, found = _joined(places)
        starts = np.cumsum(
            [0, *(padded(run.size_bytes) + ALIGNMENT_BYTES for run in runs)]
        ).tolist()
        room = self._room.of(starts[-1])
        begins = [
            start + run.address % ALIGNMENT_BYTES for start, run in zip(starts, runs, strict=False)
        ]
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for run, begin in zip(runs, begins, strict=True):
            span = run.address, room.ctypes.data + begin, run.size_bytes
            spans.setdefault(run.rank, []).append(span)
        self._read(spans)
        return [
            room[begins[run] + offset :][: place.size_bytes]
            for place, (run, offset) in zip(places, found, strict=True)
        ]

    def _read(self, spans: Mapping[int, Sequence[tuple[int, int, int]]]) -> None:
        room, manifests = self._room, self._feed.manifests
        most = FLIGHT * TRANSFER_BYTES
        with self._losing():
            transfers = [
                transfer
                for rank, rows in spans.items()
                for transfer in room.prepare(*manifests[rank], np.array(rows, np.uint64))
            ]
            self._source.silence.reset()
            watcher = _Landing(self._source)
            perform(transfers, self._deadline, watcher, flight=FLYING, flight_bytes=most)
            for transfer in transfers:
                self.bytes_read += transfer.size_bytes
                self.ways.update(dict(transfer.ways))
            room.forget()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """However it ends, nothing is in flight; a process that is gone is a lost source."""
        try:
            yield
        except TransferFailed as error:
            self._room.forget()
            self._room.peers.forget(error.agent)
            agents = [agent for agent, _ in self._feed.manifests]
            raise self._source.lost(agents.index(error.agent), error.reason) from error
        except BaseException:
            self._room.forget()
            raise

    # Applying

    def scatter(self, staged: Staged) -> None:
        """Write the changes into the target, which is half-applied if this raises."""
        memory = self._target.phases[-1].memory
        for piece in self._pieces:
            for delta in staged.get((piece.source_rank, piece.source_chunk), ()):
                apply(delta, memory[piece.target_chunk], piece)


def _joined(places: Sequence[SourceSpan]) -> tuple[list[SourceSpan], list[tuple[int, int]]]:
    """Join stretches that touch, but for a gap of alignment; and say where each of them lies.

    Returns:
        The joined ones; for each of `places` the number of the joined one, and its offset there.
    """
    runs: list[SourceSpan] = []
    found = [(0, 0)] * len(places)
    for number in sorted(range(len(places)), key=lambda number: places[number]):
        place = places[number]
        last = runs[-1] if runs else None
        if last and last.rank == place.rank and place.address <= last.end + ALIGNMENT_BYTES:
            size_bytes = max(last.end, place.end) - last.address
            runs[-1] = last._replace(size_bytes=size_bytes)
        else:
            runs.append(place)
        found[number] = len(runs) - 1, place.address - runs[-1].address
    return runs, found
