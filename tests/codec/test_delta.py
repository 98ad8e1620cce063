"""Deltas against torch's own comparison and slicing, bit for bit, and what is refused.

TORCH_ROS_FUZZ=n tries n times as many chains.
"""

import itertools
import math
import os
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_ros.codec import delta as module
from torch_ros.codec.delta import SEGMENT, Delta, apply, between, encode, merge, pieces, words
from torch_ros.errors import CorruptDelta, ManifestMismatch, NotSupported, UsageError
from torch_ros.weights.digest import chunk_digests, combine, digest, totals
from torch_ros.weights.local import WORDS, LocalChunk, LocalTensor, build, local_chunks
from torch_ros.weights.manifest import ChunkRecord, Layout, TensorRecord, dtype_name

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))


def all_dtypes():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = ("qint", "quint")
    return sorted((d for d in dtypes if not dtype_name(d).startswith(quantized)), key=str)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads of torch that wait for a core would take four times the processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Worlds: whole tensors whose content changes, cut among ranks, and targets that are cut otherwise


SMALL = [(), (0,), (1,), (7,), (0, 3), (6, 5), (5, 1, 4), (4, 3, 5), (2, 3, 1, 4), (300,)]
LONG = [(200_000,), (3, 70_000), (70_000, 3), (2, 300, 300)]


def random_content(rng, shape, dtype):
    """Bits of any kind, and zeros."""
    content = np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), np.uint8).copy()
    content = content.reshape(math.prod(shape), dtype.itemsize)
    content[rng.random(len(content)) < 0.3] = 0
    return content


def changed_content(rng, content, earlier):
    """Some elements with other bits, or their sign alone, or what they had before."""
    count, item_bytes = content.shape
    new = content.copy()
    which = np.flatnonzero(rng.random(count) < rng.choice([0, 0.001, 0.05, 0.5, 1]))
    match rng.integers(3):
        case 0:
            new[which, rng.integers(item_bytes, size=len(which))] ^= np.uint8(1 << rng.integers(8))
        case 1:
            new[which, -1] ^= 0x80  # 0.0 becomes -0.0, a NaN another NaN
        case 2:
            new[which] = earlier[which]
    return new


def tensor_of(content, shape, dtype):
    if not content.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(content.reshape(-1)).view(dtype).reshape(shape)


def same_bits(a, b):
    return a.shape == b.shape and words(a).tobytes() == words(b).tobytes()


def anywhere(rng, tensor):
    """Equal to `tensor`, with its dimensions in any order in memory and gaps between; its base."""
    order = [int(dim) for dim in rng.permutation(tensor.ndim)]
    steps = [int(step) for step in rng.choice([1, 1, 2], tensor.ndim)]
    word = WORDS[tensor.element_size()]
    sizes = [tensor.shape[dim] * step for dim, step in zip(order, steps, strict=True)]
    base = torch.ones(sizes, dtype=word)
    view = base[tuple(slice(None, None, step) for step in steps)]
    view = view.permute([order.index(dim) for dim in range(tensor.ndim)])
    view.copy_(tensor.view(word))
    return view.view(tensor.dtype), base


def random_grid(rng, shape):
    """A shape cut along every dimension, unevenly, with empty parts: a list of slices."""
    cuts = []
    for size in shape:
        marks = sorted(rng.integers(0, size + 1, rng.choice([0, 0, 0, 1, 2])).tolist())
        cuts.append([slice(a, b) for a, b in itertools.pairwise([0, *marks, size])])
    return list(itertools.product(*cuts))


def local(fqn, whole, boxes, tensors):
    chunks = (
        LocalChunk(tuple(part.start for part in box), tensor)
        for box, tensor in zip(boxes, tensors, strict=True)
    )
    kept = tuple(chunk for chunk in chunks if chunk.tensor.numel())
    return LocalTensor(fqn, whole.dtype, tuple(whole.shape), kept, spread=True)


def shards(whole, owners, rank_count):
    """The memory of each rank, and its layout: ranks whose boxes of `whole` are these."""
    ranks = []
    for rank in range(rank_count):
        boxes = [box for box, holders in owners if rank in holders]
        ranks.append(build([local("t", whole, boxes, [whole[box] for box in boxes])], {}))
    return ranks


def sent(delta):
    """As it arrives elsewhere."""
    arrays = (delta.index, delta.gaps, delta.values)
    copies = (np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for a in arrays)
    return Delta.received(delta.elements, *copies)


def changes_of(older, newer):
    """A delta for each chunk of each rank."""
    return [
        [sent(Delta.of(a, b)) for a, b in zip(old, new, strict=True)]
        for (_, old), (_, new) in zip(older, newer, strict=True)
    ]


def case(seed, dtype, *, is_long=False):
    """A chain of contents is brought to a target of another sharding, one by one or merged."""
    rng = np.random.default_rng(seed)
    shapes = LONG if is_long else SMALL
    shape = shapes[rng.integers(len(shapes))]
    depth = ["off", "full", "sampled"][rng.integers(3)]
    contents = [random_content(rng, shape, dtype)]
    for _ in range(rng.integers(1, 21 if rng.random() < 0.1 and not is_long else 4)):
        earlier = contents[rng.integers(len(contents))]
        contents.append(changed_content(rng, contents[-1], earlier))
    wholes = [tensor_of(content, shape, dtype) for content in contents]

    rank_count = int(rng.integers(1, 4))
    owners = [
        (box, set(rng.integers(rank_count, size=2).tolist())) for box in random_grid(rng, shape)
    ]
    versions = [shards(whole, owners, rank_count) for whole in wholes]
    deltas = [changes_of(*pair) for pair in itertools.pairwise(versions)]
    if rng.random() < 0.4:
        each = zip(*deltas, strict=True)
        deltas = [[[merge(chain) for chain in zip(*rank, strict=True)] for rank in each]]

    cut = [box for box, _ in owners] if rng.random() < 0.3 else random_grid(rng, shape)
    boxes = [box for box in cut if rng.random() < 0.8]
    places = [anywhere(rng, wholes[0][box]) for box in boxes]
    layout, memory = build([local("t", wholes[0], boxes, [view for view, _ in places])], {})

    def digests():
        return [
            digest(tensor, global_shape=shape, offsets=chunk.offsets, depth=depth)
            for chunk, tensor in zip(layout.chunks, memory, strict=True)
        ]

    before = digests()
    plan = pieces([layout for layout, _ in versions[0]], layout, target_rank=int(rng.integers(5)))
    untouched = [base.clone() for _, base in places]

    grown = [0] * len(memory)
    for number, step in enumerate(deltas):
        if rng.random() < 0.2:  # cut short, and begun again
            for piece in plan[: rng.integers(len(plan) + 1)]:
                grown[piece.target_chunk] += apply_one(step, piece, memory, depth)
        for piece in plan:
            grown[piece.target_chunk] += apply_one(step, piece, memory, depth)
        if len(deltas) == len(wholes) - 1:
            expected = wholes[number + 1]
            assert all(
                same_bits(view, expected[box]) for (view, _), box in zip(places, boxes, strict=True)
            )
    for (view, base), box, kept in zip(places, boxes, untouched, strict=True):
        assert same_bits(view, wholes[-1][box])
        kept.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(
            wholes[-1][box].view(kept.dtype)
        )
        assert same_bits(base, kept)  # what lies between is as it was
    assert [combine(pair) for pair in zip(before, grown, strict=True)] == digests()


def apply_one(deltas, piece, memory, depth):
    delta = deltas[piece.source_rank][piece.source_chunk]
    return apply(delta, memory[piece.target_chunk], piece, depth=depth)


seeds = st.integers(0, 2**63)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, st.sampled_from(all_dtypes()))
@pytest.mark.long
def test_any_chain_reaches_any_other_sharding(seed, dtype):
    case(seed, dtype)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, st.sampled_from(all_dtypes()))
def test_so_it_does_over_several_segments(seed, dtype):
    case(seed, dtype, is_long=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tenth", range(TIMES))
def test_ten_thousand_deltas_do(tenth):
    """Each chain is some five deltas, as ranks and boxes are several, too."""

    @settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seeds, st.sampled_from(all_dtypes()), st.integers(0, 99))
    def chain(seed, dtype, kind):
        case(seed, dtype, is_long=kind == 0)

    chain()


# Changes


def whole_piece(tensor):
    """The piece of a target that has the same chunk as its only source."""
    layout, _ = build(local_chunks({"t": tensor}), {})
    (piece,) = pieces([layout], layout)
    return piece


OFTEN = {torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128}  # a width each


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(each, marks=() if each in OFTEN else pytest.mark.long, id=dtype_name(each))
        for each in all_dtypes()
    ],
)
def test_every_bit_of_every_dtype_is_a_change(dtype):
    rng = np.random.default_rng(0)
    content = random_content(rng, (40,), dtype)
    base = tensor_of(content, (40,), dtype)
    for bit in range(8 * dtype.itemsize):
        other = content.copy()
        other[7, bit // 8] ^= np.uint8(1 << bit % 8)
        new = tensor_of(other, (40,), dtype)
        delta = Delta.of(base, new)
        (changed,) = delta.decode()
        assert changed.places.tolist() == [7]
        assert changed.values.tobytes() == other[7].tobytes()
        target = tensor_of(content.copy(), (40,), dtype)
        apply(delta, target, whole_piece(target))
        assert same_bits(target, new)


def test_bits_decide_not_numbers():
    base = torch.tensor([0.0, math.nan, math.nan, 1.0])
    new = base.clone()
    new[0] = -0.0
    new.view(torch.int32)[1] ^= 1  # another NaN
    assert new[0] == base[0]
    assert new[2] != base[2]
    (changed,) = Delta.of(base, new).decode()
    assert changed.places.tolist() == [0, 1]


def test_nothing_changed_takes_no_bytes():
    for shape in [(), (0,), (5,), (0, 7)]:
        delta = Delta.of(torch.ones(shape), torch.ones(shape))
        assert (delta.changed, delta.size_bytes) == (0, 0)
        assert not list(sent(delta).decode())
        assert not list(merge([delta, delta]).decode())
        assert delta.between(0, 5).size_bytes == 0
    target = torch.ones(5)
    assert apply(Delta.of(target, target), target, whole_piece(target), depth="full") == 0


def test_everything_changed_is_a_delta_too():
    base = torch.zeros(3 * SEGMENT + 5, dtype=torch.uint8)
    delta = sent(Delta.of(base, base + 1))
    assert delta.index[:, 1].tolist() == [SEGMENT] * 3 + [5]
    apply(delta, base, whole_piece(base))
    assert base.all()


def test_gaps_have_the_width_that_takes_fewer_bytes():
    base = torch.zeros(SEGMENT, dtype=torch.int16)
    for step, dtype in [(1, np.uint8), (255, np.uint8), (256, np.uint8), (511, np.uint16)]:
        new = base.clone()
        new[step - 1 :: step] = 1
        delta = Delta.of(base, new)
        assert (delta.gaps.dtype, delta.changed) == (dtype, SEGMENT // step)
        assert len(sent(delta).gaps) <= 2 * delta.changed // delta.gaps.itemsize


@pytest.mark.parametrize("place", [0, 1, 254, 255, 256, 509, 510, 511, SEGMENT - 1])
@pytest.mark.parametrize("more", [[], list(range(1000, 3000))], ids=["alone", "of many"])
def test_a_gap_of_any_length_is_one(place, more):
    base = torch.zeros(2 * SEGMENT, dtype=torch.uint8)
    places = sorted({place, SEGMENT + place, *(SEGMENT + each for each in more)})
    new = base.clone()
    new[places] = 1
    found = [each for changed in sent(Delta.of(base, new)).decode() for each in changed.places]
    assert found == places


def test_a_delta_of_1_percent_takes_a_60th():
    drawn = torch.Generator().manual_seed(0)
    weights = torch.randn(1 << 20, generator=drawn) * 0.02
    steps = 1.8e-7 * torch.randn(1 << 20, generator=drawn).sign()
    base, new = weights.to(torch.bfloat16), (weights + steps).to(torch.bfloat16)
    delta = Delta.of(base, new)
    assert 0.009 < delta.changed / base.numel() < 0.011
    assert delta.size_bytes < base.nbytes / 60


# Merging


def test_what_returns_to_what_it_was_is_in_the_union():
    first = torch.zeros(1000, dtype=torch.bfloat16)
    second = first.clone()
    second[::7] = 1
    union = merge([Delta.of(first, second), Delta.of(second, first)])
    assert union.changed == 143
    mixed = first.clone()
    mixed[:500] = second[:500]  # an apply of the first delta was cut short
    apply(union, mixed, whole_piece(mixed))
    assert same_bits(mixed, first)


def test_what_comes_last_wins():
    contents = [torch.full((3 * SEGMENT,), number, dtype=torch.int32) for number in range(4)]
    merged = merge([Delta.of(a, b) for a, b in itertools.pairwise(contents)])
    assert {int(value) for changed in merged.decode() for value in changed.values} == {3}
    assert merged.changed == 3 * SEGMENT


def test_deltas_of_other_chunks_are_not_merged():
    delta = Delta.of(torch.zeros(4), torch.ones(4))
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ManifestMismatch, match="4 elements of 4 bytes, found"):
            merge([delta, Delta.of(other, other + 1)])


# Parts


def test_a_part_is_a_delta_of_what_it_has():
    base = torch.zeros(10 * SEGMENT, dtype=torch.uint8)
    new = base.clone()
    new[::100] = 1
    new[4 * SEGMENT : 6 * SEGMENT] = 0
    delta = Delta.of(base, new)
    for first, end in [(0, 10 * SEGMENT), (SEGMENT - 1, SEGMENT + 1), (5, 5), (7 * SEGMENT, 2**40)]:
        low, high = first // SEGMENT, -(-end // SEGMENT)
        part = delta.between(first, end)
        rows, gaps, values = between(delta.index, first, end)
        received = Delta.received(
            delta.elements, delta.index[rows], delta.gaps[gaps], delta.values[values]
        )
        for each in (part, received):
            found = [place for changed in each.decode() for place in changed.places]
            assert found == [
                place for place in new.nonzero()[:, 0].tolist() if low <= place // SEGMENT < high
            ]


def test_a_piece_reads_the_segments_between_its_ends():
    base = torch.zeros(64, SEGMENT // 8, dtype=torch.uint8)  # 8 rows per segment
    delta = Delta.of(base, base + 1)
    rows = base[20:30].clone()
    (piece,) = pieces(
        [build([local("t", base, [(slice(0, 64), slice(0, SEGMENT // 8))], [base])], {})[0]],
        build([local("t", base, [(slice(20, 30), slice(0, SEGMENT // 8))], [rows])], {})[0],
    )
    assert (piece.place.first, piece.end) == (20 * SEGMENT // 8, 30 * SEGMENT // 8)
    apply(delta.between(piece.place.first, piece.end), rows, piece)
    assert rows.all()


def far_world(shape, offsets, sizes):
    """Layouts of a tensor larger than memory, and of a target that has a box of it."""
    record = TensorRecord("t", "uint8", shape)
    steps = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    source = ChunkRecord(0, (0,) * len(shape), shape, (0,) * len(shape), spread=False)
    target = ChunkRecord(0, offsets, sizes, tuple(steps), spread=False)
    return Layout((record,), (source,)), Layout((record,), (target,))


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [
        ((2**40,), (2**39 - 5,), (2000,)),
        ((2**33, 2**9), (2**33 - 9, 17), (9, 120)),
        ((2**20, 2**10, 2, 30), (2**19, 1000, 1, 1), (3, 24, 1, 2)),
        ((2**32 + 1,), (2**32 - 1000,), (1001,)),
    ],
)
def test_a_chunk_larger_than_memory_has_a_delta(shape, offsets, sizes):
    rng = np.random.default_rng(3)
    source, layout = far_world(shape, offsets, sizes)
    (piece,) = pieces([source], layout)
    grid = np.meshgrid(*map(np.arange, sizes), indexing="ij")
    inside = np.ravel_multi_index(
        [axis.ravel() + offset for axis, offset in zip(grid, offsets, strict=True)], shape
    )
    elements = math.prod(shape)
    beside = [0, 2**31, 2**32 - 1, elements - 1, int(inside[0]) - 1, int(inside[-1]) + 1]
    kept = {place for place in beside if 0 <= place < elements}
    kept |= {int(place) for place in rng.choice(inside, len(inside) // 2, replace=False)}
    by_segment = itertools.groupby(sorted(kept), lambda place: place // SEGMENT)
    changed = [
        module.Changed(np.array(list(group)), np.full(len(kept), 9, np.uint8)[: 1 << 20])
        for _, group in by_segment
    ]
    changed = [each._replace(values=each.values[: len(each.places)]) for each in changed]
    delta = Delta(elements, *encode(changed, item_bytes=1))
    delta = merge([sent(delta), sent(delta)])
    target = torch.zeros(sizes, dtype=torch.uint8)
    grown = apply(delta, target, piece, depth="full")
    assert target.flatten().tolist() == [9 * (int(place) in kept) for place in inside]
    assert grown == digest(target, global_shape=shape, offsets=offsets, depth="full")


# Digests that grow by what changes


@pytest.mark.parametrize("depth", ["full", "sampled"])
def test_totals_grow_by_the_changes_of_all_ranks(depth):
    rng = np.random.default_rng(1)
    shape, dtype = (40, 90, 2), torch.bfloat16
    for seed in range(6):
        content = random_content(rng, shape, dtype)
        older = tensor_of(content, shape, dtype)
        newer = tensor_of(changed_content(rng, content, content), shape, dtype)
        before, after = (
            random_shards(np.random.default_rng(seed), whole) for whole in (older, newer)
        )
        deltas = changes_of(before, after)
        targets = random_shards(rng, older, apart=True)
        grown = []
        for rank, (layout, memory) in enumerate(targets):
            grown.append([0] * len(memory))
            for piece in pieces([source for source, _ in before], layout, target_rank=rank):
                grown[rank][piece.target_chunk] += apply_one(deltas, piece, memory, depth)
        changes = totals([layout for layout, _ in targets], grown, depth=depth)
        assert combine([total(before, depth), changes["t"]]) == total(after, depth)
        assert total(targets, depth) == total(after, depth)


def random_shards(rng, whole, *, apart=False):
    """Three ranks that have all boxes of a grid, each of which one or two have."""
    owners = [(box, set(rng.integers(3, size=2).tolist())) for box in random_grid(rng, whole.shape)]
    memory = [whole.clone() if apart else whole for _ in range(3)]
    return [shards(memory[rank], owners, 3)[rank] for rank in range(3)]


def total(ranks, depth):
    found = [chunk_digests(layout, memory, depth=depth) for layout, memory in ranks]
    return totals([layout for layout, _ in ranks], found, depth=depth)["t"]


def test_a_target_with_another_base_shows_in_the_digest():
    base = torch.zeros(3000)
    new = base.clone()
    new[::10] = 1
    wrong = base.clone()
    wrong[50] = 3
    piece = whole_piece(base)
    expected = apply(Delta.of(base, new), base.clone(), piece, depth="full")
    assert apply(Delta.of(base, new), wrong, piece, depth="full") != expected


def test_tied_tensors_are_changed_by_either_delta_and_once():
    shared = torch.zeros(500)
    new = torch.ones(500)
    delta = Delta.of(shared, new)
    layout, memory = build(local_chunks({"embed": shared, "head": shared}), {})
    first, second = (
        apply(delta, memory[piece.target_chunk], piece, depth="full")
        for piece in pieces([layout], layout)
    )
    assert same_bits(shared, new)
    assert first == digest(new, global_shape=(500,), offsets=(0,), depth="full")
    assert second == 0


# Bad input


def good():
    """A delta of two segments of the three, and what to break."""
    base = torch.zeros(2 * SEGMENT + 10, dtype=torch.int16)
    new = base.clone()
    new[[3, 300, 600, 601, 2 * SEGMENT + 9]] = 7
    delta = Delta.of(base, new)
    assert delta.gaps.tolist() == [3, 255, 41, 255, 44, 0, 9]
    return delta.elements, delta.index.copy(), delta.gaps.copy(), delta.values.copy()


def mended(index, gaps, values):
    """With right checksums: what else is wrong must be found without them."""
    ends = index[:, 1:3].astype(int).cumsum(0)
    starts = ends - index[:, 1:3]
    for row, ((gap, value), (gap_end, value_end)) in enumerate(zip(starts, ends, strict=True)):
        checksum = zlib.crc32(gaps[gap:gap_end].tobytes())
        index[row, 3] = zlib.crc32(values[value:value_end].tobytes(), checksum)
    return index, gaps, values


def row(number, gaps, values):
    return [number, gaps, values, 0]


BROKEN = {
    "a segment that comes again": ([row(0, 6, 4), row(0, 1, 1)], None, "above the last, found 0"),
    "segments that descend": ([row(2, 6, 4), row(0, 1, 1)], None, "above the last, found 0"),
    "a segment behind the chunk": ([row(0, 6, 4), row(3, 1, 1)], None, "below 3, found 3"),
    "a segment far behind it": ([row(0, 6, 4), row(2**32 - 1, 1, 1)], None, "below 3, found 4294"),
    "no value": ([row(0, 6, 5), row(2, 1, 0)], None, "one value or more, found 0"),
    "more values than gaps": ([row(0, 3, 4), row(2, 4, 1)], None, "or more, found 3"),
    "more gaps than elements": ([row(0, 6, 4), row(2, 11, 1)], None, "than elements, found 11"),
    "too few gaps listed": ([row(0, 5, 4), row(2, 1, 1)], None, r"6 of uint8 or uint16, found \[7"),
    "too few values listed": ([row(0, 6, 3), row(2, 1, 1)], None, r"expected 4 of .*found \[5\]"),
    "gaps of another segment": ([row(0, 5, 4), row(2, 2, 1)], None, "places as values, found 3"),
    "a value of another segment": ([row(0, 6, 3), row(2, 2, 2)], [*range(7), 9], "found 6"),
    "gaps that end with 255": (None, [3, 255, 41, 255, 44, 255, 9], "with a place, found 255"),
    "a place behind the chunk": (None, [3, 255, 41, 255, 44, 0, 10], "the chunk, found 10"),
    "a 255 too few": (None, [3, 255, 41, 44, 44, 0, 9], "places as values, found 5"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_contradicts_itself_is_refused(name):
    rows, broken, message = BROKEN[name]
    elements, index, gaps, values = good()
    if rows:
        index = np.array(rows, np.uint32)
    if broken:
        gaps = np.array(broken, np.uint8)
    with pytest.raises(CorruptDelta, match=message):
        Delta.received(elements, *mended(index, gaps, values))


def test_a_place_in_the_next_segment_is_refused():
    for gaps in (np.full(300, 254, np.uint8), np.array([65535, 0], np.uint16)):
        index = np.array([row(0, len(gaps), len(gaps))], np.uint32)
        values = np.zeros(len(gaps), np.uint8)
        with pytest.raises(CorruptDelta, match="inside of the segment"):
            Delta.received(10 * SEGMENT, *mended(index, gaps, values))


def test_every_flipped_bit_behind_the_numbers_of_segments_is_refused():
    elements, index, gaps, values = good()
    counts_and_checksums = index.view(np.uint8)[:, 4:]
    for content in (counts_and_checksums, gaps.view(np.uint8), values.view(np.uint8)):
        for at, bit in itertools.product(np.ndindex(content.shape), range(8)):
            content[at] ^= np.uint8(1 << bit)
            with pytest.raises(CorruptDelta):
                Delta.received(elements, index, gaps, values)
            content[at] ^= np.uint8(1 << bit)
    Delta.received(elements, index, gaps, values)


def test_arrays_of_another_kind_are_refused():
    elements, index, gaps, values = good()
    for arrays, message in [
        ((index.astype(np.int64), gaps, values), r"rows of 4 uint32, found \[2, 4\] of int64"),
        ((index[:, :3], gaps, values), r"found \[2, 3\]"),
        ((index, gaps.astype(np.uint32), values), "uint8 or uint16, found .* uint32"),
        ((index, gaps.reshape(1, -1), values), r"found \[1, 7\]"),
        ((index, gaps, values.astype(np.float16)), "the values .*found .* float16"),
    ]:
        with pytest.raises(CorruptDelta, match=message):
            Delta.received(elements, *arrays)


def test_garbage_is_refused_or_stays_in_the_chunk():
    rng = np.random.default_rng(5)
    accepted = 0
    for _ in range(500):
        elements, index, gaps, values = good()
        index[rng.integers(2), rng.integers(3)] = rng.integers(12)
        gaps[rng.integers(7)] = rng.integers(256)
        try:
            delta = Delta.received(elements, *mended(index, gaps, values))
        except CorruptDelta:
            continue
        accepted += 1
        for changed in delta.decode():
            assert (np.diff(changed.places, prepend=-1) > 0).all()
            assert changed.places[-1] < elements
    assert accepted > 20


def test_a_delta_of_another_chunk_is_not_applied():
    target = torch.zeros(10, dtype=torch.bfloat16)
    for other in (torch.zeros(11, dtype=torch.bfloat16), torch.zeros(10)):
        with pytest.raises(ManifestMismatch, match="'t': expected one of a chunk of 10 .* 2 bytes"):
            apply(Delta.of(other, other + 1), target, whole_piece(target))
    assert not target.any()


def test_contents_of_two_chunks_are_not_compared():
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2)):
        with pytest.raises(ManifestMismatch, match="one chunk"):
            Delta.of(torch.zeros(4), other)


def test_what_is_on_a_device_is_refused_by_name():
    nowhere = torch.zeros(4, device="meta")
    with pytest.raises(NotSupported, match="on meta"):
        Delta.of(nowhere, nowhere)
    with pytest.raises(NotSupported, match="on meta"):
        apply(Delta.of(torch.zeros(4), torch.ones(4)), nowhere, whole_piece(torch.zeros(4)))


def test_a_target_whose_elements_share_memory_is_refused():
    shared = torch.zeros(1).expand(5)
    layout, _ = build(local_chunks({"t": shared}), {})
    with pytest.raises(UsageError, match="share memory"):
        pieces([layout], layout)
    assert Delta.of(shared, torch.ones(5)).changed == 5  # as a source it is what it shows


def test_a_target_made_in_inference_mode_can_be_changed():
    with torch.inference_mode():
        target = torch.zeros(4, 3).t()
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    apply(Delta.of(torch.zeros(3, 4), parameter), target, whole_piece(target))
    assert target.tolist() == parameter.tolist()
