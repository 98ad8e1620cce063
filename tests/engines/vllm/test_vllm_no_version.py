"""No request is answered while an engine has no whole version."""

import pytest
from rollouts import running_engine

from torch_ros.integrations.vllm import attach

BAD = {"nan": ["model.norm.weight"], "is_quick": True}
PROMPT = list(range(3, 19))


@pytest.fixture(scope="module")
def engine(tiny):
    with running_engine(tiny("untied")) as engine:
        yield engine


def test_an_offline_engine_ends_requests_with_an_error(engine, train, etcd_endpoint):
    """vLLM hands out an output without a token."""
    from vllm import SamplingParams, TokensPrompt

    def outputs():
        prompts = [TokensPrompt(prompt_token_ids=PROMPT)] * 2
        params = SamplingParams(max_tokens=4, detokenize=False)
        found = engine.llm.generate(prompts, params, use_tqdm=False)
        return [(one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) for one in found]

    trainer = train(engine.path, "offline-versionless")
    options, how = {"endpoint": etcd_endpoint}, {"on_failure": "refuse", "direct": "never"}
    assert outputs() == [("length", 4)] * 2  # nobody has attached
    with attach(engine.llm, model=trainer.name, replica="vllm", options=options, **how) as policy:
        assert outputs() == [("error", 0)] * 2
        published = trainer.publish(1)
        policy.update()
        engine.agrees(published)
        trainer.publish(2, **BAD)
        with pytest.raises(Exception, match="NaN"):
            policy.update()
        assert outputs() == [("error", 0)] * 2
        with pytest.raises(Exception, match="found none: an update has failed"):
            engine.llm.wake_up(tags=["scheduling"])
        published = trainer.publish(3)
        policy.update()
        engine.agrees(published)
