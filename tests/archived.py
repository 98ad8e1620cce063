"""Tensors of all kinds, and whether they came back: for files and buckets."""

import torch

from torch_ros.checkpoints.framing import NAMES


def everything(**more):
    """A tensor of each dtype that safetensors has; empty, 0-d, and of odd sizes; and more."""
    torch.manual_seed(0)
    raw = torch.randint(0, 2, (24, 17, 16), dtype=torch.uint8)  # of bools, bits that are one
    tensors = {str(dtype): raw.view(-1)[: 16 * 21].view(dtype) for dtype in NAMES}
    more |= {
        "empty": torch.empty(0, 7),
        "0-d": torch.tensor(3.5),
        "one byte": raw.view(-1)[:1],
        "nan": torch.tensor([float("nan"), -0.0, 0.0]),
        "matrix": torch.randn(24, 30).to(torch.bfloat16),
    }
    return {name: tensor.clone() for name, tensor in (tensors | more).items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert not tensor.numel() or torch.equal(bits(found[name]), bits(tensor)), name
