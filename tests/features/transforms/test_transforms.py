"""Transforms against plain torch: what they make, of which tensors, and of which shards."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from features.transforms.copying import NOT_FINITE, copied, same, shard, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ros import Cast, Float8, MadeTensor
from torch_ros.copies import buffers as copy_buffers
from torch_ros.copies.buffers import CopyBuffers, Copying
from torch_ros.copies.transforms import cut, units
from torch_ros.copies.turns import HostBuffers
from torch_ros.errors import UsageError
from torch_ros.features.transforms import matrices
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks

FP8 = torch.float8_e4m3fn
ALL = ("*",)
SCALE = {None: "_scale", (128, 128): "_scale_inv", (3, 5): "_scale_inv"}


def plain(tensor, block):
    """The recipe, one block at a time: the quantised matrix and its scales."""
    rows, columns = tensor.shape
    high, wide = block or (1, columns)
    quantised = torch.empty(rows, columns, dtype=FP8)
    scales = torch.empty(math.ceil(rows / high), math.ceil(columns / wide))
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            part = (slice(row, row + high), slice(column, column + wide))
            values = tensor[part].to(torch.float32)
            largest = values.abs().max()
            scale = largest / 448 if largest else torch.tensor(1.0)
            quantised[part] = (values / scale).to(FP8)
            scales[row // high, column // wide] = scale
    return quantised, scales


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES_IN_PIECES = [
    *(pytest.param((256, 384), size, marks=pytest.mark.long) for size in (1, 40_000, 1 << 30)),
    pytest.param((130, 257), 1, marks=pytest.mark.long),
    *itertools.product([(1, 1), (7, 300)], [1]),
    *itertools.product([(130, 257), (1, 1), (7, 300)], [40_000, 1 << 30]),
]


@pytest.mark.parametrize("block", SCALE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "piece_bytes"), SHAPES_IN_PIECES)
def test_float8_is_what_plain_torch_makes_of_it(monkeypatch, block, dtype, shape, piece_bytes):
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(matrices, "CACHE_BYTES", piece_bytes // 4)
    tensor = (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).to(dtype)
    tensor[0, 0], tensor[-1] = -3.0, 0.0
    before = tensor.clone()
    made = whole(copied({"w.weight": tensor}, Float8(ALL, block=block)))
    quantised, scales = plain(tensor, block)
    assert made.keys() == {"w.weight", "w.weight" + SCALE[block]}
    assert same(made["w.weight"], quantised)
    assert same(made["w.weight" + SCALE[block]], scales)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("block", SCALE)
def test_what_was_quantised_is_near_what_it_was(block):
    tensor = torch.randn(256, 257)
    made = whole(copied({"w": tensor}, Float8(ALL, block=block)))
    high, wide = block or (1, 257)
    scales = made["w" + SCALE[block]].repeat_interleave(high, 0).repeat_interleave(wide, 1)
    again = made["w"].float() * scales[:256, :257]
    # Half of the distance between neighbours: 1/16 of a number, or of the smallest normal one.
    most = torch.maximum(tensor.abs() / 16, scales[:256, :257] * 2**-10)
    assert bool(((again - tensor).abs() <= most * 1.0001).all())


@pytest.mark.parametrize("block", SCALE)
def test_zeros_have_scale_one_and_the_smallest_numbers_are_no_nan(block):
    tensor = torch.zeros(4, 300)
    tensor[1] = 1e-45
    tensor[2, 3] = torch.finfo(torch.float32).tiny * 300
    tensor[3] = torch.finfo(torch.float32).max
    made = whole(copied({"w": tensor}, Float8(ALL, block=block)))
    values, scales = made["w"].float(), made["w" + SCALE[block]]
    assert bool(torch.isfinite(values).all())
    assert bool(torch.isfinite(scales).all())
    assert bool((scales >= torch.finfo(torch.float32).tiny).all())
    if block is None:
        assert scales[0] == 1
        assert not values[0].any()
        assert bool((values[3] == 448).all())


@pytest.mark.parametrize(("dtype", "value"), NOT_FINITE)
@pytest.mark.parametrize("block", SCALE)
def test_what_is_not_finite_is_refused_by_name(block, dtype, value):
    tensor = torch.ones(20, 30, dtype=dtype)
    tensor[11, 7] = value
    with pytest.raises(UsageError, match=r"'b\.weight' has elements that are not finite"):
        copied({"a.weight": torch.ones(3, 3), "b.weight": tensor}, Float8(ALL, block=block))


def test_only_named_matrices_of_floating_point_are_quantised():
    tensors = {
        "a_proj.weight": torch.randn(4, 6),
        "gate_proj.weight": torch.randn(4, 6),
        "norm.weight": torch.randn(4, 6),
        "b_proj.weight": torch.randn(6),
        "patches_proj.weight": torch.randn(2, 3, 4, 4),
        "scalar_proj.weight": torch.tensor(2.5),
        "int_proj.weight": torch.ones(3, 4, dtype=torch.int32),
        "bool_proj.weight": torch.ones(3, 4, dtype=torch.bool),
        "fp8_proj.weight": torch.randn(3, 4).to(torch.float8_e5m2),
        "complex_proj.weight": torch.randn(3, 4, dtype=torch.complex64),
    }
    made = whole(copied(tensors, Float8(["*_proj.weight"], keep=["gate*"])))
    assert made.keys() == {*tensors, "a_proj.weight_scale"}
    assert made["a_proj.weight"].dtype == FP8
    for fqn in tensors.keys() - {"a_proj.weight"}:
        assert same(made[fqn], tensors[fqn])


def test_tied_empty_transposed_and_stacked_tensors():
    tied = torch.randn(8, 6)
    experts = torch.randn(3, 130, 140)
    tensors = {
        "embed": tied,
        "head": tied,
        "none": torch.empty(0, 5),
        "nothing": torch.empty(5, 0),
        "turned": torch.randn(40, 30).t(),
        "experts": experts,
        "one row many times": torch.randn(1, 9).expand(4, 9),
    }
    made = whole(copied(tensors, Float8(ALL)))
    for fqn in ("embed", "head", "turned", "one row many times"):
        quantised, scales = plain(tensors[fqn], None)
        assert same(made[fqn], quantised), fqn
        assert same(made[fqn + "_scale"], scales), fqn
    assert made["none"].shape == (0, 5)
    assert made["none_scale"].shape == (0, 1)
    assert made["nothing"].shape == (5, 0)
    for block in SCALE:
        made = whole(copied({"experts": experts}, Float8(ALL, block=block)))
        for number, expert in enumerate(experts):
            quantised, scales = plain(expert, block)
            assert same(made["experts"][number], quantised)
            assert same(made["experts" + SCALE[block]][number], scales)


def test_of_several_transforms_the_first_that_makes_something_counts():
    tensors = {"a.weight": torch.randn(4, 4), "norm": torch.randn(4), "step": torch.tensor(7)}
    made = whole(copied(tensors, Float8(["a.*"], suffix=".s"), Cast(torch.bfloat16)))
    assert {fqn: tensor.dtype for fqn, tensor in made.items()} == {
        "a.weight": FP8,
        "a.weight.s": torch.float32,
        "norm": torch.bfloat16,
        "step": torch.int64,
    }
    assert same(made["norm"], tensors["norm"].bfloat16())


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_cast_is_what_torch_casts(source, target):
    tensors = {"w": torch.randn(33, 70).to(source), "scalar": torch.tensor(1.1, dtype=source)}
    made = whole(copied(tensors, Cast(target)))
    assert all(same(made[fqn], tensor.to(target)) for fqn, tensor in tensors.items())


def test_a_copy_is_made_of_what_kernels_have_written_when_they_are_done(monkeypatch):
    tensor = torch.zeros(3)
    monkeypatch.setattr(copy_buffers, "finish_kernels", lambda _: tensor.fill_(7.0))
    made = whole(copied({"w": tensor}, Cast(torch.bfloat16)))
    assert torch.equal(made["w"], torch.full((3,), 7.0, dtype=torch.bfloat16))


# Shards


@pytest.mark.parametrize(
    ("block", "boxes"),
    [
        (None, [(0, 3, 0, 9)]),
        (None, [(2, 3, 0, 9), (5, 7, 0, 9)]),
        ((2, 4), [(2, 4, 0, 9)]),
        ((2, 4), [(6, 7, 8, 9)]),  # the last block of both dimensions is smaller
        ((2, 4), [(0, 2, 0, 4), (4, 7, 4, 9)]),
    ],
)
def test_a_shard_is_quantised_alone_and_its_scales_are_a_shard_too(block, boxes):
    part, full = shard((7, 9), *boxes)
    made = copied({"w": part}, Float8(ALL, block=block))
    quantised, scales = plain(full, block)
    high, wide = block or (1, 9)
    suffix = "_scale_inv" if block else "_scale"
    assert made["w"].shape == (7, 9)
    assert made["w" + suffix].shape == scales.shape
    for fqn, expected, per in (("w", quantised, (1, 1)), ("w" + suffix, scales, (high, wide))):
        found = {chunk.offsets: chunk.tensor for chunk in made[fqn].chunks}
        assert found.keys() == {(a // per[0], c // per[1]) for a, _, c, _ in boxes}
        for (row, column), tensor in found.items():
            rows, columns = tensor.shape
            assert same(tensor, expected[row : row + rows, column : column + columns].clone())
    assert [len(tensor.chunks) for tensor in made.values()] == [len(boxes)] * 2


@pytest.mark.parametrize("block", [None, (2, 4)])
def test_the_shards_of_fsdp_make_the_scales_of_the_whole(block):
    full = torch.randn(7, 9)
    quantised, scales = plain(full, block)
    suffix = "_scale_inv" if block else "_scale"
    seen = {"w": torch.zeros(7, 9), "w" + suffix: torch.zeros_like(scales)}
    for rank in range(2):  # of 4 rows and of 3
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            tensor = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            made = copied({"w": tensor}, Float8(ALL, block=block))
        finally:
            dist.destroy_process_group()
        for fqn, together in seen.items():
            assert made[fqn].spread
            [chunk] = made[fqn].chunks
            (row, column), (rows, columns) = chunk.offsets, chunk.tensor.shape
            together[row : row + rows, column : column + columns] += chunk.tensor.float()
    assert torch.equal(seen["w"], quantised.float())
    assert torch.equal(seen["w" + suffix], scales)


@pytest.mark.parametrize(
    ("block", "box", "found"),
    [
        (None, (0, 7, 0, 5), r"at \[0, 0\] cuts dimension 1 at 5, inside of block 0 \(from 0 to 9"),
        (None, (0, 7, 5, 9), r"at \[0, 5\] cuts dimension 1 at 5, inside of block 0"),
        ((2, 4), (0, 3, 0, 9), r"\[3, 9\] at \[0, 0\] cuts dimension 0 at 3, inside of block 1"),
        ((2, 4), (5, 7, 0, 9), r"at \[5, 0\] cuts dimension 0 at 5, inside of block 2"),
        ((2, 4), (0, 2, 0, 7), r"cuts dimension 1 at 7, inside of block 1 \(from 4 to 8\)"),
    ],
)
def test_a_shard_that_cuts_a_block_is_refused_before_anything_is_copied(block, box, found):
    part, _ = shard((7, 9), box)
    buffers = CopyBuffers(HostBuffers())
    state = LocalState(local_chunks({"a": torch.ones(3, 3), "w": part}), {}, {})
    with pytest.raises(UsageError, match=r"tensor 'w': the shard of shape .*" + found):
        buffers.fill(state, Copying((Float8(ALL, block=block),)))
    assert not buffers._turns


boxes = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from((1, 2, 3))), min_size=0, max_size=3
).map(lambda dims: tuple(zip(*dims, strict=True)) or ((), ()))


@settings(deadline=None)  # cores may be busy
@given(boxes, st.integers(0, 100))
def test_pieces_are_all_of_a_box_once_in_whole_units(box, most):
    sizes, units = box
    seen = torch.zeros(sizes, dtype=torch.int64)
    for offsets, part in cut(sizes, units, most):
        at = tuple(slice(o, o + s) for o, s in zip(offsets, part, strict=True))
        seen[at] += 1
        assert math.prod(part) <= max(most, math.prod(units))
        for offset, size, unit, full in zip(offsets, part, units, sizes, strict=True):
            assert offset % unit == 0
            assert size % unit == 0 or offset + size == full
    assert bool((seen == 1).all())


# Transforms of a user's own


@dataclass(frozen=True)
class Pairs:
    """Two rows of int8 in one of uint8, and the sum of each two."""

    def outputs(self, fqn, dtype, shape):
        if dtype != torch.int8:
            return {}
        ones = (1,) * (len(shape) - 1)
        return {
            f"{fqn}.packed": MadeTensor(torch.uint8, (2, *ones)),
            f"{fqn}.sum": MadeTensor(torch.float32, (2, shape[1])),
        }

    def fill(self, fqn, box, made):
        low, high = box[::2], torch.zeros_like(box[::2])
        high[: len(box[1::2])] = box[1::2]
        made[f"{fqn}.packed"].copy_((low & 15) | (high << 4))
        made[f"{fqn}.sum"].copy_((low + high).sum(1, keepdim=True))


def test_a_transform_may_make_fewer_elements_under_other_names(monkeypatch):
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", 8)
    tensor = torch.randint(0, 7, (9, 5), dtype=torch.int8)
    made = whole(copied({"w": tensor, "x": torch.ones(2)}, Pairs()))
    assert made.keys() == {"w.packed", "w.sum", "x"}
    padded = torch.cat([tensor, torch.zeros(1, 5, dtype=torch.int8)])
    assert torch.equal(made["w.packed"], (padded[::2] | (padded[1::2] << 4)).to(torch.uint8))
    assert torch.equal(made["w.sum"], (padded[::2] + padded[1::2]).sum(1, keepdim=True).float())


@dataclass(frozen=True)
class Faulty:
    wrong: object = None

    def outputs(self, fqn, dtype, shape):
        if self.wrong is not None:
            return self.wrong
        return {fqn: MadeTensor(dtype, (1,) * len(shape))}

    def fill(self, fqn, box, made):
        raise ZeroDivisionError("of mine")


@pytest.mark.parametrize(
    ("transform", "found"),
    [
        (Faulty(), r"'w': Faulty\(wrong=None\) failed \(ZeroDivisionError: of mine\)"),
        (Faulty(5), r"'w' of shape \[3, 3\]: Faulty\(wrong=5\) makes 5, expected names"),
        (
            Faulty({"w": torch.float32}),
            "expected names, and for each a MadeTensor with a `per` of 2",
        ),
        (Faulty({7: MadeTensor(FP8, (1, 1))}), "expected names"),
        (Faulty({"w": MadeTensor(FP8, (1,))}), r"is_single=False\)}, expected names"),
        (Faulty({"x": MadeTensor(FP8, (1, 1))}), "'x' is made of 'w' and of 'x'"),
        (Cast(torch.float4_e2m1fn_x2), r"'w': Cast.* failed"),
    ],
)
def test_a_transform_that_cannot_be_is_named(transform, found):
    with pytest.raises(UsageError, match=found):
        copied({"w": torch.ones(3, 3), "x": torch.ones(2, 2)}, transform)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Cast(torch.int8), r"dtype=torch\.int8"),
        (lambda: Cast("bf16"), "dtype='bf16'"),
        (lambda: Cast(torch.bfloat16, keep="norm"), "keep='norm'"),
        (lambda: Float8("*"), "names='\\*'"),
        (lambda: Float8(ALL, keep="norm"), "keep='norm'"),
        (lambda: Float8(ALL, block=128), "block=128"),
        (lambda: Float8(ALL, block=(128, 0)), "block=0"),
        (lambda: Float8(ALL, block=(1, 2, 3)), r"block=\(1, 2, 3\)"),
        (lambda: Float8(ALL, suffix=""), "suffix ''"),
        (lambda: MadeTensor("fp8", (1,)), "dtype='fp8'"),
        (lambda: MadeTensor(FP8, (0,)), "per=0"),
        (lambda: Copying.asked(object(), None, None), "expected a transform"),
        (lambda: Copying.asked(NoText(), None, None), "its repr says where it is"),
    ],
)
def test_bad_arguments_are_named(make, found):
    with pytest.raises(UsageError, match=found):
        make()


class NoText(Faulty):
    __repr__ = object.__repr__


def test_equal_transforms_say_the_same_whatever_holds_their_names():
    assert repr(Float8(["a"], block=[2, 2])) == repr(Float8(("a",), block=(2, 2)))
    assert repr(Cast(torch.bfloat16, keep=["a"])) == repr(Cast(torch.bfloat16, keep=("a",)))
    assert repr(Float8(["a"])) != repr(Float8(["a"], block=(1, 1)))


def test_the_units_of_a_tensor_are_those_of_all_its_outputs():
    assert units({"a": MadeTensor(FP8, (2, 3)), "b": MadeTensor(FP8, (3, 1))}) == (6, 3)
