"""Deltas in files: the arrays of what has changed, on their way into a bucket and out of it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
import torch

from torch_ros.bucket.files import (
    PART_BYTES,
    Encoding,
    InBucket,
    StoredChange,
    StoredFile,
    StoredVersion,
    arrays_of,
    layout_of,
)
from torch_ros.bucket.objects import ObjectStore
from torch_ros.bucket.reading import WINDOW_BYTES, landed
from torch_ros.checkpoints.framing import NAMES
from torch_ros.codec.delta import (
    Changed,
    Delta,
    Piece,
    apply,
    compare,
    encode,
    merge,
    pieces,
    words,
)
from torch_ros.errors import CorruptDelta
from torch_ros.weights.digest import change_digest, combine
from torch_ros.weights.local import WORDS, build, local_chunks
from torch_ros.weights.manifest import Depth, dtype_name, dtype_named

PLACES_32_BITS = 2**31  # elements, up to which `indices` are int32


@dataclass(frozen=True, slots=True)
class Encoded:
    """The changes of all tensors of a version, and the arrays of those that have some."""

    changes: tuple[StoredChange, ...]
    arrays: Mapping[str, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class Filled:
    """A version that a load has left in tensors; they are not kept from being freed.

    Attributes:
        tensors: By name; and where its chunks lie, and how often torch has seen each written.
    """

    version: InBucket
    tensors: Mapping[str, tuple[weakref.ref[torch.Tensor], Sequence[object]]]

    @classmethod
    def of(cls, version: InBucket, tensors: Mapping[str, torch.Tensor]) -> Self:
        states = _states(tensors)
        return cls(version, {fqn: (weakref.ref(one), states[fqn]) for fqn, one in tensors.items()})

    def among(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same ones among these, to which nobody has written since, as torch has seen."""
        states, here = _states(tensors), self.tensors
        known = {fqn: one for fqn, one in tensors.items() if fqn in here and here[fqn][0]() is one}
        return {fqn: one for fqn, one in known.items() if states[fqn] == here[fqn][1]}


def _states(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Sequence[object]]:
    layout, memory = build(local_chunks(tensors), {})
    states: dict[str, list[object]] = {fqn: [] for fqn in tensors}
    for record, chunk in zip(layout.chunks, memory, strict=True):
        # Of an inference tensor torch does not see it: that one is unlike any other.
        seen = object() if chunk.is_inference() else chunk._version  # noqa: SLF001
        state = chunk.data_ptr(), chunk.size(), chunk.stride(), seen
        states[layout.tensors[record.tensor].fqn].append(state)
    return states


def difference(
    base: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], encoding: Encoding = "gaps"
) -> Encoded:
    """What makes `new` of `base`, which have the same tensors, in host memory."""
    changes, arrays = [], dict[str, torch.Tensor]()
    for fqn, tensor in new.items():
        parts = [part for part in compare(base[fqn], tensor) if len(part.places)]
        old, shape = words(base[fqn]), tuple(tensor.shape)
        digests = (
            change_digest(p.places, old[p.places], p.values, global_shape=shape, depth="full")
            for p in parts
        )
        count = sum(len(part.places) for part in parts)
        digest = f"{combine(digests):016x}"
        changes.append(StoredChange(fqn, dtype_name(tensor.dtype), shape, count, digest))
        if parts:
            made = _encoded(parts, tensor, encoding)
            arrays.update(zip(arrays_of(fqn, encoding), made, strict=True))
    return Encoded(tuple(changes), arrays)


def _encoded(
    parts: Sequence[Changed], tensor: torch.Tensor, encoding: Encoding
) -> Iterator[torch.Tensor]:
    if encoding == "coo":
        places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        is_small = tensor.numel() <= PLACES_32_BITS
        yield torch.from_numpy(places.astype(np.int32 if is_small else np.int64))
        yield _tensor_of(values).view(tensor.dtype if tensor.dtype in NAMES else torch.uint8)
        return
    for array in encode(parts, item_bytes=tensor.element_size()):
        yield _tensor_of(array)


def _tensor_of(array: np.ndarray) -> torch.Tensor:
    """safetensors has no numbers of 16 bytes, which stand for those of complex128."""
    return torch.from_numpy(array.view(np.uint64) if array.itemsize > 8 else array)


class InPlace:
    """Tensors, or this process's shards of them, into which deltas are written.

    Raises:
        UsageError: No plain tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._layout, self._memory = build(local_chunks(tensors), {})
        with torch.no_grad():
            # Deltas are written by the processor. What lies elsewhere takes a detour.
            self._host = [_on_host(chunk) for chunk in self._memory]
        ties = Counter(chunk.data_ptr() for chunk in self._memory)
        names = [self._layout.tensors[chunk.tensor].fqn for chunk in self._layout.chunks]
        self._tied = {
            fqn
            for fqn, chunk in zip(names, self._memory, strict=True)
            if ties[chunk.data_ptr()] > 1
        }

    def apply(self, store: ObjectStore, folder: str, stored: StoredVersion) -> str | None:
        """Make this version of its base, which is in the tensors.

        Returns:
            The name of a tensor that did not have the base, as far as can be told: all of it is
            here, in memory that no other name has, and the digest has not changed as it should.

        Raises:
            ManifestMismatch: A name, shape or dtype that the version does not have. Nothing was
                written.
            BucketError: A file is gone, or has other bytes than were archived.
        """
        here = self._pieces(stored)
        found: dict[str, int] = {}
        for change, delta in deltas_of(store, folder, stored, here.keys()):
            depth: Depth = "off" if change.fqn in self._tied else "full"
            parts = (
                apply(delta, self._host[piece.target_chunk], piece, depth=depth)
                for piece in here[change.fqn]
            )
            found[change.fqn] = combine(parts)
        torch.autograd.graph.increment_version([c for c in self._memory if not c.is_inference()])
        return next((c.fqn for c in stored.changes if not self._fits(c, here, found)), None)

    def end(self) -> None:
        """Put what took a detour where it belongs."""
        with torch.no_grad():
            for chunk, host in zip(self._memory, self._host, strict=True):
                if chunk.device.type != "cpu":
                    chunk.copy_(host)

    def _pieces(self, stored: StoredVersion) -> Mapping[str, Sequence[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in pieces([layout_of(stored.changes)], self._layout):
            found.setdefault(piece.fqn, []).append(piece)
        return found

    def _fits(
        self, change: StoredChange, here: Mapping[str, Sequence[Piece]], found: Mapping[str, int]
    ) -> bool:
        elements = sum(prod(piece.sizes) for piece in here.get(change.fqn, ()))
        if change.fqn in self._tied or elements < prod(change.shape) or not change.count:
            return True
        return found[change.fqn] == int(change.digest, 16)


def _on_host(chunk: torch.Tensor) -> torch.Tensor:
    if chunk.device.type == "cpu":
        return chunk
    return torch.empty_strided(chunk.size(), chunk.stride(), dtype=chunk.dtype, device="cpu").copy_(
        chunk
    )


@dataclass(frozen=True, slots=True)
class WeightPatch:
    """What has changed of a tensor: as engines take it that patch weights in place.

    Attributes:
        indices: Row-major numbers of elements in the whole tensor, ascending; int64.
        values: What is there now; of the tensor's dtype.
    """

    name: str
    shape: torch.Size
    indices: torch.Tensor
    values: torch.Tensor


def patch(change: StoredChange, deltas: Sequence[Delta]) -> WeightPatch:
    """One patch that does what these deltas of one tensor do one after the other."""
    parts = [part for part in merge(deltas).decode() if len(part.places)]
    places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    bits = _tensor_of(values).view(dtype_named(change.dtype))
    return WeightPatch(change.fqn, torch.Size(change.shape), torch.from_numpy(places), bits)


def deltas_of(
    store: ObjectStore, folder: str, stored: StoredVersion, wanted: Iterable[str]
) -> Iterator[tuple[StoredChange, Delta]]:
    """The deltas of the tensors that are wanted and have changed, each checked."""
    changes = {each.fqn: each for each in stored.changes if each.count}
    owners = {
        name: changes[fqn]
        for fqn in {*wanted} & changes.keys()
        for name in arrays_of(fqn, stored.encoding)
    }
    waiting: dict[str, np.ndarray] = {}
    for file in stored.files:
        key = f"{folder}/{file.name}"
        for name, array in _arrays(store, key, file, owners.keys()):
            change = owners[name]
            waiting[name] = array
            names = arrays_of(change.fqn, stored.encoding)
            if not waiting.keys() >= {*names}:
                continue
            try:
                delta = _decoded(change, [waiting.pop(each) for each in names], stored.encoding)
            except (CorruptDelta, ValueError) as error:
                store.refuse(key, f"the delta of {change.fqn!r}: {error}")
            if delta.changed != change.count:
                store.refuse(key, f"{change.fqn!r}: {delta.changed} changes of {change.count}")
            yield change, delta


def _decoded(change: StoredChange, arrays: Sequence[np.ndarray], encoding: Encoding) -> Delta:
    elements, item_bytes = prod(change.shape), dtype_named(change.dtype).itemsize
    width = WORDS[item_bytes]  # torch's; what a delta has, numpy's of the same
    empty = words(torch.empty(0, dtype=width, device="cpu"))
    if odd := [array.shape for array in arrays[-2:] if array.ndim != 1]:
        raise ValueError(f"an array of shape {list(odd[0])}, expected rows of elements")
    if encoding == "gaps":
        index, gaps, values = arrays
        return Delta.received(elements, index.reshape(-1, 4), gaps, values.view(empty.dtype))
    places, values = arrays[0].astype(np.int64), arrays[1].view(empty.dtype)
    if len(places) != len(values):
        raise ValueError(f"{len(places)} indices of {len(values)} values")
    is_inside = not len(places) or (places[0] >= 0 and places[-1] < elements)
    if not (is_inside and (np.diff(places) > 0).all()):
        raise ValueError(f"its indices do not ascend within {elements} elements")
    return Delta(elements, *encode([Changed(places, values)], item_bytes=item_bytes))


def _arrays(
    store: ObjectStore, key: str, file: StoredFile, wanted: Iterable[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Some arrays of a file, by name, in its order; a window of it at a time, or one array."""
    names, starts = {*wanted}, file.starts
    group: list[int] = []
    for number, tensor in enumerate(file.tensors):
        if tensor.fqn not in names:
            continue
        if group and starts[number + 1] - starts[group[0]] > WINDOW_BYTES:
            yield from _fetched(store, key, file, group)
            group = []
        group.append(number)
    if group:
        yield from _fetched(store, key, file, group)


def _fetched(
    store: ObjectStore, key: str, file: StoredFile, group: Sequence[int]
) -> Iterator[tuple[str, np.ndarray]]:
    starts = file.starts
    first, last = starts[group[0]], max(starts[group[-1] + 1] - 1, starts[group[0]])
    parts = range(first // PART_BYTES, min(last, file.size_bytes - 1) // PART_BYTES + 1)
    [(begin, content)] = landed(store, key, file, parts)
    for number in group:
        tensor = file.tensors[number]
        cut = content[starts[number] - begin : starts[number + 1] - begin].clone()  # it is aligned
        yield tensor.fqn, words(cut.view(dtype_named(tensor.dtype))).reshape(tensor.shape)
