"""The checkpoint engine for verl, called as verl 0.9 calls it; tests/engines has verl itself."""

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_ros
from torch_ros.errors import DeadlineExceeded, UsageError
from torch_ros.integrations.verl import ROSCheckpointEngine

SHAPES = {f"layers.{k}.weight": (8, 4 + k) for k in range(5)} | {"norm.weight": (3,)}
BUCKET = 520  # bytes: each half has one of the layers


def handle_of(engine):
    return engine._handle


def weights(value):
    """One tensor at a time, in memory that the next one takes."""
    memory = torch.empty(64)
    for name, shape in SHAPES.items():
        yield name, memory[: torch.Size(shape).numel()].view(shape).fill_(value)


class Job:
    """Two actors and some rollouts in threads, asked in the order of verl's manager."""

    def __init__(self, rollouts=2, **options):
        self.options = {"endpoint": f"memory://{uuid.uuid4().hex}", "timeout_s": 20} | options
        self.pool = ThreadPoolExecutor(16)
        self.actors = [self.engine(is_master=rank == 0) for rank in range(2)]
        self.rollouts = [self.engine() for _ in range(rollouts)]

    def engine(self, **named):
        return ROSCheckpointEngine(bucket_size=BUCKET, options=self.options, **named)

    def each(self, engines, method, arguments):
        asked = [
            self.pool.submit(getattr(engine, method), **{k: v[n] for k, v in arguments.items()})
            for n, engine in enumerate(engines)
        ]
        return [one.result(60) for one in asked]

    def connect(self):
        everyone = [*self.actors, *self.rollouts]
        told = self.each(everyone, "prepare", {})
        actors, rollouts = ROSCheckpointEngine.build_topology(
            len(self.actors), len(self.rollouts), told
        )
        both = {name: actors[name] + rollouts[name] for name in actors}
        self.each(everyone, "init_process_group", both)

    def update(self, value, step):
        """Returns what the actors told, and the tensors that each rollout got."""
        self.connect()
        sent = [
            self.pool.submit(asyncio.run, actor.send_weights(weights(value), global_steps=step))
            for actor in self.actors
        ]
        got = [self.pool.submit(asyncio.run, self.received(one, step)) for one in self.rollouts]
        both = [one.result(60) for one in sent], [one.result(60) for one in got]
        self.each([*self.actors, *self.rollouts], "finalize", {})
        return both

    @staticmethod
    async def received(rollout, step):
        return {
            name: tensor.clone()
            async for name, tensor in rollout.receive_weights(global_steps=step)
        }

    def close(self):
        self.each([*self.rollouts, *self.actors], "close", {})
        self.pool.shutdown()


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


def is_all(tensors, value):
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return shapes == SHAPES and all((tensor == value).all() for tensor in tensors.values())


def test_rollouts_get_what_the_actors_gathered_and_nothing_is_opened_again(job):
    told, got = job.update(1.0, step=1)
    assert all(is_all(tensors, 1.0) for tensors in got)
    handles = [handle_of(engine) for engine in [*job.actors, *job.rollouts]]
    told, got = job.update(2.0, step=5)
    assert all(is_all(tensors, 2.0) for tensors in got)
    assert [handle_of(engine) for engine in [*job.actors, *job.rollouts]] == handles
    assert {one["torch_ros/version"] for one in told} == {5}


def test_the_actors_share_the_copies_evenly(job):
    told, _ = job.update(1.0, step=1)
    shares = [one["torch_ros/bytes"] for one in told]
    total = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sum(shares) == total
    assert max(shares) <= 0.6 * total


def test_an_update_is_told_from_the_one_before_at_the_same_step_or_at_none(job):
    for value, step in ((1.0, 7), (2.0, 7), (3.0, None), (4.0, 2)):
        told, got = job.update(value, step)
        assert all(is_all(tensors, value) for tensors in got), step
    assert told[0]["torch_ros/version"] == 10


def test_a_rollout_that_joins_later_and_one_that_leaves(job):
    job.update(1.0, step=1)
    job.rollouts.append(job.engine())
    job.rollouts.pop(0).close()
    _, got = job.update(2.0, step=2)
    assert len(got) == 2
    assert all(is_all(tensors, 2.0) for tensors in got)


def test_actors_that_start_again_are_followed(job):
    job.update(1.0, step=9)
    for actor in job.actors:
        actor.close()
    job.actors = [job.engine(is_master=rank == 0) for rank in range(2)]
    told, got = job.update(2.0, step=5)  # from an older checkpoint
    assert all(is_all(tensors, 2.0) for tensors in got)
    assert told[0]["torch_ros/version"] == 5


def test_others_follow_a_model_that_has_a_name():
    job = Job()
    for actor in job.actors:
        actor._model = "policy"
    with torch_ros.open("policy", **job.options) as other:
        job.update(3.0, step=3)
        assert other.contents().version == 3
    job.close()


def test_a_rollout_reads_ahead_in_no_more_than_verl_allows():
    job = Job(rollouts=1, timeout_s=20)
    job.connect()
    sent = [job.pool.submit(asyncio.run, a.send_weights(weights(1.0), 1)) for a in job.actors]
    (rollout,), names, seen = job.rollouts, [], []

    async def receive():
        async for name, tensor in rollout.receive_weights(global_steps=1):
            (filling,) = handle_of(rollout)._streams._open or [None]
            if filling is not None:  # it ends when it has read all
                held = filling._buffers.sizes
                assert len(held) == 2
                seen.append(sum(held))
            assert (tensor == 1).all()
            names.append(name)

    asyncio.run(receive())
    assert names == sorted(SHAPES)
    assert 0 < max(seen) <= BUCKET
    assert [one.result(60)["torch_ros/version"] for one in sent] == [1, 1]
    assert handle_of(rollout).version is None  # it holds nothing that others could be sent to
    job.close()


def test_tensors_come_on_the_device_that_is_asked_for(job):
    """Meta stands for a GPU."""
    job.rollouts = [job.engine(rollout_device="meta"), job.engine(rollout_device="cpu")]
    _, got = job.update(2.0, step=2)
    assert [{tensor.device.type for tensor in one.values()} for one in got] == [{"meta"}, {"cpu"}]


@pytest.mark.parametrize("is_there, expected", [(True, "meta"), (False, "cpu")])
def test_tensors_come_on_an_accelerator_only_where_there_is_one(
    job, monkeypatch, is_there, expected
):
    """Torch that was built with CUDA names it on a host without a GPU too, unless told to look."""

    def current(check_available=False):
        return torch.device("meta") if is_there or not check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    _, got = job.update(2.0, step=2)
    assert {tensor.device.type for one in got for tensor in one.values()} == {expected}


def test_a_rollout_that_is_left_early_lets_go(job):
    async def receive():
        tensors = job.rollouts[0].receive_weights(global_steps=1)
        async for _ in tensors:
            break
        await tensors.aclose()

    job.update(1.0, step=1)
    job.rollouts[0]._last = 0
    asyncio.run(receive())
    assert not handle_of(job.rollouts[0])._streams._open
    assert job.rollouts[0]._last == 0


def test_a_rollout_uses_a_version_when_verl_has_updated_all_of_them(job):
    job.update(1.0, step=1)
    trainer, first = handle_of(job.actors[0]), job.rollouts[0]
    names = {handle_of(rollout).replica for rollout in job.rollouts}
    assert trainer.wait_installed(1).active.keys() == names
    job.connect()
    sent = [job.pool.submit(asyncio.run, a.send_weights(weights(2.0), 2)) for a in job.actors]
    asyncio.run(job.received(first, step=2))
    told = trainer.installs()
    assert {name: one.active and one.active.version for name, one in told.items()} == {
        name: None if name == handle_of(first).replica else 1 for name in names
    }
    first.finalize()
    assert trainer.installs()[handle_of(first).replica].active.version == 2
    assert [one.result(60)["torch_ros/version"] for one in sent] == [2, 2]


def test_a_rollout_whose_server_fails_has_rejected_the_version(job):
    async def receive():
        tensors = job.rollouts[0].receive_weights(global_steps=2)
        async for _ in tensors:
            await tensors.athrow(RuntimeError("the server is out of memory"))

    job.update(1.0, step=1)
    sent = [job.pool.submit(asyncio.run, a.send_weights(weights(2.0), 2)) for a in job.actors]
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(receive())
    told = handle_of(job.actors[0]).installs()[handle_of(job.rollouts[0]).replica]
    assert told.active is None
    assert "the server is out of memory" in told.rejected.reason
    assert [one.result(60)["torch_ros/version"] for one in sent] == [2, 2]
    _, got = job.update(3.0, step=3)
    assert all(is_all(tensors, 3.0) for tensors in got)


@pytest.mark.long
def test_weights_that_never_come_are_missed_at_the_deadline():
    job = Job(timeout_s=2)
    job.connect()
    with pytest.raises(DeadlineExceeded, match="version 4 is not published yet"):
        asyncio.run(job.received(job.rollouts[0], step=4))
    job.close()


def test_an_engine_that_verl_has_not_connected_says_so(job):
    with pytest.raises(UsageError, match="has not made this worker an actor"):
        asyncio.run(job.rollouts[0].send_weights(weights(1.0), global_steps=1))
    with pytest.raises(UsageError, match="init_process_group"):
        asyncio.run(job.received(job.rollouts[0], step=1))


def test_more_actors_than_tensors_are_no_matter(monkeypatch):
    monkeypatch.setitem(globals(), "SHAPES", {"norm.weight": (3,)})
    job = Job()
    _, got = job.update(1.0, step=1)
    assert all(is_all(tensors, 1.0) for tensors in got)
    job.close()
