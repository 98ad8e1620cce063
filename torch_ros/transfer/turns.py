"""Buffers that copies are published from in turn, and may be lent: docs/PROTOCOL.md#loans."""

from contextlib import suppress
from dataclasses import dataclass

import torch

from torch_ros.p2p import mapped
from torch_ros.p2p.lending import LentMemory

BUFFERS = 2  # one is filled while readers are still at the other


@dataclass(frozen=True, slots=True)
class Buffer:
    room: torch.Tensor
    lent: LentMemory | None = None  # its file, if it may be lent


class Turns:
    """The buffers of one device, all of one size: one is published, another is filled.

    Args:
        lender: The agent for which those in host memory may be lent; None: they are not.
    """

    def __init__(self, size_bytes: int, device: torch.device, lender: str | None) -> None:
        self.size_bytes, self._device, self._lender = size_bytes, device, lender
        self.buffers = [self._made() for _ in range(BUFFERS)]
        self._published: Buffer | None = None
        self.filled = self.buffers[0]

    def take(self) -> torch.Tensor:
        """The room of a buffer that is neither published nor lent, to be filled."""
        unpublished = [b for b in (self.filled, *self.buffers) if b is not self._published]
        free = (each for each in unpublished if each.lent is None or each.lent.close())
        taken = next(free, None)
        if taken is None:  # all of these are lent
            taken = self._made()
            self.buffers.append(taken)
        self.filled = taken
        if taken.lent is not None:
            taken.lent.begin()
        return taken.room

    def turn(self) -> None:
        """The buffer filled last is about to be published."""
        self._published = self.filled

    def _made(self) -> Buffer:
        size_bytes = self.size_bytes
        if self._device.type == "cpu" and size_bytes:
            with suppress(OSError):  # it only makes readers on this host faster
                if self._lender is not None:
                    lent = LentMemory(self._lender, size_bytes)
                    return Buffer(torch.frombuffer(lent.bytes, dtype=torch.uint8), lent)
                room = torch.frombuffer(mapped.allocate(size_bytes), dtype=torch.uint8)
                return Buffer(room)
        return Buffer(torch.empty(size_bytes, dtype=torch.uint8, device=self._device))
