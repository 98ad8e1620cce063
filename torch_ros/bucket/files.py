"""The objects of a bucket: names of manifests, manifests, and the parts by which files are checked.

    <prefix>/<model>/torch_ros
    <prefix>/<model>/<number>-<run>/versions/<version>-<born_ms>-<uid>-<nonce>.full.json
    <prefix>/<model>/<number>-<run>/data/<version>-<uid>-<nonce>/model.safetensors

A version that is stored as a delta has `delta-<base's version>-<base's nonce>` in the place of
`full`, and files `delta.safetensors`: a list of manifests tells what each version needs.

A manifest is written last: files without one are no version. Objects never change: each attempt has
a manifest and a folder of its own, by its nonce, so nobody writes over what somebody reads, in a
store that overwrites either. The first object is the marker that `objects.py` tells of. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Annotated, Literal
from urllib.parse import quote, unquote

import msgspec
import torch

from torch_ros.bucket.objects import UNFINISHED
from torch_ros.checkpoints.framing import NAMES, Tensors
from torch_ros.weights.local import packed
from torch_ros.weights.manifest import (
    DIMENSIONS_MAX,
    ChunkRecord,
    Layout,
    TensorRecord,
    dtype_name,
    dtype_named,
)

FORMAT: Literal[1] = 1
PART_BYTES = 4 << 20  # of a file, with one digest: no reader needs all of a file to check its own
DIGEST_BYTES = 16
PROBES = "probe"  # the folder where an archiver tries a store
NAMED = re.compile(
    r"([0-9]{20})-([0-9]{15})-([^/]+)-([0-9a-z]+)\.(?:full|delta-([0-9]{20})-([0-9a-z]+))\.json"
)
VERSION_MAX = 2**63 - 1  # as etcd has it
MOST = 2**62  # of elements and bytes: sums of two such numbers fit in 64 bits

Kind = Literal["full", "delta"]
Encoding = Literal["gaps", "coo"]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)]


@dataclass(frozen=True, slots=True)
class InBucket:
    """A version that a bucket has, as the name of its manifest tells.

    Attributes:
        run_number: Newer runs have greater ones.
        born_ms: When it was first published, by the publisher's clock; never less than that of a
            lower version of its run.
        nonce: Of the attempt that wrote it: two archivers may write one version.
        base: Version and nonce of the one that it is a delta of, in the same run; None: it is full.
    """

    run_number: int
    run: str
    version: int
    born_ms: int
    uid: str
    nonce: str
    base: tuple[int, str] | None = None

    @property
    def kind(self) -> Kind:
        return "full" if self.base is None else "delta"

    @property
    def folder(self) -> str:
        """The folder of its run, below the model's."""
        return f"{self.run_number:010d}-{quote(self.run, safe='')}"

    @property
    def key(self) -> str:
        """The key of its manifest, below the model's folder."""
        name = f"{self.version:020d}-{self.born_ms:015d}-{quote(self.uid, safe='')}"
        kind = "full" if self.base is None else "delta-{:020d}-{}".format(*self.base)
        return f"{self.folder}/versions/{name}-{self.nonce}.{kind}.json"

    @property
    def files_at(self) -> str:
        """The folder of its files, below the model's."""
        return f"{self.folder}/data/{self.version:020d}-{quote(self.uid, safe='')}-{self.nonce}"


def kept(key: str) -> InBucket | None:
    """The version of a manifest's key; None: it is the key of something else."""
    match key.split("/"):
        case [run, "versions", name] if found := NAMED.fullmatch(name):
            number, _, text = run.partition("-")
            if not number.isdecimal():
                return None
            numbers = int(number), unquote(text), int(found[1]), int(found[2])
            base = (int(found[5]), found[6]) if found[5] else None
            made = InBucket(*numbers, unquote(found[3]), found[4], base)
            return made if made.key == key and made.version <= VERSION_MAX else None
    return None


def run_of_file(key: str) -> str | None:
    """The run of a key of a version's file, or of a manifest that is not finished.

    None: it is the key of something else.
    """
    match key.split("/"):
        case [run, "data", _, _] if run.partition("-")[0].isdecimal():
            return unquote(run.partition("-")[2])
        case [run, "versions", name] if UNFINISHED.fullmatch(name) and kept(key.rpartition("#")[0]):
            return unquote(run.partition("-")[2])
    return None


class StoredTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole tensor in a file, behind the one before."""

    fqn: str
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of safetensors. `parts` are the digests of its parts, one behind the other."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9-]+\.safetensors$")]
    size_bytes: _Count
    header_bytes: _Count
    tensors: tuple[StoredTensor, ...]
    parts: bytes

    @property
    def starts(self) -> Sequence[int]:
        """Where each tensor begins, and where the file ends."""
        return list(accumulate((t.size_bytes for t in self.tensors), initial=self.header_bytes))

    @property
    def layout(self) -> Layout:
        return layout_of(self.tensors)


class StoredChange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor of a version that is stored as a delta, changed or not.

    `count` elements have changed. Its arrays are in the files if there are any. `digest` is by how
    much the full digest of the tensor has changed, see `weights.digest.change_digest`.
    """

    fqn: str
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=DIMENSIONS_MAX)]
    count: _Count
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]


def layout_of(tensors: Sequence[StoredTensor | StoredChange]) -> Layout:
    """Each tensor as a chunk without gaps, in this order."""
    records = (TensorRecord(each.fqn, each.dtype, each.shape) for each in tensors)
    chunks = (
        ChunkRecord(n, (0,) * len(each.shape), each.shape, (), spread=False)
        for n, each in enumerate(tensors)
    )
    return packed(Layout(tuple(records), tuple(chunks)))


class StoredBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version, in the same run, that a delta is of."""

    version: _Version
    uid: str
    nonce: str


class StoredVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a version: of files that have it whole, or what has changed since `base`."""

    format: Literal[1]
    model: str
    run: str
    version: _Version
    uid: str
    files: tuple[StoredFile, ...]
    left_out: tuple[str, ...]  # fqns of pickled objects
    by: str  # the replica that wrote it, for people
    base: StoredBase | None = None
    changes: tuple[StoredChange, ...] = ()  # all tensors, if there is a base
    encoding: Encoding = "gaps"  # of these

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def tensors(self) -> Tensors:
        """All tensors of the version."""
        stored: Iterable[StoredTensor | StoredChange] = (
            self.changes if self.base else (each for file in self.files for each in file.tensors)
        )
        return {each.fqn: (dtype_named(each.dtype), torch.Size(each.shape)) for each in stored}


class Mismatch(ValueError):
    """A manifest contradicts itself, or its name. Says what was found, and what was expected."""


_manifests = msgspec.json.Decoder(StoredVersion)


def decoded(content: bytes, model: str, of: InBucket) -> StoredVersion:
    """The manifest of `of`, in which all numbers agree.

    Raises:
        Mismatch: It is none, or one of another version, or it contradicts itself.
    """
    try:
        found = _manifests.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Mismatch(f"it is no manifest of this release: {error}") from error
    said, named = (found.model, found.run, found.version, found.uid), (model, of.run, of.version)
    if said != (*named, of.uid):
        raise Mismatch(f"it is the manifest of {said}, expected {(*named, of.uid)}")
    base = None if found.base is None else (found.base.version, found.base.nonce)
    if base != of.base:
        raise Mismatch(f"it is a delta of {base}, expected {of.base}")
    if base is None and found.changes:
        raise Mismatch("it has changes, and no base")
    names = [tensor.fqn for file in found.files for tensor in file.tensors]
    for what, each in (("tensors", names), ("files", [file.name for file in found.files])):
        if len(set(each)) != len(each):
            raise Mismatch(f"two of its {what} have the same name")
    for file in found.files:
        _check(file)
    if found.base is not None:
        _check_changes(found)
    return found


def _check_tensor(tensor: StoredTensor | StoredChange) -> None:
    try:
        dtype_named(tensor.dtype)
    except KeyError as error:
        found = f"{tensor.fqn!r} is {tensor.dtype!r}"
        raise Mismatch(f"{found}, a dtype that this torch lacks") from error
    if math.prod(max(1, size) for size in tensor.shape) > MOST // 16:
        raise Mismatch(f"{tensor.fqn!r} is larger than anything can be")


def _check_changes(found: StoredVersion) -> None:
    """Whether its files have the arrays of all tensors that have changed, and nothing else."""
    changed = [each.fqn for each in found.changes if each.count]
    arrays = {tensor.fqn for file in found.files for tensor in file.tensors}
    if len({each.fqn for each in found.changes}) != len(found.changes):
        raise Mismatch("two of its changes are of the same tensor")
    for each in found.changes:
        _check_tensor(each)
    if arrays != {name for fqn in changed for name in arrays_of(fqn, found.encoding)}:
        raise Mismatch("its files have other arrays than its changes")


def arrays_of(fqn: str, encoding: Encoding) -> tuple[str, ...]:
    """The names of the arrays of a tensor's delta: no two tensors have one in common.

    "coo": `indices`, row-major numbers of elements, and `values` in the tensor's dtype, as
    Hugging Face's delta engine has them.
    """
    kinds = ("index", "gaps", "values") if encoding == "gaps" else ("indices", "values")
    return tuple(f"{fqn}.{kind}" for kind in kinds)


def _check(file: StoredFile) -> None:
    for tensor in file.tensors:
        _check_tensor(tensor)
    if file.starts[-1] != file.size_bytes:
        raise Mismatch(f"{file.name} has {file.size_bytes} bytes, its tensors {file.starts[-1]}")
    count = -(-file.size_bytes // PART_BYTES)
    if len(file.parts) != count * DIGEST_BYTES:
        found = f"{len(file.parts)} bytes of digests for {count} parts"
        raise Mismatch(f"{file.name} has {found} of {DIGEST_BYTES} bytes each")


class Parts:
    """Digests of the parts of a file that passes by."""

    def __init__(self) -> None:
        self.size_bytes: int = 0
        self._done: list[bytes] = []
        self._now = blake2b(digest_size=DIGEST_BYTES)

    def passing(self, contents: Iterable[bytes | memoryview]) -> Iterator[bytes]:
        """The same bytes, copied, in pieces of at most a part."""
        for content in contents:
            view = memoryview(content)
            while view:
                room = PART_BYTES - self.size_bytes % PART_BYTES
                piece, view = bytes(view[:room]), view[room:]
                self._now.update(piece)
                self.size_bytes += len(piece)
                if len(piece) == room:
                    self._end()
                yield piece

    def _end(self) -> None:
        self._done.append(self._now.digest())
        self._now = blake2b(digest_size=DIGEST_BYTES)

    def digests(self) -> bytes:
        """The digests of all that has passed. Once, at the end."""
        if self.size_bytes % PART_BYTES:
            self._end()
        return b"".join(self._done)


def is_part(file: StoredFile, number: int, content: memoryview) -> bool:
    """Whether this is the content of a part of the file."""
    at = number * DIGEST_BYTES
    return blake2b(content, digest_size=DIGEST_BYTES).digest() == file.parts[at : at + DIGEST_BYTES]


def storable(tensors: Tensors) -> Tensors:
    """The same, as safetensors can name them: dtypes without a name there as plain bytes."""
    return {
        name: (dtype, shape)
        if dtype in NAMES
        else (torch.uint8, torch.Size([math.prod(shape) * dtype.itemsize]))
        for name, (dtype, shape) in tensors.items()
    }


def stored_tensors(names: Iterable[str], tensors: Tensors) -> tuple[StoredTensor, ...]:
    """How a manifest writes them."""
    return tuple(StoredTensor(n, dtype_name(tensors[n][0]), tuple(tensors[n][1])) for n in names)
