"""The bytes by which a publisher shows deltas to its readers: a table, and a head for each delta.

docs/protocol/deltas.md#records-and-keys has their format. Pure: a publisher encodes, a reader
decodes what it has read from memory that may be rewritten meanwhile, and believes nothing of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from torch_ros.codec.delta import (
    GAPS,
    SEGMENT,
    VALUES,
    WORD_TYPES,
    Delta,
    Index,
    between,
    require_index,
)
from torch_ros.digests import DIGEST_BYTES, digest_of
from torch_ros.errors import CorruptDelta
from torch_ros.weights.columns import Ints
from torch_ros.weights.manifest import OBJECT, Layout, item_bytes

NAME = "deltas"  # of the table's place in a manifest
TABLE_BYTES = 4096
ALIGNMENT_BYTES = 16  # of the widest element: what lands is aligned as it was
ENTRIES_MAX = 16  # below 130 bytes each, with uids as they are

_LENGTH_BYTES = 8
_START = _LENGTH_BYTES + DIGEST_BYTES
_ROW_BYTES = 16  # of an index
_GAP_TYPES = {1: np.uint8, 2: np.uint16}

Size = TypeVar("Size", int, Ints)

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Padded = Annotated[int, msgspec.Meta(ge=0, le=2**62, multiple_of=ALIGNMENT_BYTES)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def padded(size_bytes: Size) -> Size:
    """The room that an array takes, or each of many."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class DeltaEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A delta that is whole, and does not change while the publisher's word has its mark."""

    base: str  # uid of the content that it leads from
    uid: str  # and to
    address: Annotated[int, msgspec.Meta(ge=0, multiple_of=ALIGNMENT_BYTES)]  # of its body
    body_bytes: _Padded
    head_bytes: _Count  # behind the body
    digest: _Digest  # of the head

    def require_head_fits(self, layout: Layout) -> None:
        """Check its size before memory is taken for it.

        Raises: CorruptDelta: No delta of that layout has so large a head.
        """
        most = int(_segment_counts(layout).sum()) * _ROW_BYTES + 16 * len(layout.chunks) + 64
        _require(self.head_bytes <= most, f"{most} bytes at most", f"{self.head_bytes}")


class Chain(NamedTuple):
    """Deltas that lead from one content to another, the oldest first."""

    links: tuple[DeltaEntry, ...]
    is_coming: bool = False  # the last link is being made


class DeltaTable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a process has, the newest first."""

    entries: Annotated[tuple[DeltaEntry, ...], msgspec.Meta(max_length=ENTRIES_MAX)] = ()
    coming: str | None = None
    """Base of the delta that is being made: of the one to the content that is served."""

    def encode(self) -> bytes:
        """All `TABLE_BYTES` of it."""
        content = msgspec.msgpack.encode(self)
        assert _START + len(content) <= TABLE_BYTES
        whole = len(content).to_bytes(_LENGTH_BYTES, "little") + digest_of(content) + content
        return whole.ljust(TABLE_BYTES, b"\0")

    @classmethod
    def decode(cls, payload: bytes) -> DeltaTable | None:
        """The table that was encoded; None: it was rewritten while it was read.

        Raises: CorruptDelta: The process has written something else.
        """
        length = int.from_bytes(payload[:_LENGTH_BYTES], "little")
        content = payload[_START : _START + length]
        if digest_of(content) != payload[_LENGTH_BYTES:_START]:
            return None
        try:
            table = _tables.decode(content)
        # A string that is not UTF-8 raises UnicodeDecodeError, past msgspec's own errors.
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptDelta("a table of deltas", "one of torch_ros", str(error)) from error
        for entry in table.entries:
            if (end := entry.address + entry.body_bytes + entry.head_bytes) > 2**64:
                raise CorruptDelta("a delta in a table", "an end within 64 bits", str(end))
        return table

    def chain(self, base: str, uid: str) -> Chain | None:
        """The deltas that lead from `base` to `uid`, if there are; deltas in a circle do not.

        Args:
            uid: The content that is served.
        """
        last = {entry.uid: entry for entry in reversed(self.entries)}
        at, is_coming = uid, False
        if self.coming is not None and uid not in (base, *last):
            at, is_coming = self.coming, True
        links: list[DeltaEntry] = []
        while at != base:
            link = last.pop(at, None)  # each once
            if link is None:
                return None
            links.insert(0, link)
            at = link.base
        return Chain(tuple(links), is_coming)


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rows: tuple[_Count, ...]
    widths: bytes
    index: bytes


class Span(NamedTuple):
    offset: int  # from the entry's address
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Some segments of a chunk's delta, and where a body has their gaps and values."""

    gaps: Span
    values: Span
    _delta: Delta  # of which nothing is here but the index

    @property
    def changed(self) -> int:
        """How many values there are."""
        return self.values.size_bytes // self._delta.values.itemsize

    def received(self, gaps: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]) -> Delta:
        """The delta of these segments, of the bytes that came; all of it has been looked at.

        Raises: CorruptDelta: They are not those that the index is of.
        """
        expected = self._delta
        for what, found, span in (("gaps", gaps, self.gaps), ("values", values, self.values)):
            if found.nbytes != span.size_bytes:
                sizes = f"{span.size_bytes} bytes", f"{found.nbytes}"
                raise CorruptDelta(f"the {what} of a delta", *sizes)
        arrays = gaps.view(expected.gaps.dtype), values.view(expected.values.dtype)
        return Delta.received(expected.elements, expected.index, *arrays)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaHead:
    """The head of a delta: which segments of each chunk of a layout have changed, and how.

    Its bytes are msgpack, `[rows, widths, index]`: of each chunk, how many segments have changed;
    of each, 1 or 2, the bytes of a gap; the rows of all chunks in order, 4 uint32 each. The body
    has the gaps, then the values, of each chunk in order, each padded. All is little-endian.
    """

    layout: Layout
    index: Index  # of all chunks, one after the other
    row_ends: Ints  # of each chunk
    widths: Ints  # of the gaps of each chunk
    gaps: Ints  # where those of each chunk lie in the body
    values: Ints
    body_bytes: int

    @classmethod
    def of(cls, layout: Layout, index: Index, rows: Ints, widths: Ints) -> Self:
        """The head of a delta.

        Args:
            index: All chunks of the layout, in their order.
            rows: How many of them each chunk has.
            widths: The bytes of a gap, of each chunk.
        """
        ends = rows.cumsum()
        items = [item_bytes(record.dtype) for record in layout.tensors]
        item = np.array([items[chunk.tensor] for chunk in layout.chunks], np.int64)
        gap_room, value_room = (
            padded(_sums(index[:, column], ends, rows) * size)
            for column, size in ((GAPS, widths), (VALUES, item))
        )
        room_ends = (gap_room + value_room).cumsum()
        gaps = room_ends - gap_room - value_room
        total = int(room_ends[-1]) if len(room_ends) else 0
        return cls(layout, index, ends, widths, gaps, gaps + gap_room, total)

    @property
    def changed(self) -> int:
        return int(self.index[:, VALUES].sum(dtype=np.int64))

    def encode(self) -> bytes:
        rows = np.diff(self.row_ends, prepend=0).tolist()
        widths = self.widths.astype(np.uint8).tobytes()
        return msgspec.msgpack.encode(_Head(tuple(rows), widths, self.index.tobytes()))

    @classmethod
    def decode(cls, payload: bytes, entry: DeltaEntry, layout: Layout) -> Self:
        """The head that an entry of a process with this layout names.

        Raises: CorruptDelta: It is another one, or contradicts itself, the entry or the layout.
        """
        if digest_of(payload) != entry.digest:
            expected, found = entry.digest.hex(), digest_of(payload).hex()
            raise CorruptDelta(_HEAD, f"digest {expected}", found)
        try:
            told = _heads.decode(payload)
        except msgspec.MsgspecError as error:
            raise CorruptDelta(_HEAD, "one of torch_ros", str(error)) from error
        chunk_count = len(layout.chunks)
        counts = f"{len(told.rows)} and {len(told.widths)}"
        _require(len(told.rows) == len(told.widths) == chunk_count, f"{chunk_count} chunks", counts)
        rows, most = np.array(told.rows, np.int64), _segment_counts(layout)
        _require(bool((rows <= most).all()), "no more rows than segments", f"{told.rows}")
        total = int(rows.sum())
        _require(len(told.index) == total * _ROW_BYTES, f"{total} rows", f"{len(told.index)} bytes")
        widths = np.frombuffer(told.widths, np.uint8).astype(np.int64)
        _require(bool(((widths == 1) | (widths == 2)).all()), "gaps of 1 or 2 bytes", "others")
        index = np.frombuffer(told.index, np.uint32).reshape(-1, 4)
        head = cls.of(layout, index, rows, widths)
        listed = entry.body_bytes
        _require(head.body_bytes == listed, f"a body of {listed} bytes", f"{head.body_bytes}")
        return head

    def segments(self, chunk: int, first: int, end: int) -> Segments | None:
        """The segments that have places from `first` to before `end`; None: nothing has changed.

        Raises: CorruptDelta: The chunk's index contradicts itself, or the chunk.
        """
        last_row = int(self.row_ends[chunk])
        index = self.index[int(self.row_ends[chunk - 1]) if chunk else 0 : last_row]
        record = self.layout.chunks[chunk]
        elements = math.prod(record.sizes)
        require_index(index, elements=elements)
        rows, gaps, values = between(index, first, end)
        if rows.start == rows.stop:
            return None
        gap_type = np.dtype(_GAP_TYPES[int(self.widths[chunk])])
        value_type = np.dtype(WORD_TYPES[item_bytes(self.layout.tensors[record.tensor].dtype)])
        nothing: Delta = Delta(
            elements, index[rows], np.empty(0, gap_type), np.empty(0, value_type)
        )
        return Segments(
            _span(int(self.gaps[chunk]), gaps, gap_type.itemsize),
            _span(int(self.values[chunk]), values, value_type.itemsize),
            nothing,
        )


_HEAD = "the head of a delta"

_tables = msgspec.msgpack.Decoder(DeltaTable)
_heads = msgspec.msgpack.Decoder(_Head)


def _require(holds: bool, expected: str, found: str) -> None:
    if not holds:
        raise CorruptDelta(_HEAD, expected, found)


def _sums(column: npt.NDArray[np.uint32], ends: Ints, rows: Ints) -> Ints:
    """The sum of the column over the rows of each chunk."""
    sums = np.concatenate([np.zeros(1, np.int64), column.cumsum(dtype=np.int64)])
    found: Ints = sums[ends] - sums[ends - rows]
    return found


def _segment_counts(layout: Layout) -> Ints:
    """How many segments each chunk has; none, if it is an object."""
    is_object = [record.dtype == OBJECT for record in layout.tensors]
    elements = (0 if is_object[chunk.tensor] else math.prod(chunk.sizes) for chunk in layout.chunks)
    return -(-np.fromiter(elements, np.int64, len(layout.chunks)) // SEGMENT)


def _span(start: int, part: slice, width: int) -> Span:
    return Span(start + part.start * width, (part.stop - part.start) * width)
