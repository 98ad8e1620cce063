"""Which tensors land in place, which the engine loads, and which nobody brings."""

import gc

import pytest
import torch
from torch import nn
from toys import OLD, contents_of, weights_of

from torch_ros.integrations.landing_plan import (
    Geometry,
    Obstacle,
    changed,
    misplaced,
    missing,
    plan_landings,
    state_of,
)
from torch_ros.integrations.recording import record


class Layer(nn.Module):
    """Two tensors in one parameter, as q and k are in qkv."""

    def __init__(self, rows=4):
        super().__init__()
        self.fused = nn.Parameter(torch.full((2 * rows, 3), OLD), requires_grad=False)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.full((3,), OLD), requires_grad=False)


class Engine(nn.Module):
    def __init__(self, load=None, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.load = load or (lambda engine, fqn, target, weight: target.copy_(weight))

    def load_weights(self, weights):
        for fqn, weight in weights:
            layer, name = fqn.split(".")
            layer = self.layers[int(layer)]
            target = layer.norm.weight
            if name != "norm":
                target = layer.fused.data.narrow(0, {"q": 0, "k": 4}[name], 4)
            self.load(self, fqn, target, weight)


def weights(layers=2):
    shapes = {"q": (4, 3), "k": (4, 3), "norm": (3,)}
    every = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    return weights_of(**every)


def recorded(engine, version=None):
    return record(engine, contents_of(weights() if version is None else version))


def planned(engine, obstacles=None, version=None):
    return plan_landings(recorded(engine, version), obstacles or {})


def test_all_lands_where_nothing_speaks_against_it():
    plan = planned(Engine())
    assert sorted(plan.direct) == sorted(weights())
    assert plan.direct_bytes == 4 * sum(weight.numel() for weight in weights().values())
    assert not plan.staged
    assert not plan.provable


def test_a_module_with_one_staged_tensor_is_staged_whole():
    version = weights() | weights_of(torch.bfloat16, **{"0.k": (4, 3)})
    plan = planned(Engine(), version=version)
    assert list(plan.staged) == ["0.q", "0.k"]
    assert "cast from torch.bfloat16" in plan.staged["0.k"]
    assert "with '0.k'" in plan.staged["0.q"]
    assert list(plan.direct) == ["0.norm", "1.q", "1.k", "1.norm"]


def test_a_tensor_in_several_modules_stages_all_of_them():
    def load(engine, fqn, target, weight):
        if fqn == "0.k":  # a part of it goes to the other layer
            engine.layers[1].fused.data[4:6].copy_(weight[2:])
            target, weight = target[:2], weight[:2]
        target.copy_(weight)

    version = {fqn: one for fqn, one in weights().items() if fqn != "1.k"}
    plan = planned(Engine(load), {"layers.0.fused": Obstacle("packed")}, version)
    assert list(plan.direct) == ["0.norm", "1.norm"]
    assert set(plan.staged) == {"0.q", "0.k", "1.q"}


def test_tensors_of_one_module_are_loaded_one_after_the_other():
    engine = Engine()
    order = ["0.q", "1.q", "0.norm", "0.k", "1.norm", "1.k"]
    obstacles = {name: Obstacle("asked for") for name in state_of(engine)}
    version = {fqn: weights()[fqn] for fqn in order}
    staged = list(planned(engine, obstacles, version).staged)
    assert staged == ["0.q", "0.k", "1.q", "1.k", "0.norm", "1.norm"]


def test_a_proof_brings_back_those_that_nothing_else_keeps():
    engine = Engine()
    obstacles = {
        "layers.0.fused": Obstacle("unknown class", is_provable=True),
        "layers.1.fused": Obstacle("unknown class", is_provable=True),
        "layers.1.norm.weight": Obstacle("packed"),
    }
    plan = planned(engine, obstacles)
    assert list(plan.direct) == ["0.norm"]
    assert sorted(plan.provable) == ["0.k", "0.q", "1.k", "1.q"]
    assert plan.staged["1.norm"] == "packed"


def test_nobody_knows_where_a_tensor_goes_whose_value_is_looked_at():
    def load(engine, fqn, target, weight):
        if fqn == "1.q" and weight[0, 0].item() > 0:
            weight = weight + 1
        target.copy_(weight)

    engine = Engine(load)
    plan = planned(engine)
    assert plan.staged.keys() == weights().keys()
    assert "looks at its values" in plan.staged["1.q"]
    assert "values of '1.q', which may decide" in plan.staged["0.norm"]
    assert plan.modules == {f"layers.{n}{part}" for n in (0, 1) for part in ("", ".norm")}
    assert missing(recorded(engine), state_of(engine)) == {}


def test_a_module_whose_parameter_the_loader_replaces_is_loaded_whole():
    def load(engine, fqn, target, weight):
        if fqn == "1.k":
            engine.layers[1].fused = nn.Parameter(torch.cat([target[:0], weight, weight]))
        else:
            target.copy_(weight)

    plan = planned(Engine(load))
    assert list(plan.direct) == ["0.q", "0.k", "0.norm", "1.norm"]
    assert plan.modules == {"layers.1"}


def test_what_nothing_is_written_to_is_missing():
    engine = Engine()
    version = {fqn: one for fqn, one in weights().items() if fqn not in {"1.k", "0.norm"}}
    lacking = missing(recorded(engine, version), state_of(engine))
    assert lacking == {"layers.0.norm.weight": 3, "layers.1.fused": 12}


def test_a_parameter_in_the_memory_of_a_loaded_one_is_not_missing():
    engine = Engine()
    version = {fqn: one for fqn, one in weights().items() if fqn != "1.norm"}
    recording = recorded(engine, version)
    assert missing(recording, state_of(engine)) == {"layers.1.norm.weight": 3}
    engine.layers[1].norm.weight = engine.layers[0].norm.weight
    assert missing(recording, state_of(engine)) == {}


def test_a_parameter_of_two_names_that_nothing_loads_is_missing():
    engine = Engine()
    engine.layers[1].norm.weight = engine.layers[0].norm.weight
    version = {fqn: one for fqn, one in weights().items() if "norm" not in fqn}
    assert missing(recorded(engine, version), state_of(engine)) == {"layers.0.norm.weight": 3}


def test_a_tensor_that_the_loader_refuses_is_ignored_or_missed():
    def load(engine, fqn, target, weight):
        assert weight.shape == target.shape, "resized"
        target.copy_(weight)

    engine = Engine(load)
    plan = planned(engine, version=weights() | weights_of(**{"2.q": (4, 3)}))
    assert list(plan.ignored) == ["2.q"]
    assert "IndexError" in plan.ignored["2.q"]
    assert len(plan.direct) == 6

    version = weights() | weights_of(**{"0.q": (5, 3)})
    plan = planned(engine, version=version)
    assert "resized" in plan.ignored["0.q"]
    assert missing(recorded(engine, version), state_of(engine)) == {"layers.0.fused": 12}


def test_a_parameter_with_another_geometry_than_at_load_is_an_obstacle():
    engine = Engine()
    loaded = {name: Geometry.of(one) for name, one in state_of(engine).items()}
    assert changed(loaded, state_of(engine)) == {}
    first, second = engine.layers
    first.fused = nn.Parameter(first.fused.data.t().contiguous().t(), requires_grad=False)
    first.norm.weight.data = torch.empty(0)
    second.fused.data = second.fused.data.bfloat16()
    del second.norm.weight
    found = changed(loaded, state_of(engine))
    assert found.keys() == loaded.keys()
    assert "strides [1, 8], was" in found["layers.0.fused"].reason
    assert "is gone" in found["layers.1.norm.weight"].reason
    assert not any(one.is_provable for one in found.values())


# -- proof


def proof(engine, version, spoil):
    landings = recorded(engine, version).landings
    engine.load_weights(iter(version.items()))
    spoil(engine)
    return misplaced(landings, state_of(engine), version.items())


def test_a_loaded_version_proves_its_landings():
    version = weights()
    version["0.q"][0, 0], version["0.k"][0, 1] = torch.nan, -0.0
    assert proof(Engine(), version, lambda engine: None) == {}


def test_halves_that_the_engine_swaps_are_misplaced():
    def swap(engine):
        fused = engine.layers[1].fused.data
        fused.copy_(torch.cat([fused[4:], fused[:4]]))

    assert proof(Engine(), weights(), swap).keys() == {"1.q", "1.k"}


@pytest.mark.parametrize("spoil", [lambda f: f[0, 0].neg_(), lambda f: f[7, 2].fill_(0)])
def test_one_element_that_differs_in_one_bit_is_seen(spoil):
    version = weights()
    version["0.k"][3, 2] = -0.0
    found = proof(Engine(), version, lambda engine: spoil(engine.layers[0].fused.data))
    assert len(found) == 1


def test_equal_elements_prove_nothing():
    version = weights() | {"0.norm": torch.ones(3)}
    assert "which shows nothing" in proof(Engine(), version, lambda e: None)["0.norm"]


def test_the_garbage_collector_rests_while_thousands_of_names_are_planned():
    engine, runs = Engine(layers=1000), []
    recording = recorded(engine, weights(1000))
    gc.collect()
    gc.callbacks.append(note := lambda *_: runs.append(1))
    try:
        plan = plan_landings(recording, {})
        assert not runs
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(plan.direct) == 3000
