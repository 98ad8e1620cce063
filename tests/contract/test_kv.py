"""What every KV must do. It runs against the fake too, or the fake is only a guess."""

import itertools
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from kit import until

from torch_ros.errors import ClosedError, UsageError
from torch_ros.memory.store import MemoryKV
from torch_ros.store import txn
from torch_ros.store.etcd import EtcdKV

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 10.0


class Store:
    """A KV and a prefix of this test's own, with the timeouts filled in."""

    def __init__(self, kv):
        self.kv, self.prefix = kv, f"test-{uuid.uuid4().hex}/"

    def key(self, name):
        return self.prefix + name

    def read(self, *ranges):
        return self.kv.read(txn.Read(ranges or (txn.under(self.prefix),)), timeout_s=TIMEOUT_S)

    def names(self, *ranges):
        view = self.read(*ranges)
        return [key.removeprefix(self.prefix) for key, _ in view.seen(txn.under(self.prefix))]

    def commit(self, *ops, guards=()):
        reply = self.kv.commit(txn.Txn(tuple(guards), tuple(ops)), timeout_s=TIMEOUT_S)
        assert reply != txn.UNKNOWN
        return reply

    def put(self, name, value=b"", lease_id=0):
        return self.commit(txn.Put(self.key(name), value, lease_id)).rev

    def delete(self, name):
        return self.commit(txn.Delete(txn.one(self.key(name)))).rev

    def wait(self, after_rev, *ranges, timeout_s=TIMEOUT_S):
        watch = txn.Watch(ranges or (txn.under(self.prefix),), after_rev, "a test waits")
        return self.kv.wait(watch, timeout_s=timeout_s)

    def grant(self, ttl_s=60):
        return self.kv.grant(ttl_s, timeout_s=TIMEOUT_S)[0]

    def revoke(self, lease_id):
        self.kv.revoke(lease_id, timeout_s=TIMEOUT_S)


CLUSTER = pytest.param("cluster", marks=pytest.mark.long)


@pytest.fixture(params=["memory", "etcd", CLUSTER])
def store(request):
    match request.param:
        case "memory":
            kv = MemoryKV()
        case "etcd":
            endpoint = request.getfixturevalue("etcd_endpoint")
            kv = EtcdKV([endpoint.removeprefix("etcd://")])
        case "cluster":
            kv = EtcdKV(request.getfixturevalue("shared_etcd_cluster").hosts)
    yield Store(kv)
    kv.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(32) as pool:
        yield pool


# Reading


def test_reading_nothing_tells_the_revision(store):
    rev = store.put("a")
    view = store.kv.read(txn.Read(()), timeout_s=TIMEOUT_S)
    assert view.rev >= rev
    assert not view.entries


def samples(store, **samples):
    """Four records, the oldest written again; then samples of them, by name."""
    revs = {name: store.put(f"p/{name}") for name in "dbca"}
    store.put("p/d")
    range_ = txn.under(store.key("p/"))
    sample = txn.Sample(range_, **{k: revs[v] if k == "before" else v for k, v in samples.items()})
    view = store.read(sample)
    return view, range_, "".join(key[-1] for key, _ in view.seen(range_))


def test_a_part_is_the_records_created_last(store):
    view, range_, names = samples(store, most=2)
    assert names == "ac"
    assert not view.shows(range_)


def test_a_part_may_be_the_records_created_first(store):
    _, _, names = samples(store, most=2, is_oldest=True)
    assert names == "bd"  # written again or not


def test_a_part_may_be_of_those_created_before_a_revision(store):
    view, range_, names = samples(store, most=2, before="a")
    assert names == "bc"
    assert not view.shows(range_)


def test_a_part_that_leaves_out_by_revision_only_is_no_whole(store):
    view, range_, names = samples(store, most=9, before="a")
    assert names == "bcd"
    assert not view.shows(range_)


def test_a_part_that_is_all_is_whole(store):
    view, range_, names = samples(store, most=4)
    assert names == "abcd"
    assert view.shows(range_)
    assert view.get(store.key("p/e")) is None


def test_what_a_part_leaves_out_is_not_taken_for_absent(store):
    view, range_, _ = samples(store, most=2)
    assert view.get(store.key("p/a"))
    for look in (
        lambda: view.get(store.key("p/b")),
        lambda: view.unchanged(store.key("p/b")),
        lambda: view.within(range_),
        lambda: view.within(txn.under(store.prefix)),
        lambda: view.get(store.key("elsewhere")),
    ):
        with pytest.raises(txn.Unseen):
            look()


def test_a_record_that_is_read_besides_a_part_is_known(store):
    range_ = txn.under(store.key("p/"))
    for name in "abc":
        store.put(f"p/{name}")
    view = store.read(txn.Sample(range_, 1), txn.one(store.key("p/a")), txn.one(store.key("p/0")))
    assert [key[-1] for key, _ in view.seen(range_)] == ["a", "c"]
    assert view.get(store.key("p/0")) is None


def test_a_transaction_that_fails_shows_what_is_there(store):
    range_, sample = txn.under(store.prefix), txn.Sample(txn.under(store.prefix), 1)
    for name in "ab":
        store.put(name, name.encode())
    failing = (txn.Unchanged(store.key("a"), 1),)

    def fail(otherwise, ops=()):
        return store.kv.commit(txn.Txn(failing, ops, otherwise), timeout_s=TIMEOUT_S)

    for ops in ((), (txn.Put(store.key("c"), b""), txn.Get(range_))):
        lost = fail((range_,), ops)
        assert not lost.applied
        assert [entry.value for _, entry in lost.view.within(range_)] == [b"a", b"b"]
        assert lost.view.rev == lost.rev
        lost = fail((sample, txn.one(store.key("a"))), ops)
        assert len(lost.view.entries) == 2
        assert not lost.view.shows(range_)
    assert store.kv.commit(txn.Txn((), (), (range_,)), timeout_s=TIMEOUT_S).view is None


# Guards


def test_unchanged_holds_until_the_key_is_written(store):
    key = store.key("a")
    rev = store.put("a")
    assert store.commit(guards=[txn.Unchanged(key, rev)]).applied
    store.put("a")
    assert not store.commit(guards=[txn.Unchanged(key, rev)]).applied


def test_unchanged_at_zero_means_absent(store):
    key = store.key("a")
    assert store.commit(guards=[txn.Unchanged(key, 0)]).applied
    store.put("a")
    assert not store.commit(guards=[txn.Unchanged(key, 0)]).applied
    store.delete("a")
    assert store.commit(guards=[txn.Unchanged(key, 0)]).applied


def test_a_view_gives_the_guard_for_what_it_saw(store):
    before = store.read()
    assert before.unchanged(store.key("a")) == txn.Unchanged(store.key("a"), 0)
    rev = store.put("a")
    assert store.read().unchanged(store.key("a")) == txn.Unchanged(store.key("a"), rev)


def test_created_holds_through_writes_and_fails_for_a_successor(store):
    key = store.key("a")
    rev = store.put("a", b"1")
    store.put("a", b"2")
    assert store.commit(guards=[txn.Created(key, rev)]).applied
    store.delete("a")
    assert not store.commit(guards=[txn.Created(key, rev)]).applied
    store.put("a", b"3")
    assert not store.commit(guards=[txn.Created(key, rev)]).applied


def test_empty_holds_for_a_range_without_keys(store):
    empty = txn.Empty(txn.under(store.key("dir/")))
    store.put("dir")
    store.put("dir0")
    assert store.commit(guards=[empty]).applied
    store.put("dir/a")
    assert not store.commit(guards=[empty]).applied
    store.delete("dir/a")
    assert store.commit(guards=[empty]).applied


def test_none_newer_compares_every_key_and_ignores_deletions(store):
    directory = txn.under(store.key("dir/"))
    assert store.commit(guards=[txn.NoneNewer(directory, 0)]).applied
    store.put("dir/a")
    rev = store.put("dir/b")
    assert store.commit(guards=[txn.NoneNewer(directory, rev)]).applied
    assert not store.commit(guards=[txn.NoneNewer(directory, rev - 1)]).applied
    store.put("dir/a")
    assert not store.commit(guards=[txn.NoneNewer(directory, rev)]).applied
    store.delete("dir/a")
    assert store.commit(guards=[txn.NoneNewer(directory, rev)]).applied


def test_one_guard_that_fails_stops_all_operations(store):
    rev = store.put("a", b"1")
    reply = store.commit(
        txn.Put(store.key("a"), b"2"),
        txn.Delete(txn.one(store.key("a") + "x")),
        txn.Get(txn.under(store.prefix)),
        guards=[txn.Unchanged(store.key("a"), rev), txn.Unchanged(store.key("b"), 99)],
    )
    assert (reply.applied, reply.results) == (False, ())
    assert store.read().entries == {store.key("a"): txn.Entry(b"1", rev, rev, 0)}


# Operations


def test_a_write_keeps_the_revision_of_creation(store):
    created = store.put("a", b"1")
    written = store.put("a", b"2")
    assert written > created
    assert store.read().entries == {store.key("a"): txn.Entry(b"2", created, written, 0)}


def test_all_operations_of_a_transaction_have_one_revision(store):
    rev = store.commit(txn.Put(store.key("a"), b""), txn.Put(store.key("b"), b"")).rev
    assert {(e.create_rev, e.mod_rev) for e in store.read().entries.values()} == {(rev, rev)}


def test_get_and_count_see_the_operations_before_them(store):
    store.put("old", b"o")
    everything = txn.under(store.prefix)
    reply = store.commit(
        txn.Count(everything),
        txn.Put(store.key("new"), b"n"),
        txn.Count(everything),
        txn.Get(everything),
        txn.Delete(txn.one(store.key("old"))),
        txn.Get(everything, keys_only=True),
        txn.Count(everything),
    )
    before, after_put, both, only_new, after_delete = reply.results
    assert (before, after_put, after_delete) == (1, 2, 1)
    assert {key: entry.value for key, entry in both.items()} == {
        store.key("new"): b"n",
        store.key("old"): b"o",
    }
    assert only_new == {store.key("new"): txn.Entry(b"", reply.rev, reply.rev, 0)}


def test_delete_takes_the_range_and_nothing_else(store):
    for name in ["a", "dir", "dir/", "dir/a", "dir/é", "dir0", "e"]:
        store.put(name)
    store.commit(txn.Delete(txn.under(store.key("dir/"))))
    assert store.names() == ["a", "dir", "dir0", "e"]


def test_a_key_that_comes_back_is_a_new_record(store):
    first = store.put("a")
    store.delete("a")
    second = store.put("a")
    assert store.read().entries[store.key("a")].create_rev == second > first


def test_a_transaction_that_changes_nothing_keeps_the_revision(store):
    rev = store.put("a")
    assert (
        store.commit(txn.Delete(txn.one(store.key("b"))), txn.Get(txn.under(store.prefix))).rev
        == rev
    )
    assert (
        store.commit(txn.Put(store.key("a"), b""), guards=[txn.Unchanged(store.key("a"), 0)]).rev
        == rev
    )
    assert store.commit().rev == rev
    assert store.read().rev == rev


def test_read_has_several_ranges_at_one_revision(store, threads):
    """Two keys move together in one transaction: no read sees them apart."""
    is_done = threading.Event()

    def write():
        for count in itertools.count():
            if is_done.is_set():
                break
            value = b"%d" % count
            store.commit(txn.Put(store.key("a/x"), value), txn.Put(store.key("b/x"), value))

    store.commit(txn.Put(store.key("a/x"), b""), txn.Put(store.key("b/x"), b""))
    writes = threads.submit(write)
    seen = set()
    while len(seen) < 20:
        view = store.read(txn.under(store.key("a/")), txn.one(store.key("b/x")))
        a, b = view.entries[store.key("a/x")], view.entries[store.key("b/x")]
        assert a.value == b.value
        assert a.mod_rev == b.mod_rev <= view.rev
        seen.add(a.value)
    is_done.set()
    writes.result()


HOSTILE = ["", " ", "%", "a\nb", "\t", "\x01", "~", "..", "ü", "日本", "\uffff", "😀", "z" * 1000]


def test_names_come_back_as_they_were_in_byte_order(store):
    for name in HOSTILE:
        store.put("/" + name, name.encode())
    found = store.read().entries
    assert {key: entry.value.decode() for key, entry in found.items()} == {
        store.key("/" + name): name for name in HOSTILE
    }
    by_bytes = sorted(("/" + name for name in HOSTILE), key=str.encode)
    assert store.names() == by_bytes
    for index, name in enumerate(by_bytes):
        assert store.names(txn.Range(store.key("/"), store.key(name))) == by_bytes[:index]


def test_a_mebibyte_fits_and_two_do_not(store):
    value = bytes(range(256)) * 4096
    store.put("a", value)
    assert store.read().entries[store.key("a")].value == value
    with pytest.raises(UsageError, match=r"a transaction|too large"):
        store.put("a", value[:-100_000] * 2)


def test_what_etcd_refuses_is_a_usage_error(store):
    put = txn.Put(store.key("a"), b"")
    for ops in [
        (put, put),
        (put, txn.Delete(txn.under(store.prefix))),
        (put,) + (txn.Count(txn.one("x")),) * 128,
    ]:
        with pytest.raises(UsageError):
            store.commit(*ops)
    assert store.names() == []


def test_compare_and_swap_from_many_threads_loses_nothing(store, threads):
    key = store.key("counter")
    store.put("counter", b"0")
    barrier = threading.Barrier(8)

    def increment():
        barrier.wait()
        done = 0
        while done < 20:
            view = store.read()
            value = b"%d" % (int(view.entries[key].value) + 1)
            done += store.commit(txn.Put(key, value), guards=[view.unchanged(key)]).applied

    for future in [threads.submit(increment) for _ in range(8)]:
        future.result()
    assert store.read().entries[key].value == b"160"


# Leases


def test_keys_vanish_with_their_lease_at_one_revision(store):
    lease_id, other = store.grant(), store.grant()
    for name in "ab":
        store.put(name, b"", lease_id)
    store.put("c", b"", other)
    rev = store.put("d")
    assert store.read().entries[store.key("a")].lease_id == lease_id
    store.revoke(lease_id)
    assert store.names() == ["c", "d"]
    assert store.read().rev == rev + 1


def test_a_lease_that_nobody_renews_ends_and_wakes_who_waits(store):
    started = time.monotonic()
    lease_id, granted_s = store.kv.grant(1, timeout_s=TIMEOUT_S)
    rev = store.put("a", b"", lease_id)
    assert store.wait(rev, timeout_s=20)
    assert granted_s - 0.2 < time.monotonic() - started < granted_s + 10
    assert store.names() == []
    assert store.kv.keep_alive(lease_id, timeout_s=TIMEOUT_S) == 0


@pytest.mark.long
def test_keep_alive_keeps_a_lease(store):
    lease_id, granted_s = store.kv.grant(4, timeout_s=TIMEOUT_S)  # outlasts a pause of the machine
    rev = store.put("a", b"", lease_id)
    ends = time.monotonic() + granted_s + 1
    while time.monotonic() < ends:
        assert store.kv.keep_alive(lease_id, timeout_s=TIMEOUT_S) == granted_s
        assert not store.wait(rev, timeout_s=0.3)
    assert store.names() == ["a"]


def test_keep_alive_of_a_lease_that_ended_is_zero(store):
    lease_id = store.grant()
    assert store.kv.keep_alive(lease_id, timeout_s=TIMEOUT_S) == 60
    store.revoke(lease_id)
    assert store.kv.keep_alive(lease_id, timeout_s=TIMEOUT_S) == 0


def test_revoking_twice_changes_nothing(store):
    lease_id = store.grant()
    store.put("a", b"", lease_id)
    store.revoke(lease_id)
    rev = store.put("b")
    store.revoke(lease_id)
    assert store.read().rev == rev


def test_a_put_under_a_lease_that_ended_is_not_applied(store):
    lease_id = store.grant()
    store.revoke(lease_id)
    rev = store.put("a", b"1")
    reply = store.commit(txn.Put(store.key("b"), b""), txn.Put(store.key("a"), b"2", lease_id))
    assert (reply.applied, reply.rev, reply.results) == (False, rev, ())
    assert store.read().entries == {store.key("a"): txn.Entry(b"1", rev, rev, 0)}


def test_a_put_without_lease_outlives_the_lease(store):
    lease_id, other = store.grant(), store.grant()
    for name in "ab":
        store.put(name, b"", lease_id)
    store.put("a")
    store.put("b", b"", other)
    store.revoke(lease_id)
    assert store.names() == ["a", "b"]
    store.revoke(other)
    assert store.names() == ["a"]


# Waiting


def test_wait_returns_at_once_for_a_change_in_the_past(store):
    rev = store.read().rev
    store.put("a")
    store.put("b")
    assert store.wait(rev)
    assert store.wait(rev + 1)
    assert not store.wait(rev + 2, timeout_s=0.2)


@pytest.mark.parametrize("change", ["put", "delete", "revoke"])
def test_wait_wakes_for_a_change(store, threads, change):
    lease_id = store.grant()
    rev = store.put("a", b"", lease_id)
    waiting = threads.submit(store.wait, rev)
    assert not store.wait(rev, timeout_s=0.2)
    match change:
        case "put":
            store.put("a")
        case "delete":
            store.delete("a")
        case "revoke":
            store.revoke(lease_id)
    assert waiting.result(timeout=5)


def test_wait_sees_a_deletion_in_the_past(store):
    rev = store.put("a")
    store.delete("a")
    assert store.wait(rev)


def test_follow_tells_all_that_changed_in_its_ranges_as_of_one_revision(store, threads):
    ranges = (txn.under(store.key("a/")), txn.under(store.key("c/")))
    store.put("a/gone")
    view = store.read(*ranges)

    def follow(rev, timeout_s=5.0):
        return store.kv.follow(txn.Follow(ranges, rev, ""), timeout_s=timeout_s)

    nothing = follow(view.rev, timeout_s=0.2)
    assert (nothing.rev, nothing.entries) == (view.rev, {})
    following = threads.submit(follow, view.rev)
    store.put("b/between")
    store.delete("a/gone")
    view = view.after(following.result(timeout=5))
    while view.entries:  # it may have been told in pieces
        view = view.after(follow(view.rev))
    last = [store.put(name) for name in ["a/x", "b/y", "c/z", "a/x"]][-1]
    while view.rev < last:
        view = view.after(follow(view.rev))
    assert view.entries == store.read(*ranges).entries
    assert view.entries.keys() == {store.key("a/x"), store.key("c/z")}


def test_follow_cannot_tell_what_a_wiped_store_has_lost(store):
    ranges = (txn.under(store.key("a/")), txn.under(store.key("c/")))
    ahead = store.put("a/x") + 1000
    assert store.kv.follow(txn.Follow(ranges, ahead, ""), timeout_s=5) is None


@pytest.mark.parametrize("name", ["a/x", "b", "c/y"])
def test_wait_wakes_for_any_of_its_ranges(store, threads, name):
    ranges = (txn.under(store.key("a/")), txn.one(store.key("b")), txn.under(store.key("c/")))
    rev = store.read().rev
    waiting = threads.submit(store.wait, rev, *ranges)
    for other in ["a", "a0", "b/", "bb", "c"]:
        store.put(other)
    assert not store.wait(rev, *ranges, timeout_s=0.2)
    assert not waiting.done()
    store.put(name)
    assert waiting.result(timeout=5)


def test_wait_gives_up_in_time(store):
    rev = store.put("a")
    started = time.monotonic()
    assert not store.wait(rev, timeout_s=0.3)
    assert 0.2 < time.monotonic() - started < 10
    assert not store.wait(rev, timeout_s=0)


def test_wait_returns_for_a_revision_that_the_store_has_not_reached(store):
    """The store was wiped: what happens next has lower numbers."""
    assert store.wait(store.read().rev + 1000, timeout_s=5)


def test_everyone_who_waits_wakes(store, threads):
    rev = store.read().rev
    waiting = [threads.submit(store.wait, rev, timeout_s=30) for _ in range(32)]
    assert not store.wait(rev, timeout_s=0.2)
    store.put("a")
    assert all(future.result(timeout=10) for future in waiting)


def test_waiting_leaves_no_threads(store):
    rev = store.put("a")
    store.wait(rev, timeout_s=0.01)
    before = threading.active_count()
    for _ in range(20):
        store.wait(rev, timeout_s=0.01)
        store.wait(rev - 1)
    until(lambda: threading.active_count() <= before, 5)


# Closing


def test_use_after_close_is_an_error(store):
    lease_id = store.grant()
    store.kv.close()
    store.kv.close()
    for use in [
        store.read,
        store.commit,
        store.grant,
        lambda: store.wait(0),
        lambda: store.revoke(lease_id),
        lambda: store.kv.keep_alive(lease_id, timeout_s=1),
    ]:
        with pytest.raises(ClosedError):
            use()


def test_close_ends_a_wait(store, threads):
    rev = store.put("a")
    waiting = threads.submit(store.wait, rev)
    assert not store.wait(rev, timeout_s=0.2)
    store.kv.close()
    with pytest.raises(ClosedError):
        waiting.result(timeout=5)
