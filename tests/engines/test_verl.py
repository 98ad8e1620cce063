"""verl itself updates its rollouts by torch_ros: its registry, its manager, its rollout worker.

Left out of verl: Ray, whose calls are made by threads here, and the inference server behind a
rollout worker, in whose place the tensors are kept.
"""

import asyncio
import inspect
import types
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from omegaconf import OmegaConf
from printed import printed
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, base
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

SHAPES = {f"model.layers.{k}.mlp.weight": (64, 128) for k in range(6)} | {"lm_head.weight": (3, 5)}


def weights(value):
    for number, (name, shape) in enumerate(SHAPES.items()):
        yield name, torch.full(shape, value + number / 16)


class Kept:
    """A rollout's server, as verl's worker sees it; keeps tensors as verl's SGLang adapter does."""

    async def update_weights(self, weights, global_steps=None, wire_format=None):
        assert wire_format == "named_tensors"
        buckets = get_named_tensor_buckets(weights, 1 << 20)
        self.step = global_steps
        self.tensors = {name: tensor async for bucket in buckets for name, tensor in bucket}


class Actor:
    """The two lines that verl's own actor has for a checkpoint engine."""

    def __init__(self, engine):
        self.checkpoint_engine, self.value = engine, 0.0

    def execute_checkpoint_engine(self, method, **named):
        return getattr(self.checkpoint_engine, method)(**named)

    async def update_weights(self, global_steps=None, mode="auto"):
        per_tensor_param = weights(self.value)
        return await self.checkpoint_engine.send_weights(
            per_tensor_param, global_steps=global_steps
        )


def rollout(engine):
    made = object.__new__(base.CheckpointEngineWorker)
    made.checkpoint_engine, made.server_adapter = engine, Kept()
    return made


class Replica:
    """A rollout replica of one worker; the manager calls the rest."""

    def __init__(self, worker):
        self.workers, self.called = [worker], []

    def __getattr__(self, name):
        async def call(**_):
            self.called.append(name)

        return call


class Group:
    """RayWorkerGroup's calls, on threads."""

    pool = ThreadPoolExecutor(16)

    def __init__(self, worker_handles, ray_cls_with_init=None):
        self.workers, self.world_size = worker_handles, len(worker_handles)

    def execute_checkpoint_engine(self, method, **named):
        return [
            self.pool.submit(
                worker.execute_checkpoint_engine, method[n], **{k: v[n] for k, v in named.items()}
            )
            for n, worker in enumerate(self.workers)
        ]

    def update_weights(self, **named):
        return [
            self.pool.submit(asyncio.run, worker.update_weights(**named)) for worker in self.workers
        ]


@pytest.fixture
def engines(monkeypatch):
    """verl's configuration, and what verl makes of it."""
    monkeypatch.setattr(base.ray, "get", lambda asked: [one.result(60) for one in asked])
    monkeypatch.setattr(base, "RayWorkerGroup", Group)
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 30}
    config = CheckpointEngineConfig(
        backend="torch_ros",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"torch_ros": {"options": options}},
        custom_backend_module="torch_ros.integrations.verl",
    )
    import_external_libs(config.custom_backend_module)
    made = []

    def new(**named):
        engine = CheckpointEngineRegistry.new(
            config.backend, bucket_size=64 << 10, **named, **config.engine_kwargs[config.backend]
        )
        made.append(engine)
        return engine

    yield types.SimpleNamespace(new=new, config=config)
    list(Group.pool.map(lambda engine: engine.close(), reversed(made)))


def test_two_steps_by_verls_manager_and_a_replica_that_joins_between_them(engines):
    actors = Group([Actor(engines.new(is_master=rank == 0)) for rank in range(2)])
    replicas = [Replica(rollout(engines.new())) for _ in range(2)]
    manager = base.CheckpointEngineManager(engines.config, actors, list(replicas))
    handles = []
    for step in (1, 2):
        for actor in actors.workers:
            actor.value = float(step)
        metrics = manager.update_weights(global_steps=step)
        metrics = asyncio.run(metrics) if inspect.isawaitable(metrics) else metrics
        for replica in manager.replicas:
            kept = replica.workers[0].server_adapter
            assert kept.step == step
            assert {name: tuple(t.shape) for name, t in kept.tensors.items()} == SHAPES
            for name, expected in weights(step):
                assert torch.equal(kept.tensors[name], expected), name
        assert metrics["torch_ros/version"] == step
        handles.append([worker.checkpoint_engine._handle for worker in actors.workers])
        if step == 1:
            joined = Replica(rollout(engines.new()))
            manager.add_replicas([joined])
    assert handles[0] == handles[1]
    assert len(manager.replicas) == 3
    assert replicas[0].called.count("resume_generation") == 2


def test_our_engine_has_what_verls_abstract_one_asks_for(engines):
    ours = type(engines.new())
    assert CheckpointEngineRegistry.get("torch_ros") is ours
    assert issubclass(ours, CheckpointEngine)
    for name in CheckpointEngine.__abstractmethods__:
        asked = list(inspect.signature(getattr(CheckpointEngine, name)).parameters.values())
        has = inspect.signature(getattr(ours, name)).parameters
        named = [one.name for one in asked if one.kind is not one.VAR_KEYWORD]
        assert set(named) <= set(has), name
    assert ours.wire_format == CheckpointEngine.wire_format


def test_the_configuration_in_the_documents_is_one_of_verls():
    job = OmegaConf.create(printed("verl", "yaml"))
    config = CheckpointEngineConfig(**job.actor_rollout_ref.rollout.checkpoint_engine)
    import_external_libs(config.custom_backend_module)
    own = OmegaConf.to_container(config.engine_kwargs)[config.backend]
    made = CheckpointEngineRegistry.new(config.backend, bucket_size=1 << 20, is_master=True, **own)
    assert made.prepare()["job"].startswith("verl-")
