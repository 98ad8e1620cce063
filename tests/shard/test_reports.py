"""`handle.reports`: what this rank did, how long each part took, and which way the bytes came."""

import logging
import socket
import threading

import pytest
import torch
from kit import inside, published

from torch_ros import DrainReport, PublishReport, ReadReport
from torch_ros.deadline import wall_ms
from torch_ros.errors import TorchRosError
from torch_ros.protocol import membership
from torch_ros.shard import publishing, replication
from torch_ros.shard.replication import Replication
from torch_ros.shard.report import REPORTS_KEPT, Reports
from torch_ros.store.loops import Wait
from torch_ros.store.txn import Delete, Txn, one


def replicated(handle, size=1000):
    handle.register({"w": torch.empty(size)})
    handle.replicate()


def test_each_call_leaves_a_report(opened):
    began_ms = wall_ms()
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1, size=1000)
    uid = trainer.fleet().latest.uid
    replicated(rollout)
    rollout.unpublish()
    trainer.unpublish()
    one, two = trainer.reports
    assert isinstance(one, PublishReport)
    assert (one.version, one.bytes_total, one.is_offered, one.call) == (1, 4000, True, 1)
    assert set(one.stages_s) == {"decide", "tensors", "digest", "commit"}
    assert two == DrainReport(1, (), (), False, two.elapsed_s, 2, two.began_ms, one.uid)
    read, drained = rollout.reports
    assert isinstance(read, ReadReport)
    assert (read, read.call, drained.call) == (rollout.last_read, 1, 2)
    assert {each.uid for each in (one, two, read, drained)} == {uid}
    for each in (one, two, read, drained):
        assert began_ms <= each.began_ms <= wall_ms()
    for each in (one, read):  # nothing is left out: all but what it takes to ask the clock
        assert 0 <= each.elapsed_s - sum(each.stages_s.values()) < 0.01


def test_a_report_and_the_log_say_why_a_call_began_again(opened, monkeypatch, caplog):
    # The watching thread would notice first, now and then, and take the seat again.
    unmoved = lambda _, seat: Wait("", (one(seat.group),))
    monkeypatch.setattr(membership, "watch_over", unmoved)
    trainer = opened("trainer")
    group, offer, lost = inside(trainer).group, publishing._show, []

    def lose(*args, **options):
        offer(*args, **options)
        if not lost:
            gone = Txn(ops=(Delete(one(group.seat.group)),))
            lost.append(group.kv.commit(gone, timeout_s=5))

    monkeypatch.setattr(publishing, "_show", lose)
    with caplog.at_level(logging.DEBUG, logger="torch_ros"):
        published(trainer, 1, size=1000)
    assert trainer.reports[-1].turns["lost seat"] == 1  # beside it, a wait for the seat, maybe
    assert "publish 1 (call 1) begins again: lost seat: its group record is gone" in caplog.text
    trainer.unpublish()
    assert trainer.reports[-1].turns == {}


def test_the_ways_of_all_bytes_that_were_read_are_told(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1, size=1 << 20)
    replicated(rollout, size=1 << 20)
    read = rollout.last_read
    assert sum(read.ways.values()) == read.bytes_read == 4 << 20
    is_real = "memory://" not in inside(trainer).group.kv.endpoint
    ways = {"ucx" if is_real else "memory"}
    ways = {"tcp, plain"} if is_real else ways  # feature tcp
    ways = {"cma"} if is_real else ways  # feature shortcuts
    assert set(read.ways) == ways, read.ways


@pytest.mark.parametrize("is_here", [True, False])
def test_a_slow_read_within_a_host_alone_is_warned_of(opened, monkeypatch, caplog, is_here):
    monkeypatch.setattr(replication, "SLOW_BYTES", 0)
    monkeypatch.setattr(replication, "SLOW_BYTES_PER_S", float("inf"))
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1, size=1000)
    if not is_here:
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    replicated(rollout)
    told = "GB/s from a source on this host is slow: the kernel copies if both have transport="
    assert (told in caplog.text) == is_here


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_drain_says_who_was_waited_for_and_who_was_left_behind(opened, monkeypatch):
    trainer = opened("trainer", drain_s=0.3)
    published(trainer, 1, size=1000)
    slow = opened("slow")
    seen, goes_on, fetch = threading.Event(), threading.Event(), Replication._fetch

    def waits(self, *args):
        seen.set()
        goes_on.wait(20)
        return fetch(self, *args)

    monkeypatch.setattr(Replication, "_fetch", waits)
    slow.register({"w": torch.empty(1000)})

    def reads():
        with pytest.raises(TorchRosError):  # nobody has the version any more
            slow.replicate()

    reading = threading.Thread(target=reads)
    reading.start()
    assert seen.wait(10)
    trainer.unpublish()
    goes_on.set()
    slow.close()
    reading.join(20)
    drained = trainer.reports[-1]
    assert (drained.waited_for, drained.left_behind) == (("slow",), ("slow",))
    assert drained.elapsed_s >= 0.3


def test_the_last_reports_are_kept_and_a_listener_that_fails_harms_nobody():
    reports, heard = Reports(), []
    reports.listeners += [lambda _: 1 / 0, heard.append]
    many = [PublishReport(n, 0, True, 0.0, {}, n, 0) for n in range(REPORTS_KEPT + 1)]
    for each in many:
        reports.add(each)
    assert (list(reports.last()), heard) == (many[1:], many)
    assert reports.last_read is None
