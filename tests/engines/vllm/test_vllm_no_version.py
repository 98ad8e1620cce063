"""No request is answered while an engine has no whole version, and a server says so."""

import json
import threading
import urllib.error
from contextlib import suppress

import pytest
from rollouts import GATE, running_engine, running_server

from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.core import NO_VERSION

BAD = {"nan": ["model.norm.weight"], "is_quick": True}
PROMPT = list(range(3, 19))
LONG = 100  # tokens of a request that runs when an update begins


@pytest.fixture(scope="module", params=[GATE, {}], ids=["gate", "no gate"])
def server(request, tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(tiny("untied"), log, **request.param) as server:
        server.refuses_with = 503 if request.param else 500
        server.has_gate = bool(request.param)
        yield server


def body(tokens=4, **named):
    params = {"temperature": 0, "max_tokens": tokens, "detokenize": False, "ignore_eos": True}
    return {"model": "m", "token_ids": PROMPT, "sampling_params": params, **named}


def refused(server, path, asked=None):
    """The status of a call that fails, its headers and what it says."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.ask(path, asked)
    return caught.value.code, caught.value.headers, caught.value.read().decode()


def refuses(server):
    """Assert that it answers no completion, and is healthy."""
    code, headers, text = refused(server, "inference/v1/generate", body())
    assert code == server.refuses_with
    if server.has_gate:
        assert headers["retry-after"] == "1"
        assert "no whole version" in json.loads(text)["error"]["message"]
    server.ask("health", method="GET")
    assert server.ask("weight_info", method="GET") == {"weight_version": NO_VERSION}


def probed(server, name):
    """The version by which a probe finds its engine ready; what it has to say if it does not."""
    if not server.has_gate:  # vLLM has no such path
        return None
    try:
        return server.ask(f"ready/{name}/{name}", method="GET")["version"]
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return json.loads(error.read())["reason"]


def test_a_server_answers_while_it_has_a_version_and_only_then(server, tiny, train, etcd_endpoint):
    if server.has_gate:
        assert refused(server, "inference/v1/generate", body())[0] == 503  # nobody has attached
    else:
        server.ask("inference/v1/generate", body())
    name = f"versionless-{server.has_gate}"
    trainer = train(tiny("untied"), name)
    info = {"model": name, "replica": name, "options": {"endpoint": etcd_endpoint}}
    info |= {"on_failure": "refuse", "direct": "never"}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    refuses(server)  # of dummy weights
    assert probed(server, name) in (None, "rank 0 has no version yet")
    trainer.publish(1, is_quick=True)
    server.update(1)
    assert probed(server, name) in (None, 1)
    answer = server.ask("inference/v1/generate", body())

    kept, got = threading.Event(), []

    def stream():
        import urllib.request

        asked = json.dumps(body(LONG, stream=True)).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{server.url}/inference/v1/generate", asked, headers)
        with suppress(OSError), urllib.request.urlopen(request, timeout=300) as lines:
            for line in lines:
                got.append(line)
                kept.set()

    runner = threading.Thread(target=stream, daemon=True)
    runner.start()
    assert kept.wait(120)  # its first token is there
    trainer.publish(2, **BAD)
    server.ask("pause?mode=keep")
    server.ask("start_weight_update")
    assert refused(server, "update_weights", {"update_info": {"version": 2}})[0] == 500
    refused(server, "finish_weight_update", {"weight_version": "2"})
    refuses(server)
    reason = "rank 0 has no version: 2 was rejected: ManifestMismatch"
    assert probed(server, name) in (None, reason)
    code, _, text = refused(server, "resume")
    assert code == 500
    assert "found none: update_weights has failed in the middle" in text
    server.ask("update_weight_version", {"new_version": "2"})  # whatever a driver says
    refuses(server)
    count = len(got)
    assert server.ask("is_paused", method="GET") == {"is_paused": True}
    assert len(got) == count

    published = trainer.publish(3)
    server.ask("start_weight_update")
    server.ask("update_weights", {"update_info": {"version": 3}})
    server.ask("finish_weight_update", {"weight_version": "3"})
    server.ask("resume")
    assert probed(server, name) in (None, 3)
    server.agrees(published["answers"])
    runner.join(300)
    assert len(got) > count
    assert server.ask("inference/v1/generate", body()) != answer


def test_requests_of_a_driver_that_does_not_pause_end_with_an_error(
    server, tiny, train, etcd_endpoint
):
    name = f"unpaused-{server.has_gate}"
    trainer = train(tiny("untied"), name)
    info = {"model": name, "replica": name, "options": {"endpoint": etcd_endpoint}}
    info |= {"on_failure": "refuse", "direct": "never"}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    trainer.publish(1, is_quick=True)
    server.update(1)
    trainer.publish(2, **BAD)
    server.ask("start_weight_update")
    assert refused(server, "update_weights", {"update_info": {"version": 2}})[0] == 500
    refused(server, "finish_weight_update")
    refuses(server)
    published = trainer.publish(3)
    server.update(3)
    server.agrees(published["answers"])


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
        with pytest.raises(Exception, match="found none: update_weights has failed"):
            engine.llm.wake_up(tags=["scheduling"])
        published = trainer.publish(3)
        policy.update()
        engine.agrees(published)
