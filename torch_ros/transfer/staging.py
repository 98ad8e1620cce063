"""The buffer through which short strided runs are read: whole rows land in it, and are copied out.

One buffer on each device that needs one, of a bounded size. It is registered once, so that
transfers into it can be kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torch_ros.p2p.transport import Registration, Transport
from torch_ros.spans import HOST, Region
from torch_ros.weights.plan import StagedCopy

ALIGNMENT_BYTES = 64


class Staging:
    """The staging buffers of a process, kept until `close`."""

    def __init__(self, transport: Transport, size_bytes: int) -> None:
        self._transport, self.size_bytes = transport, size_bytes
        self._buffers: dict[torch.device, tuple[torch.Tensor, Registration]] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the registered buffer of that device: the same one every time."""
        if device not in self._buffers:
            buffer = torch.empty(
                self.size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device
            )
            at = device.index if buffer.is_cuda else HOST
            region = Region(buffer.data_ptr(), buffer.nbytes, at)
            self._buffers[device] = (buffer, self._transport.register([region]))
        return self._buffers[device][0]

    def close(self) -> None:
        """Let go of the memory. No transfer into it may be open."""
        for _, registration in self._buffers.values():
            registration.close()
        self._buffers.clear()


def fitting(
    pieces: Sequence[StagedCopy], staging_bytes: int
) -> Iterator[list[tuple[int, StagedCopy]]]:
    """Group pieces that fit into staging together, each with its aligned offset there."""
    group: list[tuple[int, StagedCopy]] = []
    end = 0
    for piece in pieces:
        room = -(-piece.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if group and end + room > staging_bytes:
            yield group
            group, end = [], 0
        group.append((end, piece))
        end += room
    if group:
        yield group
