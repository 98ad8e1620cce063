"""Deltas: the exact codec of what changed in a chunk, from one content, the base, to a newer one.

For whoever keeps or passes on versions of which each differs little from the one before: deltas in
a bucket, and deltas between peers. Pure: arrays in, arrays out. A step of training with a small
learning rate changes about 1 % of the elements in bfloat16, scattered like independent flips of a
coin; a delta of such a step has 1/64 of the chunk's bytes.

**Places and values.** An element has changed if its bits have: NaNs with other payloads, and -0.0,
are elements like any other. Its place is its number in the chunk, row-major over the chunk's sizes,
whatever its strides in memory are; its value is its bits in the newer content. Values are absolute
and not differences: a delta that was applied by half is applied again, and the target is whole.

**Segments.** The elements of a chunk form segments of 65,536; the last one may be shorter. Three
arrays say what changed, and a reader of a part of the chunk takes the segments that it needs:

* `index`, uint32, has a row for each segment in which something has changed, in ascending order:
  its number, how many gaps and how many values it has, and the CRC-32 of both.
* `gaps` say how many elements lie between a place and the place before it, or the beginning of the
  segment. In uint8, 255 says to go on by 255 elements, which is no place yet; no gap is too long
  for uint16. All of a delta is in the one that takes fewer bytes.
* `values` has the elements' bits, in numbers of their width.

A delta does not say which versions it leads from and to, nor of which chunk it is: whoever keeps it
says so beside it.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.errors import CorruptDelta, ManifestMismatch, NotSupported
from torch_ros.weights.columns import Bools, Ints, group_starts, sum_before
from torch_ros.weights.digest import change_digest, combine
from torch_ros.weights.local import WORDS, span_of
from torch_ros.weights.manifest import Depth, Layout
from torch_ros.weights.tiling import matched

SEGMENT = 1 << 16  # elements: a place in it has 16 bits
GO_ON = 255  # a gap of 8 bits that leads to no place

# Segments that are compared at once, and changes that are encoded, merged or decoded at once, or
# those of a segment: enough to forget what a call costs, few enough for a cache.
_COMPARED = 4
_BATCH = 1 << 16

NUMBER, GAPS, VALUES, CHECKSUM = range(4)  # the columns of an index

Words = npt.NDArray[np.generic]
Index = npt.NDArray[np.uint32]
Gaps = npt.NDArray[np.uint8 | np.uint16]

# numpy has no 16-byte integer, but moves complex numbers bit by bit.
WORD_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Changed(NamedTuple):
    """Elements of some segments of a chunk that changed, by ascending place."""

    places: Ints
    values: Words


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The changes of a chunk, or of some of its segments: the arrays that the module describes."""

    elements: int  # of the whole chunk
    index: Index
    gaps: Gaps
    values: Words

    @classmethod
    def of(cls, base: torch.Tensor, new: torch.Tensor) -> Self:
        """The delta that makes `new` of `base`; arguments and errors as in `compare`."""
        return cls(new.numel(), *encode(compare(base, new), item_bytes=new.element_size()))

    @classmethod
    def received(cls, elements: int, index: Index, gaps: Gaps, values: Words) -> Self:
        """A delta of arrays that came from elsewhere, once all of it has been looked at.

        A part that `between` cuts out is a delta, too. The arrays are kept, and must not change.

        Args:
            elements: How many the whole chunk has, by its sizes.
            index: Of which a digest has been checked: it has checksums of all the rest.
            values: As `words` gives them.

        Raises: CorruptDelta: The arrays contradict each other, or the chunk.
        """
        require_index(index, elements=elements)
        delta = cls(elements, index, gaps, values)
        _require_lengths(delta)
        for part in delta._windows():
            _require_places(part)
            _require_checksums(part)
        return delta

    @property
    def changed(self) -> int:
        """How many elements."""
        return len(self.values)

    @property
    def size_bytes(self) -> int:
        return self.index.nbytes + self.gaps.nbytes + self.values.nbytes

    def between(self, first: int, end: int) -> Self:
        """The segments that have places from `first` to before `end`: views of the arrays."""
        rows, gaps, values = between(self.index, first, end)
        return self._part(rows, gaps, values)

    def decode(self) -> Iterator[Changed]:
        """The changes, some segments at a time."""
        for part in self._windows():
            steps, is_place = _steps(part.gaps)
            reach = steps.cumsum()
            counts = part.index[:, GAPS].astype(np.int64)
            before = np.concatenate([[0], reach[counts.cumsum()[:-1] - 1]])
            starts = part.index[:, NUMBER] * np.int64(SEGMENT) - before - 1
            places = reach[is_place]
            places += np.repeat(starts, part.index[:, VALUES])
            yield Changed(places, part.values)

    def _windows(self) -> Iterator[Self]:
        gaps, values = (self.index[:, column].astype(np.int64) for column in (GAPS, VALUES))
        starts = group_starts(sum_before(gaps) // _BATCH).tolist()
        gap_ends, value_ends = (np.concatenate([[0], counts.cumsum()]) for counts in (gaps, values))
        for first, end in pairwise([*starts, len(gaps)]):
            yield self._part(
                slice(first, end),
                slice(int(gap_ends[first]), int(gap_ends[end])),
                slice(int(value_ends[first]), int(value_ends[end])),
            )

    def _part(self, rows: slice, gaps: slice, values: slice) -> Self:
        cut = self.index[rows], self.gaps[gaps], self.values[values]
        return type(self)(self.elements, *cut)


def words(tensor: torch.Tensor) -> Words:
    """The bits of a tensor's elements, row-major; its own memory if that is contiguous.

    `torch.from_numpy(words).view(dtype)` leads back.

    Raises: NotSupported: The tensor is not in host memory.
    """
    bits = _bits(tensor).contiguous().numpy().reshape(-1)
    return bits.view(WORD_TYPES[tensor.element_size()])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise NotSupported(f"a delta of a tensor on {tensor.device}", "copy it to host memory")
    return tensor.detach().view(WORDS[tensor.element_size()])


def compare(base: torch.Tensor, new: torch.Tensor) -> Iterator[Changed]:
    """Where and to what the elements of a chunk have changed, some segments at a time.

    The memory must not change meanwhile; a tensor that is not contiguous is copied first. Threads
    can compare different chunks in parallel.

    Args:
        base: The older content, a local tensor as `local_chunks` returns it. Any dtype.
        new: The newer content, of the same shape and dtype.

    Raises:
        ManifestMismatch: Shapes or dtypes differ.
        NotSupported: They are not in host memory.
    """
    if (base.shape, base.dtype) != (new.shape, new.dtype):
        raise ManifestMismatch(
            "the base of a delta",
            f"{new.dtype} {list(new.shape)} as the newer content",
            f"{base.dtype} {list(base.shape)}",
            "compare two contents of one chunk",
        )
    older, newer = words(base), words(new)
    for first in range(0, len(newer), _COMPARED * SEGMENT):
        here = slice(first, first + _COMPARED * SEGMENT)
        places = np.flatnonzero(_differ(older[here], newer[here]))
        yield Changed(places + first, newer[here][places])


def _differ(older: Words, newer: Words) -> Bools:
    is_wide = older.itemsize > 8
    differ: Bools = older.view(np.uint64) != newer.view(np.uint64) if is_wide else older != newer
    return differ[::2] | differ[1::2] if is_wide else differ


def encode(changed: Iterable[Changed], *, item_bytes: int) -> tuple[Index, Gaps, Words]:
    """The arrays of a delta of elements of so many bytes.

    Args:
        changed: The changes, by ascending place; no segment is in two of them.
    """
    parts = [_segmented(*batch) for batch in _batches(changed)]
    go_on = [part.gaps // GO_ON for part in parts]  # how often in 8 bits, before each place
    values = _joined([part.values for part in parts], WORD_TYPES[item_bytes])
    is_short = sum(int(each.sum()) for each in go_on) <= len(values)
    gaps: list[Gaps] = []
    rows: list[Ints] = []
    for part, more in zip(parts, go_on, strict=True):
        value_counts = np.diff(part.starts, append=len(part.gaps))
        gap_counts = value_counts
        if is_short:
            gap_counts = value_counts + np.add.reduceat(more, part.starts, dtype=np.int64)
            gaps.append(_shortened(part.gaps, more))
        else:
            gaps.append(part.gaps)
        rows.append(np.stack([part.numbers, gap_counts, value_counts, value_counts], 1))
    index = _joined(rows, np.int64).reshape(-1, 4).astype(np.uint32)
    found = _joined(gaps, np.uint8)
    index[:, CHECKSUM] = _checksums(index, found, values)
    return index, found, values


def _batches(changed: Iterable[Changed]) -> Iterator[Changed]:
    """The same, in parts that are worth a call. None is empty."""
    kept: list[Changed] = []
    count = 0
    for each in changed:
        if len(each.places):
            kept.append(each)
            count += len(each.places)
        if count >= _BATCH:
            yield _together(kept)
            kept, count = [], 0
    if kept:
        yield _together(kept)


def _together(parts: Iterable[Changed]) -> Changed:
    return Changed(*map(np.concatenate, zip(*parts, strict=True)))


class _Segmented(NamedTuple):
    numbers: Ints  # of the segments that have places
    starts: Ints  # where the places of each begin
    gaps: npt.NDArray[np.uint16]
    values: Words


def _segmented(places: Ints, values: Words) -> _Segmented:
    numbers = places // SEGMENT
    starts = group_starts(numbers)
    gaps = np.empty(len(places), np.uint16)
    np.subtract(places[1:], places[:-1] + 1, out=gaps[1:], casting="unsafe")
    gaps[starts] = places[starts] % SEGMENT
    return _Segmented(numbers[starts], starts, gaps, values)


def _shortened(gaps: Gaps, go_on: Gaps) -> Gaps:
    ends = (go_on + 1).cumsum(dtype=np.int64)
    short = np.full(ends[-1], GO_ON, np.uint8)
    short[ends - 1] = gaps - go_on * GO_ON
    return short


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _checksums(index: Index, gaps: Gaps, values: Words) -> list[int]:
    in_gaps, in_values = gaps.view(np.uint8).data, values.view(np.uint8).data
    gap_ends = (index[:, GAPS].cumsum(dtype=np.int64) * gaps.itemsize).tolist()
    value_ends = (index[:, VALUES].cumsum(dtype=np.int64) * values.itemsize).tolist()
    spans = zip(pairwise([0, *gap_ends]), pairwise([0, *value_ends]), strict=True)
    return [
        zlib.crc32(in_values[low:high], zlib.crc32(in_gaps[first:end]))
        for (first, end), (low, high) in spans
    ]


def _steps(gaps: Gaps) -> tuple[Ints, Bools]:
    """By how many elements each gap leads on, and whether to a place."""
    steps = gaps.astype(np.int64)
    is_place = np.ones(len(gaps), np.bool_) if gaps.itemsize > 1 else gaps != GO_ON
    steps += is_place
    return steps, is_place


def merge(deltas: Sequence[Delta]) -> Delta:
    """One delta that does what these do one after the other.

    Each place of any of them is in it, with the value of the last one that has it, perhaps the one
    of the first base: a target that was left between two contents becomes whole, which
    the difference of the two ends would not achieve.

    Args:
        deltas: Those of one chunk, at least one; each one's base is what the one before makes.

    Raises: ManifestMismatch: They are of different chunks.
    """
    first = deltas[0]
    for delta in deltas[1:]:
        _require_chunk(delta, "a delta to merge", first.elements, first.values.itemsize)
    rows = np.concatenate([delta.index for delta in deltas]).astype(np.int64)
    rows = rows[rows[:, NUMBER].argsort(kind="stable")]
    segments = group_starts(rows[:, NUMBER])
    batches = segments[group_starts(sum_before(rows[:, VALUES])[segments] // _BATCH)]
    edges = [*(rows[batches, NUMBER] * SEGMENT).tolist(), first.elements]
    merged = (
        _merged(_together(each for delta in deltas for each in delta.between(*span).decode()))
        for span in pairwise(edges)
    )
    return Delta(first.elements, *encode(merged, item_bytes=first.values.itemsize))


def _merged(changed: Changed) -> Changed:
    """The last one of equal places, and all places in order."""
    order = changed.places.argsort(kind="stable")
    places = changed.places[order]
    is_last = np.append(places[1:] != places[:-1], True)
    return Changed(places[is_last], changed.values[order[is_last]])


class Numbering(NamedTuple):
    """A way to number the elements of a box: that of the first, and the step of each dimension."""

    first: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a source chunk and a target chunk have in common, counted in three ways."""

    fqn: str
    shape: tuple[int, ...]  # of the whole tensor
    source_rank: int
    source_chunk: int  # index into the chunks of that rank's layout
    source_elements: int
    target_chunk: int
    sizes: tuple[int, ...]
    place: Numbering  # in the source chunk
    memory: Numbering  # from the target chunk's first element
    number: Numbering  # in the whole tensor, row-major

    @property
    def end(self) -> int:
        """Behind the last place."""
        steps = zip(self.sizes, self.place.steps, strict=True)
        return self.place.first + sum((size - 1) * step for size, step in steps) + 1


def pieces(
    sources: Sequence[Layout], targets: Layout, *, target_rank: int = 0
) -> tuple[Piece, ...]:
    """The pieces of source chunks whose deltas make up those of the target chunks, by target chunk.

    Each element of each target chunk is in one piece. A target chunk without elements has none.
    Arguments and errors as in `plan.plan`; the strides of `sources` do not count.
    """
    offered, wanted, found = matched(sources, targets, target_rank=target_rank)
    source, target = offered.take(found.source), wanted.take(found.target)
    width = found.sizes.shape[1]
    shapes = np.array(
        [(*record.shape, *(1,) * (width - len(record.shape))) for record in targets.tensors],
        np.int64,
    ).reshape(-1, width)
    counts = (
        (found.offsets - source.offsets, _row_major(source.sizes)),
        (found.offsets - target.offsets, target.strides),
        (found.offsets, _row_major(shapes[target.tensor])),
    )
    places, memory, numbers = (
        map(Numbering, (offsets * steps).sum(1).tolist(), map(tuple, steps.tolist()))
        for offsets, steps in counts
    )
    records = [targets.tensors[tensor] for tensor in target.tensor.tolist()]
    return tuple(
        map(
            Piece,
            (record.fqn for record in records),
            (record.shape for record in records),
            source.rank.tolist(),
            source.chunk.tolist(),
            source.sizes.prod(1).tolist(),
            target.chunk.tolist(),
            map(tuple, found.sizes.tolist()),
            places,
            memory,
            numbers,
        )
    )


def _row_major(sizes: Ints) -> Ints:
    return sizes[:, ::-1].cumprod(1)[:, ::-1] // sizes


def apply(delta: Delta, target: torch.Tensor, piece: Piece, *, depth: Depth = "off") -> int:
    """Write what a delta says about one piece into a target chunk.

    The target must have the delta's base, or what a call that was interrupted has left of it; then
    repeating the call makes it whole. Takes little memory beside the arrays.

    Args:
        delta: The source chunk's; at least the segments between `piece.place.first` and
            `piece.end`.
        target: The memory of the target chunk; any strides.
        depth: The returned digest's.

    Returns:
        By how much this has changed the digest of the whole tensor, as `change_digest`: of what
        was found in the target. It is that of the change only if the target had all of the base:
        applied again, or to the same memory under another name, it is 0.

    Raises:
        ManifestMismatch: The delta is of a chunk of another size, or of elements of other width.
        NotSupported: The target is not in host memory.
    """
    _require_chunk(delta, f"a delta of {piece.fqn!r}", piece.source_elements, target.element_size())
    memory = _memory(target)
    dims = _dims(piece)
    digests = []
    for changed in delta.between(piece.place.first, piece.end).decode():
        indices, values = _inside(changed, piece, dims)
        at = _numbered(indices, piece.memory.first, [dim.memory for dim in dims])
        if depth != "off":
            numbers = _numbered(indices, piece.number.first, [dim.number for dim in dims])
            digests.append(
                change_digest(numbers, memory[at], values, global_shape=piece.shape, depth=depth)
            )
        memory[at] = values
    return combine(digests)


def _memory(target: torch.Tensor) -> Words:
    """All elements from the first to the last, with those between that are not the target's."""
    reach = span_of(target)[1] // target.element_size()
    return words(_bits(target).as_strided((reach,), (1,)))


class _Dim(NamedTuple):
    """The size of a dimension, and its steps in places, memory and the whole tensor's numbers."""

    size: int
    place: int
    memory: int
    number: int


def _dims(piece: Piece) -> list[_Dim]:
    """The dimensions of a piece, as few as possible; the last one's step in places is 1."""
    dims: list[_Dim] = []
    steps = (piece.place.steps, piece.memory.steps, piece.number.steps)
    for size, *inner in zip(piece.sizes, *steps, strict=True):
        if size == 1:
            continue
        count = size
        if dims and list(dims[-1][1:]) == [size * step for step in inner]:
            count *= dims.pop().size
        dims.append(_Dim(count, *inner))
    if not dims or dims[-1].place != 1:
        dims.append(_Dim(1, 1, 0, 0))
    return dims


def _inside(changed: Changed, piece: Piece, dims: Sequence[_Dim]) -> tuple[list[Ints], Words]:
    """The changes in a piece: their indices along each of its dimensions, and their values."""
    low, high = np.searchsorted(changed.places, (piece.place.first, piece.end)).tolist()
    rest, values = changed.places[low:high] - piece.place.first, changed.values[low:high]
    if len(dims) == 1:
        return [rest], values
    inside = np.ones(len(rest), np.bool_)
    indices = []
    for dim in dims:
        index = rest // dim.place
        rest = rest - index * dim.place
        inside &= index < dim.size
        indices.append(index)
    return [index[inside] for index in indices], values[inside]


def _numbered(indices: Sequence[Ints], first: int, steps: Sequence[int]) -> Ints:
    numbers = indices[0] * steps[0] + first
    for index, step in zip(indices[1:], steps[1:], strict=True):
        numbers += index * step
    return numbers


# Deltas from elsewhere


def between(index: Index, first: int, end: int) -> tuple[slice, slice, slice]:
    """Where an index, the gaps and the values have the segments of places in [first, end)."""
    numbers = index[:, NUMBER].astype(np.int64)
    low, high = np.searchsorted(numbers, (first // SEGMENT, -(-end // SEGMENT))).tolist()
    spans = [slice(low, high)]
    for column in (GAPS, VALUES):
        start = int(index[:low, column].sum(dtype=np.int64))
        spans.append(slice(start, start + int(index[low:high, column].sum(dtype=np.int64))))
    return spans[0], spans[1], spans[2]


def require_index(index: Index, *, elements: int) -> None:
    """Check the index of a delta before what it lists is read; `Delta.received` does, too.

    Raises: CorruptDelta: It is not one of a chunk of so many elements.
    """
    if index.dtype != np.uint32 or index.ndim != 2 or index.shape[1] != 4:
        found = f"{list(index.shape)} of {index.dtype}"
        raise CorruptDelta("the index of a delta", "rows of 4 uint32", found)
    numbers, gaps, values, _ = index.astype(np.int64).T
    room = np.minimum(elements - numbers * SEGMENT, SEGMENT)
    _require(np.diff(numbers, prepend=-1) > 0, index, "a number above the last", numbers)
    _require(room > 0, index, f"a number below {-(-elements // SEGMENT)}", numbers)
    _require(values > 0, index, "one value or more", values)
    _require(values <= gaps, index, "as many gaps as values, or more", gaps)
    _require(gaps <= room, index, "no more gaps than elements", gaps)


def _require(holds: Bools, index: Index, expected: str, found: Ints) -> None:
    if not holds.all():
        row = int(np.argmin(holds))
        segment = f"segment {index[row, NUMBER]} of a delta (row {row} of its index)"
        raise CorruptDelta(segment, expected, str(found[row]))


def _require_lengths(delta: Delta) -> None:
    kinds = (("gaps", GAPS, (np.uint8, np.uint16)), ("values", VALUES, tuple(WORD_TYPES.values())))
    for name, column, dtypes in kinds:
        array = getattr(delta, name)
        count = int(delta.index[:, column].sum(dtype=np.int64))
        if array.dtype not in dtypes or array.shape != (count,):
            expected = f"{count} of {' or '.join(dtype.__name__ for dtype in dtypes)}"
            found = f"{list(array.shape)} of {array.dtype}"
            raise CorruptDelta(f"the {name} of a delta", expected, found)


def _require_places(part: Delta) -> None:
    """Every gap leads to a place in its segment; there are as many places as values."""
    counts = part.index[:, GAPS].astype(np.int64)
    starts = sum_before(counts)
    steps, is_place = _steps(part.gaps)
    ends_well = is_place[starts + counts - 1]
    _require(ends_well, part.index, "gaps that end with a place", np.full(len(counts), GO_ON))
    found = np.add.reduceat(is_place, starts, dtype=np.int64)
    values = part.index[:, VALUES]
    _require(found == values, part.index, "as many places as values", found)
    reach = np.add.reduceat(steps, starts)
    room = np.minimum(part.elements - part.index[:, NUMBER] * np.int64(SEGMENT), SEGMENT)
    _require(reach <= room, part.index, "places inside of the segment and of the chunk", reach - 1)


def _require_checksums(part: Delta) -> None:
    found = np.array(_checksums(part.index, part.gaps, part.values), np.int64)
    expected = part.index[:, CHECKSUM]
    _require(found == expected, part.index, "bytes that have the checksum of the index", found)


def _require_chunk(delta: Delta, what: str, elements: int, item_bytes: int) -> None:
    found = (delta.elements, delta.values.itemsize)
    if found != (elements, item_bytes):
        raise ManifestMismatch(
            what,
            f"one of a chunk of {elements} elements of {item_bytes} bytes",
            f"{found[0]} of {found[1]} bytes",
            "take the delta of this chunk, or read the version in full",
        )
