"""An engine that is born with a version: it answers as the trainer's model does from the start."""

import json
import logging
import urllib.error
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch
import vllm._custom_ops as ops
from kit import until
from rollouts import FarAway, ServerUnderTest, at_birth, replica, running_engine, running_server
from test_vllm import read_by_a_plain_process
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

import torch_ros
from torch_ros.errors import NotSupported, UsageError
from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.born import NewModel, ROSBornInfo, require_alone
from torch_ros.integrations.vllm.core import NO_VERSION

NORM = "model.layers.1.input_layernorm.weight"
NOBODY = "etcd://127.0.0.1:9"  # an engine of a bucket could not ask any other
KINDS = {  # the model, the workers, and whether weights stay as they were loaded
    "one": ("untied", 1, True),
    "two": ("untied", 2, True),
    "tied": ("tied", 1, True),
    "experts": ("moe", 1, True),
    "packed": ("tied", 1, False),
    "packed experts": ("moe", 1, False),
}


@contextmanager
def born(path, model, *, ranks=1, plain=True, engine=None, **how):
    options = {"load_format": "torch_ros", "weight_transfer_config": None} | (engine or {})
    options["model_loader_extra_config"] = {"model": model, **how}
    with running_engine(path, ranks=ranks, plain=plain, **options) as running:
        yield running


def attached(engine, trainer, endpoint, **how):
    """With what the engine was born with: it goes on with that."""
    return attach(engine.llm, model=trainer.name, **replica(endpoint), **how)


@pytest.mark.parametrize("kind", KINDS)
def test_it_answers_as_the_trainer_does(kind, tiny, place, train, etcd_endpoint):
    name, ranks, plain = KINDS[kind]
    trainer = train(tiny(name), f"born-{kind}".replace(" ", "-"), digests="full")
    published = trainer.publish(7)
    how = replica(etcd_endpoint)
    with born(place(name), trainer.name, ranks=ranks, plain=plain, **how) as engine:
        engine.agrees(published)
        assert engine.llm.get_weight_version() == "7"
        for report in engine.reports():
            assert report.direct_share >= 0.999, report
        is_source = plain and name != "moe"  # others are not known to lie as they were loaded
        assert set(engine.in_workers(lambda one: one._installer.handle.version)) == {
            7 if is_source else None
        }
        with attached(engine, trainer, etcd_endpoint) as policy:
            for version in (8, 9):
                published = trainer.publish(version)
                assert policy.update()
                engine.agrees(published)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_a_source_at_once(ranks, tiny, place, train, etcd_endpoint):
    """Padding is no obstacle, as it is for an engine of dummy weights."""
    trainer = train(tiny("untied"), f"born-source-{ranks}", digests="full")
    published = trainer.publish(3)
    how = replica(etcd_endpoint)
    with born(place("untied"), trainer.name, ranks=ranks, **how) as engine:
        trainer.kill()
        found, source = read_by_a_plain_process(trainer.name, etcd_endpoint, published)
        assert (found, source) == (published["digest"], "vllm")
        engine.agrees(published)
        with born(place("untied"), trainer.name, **how | {"replica": "other"}) as other:
            other.agrees(published)  # from the engine: there is nobody else
        again = train(tiny("untied"), trainer.name)
        with attached(engine, again, etcd_endpoint) as policy:
            assert set(engine.in_workers(lambda one: one.active)) == {3}  # it has gone on
            published = again.publish(4)
            policy.update()
            engine.agrees(published)


def test_weights_that_are_all_loaded_are_the_same(tiny, place, train, etcd_endpoint):
    trainer = train(tiny("untied"), "born-staged")
    published = trainer.publish(1)
    how = replica(etcd_endpoint, direct="never", buffer_bytes=1 << 20)
    with born(place("untied"), trainer.name, **how) as engine:
        assert [report.direct for report in engine.reports()] == [()]
        engine.agrees(published)
        staged = engine.checksums()
    with born(place("untied"), trainer.name, **replica(etcd_endpoint)) as engine:
        assert engine.checksums() == staged  # padding too


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bucket_is_all_that_is_shared(ranks, tiny, place, train, etcd_endpoint, tmp_path):
    pytest.importorskip("obstore")
    url = str(tmp_path / "bucket")
    trainer = train(tiny("untied"), f"born-far-{ranks}")
    with closing(FarAway(trainer, etcd_endpoint, url)) as far_away:
        published = far_away.publish(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_ROS_ENDPOINT", NOBODY)
            with born(place("untied"), trainer.name, ranks=ranks, bucket=url) as engine:
                engine.agrees(published)
                assert engine.llm.get_weight_version() == "1"
                with attach(engine.llm, model=trainer.name, bucket=url) as policy:
                    for version in (2, 3):
                        published = far_away.publish(version, share=0.01)
                        assert policy.update()
                        engine.agrees(published)


def test_an_engine_with_adapters(tiny, place, train, etcd_endpoint):
    """They give its modules other names when it has its version."""
    trainer = train(tiny("untied"), "born-adapters", digests="full")
    published = trainer.publish(1)
    options = {"enable_lora": True, "max_lora_rank": 8}
    how = replica(etcd_endpoint)
    with born(place("untied"), trainer.name, engine=options, **how) as engine:
        engine.agrees(published)
        with attached(engine, trainer, etcd_endpoint) as policy:
            published = trainer.publish(2)
            policy.update()
            engine.agrees(published)


# -- no version


def outputs(engine):
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[5, 6, 7])] * 2
    params = SamplingParams(max_tokens=4, detokenize=False)
    found = engine.llm.generate(prompts, params, use_tqdm=False)
    return [(one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) for one in found]


@pytest.mark.parametrize(
    ("kind", "ranks", "changes", "reason"),
    [
        ("untied", 2, {"drop": [NORM]}, f"ManifestMismatch.*nothing for {NORM}"),
        ("tied", 1, {"nan": [NORM]}, f"'{NORM}' of version 1.*found a NaN"),
        ("tied", 1, None, "latest of model .*: none is available yet"),
    ],
    ids=["lacks a norm", "has a NaN", "there is none"],
)
def test_a_version_that_does_not_fit_is_none(
    kind, ranks, changes, reason, tiny, place, train, etcd_endpoint, request
):
    trainer = train(tiny(kind), f"born-{request.node.callspec.id}".replace(" ", "-"))
    if changes:
        trainer.publish(1, **changes)
    how = replica(etcd_endpoint)
    with born(place(kind), trainer.name, ranks=ranks, plain=ranks > 1, **how) as engine:
        assert engine.llm.get_weight_version() == NO_VERSION
        assert outputs(engine) == [("error", 0)] * 2
        with pytest.raises(Exception, match=f"(?s){reason}"):
            engine.llm.wake_up(tags=["scheduling"])
        with attached(engine, trainer, etcd_endpoint) as policy:
            assert outputs(engine) == [("error", 0)] * 2
            for version in (2, 3):
                published = trainer.publish(version)
                policy.update()
                engine.agrees(published)


def test_a_server_is_up_before_its_trainer(tiny, place, train, etcd_endpoint, tmp_path):
    how = replica(etcd_endpoint)
    options = at_birth("born-early", **how)
    with running_server(place("untied"), tmp_path / "log", **options) as server:
        server.ask("health", method="GET")
        body = {"model": "m", "token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.ask("inference/v1/generate", body)
        assert caught.value.code == 503
        assert "no whole version" in json.loads(caught.value.read())["error"]["message"]
        assert server.ask("weight_info", method="GET") == {"weight_version": NO_VERSION}
        trainer = train(tiny("untied"), "born-early")
        published = trainer.publish(1)
        server.update(1)  # nobody has to tell it what it follows
        server.agrees(published["answers"])
        server.ask("init_weight_transfer_engine", {"init_info": {"model": trainer.name, **how}})
        assert server.ask("weight_info", method="GET") == {"weight_version": "1"}
        published = trainer.publish(2)
        server.update(2)
        server.agrees(published["answers"])


def test_a_start_that_waits(tiny, place, train, etcd_endpoint, tmp_path):
    how = replica(etcd_endpoint, wait_s=None)
    with torch_ros.open("born-late", endpoint=etcd_endpoint, spot=True) as watching:
        trainer = train(tiny("untied"), "born-late")
        options = at_birth("born-late", **how)
        server = ServerUnderTest(place("untied"), tmp_path / "log", **options)
        try:
            until(lambda: "vllm" in watching.fleet().replicas, 300)
            published = trainer.publish(1)
            until(server.is_up, 300)
            server.agrees(published["answers"])
        finally:
            server.close()


# -- a wrong configuration


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, "no model: expected the name under which versions are published"),
        ({"modle": "m"}, "modle: expected some of .*'model'"),
        ({"model": ""}, "model ''"),
        ({"model": 3}, "model 3"),
        ({"model": "m", "version": ""}, "version ''"),
        ({"model": "m", "version": -1}, "version=-1"),
        ({"model": "m", "wait_s": "long"}, "wait_s='long'"),
        ({"model": "m", "wait_s": -1}, "wait_s=-1"),
        ({"model": "m", "timeout_s": None}, "timeout_s=None"),
        ({"model": "m", "relay": "yes"}, "relay='yes'"),
        ({"model": "m", "direct": "maybe"}, "direct='maybe'"),
        ({"model": "m", "draft": "follow"}, "draft, draft_model: not there"),
        ({"model": "m", "options": ["a"]}, r"options=\['a'\]: expected a mapping"),
        ({"model": "m", "options": {"replica": "a"}}, "options: replica: not there"),
        ({"model": "m", "bucket": "b", "replica": "a"}, "bucket='b' with replica='a'"),
        ("policy", "model_loader_extra_config='policy': expected a mapping"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_by_name(config, found):
    with pytest.raises(UsageError, match=found):
        ROSBornInfo.of(config)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"draft": "its own"}, r"with a draft model \(mtp\)"),
        ({"transfer": SimpleNamespace(backend="nccl")}, "updates by 'nccl'"),
        ({"data_parallel": 2}, "engines that share their experts"),
        ({"connector": "its own"}, "a KV connector"),
    ],
    ids=["a draft", "another backend", "experts", "a connector"],
)
def test_an_engine_whose_other_parts_would_be_wrong_is_refused(changes, found):
    def configs(draft="the target", transfer=None, data_parallel=1, connector=None):
        target = "the target"  # which is also the draft of an engine that guesses by n-grams
        names = {"draft_model_config": draft, "target_model_config": target, "method": "mtp"}
        return SimpleNamespace(
            speculative_config=SimpleNamespace(**names),
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel),
            weight_transfer_config=transfer,
            kv_transfer_config=connector,
        )

    require_alone(configs())
    with pytest.raises(NotSupported, match=found):
        require_alone(configs(**changes))


@pytest.fixture
def new_model(monkeypatch):
    """Make a model as vLLM does, of one layer: `new_model(packs=..., **config)`."""

    def make(*, packs=False, method=UnquantizedLinearMethod, **config):
        monkeypatch.setattr(ops, "_supports_onednn", packs)
        monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
        module = torch.nn.Linear(4, 4, bias=False)
        module.quant_method, module.load_weights = method(), lambda weights: None
        model_config = SimpleNamespace(hf_text_config=SimpleNamespace(**config))
        known = {"proves": False, "is_mapped_anew": False, "is_dummy": True}
        return NewModel(module, model_config, torch.device("cpu"), **known)

    return make


def test_memory_is_kept_only_for_weights_that_stay_as_they_were_loaded(new_model):
    """All others would be there twice, until vLLM has packed the last one."""
    assert new_model().is_kept()
    assert not new_model(packs=True).is_kept()
    assert not new_model(method=object).is_kept()


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_is_not_read_is_told_of(is_tied, new_model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    model = new_model(tie_word_embeddings=is_tied)
    contents = dict.fromkeys(["weight", "lm_head.weight"], (torch.float32, (4, 4)))
    model.record(contents)
    assert ("lm_head.weight: not read" in caplog.text) == is_tied
    assert model.may_lack("lm_head.weight") == is_tied


def test_a_start_with_a_wrong_field_fails_by_its_name(place, tmp_path):
    log = tmp_path / "log"
    server = ServerUnderTest(place("untied"), log, **at_birth("m", wait=3))
    try:
        assert server._process.wait(300) != 0
    finally:
        server.close()
    assert "model_loader_extra_config: wait: expected some of" in log.read_text()
