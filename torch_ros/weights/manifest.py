"""Which tensors a shard holds, as which chunks, and where they are in its memory.

The layout is the part without addresses: it stays the same from publish to publish, so plans are
cached by its digest. Manifests come from peers; `decode` returns only what later arithmetic on
64-bit integers can rely on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from torch_ros.digests import digest_of
from torch_ros.errors import ManifestMismatch
from torch_ros.printable import some
from torch_ros.spans import HOST
from torch_ros.weights.columns import Bools, Columns, Ints, sum_before

OBJECT = "object"  # dtype of a pickled object; its shape is (size_bytes,)

Depth = Literal["off", "sampled", "full"]  # of digests: how much of the content they cover

# All processes of a model use the same size: positions in the protocol count blocks.
BLOCK_BYTES = 4 << 20

DIMENSIONS_MAX = 64  # torch refuses more in most of its operations
# Nothing larger exists, and sums of two such numbers still fit in int64.
_ELEMENTS_MAX = 2**62
UNIONS_MAX = 8  # unions of layouts that are kept: a few versions are read at a time

_Elements = Annotated[int, msgspec.Meta(ge=0, le=_ELEMENTS_MAX)]
_PerDimension = Annotated[tuple[_Elements, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
_Device = Annotated[int, msgspec.Meta(ge=HOST, le=2**15)]
_Digest = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has none above 2^64 - 1


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `dtype_named` turns back into `dtype`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a record that is not an object.

    Raises: KeyError: This torch has no dtype of that name.
    """
    return _DTYPES[name]


def item_bytes(name: str) -> int:
    """Bytes of one element; 1 for an object, which is stored as bytes."""
    return 1 if name == OBJECT else _DTYPES[name].itemsize


# gc=False: records hold no cycles, and a collection would scan hundreds of thousands of them.
class TensorRecord(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A whole tensor, of which a shard holds some chunks or none."""

    fqn: str
    dtype: str  # as `dtype_name` says, or OBJECT
    shape: _PerDimension  # global; () for a 0-d tensor
    path: tuple[str | int, ...] | None = None  # where the state dict had it, before flattening


class ChunkRecord(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A chunk in memory: offsets, sizes and strides count elements, one per dimension."""

    tensor: _Elements  # index into `Layout.tensors`
    offsets: _PerDimension
    sizes: _PerDimension
    strides: _PerDimension
    spread: bool  # equal on all ranks by construction, so any may be read; else the lowest rank's


@dataclass(frozen=True, slots=True, eq=False)
class Boxes(Columns):
    """Chunks as columns, padded to the most dimensions any has: offset 0, size 1, stride 0."""

    tensor: Ints
    offsets: Ints
    sizes: Ints
    strides: Ints
    spread: Bools


@dataclass(frozen=True, slots=True)
class Blocks:
    """The units in which a process says how much of a layout has arrived. A chunk without gaps in
    memory is cut every `BLOCK_BYTES`; any other chunk is one block.
    """

    counts: Ints  # of each chunk, at least 1
    starts: Ints  # the number of each chunk's first one
    sizes: Ints  # of each chunk, in bytes

    def bytes_before(self, position: int) -> int:
        """The bytes of the first `position` blocks."""
        blocks = np.clip(position - self.starts, 0, self.counts)
        return int(np.where(blocks == self.counts, self.sizes, blocks * BLOCK_BYTES).sum())

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def at(self, chunks: Ints, offsets: Ints) -> Ints:
        """The blocks that hold these bytes of these chunks."""
        return self.starts[chunks] + np.minimum(offsets // BLOCK_BYTES, self.counts[chunks] - 1)


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The tensors and chunks of a shard, without addresses."""

    tensors: tuple[TensorRecord, ...]
    chunks: tuple[ChunkRecord, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Equal for equal layouts; 32 hexadecimal digits."""
        return digest_of(msgspec.msgpack.encode(self)).hex()

    def part(self, chosen: Sequence[int], *, is_objects: bool) -> Layout:
        """The chunks of these numbers, all of them objects or all tensors, and the records of every
        object, or every tensor. Without paths: no plan needs them, and the digest is a plan's key.
        """
        dtypes = [record.dtype for record in self.tensors]
        records = [n for n, dtype in enumerate(dtypes) if (dtype == OBJECT) == is_objects]
        number = {old: new for new, old in enumerate(records)}
        replace = msgspec.structs.replace
        chunks = (self.chunks[n] for n in chosen)
        return Layout(
            tuple(replace(self.tensors[old], path=None) for old in records),
            tuple(replace(chunk, tensor=number[chunk.tensor]) for chunk in chunks),
        )

    @cached_property
    def unspread(self) -> Layout:
        """The same layout for a replica of one rank: no other rank has equal chunks."""
        chunks = (msgspec.structs.replace(chunk, spread=False) for chunk in self.chunks)
        return Layout(self.tensors, tuple(chunks))

    @cached_property
    def boxes(self) -> Boxes:
        width = max((len(record.shape) for record in self.tensors), default=0)
        chunks = self.chunks
        return Boxes(
            np.fromiter((chunk.tensor for chunk in chunks), np.int64, len(chunks)),
            _padded([chunk.offsets for chunk in chunks], width, 0),
            _padded([chunk.sizes for chunk in chunks], width, 1),
            _padded([chunk.strides for chunk in chunks], width, 0),
            np.fromiter((chunk.spread for chunk in chunks), np.bool_, len(chunks)),
        )

    @cached_property
    def blocks(self) -> Blocks:
        boxes = self.boxes
        items = np.array([item_bytes(record.dtype) for record in self.tensors], np.int64)
        sizes = boxes.sizes.prod(1) * items[boxes.tensor]
        reach = (np.maximum(boxes.sizes - 1, 0) * boxes.strides).sum(1) + 1
        is_dense = reach == boxes.sizes.prod(1)
        counts = np.where(is_dense, np.maximum(-(-sizes // BLOCK_BYTES), 1), 1)
        return Blocks(counts, sum_before(counts), sizes)


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A layout in one process's memory."""

    layout: Layout
    addresses: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]  # of each chunk's first element
    devices: tuple[_Device, ...]  # of each chunk
    descriptor: bytes  # p2p's; opaque here
    depth: Depth = "off"  # of the digests
    digests: tuple[_Digest, ...] = ()  # of each chunk, if they were computed here
    totals: dict[str, _Digest] = {}  # of each whole tensor, by fqn, if they are known here
    more: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}  # addresses of what features show

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Manifest:
        """The manifest that was encoded.

        Raises: ManifestMismatch: These bytes are not a manifest, or it contradicts itself.
        """
        try:
            manifest = _manifests.decode(payload)
        # A string that is not UTF-8 raises UnicodeDecodeError, past msgspec's own errors.
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _refused(str(error)) from error
        reach = _check(manifest.layout)
        if not len(manifest.addresses) == len(manifest.devices) == len(reach):
            raise _refused(
                f"{len(reach)} chunks with {len(manifest.addresses)} addresses and "
                f"{len(manifest.devices)} devices"
            )
        if manifest.digests and len(manifest.digests) != len(reach):
            raise _refused(f"{len(reach)} chunks with {len(manifest.digests)} digests")
        room = np.uint64(2**64 - 1) - np.array(manifest.addresses, np.uint64)
        _require(reach.astype(np.uint64) <= room, "chunk", "ends beyond 64 bits of address")
        return manifest


class LogicalTensor(NamedTuple):
    """A tensor as all shardings of a version have it in common."""

    dtype: str
    shape: tuple[int, ...]


class Logical(dict[str, LogicalTensor]):
    """The tensors of a version, by fqn. Shared: do not change it."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.paths: dict[str, tuple[str | int, ...]] = {
            record.fqn: record.path
            for layout in layouts
            for record in layout.tensors
            if record.path is not None
        }
        """The place of each tensor in the publisher's state dict, by fqn, if it had one."""

    @cached_property
    def contents(self) -> tuple[dict[str, tuple[torch.dtype, torch.Size]], tuple[str, ...]]:
        """Dtype and shape of each tensor by fqn, sorted; and the fqns of objects. Shared, too. Made
        once: among a torch program's objects, tens of thousands more start a collection.
        """
        everything = sorted(self.items())
        tensors = {
            fqn: (dtype_named(dtype), torch.Size(shape))
            for fqn, (dtype, shape) in everything
            if dtype != OBJECT
        }
        return tensors, tuple(fqn for fqn, (dtype, _) in everything if dtype == OBJECT)

    @cached_property
    def digest(self) -> str:
        """Equal for equal tensors, however they are sharded; the sizes of objects do not count.

        It ends in the number of tensors and their bytes, for people who see the version's record.
        """
        rows = [
            (fqn, dtype, () if dtype == OBJECT else shape)
            for fqn, (dtype, shape) in sorted(self.items())
        ]
        sizes = [math.prod(shape) * item_bytes(dt) for dt, shape in self.values() if dt != OBJECT]
        return f"{digest_of(msgspec.msgpack.encode(rows)).hex()}/{len(sizes)}/{sum(sizes)}"


def logical(layouts: Sequence[Layout]) -> Logical:
    """The union of the ranks' layouts, by fqn; `layouts` are in rank order.

    The size of an object may differ between ranks: the lowest rank's counts. Recent answers are
    cached, because layouts seldom change.

    Raises: ManifestMismatch: Two ranks have a tensor with different dtypes or shapes.
    """
    return _logical(tuple(layouts))


def require_all(version: int, wanted: Logical, found: Logical) -> None:
    """Raises: ManifestMismatch: `found` lacks tensors of a version; names the first of them."""
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ManifestMismatch(
            f"version {version}",
            "every tensor of the version to be registered",
            f"{some(list(map(repr, missing)))} that no rank of this replica registered",
            "register, or read, all of them; a part can be read, and is not served",
        )


def require_same(version: int, replica: str, theirs: Logical, mine: Logical) -> None:
    """Raises: ManifestMismatch: `replica` published other tensors; names the first of them."""
    if mine.digest == theirs.digest:
        return
    unlike = (fqn for fqn in sorted(theirs | mine) if theirs.get(fqn) != mine.get(fqn))
    told = [f"{fqn!r} ({_told(mine.get(fqn))}, there {_told(theirs.get(fqn))})" for fqn in unlike]
    raise ManifestMismatch(
        f"version {version}",
        f"the tensors, with their shapes and dtypes, that {replica!r} published it with",
        some(told),
        "publish it under a new number, or publish the same tensors",
    )


def _told(tensor: LogicalTensor | None) -> str:
    if tensor is None:
        return "none"
    return "an object" if tensor.dtype == OBJECT else f"{tensor.dtype} {list(tensor.shape)}"


@lru_cache(maxsize=UNIONS_MAX)
def _logical(layouts: tuple[Layout, ...]) -> Logical:
    """Do as `logical`, of a tuple, which the cache can look up."""
    union = Logical(layouts)
    for rank, layout in enumerate(layouts):
        for record in layout.tensors:
            mine = LogicalTensor(record.dtype, record.shape)
            known = union.setdefault(record.fqn, mine)
            if known == mine or known.dtype == mine.dtype == OBJECT:
                continue
            has_it = (any(one.fqn == record.fqn for one in other.tensors) for other in layouts)
            raise ManifestMismatch(
                f"tensor {record.fqn!r}",
                f"{known.dtype} {list(known.shape)} as on rank {list(has_it).index(True)}",
                f"{mine.dtype} {list(mine.shape)} on rank {rank}",
                "all ranks must hold parts of the same tensors",
            )
    return union


_manifests = msgspec.msgpack.Decoder(Manifest)


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Ints:
    """Rows of different lengths as one array, with `fill` behind the shorter ones."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.full((len(rows), width), fill, np.int64)
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    padded[np.arange(width) < lengths[:, None]] = flat
    return padded


def _refused(found: str) -> ManifestMismatch:
    return ManifestMismatch(
        "a peer's manifest", "one that torch_ros wrote", found, "run the same release everywhere"
    )


def _require(holds: Bools | np.bool_, what: str, otherwise: str) -> None:
    if not holds.all():
        raise _refused(f"{what} {int(np.argmin(holds))}: {otherwise}")


def _check(layout: Layout) -> Ints:
    """Refuse a layout that contradicts itself.

    Returns:
        For each chunk, the bytes from its first element to the end of its last one.
    """
    tensors, chunks = layout.tensors, layout.chunks
    if len({record.fqn for record in tensors}) != len(tensors):
        raise _refused("two tensors of the same name")
    unknown = {record.dtype for record in tensors} - _DTYPES.keys() - {OBJECT}
    if unknown:
        raise _refused(f"dtypes this torch does not have: {', '.join(sorted(unknown))}")
    dimensions = _counts(record.shape for record in tensors)
    items = np.fromiter((item_bytes(record.dtype) for record in tensors), np.int64, len(tensors))
    objects = np.fromiter((record.dtype == OBJECT for record in tensors), np.bool_, len(tensors))
    shapes = _padded([record.shape for record in tensors], int(dimensions.max(initial=0)), 1)
    # Limits are compared as floating point, which does not wrap.
    volumes = np.maximum(shapes, 1).astype(np.float64).prod(1)
    _require(volumes * items < _ELEMENTS_MAX, "tensor", "more bytes than there can be")
    _require(~objects | (dimensions == 1), "tensor", "an object has one dimension, its bytes")

    owner = np.fromiter((chunk.tensor for chunk in chunks), np.int64, len(chunks))
    _require(owner < len(tensors), "chunk", "belongs to no tensor")
    for lengths in (
        _counts(chunk.offsets for chunk in chunks),
        _counts(chunk.sizes for chunk in chunks),
        _counts(chunk.strides for chunk in chunks),
    ):
        _require(lengths == dimensions[owner], "chunk", "has other dimensions than its tensor")
    boxes = layout.boxes
    inside: Bools = boxes.offsets + boxes.sizes <= shapes[owner]
    _require(inside.all(1), "chunk", "is not inside its tensor")
    steps = np.maximum(boxes.sizes - 1, 0)
    reach = (steps.astype(np.float64) * boxes.strides).sum(1) + 1
    _require(reach * items[owner] < _ELEMENTS_MAX, "chunk", "reaches over more than memory")
    reach_bytes: Ints = ((steps * boxes.strides).sum(1) + 1) * items[owner]
    return reach_bytes


def _counts(rows: Iterable[tuple[int, ...]]) -> Ints:
    return np.array([len(row) for row in rows], np.int64)
