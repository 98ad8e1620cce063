"""Replicas in two datacenters, in one process: what is read from whom."""

import threading

import pytest
import torch
from kit import memory

from torch_ros.errors import ManifestMismatch, SourceLost, StoreUnavailable
from torch_ros.protocol.keys import replica_of
from torch_ros.shard import replication
from torch_ros.shard.manifests import Manifests
from torch_ros.shard.replication import Replication


@pytest.fixture
def tensors():
    """The tensors of each replica; the trainer's are 1."""
    return {}


endpoint = pytest.fixture(memory)


@pytest.fixture
def opened(opened, tensors):
    def open_(replica, datacenter, **options):
        mine = tensors[replica] = torch.full((4,), float(not tensors))
        return opened(replica, {"w": mine}, datacenter=datacenter, transport="memory", **options)

    return open_


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

    def lost(self, inst, *args):
        if replica_of(inst) == "z":
            raise SourceLost("z", "it shows nothing")
        return shards(self, inst, *args)

    def fetched(self, *args):
        reader.contents(1)
        fetch(self, *args)
        with monkeypatch.context() as patched:
            patched.setattr(Manifests, "shards", lost)
            reader.contents(1)

    monkeypatch.setattr(Replication, "_fetch", fetched)
    seed.replicate(1)
    assert looks == ["z", "z", "a"]


def test_each_holder_is_asked_again_also_one_whose_ranks_differ(opened, looks, monkeypatch):
    opened("a", "west").publish(1)
    opened("b", "east").replicate(1)
    shards, fails = Manifests.shards, {"b": 2, "a": 1}

    def differ(self, inst, *args):
        name = replica_of(inst)
        if fails[name]:
            fails[name] -= 1
            raise ManifestMismatch("version 1", "one layout", "two", "wait for its ranks")
        return shards(self, inst, *args)

    monkeypatch.setattr(Manifests, "shards", differ)
    assert list(opened("reader", "east").contents(1).tensors) == ["w"]
    assert looks == ["b", "a", "b", "a"]


@pytest.fixture
def spoilt(opened, tensors):
    """A trainer, a near seed whose bytes are wrong, and a reader beside it."""
    opened("a", "west", digests="full").publish(1)
    seed = opened("seed", "east", digests="full")
    seed.replicate(1)
    tensors["seed"].fill_(7.0)
    return opened("reader", "east", digests="full")


def test_bytes_that_were_wrong_are_read_from_afar_if_nobody_else_is_near(spoilt, tensors):
    spoilt.replicate(1)
    assert spoilt.last_read.source == "a"
    assert torch.equal(tensors["reader"], tensors["a"])


def test_bytes_that_were_wrong_are_not_read_again_though_nobody_could_be_told(spoilt, monkeypatch):
    def away(*_):
        raise StoreUnavailable("memory://test", 1.0, "it is away")

    monkeypatch.setattr(replication, "suspect", away)
    spoilt.replicate(1)
    assert spoilt.last_read.source == "a"


def test_bytes_that_were_wrong_are_not_read_of_who_fills_itself_with_them(
    spoilt, opened, monkeypatch
):
    relay, others, goes_on = opened("relay", "east", digests="full"), [], threading.Event()
    fetch, fills = Replication._fetch, threading.Event()

    def fetched(self, *args):
        if threading.current_thread() in others:
            fills.set()
            assert goes_on.wait(60)
        fetch(self, *args)
        if not others:  # the reader, the first time: its source is wrong, and has another reader
            others.append(threading.Thread(target=relay.replicate, args=(1,)))
            others[0].start()
            assert fills.wait(20)

    monkeypatch.setattr(Replication, "_fetch", fetched)
    try:
        spoilt.replicate(1)
    finally:
        goes_on.set()
        others[0].join()
    assert spoilt.last_read.source == "a"
