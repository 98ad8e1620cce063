"""A lease and who keeps it, on a clock that we set and on a real etcd."""

import itertools
import logging
import os
import queue
import statistics
import threading
import time

import pytest

from torch_ros.errors import ClosedError, StoreUnavailable
from torch_ros.memory.store import MemoryKV, Space
from torch_ros.store.etcd import EtcdKV
from torch_ros.store.session import Session, boot_time
from torch_ros.store.txn import Put, Read, Txn, under

pytestmark = pytest.mark.timeout(60)

EVERYTHING = under("t/")


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Etcd(MemoryKV):
    """One that can be away, and slow."""

    def __init__(self, clock):
        super().__init__(Space(clock))
        self.clock, self.is_away, self.slow_s = clock, False, 0.0
        self.asked = queue.Queue()  # the time of every keep-alive

    def _answer(self, timeout_s):
        if self.is_away:
            raise StoreUnavailable("memory", timeout_s, "it is away")

    def grant(self, ttl_s, *, timeout_s):
        self._answer(timeout_s)
        return super().grant(ttl_s, timeout_s=timeout_s)

    def keep_alive(self, lease_id, *, timeout_s):
        self.asked.put(self.clock())
        self._answer(timeout_s)
        granted_s = super().keep_alive(lease_id, timeout_s=timeout_s)
        self.clock.now_s += self.slow_s
        return granted_s

    def revoke(self, lease_id, *, timeout_s):
        self._answer(timeout_s)
        super().revoke(lease_id, timeout_s=timeout_s)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def etcd(clock):
    return Etcd(clock)


@pytest.fixture
def open_session(etcd, clock):
    """Makes sessions with a TTL of 1 s; `lost` is the queue of what they were told."""
    sessions = []

    def open_session(kv=etcd, ttl_s=1, clock=clock, on_lost=None):
        lost = queue.Queue()
        session = Session(kv, ttl_s=ttl_s, on_lost=on_lost or lost.put, name="r", clock=clock)
        session.lost = lost
        sessions.append(session)
        return session

    yield open_session
    for session in sessions:
        session.close()


def is_over(session):
    session._thread.join(5)
    return not session._thread.is_alive() and not session.is_valid()


def names(kv):
    return list(kv.read(Read((EVERYTHING,)), timeout_s=5).entries)


def hold(kv, session):
    put = Put("t/key", b"", session.lease_id)
    assert kv.commit(Txn(ops=(put,)), timeout_s=5).applied


def test_it_is_valid_until_the_deadline(open_session, clock):
    session = open_session(ttl_s=60)
    assert session.deadline == 1060
    clock.now_s = 1059
    assert session.is_valid()
    clock.now_s = 1060
    assert not session.is_valid()


def test_the_deadline_counts_from_when_a_keep_alive_was_sent(open_session, etcd, clock):
    etcd.slow_s = 0.25
    session = open_session()
    sent_s = etcd.asked.get(timeout=5)
    etcd.asked.get(timeout=5)
    assert sent_s == 1000
    assert session.deadline in (sent_s + 1, sent_s + 1.25)


@pytest.mark.long
def test_it_renews_three_times_within_the_ttl(open_session, etcd):
    open_session()
    times_s = []
    for _ in range(8):
        etcd.asked.get(timeout=10)
        times_s.append(time.monotonic())
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert 0.25 < statistics.median(gaps_s) < 0.6


def test_a_lease_that_ended_is_lost_once(open_session, etcd):
    session = open_session()
    assert session.is_valid()
    etcd.revoke(session.lease_id, timeout_s=1)
    assert session.lost.get(timeout=5) == "its lease has ended"
    assert is_over(session)
    session.close()
    assert session.lost.empty()


def test_an_outage_is_survived_until_the_deadline(open_session, etcd, clock, caplog):
    caplog.set_level(logging.INFO)
    session = open_session(ttl_s=2)
    etcd.is_away = True
    for _ in range(3):
        etcd.asked.get(timeout=5)
    assert session.is_valid()
    clock.now_s = 1001.5
    etcd.is_away = False
    etcd.asked.get(timeout=5)
    etcd.asked.get(timeout=5)
    assert session.deadline == 1003.5
    assert session.lost.empty()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", caplog.records[0].getMessage()),
        ("INFO", "r: etcd answers again; its lease is renewed"),
    ]
    assert "it is away" in caplog.records[0].getMessage()


def test_an_outage_past_the_deadline_is_a_loss(open_session, etcd, clock, caplog):
    session = open_session()
    etcd.is_away = True
    etcd.asked.get(timeout=5)
    etcd.asked.get(timeout=5)
    assert session.lost.empty()
    clock.now_s = session.deadline
    assert session.lost.get(timeout=5) == "its lease was not renewed in time (it is away)"
    assert is_over(session)
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_a_session_that_slept_past_its_deadline_does_not_ask(open_session, etcd, clock):
    session = open_session()
    clock.now_s = session.deadline + 100
    assert session.lost.get(timeout=5) == "its lease was not renewed in time (it was suspended)"
    assert etcd.asked.empty()
    assert is_over(session)


def test_what_is_not_an_outage_is_a_loss(open_session, etcd):
    session = open_session()
    etcd.close()
    assert "ClosedError" in session.lost.get(timeout=5)
    assert is_over(session)


def test_close_ends_the_lease_and_the_thread(open_session, etcd):
    session = open_session()
    hold(etcd, session)
    session.close()
    assert names(etcd) == []
    assert is_over(session)
    session.close()
    assert session.lost.empty()


def test_close_does_not_wait_for_an_etcd_that_is_away(open_session, etcd):
    session = open_session(ttl_s=60)
    etcd.is_away = True
    started = time.monotonic()
    session.close()
    assert time.monotonic() - started < 10
    assert is_over(session)
    assert session.lost.empty()


def test_on_lost_may_close(open_session, etcd):
    told = queue.Queue()

    def on_lost(reason):
        session.close()
        told.put(reason)

    session = open_session(on_lost=on_lost)
    etcd.revoke(session.lease_id, timeout_s=1)
    told.get(timeout=5)
    assert is_over(session)


def test_without_a_lease_there_is_no_session(open_session, etcd):
    etcd.is_away = True
    before = threading.active_count()
    with pytest.raises(StoreUnavailable):
        open_session()
    assert threading.active_count() <= before


def test_a_child_of_fork_has_no_session_and_cannot_end_it(open_session, etcd):
    session = open_session(ttl_s=60)
    hold(etcd, session)
    child = os.fork()
    if child == 0:
        was_valid = session.is_valid()
        # It would need the lock of the parent's store, so a revoke would show as an error.
        etcd.is_away = True
        session.close()
        os._exit(was_valid or session._closing.is_set())
    assert os.waitpid(child, 0)[1] == 0
    assert session.is_valid()
    assert names(etcd) == ["t/key"]


def test_the_clock_goes_on_while_the_host_sleeps():
    with open("/proc/uptime") as uptime:  # noqa: PTH123
        assert abs(boot_time() - float(uptime.read().split()[0])) < 1


# On a real etcd


@pytest.fixture
def kv(etcd_server):
    kv = EtcdKV([etcd_server.host])
    yield kv
    kv.close()


@pytest.mark.long
def test_a_real_lease_lives_as_long_as_its_session(kv, open_session):
    session = open_session(kv, ttl_s=5, clock=boot_time)
    hold(kv, session)
    session.lost.join()
    with pytest.raises(queue.Empty):
        session.lost.get(timeout=7)
    assert session.is_valid()
    assert names(kv) == ["t/key"]
    session.close()
    assert names(kv) == []


@pytest.mark.long
def test_a_restart_of_etcd_is_survived(kv, etcd_server, open_session):
    session = open_session(kv, ttl_s=5, clock=boot_time)
    hold(kv, session)
    etcd_server.kill()
    etcd_server.start()
    with pytest.raises(queue.Empty):
        session.lost.get(timeout=6)
    assert session.is_valid()
    assert names(kv) == ["t/key"]


@pytest.mark.long
def test_an_etcd_that_stays_away_is_noticed_by_the_deadline(kv, etcd_server, open_session):
    session = open_session(kv, ttl_s=4, clock=boot_time)
    etcd_server.kill()
    assert "connection refused" in session.lost.get(timeout=30)
    assert boot_time() >= session.deadline
    assert boot_time() - session.deadline < 10


def test_closing_the_store_first_is_quiet(kv, open_session):
    session = open_session(kv, ttl_s=60, clock=boot_time)
    kv.close()
    session.close()
    assert is_over(session)
    assert session.lost.empty()
    with pytest.raises(ClosedError):
        kv.read(Read((EVERYTHING,)), timeout_s=1)


def test_a_session_that_gets_no_thread_leaves_no_lease(monkeypatch):
    kv = MemoryKV()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    revoked = []
    monkeypatch.setattr(kv, "revoke", lambda lease_id, timeout_s: revoked.append(lease_id))
    with pytest.raises(RuntimeError, match="new thread"):
        Session(kv, ttl_s=5, on_lost=revoked.append, name="r")
    assert len(revoked) == 1
