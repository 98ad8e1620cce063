"""Publishing a copy: tensors that are made of others, gathered, or free to change at once."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from torch_ros import arguments
from torch_ros.errors import UsageError
from torch_ros.p2p.lending import LentMemory
from torch_ros.printable import log_of
from torch_ros.transfer.deltas import CopyDeltas
from torch_ros.transfer.ferry import Ferry
from torch_ros.transfer.registered import LocalState, Registered, finish_kernels
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.transfer.turns import BUFFERS, Turns
from torch_ros.weights.delta_table import ENTRIES_MAX, TABLE_BYTES
from torch_ros.weights.local import LocalChunk, LocalTensor
from torch_ros.weights.manifest import Manifest
from torch_ros.weights.transforms import Box, Making, Transform, makings

log: logging.Logger = log_of(__name__)

HOST_MEMORY = torch.device("cpu")
RING_SHARE = 8  # of a copy's bytes: five deltas of 1 % of bfloat16, and room for the next
RING_BYTES_MIN = 1 << 16
PIECE_BYTES = 32 << 20  # made at a time; on a GPU two more of them are on their way to the host

Asked = Transform | Sequence[Transform] | None


@dataclass(frozen=True, slots=True)
class Copying:
    """How a state dict is published as a copy: the options of `ShardHandle.publish_copy`."""

    transforms: Sequence[Transform] = ()
    to: Literal["cpu"] | None = None
    copy_bytes: int | None = None
    deltas: int = 0
    delta_bytes: int | None = None

    @classmethod
    def asked(
        cls,
        transform: Asked,
        to: Literal["cpu"] | None,
        copy_bytes: int | None,
        deltas: int = 0,
        delta_bytes: int | None = None,
    ) -> Self:
        """Raises: UsageError: An option of another type than it should have."""
        arguments.optional(arguments.one_of(("cpu",)))("to", to)
        arguments.optional(arguments.whole(0, 1 << 50))("copy_bytes", copy_bytes)
        arguments.whole(0, ENTRIES_MAX)("deltas", deltas)
        arguments.optional(arguments.whole(2 * TABLE_BYTES, 1 << 50))("delta_bytes", delta_bytes)
        if transform is None:
            transforms: Sequence[Transform] = ()
        else:
            transforms = transform if isinstance(transform, Sequence) else (transform,)
        for each in transforms:
            if isinstance(each, type) or not isinstance(each, Transform):
                raise UsageError(
                    f"transform={transform!r}: expected a transform, such as "
                    "torch_ros.Cast(torch.bfloat16), or a list of them"
                )
            if type(each).__repr__ is object.__repr__:
                raise UsageError(
                    f"transform={each!r}: its repr says where it is and not what it does, by which "
                    "ranks compare theirs; make it a frozen dataclass"
                )
        return cls(tuple(transforms), to, copy_bytes, deltas, delta_bytes)

    def ring_bytes(self, copy_bytes: int) -> int:
        """The size of the ring for deltas of copies of that size; 0: none are asked for."""
        if not self.deltas:
            return 0
        return self.delta_bytes or TABLE_BYTES + max(copy_bytes // RING_SHARE, RING_BYTES_MIN)


@dataclass(slots=True)
class _Room:
    """A buffer that is filled from its beginning."""

    buffer: torch.Tensor
    end: int = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        start = self.end
        self.end += aligned(size_bytes)
        return self.buffer[start : start + size_bytes]


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk, and the boxes of which its copy consists, by name."""

    making: Making
    chunk: LocalChunk
    boxes: Mapping[str, Box]
    device: torch.device  # of the copy

    @classmethod
    def all_of(cls, making: Making, to: str | None) -> list[Self]:
        return [
            cls(making, chunk, making.boxes(chunk), torch.device(to or chunk.tensor.device))
            for chunk in making.tensor.chunks
        ]

    def size_bytes(self, name: str) -> int:
        return math.prod(self.boxes[name][1]) * self.making.outputs[name].dtype.itemsize

    def places(self, room: _Room) -> dict[str, torch.Tensor]:
        """Where to make the outputs of the chunk."""
        return {
            name: room.take(self.size_bytes(name)).view(self.making.outputs[name].dtype).view(sizes)
            for name, (_, sizes) in self.boxes.items()
        }


class CopyBuffers:
    """Memory that copies are published from; registered once, as long as what is copied fits.

    Args:
        agent: Of this process.
        borrow_bytes: How much of the host memory among it may be lent at a time.
        deltas: Between its copies.
    """

    def __init__(self, agent: str, borrow_bytes: int, deltas: CopyDeltas | None = None) -> None:
        self._deltas = deltas or CopyDeltas()
        self._turns: dict[torch.device, Turns] = {}
        self._lender = agent if borrow_bytes else None
        self._borrow_bytes = borrow_bytes
        self._open: list[LentMemory] = []  # what somebody may have, also of buffers outgrown since

    @property
    def size_bytes(self) -> int:
        """The size of all buffers. Any thread may ask."""
        buffers = [each for turns in list(self._turns.values()) for each in list(turns.buffers)]
        return sum(each.room.nbytes for each in buffers)

    def turn(self) -> None:
        """Switch buffers: readers will be using the one filled last, and nobody the other one."""
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

    def fill(self, state: LocalState, copying: Copying) -> LocalState:
        """A copy of `state`, contiguous and transformed, in a buffer neither published nor lent.

        The state dict's objects are not copied: they are copies already.

        Raises:
            UsageError: A transform cannot make its tensors of these; they do not fit into
                `copying.copy_bytes`, beside what is kept of earlier ones; or no deltas can be made
                of them. Nothing was copied, unless a transform failed on its way.
        """
        made = makings(state.tensors, copying.transforms)
        plan = [_Part.all_of(making, copying.to) for making in made]
        if copying.deltas:
            _require_comparable(plan, state.objects)
        self._deltas.end()  # nobody reads the buffer that is filled any more
        paths, sizes = _paths(state, made), _sizes(plan)
        if self._lender is not None:
            room = _manifest_room(made, paths, state.objects)
            sizes[HOST_MEMORY] = sizes.get(HOST_MEMORY, 0) + room
        self._make_room(sizes, copying.copy_bytes)
        memory = [chunk.tensor for tensor in state.tensors for chunk in tensor.chunks]
        finish_kernels({chunk.device for chunk in memory if chunk.is_cuda})
        rooms = {device: _Room(self._turns[device].take(sizes[device])) for device in sizes}
        tensors = _made(zip(made, plan, strict=True), rooms)
        pools = [buffer.room for turns in self._turns.values() for buffer in turns.buffers]
        ring = self._deltas.prepare(copying.ring_bytes(sum(room.end for room in rooms.values())))
        if ring is not None:
            pools.append(ring)
        lent = self._turns[HOST_MEMORY].filled.lent if self._lender is not None else None
        if lent is not None:
            here = (c.tensor for t in tensors for c in t.chunks if c.tensor.device == HOST_MEMORY)
            lent.end(sum(chunk.nbytes for chunk in here))
        return LocalState(tensors, state.objects, paths, pools, lent=lent)

    def _make_room(self, sizes: Mapping[torch.device, int], copy_bytes: int | None) -> None:
        kept = {device: turns.size_bytes for device, turns in self._turns.items()}
        # A buffer that is too small is published still while the ones in its place are filled.
        new = {device: size for device, size in sizes.items() if size > kept.get(device, 0)}
        needed = BUFFERS * (sum(kept.values()) + sum(new.values()))
        if copy_bytes is not None and needed > copy_bytes:
            raise UsageError(
                f"copies of this shard take {needed} bytes ({BUFFERS} buffers, and those of "
                f"earlier copies), more than copy_bytes={copy_bytes}; raise it, cast "
                "to a smaller dtype, or publish in place"
            )
        for device, size in new.items():
            self._turns[device] = Turns(size, device, self._lender)


def _made(
    plan: Iterable[tuple[Making, Sequence[_Part]]], rooms: Mapping[torch.device, _Room]
) -> list[LocalTensor]:
    tensors, ferry = [], Ferry()
    for making, parts in plan:
        chunks: dict[str, list[LocalChunk]] = {name: [] for name in making.outputs}
        for part in parts:
            places = part.places(rooms[part.device])
            for name, place in places.items():
                chunks[name].append(LocalChunk(part.boxes[name][0], place))
            is_here = part.device == part.chunk.tensor.device
            make(making, part.chunk.tensor, places, None if is_here else ferry)
        tensors += [making.output(name, chunks[name]) for name in making.outputs]
    ferry.land()
    return tensors


def _require_comparable(
    plan: Sequence[Sequence[_Part]], objects: Mapping[str, torch.Tensor]
) -> None:
    """Raises: UsageError: No delta could be made of these copies, or none could be read."""
    if objects:
        raise UsageError(
            f"deltas: the state dict has objects ({next(iter(objects))!r}), and a replica that "
            "updates by deltas has tensors only; save these as another model, or leave deltas out"
        )
    for part in (part for parts in plan for part in parts):
        if part.device != HOST_MEMORY:
            raise UsageError(
                f"deltas: the copy of {part.making.tensor.fqn!r} would be on {part.device}; they "
                'are made in host memory: pass to="cpu"'
            )


def make(
    making: Making, memory: torch.Tensor, places: Mapping[str, torch.Tensor], ferry: Ferry | None
) -> None:
    """Make the outputs of a chunk, piece by piece, on the chunk's device.

    Args:
        ferry: Brings them to their places, if these are on the host and the chunk is not.
    """
    for box, parts in making.pieces(memory, places, PIECE_BYTES):
        if ferry is None:
            making.fill(box, parts)
        else:
            made = {
                name: torch.empty(part.shape, dtype=part.dtype, device=box.device)
                for name, part in parts.items()
            }
            making.fill(box, made)
            ferry.bring([*made.values()], [*parts.values()])


def _paths(state: LocalState, made: Sequence[Making]) -> dict[str, tuple[str | int, ...]]:
    """Where a state dict has the tensors that are made of its own: beside these."""
    paths = dict(state.paths)
    for making in made:
        fqn, path = making.tensor.fqn, state.paths.get(making.tensor.fqn, ())
        for name in making.outputs.keys() - {fqn}:
            if name.startswith(fqn) and path and isinstance(path[-1], str):
                paths[name] = (*path[:-1], path[-1] + name.removeprefix(fqn))
    return paths


def _sizes(plan: Sequence[Sequence[_Part]]) -> dict[torch.device, int]:
    sizes: dict[torch.device, int] = {}
    for part in (part for parts in plan for part in parts):
        size = sum(aligned(part.size_bytes(name)) for name in part.boxes)
        sizes[part.device] = sizes.get(part.device, 0) + size
    return sizes


def _manifest_room(
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
