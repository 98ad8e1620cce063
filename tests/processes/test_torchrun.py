"""torchrun with our rendezvous: real agents and workers, some of which are killed."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from elastic_worker import pop, push
from torch import nn
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import torch_ros
from torch_ros import environment
from torch_ros.dcp import ROSReader
from torch_ros.errors import UsageError
from torch_ros.store import EtcdStore

WORKER = pathlib.Path(__file__).with_name("elastic_worker.py")
TORCHRUN = "from torch.distributed.run import main; main()"
ENDPOINT = "TORCH_ROS_ENDPOINT"
BUSY_S = 180  # each worker imports torch, which takes half a minute on a busy machine
FAST = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Node:
    """An agent and what it starts, as on a machine of its own: all of them can be killed at once.

    torchrun gives its workers sessions of their own; they are found by their environment.
    """

    def __init__(self, name, agent):
        self.mark, self.agent = f"TEST_NODE={name}".encode(), agent

    def pids(self):
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def kill(self):
        self.agent.kill()
        while found := list(self.pids()):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait(self):
        return self.agent.wait(BUSY_S)


class Job:
    """Nodes of one torchrun job, and the queues that lead to its workers."""

    def __init__(self, endpoint, started):
        self.endpoint, self.started = endpoint, started
        self.name, self.model, self.nodes = uuid.uuid4().hex, uuid.uuid4().hex, {}
        self.control = EtcdStore(
            endpoint, f"control-{self.name}", timeout=timedelta(seconds=BUSY_S)
        )

    def start(self, node, job, nnodes="1:2", restarts=3, **environment):
        arguments = [
            *("--rdzv-backend=torch-ros", f"--rdzv-id={self.name}", f"--rdzv-conf={FAST}"),
            f"--rdzv-endpoint={self.endpoint.removeprefix('etcd://')}",
            *(f"--nnodes={nnodes}", "--nproc-per-node=1", f"--max-restarts={restarts}"),
            *("--monitor-interval=0.1", str(WORKER), job, self.endpoint, f"control-{self.name}"),
        ]
        name = f"{node}-{self.name}"
        environment = {"TEST_NODE": name, "TORCH_ROS_MODEL": self.model} | environment
        agent = self.started.start(TORCHRUN, *arguments, name=name, **environment)
        self.nodes[node] = Node(name, agent)

    def event(self):
        try:
            found = json.loads(pop(self.control, "events"))
        except torch.distributed.DistStoreError:
            pytest.fail("\n".join(n.agent.end_of_log() for n in self.nodes.values()))
        return found

    def told(self, command):
        push(self.control, "commands", command)

    def close(self):
        for node in self.nodes.values():
            node.kill()
        self.control.close()


@pytest.fixture
def job(etcd_endpoint, started, monkeypatch):
    monkeypatch.delenv(ENDPOINT, raising=False)
    found = Job(etcd_endpoint, started)
    yield found
    found.close()


class Rollout:
    """Follows the trainer from this process; what it holds outlives any of the job's processes."""

    def __init__(self, endpoint, model):
        self.handle = torch_ros.open(model, endpoint=endpoint, rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
        self.state_dict = {"model": model.state_dict(), "version": 0}

    def follow(self, version):
        reader = ROSReader(version, handle=self.handle, timeout_s=30)
        dcp.load(self.state_dict, storage_reader=reader)
        assert self.state_dict["version"] == self.handle.version == version


@pytest.mark.timeout(3 * BUSY_S)
def test_a_job_grows_loses_a_node_and_goes_on_with_the_weights_of_its_peers(job, etcd_endpoint):
    def nodes_of(event):
        return sorted(name.partition("-")[0] for name in event["nodes"])

    job.start("a", "train")
    event = job.event()
    assert (event["what"], event["version"], nodes_of(event)) == ("started", 0, ["a"])
    job.told("step")
    published = job.event()
    assert (published["what"], published["version"]) == ("published", 1)

    rollout = Rollout(etcd_endpoint, job.model)
    try:
        rollout.follow(1)

        job.start("b", "train")  # late; a's worker begins anew, beside b's
        event = job.event()
        assert (event["what"], nodes_of(event)) == ("started", ["a", "b"])
        assert (event["version"], event["weights"]) == (1, published["weights"])
        job.told("step")
        published = job.event()
        assert published["version"] == 2
        rollout.follow(2)

        first = event["nodes"][0].partition("-")[0]  # it had rank 0, and with env:// the store
        job.nodes[first].kill()
        (other,) = {"a", "b"} - {first}
        event = job.event()
        assert (event["what"], nodes_of(event)) == ("started", [other])
        assert (event["version"], event["weights"]) == (2, published["weights"])
        job.told("step")
        published = job.event()
        assert published["version"] == 3
        rollout.follow(3)

        job.start("c", "train")
        event = job.event()
        assert nodes_of(event) == sorted([other, "c"])
        assert (event["version"], event["weights"]) == (3, published["weights"])
        job.told("stop")
        assert [job.nodes[name].wait() for name in (other, "c")] == [0, 0]
    finally:
        rollout.handle.close()


@pytest.mark.timeout(2 * BUSY_S)
def test_a_worker_that_always_fails_is_restarted_as_often_as_was_said(job):
    job.start("a", "fail", nnodes="1", restarts=2)
    assert job.nodes["a"].wait() == 1
    assert [job.event() for _ in range(3)] == [0, 1, 2]
    assert job.control.add("events/pushed", 0) == 3


@pytest.mark.timeout(2 * BUSY_S)
def test_workers_may_use_env_and_what_the_user_set_stays(job):
    for node in "ab":
        job.start(node, "once", nnodes="2", TORCH_ROS_ENDPOINT="the user's")
    assert [job.nodes[node].wait() for node in "ab"] == [0, 0]
    assert [job.event() for _ in range(4)] == [[2.0, "the user's"]] * 4


@pytest.mark.timeout(3 * BUSY_S)
def test_an_agent_alone_is_killed_and_another_takes_its_place(job):
    for node in "ab":
        job.start(node, "train", nnodes="2")
    event = job.event()
    second = event["nodes"][1].partition("-")[0]
    job.nodes[second].agent.kill()  # its worker lives on, until the next round breaks its group
    job.start("c", "train", nnodes="2")
    event = job.event()
    (other,) = {"a", "b"} - {second}
    assert sorted(name.partition("-")[0] for name in event["nodes"]) == sorted([other, "c"])
    job.told("stop")
    assert [job.nodes[name].wait() for name in (other, "c")] == [0, 0]


# What torchrun calls


@pytest.fixture
def handlers(monkeypatch):
    """How to make a handler as torchrun does; the environment is as before at the end."""
    for name in (ENDPOINT, environment.INIT_METHOD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    made = []

    def create(endpoint, run_id, nodes=1, **options):
        options = {"last_call_timeout": "1", "read_timeout": "20"} | options
        parameters = RendezvousParameters("torch-ros", endpoint, run_id, nodes, nodes, **options)
        made.append(get_rendezvous_handler(parameters))
        return made[-1]

    yield create
    for handler in made:
        handler.shutdown()


def worker_store(url=None):
    store, *_ = next(torch.distributed.rendezvous(f"{url or 'etcd://'}?rank=0&world_size=1"))
    return store


def test_two_agents_agree_on_who_they_are_and_on_a_store_for_each_round(handlers, etcd_endpoint):
    run_id = uuid.uuid4().hex
    pair = [handlers(etcd_endpoint, run_id, nodes=2) for _ in range(2)]
    urls = []
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            infos = list(pool.map(lambda handler: handler.next_rendezvous(), pair))
        assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
        names = {info.store.get("torch_ros/workers") for info in infos}
        assert len(names) == 1
        urls.append(os.environ[environment.INIT_METHOD])
        assert urls[-1].endswith(names.pop().decode())
        with contextlib.closing(worker_store()) as store:
            assert store.num_keys() == 0
            store.set("k", "v")
            with contextlib.closing(worker_store(urls[-1])) as other:
                assert other.get("k") == b"v"
    assert urls[0] != urls[1]
    assert pair[0].get_backend() == "torch-ros"
    assert os.environ[ENDPOINT] == etcd_endpoint


def test_a_job_that_has_ended_takes_no_more_nodes(handlers, etcd_endpoint):
    run_id = uuid.uuid4().hex
    first = handlers(etcd_endpoint, run_id)
    first.next_rendezvous()
    assert first.shutdown()
    with pytest.raises(RendezvousClosedError):
        handlers(etcd_endpoint, run_id).next_rendezvous()


def test_an_agent_waits_while_etcd_restarts(handlers, etcd_server):
    handler = handlers(f"etcd://{etcd_server.host}", "job", read_timeout="60")
    handler.next_rendezvous()
    etcd_server.kill()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(handler.set_closed)
        with pytest.raises(TimeoutError):
            closing.result(0.5)
        etcd_server.start()
        closing.result(50)
    assert handler.is_closed()


def test_the_endpoint_is_that_of_the_environment_if_it_is_not_given(
    handlers, etcd_endpoint, monkeypatch
):
    monkeypatch.setenv(ENDPOINT, etcd_endpoint)
    assert handlers("", uuid.uuid4().hex).endpoint == etcd_endpoint


def test_a_job_without_a_name_is_refused(handlers, etcd_endpoint):
    with pytest.raises(UsageError, match="--rdzv-id"):
        handlers(etcd_endpoint, "none")


def test_an_etcd_that_is_not_there_is_an_error_of_torchruns(handlers):
    with pytest.raises(RendezvousConnectionError, match="etcd"):
        handlers("127.0.0.1:1", "job", read_timeout="1")


def test_other_backends_pay_nothing_for_ours():
    code = (
        "import sys; from torch.distributed.elastic.rendezvous import rendezvous_handler_registry;"
        "assert 'torch-ros' in rendezvous_handler_registry._registry;"
        "assert not {'grpc', 'torch_ros.store.distributed.store'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
