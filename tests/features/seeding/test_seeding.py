"""Versions that are fetched into host memory while their replicas go on with what they have."""

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from features.retention.kept import copies_of
from kit import inside, until

import torch_ros
from torch_ros.errors import ClosedError, ManifestMismatch, UsageError
from torch_ros.features.seeding import forerunner
from torch_ros.features.seeding.rules import FETCHED, next_version
from torch_ros.protocol.policy import Next
from torch_ros.shard.core import Shard
from torch_ros.shard.replication import Replication

WAIT_S = 20.0


@pytest.fixture
def opened():
    endpoint, handles = f"memory://{uuid.uuid4().hex}", []

    def open_(replica, datacenter, tensors=None, **options):
        options = {"transport": "memory", "timeout_s": WAIT_S, **options}
        handle = torch_ros.open(
            "m", endpoint=endpoint, replica=replica, datacenter=datacenter, **options
        )
        handles.append(handle)
        handle.register(tensors or {"w": torch.zeros(8)})
        return handle

    yield open_
    for handle in reversed(handles):
        handle.close(linger_s=0.0)


@pytest.fixture
def link(monkeypatch):
    """Closed: no forerunner reads anything."""
    is_open = threading.Event()
    is_open.set()
    fetch = Replication._fetch

    def fetched(self, claimed, meter, sources):
        while self._shard.group.seat.spot and not is_open.wait(0.01):
            self.deadline.check("the link is down")
        fetch(self, claimed, meter, sources)

    monkeypatch.setattr(Replication, "_fetch", fetched)
    return is_open


def go_on(trainer, version, tensor):
    trainer.unpublish()
    tensor.fill_(version)
    trainer.publish(version)


def test_a_version_is_fetched_while_a_replica_goes_on(opened, link):
    weights, mine = torch.ones(8), torch.zeros(8)
    trainer, rollout = (
        opened("t", "west", {"w": weights}),
        opened("r", "east", {"w": mine}, seeding="host"),
    )
    other = opened("s", "east", seeding="host")
    trainer.publish(1)
    assert rollout.update()
    assert other.update()
    link.clear()
    go_on(trainer, 2, weights)
    assert [rollout.update() for _ in range(100)] == [False] * 100  # more calls than a group keeps
    assert not other.update()
    assert mine.tolist() == [1.0] * 8
    link.set()
    until(rollout.update)
    assert mine.tolist() == [2.0] * 8
    assert rollout.last_read.source == "r+host"
    until(other.update)
    assert other.last_read.source in {"r", "r+host"}
    until(lambda: rollout.list()[2] == {"t", "r", "s"})


def test_an_update_need_not_skip(opened, monkeypatch):
    trainer, seed, rollout = opened("t", "west"), opened("s", "east"), opened("r", "east")
    trainer.publish(1)
    assert seed.update()
    assert rollout.update()
    trainer.unpublish()
    trainer.publish(2)
    fetch, found = Replication._fetch, []

    def fetched(self, claimed, meter, sources):
        if self._shard.group.seat.replica == "s" and not found:
            found.append(threading.Thread(target=rollout.update, kwargs={"skip": False}))
            found[0].start()
            until(lambda: rollout.version is None)  # it has given up what it had
        fetch(self, claimed, meter, sources)

    monkeypatch.setattr(Replication, "_fetch", fetched)
    assert seed.update()
    found[0].join(WAIT_S)
    assert rollout.version == 2


def test_without_memory_for_a_copy_nothing_is_given_up(opened):
    weights, mine = torch.ones(8), torch.zeros(8)
    trainer = opened("t", "west", {"w": weights})
    rollout = opened("r", "east", {"w": mine}, seeding="host", seeding_bytes=31)
    trainer.publish(1)
    rollout.update()
    go_on(trainer, 2, weights)
    with pytest.raises(
        UsageError, match="needs 32 bytes of host memory .* seeding_bytes allows 31"
    ):
        rollout.update()
    assert rollout.version == 1


def test_a_fetched_copy_is_no_reason_to_drop_a_retained_version(opened):
    weights = torch.ones(8)
    trainer = opened("t", "west", {"w": weights}, retain=("latest",))
    rollout = opened("r", "east", seeding="host")
    trainer.publish(1)
    rollout.update()
    go_on(trainer, 2, weights)
    rollout.update()
    until(lambda: "r+host" in rollout.list()[2])
    trainer.unpublish()
    assert len(copies_of(trainer)) == 1  # that of the forerunner goes when it has been used
    until(rollout.update)
    until(lambda: not copies_of(trainer))


def test_a_child_has_no_part_in_what_is_fetched(opened, link):
    weights = torch.ones(8)
    trainer, rollout = opened("t", "west", {"w": weights}), opened("r", "east", seeding="host")
    trainer.publish(1)
    rollout.update()
    link.clear()
    go_on(trainer, 2, weights)
    rollout.update()
    if not (child := os.fork()):
        try:
            rollout.update()
        except ClosedError:
            rollout.close(linger_s=0.0)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.set()
    until(rollout.update)


def test_a_close_ends_what_is_fetched(opened, link):
    weights = torch.ones(8)
    trainer, rollout = opened("t", "west", {"w": weights}), opened("r", "east", seeding="host")
    trainer.publish(1)
    rollout.update()
    link.clear()
    go_on(trainer, 2, weights)
    rollout.update()
    rollout.close(linger_s=0.0)
    until(lambda: trainer.list() == {2: {"t"}})
    with pytest.raises(ClosedError):
        rollout.update()
    trainer.unpublish(timeout_s=WAIT_S)  # nobody reads


def test_a_fetch_that_is_stuck_is_given_up(opened, link, monkeypatch):
    monkeypatch.setattr("torch_ros.features.seeding.forerunner.STUCK_S", 0.2)
    weights = torch.ones(8)
    trainer, rollout = opened("t", "west", {"w": weights}), opened("r", "east", seeding="host")
    trainer.publish(1)
    rollout.update()
    link.clear()
    go_on(trainer, 2, weights)
    rollout.update()
    ahead = inside(rollout).policy.forerunner
    until(lambda: ahead._room is not None)
    until(lambda: ahead._rests_until_s)
    assert ahead._room is None
    assert not ahead.is_idle  # others have their turn
    monkeypatch.setattr(ahead, "_rests_until_s", 0.0)
    link.set()
    until(rollout.update)


def test_an_error_of_any_kind_is_no_reason_to_wait_for_ever(opened, monkeypatch):
    weights = torch.ones(8)
    trainer, rollout = opened("t", "west", {"w": weights}), opened("r", "east", seeding="host")
    trainer.publish(1)
    rollout.update()
    go_on(trainer, 2, weights)
    ahead = inside(rollout).policy.forerunner
    with monkeypatch.context() as patched:
        patched.setattr("torch_ros.features.seeding.forerunner.Room", {}.__getitem__)
        rollout.update()
        until(lambda: ahead._rests_until_s)
    monkeypatch.setattr(ahead, "_rests_until_s", 0.0)
    until(rollout.update)


def test_the_name_of_a_forerunner_is_taken(opened):
    with pytest.raises(UsageError, match=r"names that end in '\+host' are taken"):
        opened("r+host", "east")


def test_an_update_waits_out_what_is_gone_when_it_comes_there(opened, monkeypatch):
    trainer, other = opened("t", "east"), opened("s", "east")
    rollout = opened("r", "east")
    trainer.publish(1)
    assert other.update()
    assert rollout.update()
    trainer.unpublish()
    trainer.publish(2)
    give_up = Shard.unpublish

    def given_up(shard, *args, **options):
        give_up(shard, *args, **options)
        if shard is inside(rollout):
            trainer.unpublish()

    monkeypatch.setattr(Shard, "unpublish", given_up)
    with ThreadPoolExecutor(1) as beside:
        is_new = beside.submit(rollout.update)
        until(lambda: trainer.version is None)
        trainer.publish(3)
        assert is_new.result()
    assert rollout.version == 3  # and not 1, which the other one holds still


def test_an_update_goes_to_a_new_run_if_the_old_one_ends_meanwhile(opened, monkeypatch):
    trainer, rollout = opened("t", "east"), opened("r", "east")
    trainer.publish(1)
    assert rollout.update()
    trainer.unpublish()
    trainer.publish(2)
    give_up, again = Shard.unpublish, []

    def given_up(shard, *args, **options):
        give_up(shard, *args, **options)
        trainer.close(linger_s=0.0)
        again.append(opened("t", "east", run="new"))
        again[0].publish(0)

    monkeypatch.setattr(Shard, "unpublish", given_up)
    assert rollout.update()
    assert rollout.version == 0  # the new run will not come to 2 soon


@contextmanager
def two_ranks(opened, *of_ranks, **options):
    """Their handles, and an update of both."""
    with ThreadPoolExecutor(2) as ranks:

        def taken(rank):
            given = {**options, **of_ranks[rank]}
            return opened("r", given.pop("datacenter", "east"), rank=rank, world_size=2, **given)

        handles = [seat.result() for seat in [ranks.submit(taken, rank) for rank in range(2)]]

        def update():
            found = [ranks.submit(handle.update) for handle in handles]
            errors = [each.exception() for each in found]
            assert len({type(error) for error in errors}) == 1, errors
            assert len({each.result() for each in found}) == 1
            return found[0].result()

        yield handles, update


def test_ranks_that_were_given_different_datacenters_update_alike(opened):
    trainer = opened("t", "west")
    trainer.publish(1)
    with two_ranks(opened, {}, {"datacenter": "default"}) as (_, update):
        assert update()
        trainer.unpublish()
        trainer.publish(2)
        assert update()


def test_ranks_that_were_given_different_seedings_are_told(opened, monkeypatch):
    def fetches(view, seat, *args):
        found = next_version(view, seat, *args)
        return Next(found.ref, FETCHED)  # as the rank says that has a forerunner

    trainer = opened("t", "west")
    trainer.publish(1)
    with two_ranks(opened, {"seeding": "host"}, {}) as (_, update):
        assert update()
        trainer.unpublish()
        trainer.publish(2)
        monkeypatch.setattr("torch_ros.features.seeding.near_first.next_version", fetches)
        with pytest.raises(UsageError, match="on some ranks only"):
            update()


def test_wrong_bytes_are_fetched_from_somebody_else(opened, monkeypatch):
    # It takes no other order.
    monkeypatch.setattr("torch_ros.features.seeding.forerunner.REST_S", 1000.0)
    weights, wrong, mine = torch.ones(8), torch.zeros(8), torch.zeros(8)
    trainer = opened("t", "west", {"w": weights}, digests="full")
    copy = opened("c", "west", {"w": wrong}, digests="full")
    rollout = opened("r", "east", {"w": mine}, seeding="host", digests="full")
    trainer.publish(1)
    assert rollout.update()
    go_on(trainer, 2, weights)
    assert copy.update()
    wrong.fill_(7)
    until(rollout.update)
    assert mine.tolist() == [2.0] * 8
    assert inside(rollout).policy.forerunner._shard.reports.last_read.source == "t"


def test_a_copy_goes_when_a_newer_run_is_here(opened):
    weights = torch.ones(8)
    trainer, rollout = opened("t", "west", {"w": weights}), opened("r", "east", seeding="host")
    trainer.publish(1)
    assert rollout.update()
    go_on(trainer, 2, weights)
    assert not rollout.update()
    ahead = inside(rollout).policy.forerunner
    until(lambda: "r+host" in rollout.list().get(2, ()))
    opened("t2", "east", run="new").publish(0)
    until(lambda: ahead._room is None)


def test_memory_is_asked_for_all_ranks_of_a_host(opened, monkeypatch):
    trainer = opened("t", "west")
    trainer.publish(1)
    monkeypatch.setattr("torch_ros.features.seeding.forerunner.available_bytes", lambda: 63)
    with two_ranks(opened, {}, {}, seeding="host") as (_, update):
        assert update()
        trainer.unpublish()
        trainer.publish(2)
        with pytest.raises(UsageError, match="needs 64 bytes .* with its peers here"):
            update()


def test_a_version_that_does_not_fit_is_told_of(opened, monkeypatch):
    monkeypatch.setattr("torch_ros.features.seeding.forerunner.REST_S", 0.0)
    trainer, rollout = opened("t", "west"), opened("r", "east", seeding="host")
    trainer.publish(1)
    assert rollout.update()
    trainer.unpublish()
    trainer.unregister()
    trainer.register({"w": torch.ones(9)})
    trainer.publish(2)
    with pytest.raises(ManifestMismatch):
        until(rollout.update)
    assert rollout.version == 1


def test_a_rank_without_memory_ends_the_fetch_at_once(opened, monkeypatch):
    """Its peers would wait until it seems stuck; so another order could not be obeyed."""
    failed = []

    def cramped(layout):
        if not failed:
            failed.append(layout)
            raise MemoryError("no page is left")
        return room(layout)

    room = forerunner.Room
    monkeypatch.setattr(forerunner, "Room", cramped)
    monkeypatch.setattr(forerunner, "REST_S", 0.1)
    trainer = opened("t", "west")
    trainer.publish(1)
    with two_ranks(opened, {}, {}, seeding="host") as (_, update):
        assert update()
        trainer.unpublish()
        trainer.publish(2)
        until(update)
        assert failed
