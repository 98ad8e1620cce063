"""Digests against their definition in plain integers, over random partitions and corruptions."""

import itertools
import math
import random
import tracemalloc
from functools import cache

import numpy as np
import pytest
import torch

from torch_ros.errors import NotSupported
from torch_ros.weights import digest as module
from torch_ros.weights.digest import (
    change_digest,
    chunk_digests,
    combine,
    digest,
    first_difference,
    totals,
)
from torch_ros.weights.local import LocalChunk, LocalTensor, build, local_chunks
from torch_ros.weights.manifest import dtype_name

DEPTHS = ["full", "sampled"]
M = 2**64
WIDTHS = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
EXTREMES = {torch.uint8, torch.complex128}
FLIPPED = [
    pytest.param(each, marks=() if each in EXTREMES else pytest.mark.long, id=dtype_name(each))
    for each in WIDTHS
]


def each_dtype():
    """All of them at each depth; `make test` samples one of each width."""
    for dtype, depth in itertools.product(all_dtypes(), DEPTHS):
        is_later = depth == "sampled" and dtype not in WIDTHS
        name = f"{dtype_name(dtype)}-{depth}"
        yield pytest.param(dtype, depth, marks=pytest.mark.long if is_later else (), id=name)


def all_dtypes():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = ("qint", "quint")
    return sorted((d for d in dtypes if not dtype_name(d).startswith(quantized)), key=str)


def random_bits(rng, shape, dtype):
    return tensor_of(rng.randbytes(math.prod(shape) * dtype.itemsize), shape, dtype)


def tensor_of(content, shape, dtype):
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def whole_digest(tensor, depth="full"):
    shape = tuple(tensor.shape)
    return digest(tensor, global_shape=shape, offsets=(0,) * len(shape), depth=depth)


def box_digest(whole, box, depth="full"):
    offsets = [part.start for part in box]
    return digest(whole[tuple(box)], global_shape=whole.shape, offsets=offsets, depth=depth)


@cache
def odd(number, seed):
    mixed = (number * 0x9E3779B97F4A7C15 + seed) % M
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor % M
    return (mixed ^ (mixed >> 31)) | 1


def is_sampled(segment):
    return segment < 8 or segment * 0x9E3779B97F4A7C15 % M < M // 64


class Definition:
    """Where an element of a tensor counts, and how much: by element, in plain integers."""

    def __init__(self, shape, item_bytes):
        self.shape, self.item_bytes = shape, item_bytes
        self.inside, cut = item_bytes, len(shape) - 1
        while cut > 0 and self.inside * shape[cut] < 1024:
            self.inside *= shape[cut]
            cut -= 1
        self.cut = max(cut, 0)
        self.period = 1024 // self.inside
        self.per_row = -(-shape[cut] // self.period) if shape else 1

    def place(self, index):
        """The segment of an element, and at which of its bytes it is."""
        row = inner = 0
        for number, size in zip(index[: self.cut], self.shape, strict=False):
            row = row * size + number
        for number, size in list(zip(index, self.shape, strict=True))[self.cut + 1 :]:
            inner = inner * size + number
        at = index[self.cut] if index else 0
        byte = at % self.period * self.inside + inner * self.item_bytes
        return row * self.per_row + at // self.period, byte

    def digest(self, chunk, offsets, depth):
        total = 0
        content = chunk.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for number, local in enumerate(itertools.product(*map(range, chunk.shape))):
            index = tuple(a + b for a, b in zip(local, offsets, strict=True))
            segment, first = self.place(index)
            if depth == "sampled" and not is_sampled(segment):
                continue
            item = content[number * self.item_bytes : (number + 1) * self.item_bytes]
            for byte, value in enumerate(item, first):
                weight = odd(segment, 0xB7E151628AED2A6A) * odd(byte // 4, 0x243F6A8885A308D3)
                total += weight * (value << (8 * (byte % 4)))
        return total % M


SHAPES = [(), (1,), (7,), (1500,), (3, 700), (40, 3), (2, 3, 5, 7), (5, 1, 4), (2, 9, 90, 1)]


@pytest.mark.parametrize(("dtype", "depth"), [*each_dtype()])
def test_a_digest_of_any_dtype_is_what_the_definition_says(dtype, depth):
    rng = random.Random(1)
    for shape in SHAPES:
        tensor = random_bits(rng, shape, dtype)
        expected = Definition(shape, dtype.itemsize).digest(tensor, (0,) * len(shape), depth)
        assert whole_digest(tensor, depth) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_chunk_far_out_in_a_tensor_larger_than_memory_is_too(depth):
    rng = random.Random(2)
    for dtype in WIDTHS:
        for shape, offsets, sizes in [
            ((2**40,), (2**39 - 5,), (1200,)),
            ((2**33, 2**9), (2**33 - 9, 17), (9, 120)),
            ((2**20, 2**10, 2, 3), (2**19, 1000, 1, 1), (3, 24, 1, 2)),
        ]:
            chunk = random_bits(rng, sizes, dtype)
            expected = Definition(shape, dtype.itemsize).digest(chunk, offsets, depth)
            assert digest(chunk, global_shape=shape, offsets=offsets, depth=depth) == expected


def test_digests_are_a_format_and_stay_what_they_are():
    tensor = torch.arange(60_000).reshape(20, 3000)
    assert whole_digest(tensor) == 0x35C8737679F55CC4
    assert whole_digest(tensor, "sampled") == 0xB02C67383C95A518
    assert whole_digest(tensor.to(torch.bfloat16)) == 0x7D139A77CB380043


# Partitions


def random_partition(rng, box):
    """A box cut again and again, in any direction: parts of any sizes, also grids do not have."""
    long = [dim for dim, part in enumerate(box) if part.stop - part.start > 1]
    if not long or rng.random() < 0.3:
        return [box]
    dim = rng.choice(long)
    start, stop = box[dim].start, box[dim].stop
    cut = rng.randrange(start + 1, stop)
    halves = (slice(start, cut), slice(cut, stop))
    return [part for half in halves for part in random_partition(rng, with_part(box, dim, half))]


def with_part(box, dim, part):
    return [*box[:dim], part, *box[dim + 1 :]]


def uncut(shape):
    return [slice(0, size) for size in shape]


def anywhere(rng, tensor):
    """Equal to `tensor`, with its dimensions in any order in memory and gaps between."""
    order = rng.sample(range(tensor.ndim), tensor.ndim)
    steps = [rng.choice([1, 1, 2]) for _ in order]
    sizes = [tensor.shape[dim] * step for dim, step in zip(order, steps, strict=True)]
    view = torch.empty(sizes, dtype=tensor.dtype)
    view = view[tuple(slice(None, None, step) for step in steps)]
    view = view.permute([order.index(dim) for dim in range(tensor.ndim)])
    return view.copy_(tensor)


def random_shape(rng):
    shapes = [(5000,), (9, 1300), (300, 40), (700, 3), (3, 5, 400), (4, 6, 90, 16), (20, 30, 3, 3)]
    return tuple(size + rng.randrange(3) for size in rng.choice(shapes))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("dtype", FLIPPED)
def test_the_digests_of_any_partition_are_that_of_the_tensor(dtype, depth):
    rng = random.Random(3)
    for _ in range(10):
        whole = random_bits(rng, random_shape(rng), dtype)
        expected = whole_digest(whole, depth)
        parts = random_partition(rng, uncut(whole.shape))
        chunks = [anywhere(rng, whole[tuple(box)]) for box in parts]
        found = [
            digest(
                chunk, global_shape=whole.shape, offsets=[part.start for part in box], depth=depth
            )
            for box, chunk in zip(parts, chunks, strict=True)
        ]
        assert combine(found) == expected
        assert all(0 <= part < M for part in found)


def test_words_that_memory_does_not_align_are_the_same_words():
    rng = random.Random(10)
    for dtype in (torch.uint8, torch.bfloat16):
        whole = random_bits(rng, (6, 400), dtype)
        for first, gap in itertools.product(range(4), range(4)):
            memory = torch.empty(first + 6 * (400 + gap), dtype=dtype)
            moved = memory[first:].view(6, 400 + gap)[:, :400].copy_(whole)
            assert whole_digest(moved) == whole_digest(whole)


def test_chunks_of_many_blocks_are_summed_whole(monkeypatch):
    rng = random.Random(4)
    wholes = [random_bits(rng, random_shape(rng), torch.bfloat16) for _ in range(20)]
    expected = [[whole_digest(whole, depth) for depth in DEPTHS] for whole in wholes]
    monkeypatch.setattr(module, "_SEGMENTS_AT_ONCE", 3)
    assert [[whole_digest(whole, depth) for depth in DEPTHS] for whole in wholes] == expected


def test_what_has_no_elements_adds_nothing():
    assert whole_digest(torch.empty(0)) == 0
    assert digest(torch.empty(0, 4), global_shape=(9, 4), offsets=(9, 0), depth="full") == 0
    assert combine([]) == 0


def test_off_reads_nothing():
    nowhere = torch.empty(1000, device="meta")
    assert digest(nowhere, global_shape=(1000,), offsets=(0,), depth="off") == 0


def test_a_parameter_is_digested_as_its_content():
    parameter = torch.nn.Parameter(torch.randn(5, 300))
    assert whole_digest(parameter) == whole_digest(parameter.detach().clone())


def test_an_expanded_tensor_is_digested_as_what_it_shows():
    row = torch.randn(700)
    assert whole_digest(row.expand(5, 700)) == whole_digest(row.repeat(5, 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=dtype_name)
def test_a_device_sums_what_the_host_sums(dtype):
    rng = random.Random(5)
    content = random_bits(rng, (6, 5, 40, 3), dtype)[:, ::2]
    weights = np.array([rng.getrandbits(64) for _ in range(120)], np.uint64).reshape(40, 3)
    on_host = module._dot_on_host(content, weights)
    assert on_host.shape == (6, 3)
    assert np.array_equal(module._dot_on_device(content, weights), on_host)


# Corruptions


@pytest.mark.parametrize("dtype", FLIPPED)
def test_every_flipped_bit_is_found(dtype):
    tensor = random_bits(random.Random(6), (3, 11), dtype)
    expected = whole_digest(tensor)
    content = tensor.view(torch.uint8).view(-1)
    for byte, bit in itertools.product(range(len(content)), range(8)):
        content[byte] ^= 1 << bit
        assert whole_digest(tensor) != expected
        content[byte] ^= 1 << bit
    assert whole_digest(tensor) == expected


@pytest.mark.parametrize("dtype", FLIPPED)
def test_any_two_flips_of_the_same_bit_are_found(dtype):
    # A stuck line of memory does that. The top bit of a word is the weakest place.
    tensor = torch.zeros(3, 1100 // dtype.itemsize, dtype=dtype)
    content = tensor.view(torch.uint8).view(-1)
    for size_bytes in (2, 4, 8):
        seen = {}
        for byte in range(size_bytes - 1, len(content), size_bytes):
            content[byte] = 0x80
            # Two cancel if and only if the one is what the other lacks to 2^64.
            seen[whole_digest(tensor)] = byte
            content[byte] = 0
        assert len(seen) == len(content) // size_bytes
        assert not any((-found) % M in seen for found in seen)


@pytest.mark.parametrize("dtype", FLIPPED)
def test_any_two_elements_that_change_places_are_found(dtype):
    tensor = torch.arange(1, 61).to(dtype).reshape(3, 20)
    if dtype.is_signed:
        tensor[:, ::2] *= -1  # x and -x differ in nothing but the top bit
        tensor[2] = -tensor[1]
    expected = whole_digest(tensor)
    flat = tensor.view(-1)
    for a, b in itertools.combinations(range(60), 2):
        kept = flat.clone()
        flat[[a, b]] = flat[[b, a]]
        assert torch.equal(flat, kept) or whole_digest(tensor) != expected
        flat.copy_(kept)


def test_a_right_row_at_a_wrong_offset_is_found():
    whole = torch.randn(50, 300)
    expected = whole_digest(whole)
    for row in range(49):
        wrong = whole.clone()
        wrong[row] = whole[row + 1]
        assert whole_digest(wrong) != expected
        there = box_digest(whole, [slice(row, row + 1), slice(0, 300)])
        here = digest(
            whole[row : row + 1], global_shape=(50, 300), offsets=(row + 1, 0), depth="full"
        )
        assert here != there
    assert whole_digest(whole.roll(1, 0)) != expected
    assert whole_digest(whole.roll(1, 1)) != expected
    assert whole_digest(torch.cat([whole[25:], whole[:25]])) != expected


def test_numbers_that_compare_as_equal_have_different_digests():
    zeros, negative = torch.zeros(3), -torch.zeros(3)
    assert torch.equal(zeros, negative)
    assert whole_digest(zeros) != whole_digest(negative)
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    payloads = quiet.view(torch.float32)
    assert payloads.isnan().all()
    assert len({whole_digest(nan) for nan in payloads}) == 4


# Samples


def sampled_mask(shape, dtype):
    definition = Definition(shape, dtype.itemsize)
    indices = itertools.product(*map(range, shape))
    return torch.tensor([is_sampled(definition.place(index)[0]) for index in indices])


@pytest.mark.parametrize("shape", [(30_000,), (40, 700), (3, 60, 90, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_a_sample_depends_on_the_sampled_elements_only(dtype, shape):
    rng = random.Random(7)
    tensor = random_bits(rng, shape, dtype)
    expected = whole_digest(tensor, "sampled")
    flat, mask = tensor.view(-1), sampled_mask(shape, dtype)
    assert 0 < mask.sum() < len(mask) / 4
    other = random_bits(rng, shape, dtype).view(-1)
    torch.where(mask, flat, other, out=flat)
    assert whole_digest(tensor, "sampled") == expected
    for index in rng.sample(mask.nonzero().view(-1).tolist(), 50):
        flat.view(torch.int16)[index * (dtype.itemsize // 2)] ^= 1
        assert whole_digest(tensor, "sampled") != expected
        flat.view(torch.int16)[index * (dtype.itemsize // 2)] ^= 1


def test_a_sample_is_one_segment_of_64_and_no_stretch_is_without():
    segments = np.flatnonzero(module._is_sampled(np.arange(10**6, dtype=np.uint64)))
    assert len(segments) == pytest.approx(10**6 / 64, rel=0.01)
    assert np.diff(segments).max() == 89


def test_small_tensors_are_sampled_whole():
    tensor = torch.randn(4096).to(torch.bfloat16)
    assert whole_digest(tensor, "sampled") == whole_digest(tensor) != 0


GUARDED = """
import ctypes, mmap, torch
from torch_ros.weights.digest import digest
PAGE, NO_ACCESS = mmap.PAGESIZE, 0
memory = mmap.mmap(-1, 2048 * PAGE)
tensor = torch.frombuffer(memory, dtype=torch.float32).view(-1, 2048).fill_(1)
golden, modulus = 0x9E3779B97F4A7C15, 2**64
read = {
    segment * 1024 // PAGE
    for segment in range(2048 * PAGE // 1024)
    if segment < 8 or segment * golden % modulus < modulus // 64
}
protect = ctypes.CDLL(None, use_errno=True).mprotect
for page in set(range(2048)) - read:
    assert not protect(ctypes.c_void_p(tensor.data_ptr() + page * PAGE), PAGE, NO_ACCESS)
shape = tuple(tensor.shape)
print(len(read), digest(tensor, global_shape=shape, offsets=(0, 0), depth="sampled"), flush=True)
digest(tensor, global_shape=shape, offsets=(0, 0), depth="full")
"""


def test_a_sample_does_not_touch_other_memory(started):
    child = started.start(GUARDED, talks=True)
    pages, found = map(int, child.hear().split())
    assert pages < 200
    assert found == whole_digest(torch.ones(1024, 2048), "sampled")
    assert child.wait(20) < 0  # killed: the pages between are closed, and "full" needs them


@pytest.mark.parametrize("depth", DEPTHS)
def test_temporaries_are_small_however_large_the_tensor(depth):
    whole = torch.zeros(8192, 4096)
    tracemalloc.start()
    try:
        whole_digest(whole, depth)
        box_digest(whole, [slice(0, 8192), slice(1024, 1027)], depth)
        whole_digest(whole.view(-1), depth)
        whole_digest(whole.view(torch.uint8).T, depth)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


# Changes


@pytest.mark.parametrize(("dtype", "depth"), [*each_dtype()])
def test_a_digest_grows_by_what_changes(dtype, depth):
    rng = random.Random(11)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
    for shape in [*SHAPES, (6, 512), (30, 513), (3, 5000), (70, 3, 100), (0, 4)]:
        count = math.prod(shape)
        places = np.array(rng.sample(range(count), rng.choice([0, count // 9, count])), np.int64)
        if rng.random() < 0.9:
            places.sort()
        old, other = (rng.randbytes(count * dtype.itemsize) for _ in range(2))
        old, other = (np.frombuffer(each, unsigned[dtype.itemsize]) for each in (old, other))
        new = old.copy()
        new[places] = other[places]
        grown = change_digest(places, old[places], new[places], global_shape=shape, depth=depth)
        before, after = (tensor_of(each.tobytes(), shape, dtype) for each in (old, new))
        assert combine([whole_digest(before, depth), grown]) == whole_digest(after, depth)


def test_a_change_far_out_in_a_tensor_larger_than_memory_counts_as_its_content():
    for shape, offsets in [((2**40,), (2**39 - 5,)), ((2**33, 2**9), (2**33 - 9, 17))]:
        box = torch.arange(1, 5, dtype=torch.int16).reshape((1,) * (len(shape) - 1) + (4,))
        first = int(np.ravel_multi_index(offsets, shape))
        bits = box.flatten().numpy().view(np.uint16)
        for depth in DEPTHS:
            expected = digest(box, global_shape=shape, offsets=offsets, depth=depth)
            found = change_digest(
                np.arange(first, first + 4), bits * 0, bits, global_shape=shape, depth=depth
            )
            assert found == expected


def test_what_is_off_or_does_not_change_adds_nothing():
    bits, places = np.arange(9, dtype=np.uint16), np.arange(9)
    assert change_digest(places, bits, bits + 1, global_shape=(9,), depth="off") == 0
    assert change_digest(places, bits, bits, global_shape=(9,), depth="full") == 0
    assert change_digest(places[:0], bits[:0], bits[:0], global_shape=(9,), depth="full") == 0


# Groups


def local(fqn, whole, boxes):
    chunks = [LocalChunk(tuple(p.start for p in box), whole[tuple(box)]) for box in boxes]
    kept = tuple(chunk for chunk in chunks if chunk.tensor.numel())
    return LocalTensor(fqn, whole.dtype, tuple(whole.shape), kept, spread=True)


def random_group(rng, wholes, rank_count):
    """Ranks that together hold `wholes`, in parts of which some are on several ranks."""
    ranks = [[] for _ in range(rank_count)]
    for fqn, whole in wholes.items():
        held = [[] for _ in ranks]
        for part in random_partition(rng, uncut(whole.shape)):
            for rank in rng.sample(range(rank_count), rng.choice([1, 1, 2])):
                held[rank].append(part)
        for rank, boxes in enumerate(held):
            ranks[rank].append(local(fqn, whole, boxes))
    return [build(tensors, {}) for tensors in ranks]


def random_wholes(rng):
    shapes = [(), (7,), (0, 3), (6, 5), (4, 3, 5), (2, 700)]
    return {
        f"t{number}": random_bits(rng, shape, torch.bfloat16) for number, shape in enumerate(shapes)
    }


def group_totals(group, depth):
    chunks = [chunk_digests(layout, memory, depth=depth) for layout, memory in group]
    return totals([layout for layout, _ in group], chunks, depth=depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_two_groups_that_cut_the_same_tensors_differently_agree(depth):
    rng = random.Random(9)
    for _ in range(12):
        wholes = random_wholes(rng)
        expected = {fqn: whole_digest(whole, depth) for fqn, whole in wholes.items()}
        for rank_count in (2, 3):
            assert group_totals(random_group(rng, wholes, rank_count), depth) == expected


def test_a_tensor_that_differs_is_named():
    assert first_difference({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}) is None
    assert first_difference({"a": 1, "b": 9}, {"a": 1, "b": 2}) == "b"
    assert first_difference({"a": 1}, {}) == "a"


def test_tied_tensors_are_digested_under_each_of_their_names():
    shared = torch.randn(100)
    group = [build(local_chunks({"embed": shared, "head": shared}), {})]
    expected = whole_digest(shared)
    assert group_totals(group, "full") == {"embed": expected, "head": expected}


def test_an_object_counts_as_the_lowest_rank_has_it():
    pickles = [torch.arange(5, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)]
    group = [build([], {"step": pickled}) for pickled in pickles]
    assert group_totals(group, "full") == {"step": whole_digest(pickles[0])}


def test_parts_that_overlap_are_refused_by_name():
    whole = torch.randn(10)
    boxes = [slice(0, 6)], [slice(4, 10)]
    group = [build([local("w", whole, [box])], {}) for box in boxes]
    with pytest.raises(NotSupported, match="'w'"):
        group_totals(group, "full")
