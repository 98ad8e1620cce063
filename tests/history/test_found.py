"""What histories have found, again in one process."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_ros
from torch_ros.errors import CallMismatch, SelfFenced
from torch_ros.store import memory
from torch_ros.store.seat import CALLS_KEPT


@pytest.fixture
def endpoint():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def trainer(endpoint):
    with torch_ros.open("m", endpoint=endpoint, replica="trainer", timeout_s=20, ttl_s=5) as handle:
        handle.register({"w": torch.zeros(10)})
        yield handle


def wait_for(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_a_seat_brings_back_while_unpublish_gives_up_is_unpublished_there(
    trainer, endpoint, monkeypatch
):
    group, may_return = trainer._group, threading.Event()
    take_seat, forget = group._take_seat_again, group.forget

    def take_seat_when_told():
        assert may_return.wait(15)
        take_seat()

    def forget_after_the_return():
        may_return.set()
        wait_for(lambda: not group.is_fenced)
        return forget()

    trainer.publish(1)
    monkeypatch.setattr(group, "_take_seat_again", take_seat_when_told)
    monkeypatch.setattr(group, "forget", forget_after_the_return)
    memory.named(endpoint.removeprefix("memory://")).expire(group.session.lease_id)
    wait_for(lambda: group.is_fenced)
    trainer.unpublish(timeout_s=0.1)
    assert trainer.version is None
    assert trainer.list() == {}
    trainer.publish(2)
    assert trainer.list() == {2: {"trainer"}}


@pytest.fixture
def rollout(endpoint):
    """A replica of two ranks, and how to make both call something."""

    def open_rank(rank):
        options = {"replica": "rollout", "rank": rank, "world_size": 2, "timeout_s": 20}
        handle = torch_ros.open("m", endpoint=endpoint, **options)
        handle.register({"w": torch.zeros(10)})
        return handle

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(open_rank, (0, 1)))
        yield ranks, lambda call: list(pool.map(call, ranks))
    for handle in ranks:
        handle.close()


def test_a_rank_that_is_further_behind_than_its_group_remembers_does_not_decide_again(
    trainer, rollout
):
    (first, second), both = rollout
    trainer.publish(1)
    assert both(lambda handle: handle.replicate()) == [1, 1]
    for _ in range(CALLS_KEPT + 1):
        assert first.update() is False
    trainer.unpublish()
    trainer.publish(2)
    with pytest.raises(SelfFenced, match="older than the 64 calls"):
        second.update()


def test_a_rank_that_calls_something_else_learns_what_its_group_has_done(trainer, rollout):
    (first, second), both = rollout
    trainer.publish(1)
    assert both(lambda handle: handle.replicate()) == [1, 1]
    first.unpublish()
    with pytest.raises(CallMismatch, match="'unpublish 1' for the ranks that came first"):
        second.update()
    assert (first.version, second.version) == (None, None)
    assert both(lambda handle: handle.update()) == [True, True]
