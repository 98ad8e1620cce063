"""An engine with an MTP layer: what becomes of it when the engine goes to another version."""

import pytest
import torch
from drafted import MTP, accepted, folder, weights
from rollouts import running_engine

import torch_ros
from torch_ros.errors import InstallRejected, ManifestMismatch, NotSupported, UsageError
from torch_ros.integrations.vllm import attach


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("mimo")
    return folder(where, "MiMoForCausalLM", "qwen2", num_nextn_predict_layers=1)


@pytest.fixture(
    scope="module",
    params=[(1, True), (1, False), (2, True)],
    ids=["in place", "staged", "two workers"],
)
def engine(request, path):
    ranks, plain = request.param
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    with running_engine(
        path, ranks=ranks, plain=plain, speculative_config=spec, disable_log_stats=False
    ) as engine:
        yield engine


@pytest.fixture
def following(engine, etcd_endpoint, request):
    """A trainer, and an engine that follows it as is asked for."""
    opened = []
    name = request.node.name

    def follow(draft, **how):
        options = {"endpoint": etcd_endpoint}
        policy = attach(engine.llm, model=name, replica="vllm", options=options, draft=draft, **how)
        opened.append(policy)
        return policy

    with torch_ros.open(name, endpoint=etcd_endpoint, linger_s=0) as trainer:
        yield trainer, follow
        for policy in opened:
            policy.close()


def test_an_engine_whose_draft_would_be_left_behind_is_refused_by_name(following):
    _, follow = following
    with pytest.raises(NotSupported, match=r"MiMoMTP, the draft of this engine \(mtp\).*follow"):
        follow(None)
    with pytest.raises(UsageError, match="draft"):
        follow("eagle")


def test_mtp_layers_come_with_each_version(engine, following):
    trainer, follow = following
    policy = follow("follow")
    for version in range(1, 11):
        trainer.publish_copy(version, weights(version))
        assert policy.update()
        assert accepted(engine, version) >= 0.99


def test_a_draft_that_is_kept_is_accepted_ever_more_rarely(engine, following):
    trainer, follow = following
    policy = follow("follow")
    trainer.publish_copy(1, weights(1))
    policy.update()
    policy.close()
    policy = follow("keep")
    trainer.publish_copy(2, weights(2))
    policy.update()
    assert accepted(engine, 2) < 0.5


@pytest.mark.parametrize("spoilt", ["lacks the layer", "has a NaN"])
def test_a_version_whose_draft_does_not_fit_changes_nothing(engine, following, spoilt):
    trainer, follow = following
    policy = follow("follow")
    trainer.publish_copy(1, weights(1))
    policy.update()
    bad = weights(2)
    name = f"{MTP}.input_proj.weight"
    if spoilt == "lacks the layer":
        del bad[name]
    else:
        bad[name][3, 4] = torch.nan
    trainer.publish_copy(2, bad)
    with pytest.raises(ManifestMismatch, match="mtp_layers"):
        policy.update()
    assert policy.version == 1
    with pytest.raises(InstallRejected, match="mtp_layers"):
        trainer.wait_installed(2, timeout_s=60)
    assert accepted(engine, 1) >= 0.99
    trainer.publish_copy(3, weights(3))
    assert policy.update()
    assert accepted(engine, 3) >= 0.99
