"""A version that is not there for a replicate, and the one that an update reads for it."""

import threading

import going_on
import pytest
import torch
from going_on import go_on, on_all, publisher

from torch_ros.errors import CallMismatch, CorruptWeights, SourceLost, VersionNotFound
from torch_ros.shard import updating
from torch_ros.shard.replication import Replication

replica = pytest.fixture(going_on.replica)


@pytest.mark.parametrize("version", ["latest", "latest-1", 1])
def test_nothing_is_found_on_all_ranks_where_nothing_is(opened, pool, replica, version):
    found = on_all(pool, replica, lambda h: h.replicate(version, missing_ok=True))
    assert found == [None, None]
    publisher(opened)
    publisher(opened, 2, "t2")
    found = on_all(pool, replica, lambda h: h.replicate(version, missing_ok=True))
    assert len(set(found)) == 1
    assert found[0] in {1, 2}
    assert [handle.version for handle in replica] == found


def test_ranks_that_come_when_it_is_there_learn_that_it_was_missing(opened, pool, replica):
    first, second = replica
    assert first.replicate(missing_ok=True) is None
    publisher(opened)
    assert second.replicate(missing_ok=True) is None
    assert on_all(pool, replica, lambda h: h.replicate(missing_ok=True)) == [1, 1]


def test_a_version_that_is_gone_is_missing_too(opened):
    trainer = publisher(opened)
    go_on(trainer, 2)
    rollout = opened("rollout")
    target = torch.zeros(8)
    rollout.register({"w": target})
    with pytest.raises(VersionNotFound):
        rollout.replicate(1)
    assert rollout.replicate(1, missing_ok=True) is None
    assert target.tolist() == [0.0] * 8


def test_ranks_that_differ_about_what_is_missing_are_told(pool, replica):
    first, second = replica
    assert first.replicate(missing_ok=True) is None
    with pytest.raises(CallMismatch):
        second.replicate()


def test_what_went_while_it_was_read_is_not_missing(opened, monkeypatch):
    trainer, rollout = publisher(opened), opened("rollout", {"w": torch.zeros(8)})
    commit = Replication._commit

    def commit_badly(self, call):
        monkeypatch.setattr(Replication, "_commit", commit)
        trainer.close()
        raise CorruptWeights("m", 1, "w", "trainer")

    monkeypatch.setattr(Replication, "_commit", commit_badly)
    with pytest.raises(VersionNotFound, match="while it was read"):
        rollout.replicate(missing_ok=True)
    assert rollout.replicate(missing_ok=True) is None  # nothing is read of it this time


def test_missing_is_not_lost(opened, monkeypatch):
    """A source that fails is an error still: there was one."""
    publisher(opened)
    rollout = opened("rollout", {"w": torch.zeros(8)})

    def lost(*_):
        raise SourceLost("trainer", "it is gone")

    monkeypatch.setattr("torch_ros.shard.replication.connect", lost)
    with pytest.raises(SourceLost):
        rollout.replicate(missing_ok=True)


def test_what_an_update_has_read_along_serves_no_later_call(opened, monkeypatch):
    trainer, rollout = publisher(opened), opened("rollout", {"w": torch.zeros(8)})
    other = opened("other", {"w": torch.zeros(8)})
    rollout.update()
    go_on(trainer, 2)
    other.update()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(updating, "replicate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollout.update()
    assert rollout.version is None
    go_on(trainer, 3)  # the other one offers 2 still
    assert rollout.replicate() == 3


def test_an_update_that_goes_does_not_read_for_its_replicate(opened, monkeypatch):
    trainer, rollout = publisher(opened), opened("rollout", {"w": torch.zeros(8)})
    rollout.update()
    go_on(trainer, 2)
    kv, reads = rollout._shard.group.kv, []
    read = kv.read

    def counted(request, *, timeout_s):
        if threading.current_thread() is threading.main_thread():
            reads.append(request)
        return read(request, timeout_s=timeout_s)

    monkeypatch.setattr(kv, "read", counted)
    assert rollout.update()
    assert len(reads) == 3  # the third one is for the end; the replicate begins with what was read
