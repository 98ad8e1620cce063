"""Handles whose tensors lie in shared memory or not, read from another process."""

import logging
import re

import pytest
import torch

import torch_ros

SIZE = 512  # of a matrix: 1 MiB of float32, which is what is looked at

SOURCE = """
import sys
import torch
import torch.distributed as dist
import torch_ros

endpoint, model, kind, transport, size = *sys.argv[1:5], int(sys.argv[5])
matrix = torch.arange(size * size, dtype=torch.float32).view(size, size)
match kind:
    case "shared DTensor":
        from torch.distributed.tensor import Shard, distribute_tensor
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(matrix, mesh, [Shard(0)])
        tensor.to_local().share_memory_()
    case "shared module":
        module = torch.nn.Linear(size, size, bias=False)
        module.weight.data.copy_(matrix)
        tensor = module.share_memory().weight
    case "columns":
        tensor = torch.arange(1024 * 2048, dtype=torch.float32).view(1024, 2048)[:, :256]
    case _:
        tensor = matrix
handle = torch_ros.open(model, endpoint=endpoint, transport=transport)
if kind == "copy":
    handle.publish_copy(1, {"weight": tensor})
else:
    handle.register({"weight": tensor})
    handle.publish(1)
print("published", flush=True)
sys.stdin.read()
handle.close()
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.fixture
def publish(etcd_endpoint, started):
    """Publishes a matrix in a process of its own; the model's name is what it is."""

    def start(kind, transport="auto"):
        source = started.start(SOURCE, etcd_endpoint, kind, kind, transport, SIZE, talks=True)
        assert source.hear() == "published"
        return kind

    yield start
    for source in started.started:
        source.stdin.close()
        source.finish()


def replicate(endpoint, model, transport):
    target = torch.zeros(SIZE, SIZE)
    handle = torch_ros.open(model, endpoint=endpoint, transport=transport)
    try:
        handle.register({"weight": target})
        handle.replicate("latest")
        assert handle.last_read.bytes_total == handle.last_read.bytes_read == target.nbytes
    finally:
        handle.close()
    assert torch.equal(target.flatten(), torch.arange(SIZE * SIZE, dtype=torch.float32))


@pytest.mark.parametrize(
    ("kind", "transport", "is_mapped"),
    [
        pytest.param("shared DTensor", "auto", False, marks=pytest.mark.long),
        pytest.param("shared module", "auto", False, marks=pytest.mark.long),
        ("copy", "auto", True),
        ("ordinary", "auto", False),
        pytest.param("copy", "ucx", False, marks=pytest.mark.long),
    ],
)
def test_a_copy_is_mapped_since_its_file_cannot_be_cut_short(
    publish, etcd_endpoint, caplog, kind, transport, is_mapped
):
    caplog.set_level(logging.INFO, "torch_ros")
    replicate(etcd_endpoint, publish(kind, transport), transport)
    assert bool(re.search("of its shared memory are mapped here", caplog.text)) == is_mapped


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "ucx_tls", "is_read"),
    [("auto", "all", True), ("ucx", "all", False), ("auto", "tcp,self", False)],
)
def test_what_is_not_shared_is_read_by_threads(
    publish, etcd_endpoint, caplog, monkeypatch, transport, ucx_tls, is_read
):
    caplog.set_level(logging.INFO, "torch_ros")
    source = publish("ordinary", transport)
    monkeypatch.setenv("UCX_TLS", ucx_tls)
    replicate(etcd_endpoint, source, transport)
    assert bool(re.search(r"the kernel reads its memory, for \d thread", caplog.text)) == is_read


def test_an_eighth_of_rows_is_copied_span_by_span(publish, etcd_endpoint):
    target = torch.zeros(1024, 256)
    model = publish("columns")
    with torch_ros.open(model, endpoint=etcd_endpoint, transport="auto") as rollout:
        rollout.register({"weight": target})
        rollout.replicate("latest")
        assert rollout.last_read.bytes_read == rollout.last_read.bytes_total
    whole = torch.arange(1024 * 2048, dtype=torch.float32).view(1024, 2048)
    assert torch.equal(target, whole[:, :256])
