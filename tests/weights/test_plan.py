"""Plans, carried out against real memory and compared with torch's own slicing, bit for bit."""

import ctypes
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from torch_ros.costs import NIXL_COSTS, TCP_COSTS, Costs
from torch_ros.errors import ManifestMismatch, UsageError
from torch_ros.weights import tiling
from torch_ros.weights.local import LocalChunk, LocalTensor, build, local_chunks, span_of
from torch_ros.weights.manifest import ChunkRecord, Layout, TensorRecord, dtype_name
from torch_ros.weights.plan import Route, plan
from torch_ros.weights.staging import copy_staged
from torch_ros.weights.tiling import Chunks, Pieces, untiled

# Spans cost so much that everything with gaps is staged, as far as it fits.
STAGE_ALWAYS = Costs(descriptor_s=1.0, read_bytes_per_s=1e18, copy_bytes_per_s=1e18, copy_s=0.0)
MODES = {
    "direct": {"staging_bytes": 0},
    "staged": {"staging_bytes": 1 << 20, "costs": STAGE_ALWAYS},
    "staged in small parts": {"staging_bytes": 40, "costs": STAGE_ALWAYS},
    "as estimated": {"staging_bytes": 1 << 20, "costs": NIXL_COSTS},
}
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.bool]


def random_bits(rng, shape, dtype):
    count = int(np.prod(shape)) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    bits = torch.frombuffer(bytearray(rng.randbytes(count)), dtype=torch.uint8)
    if dtype is torch.bool:
        bits &= 1
    return bits.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else None


def same_bits(a, b):
    return a.shape == b.shape and (a.numel() == 0 or torch.equal(bits(a), bits(b)))


def anywhere(rng, tensor):
    """Equal to `tensor`, with its dimensions in any order in memory, gaps between, and its base."""
    order = rng.sample(range(tensor.ndim), tensor.ndim)
    steps = [rng.choice([1, 1, 2]) for _ in order]
    sizes = [
        tensor.shape[dim] * step + rng.randrange(2) for dim, step in zip(order, steps, strict=True)
    ]
    base = random_bits(rng, sizes, tensor.dtype)
    view = base
    for position, (dim, step) in enumerate(zip(order, steps, strict=True)):
        length = tensor.shape[dim] * step
        view = view.narrow(position, view.shape[position] - length, length)
        view = view[(slice(None),) * position + (slice(None, None, step),)]
    view = view.permute([order.index(dim) for dim in range(tensor.ndim)])
    view.copy_(tensor)
    return view, base


def random_grid(rng, shape):
    """A shape cut along every dimension, unevenly, with empty parts: a list of slices."""
    cuts = []
    for size in shape:
        marks = sorted(rng.randint(0, size) for _ in range(rng.choice([0, 0, 1, 2])))
        cuts.append([slice(a, b) for a, b in itertools.pairwise([0, *marks, size])])
    return list(itertools.product(*cuts))


def local(fqn, whole, boxes, tensors, spread):
    chunks = (
        LocalChunk(tuple(part.start for part in box), tensor)
        for box, tensor in zip(boxes, tensors, strict=True)
    )
    kept = tuple(chunk for chunk in chunks if chunk.tensor.numel())
    return LocalTensor(fqn, whole.dtype, tuple(whole.shape), kept, spread)


def random_shape(rng):
    return tuple(rng.choice([0, 1, 2, 3, 5, 6]) for _ in range(rng.randint(0, 4)))


def random_world(rng, rank_count=3, tensor_count=3):
    """Whole tensors by fqn, and per rank what it holds of them."""
    wholes, ranks = {}, [[] for _ in range(rank_count)]
    for number in range(tensor_count):
        fqn = f"t{number}"
        whole = wholes[fqn] = random_bits(rng, random_shape(rng), rng.choice(DTYPES))
        if rng.random() < 0.25:  # a plain tensor, different on every rank
            everything = [tuple(slice(0, size) for size in whole.shape)]
            lowest = rng.randrange(rank_count)
            for rank in range(lowest, rank_count):
                mine = whole if rank == lowest else random_bits(rng, whole.shape, whole.dtype)
                tensor, _ = anywhere(rng, mine)
                ranks[rank].append(local(fqn, whole, everything, [tensor], spread=False))
            continue
        owners = [
            (box, rng.sample(range(rank_count), rng.randint(1, rank_count)))
            for box in random_grid(rng, whole.shape)
        ]
        for rank in range(rank_count):
            boxes = [box for box, holders in owners if rank in holders]
            tensors = [anywhere(rng, whole[box])[0] for box in boxes]
            ranks[rank].append(local(fqn, whole, boxes, tensors, spread=True))
    return wholes, [build(tensors, {}) for tensors in ranks]


def random_target(rng, wholes):
    """Layout and memory of some boxes of some tensors, and (view, base, expected base)."""
    tensors, checks = [], []
    for fqn in rng.sample(sorted(wholes), rng.randint(1, len(wholes))):
        boxes = [box for box in random_grid(rng, wholes[fqn].shape) if rng.random() < 0.8]
        views = []
        for box in boxes:
            view, base = anywhere(rng, torch.zeros_like(wholes[fqn][box]))
            expected = base.clone()
            expected.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(
                wholes[fqn][box]
            )
            views.append(view)
            checks.append((base, expected))
        tensors.append(local(fqn, wholes[fqn], boxes, views, spread=True))
    return *build(tensors, {}), checks


def addresses(tensors):
    return np.array([span_of(tensor)[0] for tensor in tensors], np.uint64)


def carry_out(read_plan, sources, memory):
    """What a transport does, with memmove; refuses to touch memory that is not a chunk's."""
    routes = read_plan.bind([addresses(tensors) for tensors in sources], addresses(memory))
    for route, spans in routes.items():
        for source, target, size in spans.tolist():
            inside(source, size, sources[route.source_rank])
            inside(target, size, memory)
            ctypes.memmove(target, source, size)
    for staged in read_plan.staged:
        staging = torch.full((staged.size_bytes,), 0xEE, dtype=torch.uint8)
        source = span_of(sources[staged.source_rank][staged.source_chunk])[0]
        source += staged.source_offset_bytes
        inside(source, staged.size_bytes, sources[staged.source_rank])
        ctypes.memmove(staging.data_ptr(), source, staged.size_bytes)
        copy_staged(staging, staged, memory[staged.target_chunk])


def inside(address, size, tensors):
    spans = map(span_of, tensors)
    assert size > 0
    assert any(start <= address and address + size <= start + reach for start, reach in spans)


@pytest.mark.parametrize("mode", MODES)
def test_any_sharding_is_read_into_any_other(mode):
    rng = random.Random(mode)
    staged = direct = 0
    for _ in range(100):
        wholes, ranks = random_world(rng)
        layout, memory, checks = random_target(rng, wholes)
        read_plan = plan(
            [source for source, _ in ranks], layout, target_rank=rng.randrange(5), **MODES[mode]
        )
        carry_out(read_plan, [tensors for _, tensors in ranks], memory)
        for base, expected in checks:
            assert same_bits(base, expected)
        for copy in read_plan.staged:
            assert copy.size_bytes <= MODES[mode]["staging_bytes"]
        useful = sum(tensor.numel() * tensor.element_size() for tensor in memory)
        assert read_plan.bytes_total == useful <= read_plan.bytes_read
        order = [copy.target_chunk for copy in read_plan.staged]
        assert order == sorted(order)
        staged += len(read_plan.staged)
        direct += len(read_plan.direct.size_bytes)
    assert direct > 50
    assert staged > 50 or mode == "direct"


def test_where_chunks_overlap_the_lowest_rank_counts():
    rng = random.Random(0)
    for _ in range(100):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
        painted = random_bits(rng, shape, torch.int16)
        everything = tuple(slice(0, size) for size in shape)
        ranks = []
        for rank in reversed(range(4)):
            box = tuple(slice(*sorted(rng.sample(range(size + 1), 2))) for size in shape)
            if rank == 3:  # all that no other rank has
                box = everything
            chunk = random_bits(rng, painted[box].shape, torch.int16)
            painted[box] = chunk
            ranks.append(build([local("t", painted, [box], [chunk], spread=False)], {}))
        ranks.reverse()
        layout, memory, checks = random_target(rng, {"t": painted})
        made = plan([source for source, _ in ranks], layout, staging_bytes=64, costs=STAGE_ALWAYS)
        carry_out(made, [tensors for _, tensors in ranks], memory)
        assert all(same_bits(base, expected) for base, expected in checks)
        order = [copy.target_chunk for copy in made.staged]
        assert order == sorted(order)


def every_dtype():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = ("qint", "quint")
    return sorted((d for d in dtypes if not dtype_name(d).startswith(quantized)), key=str)


@pytest.mark.parametrize("dtype", every_dtype(), ids=dtype_name)
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_every_dtype_arrives_bit_for_bit(dtype, mode):
    # Every pattern of two bytes: all NaNs of 16-bit floats among them.
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    whole = patterns.view(dtype).reshape(64, -1)
    half = slice(0, 64), slice(0, whole.shape[1] // 2)
    target = torch.zeros(whole[half].numel() * dtype.itemsize, dtype=torch.uint8)
    target = target.view(dtype).reshape(64, -1)
    layout, memory = build([local("t", whole, [half], [target], spread=True)], {})
    source, tensors = build(local_chunks({"t": whole}), {})
    made = plan([source], layout, **MODES[mode])
    assert (len(made.staged) > 0) == (mode == "staged")
    carry_out(made, [tensors], memory)
    bytes_per_row = whole.shape[1] * dtype.itemsize
    expected = patterns.reshape(64, bytes_per_row)[:, : bytes_per_row // 2]
    assert torch.equal(target.view(torch.uint8).reshape(64, -1), expected)


def test_a_target_made_in_inference_mode_can_be_filled():
    source, tensors = build(local_chunks({"t": torch.arange(12).reshape(3, 4).t()}), {})
    with torch.inference_mode():
        target = torch.zeros(4, 3, dtype=torch.int64)
    layout, memory = build(local_chunks({"t": target}), {})
    carry_out(plan([source], layout, **MODES["staged"]), [tensors], memory)
    assert target.tolist() == torch.arange(12).reshape(3, 4).t().tolist()


# How much is read, and how


def one(tensor, box=None, whole=None, fqn="t", *, spread=True):
    whole = tensor if whole is None else whole
    box = box or tuple(slice(0, size) for size in whole.shape)
    return build([local(fqn, whole, [box], [tensor], spread)], {})[0]


WHOLE = torch.empty(64, 32, dtype=torch.bfloat16)
LEFT = (slice(0, 64), slice(0, 16))


def test_contiguous_on_both_sides_is_one_span_whatever_the_shape():
    deep = torch.empty(4, 3, 1, 5)
    assert plan([one(deep)], one(deep), staging_bytes=0).span_count == 1
    turned = deep.permute(2, 3, 0, 1)  # the same memory order on both sides
    assert plan([one(turned)], one(turned), staging_bytes=0).span_count == 1
    rows = torch.empty(7, 32, dtype=torch.bfloat16)
    band = one(rows, (slice(3, 10), slice(0, 32)), WHOLE)
    made = plan([one(WHOLE)], band, staging_bytes=0).direct
    assert made.size_bytes.tolist() == [7 * 64]
    assert made.source_offset_bytes.tolist() == [3 * 64]


def test_half_the_columns_is_a_run_per_row():
    half = one(torch.empty(64, 16, dtype=torch.bfloat16), LEFT, WHOLE)
    made = plan([one(WHOLE)], half, staging_bytes=0).direct
    assert made.source_offset_bytes.tolist() == [64 * row for row in range(64)]
    assert made.target_offset_bytes.tolist() == [32 * row for row in range(64)]
    assert made.size_bytes.tolist() == [32] * 64


def test_an_expanded_source_is_read_again_and_again():
    row = torch.arange(6.0)
    target = torch.zeros(3, 6)
    source, tensors = build(local_chunks({"t": row.expand(3, 6)}), {})
    layout, memory = build(local_chunks({"t": target}), {})
    for mode in MODES.values():
        target.zero_()
        made = plan([source], layout, **mode)
        carry_out(made, [tensors], memory)
        assert torch.equal(target, row.expand(3, 6))
    assert plan([source], layout, staging_bytes=0).span_count == 3


def test_the_runs_of_an_expanded_source_are_as_long_as_the_targets():
    expanded, target = one(torch.empty(4096).expand(2, 4096)), one(torch.empty(2, 4096))
    assert plan([expanded], target, staging_bytes=1 << 20).direct.size_bytes.tolist() == [16384] * 2


def test_parts_of_one_chunk_that_touch_become_one_span_again():
    whole = torch.arange(40).reshape(10, 4)
    corner = (slice(2, 4), slice(0, 2))  # rank 1's chunk is cut around what rank 0 has
    sources = [one(whole[corner], corner, whole, spread=False), one(whole)]
    made = plan(sources, one(whole), staging_bytes=0).direct
    assert made.source_rank.tolist() == [1, 0, 1, 0, 1]
    assert made.size_bytes.tolist() == [64, 16, 16, 16, 208]


def test_estimates_stage_short_rows_and_leave_long_ones():
    def mode(rows, row_bytes, part):
        whole = torch.empty(rows, row_bytes, dtype=torch.uint8)
        box = (slice(0, rows), slice(0, row_bytes // part))
        target = one(torch.empty(rows, row_bytes // part, dtype=torch.uint8), box, whole)
        return len(plan([one(whole)], target, staging_bytes=1 << 22).staged)

    assert mode(4096, 256, 2) > 0
    assert mode(4096, 256, 8) > 0
    assert mode(4096, 8192, 2) == 0
    assert mode(16, 1 << 20, 2) == 0
    assert mode(2, 64, 2) == 0  # a copy costs more than a second span
    assert mode(64, 1 << 20, 1 << 17) == 0  # nearly all of what is staged would be in vain


def test_over_tcp_rows_are_not_read_for_the_sake_of_an_eighth():
    def staged(part, costs):
        whole = torch.empty(4096, 8192, dtype=torch.uint8)
        box = (slice(0, 4096), slice(0, 8192 // part))
        target = one(torch.empty(4096, 8192 // part, dtype=torch.uint8), box, whole)
        return plan([one(whole)], target, staging_bytes=1 << 22, costs=costs).staged

    assert staged(8, NIXL_COSTS)
    assert not staged(8, TCP_COSTS)


@pytest.mark.parametrize(
    "wrong",
    [{"descriptor_s": -1e-9}, {"copy_s": -1.0}, {"read_bytes_per_s": 0}, {"copy_s": float("nan")}],
)
def test_costs_that_cannot_be_are_refused(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Costs(**wrong)


def test_estimates_count_the_local_copy():
    rows = torch.empty(4, 1 << 15, dtype=torch.uint8)  # contiguous, but not in the target
    gaps = torch.empty(4, 1 << 16, dtype=torch.uint8)[:, : 1 << 15]
    assert plan([one(rows)], one(gaps), staging_bytes=1 << 20).staged == ()
    copies_are_free = Costs(copy_bytes_per_s=1e18, copy_s=0.0)
    made = plan([one(rows)], one(gaps), staging_bytes=1 << 20, costs=copies_are_free)
    assert len(made.staged) == 1
    copies_are_slow_to_start = Costs(copy_bytes_per_s=1e18, copy_s=1.0)
    made = plan([one(rows)], one(gaps), staging_bytes=1 << 20, costs=copies_are_slow_to_start)
    assert made.staged == ()


def test_a_staged_span_is_as_long_as_staging_allows():
    target = one(torch.empty(64, 16, dtype=torch.bfloat16), LEFT, WHOLE)
    ten_rows = 9 * 64 + 32
    for staging_bytes, rows in ((ten_rows, 10), (ten_rows - 1, 9)):
        made = plan([one(WHOLE)], target, staging_bytes=staging_bytes, costs=STAGE_ALWAYS)
        assert [copy.shape for copy in made.staged[:-1]] == [(rows, 16)] * (63 // rows)
        assert sum(copy.shape[0] for copy in made.staged) == 64


def test_a_transposed_source_is_staged_along_its_own_order():
    source, target = one(torch.empty(256, 256).t()), one(torch.empty(256, 256))
    made = plan([source], target, staging_bytes=1 << 14)
    assert len(made.staged) == 16
    assert made.bytes_read == made.bytes_total


def test_staged_spans_skip_what_lies_far_between():
    # Two blocks of short rows, 1 MiB apart: one span for both would read the MiB in vain.
    base = torch.empty(2, 1 << 20, dtype=torch.uint8)
    blocks = base[:, :1024].view(2, 64, 16)[:, :, :8]
    made = plan([one(blocks)], one(torch.empty(2, 64, 8, dtype=torch.uint8)), staging_bytes=1 << 24)
    assert [copy.size_bytes for copy in made.staged] == [63 * 16 + 8] * 2


def test_equal_copies_are_shared_out_by_bytes_and_by_reader():
    tensors = {f"t{i:02}": torch.empty(100 if i % 2 else 1) for i in range(40)}  # weight, bias
    shard = [replace(t, spread=True) for t in local_chunks(tensors)]
    sources = [build(shard, {})[0]] * 4
    first_bytes = set()
    for reader in range(4):
        direct = plan(sources, sources[0], staging_bytes=0, target_rank=reader).direct
        load = np.bincount(direct.source_rank, weights=direct.size_bytes, minlength=4)
        assert load.max() < 1.3 * load.mean()
        first_bytes.add(int(direct.source_rank[0]))
    assert first_bytes == {0, 1, 2, 3}


def test_a_reader_uses_only_so_many_copies():
    shard = [replace(t, spread=True) for t in local_chunks({str(i): WHOLE for i in range(99)})]
    sources = [build(shard, {})[0]] * 50
    direct = plan(sources, sources[0], staging_bytes=0, target_rank=7).direct
    assert len(set(direct.source_rank.tolist())) == tiling.COPIES_MAX


def test_plain_tensors_come_from_the_lowest_rank_that_has_them():
    empty = Layout((), ())
    plain = one(WHOLE, spread=False)
    for reader in range(3):
        made = plan([empty, plain, plain], plain, staging_bytes=0, target_rank=reader)
        assert made.direct.source_rank.tolist() == [1]


def test_spans_are_bound_by_rank_and_devices():
    names = [f"t{i}" for i in range(6)]
    tensors = {name: torch.arange(4) + i for i, name in enumerate(names)}
    halves = [{n: tensors[n] for n in names[:3]}, {n: tensors[n] for n in names[3:]}]
    sources = [build(local_chunks(half), {})[0] for half in halves]
    target = build(local_chunks(tensors), {})[0]
    made = plan(sources, target, staging_bytes=0)
    high = 2**63  # a float has no room for the last bits of this
    routes = made.bind(
        [[high + 1, high + 2, high + 3], [4, 5, 6]],
        [10, 20, 30, 40, 50, 60],
        source_devices=[[0, 1, 0], [-1, -1, -1]],
        target_devices=[0, 0, 0, 0, 1, 0],
    )
    assert {route: spans.tolist() for route, spans in routes.items()} == {
        Route(0, 0, 0): [[high + 1, 10, 32], [high + 3, 30, 32]],
        Route(0, 1, 0): [[high + 2, 20, 32]],
        Route(1, -1, 0): [[4, 40, 32], [6, 60, 32]],
        Route(1, -1, 1): [[5, 50, 32]],
    }
    assert all(spans.dtype == np.uint64 for spans in routes.values())
    hosts = made.bind([[1, 2, 3], [4, 5, 6]], [10, 20, 30, 40, 50, 60])
    assert list(hosts) == [Route(0, -1, -1), Route(1, -1, -1)]


def test_nothing_wanted_needs_nothing():
    empty = Layout((TensorRecord("t", "float32", (0, 3)),), ())
    made = plan([empty, empty], empty, staging_bytes=64)
    assert (made.span_count, made.bytes_total) == (0, 0)
    assert made.bind([[], []], []) == {}


def test_chunks_without_elements_change_nothing():
    record = one(WHOLE).tensors[0]
    full = one(WHOLE).chunks[0]
    none = ChunkRecord(0, (5, 5), (0, 3), (32, 1), spread=True)
    layout = Layout((record,), (none, full, none))
    made = plan([layout, layout], layout, staging_bytes=0).direct
    assert (made.source_chunk.tolist(), made.target_chunk.tolist()) == ([1], [1])


# What is refused


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (one(WHOLE, fqn="other"), "'other'.*missing from the version; leave it out"),
        (one(WHOLE, fqn="model.t"), "has 't': drop the prefix 'model.'"),
        (one(WHOLE.float()), "'t'.*bfloat16.*float32.*does not cast.*DCP"),
        (one(WHOLE.t()), r"'t'.*\[64, 32\].*\[32, 64\]"),
        (Layout((TensorRecord("gone", "int8", (0,)),), ()), "'gone'.*missing"),
        (build([], {"t": torch.zeros(4096, dtype=torch.uint8)})[0], "'t'.*object"),
    ],
)
def test_what_the_version_does_not_have_is_named(target, reason):
    with pytest.raises(ManifestMismatch, match=reason):
        plan([one(WHOLE)], target, staging_bytes=0)


def test_an_object_must_have_the_size_it_has_on_the_lowest_rank():
    sources = [build([], {"o": torch.full((size,), size, dtype=torch.uint8)}) for size in (5, 9)]
    layouts = [layout for layout, _ in sources]
    target = torch.zeros(5, dtype=torch.uint8)
    layout, memory = build([], {"o": target})
    carry_out(plan(layouts, layout, staging_bytes=0), [tensors for _, tensors in sources], memory)
    assert target.tolist() == [5] * 5
    with pytest.raises(ManifestMismatch, match="'o'"):
        plan(layouts, layouts[1], staging_bytes=0)


def test_the_first_missing_box_is_named():
    parts = [(slice(0, 20), slice(0, 32)), (slice(24, 64), slice(0, 32))]
    sources = [one(WHOLE[part], part, WHOLE) for part in parts]
    with pytest.raises(ManifestMismatch, match=r"'t'.*from \[20, 0\] to \[24, 32\]"):
        plan(sources, one(WHOLE), staging_bytes=0)
    band = one(WHOLE[30:40], (slice(30, 40), slice(0, 32)), WHOLE)
    assert plan(sources, band, staging_bytes=0).span_count == 1
    with pytest.raises(ManifestMismatch, match=r"from \[0, 0\] to \[64, 32\]"):
        plan([Layout(one(WHOLE).tensors, ())], one(WHOLE), staging_bytes=0)


def test_a_hole_is_found_even_where_overlaps_make_up_its_volume():
    parts = [(slice(0, 40), slice(0, 32)), (slice(16, 40), slice(0, 32))]
    sources = [one(WHOLE[part], part, WHOLE) for part in parts]
    with pytest.raises(ManifestMismatch, match=r"from \[40, 0\] to \[64, 32\]"):
        plan(sources, one(WHOLE), staging_bytes=0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 1).expand(3, 5),
        torch.zeros(1, 4).expand(2, 4),
        torch.zeros(9).as_strided((3, 4), (2, 1)),
        torch.zeros(()).expand(2),
    ],
)
def test_a_target_that_overlaps_itself_is_refused(tensor):
    with pytest.raises(UsageError, match=r"'t'.*share memory"):
        plan([one(tensor.contiguous())], one(tensor), staging_bytes=0)


def test_a_plan_that_misses_an_element_never_leaves(monkeypatch):
    broken = tiling._intersections

    def without_the_last(offered, wanted):
        return (made := broken(offered, wanted)).take(np.arange(len(made.target) - 1))

    monkeypatch.setattr(tiling, "_intersections", without_the_last)
    with pytest.raises(ManifestMismatch):
        plan([one(WHOLE)], one(WHOLE), staging_bytes=0)


# The proof


def rows_of(cases):
    """Target chunks and pieces of many cases at once, as `untiled` takes them."""
    width = 3
    count = len(cases)
    boxes = [(row, *box) for row, (_, _, parts) in enumerate(cases) for box in parts]
    table = np.array([[row, *low, *size] for row, low, size in boxes], np.int64)
    table = table.reshape(-1, 1 + 2 * width)
    zeros = np.zeros(count, np.int64)
    offsets = np.array([offset for offset, _, _ in cases])
    sizes = np.array([size for _, size, _ in cases])
    wanted = Chunks(zeros, offsets, sizes, sizes, zeros > 0, zeros, zeros, zeros)
    no_source = np.zeros(len(table), np.int64)
    return wanted, Pieces(no_source, table[:, 0], table[:, 1:4], table[:, 4:])


def random_tiling(rng, low, size):
    """Cut a box in two, again and again."""
    dim = rng.randrange(len(size))
    if size[dim] < 2 or rng.random() < 0.3:
        return [(low, size)]
    at = rng.randrange(1, size[dim])
    below = (*size[:dim], at, *size[dim + 1 :])
    above = (*size[:dim], size[dim] - at, *size[dim + 1 :])
    higher = (*low[:dim], low[dim] + at, *low[dim + 1 :])
    return random_tiling(rng, low, below) + random_tiling(rng, higher, above)


def random_inner(rng, low, size):
    inner = tuple(rng.randint(1, length) for length in size)
    start = tuple(a + rng.randint(0, n - m) for a, n, m in zip(low, size, inner, strict=True))
    return start, inner


def is_tiled(low, size, parts):
    count = np.zeros(size, int)
    for start, length in parts:
        first = np.subtract(start, low)
        count[tuple(map(slice, first, first + length))] += 1
    return bool((count == 1).all())


def test_the_proof_agrees_with_counting_every_element():
    rng = random.Random(0)
    cases = []
    for _ in range(6_000):
        low = tuple(rng.randrange(4) for _ in range(3))
        size = tuple(rng.randint(1, 4) for _ in range(3))
        parts = random_tiling(rng, low, size)
        fault = rng.randrange(4)
        if fault == 1:
            parts.pop(rng.randrange(len(parts)))
        elif fault == 2:
            parts.append(random_inner(rng, low, size))
        elif fault == 3:  # a hole and an overlap, often of the same volume
            parts[rng.randrange(len(parts))] = random_inner(rng, low, size)
        cases.append((low, size, parts))
    expected = [row for row, case in enumerate(cases) if not is_tiled(*case)]
    assert 2_000 < len(expected) < 5_000
    assert untiled(*rows_of(cases)).tolist() == expected
