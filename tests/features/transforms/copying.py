"""Copies that transforms make, without a replica around them."""

import math

import pytest
import torch

from torch_ros import Chunked
from torch_ros.copies.buffers import CopyBuffers, Copying
from torch_ros.copies.turns import HostBuffers
from torch_ros.errors import UsageError
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks

NOT_FINITE = [
    (torch.bfloat16, math.nan),
    (torch.float16, -math.inf),
    (torch.float32, math.inf),
    (torch.float64, 1e300),  # as float32
]


def copied(tensors, *transforms):
    """The chunks of a copy by name, and the state that they are of."""
    state = LocalState(local_chunks(tensors), {}, {})
    made = CopyBuffers(HostBuffers()).fill(state, Copying(transforms))
    return {tensor.fqn: tensor for tensor in made.tensors}


def whole(made):
    """The tensors of a copy that is not sharded."""
    found = {}
    for fqn, tensor in made.items():
        if tensor.chunks:
            [chunk] = tensor.chunks
            assert chunk.offsets == (0,) * len(tensor.shape)
            assert chunk.tensor.shape == tensor.shape
            assert chunk.tensor.dtype == tensor.dtype
            found[fqn] = chunk.tensor
        else:
            found[fqn] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return found


def same(one, other):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_same(made, expected):
    assert made.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert same(made[fqn], tensor), fqn


def shard(shape, *boxes, dtype=torch.float32):
    """A shard of a tensor that has these rows and columns of it: from, to, from, to."""
    full = torch.arange(math.prod(shape), dtype=dtype).reshape(shape)
    chunks = {(a, c): full[a:b, c:d].clone() for a, b, c, d in boxes}
    return Chunked(shape, dtype, chunks), full


def refused(tensors, *transforms):
    """The error, before anything is copied."""
    buffers = CopyBuffers(HostBuffers())
    with pytest.raises(UsageError) as error:
        buffers.fill(LocalState(local_chunks(tensors), {}, {}), Copying(transforms))
    assert not buffers._turns
    return str(error.value)
