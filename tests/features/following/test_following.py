"""Going to versions as they come: what is not there, what is waited for, and who says stop."""

import asyncio
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import going_on
import pytest
import torch
from going_on import WAIT_S, go_on, on_all, publisher
from kit import inside, until

import torch_ros
from torch_ros.errors import (
    CallAborted,
    ClosedError,
    SeatLost,
    SourceLost,
    UsageError,
    VersionNotFound,
)
from torch_ros.features.following import flow
from torch_ros.features.following.rules import look_out
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.policy import NEWEST
from torch_ros.protocol.records import (
    GroupRecord,
    Holding,
    RunRecord,
    VersionRecord,
    VersionRef,
)
from torch_ros.protocol.seat import Seat
from torch_ros.protocol.versions import Spec
from torch_ros.shard.replication import replicate
from torch_ros.store import run
from torch_ros.store.txn import Entry, View, whole

SOON_S = 8
pytestmark = pytest.mark.usefixtures("quick_looks")
replica = pytest.fixture(going_on.replica)


@pytest.fixture(autouse=True)
def until_waiting(monkeypatch):
    """Returns when each of these handles is in an update that has found nothing."""
    wait, inside = run._wait, Counter()

    def noted(watch, ask, endpoint, deadline, *args):
        if not deadline.what.startswith(("update", "follow")):
            return wait(watch, ask, endpoint, deadline, *args)
        kv = ask.func.__self__
        inside[kv] += 1
        try:
            return wait(watch, ask, endpoint, deadline, *args)
        finally:
            inside[kv] -= 1

    def until_waiting(*handles):
        until(lambda: all(inside[handle._shard.group.kv] for handle in handles))

    monkeypatch.setattr(run, "_wait", noted)
    return until_waiting


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_an_update_that_has_given_up_what_it_held_does_not_say_no(opened, monkeypatch):
    trainer, rollout = publisher(opened), opened("rollout", {"w": torch.zeros(8)})
    rollout.replicate()
    trainer.unpublish()
    trainer.publish(2)

    def gone(*_):
        trainer.unpublish()
        return replicate(*_)

    monkeypatch.setattr(flow, "replicate", gone)
    with pytest.raises(VersionNotFound, match="given up"):
        rollout.update(wait_s=0.5)
    assert rollout.version is None


def test_an_update_waits_until_there_is_something_newer(opened, pool, replica, until_waiting):
    trainer = publisher(opened)
    assert on_all(pool, replica, lambda h: h.update(wait_s=WAIT_S)) == [True, True]
    each = [pool.submit(handle.update, wait_s=WAIT_S) for handle in replica]
    until_waiting(*replica)
    go_on(trainer, 2)
    assert [one.result(WAIT_S) for one in each] == [True, True]
    assert [handle.version for handle in replica] == [2, 2]


def test_an_update_begins_to_wait_when_no_other_call_is_made_any_more(opened, monkeypatch):
    now_s, wait_s, left_s = [0.0], 2.0**-6, []
    rollout = opened("rollout", {"w": torch.zeros(8)})
    shard, looks = inside(rollout), flow.LookingOut.looks
    busy = shard.busy

    def after_another(call, **options):
        now_s[0] += 1  # for so long the other call was made
        return busy(call, **options)

    def noting(self):
        looks(self)
        left_s.append(self._left_s)

    monkeypatch.setattr(flow, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(shard, "busy", after_another)
    monkeypatch.setattr(flow.LookingOut, "looks", noting)
    assert rollout.update(wait_s=wait_s) is False
    assert {*left_s} == {wait_s}


def test_a_call_that_waited_has_its_time_for_the_rest(opened, pool, until_waiting):
    trainer, rollout = publisher(opened), opened("rollout", timeout_s=WAIT_S)
    rollout.register({"w": torch.zeros(8)})
    assert rollout.update()
    waiting = pool.submit(rollout.update, wait_s=WAIT_S, timeout_s=0.5)
    until_waiting(rollout)
    time.sleep(0.6)  # more than its time for the rest
    go_on(trainer, 2)
    assert waiting.result(WAIT_S)


def test_a_version_that_goes_before_it_is_read_is_waited_out(
    opened, pool, replica, monkeypatch, until_waiting
):
    """All ranks look out anew: they hold nothing, and take the next one."""
    trainer = publisher(opened)
    assert on_all(pool, replica, lambda h: h.update()) == [True, True]
    gone = threading.Event()

    def goes(*call):
        if not gone.is_set():
            trainer.unpublish()
            gone.set()
        return replicate(*call)

    monkeypatch.setattr("torch_ros.features.following.flow.replicate", goes)
    each = [pool.submit(handle.update, wait_s=WAIT_S) for handle in replica]
    until_waiting(*replica)
    go_on(trainer, 2)
    assert gone.wait(WAIT_S)
    until(lambda: {handle.version for handle in replica} == {None})
    until_waiting(*replica)
    trainer.publish(3)
    assert [one.result(WAIT_S) for one in each] == [True, True]
    assert [handle.version for handle in replica] == [3, 3]


def test_what_only_this_replica_has_kept_is_none_to_go_to(opened):
    """Its own copy in host memory: nobody reads from himself."""
    owner = publisher(opened, retain=("latest",))
    owner.unpublish()
    assert owner.list() == {1: {"trainer+2"}}
    assert owner.update(wait_s=0.2) is False
    assert owner.replicate(missing_ok=True) is None
    publisher(opened, 2, "other")
    assert owner.update(wait_s=WAIT_S)


def follow_all(pool, handles, stops, seen=lambda handle, version: None):
    """Each rank follows in a thread of its own; the futures of what each has seen."""

    def follow(handle, stop):
        versions = []
        for version in handle.follow(stop=stop):
            assert version == handle.version
            versions.append(version)
            seen(handle, version)
        return versions

    return [pool.submit(follow, *each) for each in zip(handles, stops, strict=True)]


@pytest.mark.parametrize("told", [0, 1])
def test_followers_get_each_version_until_one_of_them_is_told_to_stop(
    opened, pool, replica, until_waiting, told
):
    stops = [threading.Event(), threading.Event()]
    each = follow_all(pool, replica, stops)
    until_waiting(*replica)
    trainer = publisher(opened)
    until(lambda: {handle.version for handle in replica} == {1})
    until_waiting(*replica)
    go_on(trainer, 2)
    until(lambda: {handle.version for handle in replica} == {2})
    until_waiting(*replica)
    stops[told].set()
    assert [one.result(WAIT_S) for one in each] == [[1, 2], [1, 2]]
    assert [handle.version for handle in replica] == [2, 2]
    go_on(trainer, 3)
    assert on_all(pool, replica, lambda h: h.update()) == [True, True]


def test_who_is_told_before_it_begins_gets_nothing(opened):
    publisher(opened)
    rollout = opened("rollout", {"w": torch.zeros(8)})
    assert list(rollout.follow(stop=lambda: True)) == []
    assert rollout.version is None


def test_a_loop_that_is_left_leaves_nothing_behind(opened):
    trainer, rollout = publisher(opened), opened("rollout", {"w": torch.zeros(8)})
    for _ in rollout.follow():
        break
    go_on(trainer, 2)
    with pytest.raises(ZeroDivisionError):
        for _ in rollout.follow():
            1 / 0  # noqa: B018
    go_on(trainer, 3)
    versions = rollout.follow("latest")
    assert next(versions) == 3
    versions.close()
    go_on(trainer, 4)
    assert rollout.update()


def test_a_body_may_call_the_handle(opened):
    """No call is open between two versions."""
    trainer, rollout = publisher(opened), opened("rollout", {"w": torch.zeros(8)})
    seen = []
    for version in rollout.follow(stop=lambda: len(seen) == 3):
        seen.append(version)
        rollout.unpublish()
        go_on(trainer, version + 1)
    assert seen == [1, 2, 3]


def test_a_follower_whose_handle_is_closed_is_told(opened, pool, until_waiting):
    publisher(opened)
    rollout = opened("rollout", {"w": torch.zeros(8)})
    [follower] = follow_all(pool, [rollout], [None])
    until(lambda: rollout.version == 1)
    until_waiting(rollout)
    rollout.close()
    assert isinstance(follower.exception(WAIT_S), ClosedError)


def test_ctrl_c_ends_a_follower_and_its_peers(opened, pool, replica, until_waiting, ctrl_c):
    publisher(opened)
    first, second = replica
    [peer] = follow_all(pool, [second], [None])
    own = first.follow()
    assert next(own) == 1
    until_waiting(second)
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        next(own)
    assert isinstance(peer.exception(WAIT_S), CallAborted)
    assert on_all(pool, replica, lambda h: h.update()) == [False, False]


def test_a_follower_goes_on_after_its_seat_was_lost(opened, pool, until_waiting):
    trainer, stop = publisher(opened), threading.Event()
    rollout = opened("rollout", {"w": torch.zeros(8)})
    [follower] = follow_all(pool, [rollout], [stop])
    until(lambda: rollout.version == 1)
    until_waiting(rollout)
    group, seat = rollout._shard.group, rollout._shard.group.seat
    group.kv.revoke(seat.lease_id, timeout_s=5)
    until(lambda: group.seat is not seat)
    go_on(trainer, 2)
    until(lambda: rollout.version == 2)
    stop.set()
    assert follower.result(WAIT_S) == [1, 2]


def test_what_cannot_be_read_is_tried_again_some_times(opened, monkeypatch):
    trainer, failing = publisher(opened), flow.LOSSES_MAX - 1
    monkeypatch.setattr(flow, "PAUSE_TTLS", 0.0)
    rollout = opened("rollout", {"w": torch.zeros(8)})

    def lost(*args):
        nonlocal failing
        failing -= 1
        if failing >= 0:
            raise SourceLost("trainer", "it is gone")
        return replicate(*args)

    monkeypatch.setattr("torch_ros.features.following.flow.replicate", lost)
    assert next(rollout.follow()) == 1
    go_on(trainer, 2)
    failing = flow.LOSSES_MAX
    with pytest.raises(SourceLost):
        next(rollout.follow())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stop": 3}, "stop=3"),
        ({"version": 7}, r"follow\(7\)"),
        ({"version": "newest"}, "'newest'"),
    ],
)
def test_bad_arguments_of_follow_are_named_at_once(opened, options, named):
    with pytest.raises(UsageError, match=named):
        opened("rollout").follow(**options)


def test_a_follower_gives_up_what_it_held_from_what_the_agree_has_read(
    opened, pool, replica, until_waiting, monkeypatch
):
    """The rank that ends the agree unpublishes before its peer looks: no read, no lost race."""
    unpublished, asked = threading.Event(), []

    def is_of_unpublish(ranges):
        return any("/shards/rollout+" in part.start for part in whole(ranges))

    def counted(kv):
        read, commit = kv.read, kv.commit

        def noted_read(request, *, timeout_s):
            if is_of_unpublish(request.ranges):
                asked.append("read")
                assert unpublished.wait(WAIT_S)
            return read(request, timeout_s=timeout_s)

        def noted_commit(txn, *, timeout_s):
            reply = commit(txn, timeout_s=timeout_s)
            if is_of_unpublish(txn.otherwise):
                asked.append("commit" if reply.applied else "lost race")
                unpublished.set()
            return reply

        monkeypatch.setattr(kv, "read", noted_read)
        monkeypatch.setattr(kv, "commit", noted_commit)

    stop = threading.Event()
    each = follow_all(pool, replica, [stop, stop])
    until_waiting(*replica)
    trainer = publisher(opened)
    until(lambda: {handle.version for handle in replica} == {1})
    until_waiting(*replica)
    for handle in replica:
        counted(handle._shard.group.kv)
    go_on(trainer, 2)
    until(lambda: {handle.version for handle in replica} == {2})
    seen = sorted(asked)
    until_waiting(*replica)
    stop.set()
    assert [one.result(WAIT_S) for one in each] == [[1, 2], [1, 2]]
    assert seen == ["commit", "read"]  # the peer's


def follower_of(server, pool, stop, seen):
    rollout = torch_ros.open(
        "m", endpoint=f"etcd://{server.host}", replica="r", ttl_s=2, timeout_s=1
    )
    rollout.register({"w": torch.zeros(8)})
    [follower] = follow_all(pool, [rollout], [stop], lambda _, version: seen.append(version))
    return rollout, follower


@pytest.mark.long
def test_a_follower_lasts_through_an_outage(etcd_server, pool):
    """It waits for longer than any call of it would, and has its seat again afterwards."""
    stop, seen = threading.Event(), []
    with torch_ros.open("m", endpoint=f"etcd://{etcd_server.host}", ttl_s=2) as trainer:
        trainer.register({"w": torch.ones(8)})
        trainer.publish(1)
        rollout, follower = follower_of(etcd_server, pool, stop, seen)
        with rollout:
            until(lambda: seen == [1])
            etcd_server.kill()
            until(lambda: rollout.state == "away")
            time.sleep(3)
            etcd_server.start()
            go_on(trainer, 2)
            until(lambda: seen == [1, 2])
            stop.set()
            assert follower.result(WAIT_S) == [1, 2]


@pytest.mark.long
def test_a_follower_that_is_told_to_stop_does_not_wait_for_etcd(etcd_server, pool):
    stop, seen = threading.Event(), []
    rollout, follower = follower_of(etcd_server, pool, stop, seen)
    with rollout:
        etcd_server.kill()
        until(lambda: rollout.state == "away")
        stop.set()
        assert follower.result(flow.STOP_S + WAIT_S) == []


def leaves_by_break(handle):
    for _ in handle.follow():
        break


def leaves_by_an_error(handle):
    with suppress(ZeroDivisionError):
        for _ in handle.follow():
            1 / 0  # noqa: B018


def leaves_by_closing(handle):
    versions = handle.follow()
    next(versions)
    versions.close()


def leaves_by_a_task(handle):
    async def loop():
        async for _ in handle.aio.follow():
            break

    asyncio.run(loop())


@pytest.mark.parametrize(
    "leaves",
    [
        leaves_by_break,
        leaves_by_a_task,
        *(
            pytest.param(by, marks=pytest.mark.long)
            for by in (leaves_by_an_error, leaves_by_closing)
        ),
    ],
)
def test_who_leaves_alone_ends_its_peers_who_keep_what_they_hold(opened, pool, replica, leaves):
    trainer = publisher(opened)
    left = pool.submit(leaves, replica[1])
    own = replica[0].follow(timeout_s=WAIT_S)
    assert next(own) == 1
    left.result(WAIT_S)
    publisher(opened, 2, "t2")
    began_s = time.monotonic()
    with pytest.raises(CallAborted, match="given up by rank 1: it left its loop"):
        next(own)
    assert time.monotonic() - began_s < SOON_S
    assert [handle.version for handle in replica] == [1, 1]
    trainer.unpublish()
    assert "rollout" in opened("looks").list()[1]
    each = [pool.submit(next, handle.follow(timeout_s=WAIT_S)) for handle in replica]
    assert [one.result(2 * WAIT_S) for one in each] == [2, 2]


def test_ctrl_c_between_two_tries_ends_the_peers(opened, pool, replica, monkeypatch):
    """After a loss all ranks pause, and the peers try again."""
    publisher(opened)
    pause = flow._pause

    def interrupted(shard, *times):
        if shard.group.seat.rank == 1:
            raise KeyboardInterrupt
        pause(shard, *times)

    def lost(*_):
        raise SourceLost("trainer", "it is gone")

    monkeypatch.setattr(flow, "PAUSE_TTLS", 0.05)
    monkeypatch.setattr(flow, "_pause", interrupted)
    monkeypatch.setattr("torch_ros.features.following.flow.replicate", lost)
    peer = pool.submit(next, replica[0].follow(timeout_s=WAIT_S))
    with pytest.raises(KeyboardInterrupt):
        next(replica[1].follow(timeout_s=WAIT_S))
    assert isinstance(peer.exception(SOON_S), CallAborted)


def test_a_loop_that_all_ranks_leave_alike_costs_nothing(opened, pool, replica, monkeypatch):
    publisher(opened)
    wait, waiting, commits = run._wait, set(), []

    def noted_wait(watch, ask, endpoint, deadline, *rest):
        if deadline.what.startswith("leaving"):
            waiting.add(ask.func.__self__)
        return wait(watch, ask, endpoint, deadline, *rest)

    monkeypatch.setattr(run, "_wait", noted_wait)
    assert on_all(pool, replica, leaves_by_break) == [None, None]
    for handle in replica:
        kv = handle._shard.group.kv
        monkeypatch.setattr(kv, "commit", noted(kv.commit, commits))
    calls = [handle._shard.group.ledger.calls_made for handle in replica]
    minded = [watcher(handle) for handle in replica]
    until(lambda: len(waiting) == 2)
    assert not any(txn.ops for txn in commits)  # a watch asks by some without
    assert [handle._shard.group.ledger.calls_made for handle in replica] == calls
    assert on_all(pool, replica, lambda h: h.update()) == [False, False]
    for thread in minded:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def noted(call, calls):
    def noting(request, **options):
        calls.append(request)
        return call(request, **options)

    return noting


def watcher(handle):
    return next(t for t in handle._shard.group._threads if "leaves" in t.name)


def test_who_waits_hears_that_it_was_replaced(opened, pool, until_waiting, monkeypatch):
    monkeypatch.setattr(run, "REMIND_S", 1000.0)
    rollout = opened("rollout", {"w": torch.zeros(8)})
    waiting = pool.submit(rollout.update, wait_s=10 * WAIT_S)
    until_waiting(rollout)
    opened("rollout")
    assert isinstance(waiting.exception(WAIT_S), SeatLost)


def test_who_waits_for_a_number_looks_at_the_last_that_reads_it():
    keys, ref = Keys("m"), VersionRef("run", 4, "uid", 1)
    seat = Seat(keys, "r", "1", 0, 1, "run", 1, 7, "default", False, 60.0)
    held = VersionRef("run", 5, "uid", 1)
    there = {
        keys.group("r"): GroupRecord("1", 1, "run", is_complete=True),
        keys.run("run"): RunRecord("h:1", 1),
        keys.version("run", 4): VersionRecord("uid", "L"),
        replace(seat, replica="other").holding(ref): Holding("uid", 1, "filling", 1),
    }
    entries = {key: Entry(record.encode(), 1, 1, 0) for key, record in there.items()}
    _, wait = look_out(View(1, entries), seat, Spec.parse(4), held, NEWEST)
    assert keys.holdings_of("run", 4) in wait.ranges
