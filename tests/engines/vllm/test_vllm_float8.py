"""An engine of float8 weights follows a trainer that quantises what it publishes."""

import pytest
import torch
from rollouts import running_engine

import torch_ros
from torch_ros.integrations.vllm import attach

# As checkpoints have it whose scales are by row: vLLM has no kernel for blocks on CPUs without AMX.
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEME = {
    "targets": ["Linear"],
    "weights": WEIGHTS | {"strategy": "channel", "dynamic": False},
    "input_activations": WEIGHTS | {"strategy": "token", "dynamic": True},
}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": SCHEME},
    "ignore": ["lm_head"],
}
LAYER = "model.layers.3.mlp.down_proj"


@pytest.fixture(scope="module")
def engine(tiny):
    with running_engine(tiny("untied"), hf_overrides={"quantization_config": CONFIG}) as engine:
        yield engine


def in_engine(transfer):
    """A layer computes with these: its weight, transposed, and a scale for each row."""
    layer = transfer.model.get_submodule("model.layers.3.mlp.down_proj")
    bits = layer.weight.data.t().contiguous().view(torch.uint8)
    return bits.tolist(), layer.weight_scale.tolist()


def test_it_loads_float8_weights_and_their_scales_bit_for_bit(engine, train, etcd_endpoint):
    trainer = train(engine.path, "float8")
    options = {"endpoint": etcd_endpoint}
    with (
        attach(engine.llm, model="float8", options=options) as policy,
        torch_ros.open("float8", **options) as reader,
    ):
        answers = []
        for version in (1, 2):
            trainer.publish(version, float8=["*_proj.weight"])
            assert policy.update()
            bits = torch.empty(256, 512, dtype=torch.float8_e4m3fn)
            scales = torch.empty(256, 1)
            reader.read(version, {f"{LAYER}.weight": bits, f"{LAYER}.weight_scale": scales})
            ((weight, scale),) = engine.in_workers(in_engine)
            assert weight == bits.view(torch.uint8).tolist()
            assert scale == scales.tolist()
            answers.append(engine.answers())
            (report,) = engine.reports()
            staged = {why for fqn, why in report.staged.items() if "_proj.weight" in fqn}
            assert "CompressedTensorsLinearMethod may make something else of it" in staged
            assert {f"{LAYER}.weight", f"{LAYER}.weight_scale"} <= report.staged.keys()
            assert "model.norm.weight" in report.direct
        assert answers[0] != answers[1]
