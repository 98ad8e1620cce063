"""Tables and heads of deltas: what is encoded comes back, and nothing else is believed."""

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ros.codec.delta import SEGMENT, Delta
from torch_ros.codec.table import (
    ALIGNMENT_BYTES,
    ENTRIES_MAX,
    TABLE_BYTES,
    Chain,
    DeltaEntry,
    DeltaHead,
    DeltaTable,
    padded,
)
from torch_ros.digests import digest_of
from torch_ros.errors import CorruptDelta
from torch_ros.weights.local import WORDS, build, local_chunks
from torch_ros.weights.manifest import ChunkRecord, Layout, TensorRecord


def entry(base, uid, **changes):
    made = DeltaEntry(base, uid, 4096, 160, 70, bytes(range(16)))
    return msgspec.structs.replace(made, **changes)


def packed(table):
    """As an older or a malicious release would write it: without a check of its own."""
    content = msgspec.msgpack.encode(table)
    return len(content).to_bytes(8, "little") + digest_of(content) + content


def test_the_largest_table_fits():
    entries = [
        entry("f" * 16, "e" * 16, address=2**64 - 2**20, body_bytes=2**48, head_bytes=2**40)
        for _ in range(ENTRIES_MAX)
    ]
    assert len(DeltaTable(tuple(entries), "f" * 16).encode()) == TABLE_BYTES


@pytest.mark.parametrize("coming", [None, "b"])
@pytest.mark.parametrize("count", [0, 1, ENTRIES_MAX])
def test_a_table_comes_back(count, coming):
    table = DeltaTable(tuple(entry(str(n), str(n + 1)) for n in range(count)), coming)
    assert DeltaTable.decode(table.encode()) == table


def test_a_table_that_is_rewritten_while_it_is_read_is_none():
    first, second = entry("a", "b"), entry("b", "c")
    old, new = DeltaTable((first,)).encode(), DeltaTable((second, first)).encode()
    for cut in range(1, len(new.rstrip(b"\0"))):
        torn = new[:cut] + old[cut:]
        assert torn in (old, new) or DeltaTable.decode(torn) is None
    assert DeltaTable.decode(bytes(TABLE_BYTES)) is None
    assert DeltaTable.decode(b"") is None


@pytest.mark.parametrize(
    "table",
    [
        DeltaTable((entry("a", "b", address=-16),)),
        DeltaTable((entry("a", "b", address=8),)),
        DeltaTable((entry("a", "b", body_bytes=8),)),
        DeltaTable((entry("a", "b", address=2**64 - 16, body_bytes=16),)),
        DeltaTable((entry("a", "b", body_bytes=-16),)),
        DeltaTable((entry("a", "b", head_bytes=-1),)),
        DeltaTable((entry("a", "b", head_bytes=2**63),)),
        DeltaTable((entry("a", "b", digest=b""),)),
        DeltaTable((entry("a", "b"),) * (ENTRIES_MAX + 1)),
        [[], None, 1],
        [[], 1],
        7,
        b"\xff",
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table):
    with pytest.raises(CorruptDelta):
        DeltaTable.decode(packed(table))


def test_a_text_that_is_none_is_refused():
    content = msgspec.msgpack.encode([[["ab"]], None]).replace(b"ab", b"\xff\xff")
    whole = len(content).to_bytes(8, "little") + digest_of(content) + content
    with pytest.raises(CorruptDelta):
        DeltaTable.decode(whole)


def test_a_chain_leads_from_the_base_to_the_uid_or_there_is_none():
    ab, bc, cd = entry("a", "b"), entry("b", "c"), entry("c", "d")
    table = DeltaTable((cd, bc, ab))
    assert table.chain("a", "d") == Chain((ab, bc, cd))
    assert table.chain("b", "c") == Chain((bc,))
    assert table.chain("d", "d") == Chain(())
    assert table.chain("d", "a") is None
    assert table.chain("x", "d") is None
    assert DeltaTable((cd, ab)).chain("a", "d") is None


def test_a_delta_that_is_coming_is_the_last_link_to_what_is_served():
    ab, bc = entry("a", "b"), entry("b", "c")
    table = DeltaTable((ab,), "b")
    assert table.chain("a", "c") == Chain((ab,), is_coming=True)
    assert table.chain("b", "c") == Chain((), is_coming=True)
    assert table.chain("c", "c") == Chain(())
    assert table.chain("x", "c") is None
    assert DeltaTable((bc, ab), "b").chain("a", "c") == Chain((ab, bc))
    assert DeltaTable((ab,), "x").chain("a", "c") is None


def test_a_circle_is_no_chain():
    table = DeltaTable((entry("a", "b"), entry("b", "a")), "b")
    assert table.chain("x", "a") is None
    assert table.chain("x", "c") is None
    assert DeltaTable((entry("a", "a"),)).chain("x", "a") is None


# Heads

SHAPES = [(), (0,), (5,), (3, 70), (SEGMENT,), (SEGMENT + 1,), (2, SEGMENT), (0, 3)]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def tensors_of(rng, count):
    tensors = {}
    for number in range(count):
        shape = SHAPES[rng.integers(len(SHAPES))]
        dtype = DTYPES[rng.integers(len(DTYPES))]
        size = math.prod(shape) * dtype.itemsize
        content = torch.from_numpy(np.frombuffer(rng.bytes(size) or b"", np.uint8).copy())
        empty = torch.empty(shape, dtype=dtype)
        tensors[f"t{number}"] = content.view(dtype).reshape(shape) if size else empty
    return tensors


def changed_from(rng, tensors):
    newer = {}
    for fqn, tensor in tensors.items():
        new = tensor.clone()
        flat = new.view(WORDS[dtype.itemsize] if (dtype := new.dtype) else None).reshape(-1)
        share = rng.choice([0, 0.0001, 0.02, 1])
        which = torch.from_numpy(np.flatnonzero(rng.random(flat.numel()) < share))
        raw = flat.view(torch.uint8).reshape(-1, dtype.itemsize)
        raw[which] ^= 1
        newer[fqn] = new
    return newer


def made(layout, older, newer):
    """The deltas of all chunks, as a publisher writes them: (entry, head's bytes, body)."""
    deltas = [Delta.of(a, b) for a, b in zip(older, newer, strict=True)]
    body = bytearray()
    for array in itertools.chain.from_iterable((d.gaps, d.values) for d in deltas):
        body += array.tobytes().ljust(padded(array.nbytes), b"\0")
    index = np.concatenate([np.empty((0, 4), np.uint32), *(delta.index for delta in deltas)])
    rows = np.array([len(delta.index) for delta in deltas], np.int64)
    widths = np.array([delta.gaps.itemsize for delta in deltas], np.int64)
    head = DeltaHead.of(layout, index, rows, widths)
    assert head.body_bytes == len(body)
    payload = head.encode()
    sizes = (len(body), len(payload), digest_of(payload))
    return deltas, DeltaEntry("a", "b", ALIGNMENT_BYTES, *sizes), payload, body


def read(body, span):
    return np.frombuffer(body[span.offset : span.offset + span.size_bytes], np.uint8)


def changes(delta):
    """The places and the bits of a delta."""
    found = list(delta.decode())
    places = [place for each in found for place in each.places.tolist()]
    return places, b"".join(each.values.tobytes() for each in found)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.long
def test_a_reader_finds_the_segments_of_any_part_of_any_chunk(seed):
    rng = np.random.default_rng(seed)
    tensors = tensors_of(rng, int(rng.integers(0, 6)))
    layout, older = build(local_chunks(tensors), {})
    _, newer = build(local_chunks(changed_from(rng, tensors)), {})
    deltas, listed, payload, body = made(layout, older, newer)
    listed.require_head_fits(layout)
    head = DeltaHead.decode(payload, listed, layout)
    for number, delta in enumerate(deltas):
        first, end = sorted(rng.integers(0, delta.elements + 1, 2).tolist())
        wanted = delta.between(first, end)
        segments = head.segments(number, first, end)
        assert (segments is None) == (wanted.changed == 0)
        if segments is None:
            continue
        got = segments.received(read(body, segments.gaps), read(body, segments.values))
        assert got.elements == delta.elements
        assert segments.changed == got.changed
        assert changes(got) == changes(wanted)


LAYOUT = Layout(
    (TensorRecord("o", "object", (9,)), TensorRecord("t", "bfloat16", (SEGMENT + 9,))),
    (
        ChunkRecord(0, (0,), (9,), (1,), spread=False),
        ChunkRecord(1, (0,), (SEGMENT + 9,), (1,), spread=False),
    ),
)


def one_delta():
    older, newer = torch.zeros(SEGMENT + 9), torch.zeros(SEGMENT + 9)
    newer[[3, 500, SEGMENT + 2]] = 1
    nothing = torch.zeros(9, dtype=torch.uint8)
    memory = [[nothing, each.bfloat16()] for each in (older, newer)]
    return made(LAYOUT, *memory)[1:]


def listed_as(payload, listed):
    return msgspec.structs.replace(listed, digest=digest_of(payload), head_bytes=len(payload))


def spoiled(payload, listed, place, other):
    fields = msgspec.msgpack.decode(payload)
    fields[place] = other(fields[place])
    changed = msgspec.msgpack.encode(fields)
    return changed, listed_as(changed, listed)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (0, lambda rows: [*rows, 0]),
        (0, lambda rows: rows[:1]),
        (0, lambda rows: [rows[1], 0]),  # an object has none
        (0, lambda rows: [0, 3]),
        (0, lambda rows: [0, -2]),
        (0, lambda rows: [0, 2**62]),
        (1, lambda widths: widths[:1]),
        (1, lambda _: b"\1\0"),
        (1, lambda _: b"\1\3"),
        (2, lambda index: index[:-16]),
        (2, lambda index: index[:-1]),
        (2, lambda index: index[:8] + b"\xff" * 4 + index[12:]),
        (2, lambda index: index + index),
        (2, lambda _: 5),
    ],
)
def test_a_head_that_contradicts_entry_or_layout_is_refused(place, other):
    listed, payload, _ = one_delta()
    assert DeltaHead.decode(payload, listed, LAYOUT).changed == 3
    with pytest.raises(CorruptDelta):
        DeltaHead.decode(*spoiled(payload, listed, place, other), LAYOUT)


def test_a_head_of_another_entry_layout_or_release_is_refused():
    listed, payload, _ = one_delta()
    larger = msgspec.structs.replace(listed, body_bytes=listed.body_bytes + 16)
    for one in (larger, msgspec.structs.replace(listed, digest=bytes(16))):
        with pytest.raises(CorruptDelta):
            DeltaHead.decode(payload, one, LAYOUT)
    with pytest.raises(CorruptDelta):
        DeltaHead.decode(payload, listed, Layout(LAYOUT.tensors[:1], LAYOUT.chunks[:1]))
    junk = b"\xc1" + payload
    with pytest.raises(CorruptDelta):
        DeltaHead.decode(junk, listed_as(junk, listed), LAYOUT)


def test_no_memory_is_taken_for_a_head_that_is_too_large():
    listed, _, _ = one_delta()
    for size in (2**12, 2**40, 2**62):
        with pytest.raises(CorruptDelta, match=f"found {size}"):
            msgspec.structs.replace(listed, head_bytes=size).require_head_fits(LAYOUT)


def test_a_row_of_the_index_that_is_wrong_is_refused_where_it_is_used():
    listed, payload, body = one_delta()

    def swapped(index):
        return index[16:] + index[:16]

    head = DeltaHead.decode(*spoiled(payload, listed, 2, swapped), LAYOUT)
    with pytest.raises(CorruptDelta, match="number above the last"):
        head.segments(1, 0, SEGMENT)
    segments = DeltaHead.decode(payload, listed, LAYOUT).segments(1, 0, SEGMENT)
    gaps, values = read(body, segments.gaps), read(body, segments.values)
    with pytest.raises(CorruptDelta, match="checksum"):
        segments.received(gaps, values ^ 1)
    with pytest.raises(CorruptDelta):
        segments.received(gaps[1:], values)
    with pytest.raises(CorruptDelta):
        segments.received(gaps, values[1:])


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.long
def test_bytes_of_any_kind_are_a_head_that_can_be_used_or_are_refused(data):
    listed, payload, body = one_delta()
    place = data.draw(st.integers(0, len(payload) - 1))
    other = data.draw(st.binary(min_size=1, max_size=20))
    junk = payload[:place] + other + payload[place + len(other) :]
    try:
        head = DeltaHead.decode(junk, listed_as(junk, listed), LAYOUT)
        segments = head.segments(1, 0, SEGMENT + 9)
        if segments is not None:
            segments.received(read(body, segments.gaps), read(body, segments.values))
    except CorruptDelta:
        pass


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_of_any_kind_are_a_table_or_are_refused(data):
    content = DeltaTable((entry("a", "b"),), "b").encode()
    length = int.from_bytes(content[:8], "little")
    inner = content[24 : 24 + length]
    place = data.draw(st.integers(0, length - 1))
    other = data.draw(st.binary(min_size=1, max_size=20))
    junk = inner[:place] + other + inner[place + len(other) :]
    try:
        table = DeltaTable.decode(len(junk).to_bytes(8, "little") + digest_of(junk) + junk)
    except CorruptDelta:
        return
    assert table is not None
    table.chain("a", "c")
