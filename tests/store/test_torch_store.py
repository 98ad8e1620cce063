"""What torch asks of a store: EtcdStore beside torch's own, on a real etcd and one that loses."""

import contextlib
import functools
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import until

from torch_ros.deadline import Deadline
from torch_ros.errors import ClosedError, StoreUnavailable, UsageError
from torch_ros.memory import store as memory
from torch_ros.memory.store import MemoryKV, Space
from torch_ros.store import EtcdStore, run
from torch_ros.store.distributed import keys as torch_keys
from torch_ros.store.distributed import once, rendezvous
from torch_ros.store.distributed import store as torch_store
from torch_ros.store.txn import Put, Read, under

pytestmark = pytest.mark.timeout(60)

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)
LARGE = bytes(range(256)) * 12_000  # 3 MB
# torch's own stores say what is right; they change with torch only.
KINDS = [
    pytest.param("hash", marks=pytest.mark.long),
    pytest.param("tcp", marks=pytest.mark.long),
    "etcd",
    "memory",
]


def unique():
    return "s-" + uuid.uuid4().hex


class Clients:
    """One store of a kind; every call is another client of it."""

    def __init__(self, kind, endpoint):
        self.kind, self.name, self.opened = kind, unique(), []
        self.endpoint = f"memory://{unique()}" if kind == "memory" else endpoint
        if kind == "hash":
            self.first = dist.HashStore()
        elif kind == "tcp":
            self.first = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def __call__(self, timeout=LONG):
        if self.kind == "hash":
            store = self.first
        elif self.kind == "tcp":
            store = dist.TCPStore("127.0.0.1", self.first.port, wait_for_workers=False)
        else:
            store = EtcdStore(self.endpoint, self.name)
        store.set_timeout(timeout)
        self.opened.append(store)
        return store

    def close(self):
        for store in self.opened:
            if isinstance(store, EtcdStore):
                store.close()


@pytest.fixture(params=KINDS)
def clients(request, etcd_endpoint):
    found = Clients(request.param, etcd_endpoint)
    yield found
    found.close()


@pytest.fixture
def store(clients):
    return clients()


@pytest.fixture
def opened(etcd_endpoint):
    """EtcdStores that are closed at the end."""
    stores = []

    def open_store(*arguments, **options):
        stores.append(EtcdStore(*(arguments or (etcd_endpoint, unique())), **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def in_thread(call):
    """Start `call`; its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


# The same for all


@pytest.mark.parametrize("value", ["", "text", "é", b"\0\xff\0", bytes(range(256)), LARGE])
def test_a_value_comes_back_as_it_went_in(clients, value):
    clients().set("k", value)
    assert clients().get("k") == (value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize("key", ["", "a/b", "é", "a\0b", "%41", "a!b", 'a"', "..", " ", b"bytes"])
def test_any_text_is_a_key(store, key):
    store.set("other", "x")
    store.set(key, "v")
    assert store.get(key) == b"v"
    assert store.check([key])
    assert store.num_keys() == 2
    assert store.list_keys().count(key.decode() if isinstance(key, bytes) else key) == 1
    assert store.delete_key(key)
    assert not store.check([key])


def test_neighbouring_keys_are_different_keys(store):
    names = ["k", "k!", 'k"', "k/", "k/x", "k%", "kk", "K", "k\0", "k ", "k!x"]
    for name in names:
        store.set(name, name)
    assert [store.get(name).decode() for name in names] == names
    assert sorted(store.list_keys()) == sorted(names)
    assert store.delete_key("k")
    assert [name for name in names if store.check([name])] == names[1:]


def test_compare_set_at_its_corners(store):
    assert store.compare_set("created", "", "x") == b"x"
    assert store.get("created") == b"x"
    assert store.compare_set("missing", "expected", "x") == b"expected"
    assert not store.check(["missing"])
    assert store.compare_set("empty", "", "") == b""
    assert store.check(["empty"])
    assert store.compare_set("empty", "", "x") == b"x"
    assert store.compare_set("created", "", "y") == b"x"
    assert store.compare_set("created", "other", "y") == b"x"
    assert store.compare_set("created", b"x", b"\0\xff") == b"\0\xff"
    assert store.compare_set("created", b"\0\xff", LARGE) == LARGE
    assert store.compare_set("created", LARGE, "small") == b"small"
    assert store.get("created") == b"small"


def test_add_counts_in_decimal_text(store):
    assert [store.add("n", 5), store.add("n", -7), store.add("n", 0)] == [5, -2, -2]
    assert store.get("n") == b"-2"
    assert store.add("zero", 0) == 0
    assert store.get("zero") == b"0"
    assert store.add("flag", True) == 1
    store.set("wraps", str(2**63 - 1))
    assert store.add("wraps", 1) == -(2**63)
    assert store.get("wraps") == str(-(2**63)).encode()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("12", 12), (" 12", 12), ("12abc", 12), ("+3", 3), ("-4", -4), ("0x10", 0), ("1.5", 1)],
        *[("12\0", 12), ("\t\n 7", 7), ("007", 7)],
    ],
)
def test_add_reads_numbers_as_c_does(store, text, number):
    store.set("n", text)
    assert store.add("n", 1) == number + 1
    assert store.get("n") == str(number + 1).encode()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("no"),
        lambda store: store.wait(["no"]),
        lambda store: store.wait(["yes", "no"]),
        lambda store: store.wait(["no", "no"], timedelta(seconds=0.2)),
        lambda store: store.wait(["no"], 0.2),
        lambda store: store.multi_get(["yes", "no"]),
        lambda store: store.barrier("nobody else", 2),
    ],
)
def test_who_waits_for_nothing_is_told_after_the_timeout(clients, call):
    store = clients(SHORT)
    store.set("yes", "")
    started_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="(?i)timeout"):
        call(store)
    assert 0.15 < time.monotonic() - started_s < 5


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.set("k", 3),
        lambda store: store.set(3, "v"),
        lambda store: store.set("\udcff", "v"),
        lambda store: store.set("k", "\udcff"),
        lambda store: store.add("k", 1.5),
        lambda store: store.add("k", 2**63),
        lambda store: store.wait("k"),
        lambda store: store.check("k"),
    ],
)
def test_a_wrong_argument_is_a_type_error(store, call):
    with pytest.raises(TypeError):
        call(store)
    assert store.num_keys() == 0


def test_no_keys_are_all_there(store):
    store.wait([])
    assert store.check([])
    assert store.multi_get([]) == []
    assert store.multi_set([], []) is None


def test_more_values_than_a_request_may_have(store):
    many = [f"many/{index}" for index in range(150)]
    store.multi_set(many, many)
    assert [value.decode() for value in store.multi_get(many)] == many
    assert store.check(many)
    store.wait(many)
    assert not store.check([*many, "no"])
    assert store.has_extended_api()


def test_values_and_keys_of_different_numbers_are_refused(clients):
    if clients.kind == "hash":
        pytest.skip("HashStore checks this by an assertion of its own")
    with pytest.raises(dist.DistStoreError):
        clients().multi_set(["a", "b"], ["1"])


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.queue_push("q", "item"),
        lambda store: store.queue_pop("q", block=False),
        lambda store: store.queue_len("q"),
    ],
)
def test_a_queue_is_refused_with_the_way_out(opened, call):
    store = opened(f"memory://{unique()}", "s")
    with pytest.raises(NotImplementedError, match="add.*set.*get"):
        call(store)
    with pytest.raises(NotImplementedError, match="queue"):  # torch's own answer
        call(dist.PrefixStore("p", store))


def test_the_timeout_is_a_property(store):
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    assert store.clone().timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("wait", "wake"),
    [
        (lambda store: store.get("k"), lambda store: store.set("k", "v")),
        (lambda store: store.get("k"), lambda store: store.multi_set(["j", "k"], ["u", "v"])),
        (lambda store: store.get("k"), lambda store: store.compare_set("k", "", "v")),
        (lambda store: store.get("k"), lambda store: store.append("k", "v")),
        (lambda store: store.multi_get(["k"])[0], lambda store: store.set("k", "v")),
        (lambda store: (store.wait(["k"]), b"v")[1], lambda store: store.set("k", "")),
    ],
)
def test_another_client_wakes_who_waits(clients, wait, wake):
    waiting, waking = clients(), clients()
    future = in_thread(lambda: wait(waiting))
    time.sleep(0.1)  # most likely it waits by now; if not, it is right too
    assert not future.done()
    wake(waking)
    started_s = time.monotonic()
    assert future.result(10) == b"v"
    assert time.monotonic() - started_s < 8


def test_add_wakes_who_waits(clients):
    if clients.kind == "hash":
        pytest.skip("HashStore forgets to")
    waiting, waking = clients(), clients()
    future = in_thread(lambda: waiting.wait(["k"]))
    time.sleep(0.1)
    waking.add("k", 0)
    assert future.result(10) is None


def test_who_waits_asks_for_nothing_until_it_is_woken(monkeypatch, opened):
    space, is_waiting, asked = Space(), threading.Event(), []

    class Counting(MemoryKV):
        def commit(self, txn, *, timeout_s):
            asked.append(txn)
            return super().commit(txn, timeout_s=timeout_s)

        def wait(self, watch, *, timeout_s):
            is_waiting.set()
            return super().wait(watch, timeout_s=timeout_s)

    monkeypatch.setattr(torch_store, "connect", lambda *_, **__: Counting(space))
    waiting, other = opened("memory://", "s"), opened("memory://", "s")
    future = in_thread(lambda: waiting.get("k"))
    assert is_waiting.wait(10)
    asked.clear()
    with pytest.raises(TimeoutError):
        future.result(0.5)
    assert not asked
    other.set("k", "v")
    assert future.result(10) == b"v"


def test_many_threads_wait_at_once(clients):
    waiting, waking = clients(), clients()
    if clients.kind == "tcp":
        pytest.skip("a TCPStore client answers one call at a time")
    with ThreadPoolExecutor(33) as pool:
        futures = [pool.submit(waiting.get, f"k{index % 4}") for index in range(32)]
        futures.append(pool.submit(waiting.wait, [f"k{index}" for index in range(4)]))
        for index in range(4):
            waking.set(f"k{index}", str(index))
        found = [future.result(20) for future in futures]
    assert found == [str(index % 4).encode() for index in range(32)] + [None]


def test_a_barrier(clients):
    stores = [clients() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda store: store.barrier("b", 4), stores))


def test_with_a_prefix(clients):
    store = clients()
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", b"\0")
    assert store.get("p/k") == prefixed.get("k") == b"\0"
    assert prefixed.compare_set("k", b"\0", "v") == b"v"
    assert prefixed.compare_set("no", "expected", "v") == b"expected"
    assert prefixed.add("n", 2) == 2
    prefixed.append("n", "1")
    prefixed.multi_set(["a", "b"], ["1", "2"])
    assert prefixed.multi_get(["n", "b"]) == [b"21", b"2"]
    assert prefixed.check(["a", "b"])
    assert not prefixed.check(["a", "no"])
    assert prefixed.num_keys() == store.num_keys() == 4
    prefixed.wait(["a"])
    prefixed.wait(["a"], SHORT)
    with pytest.raises(dist.DistStoreError):
        prefixed.wait(["no"], SHORT)
    assert prefixed.delete_key("k")
    assert not prefixed.delete_key("k")
    assert prefixed.has_extended_api()
    prefixed.set_timeout(SHORT)
    assert store.timeout == prefixed.timeout == SHORT
    prefixed.barrier("b", 1)
    again = dist.PrefixStore("q", prefixed.clone())
    again.set("k", "v")
    assert store.get("p/q/k") == b"v"


# Sequences of operations, with TCPStore as the oracle


KEYS = st.sampled_from(["a", "b", "c", "a/b"])
VALUES = st.sampled_from([b"", b"1", b"-5", b"x", b"\0\xff", b"7z", b"y" * 1_100_000])
PAIRS = st.lists(st.tuples(KEYS, VALUES), max_size=3)
SOME = st.lists(KEYS, max_size=3)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, VALUES),
        st.tuples(st.just("get"), KEYS),
        st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
        st.tuples(st.just("add"), KEYS, st.integers(-9, 9)),
        st.tuples(st.just("append"), KEYS, VALUES),
        st.tuples(st.just("check"), SOME),
        st.tuples(st.just("delete_key"), KEYS),
        PAIRS.map(lambda pairs: ("multi_set", [k for k, _ in pairs], [v for _, v in pairs])),
        st.tuples(st.just("multi_get"), SOME),
        st.sampled_from([("num_keys",), ("list_keys",)]),
    ),
    max_size=60,
)


def is_safe(store, name, arguments):
    """Whether TCPStore survives an `add`, and nobody would wait for what does not come."""
    if name == "add":
        if arguments[0] not in store.list_keys():
            return True
        return (
            store.get(arguments[0])[:1] in {b"1", b"-", b"7"} and len(store.get(arguments[0])) < 15
        )
    if name in {"get", "multi_get"}:
        keys = arguments[0] if name == "multi_get" else [arguments[0]]
        return all(store.check([key]) for key in keys)
    return True


def result(store, name, arguments):
    try:
        found = getattr(store, name)(*arguments)
    except Exception as error:
        return type(error)
    return sorted(found) if name == "list_keys" else found


@functools.cache
def oracle_server():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def emptied():
    """A TCPStore with nothing in it. To open one takes 0.1 s."""
    found = oracle_server()
    for key in found.list_keys():
        found.delete_key(key)
    assert not found.num_keys()
    return found


def assert_same(store, operations):
    """That `store` answers as a TCPStore does."""
    oracle = emptied()
    for name, *arguments in operations:
        if is_safe(oracle, name, arguments):
            assert result(store, name, arguments) == result(oracle, name, arguments)
    for key in oracle.list_keys():
        assert store.get(key) == oracle.get(key)


def checked(examples):
    """Sequences of operations; the same in each run."""

    def decorate(test):
        chosen = settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        return chosen(given(operations=OPERATIONS)(test))

    return decorate


@checked(examples=40)
def test_any_sequence_has_the_results_of_tcp_store(etcd_endpoint, operations):
    with contextlib.closing(EtcdStore(etcd_endpoint, unique())) as store:
        assert_same(store, operations)


# Replies that are lost


class LosingKV(MemoryKV):
    """Loses requests and replies, and delivers some requests once more, much later."""

    def __init__(self, space, rng, share=0.25):
        super().__init__(space)
        self.rng, self.share, self.late = rng, share, []
        self.lost = Counter()

    def commit(self, txn, *, timeout_s):
        if self.late and self.rng.random() < 0.3:
            super().commit(self.late.pop(self.rng.randrange(len(self.late))), timeout_s=timeout_s)
        if not any(isinstance(op, Put) for op in txn.ops) or self.rng.random() > self.share:
            return super().commit(txn, timeout_s=timeout_s)
        fate = self.rng.choice(["request", "reply", "late"])
        self.lost[fate] += 1
        if fate == "late":
            self.late.append(txn)
        if fate == "reply":
            super().commit(txn, timeout_s=timeout_s)
        raise StoreUnavailable("memory", timeout_s, f"{fate} was lost")


@pytest.fixture
def losing(monkeypatch, opened):
    """EtcdStores on a `Space` whose replies are lost, by a seed."""
    monkeypatch.setattr(run, "RETRY_S", 0.0)

    def open_store(space, seed):
        kv = LosingKV(space, random.Random(seed))
        monkeypatch.setattr(torch_store, "connect", lambda *_, **__: kv)
        return opened("memory://", "s"), kv

    return open_store


def test_a_lost_reply_changes_no_result(losing):
    lost = Counter()

    @checked(examples=80)
    def holds(operations):
        store, kv = losing(Space(), len(operations))
        assert_same(store, operations)
        lost.update(kv.lost)

    holds()
    assert lost.keys() == {"request", "reply", "late"}


def test_lost_replies_under_contention_apply_once(losing):
    space = Space()
    stores = [losing(space, seed)[0] for seed in range(6)]

    def work(store):
        sums = [store.add("n", 1) for _ in range(25)]
        for _ in range(5):
            store.append("text", "x")
        return sums

    with ThreadPoolExecutor(6) as pool:
        sums = sorted(itertools.chain(*pool.map(work, stores)))
    assert sums == list(range(1, 151))
    assert stores[0].get("n") == b"150"
    assert stores[0].get("text") == b"x" * 30


def test_a_set_that_arrives_late_does_not_undo_a_newer_one(monkeypatch, opened):
    space, kept = Space(), []

    class Slow(MemoryKV):
        def commit(self, txn, *, timeout_s):
            if any(isinstance(op, Put) and op.key.endswith("/keys/k") for op in txn.ops):
                kept.append(txn)
                if len(kept) == 1:
                    raise StoreUnavailable("memory", timeout_s, "slow")
            return super().commit(txn, timeout_s=timeout_s)

    monkeypatch.setattr(run, "RETRY_S", 0.0)
    monkeypatch.setattr(torch_store, "connect", lambda *_, **__: Slow(space))
    first, second = opened("memory://", "s"), opened("memory://", "s")
    first.set("k", "old")
    second.set("k", "new")
    assert not MemoryKV(space).commit(kept[0], timeout_s=1).applied
    assert first.get("k") == b"new"


def test_an_attempt_that_arrives_after_its_call_was_answered_changes_nothing(monkeypatch, opened):
    space, kept = Space(), []

    class Slow(MemoryKV):
        def commit(self, txn, *, timeout_s):
            if not kept and any(isinstance(op, Put) and op.value == b"=mine" for op in txn.ops):
                kept.append(txn)
                other.set("k", "other's")
                raise StoreUnavailable("memory", timeout_s, "slow")
            return super().commit(txn, timeout_s=timeout_s)

    monkeypatch.setattr(run, "RETRY_S", 0.0)
    monkeypatch.setattr(torch_store, "connect", lambda *_, **__: Slow(space))
    store, other = opened("memory://", "s"), opened("memory://", "s")
    assert store.compare_set("k", "", "mine") == b"other's"
    assert other.delete_key("k")  # as it was when the attempt was made
    assert not MemoryKV(space).commit(kept[0], timeout_s=1).applied
    assert not other.check(["k"])


@pytest.mark.long
def test_without_etcd_calls_fail_after_the_timeout(etcd_server, opened):
    store = opened(f"etcd://{etcd_server.host}", "s", timeout=timedelta(seconds=1))
    store.set("k", "v")
    etcd_server.kill()
    for call in (functools.partial(store.set, "k", "v"), functools.partial(store.add, "n", 1)):
        with pytest.raises(dist.DistNetworkError, match="etcd"):
            call()
    with pytest.raises(dist.DistNetworkError, match="etcd"):
        EtcdStore(f"etcd://{etcd_server.host}", "s", timeout=SHORT)


@pytest.mark.long
def test_who_waits_survives_a_restart_of_etcd(etcd_server, opened):
    store = opened(f"etcd://{etcd_server.host}", "s", timeout=timedelta(seconds=30))
    store.set("before", "v")
    future = in_thread(lambda: store.get("k"))
    etcd_server.kill()
    setting = in_thread(lambda: store.set("k", "v"))
    etcd_server.start()
    setting.result(20)
    assert future.result(20) == b"v"
    assert store.get("before") == b"v"


@pytest.mark.long
def test_a_store_may_be_opened_before_etcd_runs(etcd_server, opened):
    etcd_server.kill()
    future = in_thread(lambda: opened(f"etcd://{etcd_server.host}", "s"))
    time.sleep(0.3)
    etcd_server.start()
    future.result(20).set("k", "v")


ROUNDS = 40


@pytest.mark.timeout(120)
@pytest.mark.long
def test_barriers_go_on_when_the_leader_is_killed_and_count_everybody_once(etcd_cluster, opened):
    name, hosts = unique(), etcd_cluster.hosts
    # Each begins with another member, so that one of them loses its connection as well.
    endpoints = [",".join(hosts[first:] + hosts[:first]) for first in range(len(hosts))]
    stores = [opened(f"etcd://{each}", name, timeout=timedelta(seconds=60)) for each in endpoints]

    killed = threading.Event()

    def arrive(store):
        """The sums that this rank saw, and when it was through each barrier."""
        sums, times_s = [], []
        for index in range(ROUNDS):
            if index == ROUNDS - 1:
                assert killed.wait(60)  # or all may be through before the leader is found
            sums.append(store.add("arrived", 1))
            if sums[-1] == len(hosts) * (index + 1):
                store.set(f"all/{index}", b"")
            store.wait([f"all/{index}"])
            times_s.append(time.monotonic())
        return sums, times_s

    with ThreadPoolExecutor(len(hosts)) as pool:
        ranks = [pool.submit(arrive, store) for store in stores]
        stores[0].wait([f"all/{ROUNDS // 4}"])
        killed_s = time.monotonic()
        etcd_cluster.kill(etcd_cluster.leader())
        killed.set()
        sums, times_s = zip(*(rank.result() for rank in ranks), strict=True)

    assert sorted(itertools.chain(*sums)) == list(range(1, len(hosts) * ROUNDS + 1))
    assert all(times[-1] > killed_s for times in times_s)
    pauses_s = [after - before for times in times_s for before, after in itertools.pairwise(times)]
    assert 0.2 < max(pauses_s) < 30  # nothing goes without a leader, and then it all does


# What is in etcd


def records(endpoint, name):
    kv = torch_store.connect(endpoint, timeout_s=5)
    view = kv.read(Read((under(f"{torch_keys.ROOT}/{name}/"),)), timeout_s=5)
    kv.close()
    return view.entries


def parts(endpoint, name):
    return sorted({key.split("/")[3] for key in records(endpoint, name)})


def test_large_values_leave_nothing_behind(etcd_endpoint, opened):
    name = unique()
    store = opened(etcd_endpoint, name)
    store.set("k", LARGE)
    assert len([key for key in records(etcd_endpoint, name) if "/blobs/" in key]) == 3
    store.set("k", LARGE)
    assert len([key for key in records(etcd_endpoint, name) if "/blobs/" in key]) == 3
    store.append("k", "x")
    store.compare_set("k", LARGE + b"x", LARGE)
    store.compare_set("k", "other", LARGE)
    store.multi_set(["k", "j"], [LARGE, LARGE])
    store.set("k", "small")
    store.delete_key("j")
    assert "blobs" not in parts(etcd_endpoint, name)


def test_what_was_put_for_an_attempt_that_lost_is_removed(monkeypatch, opened):
    space, lost = Space(), []

    class Overtaken(MemoryKV):
        def commit(self, txn, *, timeout_s):
            if not lost and any(isinstance(op, Put) and op.value[:1] == b"#" for op in txn.ops):
                lost.append(txn)
                other.set("k", "other's")
            return super().commit(txn, timeout_s=timeout_s)

    monkeypatch.setattr(torch_store, "connect", lambda *_, **__: Overtaken(space))
    store, other = opened("memory://", "s"), opened("memory://", "s")
    store.append("k", LARGE)
    assert store.get("k") == b"other's" + LARGE
    everything = MemoryKV(space).read(Read((under(f"{torch_keys.ROOT}/"),)), timeout_s=1)
    assert len([key for key in everything.entries if "/blobs/" in key]) == 3


def test_a_large_value_is_replaced_as_a_whole(etcd_endpoint, opened):
    name = unique()
    writer, reader = opened(etcd_endpoint, name), opened(etcd_endpoint, name)
    values = [bytes([letter]) * 2_200_000 for letter in b"abc"]
    writer.set("k", values[0])
    writing = in_thread(lambda: [writer.set("k", values[turn % 3]) for turn in range(12)])
    while not writing.done():
        assert reader.get("k") in values
    writing.result()


@pytest.mark.long
def test_keys_outlive_their_writer_while_another_client_is_there(etcd_endpoint, opened):
    name = unique()
    first, second = opened(etcd_endpoint, name, ttl_s=4), opened(etcd_endpoint, name, ttl_s=4)
    first.set("k", "v")
    first.close()
    time.sleep(6)
    assert second.get("k") == b"v"
    assert parts(etcd_endpoint, name) == ["keys", "lease"]  # no marks: they go with their client
    second.set("k", "w")
    assert second.get("k") == b"w"


@pytest.mark.long
def test_keys_vanish_with_the_last_client_unless_kept(etcd_endpoint, opened):
    name = unique()
    mortal = opened(etcd_endpoint, name, ttl_s=4)
    keeping = opened(etcd_endpoint, name, ttl_s=4, keep=True)
    mortal.set("gone", LARGE)
    keeping.set("kept", LARGE)
    keeping.add("counted", 3)
    mortal.close()
    keeping.close()
    until(lambda: "lease" not in parts(etcd_endpoint, name), 20, pause_s=0.1)
    assert parts(etcd_endpoint, name) == ["blobs", "keys"]
    later = opened(etcd_endpoint, name)
    assert later.list_keys() == ["counted", "kept"]
    assert later.get("kept") == LARGE
    assert later.add("counted", 1) == 4


def test_a_client_whose_lease_has_ended_says_so_and_writes_nothing(opened):
    endpoint = f"memory://{unique()}"
    store = opened(endpoint, "s")
    store.set("k", "v")
    space = memory.named(endpoint.removeprefix("memory://"))
    space.revoke(store._lease.id, timeout_s=1)
    successor = opened(endpoint, "s")
    successor.set("k", "new")
    started_s = time.monotonic()
    for call in (
        lambda: store.set("k", "w"),
        lambda: store.add("k", 1),
        lambda: store.delete_key("k"),
        lambda: store.set("k", LARGE),
        lambda: store.get("k"),
    ):
        with pytest.raises(dist.DistNetworkError, match="lease has ended"):
            call()
    assert time.monotonic() - started_s < 5  # at once, not when it is to be renewed again
    assert successor.get("k") == b"new"


@pytest.mark.long
def test_who_only_waits_learns_too_that_its_lease_has_ended(opened):
    endpoint = f"memory://{unique()}"
    store = opened(endpoint, "s", ttl_s=1)
    future = in_thread(lambda: store.get("k"))
    memory.named(endpoint.removeprefix("memory://")).revoke(store._lease.id, timeout_s=1)
    with pytest.raises(dist.DistNetworkError, match="lease has ended"):
        future.result(20)


def test_clients_that_open_at_once_share_one_lease(etcd_endpoint, opened):
    name = unique()
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: opened(etcd_endpoint, name), range(8)))
    assert len({store._lease.id for store in stores}) == 1


@pytest.mark.parametrize("request_", ["grant", "keep_alive"])
def test_a_store_that_is_away_for_a_moment_is_waited_for(monkeypatch, opened, request_):
    ask, tries = getattr(MemoryKV, request_), itertools.count()

    def flaky(kv, *args, **options):
        if next(tries) == 0:
            raise StoreUnavailable("memory://", 5.0, "no leader")
        return ask(kv, *args, **options)

    monkeypatch.setattr(MemoryKV, request_, flaky)
    store = opened(f"memory://{unique()}", "s")
    store.set("k", b"v")
    assert store.get("k") == b"v"
    assert next(tries) > 1


def test_a_lease_that_ends_before_it_is_used_is_granted_anew(monkeypatch, opened):
    space, granted = Space(), []

    class Late(MemoryKV):
        def grant(self, ttl_s, *, timeout_s):
            granted.append(super().grant(ttl_s, timeout_s=timeout_s))
            if len(granted) == 1:
                space.expire(granted[0][0])
            return granted[-1]

    monkeypatch.setattr(torch_store, "connect", lambda *_, **__: Late(space))
    store = in_thread(lambda: opened("memory://", "s")).result(20)
    assert store._lease.id == granted[1][0]


def test_who_comes_second_gives_its_own_lease_back(monkeypatch, opened):
    space, firsts = Space(), []

    class Overtaken(MemoryKV):
        def grant(self, ttl_s, *, timeout_s):
            granted = super().grant(ttl_s, timeout_s=timeout_s)
            if not firsts:
                firsts.append(None)
                firsts.append(opened("memory://", "s"))
            return granted

    monkeypatch.setattr(torch_store, "connect", lambda *_, **__: Overtaken(space))
    second = opened("memory://", "s")
    assert second._lease.id == firsts[1]._lease.id
    assert [*space._leases] == [second._lease.id]


def test_stores_of_other_prefixes_are_other_stores(opened, etcd_endpoint):
    name = unique()
    names = [name, f"{name}/", f"{name}/x", f"{name}!", f"{name}%2F"]
    stores = [opened(etcd_endpoint, name) for name in names]
    for index, store in enumerate(stores):
        store.set("k", str(index))
    assert [store.get("k") for store in stores] == [b"0", b"1", b"2", b"3", b"4"]
    assert [store.num_keys() for store in stores] == [1] * 5


# Life


def test_a_store_lives_although_nobody_names_it(etcd_endpoint):
    prefixed = dist.PrefixStore("p", EtcdStore(etcd_endpoint, unique()))
    prefixed.set("k", "v")
    assert prefixed.get("k") == b"v"
    (store,) = [s for s in torch_store._open_stores if s is prefixed.underlying_store]
    store.close()


def test_after_close_calls_fail_and_those_that_wait_end(opened):
    store = opened()
    future = in_thread(lambda: store.get("k"))
    time.sleep(0.2)
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        future.result(10)
    for call in (lambda: store.set("k", "v"), lambda: store.get("k"), store.num_keys):
        with pytest.raises(ClosedError):
            call()
    assert store not in torch_store._open_stores


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused(opened):
    store = opened()
    store.set("k", "v")
    child = os.fork()
    if child == 0:
        refusals = 0
        for call in (
            lambda: store.set("k", "w"),
            lambda: store.get("k"),
            lambda: store.add("n", 1),
        ):
            try:
                call()
            except ClosedError:
                refusals += 1
        store.close()
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert store.get("k") == b"v"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("etcd://", "s"), {}),
        (("tcp://h:1", "s"), {}),
        (("memory://", ""), {}),
        (("memory://", "s"), {"ttl_s": 0}),
    ],
)
def test_what_cannot_be_opened_is_refused(arguments, options):
    with pytest.raises(UsageError):
        EtcdStore(*arguments, **options)


def test_a_value_that_is_no_number_is_not_added_to(opened):
    store = opened()
    for text in ("abc", "", "-", "99999999999999999999", "9" * 5000):
        store.set("n", text)
        with pytest.raises(dist.DistStoreError, match="number"):
            store.add("n", 1)
        assert store.get("n") == text.encode()


def test_a_negative_timeout_is_none_and_zero_is_now(opened):
    store = opened()
    store.set_timeout(timedelta(0))
    with pytest.raises(dist.DistStoreError, match="wait timeout after 0ms, keys: no"):
        store.get("no")
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.set_timeout(timedelta(seconds=-1))
    future = in_thread(lambda: store.get("later"))
    store.set("later", "v")
    assert future.result(10) == b"v"


def test_naming_the_package_does_not_import_torch():
    """Seen where it would be imported, which is not waited for."""
    code = (
        "import sys, torch_ros.store; assert 'torch' not in sys.modules;"
        "sys.modules['torch'] = None\n"
        "try: from torch_ros.store import EtcdStore\n"
        "except ImportError as error: assert 'torch' in str(error)\n"
        "else: raise AssertionError('without torch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def count(kind, where, name, index):
    """What each of two processes does."""
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", int(where), timeout=LONG, wait_for_workers=False)
    else:
        store = EtcdStore(where, name, timeout=LONG)
    store.barrier("start", 2)
    sums = [store.add("n", 1) for _ in range(50)]
    store.set(f"sums/{index}", ",".join(map(str, sums)))
    store.barrier("end", 2)


@pytest.mark.parametrize("kind", [pytest.param("tcp", marks=pytest.mark.long), "etcd"])
def test_processes_add_without_loss(kind, etcd_endpoint, started):
    clients = Clients(kind, etcd_endpoint)
    where = str(clients.first.port) if kind == "tcp" else etcd_endpoint
    for index in range(2):
        started.start(CHILD, __file__, kind, where, clients.name, index)
    found = clients().multi_get(["sums/0", "sums/1"])
    for child in started.started:
        child.finish(20)
    sums = sorted(int(text) for sums in found for text in sums.split(b","))
    assert sums == list(range(1, 101))
    clients.close()


CHILD = """
import os, runpy, sys
_, path, *arguments, index = sys.argv
sys.path.append(os.path.dirname(os.path.dirname(path)))  # as pytest has it
runpy.run_path(path)["count"](*arguments, int(index))
"""


def test_who_loses_very_many_races_goes_on():
    once._back_off(5000, Deadline("add", 5.0))


def test_a_password_in_the_url_of_a_job_is_not_repeated():
    for url in ("etcd://user:secret@host:1/job?x=1", "etcd://host:1/job?password=secret"):
        with pytest.raises(ValueError, match="is no option") as caught:
            next(rendezvous.open_store(url))
        assert "secret" not in str(caught.value)
