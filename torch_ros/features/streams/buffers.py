"""Whole tensors that come one after the other, through two buffers that are filled in turn."""

import math
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

import numpy as np
import torch

from torch_ros.allocation import allocating
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Registration, Transport
from torch_ros.spans import Region
from torch_ros.transfer.reading import Reading
from torch_ros.transfer.registered import Phase
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.weights.manifest import (
    ChunkRecord,
    Layout,
    LogicalTensor,
    TensorRecord,
    dtype_named,
    item_bytes,
)
from torch_ros.weights.plan import ReadPlan

BUFFERS = 2  # one is filled while the other is used
SHAPES_MAX = 4096  # kept; a model has a few

Named = Sequence[tuple[str, LogicalTensor]]
Offsets = tuple[int, ...]


def layout_of(tensors: Named) -> Layout:
    """The layout of whole tensors, each contiguous, in this order. An empty one has no chunk."""
    chunks = []
    for number, (_, (_, shape)) in enumerate(tensors):
        if 0 not in shape:
            begin, strides = _whole(shape)
            chunks.append(ChunkRecord(number, begin, shape, strides, spread=False))
    records = (TensorRecord(fqn, dtype, shape) for fqn, (dtype, shape) in tensors)
    return Layout(tuple(records), tuple(chunks))


@lru_cache(SHAPES_MAX)
def _whole(shape: Offsets) -> tuple[Offsets, Offsets]:
    """Where a contiguous tensor begins, and its strides: one object for all of a shape."""
    return (0,) * len(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors that are in a buffer at the same time, and each one's place there in bytes."""

    tensors: Named
    starts: Sequence[int]
    size_bytes: int
    first_chunk: int  # its number in the layout of all tensors

    @property
    def chunk_count(self) -> int:
        return sum(0 not in tensor.shape for _, tensor in self.tensors)

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Each tensor, in one operation of torch. An empty one keeps no buffer."""
        found = []
        typed: dict[str, torch.Tensor] = {}
        for (fqn, (name, shape)), start in zip(self.tensors, self.starts, strict=True):
            if 0 in shape:
                found.append((fqn, torch.empty(shape, dtype=dtype_named(name), device="cpu")))
                continue
            if name not in typed:
                dtype = dtype_named(name)
                typed[name] = buffer[: buffer.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
            place = start // typed[name].itemsize  # a start suits any dtype; the buffer's is 0
            found.append((fqn, typed[name].as_strided(shape, _whole(shape)[1], place)))
        return found

    def phase(self, views: Sequence[tuple[str, torch.Tensor]]) -> Phase:
        layout = layout_of(self.tensors)
        memory = [view for _, view in views if view.numel()]
        return Phase(layout, memory, np.arange(layout.blocks.total))

    def plan(self, whole: ReadPlan) -> ReadPlan:
        """The part of a plan for all tensors that fills this one."""
        first, end = self.first_chunk, self.first_chunk + self.chunk_count
        rows = np.arange(*np.searchsorted(whole.direct.target_chunk, [first, end]))
        direct = whole.direct.take(rows)
        direct = replace(direct, target_chunk=direct.target_chunk - first)
        ends = (bisect_left(whole.staged, n, key=attrgetter("target_chunk")) for n in (first, end))
        staged = tuple(
            replace(piece, target_chunk=piece.target_chunk - first)
            for piece in whole.staged[slice(*ends)]
        )
        read = int(direct.size_bytes.sum()) + sum(piece.size_bytes for piece in staged)
        return ReadPlan(direct, staged, self.size_bytes, read)


def parts_of(tensors: Named, buffer_bytes: int) -> list[Part]:
    """Fill buffers in order; a tensor that is larger than one has a buffer for itself."""
    parts: list[Part] = []
    some: list[tuple[str, LogicalTensor]] = []
    starts: list[int] = []
    end = chunks = 0

    def close() -> None:
        nonlocal some, starts, end, chunks
        parts.append(Part(some, starts, end, chunks))
        chunks += parts[-1].chunk_count
        some, starts, end = [], [], 0

    for named in tensors:
        _, tensor = named
        size = math.prod(tensor.shape) * item_bytes(tensor.dtype)
        if some and aligned(end) + size > buffer_bytes:
            close()
        starts.append(aligned(end))
        some.append(named)
        end = starts[-1] + size
    if some:
        close()
    return parts


class Buffers:
    """The memory that parts are read into, registered until `close`; views of it stay valid."""

    def __init__(self, transport: Transport, pages: Pages, parts: Sequence[Part]) -> None:
        sizes = [max((p.size_bytes for p in parts[n::BUFFERS]), default=0) for n in range(BUFFERS)]
        self._parts, self._phases = parts, dict[int, Phase]()
        with allocating("a stream with two buffers", sum(sizes), "pass a smaller buffer_bytes"):
            self._memory = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        self._lent: list[weakref.ref[object]] = []
        self._registrations: list[Registration] = []
        try:
            for buffer in filter(torch.Tensor.numel, self._memory):
                region = Region(buffer.data_ptr(), buffer.nbytes)
                pages.ask([region])
                self._registrations.append(transport.register([region]))
        except BaseException:
            self.close()
            raise

    @property
    def sizes(self) -> list[int]:
        return [memory.nbytes for memory in self._memory]

    @property
    def is_free(self) -> bool:
        """Whether nobody has anything any more of what was lent."""
        return all(lent() is None for lent in self._lent)

    def lend(self) -> list[torch.Tensor]:
        """The memory, for one stream to hand out: not free while a view of it is left."""
        arrays = [memory.numpy()[:] for memory in self._memory]
        self._lent = [weakref.ref(array) for array in arrays]
        return [torch.from_numpy(array) for array in arrays]

    def phase(self, number: int) -> Phase:
        """Where the part of that number is read into."""
        if number not in self._phases:
            part = self._parts[number]
            self._phases[number] = part.phase(part.views(self._memory[number % BUFFERS]))
        return self._phases[number]

    def close(self) -> None:
        """Nothing is read into them any more."""
        while self._registrations:
            registration = self._registrations.pop()
            with suppress(Exception):  # its transport has ended
                registration.close()


class Lane:
    """The means of a stream's reads. For the next one of the same tensors, all of it is prepared.

    One stream at a time.
    """

    target: Layout
    parts: list[Part]

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.target, self.parts = Layout((), ()), list[Part]()
        self._named: Named = ()
        self._buffer_bytes = 0
        self._buffers: Buffers | None = None
        self._whole: ReadPlan | None = None
        self._plans = dict[int, ReadPlan]()  # of the parts, by number

    def divide(self, named: Named, buffer_bytes: int) -> None:
        """Have these tensors come, in buffers of that size."""
        if (named, buffer_bytes) != (self._named, self._buffer_bytes):
            self._let_go()
            self._named, self._buffer_bytes, self._whole = named, buffer_bytes, None
            self.target, self.parts = layout_of(named), parts_of(named, buffer_bytes)

    def buffers(self, transport: Transport, pages: Pages) -> Buffers:
        """Those of the last stream, if nobody has any of its tensors; else new ones."""
        if self._buffers is None or not self._buffers.is_free:
            self._let_go()
            self._buffers = Buffers(transport, pages, self.parts)
        return self._buffers

    def plan(self, number: int, whole: ReadPlan) -> ReadPlan:
        """The same plan each time, by which its prepared reads are found."""
        if whole is not self._whole:
            self._whole, self._plans = whole, {}
        if number not in self._plans:
            self._plans[number] = self.parts[number].plan(whole)
        return self._plans[number]

    def close(self) -> None:
        """Let go of all. Nothing is in flight."""
        self._let_go()
        self.reading.close()
        self.reading.peers.close()

    def _let_go(self) -> None:
        self.reading.forget()
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.close()
