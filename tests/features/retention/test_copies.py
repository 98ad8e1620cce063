"""Copies in host memory of what is retained, or read from afar: who makes one, until when."""

import logging
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from features.retention.kept import copies_of
from kit import at_once, until

from torch_ros.features.retention import host_copies
from torch_ros.features.retention.host_copies import HostCopy
from torch_ros.memory.transport import MemoryTransport
from torch_ros.p2p.pages import Pages
from torch_ros.protocol.records import Kept, VersionRef
from torch_ros.shard.replication import Replication
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks

only_memory = pytest.mark.parametrize("endpoint", ["memory"], indirect=True)


def holding(handle, tensor):
    handle.register({"w": tensor})
    return handle


def test_the_last_copy_of_a_retained_version_goes_to_host_memory_until_another_has_it(opened):
    sent, got = torch.arange(1000.0), torch.zeros(1000)
    trainer = holding(opened("trainer", retain=("latest",)), sent)
    trainer.publish(1)
    trainer.unpublish()
    sent.fill_(666)
    ((copy,),) = trainer.list().values()
    assert copy.startswith("trainer+")
    assert holding(opened("rollout"), got).replicate() == 1
    assert torch.equal(got, torch.arange(1000.0))
    until(lambda: trainer.list() == {1: {"rollout"}})
    until(lambda: not copies_of(trainer))


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8])
def test_dtypes_that_torch_cannot_copy_are_put_aside_for_who_retains_them(opened, dtype):
    sent = torch.arange(8, dtype=torch.uint8)
    got = torch.zeros_like(sent)
    trainer = holding(opened("trainer", retain=("latest",)), sent.view(dtype))
    trainer.publish(1)
    trainer.unpublish()
    expected = sent.clone()
    sent.zero_()
    assert holding(opened("rollout"), got.view(dtype)).replicate() == 1
    assert torch.equal(got, expected)


class Interrupted(BaseException):
    """Ctrl-C."""


def no_thread_for(monkeypatch, what, error):
    """Let no thread of that name start."""
    start = threading.Thread.start

    def start_others(thread):
        if what in thread.name:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)


@only_memory
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), Interrupted()])
def test_a_copy_without_a_thread_is_kept_by_the_next_call_and_a_close_waits_for_none(
    opened, monkeypatch, caplog, error
):
    trainer = holding(opened("trainer", retain=("latest",)), torch.ones(9))
    trainer.publish(1)
    no_thread_for(monkeypatch, "keeps 1", error)
    with suppress(Interrupted):
        trainer.unpublish()
    copies = copies_of(trainer)
    assert len(copies) == 1
    is_said = "the copy of version 1 has no thread" in caplog.text
    assert is_said == isinstance(error, RuntimeError)
    monkeypatch.undo()
    copies.keep()
    assert holding(opened("rollout"), torch.zeros(9)).replicate() == 1
    until(lambda: not copies)
    trainer.close()


@only_memory
def test_a_handle_whose_copy_has_no_thread_can_be_closed(opened, monkeypatch):
    trainer = holding(opened("trainer", retain=("latest",), linger_s=0), torch.ones(9))
    trainer.publish(1)
    no_thread_for(monkeypatch, "keeps 1", Interrupted())
    with pytest.raises(Interrupted):
        trainer.unpublish()
    trainer.close()
    assert not copies_of(trainer)


@only_memory
def test_a_copy_without_a_thread_leaves_the_others_theirs(opened, monkeypatch):
    trainer = holding(opened("trainer", retain=("1", "2")), torch.ones(9))
    no_thread_for(monkeypatch, "keeps 1", RuntimeError("can't start new thread"))
    for version in (1, 2):
        trainer.publish(version)
        trainer.unpublish()
    assert len(copies_of(trainer)) == 2
    assert {t.name for t in threading.enumerate()} >= {"torch_ros keeps 2"}


@only_memory
def test_a_copy_for_which_there_is_no_memory_is_not_made_and_the_trainer_steps_on(
    opened, monkeypatch, caplog
):
    trainer = holding(opened("trainer", retain=("latest",)), torch.ones(9))
    trainer.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "available_bytes", lambda: 30.0)
        trainer.unpublish()
    assert "may be lost, it cannot be copied: a copy takes 0.0 GB of host memory" in caplog.text
    assert trainer.list() == {}
    trainer.publish(2)
    trainer.unpublish()
    assert [*trainer.list()] == [2]


@only_memory
def test_each_rank_without_memory_for_a_needed_copy_says_what_may_be_lost(
    opened, monkeypatch, caplog
):
    both_look = threading.Barrier(2)

    def available():
        both_look.wait(20)
        return 0.0

    join = lambda rank: opened("t", rank=rank, world_size=2, retain=("latest",))
    ranks = at_once(*(partial(join, rank) for rank in range(2)))
    for rank in ranks:
        holding(rank, torch.ones(9))
    at_once(*(partial(rank.publish, 1) for rank in ranks))
    monkeypatch.setattr(host_copies, "available_bytes", available)
    at_once(*(rank.unpublish for rank in ranks))
    assert caplog.text.count("may be lost, it cannot be copied") == 2
    assert "waiting for readers" not in caplog.text


@pytest.fixture
def far_reader(opened, monkeypatch):
    """A trainer that is read from afar, and the thread of its reader, which stops in the middle."""
    trainer = holding(opened("a", datacenter="west", drain_s=600), torch.ones(4))
    reader = holding(opened("reader", datacenter="east"), torch.zeros(4))
    trainer.publish(1)
    reads, goes_on, fetch = threading.Event(), threading.Event(), Replication._fetch

    def fetched(self, *args):
        if not reads.is_set():
            reads.set()
            assert goes_on.wait(60)
        fetch(self, *args)

    monkeypatch.setattr(Replication, "_fetch", fetched)
    thread = threading.Thread(target=reader.replicate, args=(1,))
    thread.start()
    assert reads.wait(20)
    yield trainer, reader, goes_on, thread
    goes_on.set()
    thread.join()


@only_memory
def test_who_reads_from_afar_is_waited_for_where_memory_is_short(far_reader, monkeypatch, caplog):
    trainer, reader, goes_on, thread = far_reader
    monkeypatch.setattr(host_copies, "available_bytes", lambda: 15)
    caplog.set_level(logging.INFO)
    unpublishing = threading.Thread(target=trainer.unpublish)
    unpublishing.start()
    reader.wait(lambda versions: not versions)  # it drains
    assert unpublishing.is_alive()
    assert not copies_of(trainer)
    goes_on.set()
    unpublishing.join(20)
    thread.join(20)
    assert reader.version == 1
    assert reader.last_read.reroutes == 0
    assert "0.0 GB of host memory" in caplog.text
    assert "also in other datacenters: no copy could be made" in caplog.text


def test_a_copy_that_cannot_be_shown_leaves_no_registration(monkeypatch):
    transport = MemoryTransport()
    target = LocalState(local_chunks({"w": torch.ones(3)}), {}, {})
    kept = Kept(VersionRef("run", 1, "0" * 16, 1), 1, "L", is_original=True)
    before = len(transport.registrations)

    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(host_copies.Mailbox, "show_digests", pressed)
    with pytest.raises(KeyboardInterrupt):
        HostCopy(transport, target.layout, target.memory, kept, 1, Digests(), Pages())
    assert len(transport.registrations) == before
    transport.close()
