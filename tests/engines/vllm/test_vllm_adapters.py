"""Adapters come and go beside a base that moves, and each answer is of the pair that was asked."""

import itertools
import json
import re
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from rollouts import running_engine, running_server

from torch_ros.errors import (
    ManifestMismatch,
    NotSupported,
    SourceLost,
    UsageError,
    VersionNotFound,
)
from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.told import hear

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
NAMES = ("code", "math", "law")
IDS = itertools.count(1)


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def engine(request, tiny):
    with running_engine(tiny("untied"), ranks=request.param, **LORA) as engine:
        yield engine


@pytest.fixture
def following(engine, train, etcd_endpoint):
    """Start a trainer, and an engine that follows it: `with following(name) as both`."""

    @contextmanager
    def start(name):
        trainer = train(engine.path, f"{name}-{engine.ranks}", program="adapter_trainer.py")
        options = {"endpoint": etcd_endpoint}
        how = {"model": trainer.name, "replica": "vllm", "options": options}
        with attach(engine.llm, **how) as policy:
            trainer.ask(publish=1)
            policy.update()
            yield trainer, policy

    return start


def load(engine, trainer, adapter, version):
    """As a program does that knows vLLM's own calls alone."""
    from vllm.lora.request import LoRARequest

    name = f"{trainer.name}-{adapter}@{version}"
    request = LoRARequest(name, next(IDS), f"torch-ros://{name}")
    assert engine.llm.llm_engine.add_lora(request)
    return request


def refused(engine, trainer, adapter, version=1):
    """The error of an adapter that is not loaded."""
    with pytest.raises(Exception, match="torch_ros error") as caught:
        load(engine, trainer, adapter, version)
    return hear(caught.value)[0]


def agree(engine, trainer, requests):
    """Assert that each adapter, and the base alone, answers as the trainer does."""
    answers = trainer.ask(answers=[None, *requests])["answers"]
    engine.agrees({"answers": answers[""]})
    for adapter, request in requests.items():
        engine.agrees({"answers": answers[adapter]}, request)
    assert len({str(one) for one in answers.values()}) == len(answers)


def test_twenty_swaps_of_three_adapters_while_the_base_moves(engine, following):
    """Two of the three are in vLLM's memory at a time, and none after the base has moved."""
    loaded = {}
    with following("swaps") as (trainer, policy):
        for swap in range(20):
            if swap % 2 == 0:
                trainer.ask(publish=2 + swap // 2)
                assert policy.update()
            adapter, version = NAMES[swap % 3], 1 + swap // 3
            trainer.ask(adapter=adapter, version=version)
            loaded[adapter] = load(engine, trainer, adapter, version)
            agree(engine, trainer, loaded)


def folders():
    from torch_ros.integrations import shared_folders

    found = shared_folders.MEMORY.glob("torch-ros-adapters-*/*/adapter_model.safetensors")
    return {str(path.parent) for path in found}


def test_attach_swaps_and_drops_an_adapter(engine, following):
    with following("attached") as (trainer, policy):
        code, before = policy.adapter(f"{trainer.name}-code"), folders()
        for version in (1, 2):
            trainer.ask(adapter="code", version=version)
            assert code.update()
            assert not code.update()
            assert code.version == version
            agree(engine, trainer, {"code": code.request})
            assert len(folders() - before) == 1  # of all workers together
        assert engine.llm.llm_engine.list_loras() == {code.request.lora_int_id}
        code.drop()
        assert code.request is code.version is None
        assert not engine.llm.llm_engine.list_loras()
        assert not folders() - before
        agree(engine, trainer, {})
        assert code.update()
        agree(engine, trainer, {"code": code.request})


def test_an_adapter_that_was_loaded_needs_no_source(engine, following):
    """Its trainer is gone, and the base's new version has dropped it from vLLM's memory."""
    with following("kept") as (trainer, policy):
        trainer.ask(adapter="code", version=1)
        request = load(engine, trainer, "code", 1)
        trainer.ask(publish=2)
        policy.update()
        answers = trainer.ask(answers=["code"])["answers"]["code"]
        trainer.kill()
        engine.agrees({"answers": answers}, request)


def test_an_adapter_answers_with_its_base_alone(engine, following):
    with following("based") as (trainer, policy):
        trainer.ask(publish=2)
        trainer.ask(adapter="code", version=1, fits=2)
        error = refused(engine, trainer, "code")
        assert type(error) is ManifestMismatch
        assert "expected version 2 of run" in str(error)
        policy.update()
        request = load(engine, trainer, "code", 1)
        agree(engine, trainer, {"code": request})
        trainer.ask(publish=3)
        policy.update()
        assert {tuple(tokens) for tokens, _ in engine.answers(request)} == {()}
        agree(engine, trainer, {})


BAD = {
    "rank": ({"config": {"r": 16}}, 1, UsageError, "rank 16 is greater than max_lora_rank 8"),
    "pissa": ({"config": {"init_lora_weights": "pissa"}}, 1, UsageError, "init_lora_weights"),
    "nan": ({"spoil": {"nan": True}}, 2, ManifestMismatch, "a NaN"),
    "renamed": ({"spoil": {"renamed": "blocks."}}, 2, ManifestMismatch, "layer of that name"),
    "narrow": ({"spoil": {"narrow": 100}}, 2, ManifestMismatch, "a linear layer of"),
    "gone": ({}, 7, VersionNotFound, r"has no readable version 7: there are \[1\]"),
}


def test_adapters_that_do_not_fit_are_refused(engine, following):
    with following("bad") as (trainer, _):
        base = {"answers": trainer.ask(answers=[None])["answers"][""]}
        for name, (asked, version, kind, said) in BAD.items():
            trainer.ask(adapter=name, version=1, **asked)
            error = refused(engine, trainer, name, version)
            assert type(error) is kind, error
            assert re.search(said, str(error))
            engine.agrees(base)
        trainer.ask(adapter="code", version=1)
        assert type(refused(engine, trainer, "code", "latest")) is UsageError
        agree(engine, trainer, {"code": load(engine, trainer, "code", 1)})


def test_a_source_that_is_killed_in_a_load_ends_that_alone(engine, following):
    with following("killed") as (trainer, _):
        trainer.ask(adapter="code", version=1)
        answers = trainer.ask(answers=[None])["answers"][""]
        pid = trainer.pid

        def strike(worker):
            """Kill the trainer when a worker is about to read the adapter's tensors."""
            import os
            import signal

            from torch_ros.integrations.vllm import worker_adapters

            real = worker_adapters.read_adapter

            def killing(*args):
                os.kill(pid, signal.SIGKILL)
                return real(*args)

            worker_adapters.read_adapter = killing

        def put_back(worker):
            from torch_ros.integrations import adapters
            from torch_ros.integrations.vllm import worker_adapters

            worker_adapters.read_adapter = adapters.read_adapter

        engine.llm.collective_rpc(strike)
        try:
            error = refused(engine, trainer, "code")
        finally:
            engine.llm.collective_rpc(put_back)
        assert isinstance(error, SourceLost | VersionNotFound), error
        engine.agrees({"answers": answers})


def test_an_engine_that_follows_a_bucket_is_told_so(engine, tmp_path):
    info = {"model": "far", "bucket": str(tmp_path)}
    with attach(engine.llm, **info) as policy, pytest.raises(NotSupported, match="bucket"):
        policy.adapter("code")


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        options = {"max-loras": "2", "max-lora-rank": "8"}
        with running_server(tiny("untied"), log, flags=["--enable-lora"], **options) as server:
            yield server


def asked(server, path, **body):
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def test_a_server_loads_an_adapter_by_its_path(server, tiny, train, etcd_endpoint):
    trainer = train(tiny("untied"), "served", program="adapter_trainer.py")
    info = {"model": "served", "replica": "vllm", "options": {"endpoint": etcd_endpoint}}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    for version in (1, 2):
        trainer.ask(publish=version)
        server.update(version)
        trainer.ask(adapter="code", version=version)
        name = f"code@{version}"
        path = f"torch-ros://served-{name}"
        asked(server, "v1/load_lora_adapter", lora_name=name, lora_path=path)
        answers = trainer.ask(answers=[None, "code"])["answers"]
        server.agrees(answers[""])
        server.agrees(answers["code"], model=name)
        asked(server, "v1/unload_lora_adapter", lora_name=name)
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(server, "v1/load_lora_adapter", lora_name="a", lora_path="torch-ros://served-code@9")
    assert caught.value.code == 500
    assert "there are [2]" in caught.value.read().decode()
    server.agrees(answers[""])
