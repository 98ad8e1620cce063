"""One of two ranks leaves a call out: both come to the same call again, or both are told, soon."""

import time
import uuid
from functools import partial

import pytest
import torch

from torch_ros.errors import CallMismatch, DeadlineExceeded, TorchRosError
from torch_ros.store.txn import Read

SOON_S, TIMEOUT_S = 5.0, 30.0


@pytest.fixture
def endpoint():
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def source(opened):
    trainer = opened("source")
    trainer.register({"w": torch.ones(4)})
    trainer.publish(1)
    return trainer


@pytest.fixture
def pair(ranks, pool, source):
    """Two ranks of a rollout, of which rank 1 has made an update that rank 0 left out."""
    handles = ranks("pair", 2, timeout_s=TIMEOUT_S)
    for handle in handles:
        handle.register({"w": torch.zeros(4)})
    assert list(pool.map(lambda h: h.update(), handles)) == [True, True]
    assert handles[1].update() is False
    return handles


def go_on(source, version):
    source.unpublish()
    source.publish(version)


def attempt(call):
    began_s = time.monotonic()
    try:
        return call()
    except TorchRosError as error:
        return error
    finally:
        assert time.monotonic() - began_s < SOON_S


def until_open(handle):
    """Until a call of its group waits for other ranks."""
    group, until_s = handle._shard.group, time.monotonic() + 10
    while True:
        view = group.kv.read(Read(group.seat.own), timeout_s=5)
        calls = view.entries[group.seat.decisions].value
        if b'"outcome"' not in calls[calls.rindex(b'{"number"') :]:
            return
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_rank_that_left_an_update_out_joins_the_one_in_which_its_peer_waits(pair, pool, source):
    assert list(pool.map(lambda h: h.update(), pair)) == [False, False]
    go_on(source, 2)
    ahead = pool.submit(attempt, pair[1].update)
    until_open(pair[1])
    assert attempt(pair[0].update) is True
    assert ahead.result() is True
    assert [handle.version for handle in pair] == [2, 2]
    go_on(source, 3)  # they are in step
    assert list(pool.map(lambda h: attempt(h.update), pair)) == [True, True]


def test_nothing_is_given_up_before_all_ranks_have_come(pair, pool, source):
    """The rank that left a call out is told what its peers were; the next one is for both."""
    go_on(source, 2)
    assert attempt(pair[0].update) is False  # as its peer was told
    ahead = pool.submit(attempt, pair[1].update)
    until_open(pair[1])
    assert pair[1].version == 1
    assert "pair" in source.list()[1]
    assert attempt(pair[0].update) is True
    assert ahead.result() is True


def test_a_rank_that_is_late_is_told_what_its_peers_were(pair, pool, source):
    go_on(source, 2)
    assert attempt(pair[0].update) is False
    assert list(pool.map(lambda h: attempt(h.update), pair)) == [True, True]


def test_an_update_in_which_a_rank_is_missing_gives_nothing_up(pair, pool, source):
    go_on(source, 2)
    with pytest.raises(DeadlineExceeded, match="not all 2 ranks"):
        pair[1].update(timeout_s=0.2)
    assert pair[1].version == 1
    assert "pair" in source.list()[1]
    assert attempt(pair[0].update) is False  # the one that it left out
    told = attempt(pair[0].update)
    assert isinstance(told, DeadlineExceeded)
    assert list(pool.map(lambda h: attempt(h.update), pair)) == [True, True]


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_rank_that_left_several_out_is_told_once_and_is_in_step(pair, pool, source, more):
    """The loops of both ranks wait for each other: no try of one overlaps the next of the other."""
    for _ in range(more):
        assert pair[1].update() is False
    go_on(source, 2)
    for _ in range(more + 2):  # what it left out, and the first of its peer's
        with pytest.raises(DeadlineExceeded, match="not all 2 ranks"):
            pair[1].update(timeout_s=0.2)
        told = attempt(pair[0].update)
    assert isinstance(told, DeadlineExceeded)
    assert list(pool.map(lambda h: attempt(h.update), pair)) == [True, True]
    assert [handle.version for handle in pair] == [2, 2]


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_are_out_of_step_by_other_calls_are_in_step_again(pair, pool, source, first):
    """Whoever comes first, both get the same answer, or both are told, call after call."""
    read = lambda h: h.read("latest", {"w": torch.zeros(4)}).version
    other = 1 - first
    if first == 1:
        ahead = pool.submit(attempt, partial(read, pair[1]))
        until_open(pair[1])
        assert attempt(partial(read, pair[0])) == 1
        assert ahead.result() == 1
    else:
        told = attempt(partial(read, pair[first])), attempt(partial(read, pair[other]))
        assert {type(each) for each in told} == {CallMismatch}
        assert "rank 0 calls 'check before read latest'" in str(told[0])
        assert str(told[0]) == str(told[1])
    assert list(pool.map(lambda h: attempt(partial(read, h)), pair)) == [1, 1]


def test_ranks_that_call_different_things_are_told_at_once_call_after_call(pair, pool, source):
    assert pair[0].update() is False  # they are in step
    read = lambda handle: handle.read("latest", {"w": torch.zeros(4)})
    save = lambda handle: handle.publish_copy(9, {"w": torch.zeros(4)})
    for left, right in ((read, save), (save, read), (read, save)):
        calls = partial(left, pair[0]), partial(right, pair[1])
        told = list(pool.map(attempt, calls))
        assert {type(each) for each in told} == {CallMismatch}, told
    assert list(pool.map(lambda h: attempt(h.update), pair)) == [False, False]
