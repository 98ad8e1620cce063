"""One of two ranks leaves a call out: both come to the same call again, or both are told, soon."""

import time
from functools import partial

import pytest
import torch
from kit import inside, memory, until

from torch_ros.errors import CallAborted, CallMismatch, DeadlineExceeded, TorchRosError, UsageError
from torch_ros.protocol.call import GroupCall
from torch_ros.store.txn import Read

SOON_S, TIMEOUT_S = 5.0, 30.0


endpoint = pytest.fixture(memory)


@pytest.fixture
def source(opened):
    trainer = opened("source", {"w": torch.ones(4)})
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
    group = inside(handle).group

    def is_open():
        view = group.kv.read(Read(group.seat.own), timeout_s=5)
        if not (calls := view.entries.get(group.seat.decisions)):
            return False
        _, begins, last = calls.value.rpartition(b'{"number"')
        return begins and b'"outcome"' not in last

    until(is_open)


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


def is_refused(error, text):
    return (
        isinstance(error, UsageError) and not isinstance(error, CallMismatch) and text in str(error)
    )


CALLS = {  # on one rank, as on the other one; and its error
    "publish": (lambda h: h.publish(-1), lambda h: h.publish(7), "version -1"),
    "publish of digits": (lambda h: h.publish(10**5000), lambda h: h.publish(7), "thousands of"),
    "publish_copy": (lambda h: copy_of(h, "7"), lambda h: copy_of(h, 7), "expected an int"),
    "replicate": (lambda h: h.replicate("newest"), lambda h: h.replicate(9), "'newest'"),
    "update": (lambda h: h.update("newest"), lambda h: h.update(), "'newest'"),
    # feature following {
    "update that waits": (
        lambda h: h.update(wait_s=-1),
        lambda h: h.update(wait_s=TIMEOUT_S),
        "wait_s",
    ),
    "follow": (lambda h: h.follow("newest"), lambda h: next(h.follow()), "'newest'"),
    # } following
    "read": (lambda h: read(h, "newest"), lambda h: read(h, "latest"), "'newest'"),
    "stream": (lambda h: streamed(h, "newest"), lambda h: streamed(h, 9), "'newest'"),
    "install": (lambda h: installed(h, "newest"), lambda h: installed(h, "latest"), "'newest'"),
    "install of one": (lambda h: installed(h, -3), lambda h: installed(h, 9), "version -3"),
}


def copy_of(handle, version):
    handle.publish_copy(version, {"w": torch.zeros(4)})


def read(handle, version):
    handle.read(version, {"w": torch.zeros(4)})


def streamed(handle, version):
    with handle.stream(version, ["w"], buffer_bytes=1000) as stream:
        list(stream)


def installed(handle, version):
    with handle.installing(version):
        handle.update(version)


# An install that is there is entered at once, by each rank for itself.
IN_TURN = [
    (name, at) for name in CALLS for at in ("first", "last") if (name, at) != ("install", "last")
]


@pytest.mark.parametrize(("name", "at"), IN_TURN)
def test_an_argument_that_one_rank_refuses_ends_the_call_for_all(ranks, pool, source, name, at):
    """It is in what the rank asks, which is something else than its peers do."""
    bad, good, text = CALLS[name]
    handles = ranks("refusing", 2, timeout_s=TIMEOUT_S, installs="install" in name)
    for handle in handles:
        handle.register({"w": torch.zeros(4)})
    if at == "last":
        told = pool.submit(attempt, partial(good, handles[1]))
        until_called(handles[1])
        refused = attempt(partial(bad, handles[0]))
    else:
        refused = attempt(partial(bad, handles[0]))
        told = pool.submit(attempt, partial(good, handles[1]))
    assert is_refused(refused, text), refused
    assert is_refused(told.result(), text), told.result()
    calls = {inside(handle).group.ledger.calls_made for handle in handles}
    assert len(calls) == 1, calls  # they are in step


def until_called(handle):
    """Until it waits in a call."""
    group = inside(handle).group
    until(lambda: group.ledger.pending and group._calling.locked())
    time.sleep(0.1)  # it may look out, and write nothing


class Struck(BaseException):
    """Ctrl-C, at a place of the test's choice."""


@pytest.fixture
def two(ranks):
    handles = ranks("pair", 2, timeout_s=TIMEOUT_S)
    for handle in handles:
        handle.register({"w": torch.zeros(4)})
    return handles


def test_peers_are_told_of_a_rank_that_was_struck_while_it_skipped_their_call(two, monkeypatch):
    with pytest.raises(DeadlineExceeded):
        two[1].publish(3, timeout_s=0.3)
    ledger = inside(two[0]).group.ledger
    skip = ledger.skip

    def struck(learn):
        skip(learn)
        raise Struck

    with monkeypatch.context() as patch, pytest.raises(Struck):
        patch.setattr(ledger, "skip", struck)
        two[0].publish(9)
    assert isinstance(attempt(lambda: two[1].publish(9)), CallAborted)


def test_peers_are_told_of_a_rank_that_was_struck_while_it_ended_their_step(two, pool, monkeypatch):
    late = pool.submit(two[1].publish, 8)
    until_open(two[1])
    abort = GroupCall._abort

    def struck(self, error):
        abort(self, error)
        raise Struck

    with monkeypatch.context() as patch, pytest.raises(Struck):
        patch.setattr(GroupCall, "_abort", struck)
        two[0].publish(9)
    assert isinstance(late.exception(), TorchRosError)
    assert isinstance(attempt(lambda: two[1].publish(9)), TorchRosError)
