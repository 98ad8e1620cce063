"""Buffers that copies are published from in turn, and may be lent: docs/protocol/lending.md."""

from contextlib import suppress
from dataclasses import dataclass

import torch

from torch_ros.allocation import allocating
from torch_ros.p2p import mapped
from torch_ros.p2p.lending import LentMemory

BUFFERS = 2  # one is filled while readers are still at the other


@dataclass(frozen=True, slots=True)
class Buffer:
    room: torch.Tensor
    lent: LentMemory | None = None  # its file, if it may be lent


def _size_bytes(buffer: Buffer) -> int:
    return buffer.room.nbytes


class Turns:
    """The buffers of one device: one is published, another is filled; more, if some are lent.

    Args:
        lender: The agent for which those in host memory may be lent; None: they are not.
    """

    size_bytes: int

    def __init__(self, size_bytes: int, device: torch.device, lender: str | None) -> None:
        self.size_bytes, self._device, self._lender = size_bytes, device, lender
        self.buffers: list[Buffer] = [self._made(size_bytes) for _ in range(BUFFERS)]
        self._published: Buffer | None = None
        self.filled: Buffer = self.buffers[0]

    def take(self, size_bytes: int) -> torch.Tensor:
        """So much room at least in a buffer that is neither published nor lent, to be filled."""
        unpublished = [b for b in (self.filled, *self.buffers) if b is not self._published]
        fitting = sorted((b for b in unpublished if b.room.nbytes >= size_bytes), key=_size_bytes)
        taken = next((b for b in fitting if b.lent is None or b.lent.close()), None)
        if taken is None:  # all of these are lent
            taken = self._made(size_bytes)
            self.buffers.append(taken)
        self.filled = taken
        if taken.lent is not None:
            taken.lent.begin()
        return taken.room

    def turn(self) -> None:
        """The buffer filled last is about to be published."""
        self._published = self.filled

    def _made(self, size_bytes: int) -> Buffer:
        if self._device.type != "cpu":
            return Buffer(torch.empty(size_bytes, dtype=torch.uint8, device=self._device))
        with suppress(OSError):  # it only makes readers on this host faster
            if size_bytes and self._lender is not None:
                lent = LentMemory(self._lender, size_bytes)
                return Buffer(torch.frombuffer(lent.bytes, dtype=torch.uint8), lent)
            if size_bytes:
                return Buffer(torch.frombuffer(mapped.allocate(size_bytes), dtype=torch.uint8))
        with allocating("a buffer for copies", size_bytes):
            return Buffer(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
