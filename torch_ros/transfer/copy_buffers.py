"""Publishing a copy: tensors that are cast, gathered into one piece, or free to change at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from torch_ros import arguments
from torch_ros.errors import UsageError
from torch_ros.p2p import mapped
from torch_ros.transfer.registered import LocalState
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.weights.local import LocalChunk, LocalTensor, copy_bits

OPTIONS: Mapping[str, arguments.Check] = {
    "dtype": arguments.optional(arguments.instance(torch.dtype)),
    "keep_dtype": arguments.texts,
    "copy_bytes": arguments.optional(arguments.whole(0, 1 << 50)),
}
BUFFERS = 2  # one is filled while readers are still at the other


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
    """Memory that copies are published from; registered once, as long as what is copied fits."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[torch.Tensor]] = {}
        self._next = 0

    def turn(self) -> None:
        """Switch buffers: readers may be using the one filled last."""
        self._next = (self._next + 1) % BUFFERS

    def fill(self, state: LocalState, copying: Copying) -> LocalState:
        """A copy of `state`, contiguous and cast, in a buffer that is not published.

        The state dict's objects are not copied: they are copies already.

        Raises:
            UsageError: It does not fit into `copying.copy_bytes`, beside what is kept of
                earlier ones. Nothing was copied.
        """
        sizes = _sizes(state, copying)
        kept = {device: buffers[0].numel() for device, buffers in self._buffers.items()}
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
            self._buffers[device] = [_buffer(size, device) for _ in range(BUFFERS)]
        ends = dict.fromkeys(self._buffers, 0)
        tensors = []
        for tensor in state.tensors:
            dtype, chunks = copying.dtype_of(tensor), []
            for chunk in tensor.chunks:
                device = chunk.tensor.device
                start = ends[device]
                ends[device] = start + _room(chunk, dtype)
                size = chunk.tensor.numel() * dtype.itemsize
                place = self._buffers[device][self._next][start : start + size]
                copy = place.view(dtype).view(chunk.tensor.shape)
                if dtype == chunk.tensor.dtype:
                    copy_bits(copy, chunk.tensor)
                else:
                    _cast(tensor.fqn, copy, chunk.tensor)
                chunks.append(LocalChunk(chunk.offsets, copy))
            tensors.append(dataclasses.replace(tensor, dtype=dtype, chunks=tuple(chunks)))
        pools = [buffer for buffers in self._buffers.values() for buffer in buffers]
        return LocalState(tensors, state.objects, state.paths, pools)


def _cast(fqn: str, copy: torch.Tensor, tensor: torch.Tensor) -> None:
    try:
        copy.copy_(tensor)
    except NotImplementedError as error:
        raise UsageError(
            f"{fqn!r}: torch cannot cast {tensor.dtype} to {copy.dtype} ({error}); name it in "
            "keep_dtype"
        ) from error


def _buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and size_bytes:
        with suppress(OSError):  # it only makes readers on this host faster
            return torch.frombuffer(mapped.allocate(size_bytes), dtype=torch.uint8)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


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
