"""Bad input: a typed error at the driver, and an engine that answers as before."""

from types import SimpleNamespace

import pytest
import torch
from rollouts import running_engine

import torch_ros
from torch_ros.errors import (
    DeadlineExceeded,
    Fenced,
    ManifestMismatch,
    NotSupported,
    TorchRosError,
    UsageError,
)
from torch_ros.integrations.vllm import attach
from torch_ros.integrations.vllm.core import NO_VERSION
from torch_ros.integrations.vllm.told import hear

NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
ATTENTION, MLP = "model.layers.2.self_attn", "model.layers.2.mlp"


@pytest.fixture(scope="module", params=[1, 2])
def engine(request, tiny):
    with running_engine(tiny("untied"), ranks=request.param) as engine:
        yield engine


@pytest.fixture
def followed(engine, train, etcd_endpoint, request):
    """An engine that has version 1 of a trainer."""
    trainer = train(engine.path, f"{request.node.name}")
    options = {"endpoint": etcd_endpoint}
    with attach(engine.llm, model=trainer.name, replica="vllm", options=options) as policy:
        first = trainer.publish(1)
        policy.update()
        yield SimpleNamespace(engine=engine, trainer=trainer, policy=policy, first=first)


def goes_on(followed):
    """It answers with version 1, and takes the next one."""
    assert followed.policy.version == 1
    installs = followed.policy._handle.installs()
    assert [one.active.version for one in installs.values()] == [1]
    assert followed.engine.llm.get_weight_version() == "1"
    followed.engine.agrees(followed.first)
    published = followed.trainer.publish(5)
    assert followed.policy.update()
    followed.engine.agrees(published)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"drop": [NORM]}, f"nothing for {NORM}"),
        ({"shape": {EMBED: [1100, 256]}}, f"nothing for {EMBED}"),
        ({"float8": ["*.down_proj.weight"]}, "a place for '.*weight_scale'"),
        ({"shape": {f"{ATTENTION}.q_proj.weight": [512, 256]}}, "none for .*q_proj.*65536"),
        ({"shape": {f"{ATTENTION}.k_proj.weight": [132, 256]}}, "none for .*k_proj.*1024 elements"),
        ({"shape": {f"{MLP}.gate_proj.weight": [1024, 256]}}, "none for .*gate_proj.*131072"),
        ({"shape": {f"{MLP}.up_proj.weight": [1024, 256]}}, "none for .*up_proj.*131072"),
        ({"shape": {"model.layers.4.input_layernorm.weight": [256]}}, "none for .*layers.4.*256"),
        ({"shape": {"vision.weight": [3]}}, r"none for vision.weight \[3\]: 3 elements"),
        ({"shape": {f"{ATTENTION}.q_proj.bias": [256]}}, "none for .*q_proj.bias"),
    ],
    ids=[
        "lacks a norm",
        "has a larger vocabulary",
        "has scales",
        "has too many queries",
        "has too many keys",
        "has too long a gate",
        "has too much up",
        "has a layer more",
        "has an extra tensor",
        "has a bias",
    ],
)
def test_a_version_that_does_not_fit_is_refused(followed, changes, found):
    followed.trainer.publish(2, **changes)
    with pytest.raises(ManifestMismatch, match=found):
        followed.policy.update()
    goes_on(followed)


def test_latest_is_looked_up_again_if_the_trainer_has_gone_on(followed, monkeypatch):
    llm, trainer, published = followed.engine.llm, followed.trainer, []
    trainer.publish(2)
    pause = llm.sleep

    def pause_while_the_trainer_steps(**how):
        pause(**how)
        if not published:
            published.append(trainer.publish(3))

    monkeypatch.setattr(llm, "sleep", pause_while_the_trainer_steps)
    assert followed.policy.update("latest")
    assert followed.policy.version == 3
    followed.engine.agrees(published[0])


def test_a_version_that_is_not_there(followed):
    with pytest.raises(DeadlineExceeded):
        followed.policy.update(9, timeout_s=1)
    llm = followed.engine.llm
    llm.start_weight_update()
    with pytest.raises(Exception, match="torch_ros error") as caught:
        llm.update_weights({"update_info": {"version": 9, "timeout_s": 1}})
    error, active = hear(caught.value)
    assert isinstance(error, DeadlineExceeded)
    assert active == 1
    ended(followed.engine)
    goes_on(followed)


def ended(engine):
    """With several workers the driver ends the session of those that did not raise."""
    if engine.ranks > 1:
        with pytest.raises(Exception, match="without a matching"):
            engine.llm.finish_weight_update("9")


def test_calls_out_of_order(followed):
    llm = followed.engine.llm
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 1}})
    with pytest.raises(Exception, match="second update in one session"):
        llm.update_weights({"update_info": {"version": 1}})
    ended(followed.engine)
    goes_on(followed)


def test_an_update_without_a_start(followed):
    if followed.engine.ranks > 1:
        pytest.skip("vLLM answers the next call with the second worker's error")
    with pytest.raises(Exception, match="start_weight_update"):
        followed.engine.llm.update_weights({"update_info": {"version": 1}})
    goes_on(followed)


def test_an_unknown_key(followed):
    llm = followed.engine.llm
    llm.start_weight_update()
    with pytest.raises(Exception, match="unexpected keyword argument 'nonsense'"):
        llm.update_weights({"update_info": {"nonsense": 1}})
    ended(followed.engine)
    with pytest.raises(TorchRosError, match="unexpected keyword argument 'nonsense'"):
        attach(llm, model="m", nonsense=1)
    goes_on(followed)


def test_an_extra_tensor_is_ignored_if_the_engine_is_told_so(followed, etcd_endpoint):
    published, engine = followed.trainer.publish(2, shape={"vision.weight": [3]}), followed.engine
    followed.policy.close()
    how = {"replica": "vllm", "options": {"endpoint": etcd_endpoint}, "ignore": ["vision.*"]}
    with attach(engine.llm, model=followed.trainer.name, **how) as policy:
        assert policy.update()
        engine.agrees(published)
        assert all(list(report.ignored) == ["vision.weight"] for report in engine.reports())


def test_too_many_rows_of_another_dtype_are_refused(followed):
    """A cast copies, and lands no bits."""
    name = f"{ATTENTION}.q_proj.weight"
    followed.trainer.publish(2, shape={name: [512, 256]}, dtype={name: "float64"})
    with pytest.raises(ManifestMismatch, match="none for .*q_proj.*65536"):
        followed.policy.update()
    goes_on(followed)


def test_another_dtype_is_cast(followed):
    published = followed.trainer.publish(2, dtype={NORM: "float64"})
    assert followed.policy.update()
    followed.engine.agrees(published)
    for report in followed.engine.reports():
        assert "cast from torch.float64" in report.staged[NORM]


def test_a_weight_that_is_no_number_is_refused(followed):
    """It was read in place by then, and nobody has version 1 any more."""
    followed.trainer.publish(2, nan=[NORM])
    with pytest.raises(ManifestMismatch, match=f"'{NORM}' of version 2.*found a NaN"):
        followed.policy.update()
    assert followed.policy.version is None
    assert followed.engine.llm.get_weight_version() == NO_VERSION
    published = followed.trainer.publish(3)
    followed.policy.update()
    followed.engine.agrees(published)


@pytest.mark.parametrize("options", [{"rank": 1}, {"replica": "x"}, {"nonsense": 1}, "local"])
def test_options_that_are_not_those_of_open(engine, options):
    info = {"model": "m", "replica": "vllm", "options": options}
    with pytest.raises(Exception, match=r"options|nonsense"):
        engine.llm.init_weight_transfer_engine({"init_info": info})


@pytest.mark.parametrize(
    ("change", "info", "kind", "found"),
    [
        ("parallel_config.enable_eplb = True", {}, NotSupported, "EPLB"),
        ("model_config.enable_sleep_mode = True", {}, NotSupported, "sleep mode"),
        (
            "parallel_config.data_parallel_size = 2",
            {"replica": None},
            UsageError,
            "expected a name",
        ),
    ],
)
def test_configurations_that_cannot_be(engine, change, info, kind, found):
    info = {"model": "m", "replica": "vllm"} | info
    path, name, value = change.replace(" =", "").replace(".", " ").split()

    def attempt(transfer):
        config = getattr(transfer.vllm_config, path)
        before = getattr(config, name)
        setattr(config, name, {"True": True, "2": 2}[value])
        try:
            transfer.init_transfer_engine(transfer.parse_init_info(info))
        except RuntimeError as error:
            return str(error)
        finally:
            setattr(config, name, before)

    told = engine.in_workers(attempt)[-1]
    error, _ = hear(Exception(told))
    assert isinstance(error, kind)
    assert found in str(error)


def test_with_sleep_mode_everything_is_loaded(followed):
    """The memory that lands a version is mapped anew behind our back."""
    if followed.engine.ranks > 1:
        pytest.skip("the same with several workers")

    def look(transfer):
        installer = transfer._installer
        installer._engine._is_mapped_anew = True
        return len(installer._engine.obstacles(installer._recorded.recording))

    assert all(followed.engine.in_workers(look))
    published = followed.trainer.publish(2)
    followed.policy.update()
    followed.engine.agrees(published)
    assert all(report.direct == () for report in followed.engine.reports())


def test_weights_that_vllm_reloads_by_itself_are_no_version(followed):
    """Peers must not take them for the version that was there, nor trainers."""
    published, policy = followed.trainer.publish(2), followed.policy
    policy.update()
    before = followed.engine.checksums()

    def reload(worker):
        from safetensors.torch import load_file

        handle = worker.weight_transfer_engine._installer.handle
        weights, held = load_file(f"{worker.model_config.model}/model.safetensors"), handle.version
        worker.reload_weights(weights_iterator=iter(weights.items()))
        return held, handle.version

    assert set(followed.engine.llm.collective_rpc(reload)) == {(2, None)}
    assert followed.engine.checksums() != before
    told = policy._handle.installs()["vllm"]
    assert told.active is None
    assert "somebody else has loaded its weights" in told.rejected.reason
    assert policy.update()
    followed.engine.agrees(published)
    assert not policy.update()


def test_weights_that_were_set_to_zero_come_back_with_the_same_version(followed):
    llm, policy = followed.engine.llm, followed.policy
    llm.collective_rpc("reset_weights")
    assert llm.get_weight_version() == NO_VERSION
    assert policy._handle.installs()["vllm"].active is None
    assert policy.update()
    followed.engine.agrees(followed.first)
    assert not policy.update()


@pytest.fixture
def keeper(followed, etcd_endpoint):
    """A replica that has version 1, whatever becomes of its trainer."""
    with torch_ros.open(followed.trainer.name, endpoint=etcd_endpoint, linger_s=0) as keeper:
        shapes = followed.first["shapes"]
        keeper.register({fqn: torch.zeros(shape) for fqn, shape in shapes.items()})
        keeper.replicate(1)
        yield keeper


def test_a_number_that_goes_back_is_refused(followed, keeper):
    published = followed.trainer.publish(2)
    followed.policy.update()
    with pytest.raises(UsageError, match="version 1 is not installed.*only grow within a run"):
        followed.policy.update(1)
    assert followed.policy.version == 2
    assert keeper.installs()["vllm"].active.version == 2
    followed.engine.agrees(published)
    third = followed.trainer.publish(3)
    assert followed.policy.update()
    followed.engine.agrees(third)


def test_an_engine_whose_name_another_one_takes_keeps_its_version(followed, etcd_endpoint):
    engine, trainer = followed.engine, followed.trainer
    options = {"endpoint": etcd_endpoint, "linger_s": 0, "installs": True}
    published = trainer.publish(2)
    with torch_ros.open(trainer.name, replica="vllm", rank=0, world_size=1, **options):
        with pytest.raises(Fenced, match="'vllm'.*close this handle and open a new one"):
            followed.policy.update(2)
        assert followed.policy.version == 1
        engine.agrees(followed.first)
        followed.policy.close()
    with attach(
        engine.llm, model=trainer.name, replica="vllm", options={"endpoint": etcd_endpoint}
    ) as policy:
        assert policy.update()
        engine.agrees(published)


@pytest.mark.parametrize("on_failure", ["reread", "keep", "refuse"])
def test_a_trainer_that_dies_in_the_middle(followed, keeper, train, etcd_endpoint, on_failure):
    """The engine has a part of version 2 then: one layer of four is still to come."""
    engine, policy, name = followed.engine, followed.policy, followed.trainer.name
    trainer_pid = followed.trainer.pid
    if on_failure == "keep":
        keeper.close()

    def prepare(transfer):
        import os
        from contextlib import suppress
        from dataclasses import replace
        from signal import SIGKILL

        from torch_ros.integrations.landing_plan import Obstacle

        installer = transfer._installer
        options = replace(installer.options, buffer_bytes=1, on_failure=on_failure)
        installer.options, model = options, installer._engine
        look, load = model.obstacles, model.load_weights

        def obstacles(recording):
            staged = {name for name in model.state() if name.startswith("model.layers.3.")}
            return look(recording) | dict.fromkeys(staged, Obstacle("staged"))

        def load_weights(weights):
            def dying():
                for fqn, weight in weights:
                    with suppress(ProcessLookupError):
                        os.kill(trainer_pid, SIGKILL)
                    yield fqn, weight

            model.load_weights = load
            return load(dying())

        model.obstacles, model.load_weights = obstacles, load_weights

    engine.in_workers(prepare)
    followed.trainer.publish(2)
    with pytest.raises(TorchRosError):
        policy.update(2, timeout_s=30)
    followed.trainer.kill()
    assert policy.version == (None if on_failure == "refuse" else 1)
    told = policy._handle.installs()["vllm"]
    assert (told.active and told.active.version) == policy.version
    assert told.rejected.ref.version == 2
    if policy.version == 1:
        engine.agrees(followed.first)
    published = train(engine.path, name).publish(3)
    assert policy.update(3)
    engine.agrees(published)
