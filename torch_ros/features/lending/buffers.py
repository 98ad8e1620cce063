"""Buffers for copies that may be lent, and how many bytes of them are: docs/protocol/lending.md."""

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_ros.copies.buffers import CopyBuffers
from torch_ros.copies.transforms import Making
from torch_ros.copies.turns import HostBuffers
from torch_ros.features.lending.memory import LentMemory
from torch_ros.printable import log_of
from torch_ros.transfer.registered import Buffer, LocalState
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.weights.manifest import Manifest

log: logging.Logger = log_of(__name__)


class LentBuffer(Buffer):
    """A file that others map while they have borrowed it."""

    def __init__(self, lender: "Lender", size_bytes: int) -> None:
        self._lender, self.lent = lender, LentMemory(lender.agent, size_bytes)
        super().__init__(torch.frombuffer(self.lent.bytes, dtype=torch.uint8))

    def is_free(self) -> bool:
        return self.lent.close()

    def begin(self) -> None:
        self.lent.begin()

    def end(self, contents: Iterable[torch.Tensor]) -> None:
        self.lent.end(sum(tensor.nbytes for tensor in contents))

    def shown(self, registered: LocalState) -> None:
        addresses = tuple(map(self.lent.offset_of, registered.addresses))
        manifest = Manifest(registered.layout, addresses, tuple(registered.devices), b"")
        self.lent.describe(manifest.encode())
        self._lender.lend(self.lent)

    def name(self, word: int) -> None:
        self.lent.name(word)


class Lender(HostBuffers):
    """The buffers of one process.

    Args:
        borrow_bytes: How much may be lent at a time.
    """

    def __init__(self, agent: str, borrow_bytes: int) -> None:
        self.agent, self._borrow_bytes = agent, borrow_bytes
        self._open: list[LentMemory] = []  # what somebody may have, also of buffers outgrown since

    def extra_bytes(
        self,
        made: Sequence[Making],
        paths: Mapping[str, tuple[str | int, ...]],
        objects: Mapping[str, torch.Tensor],
    ) -> int:
        """More than the manifest of a copy takes: msgpack has nine bytes at most for a number."""
        size = sum(len(repr(path).encode()) for path in paths.values())
        size += sum(len(fqn.encode()) + 192 for fqn in objects)
        for making in made:
            dims, chunks = len(making.tensor.shape), len(making.tensor.chunks)
            for name in making.outputs:
                size += len(name.encode()) + 9 * dims + 64 + chunks * (128 + 27 * dims)
        return aligned(256 + size)

    def make(self, size_bytes: int) -> Buffer:
        return LentBuffer(self, size_bytes)

    def lend(self, copy: LentMemory) -> None:
        """Lend the copy that was filled last, if the bound allows, and no other from now on.

        Called when the version before is unpublished, and before this one is named.
        """
        self._open = [each for each in self._open if each is not copy and not each.close()]
        lent_bytes = sum(each.content_bytes for each in self._open)
        if lent_bytes + copy.content_bytes <= self._borrow_bytes:
            copy.open()
            self._open.append(copy)
        else:
            log.info(
                "a copy of %d bytes is not lent: %d bytes are, and borrow_bytes=%d",
                copy.content_bytes,
                lent_bytes,
                self._borrow_bytes,
            )


def lend(copies: CopyBuffers, agent: str, borrow_bytes: int) -> None:
    """Let others borrow copies of this process; 0: none."""
    if borrow_bytes:
        copies.host = Lender(agent, borrow_bytes)
