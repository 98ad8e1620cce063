"""Engines with loaders like those of vLLM and SGLang, and the proof that a recording is theirs."""

import torch
from torch import nn

from torch_ros.integrations.recording import record

OLD = 7.0  # no weight has this value


class Toy(nn.Module):
    """Parameters of these shapes; `load(toy, fqn, weight)` puts one tensor in."""

    def __init__(self, load, parameters, dtype=torch.float32, device=None):
        super().__init__()
        self.load = load
        for name, shape in parameters.items():
            tensor = torch.full(shape, OLD, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights):
        for fqn, weight in weights:
            self.load(self, fqn, weight)


def contents_of(weights):
    return {fqn: (weight.dtype, tuple(weight.shape)) for fqn, weight in weights.items()}


def weights_of(dtype=torch.float32, **shapes):
    return {fqn: torch.randn(shape).to(dtype) for fqn, shape in shapes.items()}


def other(weight, is_staged):
    """Other values in each element, unless it is staged."""
    return weight.clone() if is_staged else weight + 1


def named_tensors(engine):
    return (*engine.named_parameters(), *engine.named_buffers())


def state(engine):
    return {name: tensor.detach().clone() for name, tensor in named_tensors(engine)}


def proven(engine, weights, load_weights=None):
    """A recording that agrees with what the engine's loader does with these weights."""
    before, ids = state(engine), {name: id(p) for name, p in engine.named_parameters()}
    recording = record(engine, contents_of(weights), load_weights)
    assert {name: id(p) for name, p in engine.named_parameters()} == ids
    for name, now in state(engine).items():
        assert torch.equal(now, before[name]), f"recording wrote to {name}"
    whole = [*recording.landings, *recording.staged, *recording.unused]
    assert sorted(whole) == sorted(weights)

    own = {box.parameter for one in recording.landings.values() for box in one.boxes}
    own |= {name for name, _ in engine.named_parameters()}  # a buffer may be a view of one
    landed = {name: tensor.clone() for name, tensor in before.items()}
    is_landed = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in before.items()}
    for fqn, landing in recording.landings.items():
        seen = torch.zeros(landing.shape, dtype=torch.bool)
        for box in landing.boxes:
            part = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))
            assert not seen[part].any(), "boxes of one tensor overlap"
            seen[part] = True
            marks = box.view(is_landed[box.parameter])
            assert not marks.any(), "two boxes land on one element"
            marks.fill_(True)
        for offsets, view in landing.chunks(landed):
            ends = zip(offsets, view.shape, strict=True)
            view.copy_(weights[fqn][tuple(slice(at, at + n) for at, n in ends)])

    good = {fqn: w.clone() for fqn, w in weights.items() if fqn not in recording.failed}
    others = {fqn: other(w, fqn in recording.staged) for fqn, w in good.items()}
    load = load_weights or engine.load_weights
    load(iter(others.items()))
    of_others = state(engine)
    for name, tensor in named_tensors(engine):
        tensor.data.copy_(before[name])
    load(iter(good.items()))
    for name, real in state(engine).items():
        if name in recording.replaced or name not in own:
            continue
        assert torch.equal(landed[name][is_landed[name]], real[is_landed[name]]), name
        follows = real != of_others[name]  # what depends on tensors that are not staged
        assert not (follows & ~is_landed[name]).any(), f"{name} depends on more than what landed"
        rest = ~is_landed[name]
        changed = int((real != before[name])[rest].sum())
        if not recording.staged:
            assert changed <= recording.filled.get(name, 0), f"{name} changes without a word"
            left = recording.unwritten.get(name, 0) + recording.filled.get(name, 0)
            assert left == int(rest.sum()) or name in recording.buffers
    return recording
