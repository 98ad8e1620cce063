"""A trainer that closes right after its last publication: the bucket gets that version."""

import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import inside, until

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archiver
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import ArchiveRecord
from torch_ros.store.txn import Read, one

pytest.importorskip("obstore")
ARCHIVER = """
import sys
from torch_ros.bucket import objects
from torch_ros.cli import archiving, main
objects.RETRIES, objects.RETRY_S, archiving.RETRY_MAX_S = 1, 1, 2
sys.exit(main.main(sys.argv[1:]))
"""
START_S = 60  # until an archiver has opened, on a busy machine
TTL_S = 10  # of an archiver
SOON_S = 3
ETCD = pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
BOTH = pytest.mark.parametrize("endpoint", ["memory", "etcd"], indirect=True)


def said(handle, replica="archiver"):
    """What the archiver's record says; None: there is none."""
    key = Keys(handle.model).archive(replica)
    view = inside(handle).group.kv.read(Read((one(key),)), timeout_s=5)
    return ArchiveRecord.at(view, key)


@pytest.fixture
def archiving(endpoint, started):
    """Start `torch-ros archive`; returns once it has said that it is there."""

    def start(handle, url):
        archiver = started.start(ARCHIVER, "--endpoint", endpoint, "archive", handle.model, url)
        until(lambda: said(handle) is not None, by=archiver)
        return archiver

    return start


def closed(handle, **options):
    """How long that takes."""
    began_s = time.monotonic()
    handle.close(**options)
    return time.monotonic() - began_s


@pytest.mark.long
@ETCD
@pytest.mark.parametrize("end", ["close", "leave"])
def test_the_last_version_is_in_the_bucket_when_close_has_returned(
    opened, archiving, tmp_path, end
):
    trainer = opened("trainer", linger_s=30)
    bucket = torch_ros.bucket.open(str(tmp_path / "bucket"), trainer.model)
    sent = {"w": torch.zeros(1 << 22)}
    trainer.register(sent)
    trainer.publish(1)
    archiver = archiving(trainer, bucket.url)
    until(lambda: 1 in bucket.list(), by=archiver)
    trainer.unpublish()
    sent["w"].fill_(2)
    trainer.publish(2)
    began_s = time.monotonic()
    trainer.close() if end == "close" else trainer.leave(within_s=30)
    took_s = time.monotonic() - began_s
    assert bucket.list() == {1: "full", 2: "full"}
    assert took_s < 20
    found = {"w": torch.zeros(1 << 22)}
    assert bucket.load(found) == 2
    assert found["w"].eq(2).all()
    archiver.signal(signal.SIGTERM)
    archiver.finish()


@pytest.mark.long
@ETCD
@pytest.mark.timeout(240)
def test_a_bucket_that_is_gone_costs_linger_s_and_an_archiver_that_is_killed_its_lease(
    opened, archiving, server, caplog
):
    trainers = [opened(name, linger_s=30) for name in ("one", "two", "three")]
    one_, two, three = trainers
    for each in trainers:
        each.register({"w": torch.zeros(1000)})
    one_.publish(1)
    archiver = archiving(one_, "s3://weights/p")
    until(lambda: said(one_).ref is not None, by=archiver)
    server.is_away = True
    caplog.set_level(logging.INFO)
    began_s = time.monotonic()
    one_.unpublish()
    one_.publish(2)
    one_.unpublish()
    one_.publish(3)
    assert time.monotonic() - began_s < SOON_S  # who goes on training waits for no archiver
    assert 4 <= closed(one_, linger_s=4) < 4 + SOON_S
    assert "for archiver to fetch version 3, which only this replica holds" in caplog.text
    assert "version 3 was held nowhere else and is gone" in caplog.text

    two.publish(4)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(closed, two)
        until(lambda: "archiver to fetch version 4" in caplog.text)
        archiver.kill()
        assert closing.result() < TTL_S + SOON_S
    three.publish(5)
    assert closed(three) < SOON_S  # the archiver is dead


@BOTH
def test_an_archiver_says_what_its_bucket_has_and_again_from_another_seat(opened, tmp_path):
    trainer, handle = opened("trainer"), opened("archiver", spot=True)
    bucket = torch_ros.bucket.open(str(tmp_path / "bucket"), trainer.model)
    archiver = Archiver(handle, bucket, keep=3)
    archiver.say()
    assert said(trainer) == ArchiveRecord(None)
    trainer.register({"w": torch.zeros(10)})
    trainer.publish(7)
    archiver.archive(lambda *_: None)
    assert said(trainer) == ArchiveRecord(None)  # it is said when the caller is ready for it
    archiver.say()
    assert said(trainer).ref == trainer.fleet().latest
    group = inside(handle).group
    before = group.seat
    group.session.close()  # its lease ends, and the record with it
    until(lambda: group.seat is not before and group.state == "seated")
    assert said(trainer) is None
    archiver.say()
    assert said(trainer).ref.version == 7
    rev = group.kv.read(Read((one("x"),)), timeout_s=5).rev
    archiver.say()
    assert group.kv.read(Read((one("x"),)), timeout_s=5).rev == rev  # no second time
    handle.close()
    assert said(trainer) is None


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_version_that_the_bucket_had_before_is_said_to_be_there(opened, tmp_path):
    trainer = opened("trainer")
    bucket = torch_ros.bucket.open(str(tmp_path / "bucket"), trainer.model)
    trainer.register({"w": torch.zeros(10)})
    trainer.publish(7)
    with opened("archiver", spot=True) as handle:
        assert Archiver(handle, bucket, keep=3).archive(lambda *_: None).version == 7
    with opened("archiver", spot=True) as handle:
        archiver = Archiver(handle, bucket, keep=3)
        assert archiver.archive(lambda *_: None) is None
        archiver.say()
        assert said(trainer).ref.version == 7
        assert closed(trainer, linger_s=20) < SOON_S


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_an_archiver_that_leaves_lets_the_trainer_go_at_once(opened, caplog):
    caplog.set_level(logging.INFO)
    trainer, handle = opened("trainer", linger_s=60), opened("archiver", spot=True)
    handle.archives.say(None)
    trainer.register({"w": torch.zeros(10)})
    trainer.publish(1)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(closed, trainer)
        until(lambda: "waiting up to 60 s for archiver to fetch" in caplog.text)
        handle.close()
        assert closing.result() < SOON_S


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_nobody_waits_for_an_archiver_in_a_close_that_an_error_brings(opened):
    with opened("archiver", spot=True) as handle:
        handle.archives.say(None)
        trainer = opened("trainer", {"w": torch.zeros(10)}, linger_s=60)
        trainer.publish(1)
        began_s = time.monotonic()
        with pytest.raises(ZeroDivisionError), trainer:
            raise ZeroDivisionError
        assert time.monotonic() - began_s < SOON_S
