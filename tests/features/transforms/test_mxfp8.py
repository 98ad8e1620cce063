"""MXFP8 against its definition; tests/engines has compressed-tensors' own."""

import itertools
import math

import pytest
import torch
from features.transforms.copying import NOT_FINITE, assert_same, copied, refused, same, shard, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ros import MXFP8, Cast
from torch_ros.copies import buffers as copy_buffers
from torch_ros.errors import UsageError
from torch_ros.features.transforms import matrices

FP8 = torch.float8_e4m3fn
ALL = MXFP8(["*"])


def exponent_of(largest):
    """The power of two that brings the largest element of a block below 448 = 1.75 * 2**8."""
    if not largest:
        return -127
    fraction, exponent = math.frexp(largest)  # a fraction from 0.5 to 1
    return max(-127, exponent - 9 + (fraction >= 0.875))


def plain(tensor):
    """The recipe, one block at a time."""
    quantised = torch.empty(tensor.shape, dtype=FP8)
    scales = torch.empty(*tensor.shape[:-1], tensor.shape[-1] // 32, dtype=torch.uint8)
    for at in itertools.product(*map(range, scales.shape)):
        block = (*at[:-1], slice(32 * at[-1], 32 * at[-1] + 32))
        values = tensor[block].to(torch.float64)
        exponent = exponent_of(float(values.abs().max()))
        scales[at] = exponent + 127
        quantised[block] = (values / 2.0**exponent).to(torch.float32).to(FP8)
    return {"w": quantised, "w_scale": scales}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (130, 64), (3, 5, 64)])
@pytest.mark.parametrize("piece_bytes", [1, 10_000, 1 << 30])
def test_it_is_what_the_definition_makes_of_it(monkeypatch, dtype, shape, piece_bytes):
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(matrices, "CACHE_BYTES", piece_bytes // 4)
    tensor = (torch.randn(shape) * torch.logspace(-3, 2, shape[-1])).to(dtype)
    tensor[0, 0], tensor[-1, -1] = -3.0, 0.0
    before = tensor.clone()
    assert_same(whole(copied({"w": tensor}, ALL)), plain(tensor))
    assert torch.equal(tensor, before)


@settings(deadline=None)  # cores may be busy
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=64))
def test_any_finite_numbers_are_near_what_they_were(numbers):
    tensor = torch.zeros(2, 32)
    tensor.view(-1)[: len(numbers)] = torch.tensor(numbers)
    made = whole(copied({"w": tensor}, ALL))
    assert_same(made, plain(tensor))
    exponents = made["w_scale"].repeat_interleave(32, 1).double() - 127
    again = made["w"].double() * 2**exponents
    # Half of the distance between neighbours: 1/16 of a number, or of the smallest normal one.
    most = torch.maximum(tensor.double().abs() / 16, 2 ** (exponents - 10))
    assert bool(((again - tensor.double()).abs() <= most).all())


def test_a_block_of_1_75_times_a_power_of_two_has_the_next_scale():
    below = torch.nextafter(torch.tensor(1.75), torch.tensor(0.0))
    tensor = torch.zeros(3, 32)
    tensor[:, 5] = torch.tensor([1.0, below, -1.75]) * 2.0**8
    made = whole(copied({"w": tensor}, ALL))
    assert made["w_scale"].tolist() == [[127], [127], [128]]
    assert made["w"][:, 5].float().tolist() == [256, 448, -224]


def test_the_smallest_and_the_largest_numbers_have_scales_too():
    tensor = torch.zeros(4, 32)
    tensor[1] = 1e-45
    tensor[2] = -torch.finfo(torch.float32).tiny
    tensor[3] = torch.finfo(torch.float32).max
    made = whole(copied({"w": tensor}, ALL))
    assert made["w_scale"].flatten().tolist() == [0, 0, 0, 247]
    assert made["w"].float()[:, 7].tolist() == [0, 0, -2, 256]


@pytest.mark.parametrize(("dtype", "value"), NOT_FINITE)
def test_what_is_not_finite_is_refused_by_name(dtype, value):
    tensor = torch.ones(20, 32, dtype=dtype)
    tensor[11, 7] = value
    with pytest.raises(UsageError, match=r"'b\.weight' has elements that are not finite"):
        copied({"a.weight": torch.ones(3, 32), "b.weight": tensor}, ALL)


def test_only_named_matrices_of_floating_point_are_quantised():
    tensors = {
        "a_proj.weight": torch.randn(4, 64),
        "mlp.gate.weight": torch.randn(4, 40),  # a router
        "norm.weight": torch.randn(64),
        "patches_proj.weight": torch.randn(2, 4, 32, 32),  # a convolution
        "scalar": torch.tensor(2.5),
        "int_proj.weight": torch.ones(3, 32, dtype=torch.int32),
        "fp8_proj.weight": torch.randn(3, 32).to(torch.float8_e5m2),
    }
    recipe = [MXFP8(["*"], keep=["*.gate.*"], suffix=".s"), Cast(torch.bfloat16)]
    made = whole(copied(tensors, *recipe))
    assert {fqn: tensor.dtype for fqn, tensor in made.items()} == {
        "a_proj.weight": FP8,
        "a_proj.weight.s": torch.uint8,
        "mlp.gate.weight": torch.bfloat16,
        "norm.weight": torch.bfloat16,
        "patches_proj.weight": torch.bfloat16,
        "scalar": torch.bfloat16,
        "int_proj.weight": torch.int32,
        "fp8_proj.weight": torch.bfloat16,
    }


def test_tied_empty_and_transposed_tensors():
    tied = torch.randn(8, 64)
    tensors = {
        "embed": tied,
        "head": tied,
        "turned": torch.randn(64, 30).t(),
        "strided": torch.randn(6, 128)[::2, ::2],
        "one row many times": torch.randn(1, 32).expand(4, 32),
        "none": torch.empty(0, 32),
        "nothing": torch.empty(5, 0),
    }
    made = whole(copied(tensors, ALL))
    for fqn in ("embed", "head", "turned", "strided", "one row many times"):
        expected = plain(tensors[fqn])
        assert same(made[fqn], expected["w"]), fqn
        assert same(made[fqn + "_scale"], expected["w_scale"]), fqn
    assert made["none"].shape == (0, 32)
    assert made["none_scale"].shape == (0, 1)
    assert made["nothing_scale"].shape == (5, 0)


@pytest.mark.parametrize("columns", [1, 31, 33, 40])
def test_rows_of_no_whole_blocks_are_refused_before_anything_is_copied(columns):
    found = refused({"a": torch.ones(3, 32), "w": torch.ones(2, columns)}, ALL)
    assert f"tensor 'w' of shape [2, {columns}]: expected rows of a multiple of 32" in found
    kept = whole(copied({"w": torch.ones(2, columns)}, MXFP8(["*"], keep=["w"])))
    assert kept.keys() == {"w"}


@pytest.mark.parametrize("box", [(0, 3, 0, 96), (1, 2, 32, 64), (2, 3, 64, 96)])
def test_a_shard_is_quantised_alone_and_its_scales_are_a_shard_too(box):
    part, full = shard((3, 96), box)
    made, expected = copied({"w": part}, ALL), plain(full)
    top, bottom, left, right = box
    for fqn, per in (("w", 1), ("w_scale", 32)):
        [chunk] = made[fqn].chunks
        assert chunk.offsets == (top, left // per)
        assert same(chunk.tensor, expected[fqn][top:bottom, left // per : right // per].clone())
        assert made[fqn].shape == expected[fqn].shape


@pytest.mark.parametrize(
    ("box", "found"),
    [
        ((0, 3, 0, 48), "cuts dimension 1 at 48, inside of block 1 (from 32 to 64)"),
        ((0, 3, 80, 96), "cuts dimension 1 at 80, inside of block 2 (from 64 to 96)"),
        ((0, 1, 31, 64), "cuts dimension 1 at 31, inside of block 0 (from 0 to 32)"),
    ],
)
def test_a_shard_that_cuts_a_block_is_refused_before_anything_is_copied(box, found):
    part, _ = shard((3, 96), box)
    assert found in refused({"a": torch.ones(3, 32), "w": part}, ALL)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: MXFP8("*"), r"MXFP8: names='\*'"),
        (lambda: MXFP8(["*"], keep="norm"), "MXFP8: keep='norm'"),
        (lambda: MXFP8(["*"], suffix=""), "MXFP8: suffix ''"),
    ],
)
def test_bad_arguments_are_named(make, found):
    with pytest.raises(UsageError, match=found):
        make()


def test_equal_ones_say_the_same_whatever_holds_their_names():
    assert repr(MXFP8(["a"], keep=["b"])) == repr(MXFP8(("a",), keep=("b",)))
    assert repr(MXFP8(["a"])) != repr(MXFP8(["a"], suffix="_scale_inv"))
