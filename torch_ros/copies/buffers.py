"""Publishing a copy: tensors that are made of others, gathered, or free to change at once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from torch_ros import arguments
from torch_ros.copies.ferry import Ferry
from torch_ros.copies.transforms import Box, Making, Transform, makings, pieces
from torch_ros.copies.turns import BUFFERS, HostBuffers, Turns
from torch_ros.errors import UsageError
from torch_ros.transfer.attending import Attendant, Copier
from torch_ros.transfer.registered import LocalState, finish_kernels
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.weights.local import LocalChunk, LocalTensor

HOST_MEMORY = torch.device("cpu")
PIECE_BYTES = 32 << 20  # made at a time; on a GPU two more of them are on their way to the host

Asked = Transform | Sequence[Transform] | None


@dataclass(frozen=True, slots=True)
class Copying:
    """How a state dict is published as a copy: the options of `ShardHandle.publish_copy`."""

    transforms: Sequence[Transform] = ()
    to: Literal["cpu"] | None = None
    copy_bytes: int | None = None
    more: tuple[object, ...] = ()  # options of features, each in its own class

    @classmethod
    def asked(cls, transform: Asked, to: Literal["cpu"] | None, copy_bytes: int | None) -> Self:
        """Raises: UsageError: An option of another type than it should have."""
        arguments.optional(arguments.one_of(("cpu",)))("to", to)
        arguments.optional(arguments.whole(0, 1 << 50))("copy_bytes", copy_bytes)
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
        return cls(tuple(transforms), to, copy_bytes)

    def along(self, options: object) -> Self:
        """The same with options of a feature, unless they are as if nobody had given any."""
        if options == type(options)():
            return self
        return replace(self, more=(*self.more, options))


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
        host: Makes what lies in host memory.
    """

    def __init__(self, host: HostBuffers) -> None:
        self._turns: dict[torch.device, Turns] = {}
        self.host = host

    def copier(self, copying: Copying) -> Copier:
        """Makes such a copy, for one save."""

        def fill(state: LocalState, attendants: Sequence[Attendant]) -> LocalState:
            return self.fill(state, copying, attendants)

        return Copier(copying.transforms, copying.more, fill, self.turn)

    @property
    def size_bytes(self) -> int:
        """The size of all buffers. Any thread may ask."""
        buffers = [each for turns in list(self._turns.values()) for each in list(turns.buffers)]
        return sum(each.room.nbytes for each in buffers)

    def turn(self) -> None:
        """Switch buffers: readers will be using the one filled last, and nobody the other one."""
        for turns in self._turns.values():
            turns.turn()

    def fill(
        self, state: LocalState, copying: Copying, attendants: Sequence[Attendant] = ()
    ) -> LocalState:
        """A copy of `state`, contiguous and transformed, in a buffer neither published nor in use.

        The state dict's objects are not copied: they are copies already.

        Raises: UsageError: A transform cannot make its tensors of these; they do not fit into
            `copying.copy_bytes`, beside what is kept of earlier ones; or whoever attends cannot do
            with them. Nothing was copied, unless a transform failed on its way.
        """
        made = makings(state.tensors, copying.transforms)
        plan = [_Part.all_of(making, copying.to) for making in made]
        for attendant in attendants:
            parts = ((part.making.tensor.fqn, part.device) for parts in plan for part in parts)
            attendant.begins(parts, state.objects)
        paths, sizes = _paths(state, made), _sizes(plan)
        if extra := self.host.extra_bytes(made, paths, state.objects):
            sizes[HOST_MEMORY] = sizes.get(HOST_MEMORY, 0) + extra
        self._make_room(sizes, copying.copy_bytes)
        memory = [chunk.tensor for tensor in state.tensors for chunk in tensor.chunks]
        finish_kernels({chunk.device for chunk in memory if chunk.is_cuda})
        rooms = {device: _Room(self._turns[device].take(sizes[device])) for device in sizes}
        tensors = _made(zip(made, plan, strict=True), rooms)
        pools = [buffer.room for turns in self._turns.values() for buffer in turns.buffers]
        for attendant in attendants:
            pool = attendant.pool(sum(room.end for room in rooms.values()))
            pools += [pool] if pool is not None else []
        buffer = self._turns[HOST_MEMORY].filled if HOST_MEMORY in sizes else None
        if buffer is not None:
            chunks = (chunk.tensor for tensor in tensors for chunk in tensor.chunks)
            buffer.end(memory for memory in chunks if memory.device == HOST_MEMORY)
        return LocalState(tensors, state.objects, paths, pools, buffer=buffer)

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
            self._turns[device] = Turns(size, device, self.host)


def _made(
    plan: Iterable[tuple[Making, Sequence[_Part]]], rooms: Mapping[torch.device, _Room]
) -> list[LocalTensor]:
    tensors, ferry = [], Ferry()
    for making, parts in plan:
        chunks: dict[str, list[LocalChunk]] = {name: [] for name in making.outputs}
        for part in parts:
            places = part.places(rooms[part.device])
            for name, place in places.items():
                if not chunks[name] or not making.outputs[name].is_single:
                    chunks[name].append(LocalChunk(part.boxes[name][0], place))
            is_here = part.device == part.chunk.tensor.device
            make(making, part.chunk.tensor, places, None if is_here else ferry)
        tensors += [making.output(name, chunks[name]) for name in making.outputs]
    ferry.land()
    return tensors


def make(
    making: Making, memory: torch.Tensor, places: Mapping[str, torch.Tensor], ferry: Ferry | None
) -> None:
    """Make the outputs of a chunk, piece by piece, on the chunk's device.

    Args:
        ferry: Brings them to their places, if these are on the host and the chunk is not.
    """
    for box, parts in pieces(making.outputs, memory, places, PIECE_BYTES):
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
