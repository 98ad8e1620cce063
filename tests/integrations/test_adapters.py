"""LoRA adapters are published under the names that PEFT saves, and read as they were."""

import json
import uuid

import pytest
import torch
from lora import Adapted, config
from torch import nn

import torch_ros
from torch_ros.errors import ManifestMismatch, NotSupported, UsageError, VersionNotFound
from torch_ros.integrations.adapters import (
    BASE,
    CONFIG,
    adapter_tensors,
    publish_adapter,
    read_adapter,
    require_ranks,
)

# The names in adapter_model.safetensors that PEFT 0.21.2 writes for such a model.
SAVED = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 16),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (16, 4),
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": (4, 24),
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": (16, 4),
}


class Model(nn.Module):
    """A layer as transformers names it."""

    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"self_attn": nn.ModuleDict(), "mlp": nn.ModuleDict()})
        layer["self_attn"]["q_proj"] = nn.Linear(16, 16, bias=False)
        layer["mlp"]["down_proj"] = nn.Linear(24, 16, bias=False)
        self.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})


def adapted(name="default", **more):
    made = Adapted(Model())
    made.add(name, config(["q_proj", "down_proj"], **more))
    made.activate(name)
    made.step(name, 1)
    return made


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.fixture
def opened():
    endpoint, handles = f"memory://{uuid.uuid4().hex}", []

    def open_handle(model="code", **options):
        handles.append(torch_ros.open(model, endpoint=endpoint, timeout_s=20, **options))
        return handles[-1]

    yield open_handle
    for handle in handles:
        handle.close(linger_s=0)


def test_names_are_those_that_peft_saves():
    tensors = adapter_tensors(adapted())
    assert shapes(tensors) == SAVED


def test_the_tensors_are_the_models_own():
    model = adapted()
    name, tensor = next(iter(adapter_tensors(model).items()))
    model.step("default", 2)
    again = adapter_tensors(model)[name]
    assert tensor.data_ptr() == again.data_ptr()
    assert torch.equal(tensor, again)


def test_each_of_several_adapters_is_its_own():
    model = adapted("code")
    model.add("math", config(["q_proj"], rank=2))
    both = adapter_tensors(model, "code"), adapter_tensors(model, "math")
    assert shapes(both[0]) == SAVED
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    expected = {f"{q_proj}.lora_A.weight": (2, 16), f"{q_proj}.lora_B.weight": (16, 2)}
    assert shapes(both[1]) == expected


def test_a_model_of_transformers_has_the_names_of_pefts_own():
    """It has adapters of PEFT without a PeftModel around it, and a method that names them."""
    inner, wrapped = adapted(), adapted()
    model = inner.base_model.model
    model.peft_config = inner.peft_config
    model.active_adapters = lambda: ["default"]
    assert shapes(adapter_tensors(model)) == shapes(adapter_tensors(wrapped))


def test_a_compiled_model_has_the_same_names():
    assert shapes(adapter_tensors(torch.compile(adapted()))) == SAVED


REFUSED = [
    {"use_dora": True},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [3]},
    {"peft_type": "IA3"},
]


@pytest.mark.parametrize("more", REFUSED, ids=lambda more: next(iter(more)))
def test_an_adapter_that_is_more_than_its_matrices_is_refused(opened, more):
    handle = opened()
    with pytest.raises(NotSupported, match=f"{next(iter(more))}="):
        publish_adapter(handle, 1, adapted(**more))
    assert handle.version is None


def test_a_tensor_of_another_kind_is_refused_by_name():
    model = adapted()
    layer = model.base_model.model.model["layers"][0]["self_attn"]["q_proj"]
    layer.lora_magnitude_vector = nn.ParameterDict({"default": nn.Parameter(torch.ones(16))})
    with pytest.raises(NotSupported, match="lora_magnitude_vector"):
        adapter_tensors(model)


def test_several_active_adapters_are_refused():
    model = adapted("code")
    model.add("math", config(["q_proj"]))
    model.active_adapters = ["code", "math"]
    with pytest.raises(NotSupported, match="code, math are active at once"):
        adapter_tensors(model, "code")


def a_part(model):
    model.base_model.model.model["layers"][0]["mlp"]["down_proj"]._tp_info = object()


def the_whole(model):
    model.base_model.model._tp_size = 2


@pytest.mark.parametrize(
    ("split", "named"),
    [(a_part, "mlp.down_proj"), (the_whole, "base_model.model")],
    ids=["as PEFT notes it", "as transformers notes it"],
)
def test_a_model_that_transformers_has_split_is_refused_by_name(split, named):
    """A plain tensor may then be a part of a matrix."""
    model = adapted()
    split(model)
    with pytest.raises(NotSupported, match=f"tp_plan of transformers, which splits .*{named}"):
        adapter_tensors(model)


def test_an_adapter_has_the_name_of_a_module():
    model = adapted("math")
    model.add("model", config(["q_proj"]))
    assert shapes(adapter_tensors(model, "model")).keys() < SAVED.keys()


def test_an_adapter_that_is_not_there_is_refused_by_name():
    with pytest.raises(UsageError, match=r"'law'.*found \['code'\]"):
        adapter_tensors(adapted("code"), "law")
    with pytest.raises(UsageError, match="no adapters of PEFT"):
        adapter_tensors(Model())


def test_what_is_published_is_read(opened):
    trainer, reader, base = opened(), opened(), opened("policy")
    base.publish_copy(7, {"w": torch.ones(3)})
    model = adapted()
    expected = {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}
    assert publish_adapter(trainer, 1, model, base=base.contents(7))
    model.step("default", 2)  # the next step, at once
    found = read_adapter(reader, reader.contents(1))
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())
    assert found.config["r"] == 4
    assert found.config["target_modules"] == ["down_proj", "q_proj"]
    assert found.config["inference_mode"] is True
    assert (found.base.version, found.base.uid) == (7, base.contents(7).uid)
    publish_adapter(trainer, 2, model)
    assert read_adapter(reader, reader.contents(2)).base is None


def test_a_rank_for_some_modules_is_pefts(opened):
    """The first pattern that is the end of a module's name counts."""
    trainer, reader = opened(), opened()
    pattern = {"self_attn.q_proj": 2, "proj": 3, "q_proj": 5}
    model = adapted(rank_pattern=pattern)
    with pytest.raises(ManifestMismatch, match=r"rank 2 for .*q_proj'.*'A': 4"):
        publish_adapter(trainer, 1, model)
    layer = model.base_model.model.model["layers"][0]["self_attn"]["q_proj"]
    layer.add("default", 2, 1.0)
    publish_adapter(trainer, 1, model)
    read_adapter(reader, reader.contents(1))


def written(value):
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


Q = "base_model.model.q_proj"
GOOD = {
    f"{Q}.lora_A.weight": torch.ones(4, 16),
    f"{Q}.lora_B.weight": torch.ones(16, 4),
    CONFIG: written({"r": 4}),
    BASE: written(None),
}
NAN = torch.ones(4, 16)
NAN[3, 3] = torch.nan
BAD = {
    "no adapter": ({CONFIG: None}, CONFIG),
    "no base": ({BASE: None}, BASE),
    "no JSON": ({CONFIG: torch.zeros(9, dtype=torch.uint8)}, "as PEFT writes it"),
    "no rank": ({CONFIG: written({"r": 0})}, "as PEFT writes it"),
    "large": ({CONFIG: torch.zeros((1 << 20) + 1, dtype=torch.uint8)}, "of at most 1048576 bytes"),
    "another base": ({BASE: written({"version": 1})}, "as PEFT writes it"),
    "another rank": ({CONFIG: written({"r": 8})}, "rank 8"),
    "two ranks": ({f"{Q}.lora_B.weight": torch.ones(16, 3)}, "of one rank"),
    "one matrix": ({f"{Q}.lora_B.weight": None}, "of one rank"),
    "no matrix": ({"q_proj.weight": torch.ones(4, 4)}, "'q_proj.weight'"),
    "a NaN": ({f"{Q}.lora_A.weight": NAN}, "a NaN"),
}


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD)
def test_a_version_that_is_no_good_adapter_is_refused(opened, change, said):
    trainer, reader = opened(), opened()
    tensors = {name: tensor for name, tensor in (GOOD | change).items() if tensor is not None}
    trainer.publish_copy(1, tensors)
    with pytest.raises(ManifestMismatch, match=said):
        read_adapter(reader, reader.contents(1))


EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def experts(inner, outer, other=4, **more):
    """An adapter of three experts' parameters, and of a layer beside them."""
    both = (f"{EXPERTS}.base_layer", inner), (EXPERTS, outer), (Q, other)
    matrices = {f"{one}.lora_A.weight": (rank, 16) for one, rank in both}
    matrices |= {f"{one}.lora_B.weight": (16, rank) for one, rank in both}
    targets = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    return matrices, {"r": 4, **targets, **more}


PATTERN = {"rank_pattern": {"down_proj": 2}}  # of the parameter, whose module has another name


@pytest.mark.parametrize(
    ("inner", "outer", "more"), [(12, 12, {}), (12, 6, PATTERN), (6, 12, PATTERN)]
)
def test_experts_have_their_matrices_side_by_side(inner, outer, more):
    """Matrices have the rank of some parameter; no name says of which."""
    require_ranks("it", *experts(inner, outer, **more))


@pytest.mark.parametrize(
    ("inner", "outer", "other", "more", "said"),
    [
        (12, 6, 4, {}, "rank 4 for .*experts'"),
        (12, 3, 4, PATTERN, "rank 2 or 4 for .*experts'"),
        (12, 12, 12, {}, "rank 4 for .*q_proj'"),  # which is beside the parameters
    ],
)
def test_matrices_that_are_not_side_by_side_are_refused(inner, outer, other, more, said):
    with pytest.raises(ManifestMismatch, match=said):
        require_ranks("it", *experts(inner, outer, other, **more))


@pytest.mark.parametrize(
    "pattern", [{"q_proj(": 4}, {"q_proj": "many"}, {"q_proj": None}, {"q_proj": 0}, ["q_proj"]]
)
def test_a_pattern_that_pefts_own_would_not_be_is_refused(pattern):
    with pytest.raises(ManifestMismatch, match=r"a rank_pattern for .* as PEFT writes it"):
        require_ranks("it", *experts(4, 4, rank_pattern=pattern, target_parameters=None))


@pytest.mark.parametrize("case", ["no rank", "another base", "another rank", "no matrix"])
def test_no_matrix_is_read_of_a_version_that_is_refused(opened, case):
    trainer, reader, read = opened(), opened(), []
    trainer.publish_copy(1, GOOD | BAD[case][0])

    class Spy:
        model = reader.model

        def stream(self, version, names, **options):
            read.extend(names)
            return reader.stream(version, names, **options)

    with pytest.raises(ManifestMismatch):
        read_adapter(Spy(), reader.contents(1))
    assert sorted(read) == [CONFIG, BASE]


def test_a_number_that_is_published_again_is_another_content(opened):
    first, reader = opened(), opened()
    first.publish_copy(1, GOOD)
    contents = reader.contents(1)
    first.close()
    opened(run="new").publish_copy(1, GOOD)
    with pytest.raises(VersionNotFound, match="published again"):
        read_adapter(reader, contents)


def test_two_ranks_of_fsdp2_publish_their_shards(jobs):
    jobs.run_ranks(2, "adapter_of_shards")
