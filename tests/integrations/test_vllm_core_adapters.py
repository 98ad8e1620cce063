"""vLLM's engine core loads adapters between steps, and answers none with a base of another."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from test_vllm_core import engine_core, update, vllm  # noqa: F401  # a fixture

from torch_ros.errors import ManifestMismatch, VersionNotFound
from torch_ros.integrations.adapters import BaseContent
from torch_ros.integrations.vllm import core_adapters
from torch_ros.integrations.vllm.core_adapters import KEPT, LoadedAdapter
from torch_ros.integrations.vllm.told import hear, tell
from torch_ros.integrations.vllm.worker_adapters import base_mismatch


@dataclass(frozen=True)
class Lora:
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


@dataclass(frozen=True)
class Request:
    request_id: str
    lora_request: Lora | None = None
    client_index: int = 3


@dataclass
class Workers:
    """All workers of an engine: what they are asked for, and what they have loaded."""

    contents: dict = field(default_factory=dict)  # by path
    asked: list = field(default_factory=list)
    there: set = field(default_factory=set)

    def load_adapter(self, worker, request, let_go, active):
        path = request.lora_path
        if path not in self.contents:
            raise RuntimeError(tell(VersionNotFound("code", "9", "nobody has it"), None))
        if (error := base_mismatch(path, self.contents[path].base, active)) is not None:
            raise RuntimeError(tell(error, None))
        self.asked.append(path)
        self.there = (self.there | {path}) - {*let_go}
        return self.contents[path]

    def drop_adapter(self, worker, number, let_go):
        self.there -= {*let_go}
        return True


@pytest.fixture
def workers(monkeypatch):
    found = Workers()
    monkeypatch.setattr(core_adapters, "load_adapter", found.load_adapter)
    monkeypatch.setattr(core_adapters, "drop_adapter", found.drop_adapter)
    return found


def path(version, model="code"):
    return f"torch-ros://{model}@{version}"


def adapter(uid="1", base=None):
    return LoadedAdapter(uid, base and BaseContent(base, "run", f"content {base}"))


def ended(engine):
    return engine.scheduler.ended


def test_an_adapter_of_vllms_own_is_none_of_ours(workers):
    engine = engine_core()
    assert engine.add_lora(Lora("/disk/code"))
    engine.add_request(Request("r", Lora("/disk/code")))
    assert engine.called == ["add_lora /disk/code"]
    assert not ended(engine)


def test_a_request_loads_its_adapter_once(workers):
    engine = engine_core()
    workers.contents[path(1)] = adapter()
    for name in ("a", "b"):
        engine.add_request(Request(name, Lora(path(1))))
    assert workers.asked == [path(1)] * 2  # by each of two workers
    assert not ended(engine)


def test_a_request_whose_adapter_is_gone_ends_and_no_other(workers):
    engine = engine_core(is_process=True)
    engine.add_request(Request("a", Lora(path(9))))
    engine.add_request(Request("b"))
    assert ended(engine) == ["a"]
    assert engine.told == [("a", 3)]


def test_an_adapter_waits_for_its_base(workers):
    engine = engine_core(is_process=True)
    workers.contents[path(1)] = adapter(base=2)
    with pytest.raises(RuntimeError, match="weights that are no version"):
        engine.add_lora(Lora(path(1)))
    update(engine, 1)
    with pytest.raises(RuntimeError, match="another version in this engine") as caught:
        engine.add_lora(Lora(path(1)))
    assert type(hear(caught.value)[0]) is ManifestMismatch
    engine.add_request(Request("a", Lora(path(1))))
    assert ended(engine) == ["a"]
    assert not workers.there  # nor does its number mean it
    workers.contents[path(2)] = adapter()
    assert engine.add_lora(Lora(path(2)))
    assert engine.remove_lora(1)
    update(engine, 2)
    engine.add_request(Request("b", Lora(path(1))))
    assert ended(engine) == ["a"]


def test_requests_that_run_end_when_their_base_goes(workers):
    engine = engine_core(is_process=True)
    workers.contents |= {path(1): adapter(base=1), path(1, "any"): adapter()}
    update(engine, 1)
    kept = Request("kept", Lora(path(1, "any"), 2)), Request("plain")
    engine.scheduler.reset = lambda *_: True  # vLLM keeps requests, and computes them anew
    for one in (Request("fits"), *kept):
        engine.add_request(one)
    engine.add_request(Request("misfit", Lora(path(1))))
    update(engine, 2)
    assert ended(engine) == ["misfit"]
    assert engine.told == [("misfit", 3)]


def test_weights_that_were_loaded_by_hand_are_nobodys_base(workers):
    engine = engine_core()
    workers.contents[path(1)] = adapter(base=1)
    update(engine, 1)
    assert engine.add_lora(Lora(path(1)))
    engine.collective_rpc("reload_weights")
    engine.add_request(Request("a", Lora(path(1))))
    assert ended(engine) == ["a"]


def test_the_adapters_used_last_stay(workers):
    engine = engine_core()
    workers.contents |= {path(n): adapter(str(n)) for n in range(1, KEPT + 3)}
    for version in range(1, KEPT + 1):
        engine.add_lora(Lora(path(version), version))
    engine.add_request(Request("r", Lora(path(1), 1)))  # used again, and it runs
    engine.add_lora(Lora(path(KEPT + 1), KEPT + 1))
    assert workers.there == workers.contents.keys() - {path(2), path(KEPT + 2)}
    for version in range(3, KEPT + 2):  # now that of the request is the oldest
        engine.add_request(Request(f"{version}", Lora(path(version), version)))
    engine.scheduler.running = [engine.scheduler.requests["r"]]
    engine.add_lora(Lora(path(KEPT + 2), KEPT + 2))
    assert path(1) in workers.there
    engine.add_lora(Lora(path(2), 2))  # its number is free again
    assert path(2) in workers.there


def test_an_engine_whose_vllm_keeps_more_does_so_too(workers):
    engine = engine_core()
    engine.vllm_config.lora_config = SimpleNamespace(max_cpu_loras=KEPT + 4)
    for version in range(KEPT + 6):
        workers.contents[path(version)] = adapter(str(version))
        engine.add_lora(Lora(path(version), version + 1))
    assert len(workers.there) == KEPT + 4


def test_a_number_means_one_path(workers):
    """vLLM would answer with what it has under the number."""
    engine = engine_core(is_process=True)
    workers.contents |= {path(1): adapter("a"), path(2): adapter("b")}
    engine.add_lora(Lora(path(1), 1))
    with pytest.raises(RuntimeError, match="number 1 is that of torch-ros://code@1"):
        engine.add_lora(Lora(path(2), 1))
    engine.add_lora(Lora(path(2), 2))
    engine.add_request(Request("a", Lora(path(2), 1)))
    assert ended(engine) == ["a"]
    engine.add_request(Request("b", Lora(path(2), 2)))
    assert ended(engine) == ["a"]


def test_an_adapter_that_is_dropped_leaves_the_host(workers):
    engine = engine_core()
    workers.contents |= {path(1): adapter("a"), path(2): adapter("b")}
    for number, version in ((1, 1), (2, 1), (3, 2)):
        engine.add_lora(Lora(path(version), number))
    assert engine.remove_lora(1)
    assert workers.there == {path(1), path(2)}  # another number has it
    engine.add_request(Request("r", Lora(path(2), 3)))
    assert engine.remove_lora(2)
    assert engine.remove_lora(3)  # which a request that runs may ask for again
    assert workers.there == {path(2)}
    engine.add_lora(Lora(path(1), 3))
    assert workers.there == {path(1), path(2)}
    assert engine.remove_lora(9)
    assert engine.called == ["remove_lora 9"]


def test_a_path_that_failed_is_not_tried_for_each_request(workers, monkeypatch):
    engine, tried = engine_core(), []
    failing = workers.load_adapter

    def load(*args):
        tried.append(args)
        return failing(*args)

    monkeypatch.setattr(core_adapters, "load_adapter", load)
    for name in ("a", "b"):
        engine.add_request(Request(name, Lora(path(9))))
    assert len(tried) == 1
    assert ended(engine) == ["a", "b"]
    workers.contents[path(9)] = adapter()
    engine.add_request(Request("c", Lora(path(9))))
    assert ended(engine) == ["a", "b", "c"]
    what, _, why = getattr(engine, core_adapters.FAILED)
    setattr(engine, core_adapters.FAILED, (what, 0.0, why))  # the time is over
    engine.add_request(Request("d", Lora(path(9))))
    assert ended(engine) == ["a", "b", "c"]


def test_a_pooling_model_is_told_that_it_has_no_adapters(workers):
    """vLLM has no answer to one of its requests that fails."""
    engine = engine_core()
    engine.is_pooling_model = True
    workers.contents[path(1)] = adapter()
    with pytest.raises(RuntimeError, match="for a pooling model"):
        engine.add_lora(Lora(path(1)))
    assert not workers.there


def test_an_adapter_that_is_loaded_in_place_is_asked_for_each_time(workers):
    """And so refused: vLLM would read it in each step."""
    engine = engine_core()
    workers.contents[path(1)] = adapter()
    engine.add_lora(Lora(path(1)))
    del workers.contents[path(1)]
    engine.add_request(Request("a", Lora(path(1), load_inplace=True)))
    assert ended(engine) == ["a"]
