"""Reads of what a full source shows beside its tensors, into memory of this process's own.

The bytes count once the word of each process that they came from was seen after they had landed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.allocation import allocating
from torch_ros.codec.table import ALIGNMENT_BYTES, padded
from torch_ros.deadline import Deadline
from torch_ros.errors import TransferFailed
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Registration, Transfer, Transport
from torch_ros.spans import Region, Spans
from torch_ros.transfer.feed import Arrivals, Following, Supply
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.posting import FLIGHT, TRANSFER_BYTES, Watcher, close_all, perform
from torch_ros.transfer.reading import ReadingRoom
from torch_ros.transfer.stall import SILENCE_S
from torch_ros.weights.manifest import Manifest

FLYING = 16  # transfers at a time: they are short, and of many ranks
SLOW_BYTES_PER_S = 20e6  # at which what is in flight may come before a source counts as silent

Bytes = npt.NDArray[np.uint8]


class SourceSpan(NamedTuple):
    """Bytes in the memory of a source's rank."""

    rank: int
    address: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


class SideRoom(ReadingRoom):
    """Host memory in which they land; kept for the next ones until `close`."""

    def __init__(self, transport: Transport, peers: Peers, pages: Pages) -> None:
        super().__init__(transport, peers, pages)
        self._buffer: torch.Tensor | None = None
        self._registration: Registration | None = None
        self._flying: dict[str, list[Transfer]] = {}  # by agent; closed by whoever comes first

    def of(self, size_bytes: int) -> Bytes:
        """So much of it, aligned. What lay there before is gone.

        Raises: MemoryError: There is too little.
        """
        if self._buffer is None or self._buffer.nbytes < size_bytes + ALIGNMENT_BYTES:
            self.close()
            room_bytes = size_bytes + size_bytes // 8 + ALIGNMENT_BYTES
            with allocating("what is read beside the tensors", room_bytes):
                self._buffer = torch.empty(room_bytes, dtype=torch.uint8, device="cpu")
            self.held_bytes = self._buffer.nbytes
            region = Region(self._buffer.data_ptr(), self._buffer.nbytes)
            self.pages.ask([region])
            self._registration = self.transport.register([region])
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
        self.held_bytes = 0


class _Landing(Watcher):
    def __init__(self, source: Following) -> None:
        super().__init__(source.look)
        self._source = source

    def landed(self, _: Sequence[Transfer]) -> None:
        self._source.silence.reset()


class SideRead:
    """Reads from one source. They raise SourceLost, as any, or MemoryError.

    Args:
        bytes_max: What is in flight at a time has fewer.
    """

    def __init__(self, room: SideRoom, supply: Supply, bytes_max: int, deadline: Deadline) -> None:
        self._room, self._feed, self._deadline = room, supply.feed, deadline
        in_flight = min(FLIGHT * TRANSFER_BYTES, bytes_max)
        limit_s = SILENCE_S + in_flight / SLOW_BYTES_PER_S
        self._source = Following(room.peers, supply, Arrivals(0), deadline, limit_s)
        self.bytes_read = 0
        self.ways: Counter[str] = Counter()

    def land(self, places: Sequence[SourceSpan]) -> list[Bytes]:
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

    def certify(self, ranks: Iterable[int]) -> None:
        """All that was read of these ranks is what they had under the mark of the source."""
        with self._losing():
            for rank in ranks:
                self._source.ask(rank)
        self._feed.source.check()

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
