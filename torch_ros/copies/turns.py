"""Buffers that copies are published from in turn."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch

from torch_ros.allocation import allocating
from torch_ros.copies.transforms import Making
from torch_ros.p2p import shared
from torch_ros.transfer.registered import Buffer

BUFFERS = 2  # one is filled while readers are still at the other


class HostBuffers:
    """The makings of buffers in host memory. A feature may have some that others use, too."""

    def extra_bytes(
        self,
        made: Sequence[Making],
        paths: Mapping[str, tuple[str | int, ...]],
        objects: Mapping[str, torch.Tensor],
    ) -> int:
        """The room that a buffer needs beside the contents of such a copy."""
        return 0

    def make(self, size_bytes: int) -> Buffer:
        """Raises: OSError: There is no such memory; then it is private."""
        return Buffer(torch.frombuffer(shared.allocate(size_bytes), dtype=torch.uint8))


def _size_bytes(buffer: Buffer) -> int:
    return buffer.room.nbytes


class Turns:
    """The buffers of one device: one is published, another is filled; more, if some are in use.

    Args:
        host: Makes those in host memory.
    """

    size_bytes: int

    def __init__(self, size_bytes: int, device: torch.device, host: HostBuffers) -> None:
        self.size_bytes, self._device, self._host = size_bytes, device, host
        self.buffers: list[Buffer] = [self._made(size_bytes) for _ in range(BUFFERS)]
        self._published: Buffer | None = None
        self.filled: Buffer = self.buffers[0]

    def take(self, size_bytes: int) -> torch.Tensor:
        """So much room at least in a buffer that is neither published nor in use, to be filled."""
        unpublished = [b for b in (self.filled, *self.buffers) if b is not self._published]
        fitting = sorted((b for b in unpublished if b.room.nbytes >= size_bytes), key=_size_bytes)
        taken = next((b for b in fitting if b.is_free()), None)
        if taken is None:  # all of these are in use
            taken = self._made(size_bytes)
            self.buffers.append(taken)
        self.filled = taken
        taken.begin()
        return taken.room

    def turn(self) -> None:
        """The buffer filled last is about to be published."""
        self._published = self.filled

    def _made(self, size_bytes: int) -> Buffer:
        if self._device.type != "cpu":
            return Buffer(torch.empty(size_bytes, dtype=torch.uint8, device=self._device))
        with suppress(OSError):  # it only makes readers on this host faster
            if size_bytes:
                return self._host.make(size_bytes)
        with allocating("a buffer for copies", size_bytes):
            return Buffer(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
