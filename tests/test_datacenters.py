"""Replicas in two datacenters, in one process: what is read from whom."""

import uuid

import pytest
import torch

import torch_ros
from torch_ros.errors import SourceLost
from torch_ros.protocol.keys import replica_of
from torch_ros.shard.manifests import Manifests
from torch_ros.shard.replication import Replication


@pytest.fixture
def tensors():
    """The tensors of each replica; the trainer's are 1."""
    return {}


@pytest.fixture
def opened(tensors):
    endpoint, handles = f"memory://{uuid.uuid4().hex}", []

    def open_(replica, datacenter, **options):
        options = {"endpoint": endpoint, "transport": "memory", "timeout_s": 20, **options}
        handle = torch_ros.open("m", replica=replica, datacenter=datacenter, **options)
        handles.append(handle)
        tensors[replica] = torch.full((4,), float(not handles[1:]))
        handle.register({"w": tensors[replica]})
        return handle

    yield open_
    for handle in handles:
        handle.close()


@pytest.fixture
def looks(monkeypatch):
    """The replicas that were asked for what a version contains."""
    asked = []

    def layouts(self, inst, deadline):
        asked.append(replica_of(inst))
        return original(self, inst, deadline)

    original = Manifests.layouts
    monkeypatch.setattr(Manifests, "layouts", layouts)
    return asked


def test_what_a_version_contains_is_asked_near_by(opened, looks):
    opened("a", "west").publish(1)
    reader = opened("reader", "east")
    assert list(reader.contents(1).tensors) == ["w"]
    opened("b", "east").replicate(1)
    reader.contents(1)
    reader.replicate(1)  # now it holds the version itself, and asks another all the same
    reader.contents(1)
    assert looks == ["a", "b", "b"]


def test_who_fills_is_asked_before_somebody_far(opened, looks, monkeypatch):
    opened("a", "west").publish(1)
    reader, seed = opened("reader", "east"), opened("z", "east")
    fetch, shards = Replication._fetch, Manifests.shards

    def lost(self, inst, deadline):
        if replica_of(inst) == "z":
            raise SourceLost("z", "it shows nothing", 0, 0)
        return shards(self, inst, deadline)

    def fetched(self, *args):
        reader.contents(1)
        fetch(self, *args)
        with monkeypatch.context() as patched:
            patched.setattr(Manifests, "shards", lost)
            reader.contents(1)

    monkeypatch.setattr(Replication, "_fetch", fetched)
    seed.replicate(1)
    assert looks == ["z", "z", "a"]


def test_bytes_that_were_wrong_are_read_from_afar_if_nobody_else_is_near(opened, tensors):
    opened("a", "west", digests="full").publish(1)
    seed = opened("seed", "east", digests="full")
    seed.replicate(1)
    tensors["seed"].fill_(7.0)
    reader = opened("reader", "east", digests="full")
    reader.replicate(1)
    assert reader.last_read.source == "a"
    assert torch.equal(tensors["reader"], tensors["a"])
