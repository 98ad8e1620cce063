"""Publishing a copy: tensors that are cast, gathered into one piece, or free to change at once."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from torch_ros import arguments
from torch_ros.errors import UsageError
from torch_ros.transfer.registered import LocalState, Registered
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.transfer.turns import BUFFERS, Turns
from torch_ros.weights.local import LocalChunk, LocalTensor, copy_bits
from torch_ros.weights.manifest import Manifest

log = logging.getLogger(__name__)

HOST_MEMORY = torch.device("cpu")
OPTIONS: Mapping[str, arguments.Check] = {
    "dtype": arguments.optional(arguments.instance(torch.dtype)),
    "keep_dtype": arguments.texts,
    "copy_bytes": arguments.optional(arguments.whole(0, 1 << 50)),
}


@dataclass(frozen=True, slots=True)
class Copying:
    """How a state dict is published as a copy: the options of `ShardHandle.publish_copy`."""

    dtype: torch.dtype | None = None
    keep_dtype: Sequence[str] = ()
    copy_bytes: int | None = None

    def __post_init__(self) -> None:
        arguments.check({name: getattr(self, name) for name in OPTIONS}, OPTIONS)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise UsageError(f"dtype={self.dtype}: expected a floating-point dtype to cast to")

    def dtype_of(self, tensor: LocalTensor) -> torch.dtype:
        is_kept = any(fnmatchcase(tensor.fqn, pattern) for pattern in self.keep_dtype)
        if self.dtype is None or is_kept or not tensor.dtype.is_floating_point:
            return tensor.dtype
        return self.dtype


class CopyBuffers:
    """Memory that copies are published from; registered once, as long as what is copied fits.

    Args:
        agent: Of this process.
        borrow_bytes: How much of the host memory among it may be lent at a time.
    """

    def __init__(self, agent: str, borrow_bytes: int) -> None:
        self._turns: dict[torch.device, Turns] = {}
        self._lender = agent if borrow_bytes else None
        self._borrow_bytes = borrow_bytes
        self._outgrown: list[Turns] = []  # whose buffers were too small, and may be lent

    def turn(self) -> None:
        """Switch buffers: readers may be using the one filled last."""
        for turns in self._turns.values():
            turns.turn()

    def lend(self, registered: Registered) -> None:
        """Lend the copy that was filled last, if the bound allows, and no other from now on.

        Called when the version before is unpublished, and before this one is named.
        """
        copy = registered.lent
        if copy is None:
            return
        addresses = tuple(map(copy.offset_of, registered.addresses))
        manifest = Manifest(registered.layout, addresses, tuple(registered.devices), b"")
        copy.describe(manifest.encode())
        turns = [*self._outgrown, *self._turns.values()]
        lent_bytes = sum(lent.content_bytes for each in turns for lent in each.lent(but=copy))
        self._outgrown = [each for each in self._outgrown if each.lent(but=None)]
        if lent_bytes + copy.content_bytes <= self._borrow_bytes:
            copy.open()
        else:
            log.info(
                "a copy of %d bytes is not lent: %d bytes are, and borrow_bytes=%d",
                copy.content_bytes,
                lent_bytes,
                self._borrow_bytes,
            )

    def fill(self, state: LocalState, copying: Copying) -> LocalState:
        """A copy of `state`, contiguous and cast, in a buffer that is neither published nor lent.

        The state dict's objects are not copied: they are copies already.

        Raises:
            UsageError: It does not fit into `copying.copy_bytes`, beside what is kept of
                earlier ones. Nothing was copied.
        """
        sizes = _sizes(state, copying)
        if self._lender is not None:
            sizes[HOST_MEMORY] = sizes.get(HOST_MEMORY, 0) + _manifest_room(state)
        self._make_room(sizes, copying)
        rooms = {device: self._turns[device].take() for device in sizes}
        ends = dict.fromkeys(sizes, 0)
        tensors = []
        for tensor in state.tensors:
            dtype, chunks = copying.dtype_of(tensor), []
            for chunk in tensor.chunks:
                device = chunk.tensor.device
                start = ends[device]
                ends[device] = start + _room(chunk, dtype)
                size = chunk.tensor.numel() * dtype.itemsize
                copy = rooms[device][start : start + size].view(dtype).view(chunk.tensor.shape)
                if dtype == chunk.tensor.dtype:
                    copy_bits(copy, chunk.tensor)
                else:
                    _cast(tensor.fqn, copy, chunk.tensor)
                chunks.append(LocalChunk(chunk.offsets, copy))
            tensors.append(dataclasses.replace(tensor, dtype=dtype, chunks=tuple(chunks)))
        pools = [buffer.room for turns in self._turns.values() for buffer in turns.buffers]
        lent = self._turns[HOST_MEMORY].filled.lent if self._lender is not None else None
        if lent is not None:
            here = (c.tensor for t in tensors for c in t.chunks if c.tensor.device == HOST_MEMORY)
            lent.end(sum(chunk.nbytes for chunk in here))
        return LocalState(tensors, state.objects, state.paths, pools, lent=lent)

    def _make_room(self, sizes: Mapping[torch.device, int], copying: Copying) -> None:
        kept = {device: turns.size_bytes for device, turns in self._turns.items()}
        # A buffer that is too small is published still while the ones in its place are filled.
        new = {device: size for device, size in sizes.items() if size > kept.get(device, 0)}
        needed = BUFFERS * (sum(kept.values()) + sum(new.values()))
        if copying.copy_bytes is not None and needed > copying.copy_bytes:
            raise UsageError(
                f"copies of this shard take {needed} bytes ({BUFFERS} buffers, and those of "
                f"earlier copies), more than copy_bytes={copying.copy_bytes}; raise it, cast "
                "to a smaller dtype, or publish in place"
            )
        for device, size in new.items():
            made = Turns(size, device, self._lender)
            self._outgrown += filter(None, [self._turns.get(device)])
            self._turns[device] = made


def _cast(fqn: str, copy: torch.Tensor, tensor: torch.Tensor) -> None:
    try:
        copy.copy_(tensor)
    except NotImplementedError as error:
        raise UsageError(
            f"{fqn!r}: torch cannot cast {tensor.dtype} to {copy.dtype} ({error}); name it in "
            "keep_dtype"
        ) from error


def _sizes(state: LocalState, copying: Copying) -> dict[torch.device, int]:
    sizes: dict[torch.device, int] = {}
    for tensor in state.tensors:
        dtype = copying.dtype_of(tensor)
        for chunk in tensor.chunks:
            device = chunk.tensor.device
            sizes[device] = sizes.get(device, 0) + _room(chunk, dtype)
    return sizes


def _room(chunk: LocalChunk, dtype: torch.dtype) -> int:
    return aligned(chunk.tensor.numel() * dtype.itemsize)


def _manifest_room(state: LocalState) -> int:
    """More than the manifest of a copy takes: msgpack has nine bytes at most for a number."""
    names = sum(len(t.fqn.encode()) + 9 * len(t.shape) + 64 for t in state.tensors)
    paths = sum(len(repr(path).encode()) for path in state.paths.values())
    objects = sum(len(fqn.encode()) + 192 for fqn in state.objects)
    chunks = sum(128 + 27 * len(t.shape) for t in state.tensors for _ in t.chunks)
    return aligned(256 + names + paths + objects + chunks)
