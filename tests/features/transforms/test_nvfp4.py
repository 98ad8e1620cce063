"""NVFP4 against its definition; tests/engines has compressed-tensors' own."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from features.transforms.copying import NOT_FINITE, assert_same, copied, refused, same, shard, whole
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import multi_threaded_pg

from torch_ros import NVFP4, Cast, Chunked
from torch_ros.copies import buffers as copy_buffers
from torch_ros.errors import UsageError
from torch_ros.features.transforms import matrices
from torch_ros.features.transforms.fitting import largest_of

FP8 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ALL = NVFP4(["*"])


def nearest(number):
    """The code of the nearest of FP4, and of two as near the even one; its sign in bit 3."""
    distances = (FP4.double() - abs(number)).abs()
    codes = [code for code in range(8) if distances[code] == distances.min()]
    return min(codes, key=lambda code: code % 2) | (number < 0) << 3


def plain(tensor, global_scale=None):
    """The recipe, one number at a time."""
    tensor = tensor.to(torch.float32)
    if global_scale is None:
        global_scale = (1 / tensor.abs().max()) * 2688
    global_scale = torch.as_tensor(global_scale, dtype=torch.float32).reshape(1)
    rows = tensor.reshape(-1, 16)
    scales = global_scale * (rows.abs().amax(1) / torch.tensor(6.0))
    scales = scales.clamp(max=448).to(FP8).float()
    scales[scales == 0] = 0.125
    quotients = rows / (scales / global_scale)[:, None]
    codes = torch.tensor([nearest(float(one.clamp(-6, 6))) for one in quotients.flatten()])
    packed = codes[::2] | codes[1::2] << 4
    return {
        "w_packed": packed.to(torch.uint8).view(*tensor.shape[:-1], -1),
        "w_scale": scales.to(FP8).view(*tensor.shape[:-1], -1),
        "w_global_scale": global_scale,
    }


def unpacked(made, fqn="w"):
    codes = torch.stack((made[f"{fqn}_packed"] & 15, made[f"{fqn}_packed"] >> 4), -1).flatten(-2)
    numbers = FP4[(codes & 7).long()] * torch.where(codes > 7, -1, 1)
    scales = made[f"{fqn}_scale"].float() / made[f"{fqn}_global_scale"]
    return numbers * scales.repeat_interleave(16, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (65, 32), (3, 5, 32)])
@pytest.mark.parametrize("piece_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("is_told", [False, True])
def test_it_is_what_the_definition_makes_of_it(monkeypatch, dtype, shape, piece_bytes, is_told):
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(matrices, "CACHE_BYTES", piece_bytes // 4)
    tensor = (torch.randn(shape) * torch.logspace(-3, 2, shape[-1])).to(dtype)
    tensor[0, 0], tensor[-1, -1] = -3.0, 0.0
    before = tensor.clone()
    recipe = NVFP4(["*"], global_scales={"w": 3.7}) if is_told else ALL
    made = whole(copied({"w": tensor}, recipe))
    assert_same(made, plain(tensor, 3.7 if is_told else None))
    assert torch.equal(tensor, before)


def test_of_two_numbers_as_near_the_even_one_is_taken():
    between = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    tensor = torch.tensor([[*between, 6.0, *(-one for one in between), -6.0]])
    made = whole(copied({"w": tensor}, NVFP4(["*"], global_scales={"w": 1.0})))
    even = [0, 1, 1, 2, 2, 4, 4, 6]
    assert made["w_scale"].float().tolist() == [[1]]
    assert unpacked(made).tolist() == [[*even, *(-one for one in even)]]
    assert made["w_packed"].tolist() == [[0x20, 0x42, 0x64, 0x76, 0xA8, 0xCA, 0xEC, 0xFE]]


@settings(deadline=None)  # cores may be busy
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=32))
def test_any_finite_numbers_are_near_what_they_were(numbers):
    tensor = torch.zeros(2, 16)
    tensor.view(-1)[: len(numbers)] = torch.tensor(numbers)
    made = whole(copied({"w": tensor}, ALL))
    again, largest = unpacked(made), tensor.abs().amax(1, keepdim=True)
    assume(float(tensor.abs().max()) == 0 or float(tensor.abs().max()) > 2.0**-100)
    # Half of the largest distance between neighbours, and of the smallest scale of a block.
    most = torch.maximum(largest.double() / 5, tensor.abs().max().double() * 2**-10)
    assert bool(((again - tensor).abs() <= most).all())


def test_zeros_and_the_smallest_numbers_have_scales_too():
    tensor = torch.zeros(3, 16)
    assert whole(copied({"w": tensor}, ALL))["w_global_scale"].tolist() == [1]
    tensor[1] = 1e-45
    made = whole(copied({"w": tensor}, ALL))
    assert made["w_global_scale"].tolist() == [1]
    assert made["w_scale"].float().tolist() == [[0.125]] * 3
    tensor[2] = -torch.finfo(torch.float32).max
    made = whole(copied({"w": tensor}, ALL))
    assert made["w_packed"].tolist() == [[0] * 8, [0] * 8, [0xFF] * 8]
    assert made["w_scale"].float().flatten().tolist() == [0.125, 0.125, 448]


def test_elements_too_large_for_their_global_scale_become_the_largest_there_is():
    tensor = torch.full((1, 32), 6.0)
    tensor[0, 3] = -1e6
    made = whole(copied({"w": tensor}, NVFP4(["*"], global_scales={"w": 1.0})))
    assert unpacked(made)[0, 3] == -2688
    assert unpacked(made)[0, 16:].tolist() == [6.0] * 16


@pytest.mark.parametrize(("dtype", "value"), NOT_FINITE)
@pytest.mark.parametrize("is_told", [False, True])
def test_what_is_not_finite_is_refused_by_name(dtype, value, is_told):
    tensor = torch.ones(20, 16, dtype=dtype)
    tensor[11, 7] = value
    tensors = {"a.weight": torch.ones(3, 16), "b.weight": tensor}
    recipe = NVFP4.fitted(tensors, ["*"]) if is_told else ALL
    with pytest.raises(UsageError, match=r"'b\.weight' has elements that are not finite"):
        copied(tensors, recipe)


def test_only_named_matrices_of_floating_point_are_quantised():
    tensors = {
        "a_proj.weight": torch.randn(4, 32),
        "mlp.gate.weight": torch.randn(4, 40),  # a router
        "norm.weight": torch.randn(32),
        "stack_proj.weight": torch.randn(2, 4, 32),
        "patches_proj.weight": torch.randn(2, 4, 16, 16),  # a convolution
        "video_proj.weight": torch.randn(2, 4, 2, 16, 16),
        "none_proj.weight": torch.empty(0, 32),
        "scalar": torch.tensor(2.5),
        "int_proj.weight": torch.ones(3, 16, dtype=torch.int32),
        "fp8_proj.weight": torch.randn(3, 16).to(torch.float8_e5m2),
    }
    made = whole(copied(tensors, NVFP4(["*"], keep=["*.gate.*"]), Cast(torch.bfloat16)))
    assert {fqn: (tensor.dtype, tuple(tensor.shape)) for fqn, tensor in made.items()} == {
        "a_proj.weight_packed": (torch.uint8, (4, 16)),
        "a_proj.weight_scale": (FP8, (4, 2)),
        "a_proj.weight_global_scale": (torch.float32, (1,)),
        "mlp.gate.weight": (torch.bfloat16, (4, 40)),
        "norm.weight": (torch.bfloat16, (32,)),
        "stack_proj.weight_packed": (torch.uint8, (2, 4, 16)),
        "stack_proj.weight_scale": (FP8, (2, 4, 2)),
        "stack_proj.weight_global_scale": (torch.float32, (1,)),
        "patches_proj.weight": (torch.bfloat16, (2, 4, 16, 16)),
        "video_proj.weight": (torch.bfloat16, (2, 4, 2, 16, 16)),
        "none_proj.weight": (torch.bfloat16, (0, 32)),
        "scalar": (torch.bfloat16, ()),
        "int_proj.weight": (torch.int32, (3, 16)),
        "fp8_proj.weight": (torch.bfloat16, (3, 16)),
    }


def test_tied_and_transposed_tensors():
    tied = torch.randn(8, 32)
    tensors = {
        "embed": tied,
        "head": tied,
        "turned": torch.randn(32, 6).t(),
        "strided": torch.randn(6, 64)[::2, ::2],
        "one row many times": torch.randn(1, 16).expand(4, 16),
    }
    made = whole(copied(tensors, ALL))
    for fqn, tensor in tensors.items():
        for name, expected in plain(tensor).items():
            assert same(made[fqn + name[1:]], expected), fqn


@pytest.mark.parametrize("columns", [1, 8, 15, 17, 40])
def test_rows_of_no_whole_blocks_are_refused_before_anything_is_copied(columns):
    found = refused({"a": torch.ones(3, 16), "w": torch.ones(2, columns)}, ALL)
    assert f"tensor 'w' of shape [2, {columns}]: expected rows of a multiple of 16" in found


# Shards


@pytest.mark.parametrize(
    "boxes", [[(0, 3, 0, 48)], [(1, 2, 16, 32)], [(0, 1, 0, 32), (2, 3, 32, 48)]]
)
def test_a_shard_is_quantised_alone_by_the_global_scale_that_it_is_told(boxes):
    part, full = shard((3, 48), *boxes)
    made = copied({"w": part}, NVFP4(["*"], global_scales={"w": 19.0}))
    expected = plain(full, 19.0)
    [chunk] = made["w_global_scale"].chunks
    assert (chunk.offsets, made["w_global_scale"].shape) == ((0,), (1,))
    assert chunk.tensor.tolist() == [19]
    for fqn, per in (("w_packed", 2), ("w_scale", 16)):
        found = {chunk.offsets: chunk.tensor for chunk in made[fqn].chunks}
        assert found.keys() == {(top, left // per) for top, _, left, _ in boxes}
        for top, bottom, left, right in boxes:
            box = expected[fqn][top:bottom, left // per : right // per].clone()
            assert same(found[top, left // per], box)
        assert made[fqn].shape == expected[fqn].shape


@pytest.mark.parametrize(
    ("box", "found"),
    [
        ((0, 3, 0, 40), "cuts dimension 1 at 40, inside of block 2 (from 32 to 48)"),
        ((0, 3, 30, 48), "cuts dimension 1 at 30, inside of block 1 (from 16 to 32)"),
        ((0, 1, 15, 32), "cuts dimension 1 at 15, inside of block 0 (from 0 to 16)"),
        ((0, 1, 2, 32), "cuts dimension 1 at 2, inside of block 0 (from 0 to 16)"),
    ],
)
def test_a_shard_that_cuts_a_block_is_refused_before_anything_is_copied(box, found):
    part, _ = shard((3, 48), box)
    assert found in refused({"w": part}, NVFP4(["*"], global_scales={"w": 1.0}))


@pytest.mark.parametrize("box", [(0, 2, 0, 48), (1, 3, 0, 48), (0, 3, 16, 48)])
def test_a_shard_without_a_global_scale_is_refused_before_anything_is_copied(box):
    part, _ = shard((3, 48), box)
    found = refused({"a": torch.ones(3, 16), "w": part}, ALL)
    assert "'w_global_scale' is made of the whole tensor" in found
    assert "global_scales=" in found


@pytest.mark.parametrize("told", [{}, {"a": 1.0, "v": 1.0}])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_one_that_is_not_among_the_global_scales_is_refused_by_name(told, is_sharded):
    part, full = shard((3, 48), (0, 2, 0, 48))
    tensors = {"a": torch.ones(3, 16)} if told else {}
    tensors |= {"w": part if is_sharded else full, "lm_head": torch.ones(3, 16)}
    found = refused(tensors, NVFP4(["*"], ["lm_head"], global_scales=told))
    assert f"tensor 'w' has none of the {len(told)} global_scales of NVFP4" in found
    assert "name it in keep" in found


# Global scales


def scale_of(*tensors):
    largest = max(float(tensor.abs().max()) for tensor in tensors)
    return float(1 / torch.tensor(largest) * 2688)


def test_global_scales_fit_the_largest_element_of_all_that_engines_fuse():
    layer = "model.layers.0."
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.3.w1"]
    names += ["mlp.experts.3.w3", "mlp.experts.4.w1", "mlp.experts.3.w2"]
    tensors = {f"{layer}{name}.weight": torch.randn(4, 32) * 2**n for n, name in enumerate(names)}
    tensors |= {"lm_head.weight": torch.randn(4, 20), "norm.weight": torch.ones(32)}
    q, k, v, o, gate, up, down, w1, w3, other, w2, *_ = tensors.values()
    expected = [scale_of(q, k, v)] * 3 + [scale_of(o)] + [scale_of(gate, up)] * 2 + [scale_of(down)]
    expected += [scale_of(w1, w3)] * 2 + [scale_of(other), scale_of(w2)]
    recipe = NVFP4.fitted(tensors, ["*"], keep=["lm_head.*"])
    found = dict(zip((f"{layer}{name}.weight" for name in names), expected, strict=True))
    assert recipe.global_scales == found
    assert recipe == NVFP4(["*"], ["lm_head.*"], global_scales=found)
    alone = NVFP4.fitted(tensors, ["*"], keep=["lm_head.*"], fused=())
    assert alone.global_scales == {fqn: scale_of(tensors[fqn]) for fqn in found}
    made = whole(copied(tensors, recipe))
    for fqn, scale in found.items():
        for name, one in plain(tensors[fqn], scale).items():
            assert same(made[fqn + name[1:]], one), fqn


@pytest.mark.parametrize(
    "row",
    [
        ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "f_a_proj", "g_a_proj"),
        ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
        ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
        ("key_proj", "value_proj"),
        ("q", "k", "v"),
        ("query", "key", "value"),
        ("query_net", "key_net", "value_net"),
        ("wq", "wk", "wv"),
        ("wk", "weights_proj"),
        ("wq_a", "wkv"),
        ("wq_a", "wkv_a_with_mqa"),
        ("wkv", "wgate"),
        ("wq_du", "wk_dv", "wv_dv", "wr_du"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
        ("gate_proj", "up_proj"),
        ("gate_proj", "dense_h_to_4h"),
        ("w1", "w3"),
        ("fc1", "fc3"),
        ("c_fc_0", "c_fc_1"),
        ("input_mix_weight_down", "block_inject_weight"),
    ],
)
@pytest.mark.parametrize("outer", ["", "layers.3.attn."])
def test_what_some_model_of_vllm_fuses_has_one_global_scale(row, outer):
    fused = {f"{outer}{name}.weight": torch.full((1, 16), 2.0**n) for n, name in enumerate(row)}
    others = {f"layers.{n}.attn.{row[0]}.weight": torch.full((1, 16), 64.0) for n in (2, 33)}
    others |= {f"{outer}{name}": torch.full((1, 16), 64.0) for name in ("o_proj.weight", "weight")}
    found = NVFP4.fitted(fused | others, ["*"]).global_scales
    largest = scale_of(torch.tensor(2.0 ** (len(row) - 1)))
    assert {fqn: found[fqn] for fqn in fused} == dict.fromkeys(fused, largest)
    assert {fqn: found[fqn] for fqn in others} == dict.fromkeys(others, scale_of(torch.tensor(64)))


def test_rows_that_have_a_module_in_common_are_one():
    tensors = {f"m.{name}": torch.full((1, 16), 2.0**n) for n, name in enumerate("abcdefg")}
    tensors = {f"{fqn}.weight": tensor for fqn, tensor in tensors.items()}
    rows = [["a", "b"], ["c", "d"], [], ["e", "f"], ["d", "b"]]
    found = NVFP4.fitted(tensors, ["*"], fused=rows).global_scales
    expected = [3, 3, 3, 3, 5, 5, 6]
    assert list(found.values()) == [scale_of(torch.tensor(2.0**n)) for n in expected]


def test_zeros_and_what_is_not_finite_have_the_global_scale_one():
    tensors = {"a": torch.zeros(2, 16), "b": torch.full((2, 16), math.inf), "c": torch.ones(2, 16)}
    tensors["c"][0, 0] = math.nan
    assert NVFP4.fitted(tensors, ["*"]).global_scales == {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.fixture
def on_ranks():
    """Calls a function on each of so many ranks, which are threads; returns their answers."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    groups = multi_threaded_pg.ProcessLocalGroup
    groups.reset()

    def call(count, function):
        store = dist.HashStore()

        def one(rank):
            dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
            try:
                return function(rank)
            except BaseException as error:
                groups.exception_handle(error)  # wakes the others
                raise
            finally:
                dist.destroy_process_group()

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    yield call
    groups.reset()
    multi_threaded_pg._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), [Shard(0)]),
        ((2,), [Shard(1)]),
        ((2,), [Replicate()]),
        ((4,), [Shard(0)]),  # of three rows: the last rank has none
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
    ],
)
def test_shards_of_a_mesh_fit_the_whole_tensors(on_ranks, mesh, placements):
    full = {"q_proj.weight": torch.randn(3, 64), "k_proj.weight": 9 * torch.randn(3, 64)}
    full |= {"whole.weight": torch.randn(2, 32), "norm": torch.ones(8)}
    expected = NVFP4.fitted(full, ["*"])

    def fitted(rank):
        made = init_device_mesh("cpu", mesh)
        tensors = {
            fqn: distribute_tensor(full[fqn], made, placements, src_data_rank=None)
            for fqn in ("q_proj.weight", "k_proj.weight")
        }
        tensors |= {"whole.weight": full["whole.weight"], "norm": full["norm"]}
        recipe = NVFP4.fitted(tensors, ["*"])
        return recipe, copied(tensors, recipe)

    answers = on_ranks(math.prod(mesh), fitted)
    assert [repr(recipe) for recipe, _ in answers] == [repr(expected)] * len(answers)
    for fqn, one in whole(copied(full, expected)).items():
        together = torch.full(one.shape, 255, dtype=torch.uint8)
        for _, made in answers:
            assert made[fqn].shape == one.shape
            for chunk in made[fqn].chunks:
                ends = zip(chunk.offsets, chunk.tensor.shape, strict=True)
                if one.dtype.itemsize == 1:
                    at = tuple(slice(start, start + size) for start, size in ends)
                    together[at] = chunk.tensor.view(torch.uint8)
                else:
                    assert same(chunk.tensor, one)
        assert one.dtype.itemsize > 1 or torch.equal(together, one.view(torch.uint8)), fqn


def test_parts_and_layers_of_a_group_fit_the_whole_tensors(on_ranks):
    first, last, rows = torch.randn(2, 16), torch.randn(2, 16), torch.randn(4, 32)

    def fitted(rank):
        mine = {(2 * rank, 0): rows[2 * rank : 2 * rank + 2]}
        tensors = {"rows": Chunked((4, 32), torch.float32, mine)}
        tensors |= {"first": first} if rank == 0 else {"last": last}
        return NVFP4.fitted(tensors, ["*"], group=dist.group.WORLD)

    expected = NVFP4.fitted({"first": first, "last": last, "rows": rows}, ["*"])
    assert on_ranks(2, fitted) == [expected] * 2


def caught(function, *args, **named):
    try:
        return function(*args, **named)
    except Exception as error:  # that of each rank is looked at
        return error


def test_an_error_on_one_rank_of_a_group_is_raised_on_all(on_ranks):
    """Each has layers of its own."""

    def fitted(rank):
        tensors = {f"layers.{rank}.w": torch.ones(2, 16 + rank)}
        return caught(NVFP4.fitted, tensors, ["*"], group=dist.group.WORLD)

    errors = on_ranks(2, fitted)
    assert [type(error) for error in errors] == [UsageError] * 2
    assert all("tensor 'layers.1.w' of shape [2, 17]" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Replicate(), Shard(0)])],
)
def test_an_error_on_one_rank_of_a_mesh_is_raised_where_it_is_waited_for(
    on_ranks, mesh, placements
):
    """Tensors that are replicated have nobody who waits."""
    full = torch.ones(4, 32)

    def fitted(rank):
        made = init_device_mesh("cpu", mesh)
        tensor = distribute_tensor(full, made, placements, src_data_rank=None)
        names = "*" if rank == 1 else ["*"]
        return caught(NVFP4.fitted, {"w": tensor}, names)

    found = on_ranks(math.prod(mesh), fitted)
    assert "names='*'" in str(found[1])
    others = [rank for rank, one in enumerate(found) if "another rank could not" in str(one)]
    waiting = [0] if isinstance(placements[0], Replicate) else [0, *range(2, len(found))]
    assert others == waiting


def test_the_largest_of_a_tensor_with_gaps_takes_no_copy_of_it():
    full = torch.randn(256, 1024)
    full[3, 7], full[200, 4] = -9.0, 8.0
    for box, largest in ((full.t(), 9), (full[:, ::2], 8)):
        with torch.profiler.profile(profile_memory=True) as profile:
            assert largest_of(box) == largest
        assert max(event.cpu_memory_usage for event in profile.events()) < box.nbytes / 100


@pytest.mark.parametrize("boxes", [[(0, 3, 0, 16)], []])
def test_a_part_without_a_group_is_refused_by_name(boxes):
    part, _ = shard((3, 48), *boxes)
    tensors = {"a": torch.ones(2, 16), "w": part}
    here = 48 * len(boxes)
    with pytest.raises(UsageError, match=rf"'w' is a Chunked .* has {here} of 144 .* pass group="):
        NVFP4.fitted(tensors, ["*"])
    assert NVFP4.fitted(tensors, ["*"], keep=["w"]).global_scales == {"a": 2688}


def test_all_boxes_of_a_tensor_need_no_group():
    boxes, full = shard((3, 48), (0, 3, 0, 16), (0, 1, 16, 48), (1, 3, 16, 48))
    assert NVFP4.fitted({"w": boxes}, ["*"]) == NVFP4.fitted({"w": full}, ["*"])


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: NVFP4("*"), r"NVFP4: names='\*'"),
        (lambda: NVFP4(["*"], keep="norm"), "NVFP4: keep='norm'"),
        (lambda: NVFP4(["*"], global_scales=1.0), "global_scales=1.0"),
        (lambda: NVFP4(["*"], global_scales={"w": 0.0}), "'w': 0.0: expected names"),
        (lambda: NVFP4(["*"], global_scales={"w": -1.0}), "'w': -1.0: expected names"),
        (lambda: NVFP4(["*"], global_scales={"w": math.nan}), "'w': nan: expected names"),
        (lambda: NVFP4(["*"], global_scales={"w": 1e39}), "'w': 1e[+]39: expected names"),
        (lambda: NVFP4(["*"], global_scales={"w": True}), "'w': True: expected names"),
        (lambda: NVFP4(["*"], global_scales={"w": torch.ones(1)}), "'w': tensor.* expected names"),
        (lambda: NVFP4(["*"], global_scales={7: 1.0}), "7: 1.0: expected names"),
        (lambda: NVFP4.fitted([torch.ones(2, 16)], ["*"]), "found a list, expected a mapping"),
        (lambda: NVFP4.fitted({"w": [1.0]}, ["*"]), "'w' is a list, not a tensor"),
        (lambda: NVFP4.fitted({7: torch.ones(2, 16)}, ["*"]), "key 7 is not a string"),
        (lambda: NVFP4.fitted({}, ["*"], fused=["q_proj"]), "fused='q_proj'"),
        (lambda: NVFP4.fitted({}, ["*"], fused=None), "fused=None"),
    ],
)
def test_bad_arguments_are_named(make, found):
    with pytest.raises(UsageError, match=found):
        make()


def test_ranks_tell_by_the_repr_whether_theirs_are_equal_and_it_is_short():
    scales = {f"layers.{number}.weight": float(number) for number in range(1, 1000)}
    one = NVFP4(["a"], keep=["b"], global_scales=scales)
    other = NVFP4(("a",), ("b",), dict(reversed(scales.items())))
    assert (repr(one), one) == (repr(other), other)
    assert len(repr(one)) < 100
    for changed in (None, scales | {"layers.7.weight": 7.5}):
        assert repr(one) != repr(NVFP4(["a"], ["b"], changed))


def test_equal_ones_have_equal_reprs_and_hashes():
    one, other = (NVFP4(["a"], global_scales={"w": scale}) for scale in (1, np.float64(1)))
    assert (repr(one), hash(one), one) == (repr(other), hash(other), other)
    assert one != NVFP4(["a"], global_scales={"w": 2})
    assert len({NVFP4(["a"]), NVFP4(["b"]), NVFP4(["a"])}) == 2
