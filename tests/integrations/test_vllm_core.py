"""vLLM's engine core takes notice of updates; a class with its methods stands for it."""

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest

from torch_ros.errors import ManifestMismatch, NotAvailable, NotSupported, SourceLost
from torch_ros.integrations.vllm import core, core_adapters
from torch_ros.integrations.vllm.told import hear, tell

LOST = SourceLost("trainer", "it left", 0, 12)


class PauseState(Enum):
    """As vLLM's: "new" requests wait after a pause, or all do."""

    UNPAUSED, PAUSED_NEW, PAUSED_ALL = range(3)


class Scheduler:
    """Requests that hold blocks, and the prefixes that their weights have computed."""

    def __init__(self):
        self.prefixes, self.running, self.held_for_good = {"a prompt"}, ["a request"], []
        self.can_reset_connector, self.ended = True, []
        self.pause_state = PauseState.UNPAUSED

    @property
    def requests(self):
        return {one.request_id: one for one in self.running if hasattr(one, "request_id")}

    def reset(self, reset_running_requests, reset_connector):
        if reset_running_requests:
            self.running = []
        if self.running:
            return False
        if self.held_for_good:
            raise RuntimeError("requests waiting for remote KV transfer")
        self.prefixes = set()
        return self.can_reset_connector or not reset_connector

    def finish_requests(self, names, status):
        assert status == "error"
        named = {one: getattr(one, "request_id", "") for one in self.running}
        ended = [one for one in self.running if names is None or named[one] in names]
        self.running = [one for one in self.running if one not in ended]
        self.ended += [named[one] for one in ended]
        return [one for one in ended if named[one]]


class TransferEngine:
    """Our part of a worker."""

    def __init__(self, core):
        self.active, self.uid, self.lack, self._core = None, "", "", core

    def withdraw(self):
        self._core.called.append("withdraw")


def engine_core(backend="torch_ros", load_format="auto", *, is_process=False, is_pooling=False):
    """A core of a class of its own, which is watched."""

    class Core:
        def __init__(self):
            transfer = backend and SimpleNamespace(backend=backend)
            load = SimpleNamespace(load_format=load_format)
            model = SimpleNamespace(runner_type="pooling" if is_pooling else "generate")
            names = {"weight_transfer_config": transfer, "load_config": load}
            self.vllm_config = SimpleNamespace(model_config=model, **names)
            self.scheduler, self.encodings, self.label = Scheduler(), {"an image"}, core.FIRST
            engines = [TransferEngine(self), TransferEngine(self)]
            self.workers = [SimpleNamespace(weight_transfer_engine=one) for one in engines]
            self.fails, self.is_pooling_model, self.can_reset_encoder = None, False, True
            self.step_fn, self.called = lambda: (None, True), []

        def _initialize_kv_caches(self, config):
            return config

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            if callable(method):
                return [method(worker, *args) for worker in self.workers]
            self.called.append(method)
            if isinstance(self.fails, Exception):
                raise self.fails
            if self.fails:
                raise RuntimeError(f"Worker failed with error '{self.fails}', see above")
            if method == "update_weights":
                version = kwargs["update_info"]["version"]
                for worker in self.workers:
                    worker.weight_transfer_engine.active = version
                    worker.weight_transfer_engine.uid = f"content {version}"
            return [None for _ in self.workers]

        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            return self.scheduler.reset(reset_running_requests, reset_connector)

        def reset_encoder_cache(self):
            if not self.can_reset_encoder:
                raise RuntimeError("a worker has failed")
            self.encodings = set()

        def set_weight_version(self, label):
            self.label = label

        def get_weight_version(self):
            return self.label

        def add_request(self, request):
            self.scheduler.running.append(request)

        def add_lora(self, lora):
            self.called.append(f"add_lora {lora.lora_path}")
            return True

        def remove_lora(self, number):
            self.called.append(f"remove_lora {number}")
            return True

        def resume_scheduler(self):
            self.scheduler.pause_state = PauseState.UNPAUSED

        def sleep(self, level=1, mode="abort"):
            self.called.append(f"sleep {level}")
            paused = mode == "keep"
            self.scheduler.pause_state = PauseState.PAUSED_ALL if paused else PauseState.PAUSED_NEW
            return Future() if mode == "wait" else None

    class CoreProcess(Core):
        def __init__(self):
            super().__init__()
            self.told = []

        def _send_error_outputs_to_client(self, names, client):
            self.told += [(name, client) for name in names]

    for _ in range(2):  # vLLM may load a plug-in more than once
        core.watch_class(Core)
    return (CoreProcess if is_process else Core)()


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """The module of engine cores, as far as they look there."""
    loaded = ModuleType(core.CORE)
    loaded.RequestStatus = SimpleNamespace(FINISHED_ERROR="error")
    loaded.FinishReason = SimpleNamespace(ERROR="failed")
    loaded.EngineCoreOutput = lambda name, tokens, finish_reason: (name, tokens, finish_reason)
    loaded.EngineCoreOutputs = SimpleNamespace
    monkeypatch.setitem(sys.modules, core.CORE, loaded)


def lost(**options):
    """A core that had version 1, whose update to 2 has failed in the middle while it was paused."""
    engine = engine_core(**options)
    update(engine, 1)
    engine.scheduler.pause_state = PauseState.PAUSED_ALL
    engine.fails = tell(LOST, None, has_lost=True)
    with pytest.raises(RuntimeError):
        update(engine, 2)
    engine.fails = None
    return engine


@dataclass(frozen=True)
class Request:
    request_id: str
    client_index: int


def request(name="r", client=3):
    return Request(name, client)


def update(engine, version=1):
    return engine.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})


def test_an_update_drops_what_old_weights_have_computed_though_requests_hold_it():
    engine = engine_core()
    assert update(engine, 7) == [None, None]
    assert not engine.scheduler.prefixes | engine.encodings
    assert engine.scheduler.running == []  # they are computed anew
    assert engine.label == "7"


def keep(engine, kept):
    """Have vLLM keep some of a cache, or drop all again."""
    engine.scheduler.held_for_good = ["remote"] * (kept == "requests")
    engine.scheduler.can_reset_connector = kept != "connector"
    engine.can_reset_encoder = kept != "encoder"


@pytest.mark.parametrize("call", ["update_weights", "reload_weights"])
@pytest.mark.parametrize("was_lost", [True, False])
@pytest.mark.parametrize("kept", ["requests", "connector", "encoder"])
def test_new_weights_beside_an_old_cache_are_no_version(kept, was_lost, call):
    engine = lost() if was_lost else engine_core()
    keep(engine, kept)
    with pytest.raises(RuntimeError) as caught:
        engine.collective_rpc(call, kwargs={"update_info": {"version": 3}})
    error, active = hear(caught.value)
    assert (type(error), active) == (NotAvailable, None)
    assert "end the requests that hold it" in str(error)
    assert engine.get_weight_version() == core.NO_VERSION
    with pytest.raises(RuntimeError, match="found a cache of older weights beside new ones"):
        engine.resume_scheduler()
    keep(engine, None)
    update(engine)
    assert not engine.scheduler.prefixes
    engine.resume_scheduler()


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
    stuck = SimpleNamespace(active=property(lambda _: 5), uid="", __setattr__=lambda *_: None)
    engine.workers[1].weight_transfer_engine = type("Stuck", (), vars(stuck))()
    with pytest.raises(RuntimeError, match="found several: its workers have 5, 6") as caught:
        update(engine, 6)
    assert hear(caught.value)[1] is None
    assert engine.label == core.NO_VERSION


@pytest.mark.parametrize(
    ("load_format", "label"), [("dummy", core.NO_VERSION), ("auto", core.FIRST)]
)
def test_dummy_weights_are_no_version(load_format, label):
    engine = engine_core(load_format=load_format)
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    assert engine.label == label
    update(engine, 3)
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    assert engine.label == "3"  # it follows another model now, with the weights of this one


def test_dummy_weights_are_no_version_though_a_driver_has_named_them():
    engine = engine_core(load_format="dummy")
    engine.set_weight_version("0")
    engine.collective_rpc("init_weight_transfer_engine")
    assert engine.get_weight_version() == core.NO_VERSION


def test_workers_know_their_draft_before_they_follow_a_model():
    engine, draft = engine_core(), object()
    first, second = engine.workers
    first.get_draft_model = lambda: draft  # as a release of vLLM has it, or not
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    assert first.weight_transfer_engine.draft is draft
    assert second.weight_transfer_engine.draft is None


def started(lack="", active=7, **options):
    """A core whose workers have loaded, as far as they could."""
    engine = engine_core(backend=None, load_format="torch_ros", **options)
    for worker in engine.workers:
        worker.weight_transfer_engine.active = None if lack else active
        worker.weight_transfer_engine.lack, worker.weight_transfer_engine.uid = lack, "a content"
    assert engine._initialize_kv_caches("a config") == "a config"
    return engine


def test_an_engine_that_is_born_with_a_version_answers_with_it():
    engine = started()
    assert engine.get_weight_version() == "7"
    assert getattr(engine, core_adapters.ACTIVE) == "a content"  # adapters of others are refused
    engine.add_request(request())
    assert len(engine.scheduler.running) == 2
    engine.collective_rpc("init_weight_transfer_engine")
    assert engine.get_weight_version() == "7"


@pytest.mark.parametrize("is_process", [True, False])
def test_an_engine_that_is_born_without_a_version_answers_nobody_until_one_comes(
    is_process, caplog
):
    engine = started("nobody has version 'latest'", is_process=is_process)
    [line] = caplog.messages
    assert "found none: nobody has version 'latest'; update it to a version, then" in line
    assert engine.get_weight_version() == core.NO_VERSION
    for _ in range(2):  # it is the same for a driver that attaches
        engine.add_request(request())
        assert len(engine.scheduler.running) == 1
        with pytest.raises(RuntimeError, match="nobody has version"):
            engine.resume_scheduler()
        engine.collective_rpc("init_weight_transfer_engine")
    update(engine, 1)
    engine.add_request(request())
    assert [one.request_id for one in engine.scheduler.running] == ["r"]
    assert engine.get_weight_version() == "1"


def test_an_engine_that_was_not_asked_what_it_was_born_with_has_no_version():
    engine = engine_core(backend=None, load_format="torch_ros")  # a vLLM that we do not know
    for _ in range(2):  # the same once a driver has attached
        assert engine.get_weight_version() == core.NO_VERSION
        engine.add_request(request())
        assert len(engine.scheduler.running) <= 1
        with pytest.raises(RuntimeError, match="found none yet"):
            engine.resume_scheduler()
        engine.collective_rpc("init_weight_transfer_engine")
    update(engine, 1)
    engine.add_request(request())
    assert engine.get_weight_version() == "1"
    assert [one.request_id for one in engine.scheduler.running] == ["r"]


def test_workers_that_were_born_with_different_versions_have_none():
    engine = engine_core(backend=None, load_format="torch_ros")
    for version, worker in enumerate(engine.workers):
        worker.weight_transfer_engine.active = version
    engine._initialize_kv_caches("a config")
    assert engine.get_weight_version() == core.NO_VERSION
    with pytest.raises(RuntimeError, match="found none: several"):
        engine.resume_scheduler()


def test_a_pooling_model_does_not_start_without_a_version():
    """It would answer by zeros: vLLM has no answer of it that says that there is none."""
    with pytest.raises(NotAvailable, match="found none: nobody has version 'latest'; a pooling"):
        started("nobody has version 'latest'", is_pooling=True)
    assert started(is_pooling=True).get_weight_version() == "7"


def test_an_engine_without_files_is_not_withdrawn_to_reload_them():
    engine = started()
    for how in ({}, {"kwargs": {"weights_path": "elsewhere"}}):
        with pytest.raises(RuntimeError, match="reads no files") as caught:
            engine.collective_rpc("reload_weights", **how)
        assert isinstance(hear(caught.value)[0], NotSupported)
    assert engine.called == []
    assert engine.get_weight_version() == "7"
    engine.collective_rpc("reload_weights", None, (), {"weights_iterator": [("x", 1)]})
    assert engine.get_weight_version() == core.BY_HAND


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_engine_that_was_born_otherwise_is_not_asked(load_format):
    engine = engine_core(load_format=load_format)
    engine.workers = [None]
    engine._initialize_kv_caches("a config")
    assert engine.get_weight_version() == core.FIRST


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
    methods = dict.fromkeys(core.WATCHED, lambda self: None)
    loaded.EngineCore = type("EngineCore", (), methods)
    monkeypatch.setitem(sys.modules, core.CORE, loaded)
    core.watch()
    assert all(getattr(loaded.EngineCore, name).is_watched for name in core.WATCHED)


# -- no version, no answer


def test_a_loss_is_logged_once_and_not_at_each_request(caplog):
    engine = lost()
    for name in "rs":
        engine.add_request(request(name))
    [line] = caplog.messages
    assert line.startswith("requests are refused: this engine: expected a whole version")
    assert "found none: update_weights has failed in the middle" in line


def test_an_engine_that_has_lost_its_version_answers_no_process():
    engine = lost(is_process=True)
    engine.scheduler.running = ["a request"]  # which is kept
    engine.add_request(request())
    assert engine.told == [("r", 3)]
    assert engine.scheduler.ended == ["r"]  # vLLM had it, and frees what a peer keeps for it
    assert engine.scheduler.running == ["a request"]
    update(engine, 3)
    engine.add_request(request("s"))
    assert [one.request_id for one in engine.scheduler.running] == ["s"]
    assert engine.told == [("r", 3)]


def test_an_engine_in_the_process_of_its_caller_hands_out_an_error_at_the_next_steps():
    """vLLM waits for a request for ever of which it gets no output."""
    engine = lost()
    for name in "rs":
        engine.add_request(request(name))
    steps = [engine.step_fn() for _ in range(3)]
    ended = [(found[0].outputs, found[0].finished_requests) for found, _ in steps[:2]]
    assert sorted(ended, key=str) == [([(n, [], "failed")], {n}) for n in "rs"]
    assert steps[2] == (None, True)  # its own


def test_requests_that_were_kept_do_not_go_on_without_a_version():
    engine = lost()
    with pytest.raises(RuntimeError, match="update it to a version, or load all weights by"):
        engine.resume_scheduler()
    assert engine.scheduler.pause_state == PauseState.PAUSED_ALL
    engine.set_weight_version("2")  # a driver that did not look at the answer
    assert engine.get_weight_version() == core.NO_VERSION
    with pytest.raises(RuntimeError):
        engine.resume_scheduler()
    update(engine, 3)
    assert engine.get_weight_version() == "3"
    engine.resume_scheduler()
    assert engine.scheduler.pause_state == PauseState.UNPAUSED


@pytest.mark.parametrize(
    ("state", "ends"),
    [(PauseState.UNPAUSED, True), (PauseState.PAUSED_NEW, True), (PauseState.PAUSED_ALL, False)],
)
def test_requests_that_run_end_with_an_error_and_those_that_are_kept_stay(state, ends):
    engine = engine_core(is_process=True)
    update(engine, 1)
    engine.add_request(request("running"))
    engine.scheduler.pause_state = state
    engine.fails = tell(LOST, None, has_lost=True)
    with pytest.raises(RuntimeError):
        update(engine, 2)
    assert engine.told == [("running", 3)] * ends
    assert len(engine.scheduler.running) == (not ends)


def test_an_engine_of_dummy_weights_answers_from_its_first_version_on():
    engine = engine_core(load_format="dummy")
    engine.add_request(request())  # nobody has attached
    engine.resume_scheduler()
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    engine.collective_rpc("shutdown_weight_transfer_engine")
    engine.add_request(request("refused"))
    with pytest.raises(RuntimeError, match="found none yet: it was started with dummy") as caught:
        engine.resume_scheduler()
    assert isinstance(hear(caught.value)[0], NotAvailable)
    update(engine, 1)
    engine.add_request(request("s"))
    assert [one.request_id for one in engine.scheduler.running] == ["s"]
    engine.resume_scheduler()


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before it attaches", "afterwards"])
def test_weights_that_were_loaded_by_hand_are_whole(is_before, load_format):
    engine = engine_core(load_format=load_format)
    calls = ["reload_weights", "init_weight_transfer_engine"]
    for call in calls if is_before else reversed(calls):
        engine.collective_rpc(call, kwargs={"init_info": {}})
    assert not engine.scheduler.prefixes
    engine.add_request(request())
    assert len(engine.scheduler.running) == 1
    assert engine.get_weight_version() == core.BY_HAND


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ("reload_weights", "no such file"),
        ("reset_weights", "of vLLM's own"),
        ("update_weights", TimeoutError("RPC call to update_weights timed out.")),
    ],
)
def test_a_call_that_may_have_written_and_fails_leaves_no_version(call, failure):
    engine = engine_core()
    update(engine, 7)
    engine.fails = failure
    with pytest.raises(type(failure) if isinstance(failure, Exception) else RuntimeError):
        engine.collective_rpc(call)
    assert engine.get_weight_version() == core.NO_VERSION
    with pytest.raises(RuntimeError, match=f"found none: {call} has failed in the middle"):
        engine.resume_scheduler()


@pytest.mark.parametrize("call", core.OVERWRITING)
def test_weights_are_withdrawn_before_vllm_overwrites_them(call):
    """Otherwise peers read them, and an update to the same version finds nothing to do."""
    engine = engine_core()
    update(engine, 7)
    engine.collective_rpc(call)
    assert engine.called == ["update_weights", "withdraw", "withdraw", call]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_weights_that_sleep_has_discarded_are_no_version(mode):
    engine = engine_core()
    update(engine, 7)
    engine.scheduler.running = [request("kept")]
    asleep = engine.sleep(level=2, mode=mode)
    assert engine.called[1:] == ["withdraw", "withdraw", "sleep 2"]
    if mode == "wait":
        assert engine.get_weight_version() == "7"  # requests that run are answered by it
        asleep.set_result(None)
    assert engine.get_weight_version() == core.NO_VERSION
    assert len(engine.scheduler.running) == (mode == "keep")
    with pytest.raises(RuntimeError, match="found none: sleep at level 2 has discarded it"):
        engine.resume_scheduler()
    update(engine, 7)
    engine.resume_scheduler()
    assert engine.get_weight_version() == "7"


@pytest.mark.parametrize("level", [0, 1])
def test_a_lighter_sleep_keeps_the_version(level):
    engine = engine_core()
    update(engine, 7)
    engine.sleep(level)
    assert engine.called[1:] == [f"sleep {level}"]
    assert engine.get_weight_version() == "7"


def test_weights_that_were_set_to_zero_are_no_version():
    engine = engine_core()
    update(engine, 7)
    engine.collective_rpc("reset_weights")
    assert engine.get_weight_version() == core.NO_VERSION
    update(engine, 8)
    assert engine.get_weight_version() == "8"


def test_an_engine_without_a_version_stays_so_after_a_failure_before_a_byte():
    engine = lost()
    engine.fails = tell(ManifestMismatch("x", "y", "z", "w"), None)
    with pytest.raises(RuntimeError, match="Worker failed"):
        update(engine, 3)
    engine.add_request(request())
    assert not engine.scheduler.running


def test_a_failure_that_left_the_weights_as_they_were_refuses_nothing():
    engine = engine_core()
    engine.fails = tell(LOST, 1)
    with pytest.raises(RuntimeError):
        update(engine, 2)
    engine.add_request(request())
    assert len(engine.scheduler.running) == 2
    engine.resume_scheduler()


def test_requests_of_pooling_pass():
    """vLLM's server ends where one of these has failed."""
    engine = lost(is_process=True)
    engine.is_pooling_model = True
    engine.add_request(request())
    assert not engine.told


@pytest.mark.parametrize("lacks", [(True, False), (False, True), (False, False)])
def test_engines_that_share_experts_resume_together_or_not_at_all(lacks):
    """They wait for each other in vLLM's call: one that refused alone would let the others hang."""
    engines = [lost() if lack else engine_core() for lack in lacks]
    met = threading.Barrier(2)
    said = []

    def any_of(group, mine):
        assert group == "a group"
        said.append(mine)
        met.wait(30)
        return any(said)

    def resume(engine):
        engine.dp_group = "a group"
        engine.vllm_config.parallel_config = SimpleNamespace(has_unfinished_dp=any_of)
        try:
            engine.resume_scheduler()
        except RuntimeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as threads:
        refused = list(threads.map(resume, engines))
    assert [one is not None for one in refused] == [any(lacks)] * 2


@pytest.mark.parametrize("name", ["add_request", "resume_scheduler", "get_weight_version"])
def test_an_engine_of_ours_says_which_method_its_vllm_lacks(monkeypatch, caplog, name):
    engine = engine_core()
    monkeypatch.delattr(type(engine), name)
    engine.collective_rpc("init_weight_transfer_engine")
    assert f"vLLM's engine core has no {name}" in caplog.text


def test_a_vllm_that_lacks_a_method_is_none_of_other_engines_business(caplog):
    core.watch_class(type("OtherCore", (), {"collective_rpc": lambda self, method: None}))
    assert not caplog.text


@pytest.mark.parametrize("has_class", [True, False])
def test_a_vllm_with_another_core_starts_all_the_same(monkeypatch, caplog, has_class):
    loaded = ModuleType(core.CORE)
    if has_class:
        loaded.EngineCore = type("EngineCore", (), {})
    monkeypatch.setitem(sys.modules, core.CORE, loaded)
    core.watch()
    assert "vLLM's engine core has no collective_rpc" in caplog.text
