"""An engine with an EAGLE head: a model of its own, whose latest version each update brings."""

from contextlib import ExitStack

import pytest
import torch
from drafted import accepted, folder, head, of_llama, weights
from rollouts import running_engine

import torch_ros
from torch_ros.errors import ManifestMismatch, NotSupported
from torch_ros.integrations.vllm import attach


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target, heads = (
        folder(tmp_path_factory.mktemp(name), "LlamaForCausalLM", "llama", num_hidden_layers=count)
        for name, count in (("target", 2), ("head", 1))
    )
    spec = {"method": "eagle", "model": heads, "num_speculative_tokens": 1}
    with running_engine(target, speculative_config=spec, disable_log_stats=False) as engine:
        yield engine


def follow(engine, endpoint, draft_model, draft="follow"):
    place = {"model": "llama", "replica": "vllm", "options": {"endpoint": endpoint}}
    return attach(engine.llm, **place, draft=draft, draft_model=draft_model)


@pytest.mark.parametrize("draft", [None, "follow"])
def test_a_head_is_no_part_of_a_version_and_has_a_name_of_its_own(engine, etcd_endpoint, draft):
    with pytest.raises(NotSupported, match="EagleLlamaForCausalLM.*draft_model=NAME"):
        follow(engine, etcd_endpoint, None, draft)


def test_a_head_comes_with_each_version(engine, etcd_endpoint):
    with ExitStack() as stack:
        opened = lambda name: stack.enter_context(
            torch_ros.open(name, endpoint=etcd_endpoint, linger_s=0)
        )
        trainer, heads = opened("llama"), opened("llama-head")
        policy = stack.enter_context(follow(engine, etcd_endpoint, "llama-head"))
        for version in range(1, 11):
            heads.publish_copy(version + 5, head(version))
            trainer.publish_copy(version, of_llama(weights(version)))
            assert policy.update()
            assert accepted(engine, version) >= 0.99
        trainer.publish_copy(11, of_llama(weights(11)))
        assert policy.update()  # with the head that there is
        assert accepted(engine, 11) < 0.5

        bad = {"": head(12) | {"embed_tokens.weight": torch.ones(512, 128)}, "fc": head(12)}
        del bad["fc"]["fc.weight"]
        trainer.publish_copy(12, of_llama(weights(12)))
        for number, tensors in enumerate(bad.values(), start=20):
            heads.publish_copy(number, tensors)
            with pytest.raises(ManifestMismatch, match="embed_tokens|fc.weight"):
                policy.update()
            assert policy.version == 11
        heads.publish_copy(30, head(12))
        assert policy.update()
        assert accepted(engine, 12) >= 0.99
