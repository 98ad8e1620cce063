"""A bucket below all runs: what handles have from it when everybody has gone."""

import logging
import threading
import time
import uuid
from pathlib import Path

import kit
import pytest
import torch
from kit import both_stores, inside, read_only

import torch_ros
import torch_ros.bucket
from puppets.objects import ObjectServer
from torch_ros import errors
from torch_ros.bucket import objects
from torch_ros.bucket.archive import Archiver, Form
from torch_ros.features.fallback import flow, rules, stored
from torch_ros.features.fallback.rules import GAP_S
from torch_ros.protocol.call import GroupCall
from torch_ros.store import run

pytest.importorskip("obstore")
endpoint = pytest.fixture(kit.store)  # in memory, where nothing else is said
TTL_S = 2
QUIET_S = 2 * TTL_S  # at least, before a bucket is asked
A_WHILE_S = 1.5  # in which quiet that lasts a moment has ended
COUNT = 1 << 10


@pytest.fixture(autouse=True)
def soon(request, monkeypatch):
    """Quiet lasts a moment, except where `patient` asks for as long as users wait."""
    if "patient" not in request.fixturenames:
        monkeypatch.setattr(rules, "TTLS", 0.1)
        monkeypatch.setattr(rules, "crc32", lambda _: 0)
        monkeypatch.setattr(run, "LOOK_S", 0.1)


@pytest.fixture
def patient():
    """Quiet lasts as long as for users."""


@pytest.fixture
def archived(opened, url):
    """Publishes each content under its number, archives it, and is gone; the name of its run."""

    def publish(*versions, run=None, count=COUNT, **more):
        tensors = {"w": torch.zeros(count), "b": torch.zeros(3), **more}
        with opened("publisher", run=run) as trainer:
            trainer.register(tensors)
            bucket = torch_ros.bucket.open(url, trainer.model)
            with opened("archiver", spot=True) as handle:
                archiver = Archiver(handle, bucket, keep=9)
                for version in versions:
                    trainer.unpublish()
                    for tensor in tensors.values():
                        tensor.fill_(version)
                    trainer.publish(version)
                    assert archiver.archive(lambda *_: None)
                archiver.say()
            return trainer.run

    return publish


def below(handle):
    """The bucket below a handle's runs; None: it has none."""
    found = (each.below for each in inside(handle).features if isinstance(each, flow.Fallback))
    return next(found, None)


def zeros(count=COUNT):
    return {"w": torch.zeros(count), "b": torch.zeros(3)}


@pytest.fixture
def begun(opened, url):
    """A handle with a bucket, its tensors, and a run of its own, in which nothing is published."""

    def begin(name="reader", count=COUNT, **options):
        handle = opened(name, bucket=url, ttl_s=TTL_S, **options)
        mine = zeros(count)
        handle.register(mine)
        return handle, mine

    return begin


@pytest.fixture
def served(monkeypatch):
    """How many bytes of files and manifests all stores have given."""
    given = []

    def counted(get):
        def counting(self, *asked):
            found = get(self, *asked)
            parts = found if isinstance(found, list) else [found or b""]
            given.extend(len(memoryview(part).cast("B")) for part in parts)
            return found

        return counting

    for name in ("get", "get_ranges"):
        monkeypatch.setattr(objects.ObjectStore, name, counted(getattr(objects.ObjectStore, name)))
    return given


def spoil(url, version):
    """Flip a byte in the tensors of a version."""
    [path] = Path(url).glob(f"*/*/data/{version:020d}-*/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.long
@both_stores
def test_a_trainer_that_begins_again_has_the_buckets_newest_and_publishes_the_next(
    archived, begun, opened, url, patient
):
    archived(7, 8)
    trainer, weights = begun("trainer")
    rollout, mine = begun("rollout")
    began_s = time.monotonic()
    assert trainer.replicate("latest", missing_ok=True) == 8
    assert time.monotonic() - began_s >= QUIET_S
    assert (weights["w"] == 8).all()
    report = trainer.last_read
    assert (report.version, report.source) == (8, url)
    assert report.ways == {"bucket": report.bytes_read}
    assert rollout.replicate("latest") == 8
    assert rollout.last_read.source == "trainer"
    trainer.unpublish()
    weights["w"].fill_(9)
    trainer.publish(9)
    assert rollout.update("latest") is True
    assert (mine["w"] == 9).all()
    bucket = torch_ros.bucket.open(url, trainer.model)
    with opened("archiver", spot=True) as handle:
        Archiver(handle, bucket, keep=9).archive(lambda *_: None)
    assert 9 in bucket.list()
    assert opened("late").list() == {9: {"trainer", "rollout"}}


def test_a_run_that_etcd_has_forgotten_goes_on_under_its_name_in_the_bucket(archived, url, caplog):
    name = archived(7, 8)
    [model] = [path.name for path in Path(url).iterdir() if "another" not in path.name]
    bucket = torch_ros.bucket.open(url, model)
    options = {"endpoint": f"memory://{uuid.uuid4()}", "ttl_s": TTL_S, "bucket": url}
    with torch_ros.open(model, replica="trainer", **options) as trainer:
        assert trainer.run == name
        assert trainer.fleet().runs[name] > max(of.run_number for of in bucket.kept())
        mine = zeros()
        trainer.register(mine)
        assert trainer.replicate("latest", missing_ok=True) == 8
        trainer.unpublish()
        trainer.publish(9)
        options = {"endpoint": options["endpoint"], "spot": True}
        with torch_ros.open(model, replica="archiver", **options) as handle:
            assert Archiver(handle, bucket, keep=9).archive(lambda *_: None)
            assert list(bucket.list()) == [7, 8, 9]
            assert {of.run for of in bucket.kept()} == {name}
            trainer.unpublish()
            trainer.close(linger_s=0)
            with torch_ros.open(model, replica="next", bucket=url, **options) as late:
                assert late.run != name  # of which etcd has a record, and the archiver is none
    assert "new run" not in caplog.text


def test_a_bucket_that_does_not_answer_holds_up_no_open(opened, url, monkeypatch, caplog):
    stays = threading.Event()
    monkeypatch.setattr(flow, "RUN_S", 0.5)
    monkeypatch.setattr(stored.FallbackBucket, "newest_run", lambda _: stays.wait(60))
    try:
        began_s = time.monotonic()
        opened("trainer", bucket=url)
        assert time.monotonic() - began_s < 10
        assert "a new run is begun" in caplog.text
        caplog.clear()
        opened("rollout", bucket=url)  # there is a run, so nobody asks
        assert not caplog.text
    finally:
        stays.set()


def test_the_lineage_that_has_ended_is_passed_over(archived, begun):
    run = archived(3, 4)
    archived(3, run=run)
    reader, mine = begun()
    assert reader.replicate("latest") == 3
    assert (mine["w"] == 3).all()


@pytest.mark.long
def test_no_bucket_is_asked_while_etcd_is_away(etcd_server, url, served, caplog, patient):
    options = {"endpoint": f"etcd://{etcd_server.host}", "ttl_s": TTL_S}
    caplog.set_level(logging.INFO)
    with torch_ros.open("m", replica="r", bucket=url, **options) as reader:
        reader.register(zeros())
        etcd_server.kill()
        with pytest.raises((errors.DeadlineExceeded, errors.SeatLost, errors.StoreUnavailable)):
            reader.replicate("latest", missing_ok=True, timeout_s=5 * TTL_S)
        assert "asking" not in caplog.text
        etcd_server.start()
        began_s = time.monotonic()
        assert reader.replicate("latest", missing_ok=True, timeout_s=60) is None
        assert time.monotonic() - began_s >= QUIET_S
    assert not served


def test_an_update_of_who_holds_nothing_has_the_buckets_newest_and_a_number_has_not(
    archived, begun, opened
):
    archived(7)
    reader, mine = begun()
    with pytest.raises(errors.DeadlineExceeded):
        reader.replicate(7, timeout_s=A_WHILE_S)
    assert reader.update("latest") is True
    assert (mine["w"] == 7).all()
    assert reader.update("latest") is False
    assert reader.update(7) is False


def test_a_version_that_does_not_fit_is_passed_over_and_if_none_fits_there_is_none(
    archived, begun, opened, url, caplog
):
    run = archived(7)
    archived(8, run=run, more=torch.zeros(2))  # a tensor that a reader of before has not
    reader, mine = begun()
    assert reader.replicate("latest", missing_ok=True) == 7
    assert (mine["w"] == 7).all()
    assert "version 8 of" in caplog.text
    reader.close(linger_s=0)
    other, _ = begun("other", COUNT // 2)
    assert other.replicate("latest", missing_ok=True) is None


@pytest.mark.long
def test_none_is_said_of_an_empty_bucket_only_after_it_was_asked(begun, patient):
    reader, mine = begun()
    began_s = time.monotonic()
    assert reader.replicate("latest", missing_ok=True) is None
    assert time.monotonic() - began_s >= QUIET_S
    assert not mine["w"].any()
    with pytest.raises(errors.DeadlineExceeded):
        reader.replicate("latest", timeout_s=A_WHILE_S)


def test_a_bucket_that_does_not_answer_is_an_error_only_where_none_may_be_said(
    opened, monkeypatch, caplog
):
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "RETRIES", 0)
    server.close()
    reader = opened("reader", zeros(), bucket="s3://weights/p", ttl_s=TTL_S)
    with pytest.raises(errors.BucketError):
        reader.replicate("latest", missing_ok=True)
    with pytest.raises(errors.DeadlineExceeded):
        reader.replicate("latest", timeout_s=A_WHILE_S)
    assert "it waits on, and asks again" in caplog.text


@pytest.mark.parametrize("missing_ok", [False, True])
def test_memory_that_may_only_be_read_is_named_before_a_bucket_is_read(
    archived, opened, url, tmp_path, missing_ok
):
    archived(1)
    reader = opened("reader", bucket=url, ttl_s=TTL_S)
    reader.register({**zeros(), "w": read_only(tmp_path / "w", COUNT)})
    with pytest.raises(
        errors.UsageError, match="replicate: tensor 'w' lies in memory that .* only read"
    ):
        reader.replicate("latest", missing_ok=missing_ok)


def test_a_corrupt_version_leads_to_the_one_before_and_if_none_is_left_that_is_said(
    archived, begun, url
):
    archived(6, 7, 8)
    spoil(url, 8)
    spoil(url, 7)
    reader, mine = begun()
    began_s = time.monotonic()
    assert reader.replicate("latest") == 6
    assert time.monotonic() - began_s < 2 * QUIET_S + TTL_S  # it has waited once
    assert (mine["w"] == 6).all()
    reader.unpublish()
    spoil(url, 6)
    for missing_ok in (True, False):
        with pytest.raises(errors.BucketError):
            reader.replicate("latest", missing_ok=missing_ok)
        assert reader.version is None


def test_a_store_that_fails_while_it_is_read_costs_no_version(archived, begun, monkeypatch):
    archived(7, 8)
    reader, mine = begun()
    get_ranges = objects.ObjectStore.get_ranges

    def refuses(self, key, *_):
        monkeypatch.setattr(objects.ObjectStore, "get_ranges", get_ranges)
        raise errors.BucketError(self.url, key, "503", "wait")

    monkeypatch.setattr(objects.ObjectStore, "get_ranges", refuses)
    with pytest.raises(errors.BucketError, match="503"):
        reader.replicate("latest")
    assert reader.replicate("latest") == 8
    assert (mine["w"] == 8).all()


def test_a_version_of_which_a_file_is_gone_leads_to_the_one_before(archived, begun, url):
    archived(7, 8)
    [path] = Path(url).glob(f"*/*/data/{8:020d}-*/model.safetensors")
    path.unlink()
    reader, _ = begun()
    assert reader.replicate("latest") == 7


def test_tied_tensors_are_filled_once_with_the_first(archived, opened, url):
    archived(7, tied=torch.zeros(COUNT))
    reader, one = opened("reader", bucket=url, ttl_s=TTL_S), torch.zeros(COUNT)
    reader.register({"w": one, "tied": one, "b": torch.zeros(3)})
    assert reader.replicate("latest") == 7
    assert (one == 7).all()
    [path] = Path(url).glob("*/*/data/*/model.safetensors")
    assert reader.last_read.bytes_read == path.stat().st_size  # once, and whole


def test_where_nothing_can_be_read_that_is_there_none_is_not_said(archived, begun, url):
    archived(7)
    reader, _ = begun()
    bucket = torch_ros.bucket.open(url, reader.model)
    [of] = bucket.kept()
    Path(url, bucket.root, of.key).write_text("{}")
    with pytest.raises(errors.UnreadableVersion):
        reader.replicate("latest", missing_ok=True)


@pytest.mark.long
def test_who_holds_what_cannot_be_read_from_is_waited_for_as_long_as_the_dead_are(archived, begun):
    archived(7)
    reader, _ = begun(retain=("latest",))
    assert reader.replicate("latest", missing_ok=True) == 7
    reader.unpublish()  # what is retained is in host memory now
    began_s = time.monotonic()
    assert reader.replicate("latest", missing_ok=True) is None
    assert TTL_S < time.monotonic() - began_s < TTL_S + GAP_S + 5


def test_what_a_trainer_publishes_while_the_bucket_is_listed_is_read(
    archived, begun, opened, monkeypatch
):
    archived(7)
    reader, mine = begun(timeout_s=60)
    trainer, stays = opened("trainer"), threading.Event()
    weights = zeros()
    weights["w"].fill_(3)
    trainer.register(weights)

    def stands_still(*_, **__):
        trainer.publish(3)
        stays.wait(60)

    monkeypatch.setattr(stored.FallbackBucket, "choose", stands_still)
    try:
        assert reader.replicate("latest") == 3
    finally:
        stays.set()
    assert (mine["w"] == 3).all()


def test_a_run_that_others_have_kept_alive_is_named_in_the_log(archived, begun, opened, caplog):
    run = archived(7)
    bystander = opened("bystander", run=run)
    before = opened("before", zeros(), run=run)
    before.publish(9)
    before.close(linger_s=0)
    reader, _ = begun()
    assert reader.run == bystander.run
    assert reader.replicate("latest") == 7
    assert "has had versions up to 9; to publish from 7 on" in caplog.text


def test_versions_that_are_deltas_are_named_in_the_log_and_give_no_run(opened, begun, url, caplog):
    tensors = zeros()
    with opened("publisher") as trainer:
        trainer.register(tensors)
        bucket = torch_ros.bucket.open(url, trainer.model)
        with opened("archiver", spot=True) as handle:
            archiver = Archiver(handle, bucket, keep=9, form=Form(deltas=4))
            for version in (7, 8):
                trainer.unpublish()
                tensors["b"].fill_(version)
                trainer.publish(version)
                archiver.archive(lambda *_: None)
        model = trainer.model
    assert bucket.list() == {7: "full", 8: "delta"}
    assert stored.FallbackBucket(url, model).newest_run() == (0, "")
    reader, _ = begun()
    assert reader.replicate("latest") == 7
    assert "1 up to 8 are newer, and deltas" in caplog.text


def test_no_run_has_the_name_of_what_comes_from_a_bucket(opened, url, monkeypatch):
    monkeypatch.setattr(stored.FallbackBucket, "newest_run", lambda _: (3, "bucket"))
    assert opened("trainer", bucket=url).run != "bucket"


def test_an_empty_url_is_no_bucket_whatever_the_environment_says(opened, url, monkeypatch):
    monkeypatch.setenv("TORCH_ROS_BUCKET", url)
    assert below(opened("trainer", bucket="")) is None
    assert below(opened("another")).url == url


def test_a_rank_whose_tensors_no_version_has_is_heard_by_all(archived, ranks, pool, url):
    archived(7)

    def replicate(rank):
        rank.register(zeros() if rank.rank == 0 else {"head": torch.zeros(2)})
        with pytest.raises(errors.VersionNotFound):  # a part of one was read
            rank.replicate("latest", missing_ok=True, timeout_s=60)
        with pytest.raises(errors.DeadlineExceeded):  # it waits for a trainer
            rank.replicate("latest", timeout_s=A_WHILE_S)

    list(pool.map(replicate, ranks("reader", bucket=url, ttl_s=TTL_S)))


def test_a_rank_without_a_bucket_does_not_say_none_for_all(archived, opened, pool, url):
    archived(7)
    options = {"world_size": 2, "ttl_s": TTL_S}
    handles = list(
        pool.map(lambda w: opened("r", rank=w[0], bucket=w[1], **options), [(0, url), (1, None)])
    )
    for handle in handles:
        handle.register(zeros())
    first, _ = [pool.submit(handle.replicate, "latest", missing_ok=True) for handle in handles]
    with pytest.raises(errors.CallMismatch):
        first.result()


def test_ranks_fill_their_own_tensors_and_are_told_of_each_others_failures(
    archived, ranks, pool, url
):
    archived(6, 7)

    def replicate(rank):
        mine = zeros()
        if rank.rank:  # each has its own tensor
            del mine["w"]
        else:
            del mine["b"]
        rank.register(mine)
        return rank.replicate("latest", timeout_s=60), mine

    spoil(url, 7)
    made = ranks("reader", bucket=url, ttl_s=TTL_S)
    [(first, w), (second, b)] = pool.map(replicate, made)
    assert (first, second) == (6, 6)
    assert (w["w"] == 6).all()
    assert (b["b"] == 6).all()


@pytest.mark.parametrize("first", ["corrupt", "refused"])
def test_ranks_that_fail_in_two_ways_go_on_by_what_ended_their_call(
    archived, ranks, pool, url, monkeypatch, first
):
    archived(6, 7)
    both_read, has_ended = threading.Barrier(2), threading.Event()
    failures = [
        errors.UnreadableVersion(url, "model.safetensors", "it is corrupt", "read another"),
        errors.BucketError(url, "model.safetensors", "503", "wait"),
    ]
    rounds = failures if first == "corrupt" else failures[::-1]
    give_up = GroupCall.give_up

    def giving_up(call, error):
        if error is not rounds[0]:
            assert has_ended.wait(20)
        give_up(call, error)
        has_ended.set()

    monkeypatch.setattr(GroupCall, "give_up", giving_up)

    def replicate(rank):
        fill = below(rank).contents

        def contents(manifest):
            if not has_ended.is_set():
                both_read.wait(20)
                raise rounds[rank.rank]
            return fill(manifest)

        below(rank).contents = contents
        mine = zeros()
        rank.register(mine)
        try:
            return rank.replicate("latest", timeout_s=60)
        except errors.BucketError as error:
            return type(error)

    found = list(pool.map(replicate, ranks("reader", bucket=url, ttl_s=TTL_S)))
    assert found == ([6, 6] if first == "corrupt" else [errors.BucketError, errors.BucketError])


@pytest.mark.parametrize("has_one", [0, 1])
def test_a_rank_without_a_bucket_fails_the_call_of_all(archived, opened, pool, url, has_one):
    archived(7)
    options = {"world_size": 2, "ttl_s": TTL_S, "timeout_s": 60}
    buckets = {rank: url if rank == has_one else None for rank in range(2)}
    handles = list(
        pool.map(lambda w: opened("r", rank=w[0], bucket=w[1], **options), buckets.items())
    )
    for handle in handles:
        handle.register(zeros())
    calls = [pool.submit(handle.replicate, "latest") for handle in handles]
    for call in calls:
        with pytest.raises(
            errors.UsageError, match=rf"rank {1 - has_one} was opened without bucket="
        ):
            call.result()


def test_who_has_held_a_trainers_version_waits_for_the_next_as_without_a_bucket(archived, begun):
    archived(7)
    trainer, _ = begun("trainer")
    trainer.publish(3)
    trainer.unpublish()
    began_s = time.monotonic()
    assert trainer.replicate("latest", missing_ok=True) is None
    assert time.monotonic() - began_s < QUIET_S


def test_an_archiver_sees_nothing_of_what_comes_from_a_bucket(archived, begun, opened, url):
    archived(7)
    reader, _ = begun()
    assert reader.replicate("latest") == 7
    bucket = torch_ros.bucket.open(url, reader.model)
    before = list(bucket.keys())
    handle = opened("another archiver", spot=True)
    archiver = Archiver(handle, bucket, keep=1)
    assert archiver.archive(lambda *_: None) is None
    assert archiver.behind() is None
    archiver.collect()
    assert list(bucket.keys()) == before
    with pytest.raises(errors.DeadlineExceeded):
        handle.archives.wait(bool, timeout_s=1)
    assert handle.wait(bool) == {7: {"reader"}}
    archiver.say()
    began_s = time.monotonic()
    reader.close(linger_s=20)
    assert time.monotonic() - began_s < 5  # it stays for no archiver


def test_kernels_end_before_the_bucket_is_read_and_before_anything_is_shown(
    archived, begun, monkeypatch
):
    archived(7)
    reader, _ = begun()
    mailbox, order = inside(reader).mailbox, []

    def told(what, was):
        def telling(*asked):
            order.append((what, bool(mailbox.word.mark)))
            return was(*asked)

        return telling

    for module, name in ((flow, "finish_kernels"), (stored, "fill_chunks")):
        monkeypatch.setattr(module, name, told(name, getattr(module, name)))
    assert reader.replicate("latest") == 7
    kernels = ("finish_kernels", False)
    assert order == [kernels, ("fill_chunks", False), kernels]
    assert mailbox.word.mark


def test_a_read_that_takes_too_long_ends_with_its_deadline_and_says_how_far_it_was(
    archived, begun, monkeypatch
):
    archived(7)
    reader, mine = begun()
    comes = threading.Event()
    get_ranges = objects.ObjectStore.get_ranges

    def stands_still(*asked):
        comes.wait(60)
        return get_ranges(*asked)

    monkeypatch.setattr(objects.ObjectStore, "get_ranges", stands_still)
    try:
        with pytest.raises(errors.DeadlineExceeded, match=f"0 of {4 * (COUNT + 3)} bytes"):
            reader.replicate("latest", timeout_s=A_WHILE_S)
        threads = set(threading.enumerate())
    finally:
        comes.set()
    for late in threads:
        if "bucket" in late.name:
            late.join(60)
    assert not mine["w"].any()
    assert reader.version is None


def test_the_run_of_what_comes_from_a_bucket_cannot_be_asked_for(opened, url, monkeypatch):
    with pytest.raises(errors.UsageError, match="run='bucket'"):
        opened("trainer", run="bucket")
    with pytest.raises(errors.UsageError, match="no store"):
        opened("trainer", bucket="nonsense://here")
    monkeypatch.setenv("TORCH_ROS_BUCKET", "nonsense://here")
    with pytest.raises(errors.UsageError, match="no store"):
        opened("trainer")


def test_etcd_is_asked_as_often_with_a_bucket_as_without_while_somebody_holds_something(
    opened, url, monkeypatch
):
    source = opened("source", zeros())
    source.publish(1)

    def asked(handle):
        handle.register(zeros())
        kv, requests, caller = inside(handle).group.kv, [], threading.get_ident()

        def counted(name, ask):
            def asking(*args, **options):
                if threading.get_ident() == caller:  # others renew the lease, and watch
                    requests.append(name)
                return ask(*args, **options)

            return asking

        for name in ("read", "commit", "wait"):
            monkeypatch.setattr(kv, name, counted(name, getattr(kv, name)))
        handle.replicate("latest")
        return requests

    assert asked(opened("with", bucket=url)) == asked(opened("without"))
