"""A tensor of which a process has certain boxes: which fit together, and what they are not."""

import pickle
import re

import pytest
import torch

from torch_ros import Chunked
from torch_ros.errors import UsageError
from torch_ros.weights.local import build, local_chunks


def test_each_box_is_a_view_of_the_memory_that_it_has():
    fused = torch.arange(60.0).reshape(6, 10)
    (local,) = local_chunks(
        {
            "w": Chunked(
                (4, 6), torch.float32, {(0, 0): fused[:2, 1:7], (2, 3): fused[2:, :2].t()[:, :3]}
            )
        }
    )
    assert (local.fqn, local.dtype, local.shape, local.spread) == (
        "w",
        torch.float32,
        (4, 6),
        False,
    )
    first, second = local.chunks
    assert (first.offsets, second.offsets) == ((0, 0), (2, 3))
    assert first.tensor.data_ptr() == fused[0, 1:].data_ptr()
    assert torch.equal(first.tensor, fused[:2, 1:7])
    assert (second.tensor.shape, second.tensor.stride()) == ((2, 3), (1, 10))


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((), {(): torch.tensor(3.0)}),
        ((), {}),
        ((3, 4), {}),
        ((0, 4), {(0, 0): torch.zeros(0, 4)}),
        ((3, 4), {(3, 0): torch.zeros(0, 4), (1, 0): torch.zeros(2, 4)}),
        ((3, 4), {(0, 0): torch.zeros(3, 2).requires_grad_(), (0, 2): torch.zeros(1).expand(3, 2)}),
    ],
)
def test_a_process_may_have_any_boxes_or_none(shape, chunks):
    (local,) = local_chunks({"w": Chunked(shape, torch.float32, chunks)})
    assert local.shape == shape
    assert [c.offsets for c in local.chunks] == [at for at, box in chunks.items() if box.numel()]
    assert not any(chunk.tensor.requires_grad for chunk in local.chunks)
    layout, memory = build([local], {})
    assert len(layout.tensors) == 1
    assert len(memory) == len(local.chunks)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128, torch.float8_e4m3fn, torch.int64])
def test_a_box_may_be_of_any_dtype(dtype):
    box = torch.zeros(2, 3).to(dtype)
    whole = Chunked((4, 3), dtype, {(2, 0): box})
    (local,) = local_chunks({"w": whole})
    assert (whole.dtype, local.dtype, local.chunks[0].tensor.dtype) == (dtype, dtype, dtype)


base = torch.zeros(64)
rows = base.view(8, 8)
REFUSED = {
    "the box of shape [3, 4] at [2, 0] is not inside shape [4, 4]": {(2, 0): torch.zeros(3, 4)},
    "the box of shape [4] at [0] is not inside shape [4, 4]": {(0,): torch.zeros(4)},
    "the box of shape [4] at [0, 0] is not inside": {(0, 0): torch.zeros(4)},
    "the box of shape [1, 1] at [0, 0] is torch.float64: expected torch.float32": {
        (0, 0): torch.zeros(1, 1, dtype=torch.float64)
    },
    "the box of shape [2, 4] at [0, 0] and the box of shape [2, 1] at [1, 3] overlap": {
        (1, 3): torch.zeros(2, 1),
        (2, 0): torch.zeros(1, 2),
        (0, 0): torch.zeros(2, 4),
    },
    "the box of shape [1, 4] at [0, 0] and the box of shape [1, 4] at [1, 0] share memory": {
        (0, 0): base[:4].view(1, 4),
        (1, 0): base[3:7].view(1, 4),
    },
    "the box of shape [4, 1] at [0, 0] and the box of shape [1, 2] at [0, 2] share memory": {
        (0, 0): rows[:4, 1:2],
        (0, 2): rows[2:3, :2],
    },
    "the box at [0, 0] is not initialised yet": {(0, 0): torch.nn.UninitializedParameter()},
    "the box at [0, 0] is not dense": {(0, 0): torch.zeros(2, 2).to_sparse()},
    "the box at [0, 0] is a Chunked without memory": {(0, 0): Chunked((1, 1), torch.float32, {})},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_boxes_that_do_not_fit_are_refused_by_name(reason):
    chunked = Chunked((4, 4), torch.float32, REFUSED[reason])
    with pytest.raises(UsageError, match=r"tensor 'layer\.w': .*" + re.escape(reason)):
        local_chunks({"layer.w": chunked})


def test_boxes_side_by_side_in_one_buffer_share_no_memory():
    columns = {(0, column): rows[:, column : column + 1] for column in range(8)}
    interleaved = {(4, 0): rows[::2], (0, 0): rows[1::2]}
    for chunks in (columns, interleaved):
        (local,) = local_chunks({"w": Chunked((8, 8), torch.float32, chunks)})
        assert len(local.chunks) == len(chunks)


@pytest.mark.parametrize(
    ("shape", "dtype", "chunks", "reason"),
    [
        ((2, -1), torch.float32, {}, "shape=(2, -1): expected whole numbers"),
        (2, torch.float32, {}, "shape=2: expected whole numbers"),
        ((2**63,), torch.float32, {}, "no tensor can have shape=(9223372036854775808,)"),
        ((2**40, 2**40), torch.float32, {}, "no tensor can have shape=(1099511627776, 10995"),
        ((2,), "float32", {}, "dtype='float32': expected a torch.dtype"),
        ((2,), torch.float32, [torch.zeros(2)], "found a list, expected a mapping of offsets"),
        ((2,), torch.float32, {0: torch.zeros(2)}, "found 0: Tensor among its boxes"),
        ((2,), torch.float32, {(-1,): torch.zeros(2)}, "found (-1,): Tensor"),
        ((2,), torch.float32, {(True,): torch.zeros(1)}, "found (True,): Tensor"),
        ((2,), torch.float32, {(0,): [0.0, 0.0]}, "found (0,): list"),
    ],
)
def test_a_mistake_is_named_where_it_is_made(shape, dtype, chunks, reason):
    with pytest.raises(UsageError, match=re.escape(reason)):
        Chunked(shape, dtype, chunks)


def test_it_says_where_boxes_are_and_is_nothing_to_compute_with():
    whole = Chunked([4, 3], torch.bfloat16, {(1, 0): torch.zeros(2, 3, dtype=torch.bfloat16)})
    assert (whole.shape, whole.dtype, whole.nbytes) == ((4, 3), torch.bfloat16, 24)
    assert repr(whole) == "Chunked([4, 3], torch.bfloat16, boxes: [1, 0] + [2, 3])"
    with pytest.raises(UsageError, match="only says where the boxes of a tensor are"):
        whole + 1
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(whole)
    with pytest.raises(TypeError):
        whole.chunks[0, 0] = torch.zeros(1, 3)
