"""Tiny models, and trainers of them."""

import shutil
from pathlib import Path

import pytest
from rollouts import COMMON, Trainer


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # an engine that starts on a busy machine


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directories of tiny random models, by kind."""
    import torch
    import transformers as hf

    experts = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    configs = {
        "untied": lambda: hf.Qwen3Config(**COMMON, num_hidden_layers=4, tie_word_embeddings=False),
        "tied": lambda: hf.Qwen3Config(**COMMON, num_hidden_layers=4, tie_word_embeddings=True),
        "moe": lambda: hf.Qwen3MoeConfig(
            **COMMON, **experts, num_hidden_layers=2, num_experts=4, moe_intermediate_size=128
        ),
        "biased router": lambda: hf.Glm4MoeConfig(
            **COMMON,
            **experts,
            num_hidden_layers=2,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=128,
            partial_rotary_factor=0.5,
            use_qk_norm=True,
        ),
        "gpt-oss": lambda: hf.GptOssConfig(
            **COMMON
            | {"head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 131072},
            **experts,
            num_hidden_layers=2,
            num_local_experts=4,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
        ),
    }
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
            made[kind] = str(tmp_path_factory.mktemp(kind.replace(" ", "-")))
            model.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture
def place(tiny, tmp_path):
    """Make folders of a model without its weights: `place(kind)`."""

    def make(kind):
        (folder := tmp_path / kind).mkdir(exist_ok=True)
        shutil.copy(Path(tiny(kind)) / "config.json", folder)
        return str(folder)

    return make


@pytest.fixture
def train(etcd_endpoint):
    """Start trainers: `train(path, name)`."""
    made = []

    def start(path, name, **options):
        made.append(Trainer(path, name, etcd_endpoint, **options))
        return made[-1]

    yield start
    for trainer in made:
        trainer.close()
