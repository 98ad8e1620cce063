"""A replica that is told its end: readers finish, or go elsewhere. One process, in memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from features.retention.kept import copies_of
from kit import at_once, inside, memory, until

from torch_ros.errors import ClosedError, SeatLost, UsageError
from torch_ros.protocol import keys as k
from torch_ros.protocol.reaching import ClaimedSources
from torch_ros.protocol.records import Holding
from torch_ros.store.txn import Read

LONG_S = 60.0  # tests end earlier

endpoint = pytest.fixture(memory)


@pytest.fixture
def opened_with():
    return {"linger_s": 0}


def tensor_of(handle):
    return handle.checkpoints.registered.memory[0]


@contextmanager
def reading_from(source, reader, monkeypatch):
    """A read, attached to its source and not begun until the event is set: (read, event)."""
    go_on, is_reading, read = threading.Event(), threading.Event(), ClaimedSources.read

    def slow(self, places, fetch):
        def held(sources):
            if not is_reading.is_set():
                assert [each.inst.partition("@")[0] for each in sources] == [source.replica]
                is_reading.set()
                go_on.wait(20)
            fetch(sources)

        read(self, places, held)

    monkeypatch.setattr(ClaimedSources, "read", slow)
    with ThreadPoolExecutor() as pool:
        try:
            replicating = pool.submit(reader.replicate)
            assert is_reading.wait(20)
            yield replicating, go_on
        finally:
            go_on.set()


def states_of(handle):
    """The states of all holdings, by replica."""
    group = inside(handle).group
    view = group.kv.read(Read((group.seat.keys.holdings(),)), timeout_s=5)
    return {
        k.replica_of(k.parse_holding(key).inst): Holding.decode(entry.value, key).state
        for key, entry in view.entries.items()
    }


@pytest.mark.parametrize("spot", [False, True])
def test_readers_of_who_leaves_finish_and_nobody_new_comes(opened, monkeypatch, caplog, spot):
    leaver, reader, late = opened("leaver", 1.0, spot=spot), opened("reader"), opened("late")
    leaver.publish(1)
    with reading_from(leaver, reader, monkeypatch) as (replicating, go_on):
        leaving = threading.Thread(target=leaver.leave, kwargs={"within_s": LONG_S})
        leaving.start()
        until(lambda: states_of(reader).get("leaver") == "draining")
        assert leaving.is_alive()
        assert reader.list() == {}
        go_on.set()
        assert replicating.result(20) == 1
    leaving.join(20)
    assert not leaving.is_alive()
    assert reader.last_read.reroutes == 0
    assert late.replicate() == 1
    assert late.last_read.source == "reader"
    assert "is gone" not in caplog.text


def test_the_version_that_is_lost_is_said(opened, caplog):
    leaver, other = opened("leaver", 1.0), opened("other")
    leaver.publish(1)
    leaver.leave()
    assert other.list() == {}
    assert "version 1 was held nowhere else and is gone; no version is left" in caplog.text


def test_a_retained_version_is_not_copied_and_stays_for_who_may_take_it(opened):
    leaver, other = opened("leaver", 1.0), opened("other", retain=("latest",))
    leaver.publish(1)
    leaving = threading.Thread(target=leaver.leave, kwargs={"within_s": LONG_S})
    leaving.start()
    other.wait(lambda there: any("+linger" in name for name in there.get(1, ())))
    assert not copies_of(leaver)
    assert other.replicate() == 1
    leaving.join(20)
    assert not leaving.is_alive()
    assert other.list() == {1: {"other"}}


def test_who_has_left_is_closed(opened):
    leaver = opened("leaver", 1.0)
    opened("other")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(partial(leaver.replicate, timeout_s=LONG_S))
        until(lambda: inside(leaver).group.ledger.pending)
        with pytest.raises(UsageError, match="within_s"):
            leaver.leave(within_s=-1)
        assert not leaver.is_closed
        leaver.leave()
        with pytest.raises(ClosedError):
            waiting.result(20)
    for call in (partial(leaver.publish, 1), leaver.update, leaver.list):
        with pytest.raises(ClosedError):
            call()
    leaver.leave()
    leaver.close()


def test_one_rank_that_leaves_ends_the_replica_when_readers_are_done(opened, monkeypatch):
    ranks = at_once(*(partial(opened, "leaver", 1.0, rank=r, world_size=2) for r in range(2)))
    reader = opened("reader")
    at_once(*(partial(rank.publish, 1) for rank in ranks))
    with reading_from(ranks[0], reader, monkeypatch) as (replicating, go_on):
        leaving = threading.Thread(target=ranks[1].leave, kwargs={"within_s": LONG_S})
        leaving.start()
        until(lambda: states_of(reader).get("leaver") == "draining")
        go_on.set()
        assert replicating.result(20) == 1
    leaving.join(20)
    assert reader.last_read.reroutes == 0
    until(lambda: ranks[0].state == "gone")
    with pytest.raises(SeatLost, match="rank 1 closed its handle"):
        ranks[0].publish(2)
    ranks[0].unpublish()
    tensor_of(ranks[0]).fill_(666)
    assert reader.list() == {1: {"reader"}}
