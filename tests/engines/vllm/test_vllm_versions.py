"""Each answer says which version has made which of its tokens, also if an update comes between."""

import json
import threading
import urllib.request

import pytest
import torch
from rollouts import running_engine, running_server
from trainer import PROMPTS, step

from torch_ros.integrations.vllm import attach

TOKENS = 60
TRIES = 8  # updates, one of which comes in the middle of an answer


@pytest.fixture(scope="module")
def model(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny("untied"), dtype=torch.float32).eval()


@torch.no_grad()
def continued(model, version, ids, count):
    """The tokens by which a version goes on."""
    step(model, version)
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def agrees(model, prompt, tokens, spans):
    """Assert that each span's tokens are those of its version, given all before."""
    ids = list(prompt)
    for version, start, end in spans:
        ids = continued(model, int(version), ids, end - start)
    assert ids == [*prompt, *tokens]


def test_an_offline_answer_has_the_versions_of_its_tokens(
    model, tiny, train, etcd_endpoint, monkeypatch
):
    from vllm import SamplingParams, TokensPrompt

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine steps when it is told to
    params = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    options = {"endpoint": etcd_endpoint}
    with running_engine(tiny("untied")) as engine:
        llm, trainer = engine.llm, train(tiny("untied"), "labelled")
        with attach(llm, model="labelled", replica="labelled", options=options) as policy:
            trainer.publish(1, is_quick=True)
            policy.update()
            llm.enqueue(prompts, params, use_tqdm=False)
            for _ in range(20):
                llm.llm_engine.step()
            trainer.publish(2, is_quick=True)
            assert policy.update()
            for output in llm.wait_for_completion(use_tqdm=False):
                answer = output.outputs[0]
                spans = [(one.version, one.start, one.end) for one in answer.weight_versions]
                first, second = spans
                assert (first[:2], second[0], second[2]) == (("1", 0), "2", TOKENS)
                assert 0 < first[2] == second[1] < TOKENS
                agrees(model, output.prompt_token_ids, answer.token_ids, spans)
            trainer.publish(3, is_quick=True)
            trainer.publish(4, is_quick=True)
            llm.generate(prompts, params, use_tqdm=False)
            assert policy.version == 2
        with attach(
            llm, model="labelled", replica="labelled", options=options, behind_max=1
        ) as policy:
            [output, *_] = llm.generate(prompts, params, use_tqdm=False)
            assert [one.version for one in output.outputs[0].weight_versions] == ["4"]


def streamed(server, begun):
    """The last choice of a stream, which has the versions of all its tokens, and the tokens."""
    params = {"temperature": 0, "max_tokens": 100, "detokenize": False, "ignore_eos": True}
    asked = {"model": "m", "token_ids": PROMPTS[0], "sampling_params": params, "stream": True}
    headers = {"content-type": "application/json"}
    url = f"{server.url}/inference/v1/generate"
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    choices = []
    with urllib.request.urlopen(request, timeout=300) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                choices += json.loads(line[6:])["choices"]
                begun.set()
    return choices[-1]["weight_versions"], [id_ for one in choices for id_ in one["token_ids"]]


def test_a_server_s_answer_has_the_versions_of_its_tokens(
    model, tiny, train, etcd_endpoint, tmp_path
):
    with running_server(tiny("untied"), tmp_path / "log") as server:
        trainer = train(tiny("untied"), "served")
        info = {"model": "served", "options": {"endpoint": etcd_endpoint}}
        server.ask("init_weight_transfer_engine", {"init_info": info})
        trainer.publish(1, is_quick=True)
        server.update(1)
        for version in range(2, 2 + TRIES):
            trainer.publish(version, is_quick=True)
            begun, found = threading.Event(), []
            ask = threading.Thread(target=lambda b=begun, f=found: f.append(streamed(server, b)))
            ask.start()
            assert begun.wait(120)
            server.update(version)
            ask.join(300)
            [(spans, tokens)] = found
            spans = [(one["version"], one["start"], one["end"]) for one in spans]
            agrees(model, PROMPTS[0], tokens, spans)
            if len(spans) == 2:
                break
        assert [one[0] for one in spans] == [str(version - 1), str(version)]
