"""What the transforms make is bit for bit what compressed-tensors makes, which vLLM loads."""

import random

import pytest
import reference
import torch

from torch_ros import MXFP8, NVFP4
from torch_ros.copies.buffers import CopyBuffers, Copying
from torch_ros.copies.turns import HostBuffers
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(chance, size):
    """One of any shape and magnitude, with zeros, rows of other sizes, and all signs."""
    shape = chance.randint(1, 48), size * chance.randint(1, 16)
    made = torch.randn(shape)
    exponents = torch.randint(-20, 12, (shape[0], 1)) if chance.random() < 0.5 else torch.zeros(1)
    made *= torch.exp2(exponents + chance.randint(-4, 3))
    if chance.random() < 0.3:
        made[torch.rand(shape) < chance.random()] = 0
    if chance.random() < 0.1:
        made[chance.randrange(shape[0])] = -0.0
    made = made.to(chance.choice(DTYPES))
    return made.t().contiguous().t() if chance.random() < 0.2 else made


def copied(fqn, tensor, transform):
    state = LocalState(local_chunks({fqn: tensor}), {}, {})
    made = CopyBuffers(HostBuffers()).fill(state, Copying((transform,)))
    return {each.fqn: each.chunks[0].tensor for each in made.tensors}


def same(made, expected):
    assert made.keys() == expected.keys()
    for name, one in expected.items():
        assert (made[name].dtype, made[name].shape) == (one.dtype, one.shape), name
        assert torch.equal(made[name].view(torch.uint8), one.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("kind", "transform", "size"),
    [("MXFP8", MXFP8(["*"]), 32), ("NVFP4A16", NVFP4(["*"]), 16)],
    ids=["MXFP8", "NVFP4"],
)
def test_a_thousand_matrices_have_the_same_bits_and_names(kind, transform, size):
    chance = random.Random(7)
    torch.manual_seed(7)
    for _ in range(1000):
        tensor = matrix(chance, size)
        same(copied("weight", tensor, transform), reference.compressed(kind, tensor))


def test_by_a_global_scale_that_is_told_they_are_the_same_too():
    chance = random.Random(8)
    torch.manual_seed(8)
    for _ in range(200):
        tensor, scale = matrix(chance, 16), 2 ** chance.uniform(-20, 20)
        made = copied("weight", tensor, NVFP4(["*"], global_scales={"weight": scale}))
        same(made, reference.compressed("NVFP4A16", tensor, torch.tensor([scale])))


def test_the_global_scale_of_several_is_that_of_the_largest():
    tensors = {f"{name}_proj.weight": 9 * torch.randn(3, 32) for name in "qkvo"}
    recipe = NVFP4.fitted(tensors, ["*"])
    *fused, alone = tensors.values()
    expected = [reference.global_scale(*fused).item()] * 3 + [reference.global_scale(alone).item()]
    assert list(recipe.global_scales.values()) == [
        expected[list(tensors).index(fqn)] for fqn in recipe.global_scales
    ]


@pytest.mark.parametrize(("kind", "columns"), [("MXFP8", 40), ("NVFP4A16", 40), ("NVFP4A16", 8)])
def test_rows_of_no_whole_blocks_are_an_error_there_too(kind, columns):
    with pytest.raises((ValueError, RuntimeError)):
        reference.compressed(kind, torch.ones(2, columns))
