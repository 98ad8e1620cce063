"""Reads short strided runs: whole rows land in a buffer, and are copied out of it.

`weights.staging` has decided which. There is one buffer on each device that needs one, of a bounded
size. It is registered once, so that transfers into it can be kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Registration, Transfer, Transport
from torch_ros.spans import HOST, Region, Spans
from torch_ros.weights.manifest import Manifest
from torch_ros.weights.plan import Route
from torch_ros.weights.staging import StagedCopy, copy_staged

ALIGNMENT_BYTES = 64

Places = Sequence[tuple[int, StagedCopy]]
"""Pieces of a group, each with its offset in the buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedGroup:
    """Pieces that are in a buffer at the same time, and the transfers that bring them there."""

    buffer: torch.Tensor
    places: Places
    transfers: Sequence[Transfer]

    def copy_out(self, memory: Sequence[torch.Tensor]) -> None:
        """Copy the pieces, which have landed, to their places in the chunks."""
        for offset, piece in self.places:
            copy_staged(self.buffer[offset:], piece, memory[piece.target_chunk])
        if self.buffer.is_cuda:  # the next group overwrites the buffer copied from
            torch.cuda.current_stream(self.buffer.device).synchronize()


class Staging:
    """The staging buffers of a process, kept until `close`."""

    def __init__(self, transport: Transport, size_bytes: int, pages: Pages) -> None:
        self._transport, self._pages = transport, pages
        self.size_bytes: int = size_bytes
        self._buffers: dict[torch.device, tuple[torch.Tensor, Registration]] = {}

    @property
    def held_bytes(self) -> int:
        """The size of the buffers that there are. Any thread may ask."""
        return sum(buffer.nbytes for buffer, _ in list(self._buffers.values()))

    def placed(
        self, pieces: Sequence[StagedCopy], memory: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Places]]:
        """Give the pieces places in the buffers of their targets' devices, group after group."""
        for device in sorted({memory[piece.target_chunk].device for piece in pieces}, key=str):
            buffer = self._on(device)
            here = [piece for piece in pieces if memory[piece.target_chunk].device == device]
            for places in _fitting(here, buffer.numel()):
                yield buffer, places

    def _on(self, device: torch.device) -> torch.Tensor:
        if device not in self._buffers:
            buffer = torch.empty(  # a piece of `size_bytes` takes up to an alignment more
                self.size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device
            )
            region = Region(buffer.data_ptr(), buffer.nbytes, buffer.get_device())
            if region.device == HOST:
                self._pages.ask([region])
            self._buffers[device] = (buffer, self._transport.register([region]))
        return self._buffers[device][0]

    def close(self) -> None:
        """Let go of the memory. No transfer into it may be open."""
        for _, registration in self._buffers.values():
            registration.close()
        self._buffers.clear()


def aligned(size_bytes: int) -> int:
    """Return the room that so many bytes take where the next ones begin aligned."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def routes(
    buffer: torch.Tensor, places: Places, manifests: Sequence[Manifest]
) -> dict[Route, Spans]:
    """Return the spans that bring pieces to their places; `manifests` are the source's, by rank."""
    rows: dict[Route, list[tuple[int, int, int]]] = {}
    for offset, piece in places:
        manifest = manifests[piece.source_rank]
        source = manifest.addresses[piece.source_chunk] + piece.source_offset_bytes
        route = Route(piece.source_rank, manifest.devices[piece.source_chunk], buffer.get_device())
        rows.setdefault(route, []).append((source, buffer.data_ptr() + offset, piece.size_bytes))
    return {route: np.array(spans, np.uint64) for route, spans in rows.items()}


def _fitting(pieces: Sequence[StagedCopy], room_bytes: int) -> Iterator[Places]:
    """Group pieces that fit into a buffer together; their places are aligned."""
    group: list[tuple[int, StagedCopy]] = []
    end = 0
    for piece in pieces:
        room = aligned(piece.size_bytes)
        if group and end + room > room_bytes:
            yield group
            group, end = [], 0
        group.append((end, piece))
        end += room
    if group:
        yield group
