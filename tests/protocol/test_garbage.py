"""What anybody may have left in etcd does not stop those whose records are well."""

import threading
import uuid

import pytest
import torch
from features.retention.kept import copies_of
from kit import inside

import torch_ros
from torch_ros.errors import BackendError, UsageError, VersionConflict
from torch_ros.memory import store as memory
from torch_ros.protocol import membership
from torch_ros.protocol.records import Failure, Holding
from torch_ros.store.txn import Put, Read, Txn, one

GARBAGE = b"\xff\xfe garbage {"
OLD = b'{"uid":"x","call":1,"state":"full","world_size":1,"new":1}'
OTHERS = {
    "holdings/junk": b"{}",
    "holdings/{run}/abc/default/z@1": b"{}",
    "holdings/{run}/00000000000000000001/z@1": b"{}",
    "holdings/{run}/00000000000000000001/default/z@1": GARBAGE,
    "holdings/{run}/00000000000000000001/default/y@1": OLD,
    "holdings/{run}/00000000000000000001/default/x@1": b'{"uid":"\xff"}',
    "holdings/{run}/00000000000000000001/default/w@1": b"[" * 100_000,
    "versions/{run}/abc": b"{}",
    "versions/{run}/" + "9" * 5000: b'{"uid":"x","layout":"y"}',
    "versions/{run}/00000000000000000005": GARBAGE,
    "runs/z": GARBAGE,
    "groups/stranger": GARBAGE,
    "groups/y": b'{"nonce":"x","world_size":1,"run":"r","retain":["bogus"],"is_complete":true}',
    "readers/{run}/00000000000000000001/{source}/junk": b"{}",
    "readers/junk": b"{}",
    "suspects/junk": b"{}",
    "archives/junk": GARBAGE,
    "archives/a/b": b"{}",
    "shards/{source}/zzz": b"{}",
}


class Model:
    def __init__(self, **options):
        self.space = uuid.uuid4().hex
        self.kv = memory.named(self.space)
        self.options = {"endpoint": f"memory://{self.space}", "timeout_s": 20, **options}

    def open(self, name, value):
        handle = torch_ros.open("m", replica=name, **self.options)
        handle.register({"x": torch.full((8,), float(value))})
        return handle

    def put(self, key, value):
        self.kv.commit(Txn(ops=(Put(f"/torch-ros/m/{key}", value),)), timeout_s=1)


def test_garbage_of_others_stops_nobody(caplog):
    model = Model()
    with model.open("t", 1) as trainer, model.open("r", 0) as rollout:
        trainer.publish(1)
        names = {"run": trainer.run, "source": inside(trainer).group.seat.inst}
        for key, value in OTHERS.items():
            model.put(key.format(**names), value)
        assert rollout.list() == {1: {"t"}}
        assert rollout.replicate() == 1
        rollout.unpublish()
        trainer.unpublish()
        trainer.publish(1)
        with model.open("n", 0) as newcomer:
            assert newcomer.replicate(1) == 1
    said = [r.getMessage() for r in caplog.records if r.name == "torch_ros.protocol.legible"]
    assert len(said) == len(set(said)) > 8
    assert any("etcdctl del /torch-ros/m/groups/stranger" in line for line in said)


def test_a_holding_whose_value_names_another_datacenter_is_nobodys(caplog):
    model = Model(retain=("latest",))
    with model.open("t", 1) as trainer, model.open("r", 0) as rollout:
        trainer.publish(1)
        uid = inside(trainer).held.uid
        held = Holding(uid, 1, "full", 1, "elsewhere", is_original=True)
        model.put(f"holdings/{trainer.run}/{1:020d}/default/z@1", held.encode())
        assert rollout.list() == {1: {"t"}}
        trainer.unpublish()
        assert len(copies_of(trainer)) == 1  # it is no witness
        with pytest.raises(VersionConflict):  # nor a fellow publisher
            trainer.publish(1)
    assert "names the datacenter 'elsewhere'" in caplog.text


def test_what_one_cannot_do_without_is_named():
    model = Model()
    with model.open("t", 1) as trainer, model.open("r", 0) as rollout:
        trainer.publish(1)
        key = f"versions/{trainer.run}/{5:020d}"
        model.put(key, GARBAGE)
        with pytest.raises(BackendError, match=f"{5:020d}.*etcdctl del"):
            rollout.replicate(5)
        own = f"decisions/{rollout._shard.group.seat.inst}"
        model.put(own, GARBAGE)
        with pytest.raises(BackendError, match=own):
            rollout.replicate(1)


def test_a_mistake_of_ours_does_not_end_the_watching(monkeypatch):
    model, tries, again = Model(), [], threading.Event()
    watch_over = membership.watch_over

    def flaky(view, seat):
        tries.append(seat)
        if len(tries) < 3:
            raise KeyError("a mistake")
        again.set()
        return watch_over(view, seat)

    monkeypatch.setattr(membership, "watch_over", flaky)
    with model.open("t", 1):
        assert again.wait(20)


def test_a_failure_can_always_be_told():
    for what in ("a \ud800 name", float("nan"), 2**70, True):
        error = UsageError(what)
        failure = Failure.of(error, replica="r", call=1, rank=0)
        assert isinstance(
            Failure.decode(failure.encode(), "k").error(), torch_ros.errors.TorchRosError
        )
    assert isinstance(Failure("SourceLost", [], 0).error(), torch_ros.errors.PeerError)


@pytest.mark.parametrize("retain", ["latest", 3, ["latest-\u0663"], [None]])
def test_what_is_retained_is_a_list_of_versions(retain):
    with pytest.raises(UsageError):
        torch_ros.open("m", endpoint="memory://none", retain=retain)
    kept = memory.named("none").read(Read((one("/torch-ros/m/groups/x"),)), timeout_s=1)
    assert not kept.entries


@pytest.mark.parametrize("tensors", [{"\ud800": torch.zeros(1)}, {"a": torch.zeros([1] * 65)}])
def test_tensors_that_no_manifest_can_name_are_refused(tensors):
    handle = torch_ros.open("m", endpoint=f"memory://{uuid.uuid4().hex}")
    with handle, pytest.raises(UsageError, match="UTF-8|65 dimensions"):
        handle.register(tensors)
