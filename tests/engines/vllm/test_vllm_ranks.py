"""Ranks of one engine that do not all succeed, without an engine: vLLM's classes, and threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from ranks import Ranks
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from torch_ros.errors import StoreUnavailable
from torch_ros.integrations.vllm import born
from torch_ros.integrations.vllm.born import ROSModelLoader
from torch_ros.integrations.vllm.engine import ROSInitInfo, ROSWeightTransferEngine
from torch_ros.integrations.vllm.trainer import ROSTrainerInitInfo, ROSTrainerWeightTransferEngine


class Worker(ROSWeightTransferEngine):
    _ranks = None

    def __init__(self, ranks, endpoint):
        parallel = SimpleNamespace(enable_eplb=False, data_parallel_size=1)
        config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(enable_sleep_mode=False),
            load_config=SimpleNamespace(load_format="auto"),
        )
        model = torch.nn.Linear(2, 2)
        model.load_weights = lambda weights: None
        super().__init__(None, config, torch.device("cpu"), model)
        self._ranks = ranks
        self.info = {"model": "m", "replica": "r", "options": {"endpoint": endpoint}}

    @property
    def handle(self):
        return self._installer and self._installer.handle


@pytest.fixture
def pair(request):
    endpoint = f"memory://{request.node.name}"
    shared = threading.Barrier(2, timeout=10), [None, None]
    workers = [Worker(Ranks(rank, *shared), endpoint) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        yield (
            workers,
            lambda step: [
                one.exception(60) for one in [threads.submit(step, worker) for worker in workers]
            ],
        )
        list(threads.map(lambda worker: worker.shutdown(), workers))


def opened(worker):
    worker.init_transfer_engine(worker.parse_init_info(worker.info))


def updated(worker, info):
    worker.receive_weights(worker.parse_update_info(info))


def test_an_info_that_one_rank_cannot_read_is_none_for_all(pair):
    _, each = pair
    assert each(opened) == [None, None]
    infos = [{"version": 1}, {"nonsense": 1}]
    first, last = each(lambda worker: updated(worker, infos[worker._ranks.rank]))
    assert first is None
    assert "unexpected keyword argument 'nonsense'" in str(last)


def share_experts(config):
    config.parallel_config.enable_eplb = True


def offload(config):
    config.offload_config = SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=4))


@pytest.mark.parametrize(
    ("setting", "found"), [(share_experts, "EPLB"), (offload, "offload_group_size")]
)
def test_a_configuration_that_is_refused_leaves_the_model_that_is_followed(pair, setting, found):
    workers, each = pair
    assert each(opened) == [None, None]
    handles = [worker.handle for worker in workers]
    setting(workers[1].vllm_config)
    _, last = each(opened)
    assert found in str(last)
    assert [worker.handle for worker in workers] == handles
    assert not any(handle.is_closed for handle in handles)


def test_an_engine_whose_etcd_was_away_at_its_birth_follows_when_it_is_updated(pair, monkeypatch):
    """Nobody has to tell it again what it follows."""
    workers, each = pair
    own = Worker._handle
    away = [True]

    def handle(worker, *args, **named):
        if away[0] and worker._ranks.rank == 1:
            raise StoreUnavailable("etcd://here", 5.0, "it does not answer")
        return own(worker, *args, **named)

    monkeypatch.setattr(Worker, "_handle", handle)
    for worker in workers:
        worker._born_with = ROSInitInfo(**worker.info, timeout_s=1.0)

    def installed(worker):
        updated(worker, {"version": 1, "timeout_s": 0.1})

    first, last = each(installed)
    assert first is None
    assert "StoreUnavailable" in str(last) or "DeadlineExceeded" in str(last)
    assert [worker.handle for worker in workers] == [None, None]
    away[0] = False
    each(installed)  # of which there is no version yet
    assert not any(worker.handle.is_closed for worker in workers)


@pytest.fixture
def loader():
    load = SimpleNamespace(model_loader_extra_config={"model": "m"}, device=None)
    return ROSModelLoader(load)


def test_a_model_is_loaded_on_the_device_that_it_was_made_on(loader, monkeypatch):
    """vLLM calls the loader outside of that device's context."""
    made = []

    class Spy:
        def __init__(self, transfer, config, device, model):
            made.append(device)

        def begin(self, info):
            pass

    monkeypatch.setattr(born, "BornEngine", Spy)
    place = SimpleNamespace(device="meta")
    loader._vllm_config = SimpleNamespace(weight_transfer_config=None, device_config=place)
    loader.load_weights(torch.nn.Linear(2, 2), SimpleNamespace())
    assert made == [torch.device("meta")]


def test_a_start_that_fails_after_it_was_loaded_gives_its_seat_back(loader, monkeypatch):
    class Failed(Exception):
        pass

    closed = []
    loader._born = SimpleNamespace(shutdown=lambda: closed.append(True))

    def fail(*_):
        raise Failed

    monkeypatch.setattr(BaseModelLoader, "load_model", fail)
    parallel = SimpleNamespace(data_parallel_size=1)
    names = {"speculative_config": None, "weight_transfer_config": None}
    with pytest.raises(Failed):
        loader.load_model(SimpleNamespace(parallel_config=parallel, **names), None)
    assert closed == [True]


def test_a_trainer_ends_the_session_of_an_update_that_failed():
    """With several workers vLLM ends it on those only that raised."""

    class Client:
        asked, is_broken = [], True

        def init_weight_transfer_engine(self, info):
            pass

        def start_weight_update(self):
            self.asked.append("start")

        def update_weights(self, info):
            self.asked.append("update")
            if self.is_broken:
                raise RuntimeError("refused")

        def finish_weight_update(self, weight_version=None):
            self.asked.append(f"finish {weight_version}")

    class Source:
        def held_names(self):
            return None

        def __iter__(self):
            yield "x", torch.ones(3)

    options = {"endpoint": "memory://trainer-session", "linger_s": 0}
    trainer = ROSTrainerWeightTransferEngine.trainer_init(
        ROSTrainerInitInfo("m", rank=0, options=options), client=Client(), source=Source()
    )
    with pytest.raises(RuntimeError, match="refused"):
        trainer.send_weights()
    trainer.client.is_broken = False
    trainer.send_weights()
    trainer.shutdown()
    every = ["start", "update", "finish None", "start", "update", "finish 1"]
    assert trainer.client.asked == every
