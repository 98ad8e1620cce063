"""Tiny models, and trainers of them."""

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
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = {}

    def make(kind):
        if kind in made:
            return made[kind]
        torch.manual_seed(0)
        tied = kind == "tied"
        if kind == "moe":
            config = Qwen3MoeConfig(
                **COMMON,
                num_hidden_layers=2,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=128,
                tie_word_embeddings=False,
            )
            model = Qwen3MoeForCausalLM(config)
        else:
            config = Qwen3Config(**COMMON, num_hidden_layers=4, tie_word_embeddings=tied)
            model = Qwen3ForCausalLM(config)
        made[kind] = str(tmp_path_factory.mktemp(kind))
        model.save_pretrained(made[kind])
        return made[kind]

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
