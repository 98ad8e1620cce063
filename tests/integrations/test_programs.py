"""Random loaders: all that is recorded as landing is what the loader itself does there."""

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import OLD, proven


def step(tensor, other, pick):  # noqa: PLR0912 (one branch for each way)
    """A tensor made of another in one of the ways that loaders have, or in some they have not."""
    dim = pick(tensor.ndim) if tensor.ndim else 0
    size = tensor.shape[dim] if tensor.ndim else 1
    match pick(20):
        case 0 if tensor.ndim > 1:
            return tensor.transpose(dim, pick(tensor.ndim))
        case 1 if size > 1:
            begin = pick(size)
            return tensor.narrow(dim, begin, 1 + pick(size - begin))
        case 2:
            return tensor.reshape(-1)
        case 3 if size % 2 == 0 and tensor.ndim:
            return tensor.unflatten(dim, (2, -1))
        case 4 if size > 1:
            return tensor.chunk(2, dim)[pick(2)]
        case 5 if tensor.ndim and other.shape == tensor.shape:
            return torch.cat([tensor, other], dim)
        case 6 if other.shape == tensor.shape and tensor.ndim < 4:
            return torch.stack([other, tensor], dim)
        case 7:
            return tensor.clone()
        case 8:
            return tensor.contiguous()
        case 9 if size > 1:
            return tensor[(*[slice(None)] * dim, slice(pick(2), None, 2))]
        case 10 if tensor.ndim:
            return tensor.flip(dim)
        case 11:
            return tensor + 1
        case 12:
            return tensor.to(torch.float64).to(torch.float32)
        case 13:
            return tensor.mul_(2) if tensor.is_contiguous() else tensor
        case 14 if tensor.ndim:
            padded = torch.zeros([n + 1 for n in tensor.shape])
            part = padded
            for along, n in enumerate(tensor.shape):
                part = part.narrow(along, pick(2), n)
            part.copy_(tensor)
            return padded
        case 15 if tensor.ndim > 1:
            return tensor.diagonal()
        case 16 if size > 1:
            return tensor.unfold(dim, 2, 1)
        case 17 if tensor.ndim:
            order = torch.arange(size).roll(1)
            return tensor.index_select(dim, order)
        case 18:
            kept = tensor.clone()
            if kept.ndim and other.shape == kept[:1].shape:
                kept[:1] = other
            elif kept.ndim:
                kept[:1] = 0
            return kept
        case 19 if tensor.ndim and tensor.ndim < 4:
            return tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


def put(param, tensor, pick):
    """Write a tensor to a parameter that has room for it."""
    part = param.data
    for dim, size in enumerate(tensor.shape):
        part = part.narrow(dim, pick(part.shape[dim] - size + 1), size)
    match pick(8):
        case 0:
            torch._foreach_copy_([part], [tensor])
        case 1:
            part.fill_(0)
        case 2:
            part.copy_(tensor)
            part[:1].neg_() if part.ndim else part.neg_()
        case 3:
            part.add_(tensor)
        case _:
            part.copy_(tensor)


class Program(nn.Module):
    """A loader that does what lists of numbers say, one list for a step."""

    def __init__(self, steps, weights):
        super().__init__()
        self.steps, self.shapes = steps, []
        self.load_weights((fqn, weight.clone()) for fqn, weight in weights.items())
        for number, shape in enumerate(self.shapes):
            param = torch.full([size + number % 2 for size in shape], OLD)
            if number % 3 == 2 and param.ndim > 1:
                param = param.mT.contiguous().mT
            self.register_parameter(f"p{number}", nn.Parameter(param, requires_grad=False))

    def load_weights(self, named):
        pool = [tensor for _, tensor in named]
        params = dict(self.named_parameters())  # none at first: a run for the shapes
        for choices in self.steps:
            left = iter(choices)
            pick = partial(choose, left)
            tensor = step(pool[-1 - pick(len(pool))], pool[pick(len(pool))], pick)
            if tensor.numel() > 400 or tensor.ndim > 5:
                continue
            pool.append(tensor)
            if pick(3) == 0:
                continue
            if not params:
                self.shapes.append(tuple(tensor.shape))
            else:
                put(choice(params, tensor, pick), tensor, pick)


def choose(left, count):
    return next(left, 0) % count


def choice(params, tensor, pick):
    fit = [param for param in params.values() if fits(param, tensor)]
    return fit[pick(len(fit))]


def fits(param, tensor):
    both = zip(param.shape, tensor.shape, strict=False)
    return param.ndim == tensor.ndim and all(room >= size for room, size in both)


STEPS = st.lists(st.lists(st.integers(0, 2**16), min_size=4, max_size=10), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_what_lands_is_what_the_loader_does(steps):
    weights = {
        "a": torch.randn(4, 6),
        "b": torch.randn(4, 6),
        "c": torch.randn(6),
        "d": torch.randn(2, 3, 4),
    }
    recording = proven(Program(steps, weights), weights)
    assert not recording.failed
    assert not any("values" in reason for reason in recording.staged.values())
