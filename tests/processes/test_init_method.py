"""torch.distributed over etcd: two real processes, by URL and by store."""

import json
import subprocess
import sys
import uuid

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torch_ros.store import EtcdStore
from torch_ros.store.distributed import rendezvous
from torch_ros.store.distributed import store as torch_store

pytestmark = pytest.mark.timeout(120)

# What every rank does once it has a default group.
WORK = """
import json, os, sys
import torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import torch_ros.store.distributed.rendezvous
from torch_ros.store import EtcdStore

given = json.loads(sys.argv[1])
torch.set_num_threads(1)
if "store" in given:
    given["store"] = EtcdStore(*given["store"])
dist.init_process_group("gloo", timeout=timedelta(seconds=40), **given)
rank, size = dist.get_rank(), dist.get_world_size()

total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert size == 2 and total.item() == 3.0

alone = [dist.new_group([one]) for one in range(size)]
both = dist.new_group([0, 1])
own = torch.tensor([rank + 1.0])
dist.all_reduce(own, group=alone[rank])
assert own.item() == rank + 1.0
dist.all_reduce(own, group=both)
assert own.item() == 3.0
dist.barrier()
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
dist.monitored_barrier()

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
module.load_state_dict(whole.state_dict())
fully_shard(module, mesh=mesh["shard"])
batch = torch.randn(2, 8)
for trained, rows in ((whole, batch), (module, batch[rank : rank + 1])):
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(rows).square().mean().backward()
    optimizer.step()
for name, weight in module.state_dict().items():
    torch.testing.assert_close(weight.full_tensor(), whole.state_dict()[name])

dist.destroy_process_group()
"""


@pytest.fixture
def ranks(started):
    """Start ranks 0 and 1, each with its arguments; they must end well."""

    def run(arguments_of, environment_of=lambda rank: {}):
        for rank in range(2):
            started.start(WORK, json.dumps(arguments_of(rank)), **environment_of(rank))
        for puppet in started.started:
            puppet.finish()

    return run


@pytest.fixture
def url(etcd_endpoint):
    return f"{etcd_endpoint}/job-{uuid.uuid4().hex}"


def test_a_group_by_url(ranks, url):
    ranks(lambda rank: {"init_method": f"{url}?ttl_s=5", "rank": rank, "world_size": 2})


def test_a_group_by_url_with_ranks_from_the_environment(ranks, url):
    ranks(
        lambda _: {"init_method": f"{url}?timeout_s=20"},
        lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2", "TORCH_DIST_INIT_BARRIER": "1"},
    )


def test_a_group_on_a_store(ranks, etcd_endpoint):
    name = uuid.uuid4().hex
    ranks(lambda rank: {"store": [etcd_endpoint, name], "rank": rank, "world_size": 2})


NCCL = """
import sys
import torch, torch.distributed as dist
import torch_ros.store.distributed.rendezvous

rank = int(sys.argv[2])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=sys.argv[1], rank=rank, world_size=int(sys.argv[3]))
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
def test_nccl_meets_in_etcd(url):
    size = min(2, torch.cuda.device_count())
    command = [sys.executable, "-c", NCCL, url]
    ranks = [subprocess.Popen([*command, str(rank), str(size)]) for rank in range(size)]
    assert [rank.wait(90) for rank in ranks] == [0] * size


# What torch calls


@pytest.fixture
def opened(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = set(torch_store._open_stores)
    yield lambda *arguments, **options: next(dist.rendezvous(*arguments, **options))
    for store in torch_store._open_stores - before:
        store.close()


def test_the_url_says_where_and_who(opened, url, etcd_endpoint):
    store, rank, world_size = opened(f"{url}/of/mine?ttl_s=7", 3, 8)
    assert (store.endpoint, rank, world_size) == (etcd_endpoint, 3, 8)
    again, *_ = opened(f"{url}/of/mine?rank=0&world_size=8")
    again.set("k", "v")
    assert isinstance(store, EtcdStore)
    assert store.get("k") == b"v"


@pytest.mark.parametrize(
    ("tail", "complaint"),
    [
        ("", "name of the job"),
        ("/", "name of the job"),
        ("/job?rank=0", "world_size is neither"),
        ("/job?world_size=1", "rank is neither"),
        ("/job?rank=0&world_size=2&tll_s=3", "'tll_s' is no option"),
        ("/job?rank=0&world_size=2&ttl_s=x", "ttl_s is 'x'"),
        ("/job?rank=0&world_size=2&ttl_s=0", "ttl_s is 0"),
        ("/job?rank=zero&world_size=2", "rank is 'zero'"),
        ("/job?rank=0.5&world_size=2", "rank is '0.5'"),
    ],
)
def test_a_url_that_says_too_little_is_refused(opened, etcd_endpoint, tail, complaint):
    with pytest.raises(ValueError, match=complaint):
        opened(etcd_endpoint + tail)


def test_without_hosts_the_url_is_that_of_the_environment(opened, url, etcd_endpoint, monkeypatch):
    with pytest.raises(ValueError, match="TORCH_ROS_INIT_METHOD is not set"):
        opened("etcd://", 0, 1)
    monkeypatch.setenv("TORCH_ROS_INIT_METHOD", rendezvous.url_of(etcd_endpoint, "job of/ours"))
    store, rank, world_size = opened("etcd://?ttl_s=9", 1, 2)
    assert (store.endpoint, store.prefix, rank, world_size) == (etcd_endpoint, "job of/ours", 1, 2)


def test_a_password_in_a_url_is_not_shown():
    with pytest.raises(ValueError, match="name of the job") as caught:
        next(rendezvous.open_store("etcds://me:secret@host:2379"))
    assert "secret" not in str(caught.value)


def test_an_etcd_that_is_not_there_is_an_error(opened):
    with pytest.raises(dist.DistNetworkError, match="etcd at"):
        opened("etcd://127.0.0.1:1/job?timeout_s=0.5", 0, 1)


def test_importing_the_module_makes_torch_know_both_schemes():
    # torch.distributed has a function of the module's name too.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    assert handlers["etcd"] is handlers["etcds"] is rendezvous.open_store


def test_the_backend_of_torchrun_of_the_same_name_is_another():
    creator = rendezvous_handler_registry._registry["etcd"]
    assert creator.__module__.startswith("torch.distributed.elastic")
