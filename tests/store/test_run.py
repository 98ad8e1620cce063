"""The loop and what drives it: lost replies, races, outages, deadlines."""

import time

import pytest

from torch_ros.deadline import Deadline
from torch_ros.errors import ClosedError, Contention, DeadlineExceeded, StoreUnavailable
from torch_ros.memory import store as memory
from torch_ros.protocol.records import VersionRecord
from torch_ros.store.loops import ATTEMPTS_MAX, Act, Done, Wait, settle
from torch_ros.store.run import run
from torch_ros.store.txn import Put, Txn, one

KEY = (one("k"),)


class Interposed:
    """A KV in memory with something in the way."""

    def __init__(self, *, lose_reply=0, away=0, interfere=0):
        self.kv = memory.MemoryKV()
        self.endpoint = self.kv.endpoint
        self._lose_reply, self._away, self._interfere = lose_reply, away, interfere
        self.commits = 0

    def read(self, request, *, timeout_s):
        if self._away > 0:
            self._away -= 1
            raise StoreUnavailable("there", timeout_s, "away")
        return self.kv.read(request, timeout_s=timeout_s)

    def commit(self, txn, *, timeout_s):
        if self._interfere > 0:
            self._interfere -= 1
            self.kv.commit(Txn(ops=(Put("k", b"theirs"),)), timeout_s=1)
        reply = self.kv.commit(txn, timeout_s=timeout_s)
        self.commits += reply.applied
        if reply.applied and self._lose_reply > 0:
            self._lose_reply -= 1
            raise StoreUnavailable("there", timeout_s, "lost")
        return reply

    def wait(self, watch, *, timeout_s):
        return self.kv.wait(watch, timeout_s=timeout_s)


def write_once(view):
    if view.entries.get("k") and view.entries["k"].value == b"mine":
        return Done("found")
    return Act(Txn((view.unchanged("k"),), (Put("k", b"mine"),)), lambda _: "written")


def test_a_lost_reply_is_not_repeated_but_looked_into():
    kv = Interposed(lose_reply=1)
    assert run(settle("w", KEY, write_once), kv, Deadline("w", 5)) == "found"
    assert kv.commits == 1


def test_an_outage_shorter_than_the_deadline_is_waited_for(caplog):
    kv = Interposed(away=3)
    assert run(settle("w", KEY, write_once), kv, Deadline("w", 5)) == "written"
    assert caplog.text.count("trying again") == 1


def test_an_outage_longer_than_the_deadline_is_an_error():
    with pytest.raises(StoreUnavailable):
        run(settle("w", KEY, write_once), Interposed(away=10**6), Deadline("w", 0.5))


def test_races_are_lost_and_won_again():
    kv = Interposed(interfere=5)
    assert run(settle("w", KEY, write_once), kv, Deadline("w", 5)) == "written"


def test_nobody_races_for_ever():
    kv = Interposed(interfere=10**6)
    with pytest.raises(Contention, match=str(ATTEMPTS_MAX)):
        run(settle("w", KEY, write_once), kv, Deadline("w", 5))


def test_a_lease_that_has_ended_is_no_race():
    kv, tries = memory.MemoryKV(), []
    lease_id, _ = kv.grant(60, timeout_s=5)
    kv.revoke(lease_id, timeout_s=5)

    def put(view):
        tries.append(view.rev)
        return Act(Txn(ops=(Put("k", b"", lease_id),)), None)

    with pytest.raises(DeadlineExceeded, match="a lease that has ended"):
        run(settle("w", KEY, put), kv, Deadline("w", 1.2))
    assert 1 < len(tries) < 8


def test_a_wait_ends_by_its_deadline_with_its_reason():
    rule = lambda view: Wait("for the moon", KEY)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="for the moon"):
        run(settle("w", KEY, rule), memory.MemoryKV(), Deadline("w", 0.2))
    assert time.monotonic() - started < 5


def test_who_may_not_go_on_is_stopped_before_the_next_request():
    def check():
        raise ClosedError("closed")

    kv = Interposed()
    with pytest.raises(ClosedError):
        run(settle("w", KEY, write_once), kv, Deadline("w", 5), check=check)
    assert kv.commits == 0


def test_what_something_else_wrote_is_refused_and_named():
    for value in (b"", b"null", b'{"uid": 3}', b'{"uid": "x", "more": 1}', b"\xff"):
        with pytest.raises(Exception, match="Version record"):
            VersionRecord.decode(value, "versions/run/1")
