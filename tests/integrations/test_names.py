"""A live model of transformers under the names that its `save_pretrained` writes."""

import uuid

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ros
from torch_ros.errors import NotSupported
from torch_ros.integrations.names import checkpoint_names

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
KINDS = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 8, "num_experts": 4, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "num_experts_per_tok": 2,
    },
}


def made(kind):
    from transformers import AutoConfig, AutoModelForCausalLM  # a second, once

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | KINDS[kind]))


def written(model, directory):
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind.startswith("qwen3") else pytest.mark.long)
        for kind in KINDS
    ],
)
def test_a_reader_gets_what_save_pretrained_writes(kind, tmp_path):
    model = made(kind)
    files = written(model, tmp_path)
    named = checkpoint_names(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    for name, tensor in named.items():
        boxes = tensor.chunks.values() if isinstance(tensor, torch_ros.Chunked) else [tensor]
        assert {box.untyped_storage().data_ptr() for box in boxes} <= own, name
    endpoint = f"memory://{uuid.uuid4().hex}"
    with (
        torch_ros.open("m", endpoint=endpoint) as trainer,
        torch_ros.open("m", endpoint=endpoint) as rollout,
    ):
        trainer.register(named)
        trainer.publish(1)
        got = {name: torch.empty_like(tensor) for name, tensor in files.items()}
        rollout.register(got)  # all names, none more, of the same shapes and dtypes
        rollout.replicate(1)
    assert all(torch.equal(got[name], files[name]) for name in files)


@pytest.fixture
def moe(tmp_path):
    """A model, and the tensors that it writes."""
    model = made("qwen3_moe")
    return model, written(model, tmp_path)


@pytest.fixture
def two_ranks(moe):
    """A mesh of two ranks, of which this process is the second; made when the model is written."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield DeviceMesh("cpu", [0, 1])
    torch.distributed.destroy_process_group()


def test_a_rank_of_fsdp_shows_the_experts_that_it_has(moe, two_ranks):
    model, files = moe
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            half = parameter.detach().chunk(2)[1] if len(parameter) > 1 else parameter[:0]
            shard = DTensor.from_local(
                half,
                two_ranks,
                [Shard(0)],
                shape=parameter.shape,
                stride=parameter.stride(),
                run_check=False,
            )
            setattr(module, name, torch.nn.Parameter(shard))
    named = checkpoint_names(model)
    assert named.keys() == files.keys()
    experts = {name: tensor for name, tensor in named.items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    for name, tensor in experts.items():
        has = tensor.chunks
        is_mine = int(name.split(".experts.")[1].split(".")[0]) >= 2
        assert list(has) == ([(0, 0)] if is_mine else []), name
        assert tensor.shape == files[name].shape
        assert all(torch.equal(box, files[name]) for box in has.values())
    assert isinstance(named["model.norm.weight"], DTensor)


def test_a_model_that_computes_what_it_writes_is_refused(monkeypatch):
    from transformers import core_model_loading

    convert = core_model_loading.revert_weight_conversion
    monkeypatch.setattr(
        core_model_loading,
        "revert_weight_conversion",
        lambda *both: {name: 2 * tensor for name, tensor in convert(*both).items()},
    )
    with pytest.raises(NotSupported, match=r"checkpoint_names\(Qwen3ForCausalLM\)"):
        checkpoint_names(made("qwen3"))
