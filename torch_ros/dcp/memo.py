"""Findings about the last state dict, so that an unchanged one costs little.

Everything that depends on structure only (names, layouts, which tensor has which chunk) is kept by
the tokens of the state dict's outline. No tensor is: a memo keeps no memory allocated.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from torch_ros.dcp.outline import Outline
from torch_ros.errors import TorchRosError, UsageError
from torch_ros.face.handle import ShardHandle
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import LocalChunk, LocalTensor
from torch_ros.weights.manifest import Layout

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    offsets: tuple[int, ...]
    leaf: int  # among the outline's leaves, the tensor of which this is a chunk
    skip: int  # elements from the local tensor's first to the chunk's first
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _TensorPlan:
    fqn: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    spread: bool  # over ranks
    chunks: tuple[_ChunkPlan, ...]

    def of(self, local: Mapping[int, torch.Tensor]) -> LocalTensor:
        """The tensor of a new state dict: its chunks are views of that one's `local` tensors."""
        chunks = []
        for chunk in self.chunks:
            tensor = local[chunk.leaf].detach()
            start = tensor.storage_offset() + chunk.skip
            view = tensor.as_strided(chunk.sizes, chunk.strides, start)
            chunks.append(LocalChunk(chunk.offsets, view))
        return LocalTensor(self.fqn, self.dtype, self.shape, tuple(chunks), self.spread)


@dataclass(slots=True)
class Memo:
    """A state dict that was saved, or loaded into, by one handle.

    Args:
        tokens, addresses: From its outline.
        source: Everything else that the answer depended on; for a load, the layouts of what it
            reads.
        objects: Its objects: fqn and number among the outline's leaves.
        paths: Of what is registered, by fqn.
        layout, chunk_addresses: Of what is registered, if that is this state dict.
        mappings: For a load, where the objects are in the state dict.
        pickles: The last value of each object that is easily compared, and its pickle.
    """

    tokens: list[object]
    addresses: list[int]
    source: tuple[str, ...]
    tensors: Sequence[_TensorPlan]
    objects: Sequence[tuple[str, int]]
    paths: Mapping[str, tuple[str | int, ...]]
    layout: Layout | None = None
    mappings: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    chunk_addresses: list[int] = field(default_factory=list)
    pickles: dict[str, tuple[object, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, seen: Outline, flat: Mapping[str, object], state: LocalState, source: tuple[str, ...]
    ) -> Memo | None:
        """Remember how a state was made of a state dict, to make the next one so by its outline.

        None if it cannot be told what became of each leaf, as where a planner has changed some: the
        next state is made the long way too.

        Args:
            flat: The state dict as dcp flattened it.
        """
        names = list(flat)
        is_aligned = len(names) == len(seen.leaves) and all(
            there is here for there, here in zip(flat.values(), seen.leaves, strict=True)
        )
        if not (seen.is_known and is_aligned):
            return None
        leaf_of = {fqn: number for number, fqn in enumerate(names)}
        try:
            tensors = [_plan(tensor, leaf_of, seen) for tensor in state.tensors]
            objects = [(fqn, leaf_of[fqn]) for fqn in state.objects]
        except KeyError:
            return None
        return cls(seen.tokens, seen.addresses, source, tensors, objects, state.paths)

    def fits(
        self,
        seen: Outline,
        source: tuple[str, ...],
        paths: Mapping[str, tuple[str | int, ...]] | None = None,
    ) -> bool:
        """Whether that state dict has the structure of this one, and these paths, if given."""
        return (
            seen.is_known
            and source == self.source
            and seen.tokens == self.tokens
            and (paths is None or paths == self.paths)
        )

    def state(
        self, seen: Outline, objects: Mapping[str, torch.Tensor], registered: LocalState | None
    ) -> LocalState:
        """The state of a state dict that fits.

        Args:
            registered: The tensors that the handle has registered; if it is this very state, in the
                same memory, then the state says so.
        """
        if registered is not None and self._is_in_place(registered, seen, objects):
            return registered.holding(objects)
        return LocalState([plan.of(seen.locals) for plan in self.tensors], objects, self.paths)

    def _is_in_place(
        self, registered: LocalState, seen: Outline, objects: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether the registered tensors are those of this outline, in the same memory.

        They are allocated still, so at equal addresses there is no tensor that came after them. Of
        `objects`, the pickles to be shown, sizes have to agree: their bytes replace those there.
        """
        return (
            registered.layout is self.layout
            and seen.addresses == self.addresses
            and [tensor.data_ptr() for tensor in registered.memory] == self.chunk_addresses
            and objects.keys() == registered.objects.keys()
            and all(objects[fqn].shape == there.shape for fqn, there in registered.objects.items())
        )

    def learn(self, seen: Outline, registered: LocalState | None) -> None:
        """Note that the tensors of this outline are registered now, if they are.

        Then the next state dict with the same addresses is known without a look at each tensor.
        """
        if registered and registered.layout is self.layout and seen.addresses == self.addresses:
            return
        if registered is None or self._addresses(seen) != _addresses(registered):
            self.layout = None  # something else is registered: the next state is made anew
            return
        self.layout, self.addresses = registered.layout, seen.addresses
        self.chunk_addresses = [tensor.data_ptr() for tensor in registered.memory]

    def _addresses(self, seen: Outline) -> set[int]:
        """The places of this memo's chunks in an outline's tensors: to tell if these are shown."""
        return {
            seen.locals[chunk.leaf].data_ptr() + chunk.skip * plan.dtype.itemsize
            for plan in self.tensors
            for chunk in plan.chunks
        }

    def pickled(self, seen: Outline) -> dict[str, torch.Tensor]:
        """The objects of a state dict that fits, by fqn."""
        return {fqn: self._pickled(fqn, seen.leaves[leaf]) for fqn, leaf in self.objects}

    def _pickled(self, fqn: str, value: Any) -> torch.Tensor:
        """Pickle an object; a plain value only if it is another one than in the last save."""
        if type(value) not in ATOMS:
            with pickling(fqn):
                return pickled(value)
        mark = pickle.dumps(value)  # tells 0.0 from -0.0, and 1 from True
        known = self.pickles.get(fqn)
        if known is None or known[0] != mark:
            known = self.pickles[fqn] = (mark, pickled(value))
        return known[1].clone()  # what is registered may be read into


@contextmanager
def pickling(fqn: str) -> Iterator[None]:
    """Raises: UsageError: The object of that name cannot be pickled."""
    try:
        yield
    except TorchRosError:
        raise
    except Exception as error:  # whatever its class does
        raise UsageError(
            f"object {fqn!r} cannot be pickled ({type(error).__name__}: {error}), expected tensors "
            "and objects that pickle takes; leave it out of the state dict, or save what it is "
            "made of"
        ) from error


def pickled(value: Any) -> torch.Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return as_bytes(stream)


def as_bytes(stream: io.BytesIO) -> torch.Tensor:
    return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)


def _plan(tensor: LocalTensor, leaf_of: Mapping[str, int], seen: Outline) -> _TensorPlan:
    """Where in the leaf of its name each chunk lies. Raises: KeyError: It is not on this rank.

    A tensor without chunks needs no leaf: an empty one of the version, say, that nobody asked for.
    """
    chunks = []
    for chunk in tensor.chunks:
        view, leaf = chunk.tensor, leaf_of[tensor.fqn]
        skip = (view.data_ptr() - seen.locals[leaf].data_ptr()) // view.element_size()
        shape, stride = tuple(view.shape), view.stride()
        chunks.append(_ChunkPlan(chunk.offsets, leaf, skip, shape, stride))
    return _TensorPlan(tensor.fqn, tensor.dtype, tensor.shape, tensor.spread, tuple(chunks))


def _addresses(registered: LocalState) -> set[int]:
    return {tensor.data_ptr() for tensor in registered.phases[-1].memory}


Memos = dict[Literal["save", "load"], Memo | None]
"""The last memo of each kind. A handle's own calls take turns, so its memos need no lock."""

_memos: WeakKeyDictionary[ShardHandle, Memos] = WeakKeyDictionary()


def memos(handle: ShardHandle) -> Memos:
    """The memos of `handle`, to be changed in place."""
    return _memos.setdefault(handle, {})
