"""Three etcds that are one store: members die, and those who use it hardly notice."""

import contextlib
import signal
import subprocess
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from kit import until

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import SeatLost, StoreUnavailable
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.loops import Act, Done, settle
from torch_ros.store.run import REQUEST_TIMEOUT_S, run
from torch_ros.store.session import Session
from torch_ros.store.txn import Put, Read, Txn, Unchanged, Watch, one, under

pytestmark = pytest.mark.timeout(120)

EVERYTHING = under("t/")
COUNTER = "t/counter"


def asked(kv):
    """The member that it asks now."""
    return kv._current


def asks(kv, member):
    """From now on it asks that member."""
    kv._current = member
    return member


@pytest.fixture
def kv(etcd_cluster):
    kv = EtcdKV(etcd_cluster.hosts)
    yield kv
    kv.close()


def put(kv, name="a", value=b"", timeout_s=5.0):
    return kv.commit(Txn(ops=(Put("t/" + name, value),)), timeout_s=timeout_s).rev


def read(kv, timeout_s=5.0):
    return kv.read(Read((EVERYTHING,)), timeout_s=timeout_s)


def wait(kv, after_rev, timeout_s=30.0):
    return kv.wait(Watch((EVERYTHING,), after_rev, "a test waits"), timeout_s=timeout_s)


def is_answering(kv):
    with contextlib.suppress(StoreUnavailable):
        read(kv, timeout_s=2)
        return True
    return False


def count_up(kv, what="count"):
    """Add one to the counter, as the rules do it: read, decide, commit, look again."""
    mine = f"counted/{uuid.uuid4().hex}"

    def rule(view):
        if done := view.get(mine):  # a commit whose reply was lost; others may have counted since
            return Done(int(done.value))
        entry = view.get(COUNTER)
        number = int(entry.value) + 1 if entry else 1
        value = str(number).encode()
        txn = Txn((view.unchanged(COUNTER),), (Put(COUNTER, value), Put(mine, value)))
        return Act(txn, lambda _: number)

    return run(settle(what, (one(COUNTER), one(mine)), rule), kv, Deadline(what, 30.0))


# Which member is asked


@pytest.mark.parametrize("victim", ["the one in use", "the leader"])
def test_reads_and_commits_go_on_when_a_member_dies(kv, etcd_cluster, victim):
    rev = put(kv, value=b"kept")
    leader = etcd_cluster.leader()
    if victim == "the leader":
        # The one in use stays: it has to find the new leader.
        asks(kv, (leader + 1) % 3)
    else:
        asks(kv, (leader + 1) % 3)
        leader = asked(kv)
    read(kv)
    etcd_cluster.kill(leader)
    numbers = [count_up(kv) for _ in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    assert (read(kv).entries["t/a"].value, read(kv).rev) == (b"kept", rev + 5)


def test_a_member_that_hangs_is_left_within_one_request(kv, etcd_cluster):
    put(kv)
    asks(kv, (etcd_cluster.leader() + 1) % 3)
    read(kv)
    etcd_cluster.members[asked(kv)].suspend()
    with pytest.raises(StoreUnavailable, match="did not answer within"):
        read(kv, timeout_s=0.5)
    started = time.monotonic()
    assert "t/a" in read(kv).entries
    assert time.monotonic() - started < 2


def test_who_waits_at_a_member_that_hangs_moves_on(kv, etcd_cluster):
    rev = put(kv)
    index = asks(kv, (etcd_cluster.leader() + 1) % 3)
    etcd_cluster.members[index].suspend()
    assert not wait(kv, rev, timeout_s=1.5)
    assert asked(kv) != index
    assert not wait(kv, rev, timeout_s=0.5)
    put(kv)
    assert wait(kv, rev, timeout_s=5)


def test_a_member_without_the_others_is_left(kv, etcd_cluster):
    """It is alive, takes connections and knows its past, but cannot say what is true now."""
    lonely = 0
    rev = put(kv)
    asks(kv, lonely)
    for other in (1, 2):
        etcd_cluster.kill(other)
    until(lambda: not etcd_cluster.members[lonely].metric("etcd_server_has_leader"))
    assert wait(kv, rev, timeout_s=10)
    assert asked(kv) != lonely


# What is sent twice


def test_a_commit_whose_reply_may_be_lost_is_not_sent_again(kv, etcd_cluster, monkeypatch):
    """Each commit puts a key of its own; whoever is told of a failure sees to it."""
    asks(kv, etcd_cluster.leader())
    read(kv)
    tries = defaultdict(list)  # by key: what became of each
    for member in kv._members:
        send = member._kv.Txn

        def record(request, send=send, **options):
            puts = [
                op.request_put.key.decode() for op in request.success if op.HasField("request_put")
            ]
            try:
                reply = send(request, **options)
            except grpc.RpcError as error:
                tries[puts[0] if puts else ""].append(error.details())
                raise
            tries[puts[0] if puts else ""].append("answered")
            return reply

        monkeypatch.setattr(member._kv, "Txn", record)
    stopping, outcomes = threading.Event(), {}

    def commit_all(thread):
        for number in range(100_000):
            if stopping.is_set():
                return
            name = f"{thread}-{number}"
            try:
                outcomes[f"t/{name}"] = put(kv, name, timeout_s=5)
            except StoreUnavailable as error:
                outcomes[f"t/{name}"] = error

    with ThreadPoolExecutor(4) as pool:
        for thread in range(4):
            pool.submit(commit_all, thread)
        until(lambda: len(outcomes) > 50)
        etcd_cluster.kill(asked(kv))
        until(lambda: any(isinstance(r, StoreUnavailable) for r in list(outcomes.values())))
        before = len(outcomes)
        until(lambda: len(outcomes) > before + 50)
        stopping.set()
    entries = read(kv).entries
    for key, rev in outcomes.items():
        assert all("failed to connect" in words for words in tries[key][:-1]), tries[key]
        if not isinstance(rev, StoreUnavailable):
            assert entries[key].mod_rev == entries[key].create_rev == rev
    assert any(tries[key][-1] != "answered" for key in outcomes)


def test_nothing_is_counted_twice_while_members_come_and_go(kv, etcd_cluster):
    stopping, numbers = threading.Event(), []

    def go():
        while not stopping.is_set():
            numbers.append(count_up(kv))

    with ThreadPoolExecutor(3) as pool:
        counting = [pool.submit(go) for _ in range(3)]
        for index in (etcd_cluster.leader(), None):
            victim = etcd_cluster.leader() if index is None else index
            wanted = len(numbers) + 20
            until(lambda: len(numbers) >= wanted)  # noqa: B023
            etcd_cluster.kill(victim)
            wanted = len(numbers) + 20
            until(lambda: len(numbers) >= wanted)  # noqa: B023
            etcd_cluster.restart(victim)
        stopping.set()
        for future in counting:
            future.result(timeout=30)
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


# Watches and leases


def test_no_change_is_missed_while_members_come_and_go(etcd_cluster):
    writer, watcher = EtcdKV(etcd_cluster.hosts), EtcdKV(etcd_cluster.hosts[::-1])
    seen, written, stopping = [0], [0], threading.Event()
    before = read(watcher).rev  # or it would begin behind the first change, and sleep

    def follow():
        rev = before
        while not stopping.is_set() or seen[-1] < written[-1]:
            with contextlib.suppress(StoreUnavailable):
                assert wait(watcher, rev), "slept through a change"
                view = read(watcher)
                rev = view.rev
                seen.extend(int(entry.value) for entry in view.entries.values())

    def write():
        while not stopping.is_set():
            written.append(written[-1] + 1)
            while True:
                with contextlib.suppress(StoreUnavailable):
                    put(writer, value=str(written[-1]).encode())
                    break
            until(lambda: seen[-1] == written[-1])  # or it would sleep through the last

    def await_more():
        wanted = seen[-1] + 15
        until(lambda: seen[-1] >= wanted or following.done() or writing.done())
        for ended in (future for future in (following, writing) if future.done()):
            stopping.set()
            ended.result()

    with ThreadPoolExecutor(2) as pool:
        following, writing = pool.submit(follow), pool.submit(write)
        for victim in (asked(watcher), etcd_cluster.leader(), asked(writer)):
            await_more()
            etcd_cluster.kill(victim)
            await_more()
            etcd_cluster.restart(victim)
        stopping.set()
        writing.result(timeout=30)
        put(writer, value=str(written[-1]).encode())  # wakes whoever waits for more
        following.result(timeout=30)
    assert seen == sorted(seen)
    writer.close()
    watcher.close()


def test_a_lease_lives_while_the_member_that_renewed_it_dies(kv, etcd_cluster):
    lost = []
    session = Session(kv, ttl_s=10, on_lost=lost.append, name="test")
    kv.commit(Txn(ops=(Put("t/mine", b"", session.lease_id),)), timeout_s=5)
    for _ in range(2):
        victim = asked(kv)
        etcd_cluster.kill(victim)
        deadline = session.deadline
        until(lambda: session.deadline > deadline + 2)  # noqa: B023
        etcd_cluster.restart(victim)
    assert not lost
    assert "t/mine" in read(kv).entries
    session.close()
    assert "t/mine" not in read(kv).entries


# Two of three


def test_without_a_majority_nothing_is_answered_and_calls_wait_for_it(kv, etcd_cluster):
    rev = put(kv)
    leader = etcd_cluster.leader()
    others = [index for index in range(3) if index != leader]
    for index in others:
        etcd_cluster.kill(index)
    until(lambda: not is_answering(kv))
    for request in (
        lambda: read(kv, timeout_s=1),
        lambda: put(kv, timeout_s=1),
        lambda: kv.commit(Txn((Unchanged("t/a", rev),)), timeout_s=1),
        lambda: kv.grant(60, timeout_s=1),
    ):
        with pytest.raises(StoreUnavailable):
            request()
    with ThreadPoolExecutor() as pool:
        counting = pool.submit(count_up, kv)
        with pytest.raises(StoreUnavailable):
            read(kv, timeout_s=1)
        assert not counting.done()
        etcd_cluster.restart(others[0])
        assert counting.result(timeout=20) == 1
    assert read(kv).entries["t/a"].mod_rev == rev
    etcd_cluster.restart(others[1])
    assert count_up(kv) == 2


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_majority_is_told_in_words(kv, etcd_cluster, how):
    """The one that is left answers: it serves its past, and knows that it has no leader."""
    rev, lonely = put(kv), 0
    asks(kv, lonely)
    lose_majority(etcd_cluster, lonely, how)
    for request in (
        lambda: read(kv, timeout_s=1),
        lambda: put(kv, timeout_s=1),
        lambda: kv.grant(60, timeout_s=1),
        lambda: kv.keep_alive(1, timeout_s=1),
    ):
        asks(kv, lonely)
        with pytest.raises(StoreUnavailable, match="no leader: more than half of its members"):
            request()
    asks(kv, lonely)
    assert not kv.status(timeout_s=5).has_leader
    regain_majority(etcd_cluster, lonely, how)
    until(lambda: is_answering(kv))  # a member that wakes up may refuse what it was asked then
    assert read(kv, timeout_s=10).entries["t/a"].mod_rev == rev


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_a_member_that_is_removed_is_left_within_a_request(kv, etcd_cluster, etcd_programs, which):
    rev, leader = put(kv), etcd_cluster.leader()
    removed = leader if which == "leader" else (leader + 1) % 3
    asks(kv, removed)
    read(kv)
    other = etcd_cluster.hosts[(removed + 1) % 3]
    ctl = [etcd_programs / "etcdctl", "--endpoints", other, "member"]
    listed = subprocess.run([*ctl, "list"], check=True, capture_output=True, text=True).stdout
    name = etcd_cluster.members[removed].name
    identity = next(line.split(", ")[0] for line in listed.splitlines() if f", {name}, " in line)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, kv, rev)
        # For its first seconds a cluster refuses that.
        remove = [*ctl, "remove", identity]
        until(lambda: subprocess.run(remove, capture_output=True).returncode == 0)
        until(lambda: is_answering(kv), limit_s=REQUEST_TIMEOUT_S)
        put(kv)
        assert waiting.result(timeout=20)
    assert etcd_cluster.members[removed].process.wait(20) is not None
    assert asked(kv) != removed
    alone = EtcdKV([etcd_cluster.hosts[removed]])
    with pytest.raises(StoreUnavailable, match="refused the connection"):
        read(alone)
    alone.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_trainer_steps_on_without_a_majority(etcd_cluster, how):
    ttl_s, lonely = 2, etcd_cluster.leader()
    options = {"endpoint": etcd_cluster.endpoint, "timeout_s": 60, "ttl_s": ttl_s}
    weights, got = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    with (
        etcd_cluster.excused(),
        torch_ros.open("m", replica="trainer", **options) as trainer,
        torch_ros.open("m", replica="rollout", **options) as rollout,
    ):
        trainer.register(weights)
        rollout.register(got)
        trainer.publish(1)
        assert rollout.update("latest")
        lose_majority(etcd_cluster, lonely, how)
        for version in (2, 3):
            started = time.monotonic()
            trainer.unpublish()
            assert time.monotonic() - started < ttl_s + REQUEST_TIMEOUT_S + 1
            weights["w"].fill_(version)
            started = time.monotonic()
            assert not trainer.publish(version, store_wait_s=0)
            assert time.monotonic() - started < 1
        regain_majority(etcd_cluster, lonely, how)
        until(rollout_can(rollout, version))
        assert got["w"].unique().tolist() == [version]


def rollout_can(rollout, version):
    def can():
        try:
            return rollout.update("latest", timeout_s=30) and rollout.version == version
        except SeatLost:
            return False

    return can


def lose_majority(cluster, lonely, how):
    for index, member in enumerate(cluster.members):
        if index != lonely:
            member.kill() if how == "killed" else member.suspend()
    until(lambda: not cluster.members[lonely].metric("etcd_server_has_leader"))


def regain_majority(cluster, lonely, how):
    for index, member in enumerate(cluster.members):
        if index != lonely:
            member.spawn() if how == "killed" else member.process.send_signal(signal.SIGCONT)


# The whole of it


def test_a_trainer_and_its_rollout_go_on_when_members_die(etcd_cluster):
    weights, got = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    options = {"endpoint": etcd_cluster.endpoint, "timeout_s": 60}
    version = 0
    more = threading.Condition()

    def await_versions(count):
        wanted = version + count
        with more:
            assert more.wait_for(lambda: version >= wanted, timeout=60)

    def come_and_go():
        for victim in (etcd_cluster.leader(), 0):
            await_versions(3)
            etcd_cluster.kill(victim)
            await_versions(3)
            etcd_cluster.restart(victim)
        await_versions(3)

    with (
        etcd_cluster.excused(),
        torch_ros.open("m", replica="trainer", **options) as trainer,
        torch_ros.open("m", replica="rollout", **options) as rollout,
        ThreadPoolExecutor() as pool,
    ):
        trainer.register(weights)
        rollout.register(got)
        coming_and_going = pool.submit(come_and_go)
        while not coming_and_going.done():
            trainer.unpublish()
            weights["w"].fill_(version + 1)
            trainer.publish(version + 1)
            assert rollout.update("latest")
            assert got["w"].unique().tolist() == [version + 1]
            with more:
                version += 1
                more.notify_all()
        coming_and_going.result()
