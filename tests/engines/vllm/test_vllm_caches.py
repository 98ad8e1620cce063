"""Results of old weights are never answered with, whatever runs when an update begins."""

import random
import threading

import pytest
from rollouts import running_engine, running_server

from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.core import NO_VERSION

BLOCK = 32  # of the KV cache; a prefix is found again by whole blocks
PROMPT = [random.Random(3).randrange(3, 1000) for _ in range(5 * BLOCK)]
LONG = 300  # tokens of a request that runs during an update
LENGTH = {"max_model_len": 512, "block_size": BLOCK, "enable_prefix_caching": True}


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def engine(request, tiny):
    with running_engine(tiny("untied"), ranks=request.param, **LENGTH) as engine:
        yield engine


def answer(engine, prompt=PROMPT):
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False, logprobs=1)
    (output,) = engine.llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    tokens, logs = list(output.outputs[0].token_ids), output.outputs[0].logprobs
    return tokens, [log[token].logprob for token, log in zip(tokens, logs, strict=True)]


def is_same(one, other):
    return one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-4)


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_a_request_after_an_update_is_answered_by_the_new_weights(
    engine, train, etcd_endpoint, pause
):
    from vllm import SamplingParams, TokensPrompt

    trainer = train(engine.path, f"prefix-{engine.ranks}-{pause}")
    options = {"endpoint": etcd_endpoint}
    with attach(
        engine.llm, model=trainer.name, replica="vllm", options=options, pause=pause
    ) as policy:
        trainer.publish(1, is_quick=True)
        policy.update()
        old = answer(engine)
        trainer.publish(2, is_quick=True)
        params = SamplingParams(temperature=0, max_tokens=LONG, detokenize=False, ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=PROMPT)]
        engine.llm.enqueue(prompts, params, use_tqdm=False)
        core = engine.llm.llm_engine.engine_core
        first = core.get_output()  # it has its prompt in the cache, and decodes
        assert first.outputs[0].new_token_ids
        assert policy.update()
        (done,) = engine.llm.wait_for_completion(use_tqdm=False)
        length = len(done.outputs[0].token_ids)
        assert length < LONG if pause == "abort" else length >= LONG - 1
        new = answer(engine)
        assert engine.llm.reset_prefix_cache()
        assert is_same(new, answer(engine))
        assert not is_same(new, old)


OPTIONS = {"max-model-len": "512", "block-size": str(BLOCK)}
PAUSES = ["keep", "keep&clear_cache=false", "wait&clear_cache=false", "abort&clear_cache=false"]


@pytest.fixture(scope="module", params=["1", "2"], ids=["one engine", "two engines"])
def server(request, tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    options = OPTIONS | {"data-parallel-size": request.param}
    with running_server(tiny("untied"), log, **options) as server:
        server.engines = int(request.param)
        yield server


def generated(server, tokens=6, rank=0):
    params = {"temperature": 0, "max_tokens": tokens, "detokenize": False, "ignore_eos": True}
    body = {"model": "m", "token_ids": PROMPT, "sampling_params": params}
    headers = {"X-data-parallel-rank": str(rank)}
    return server.ask("inference/v1/generate", body, **headers)["choices"][0]["token_ids"]


@pytest.mark.parametrize("pause", PAUSES)
def test_a_server_drops_them_before_it_says_that_it_has_the_new_weights(
    server, tiny, train, etcd_endpoint, pause
):
    name = f"served-{server.engines}-{PAUSES.index(pause)}"
    trainer, ranks = train(tiny("untied"), name), range(server.engines)
    info = {"model": name, "replica": name, "options": {"endpoint": etcd_endpoint}}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    trainer.publish(1, is_quick=True)
    server.update(1)
    old = [generated(server, rank=rank) for rank in ranks]
    trainer.publish(2, is_quick=True)
    runners = [
        threading.Thread(target=generated, args=(server, LONG, rank), daemon=True) for rank in ranks
    ]
    if not pause.startswith("abort"):
        for one in runners:
            one.start()
    for rank in ranks:  # behind the first token of that one
        generated(server, 1, rank)
    server.update(2, pause=pause)
    new = [generated(server, rank=rank) for rank in ranks]
    for one in runners:
        if one.ident:
            one.join()
    assert server.ask("reset_prefix_cache") == {"success": True}
    assert new == [generated(server, rank=rank) for rank in ranks]
    assert new != old
    server.ask("shutdown_weight_transfer_engine")


def test_weight_info_follows_an_update_that_fails(server, tiny, train, etcd_endpoint):
    name = f"failing-{server.engines}"
    trainer = train(tiny("untied"), name)
    info = {"model": name, "replica": name, "options": {"endpoint": etcd_endpoint}}
    staged = {"direct": "never", "on_failure": "refuse", "buffer_bytes": 1 << 20}
    server.ask("init_weight_transfer_engine", {"init_info": info | staged})
    said = lambda: server.ask("weight_info", method="GET")["weight_version"]

    trainer.publish(1, is_quick=True)
    server.update("latest", label=None)
    assert said() == "1"
    trainer.publish(2, is_quick=True, shape={"vision.weight": [3]})
    server.update_fails("latest")  # before a byte
    assert said() == "1"
    trainer.publish(3, is_quick=True, nan=["model.norm.weight"])
    server.update_fails("latest", is_lost=True)
    assert said() == NO_VERSION
    trainer.publish(4, is_quick=True)
    server.update(4)
    assert said() == "4"
    server.ask("shutdown_weight_transfer_engine")
