"""The tensors of this process that are shown to readers, or filled. Views, never copies."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from torch_ros.spans import Region
from torch_ros.transfer.named import Named, NamedTensors, tensors_of
from torch_ros.weights.columns import Ints
from torch_ros.weights.coverage import Sharding, sharding
from torch_ros.weights.digest import chunk_digests
from torch_ros.weights.local import LocalTensor, build, local_chunks, span_of
from torch_ros.weights.manifest import OBJECT, Blocks, Depth, Layout
from torch_ros.weights.writable import require_none, unwritable


class Buffer:
    """Memory that copies are published from. One of another kind may be in use by others, too."""

    def __init__(self, room: torch.Tensor) -> None:
        self.room: torch.Tensor = room

    def is_free(self) -> bool:
        """Whether nobody else uses it, nor will before it is shown again."""
        return True

    def begin(self) -> None:
        """The first byte of a content is about to be written."""

    def end(self, contents: Iterable[torch.Tensor]) -> None:
        """The last byte was written; `contents` lie in it."""

    def shown(self, registered: LocalState) -> None:
        """It is registered, and what was published before is unpublished. The word is 0."""

    def name(self, word: int) -> None:
        """Its content is that of this word, which readers see."""


@dataclass(frozen=True)
class Phase:
    """The part of a registered layout that is read together: its objects, or its tensors."""

    layout: Layout
    memory: Sequence[torch.Tensor]
    blocks: Ints  # the numbers of its blocks in the whole layout

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.memory)


@dataclass(eq=False)
class LocalState:
    """A state dict's tensors and pickled objects, as this rank has them. Keeps them allocated.

    Each question about every tensor is asked once: a step has little time for thousands.
    """

    tensors: Sequence[LocalTensor]
    objects: Mapping[str, torch.Tensor]
    paths: Mapping[str, tuple[str | int, ...]]

    pools: Sequence[torch.Tensor] = ()  # buffers that tensors lie in, to be registered whole
    buffer: Buffer | None = None  # if this is a copy: has those of its tensors in host memory
    sharded: Sequence[torch.Tensor] = ()  # the DTensors that some of `tensors` are parts of
    named: NamedTensors | None = None  # the user's own, where they are all of it
    known: LocalState | None = None  # registered, and equal to this but for its objects' content

    @classmethod
    def of(cls, given: Named) -> LocalState:
        """The user's own tensors. Raises as `tensors_of` and `local_chunks`."""
        tensors = tensors_of(given)
        return cls(local_chunks(tensors), {}, {}, named=NamedTensors(given, tensors))

    def holding(self, objects: Mapping[str, torch.Tensor]) -> LocalState:
        """This state, which is registered, with `objects`, of the same sizes as those that it has.
        When the new state is shown, they are copied over those; nothing is registered anew.
        """
        state = copy(self)
        state.objects, state.known = objects, self
        return state

    @cached_property
    def _built(self) -> tuple[Layout, Sequence[torch.Tensor]]:
        return build(self.tensors, self.objects, paths=self.paths)

    @property
    def layout(self) -> Layout:
        """Raises: UsageError: A tensor and an object have the same fqn."""
        return self._built[0]

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The memory of each chunk of the layout."""
        return self._built[1]

    @cached_property
    def ties(self) -> Mapping[int, int]:
        """The chunks that are the memory of an earlier one -> that one."""
        return _ties(self.memory)

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """Objects, if there are any, come before tensors; of tied chunks only the first is read."""
        count = range(len(self.memory))
        tensors = [n for n in count if not self._is_object(n) and n not in self.ties]
        found = [self._phase(tensors, is_objects=False)]
        if self.objects:
            found.insert(0, self._phase(filter(self._is_object, count), is_objects=True))
        return found

    def _is_object(self, chunk: int) -> bool:
        return self.layout.tensors[self.layout.chunks[chunk].tensor].dtype == OBJECT

    def _phase(self, chosen: Iterable[int], *, is_objects: bool) -> Phase:
        chunks, layout = [*chosen], self.layout
        memory, blocks = [self.memory[n] for n in chunks], _numbers(layout.blocks, chunks)
        return Phase(layout.part(chunks, is_objects=is_objects), memory, blocks)

    @property
    def sharding(self) -> Sharding:
        """The boxes that are here, as other ranks compare them."""
        return sharding(self.layout)

    @property
    def addresses(self) -> list[int]:
        return [address for address, _ in map(span_of, self.memory)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the chunks of its tensors are, objects left out."""
        return [span_of(each) for n, each in enumerate(self.memory) if not self._is_object(n)]

    def require_writable(self, call: str) -> None:
        """Raises: UsageError: One of the tensors lies in memory that cannot be written to."""
        require_none(call, self._unwritable)

    @cached_property
    def _unwritable(self) -> str | None:
        names = (self.layout.tensors[chunk.tensor].fqn for chunk in self.layout.chunks)
        return unwritable(zip(names, self.memory, strict=True))

    @cached_property
    def tied_blocks(self) -> tuple[Ints, Ints]:
        """The blocks of tied chunks, and those of the chunks that are read for them."""
        blocks = self.layout.blocks
        return _numbers(blocks, self.ties.keys()), _numbers(blocks, self.ties.values())

    @cached_property
    def overlaps(self) -> Ints | None:
        """For each block, a number that blocks of overlapping memory share; -1: it overlaps none.
        None: no block does. Ties do not count: they are one memory, and read once. Columns of one
        buffer count, since the bytes from the first to the last element are looked at.
        """
        starts, sizes = np.array([span_of(tensor) for tensor in self.memory]).reshape(-1, 2).T
        sizes[list(self.ties)] = 0
        # In order of address, a group ends where the next chunk begins behind all of it.
        order = np.lexsort((sizes, starts))
        reach = np.maximum.accumulate((starts + sizes)[order])
        is_apart = starts[order][1:] >= reach[:-1]
        if is_apart.all():
            return None
        groups = np.empty(len(order), np.int64)
        groups[order] = np.concatenate(([0], np.cumsum(is_apart)))
        groups[np.bincount(groups)[groups] == 1] = -1
        return np.repeat(groups, self.layout.blocks.counts)

    @property
    def devices(self) -> list[int]:
        return [tensor.get_device() for tensor in self.memory]

    @property
    def regions(self) -> list[Region]:
        """The memory to register, in order; none is empty."""
        pools = _regions(pool for pool in self.pools if pool.numel())  # in place of what is inside
        regions = _regions(tensor for tensor in self.memory if tensor.numel())
        if self.cuda_devices:
            regions = as_segments(regions, _cuda_segments())
        regions = {r for r in regions if not any(_is_inside(r, pool) for pool in pools)} | pools
        return sorted(regions, key=lambda r: (r.device, r.address, r.size_bytes))

    def unpinned(self) -> tuple[list[Region], Mapping[str, int]]:
        """The host memory that no device has pinned; and how many bytes are."""
        spans = {(*span_of(t), t.is_pinned()) for t in self.memory if t.is_cpu and t.numel()}
        free = [Region(start, size) for start, size, is_pinned in spans if not is_pinned]
        pinned = sum(size for _, size, is_pinned in spans if is_pinned)
        return free, {"a device has pinned it": pinned} if pinned else {}

    @cached_property
    def bytes_total(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)

    @cached_property
    def cuda_devices(self) -> frozenset[torch.device]:
        return frozenset(tensor.device for tensor in self.memory if tensor.is_cuda)

    @cached_property
    def tracked(self) -> Sequence[torch.Tensor]:
        """Memory of which autograd counts how often it was written: not of inference tensors."""
        return [tensor for tensor in self.memory if not tensor.is_inference()]

    def digests(self, depth: Depth) -> tuple[int, ...]:
        """Return a digest of the content of each chunk; none for "off"."""
        if depth == "off":
            return ()
        return chunk_digests(self.layout, self.memory, depth=depth)


def _ties(memory: Sequence[torch.Tensor]) -> dict[int, int]:
    """Chunks that are the very memory of an earlier one, and that one; by number."""
    if len({chunk.data_ptr() for chunk in memory}) == len(memory):
        return {}
    first: dict[tuple[object, ...], int] = {}
    leaders = [
        first.setdefault((chunk.data_ptr(), chunk.dtype, chunk.shape, chunk.stride()), number)
        for number, chunk in enumerate(memory)
    ]
    return {number: leader for number, leader in enumerate(leaders) if leader != number}


def _numbers(blocks: Blocks, chunks: Iterable[int]) -> Ints:
    each = [np.arange(blocks.counts[chunk]) + blocks.starts[chunk] for chunk in chunks]
    return np.concatenate(each) if each else np.zeros(0, np.int64)


def _regions(tensors: Iterable[torch.Tensor]) -> set[Region]:
    """Return the regions of these tensors, joined where they touch within a storage."""
    spans: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for tensor in tensors:
        spans[tensor.get_device(), tensor.untyped_storage().data_ptr()].add(span_of(tensor))
    regions = set()
    for (device, _), within in spans.items():
        [(start, size_bytes), *later] = sorted(within)  # the first region, as far as it is known
        for address, length in later:
            if address > start + size_bytes:  # it ends here, and another begins
                regions.add(Region(start, size_bytes, device))
                start, size_bytes = address, 0
            size_bytes = max(size_bytes, address + length - start)
        regions.add(Region(start, size_bytes, device))
    return regions


def as_segments(regions: Iterable[Region], segments: Iterable[Region]) -> set[Region]:
    """The segments that the regions lie in; and those that lie in none, as they are."""
    by_start = sorted(segments, key=lambda segment: (segment.device, segment.address))
    starts = [(segment.device, segment.address) for segment in by_start]
    found = set()
    for region in regions:
        before = bisect_right(starts, (region.device, region.address)) - 1
        segment = by_start[before] if before >= 0 else region
        found.add(segment if _is_inside(region, segment) else region)
    return found


def _cuda_segments() -> list[Region]:
    """Return the segments of torch's allocator, one cudaMalloc each, to be registered whole. A
    registration of a part of one costs as much, and with cuda_ipc a peer maps all of it anyway.
    Segments that can grow are none of these.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return []
    return [
        Region(segment["address"], segment["total_size"], segment["device"])
        for segment in torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        if not segment.get("is_expandable")
    ]


def _is_inside(region: Region, pool: Region) -> bool:
    end, pool_end = region.address + region.size_bytes, pool.address + pool.size_bytes
    return region.device == pool.device and pool.address <= region.address and end <= pool_end


def finish_kernels(devices: Iterable[torch.device]) -> None:
    """Wait for kernels queued on these GPUs: nothing else orders them before our reads."""
    for device in devices:
        torch.cuda.synchronize(device)  # of all streams: they may have been queued on any


def mark_written(registered: LocalState) -> None:
    """Tell autograd that these were overwritten: a backward that has saved one then raises."""
    torch.autograd.graph.increment_version(registered.tracked)
