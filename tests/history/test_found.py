"""What histories have found, again in one process."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import kit
import pytest
import torch
from kit import inside, until

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import DeadlineExceeded, SeatLost, TransferFailed, UsageError
from torch_ros.memory import store as memory
from torch_ros.memory.transport import MemoryTransport
from torch_ros.protocol.seat import CALLS_KEPT
from torch_ros.transfer.card import Word
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.peers import Peers

endpoint = pytest.fixture(kit.memory)


@pytest.fixture
def trainer(endpoint):
    with torch_ros.open("m", endpoint=endpoint, replica="trainer", timeout_s=20, ttl_s=5) as handle:
        handle.register({"w": torch.zeros(10)})
        yield handle


def test_what_a_seat_brings_back_while_unpublish_gives_up_is_unpublished_there(
    trainer, endpoint, monkeypatch
):
    group, may_return = inside(trainer).group, threading.Event()
    take_seat, forget = group._take_seat_again, group.ledger.forget

    def take_seat_when_told():
        assert may_return.wait(15)
        take_seat()

    def forget_after_the_return(*args):
        may_return.set()
        until(lambda: group.state == "seated")
        return forget(*args)

    trainer.publish(1)
    monkeypatch.setattr(group, "_take_seat_again", take_seat_when_told)
    monkeypatch.setattr(group.ledger, "forget", forget_after_the_return)
    memory.named(endpoint.removeprefix("memory://")).revoke(group.session.lease_id, timeout_s=1)
    until(lambda: group.state != "seated")
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
    with pytest.raises(SeatLost, match="older than the calls"):
        second.update()


def test_a_rank_that_calls_something_else_learns_what_its_group_has_done(trainer, rollout):
    (first, second), both = rollout
    trainer.publish(1)
    assert both(lambda handle: handle.replicate()) == [1, 1]
    first.unpublish()
    assert second.version == 1, "it has not heard of it"
    assert both(lambda handle: handle.update()) == [True, True]


def test_close_leaves_no_thread_behind_that_keeps_a_copy(etcd_endpoint):
    """One that is inside NIXL when the interpreter ends aborts the process."""
    keepers = lambda: [t for t in threading.enumerate() if t.name.startswith("torch_ros keeps")]
    before, model = keepers(), "m-" + uuid.uuid4().hex[:8]
    with torch_ros.open(model, endpoint=etcd_endpoint, retain=["latest"], timeout_s=20) as handle:
        handle.register({"w": torch.zeros(10)})
        handle.publish(1)
        handle.unpublish()
        assert len(keepers()) == len(before) + 1
        assert handle.list() == {1: {f"{handle.replica}+2"}}
    assert keepers() == before


def test_close_leaves_no_thread_behind_that_asks_etcd(etcd_endpoint):
    """One that is inside grpc when the interpreter ends aborts the process."""
    before, model = set(threading.enumerate()), "m-" + uuid.uuid4().hex[:8]
    for _ in range(20):
        with torch_ros.open(model, endpoint=etcd_endpoint, timeout_s=20):
            assert any(t.name.startswith("torch_ros watches") for t in threading.enumerate())
        ours = [t.name for t in threading.enumerate() if t not in before]
        assert [name for name in ours if name.startswith(("torch_ros", "session"))] == []


class Slow:
    """A transport in which nothing lands while `flows` is not set."""

    def __init__(self):
        self.inner, self.flows = MemoryTransport(), threading.Event()
        self.flows.set()
        self.agent, self.connection = self.inner.agent, self.inner.connection
        self.register, self.close = self.inner.register, self.inner.close

    def connect(self, connection):
        peer = self.inner.connect(connection)
        prepare = peer.prepare
        peer.prepare = lambda spans, **devices: SlowRead(self, prepare(spans, **devices))
        return peer


class SlowRead:
    def __init__(self, transport, inner):
        self.transport, self.inner, self.is_waiting = transport, inner, False
        self.size_bytes, self.close = inner.size_bytes, inner.close

    def post(self):
        if self.is_waiting:
            raise UsageError("still in flight")
        self.is_waiting = True

    def is_done(self):
        if self.is_waiting and self.transport.flows.is_set():
            self.inner.post()
            self.is_waiting = False
        return not self.is_waiting and self.inner.is_done()


def test_a_word_that_came_too_late_for_one_call_is_asked_for_again_by_the_next():
    mailbox, transport = Mailbox(MemoryTransport()), Slow()
    peers = Peers(transport)
    mailbox.serve(5, 1)
    shown = peers.state(mailbox.card, Deadline("look", 5))
    transport.flows.clear()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            peers.word(shown, Deadline("ask", 0.05))
    mailbox.serve(6, 2)
    transport.flows.set()
    assert peers.word(shown, Deadline("ask", 5)) == Word(6, 2)
    mailbox.close()
    with pytest.raises(TransferFailed):
        peers.word(shown, Deadline("ask", 5))
    with pytest.raises(TransferFailed):
        peers.word(shown, Deadline("ask", 5))
