"""Manifests: what is encoded comes back; what contradicts itself or is no manifest is refused."""

import random

import msgspec
import pytest
import torch

from torch_ros.errors import ManifestMismatch
from torch_ros.weights.manifest import (
    OBJECT,
    ChunkRecord,
    Layout,
    LogicalTensor,
    Manifest,
    TensorRecord,
    dtype_name,
    dtype_named,
    item_bytes,
    logical,
)

TENSORS = (
    TensorRecord("a.weight", "bfloat16", (4, 6), ("a", 0, "weight")),
    TensorRecord("b", "float8_e4m3fn", ()),
    TensorRecord("empty", "int64", (0, 3)),
    TensorRecord("optimizer", OBJECT, (17,)),
)
CHUNKS = (
    ChunkRecord(0, (0, 0), (2, 6), (6, 1), spread=True),
    ChunkRecord(0, (2, 3), (2, 3), (1, 2), spread=True),
    ChunkRecord(1, (), (), (), spread=False),
    ChunkRecord(3, (0,), (17,), (1,), spread=False),
)
LAYOUT = Layout(TENSORS, CHUNKS)
MANIFEST = Manifest(LAYOUT, (2**64 - 4096, 0, 5, 6), (-1, 0, 7, -1), b"\x00opaque")


def chunk(**changes):
    return msgspec.structs.replace(CHUNKS[0], **changes)


def tensor(**changes):
    return msgspec.structs.replace(TENSORS[0], **changes)


def with_chunk(**changes):
    return Layout(TENSORS, (chunk(**changes), *CHUNKS[1:]))


def back(layout):
    """A layout, written in a manifest and read."""
    count = len(layout.chunks)
    return Manifest.decode(Manifest(layout, (0,) * count, (-1,) * count, b"").encode()).layout


def with_tensor(**changes):
    return Layout((tensor(**changes), *TENSORS[1:]), CHUNKS)


def test_a_manifest_comes_back_as_it_was():
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST


def test_an_empty_manifest_comes_back_too():
    nothing = Manifest(Layout((), ()), (), (), b"")
    assert Manifest.decode(nothing.encode()) == nothing


def test_the_boxes_are_the_chunks_in_rows():
    boxes = LAYOUT.boxes
    assert boxes.tensor.tolist() == [0, 0, 1, 3]
    assert boxes.offsets.tolist() == [[0, 0], [2, 3], [0, 0], [0, 0]]
    assert boxes.sizes.tolist() == [[2, 6], [2, 3], [1, 1], [17, 1]]
    assert boxes.strides.tolist() == [[6, 1], [1, 2], [0, 0], [1, 0]]
    assert boxes.spread.tolist() == [True, True, False, False]


CONTRADICTIONS = {
    "twice the same name": Layout((*TENSORS, TENSORS[0]), CHUNKS),
    "unknown dtype": with_tensor(dtype="float7"),
    "an attribute of torch that is no dtype": with_tensor(dtype="nn"),
    "negative shape": with_tensor(shape=(-4, 6)),
    "more bytes than there can be": with_tensor(shape=(2**40, 2**40)),
    "a dimension beyond 64 bits": with_tensor(shape=(2**63, 6)),
    "too many dimensions": with_tensor(shape=(1,) * 65),
    "an object that is not one row of bytes": Layout((tensor(dtype=OBJECT),), ()),
    "tensor that is not there": with_chunk(tensor=4),
    "tensor before the first": with_chunk(tensor=-1),
    "fewer offsets": with_chunk(offsets=(0,)),
    "more sizes": with_chunk(sizes=(2, 6, 1)),
    "fewer strides": with_chunk(strides=(1,)),
    "outside": with_chunk(offsets=(3, 0)),
    "larger": with_chunk(sizes=(5, 6)),
    "negative offset": with_chunk(offsets=(-1, 0)),
    "negative size": with_chunk(sizes=(-1, 6)),
    "negative stride": with_chunk(strides=(-6, 1)),
    "strides across all of memory": with_chunk(strides=(2**62, 1)),
    "wrong type": with_chunk(spread=3),
    "a number as name": with_tensor(fqn=7),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_layout_that_contradicts_itself_is_refused(name):
    layout = CONTRADICTIONS[name]
    with pytest.raises(ManifestMismatch):
        back(layout)


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": (1, 2, 3)},
        {"devices": (-1,) * 5},
        {"addresses": (-1, 0, 0, 0)},
        {"addresses": (2**64 - 8, 0, 0, 0)},  # the chunk goes on past the end
        {"devices": (-2, 0, 0, 0)},
        {"descriptor": None},
    ],
)
def test_a_manifest_that_contradicts_its_layout_is_refused(changes):
    with pytest.raises(ManifestMismatch):
        Manifest.decode(msgspec.structs.replace(MANIFEST, **changes).encode())


def test_a_refusal_says_which_chunk_and_why():
    with pytest.raises(ManifestMismatch, match="chunk 0: is not inside its tensor"):
        back(with_chunk(offsets=(3, 0)))


def test_bytes_that_are_no_manifest_raise_only_mismatch():
    whole = MANIFEST.encode()
    for end in range(len(whole)):
        with pytest.raises(ManifestMismatch):
            Manifest.decode(whole[:end])
    with pytest.raises(ManifestMismatch):
        Manifest.decode(whole + b"\0")
    rng = random.Random(0)
    refused = 0
    for _ in range(5_000):
        garbled = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            garbled[rng.randrange(len(garbled))] = rng.randrange(256)
        try:
            Manifest.decode(bytes(garbled))
        except ManifestMismatch:
            refused += 1
    assert refused > 1_000


def test_the_digest_tells_layouts_apart_and_nothing_else():
    assert LAYOUT.digest == back(LAYOUT).digest
    assert len(LAYOUT.digest) == 32
    others = [with_chunk(strides=(7, 1)), with_chunk(spread=False), with_tensor(dtype="float16")]
    assert len({LAYOUT.digest, *(other.digest for other in others)}) == 4


def test_every_dtype_has_a_name_that_leads_back():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        assert dtype_named(dtype_name(dtype)) is dtype
        assert item_bytes(dtype_name(dtype)) == dtype.itemsize
    assert item_bytes(OBJECT) == 1


def test_logical_is_the_union_of_all_ranks_without_their_chunks():
    ranks = [Layout((TENSORS[0], TENSORS[2]), CHUNKS[:1]), Layout((TENSORS[0], TENSORS[1]), ())]
    assert logical(ranks) == {
        "a.weight": LogicalTensor("bfloat16", (4, 6)),
        "empty": LogicalTensor("int64", (0, 3)),
        "b": LogicalTensor("float8_e4m3fn", ()),
    }


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"shape": (6, 4)}, {"dtype": OBJECT, "shape": (48,)}]
)
def test_ranks_that_disagree_are_named_with_the_tensor(changes):
    ranks = [Layout((), ()), LAYOUT, LAYOUT, Layout((tensor(**changes),), ())]
    with pytest.raises(ManifestMismatch, match=r"a\.weight.*rank 1.*rank 3"):
        logical(ranks)


def test_objects_may_differ_in_size_and_the_lowest_rank_counts():
    ranks = [Layout((TensorRecord("o", OBJECT, (size,)),), ()) for size in (5, 9)]
    assert logical(ranks) == {"o": LogicalTensor(OBJECT, (5,))}
    assert logical(ranks).digest == logical(ranks[::-1]).digest


def test_the_logical_digest_ignores_order_and_sharding_but_not_content():
    digest = logical([LAYOUT]).digest
    assert logical([Layout(TENSORS[::-1], ())]).digest == digest
    for changes in ({"dtype": "float16"}, {"shape": (6, 4)}, {"fqn": "c"}):
        other = logical([Layout((tensor(**changes), *TENSORS[1:]), ())])
        assert other.digest != digest
    assert logical([Layout(TENSORS[:3], ())]).digest != digest


def test_the_bytes_before_a_block_are_those_of_the_blocks_before_it():
    blocks = Layout(
        (TensorRecord("w", "int8", (9 << 20,)), TensorRecord("s", "int16", (2, 3))),
        (
            ChunkRecord(0, (0,), (9 << 20,), (1,), spread=False),
            ChunkRecord(1, (0, 0), (2, 3), (4, 1), spread=False),  # with gaps: one block
            ChunkRecord(1, (0, 0), (0, 3), (3, 1), spread=False),
        ),
    ).blocks
    sizes = [4 << 20, 4 << 20, 1 << 20, 12, 0]
    assert blocks.total == len(sizes)
    there = [blocks.bytes_before(position) for position in range(len(sizes) + 1)]
    assert there == [sum(sizes[:position]) for position in range(len(sizes) + 1)]
    assert blocks.bytes_before(2**32 - 1) == sum(sizes)
    assert Layout((), ()).blocks.bytes_before(0) == 0
