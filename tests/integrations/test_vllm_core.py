"""vLLM's engine core takes notice of updates; a class with its methods stands for it."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from torch_ros.errors import ManifestMismatch, NotAvailable, SourceLost
from torch_ros.integrations.vllm import core
from torch_ros.integrations.vllm.told import hear, tell

LOST = SourceLost("trainer", "it left", 0, 12)


class Scheduler:
    """Requests that hold blocks, and the prefixes that their weights have computed."""

    def __init__(self):
        self.prefixes, self.running, self.held_for_good = {"a prompt"}, ["a request"], []
        self.can_reset_connector = True

    def reset(self, reset_running_requests, reset_connector):
        if reset_running_requests:
            self.running = []
        if self.running:
            return False
        if self.held_for_good:
            raise RuntimeError("requests waiting for remote KV transfer")
        self.prefixes = set()
        return self.can_reset_connector or not reset_connector


def engine_core(backend="torch_ros", load_format="auto"):
    """A core of a class of its own, which is watched."""

    class Core:
        def __init__(self):
            transfer = backend and SimpleNamespace(backend=backend)
            load = SimpleNamespace(load_format=load_format)
            self.vllm_config = SimpleNamespace(weight_transfer_config=transfer, load_config=load)
            self.scheduler, self.encodings, self.label = Scheduler(), {"an image"}, core.FIRST
            engines = [SimpleNamespace(active=None), SimpleNamespace(active=None)]
            self.workers = [SimpleNamespace(weight_transfer_engine=one) for one in engines]
            self.fails = None

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            if callable(method):
                return [method(worker) for worker in self.workers]
            if method == "update_weights":
                if self.fails:
                    raise RuntimeError(f"Worker failed with error '{self.fails}', see above")
                for worker in self.workers:
                    worker.weight_transfer_engine.active = kwargs["update_info"]["version"]
            return [None for _ in self.workers]

        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            return self.scheduler.reset(reset_running_requests, reset_connector)

        def reset_encoder_cache(self):
            self.encodings = set()

        def set_weight_version(self, label):
            self.label = label

        def get_weight_version(self):
            return self.label

    core.watch_class(Core)
    core.watch_class(Core)  # vLLM may load a plug-in more than once
    return Core()


def update(engine, version=1):
    return engine.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})


def test_an_update_drops_what_old_weights_have_computed_though_requests_hold_it():
    engine = engine_core()
    assert update(engine, 7) == [None, None]
    assert not engine.scheduler.prefixes | engine.encodings
    assert engine.scheduler.running == []  # they are computed anew
    assert engine.label == "7"


@pytest.mark.parametrize("kept", ["requests", "connector"])
def test_a_cache_that_cannot_be_dropped_fails_the_update(kept):
    engine = engine_core()
    if kept == "requests":
        engine.scheduler.held_for_good = ["remote"]
    else:
        engine.scheduler.can_reset_connector = False
    with pytest.raises(RuntimeError) as caught:
        update(engine)
    error, active = hear(caught.value)
    assert (type(error), active) == (NotAvailable, None)  # whoever drives it keeps it paused
    assert "keep it paused" in str(error)
    assert engine.label == "1"
    engine.scheduler.held_for_good, engine.scheduler.can_reset_connector = [], True
    update(engine)
    assert not engine.scheduler.prefixes


def test_a_failure_that_lost_the_weights_takes_their_version_away():
    engine = engine_core()
    update(engine, 1)
    engine.fails = tell(LOST, None, has_lost=True)
    with pytest.raises(RuntimeError, match="lost replica"):
        update(engine, 2)
    assert engine.label == core.NO_VERSION
    engine.fails = tell(ManifestMismatch("x", "y", "z", "w"), None)  # refused before a byte
    with pytest.raises(RuntimeError):
        update(engine, 3)
    assert engine.label == core.NO_VERSION
    engine.fails = None
    update(engine, 4)
    assert engine.label == "4"


@pytest.mark.parametrize("failure", [tell(LOST, 1), tell(LOST, None), "of vLLM's own"])
def test_a_failure_that_left_the_weights_as_they_were_leaves_their_name(failure):
    engine = engine_core()
    engine.set_weight_version("step 1, as its driver says")
    engine.fails = failure
    with pytest.raises(RuntimeError):
        update(engine, 2)
    assert engine.label == "step 1, as its driver says"
    assert engine.scheduler.prefixes


def test_workers_with_different_versions_have_none():
    engine = engine_core()
    stuck = SimpleNamespace(active=property(lambda _: 5), __setattr__=lambda *_: None)
    engine.workers[1].weight_transfer_engine = type("Stuck", (), vars(stuck))()
    update(engine, 6)
    assert engine.label == core.NO_VERSION


@pytest.mark.parametrize(
    ("load_format", "label"), [("dummy", core.NO_VERSION), ("auto", core.FIRST)]
)
def test_dummy_weights_are_no_version(load_format, label):
    engine = engine_core(load_format=load_format)
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    assert engine.label == label
    engine.set_weight_version("3")
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    assert engine.label == "3"  # it follows another model now, with the weights of this one


@pytest.mark.parametrize("backend", ["nccl", None])
def test_an_engine_of_another_backend_is_left_alone(backend):
    engine = engine_core(backend)
    update(engine)
    assert engine.scheduler.prefixes
    assert engine.label == core.FIRST


def test_a_core_that_is_loaded_is_watched(monkeypatch):
    monkeypatch.delitem(sys.modules, core.CORE, raising=False)
    core.watch()
    loaded = ModuleType(core.CORE)
    loaded.EngineCore = type("EngineCore", (), {"collective_rpc": lambda self: None})
    monkeypatch.setitem(sys.modules, core.CORE, loaded)
    core.watch()
    assert loaded.EngineCore.collective_rpc.is_watched
