"""Reading a version, or a part of it, and serving none: over memory, and over etcd with NIXL."""

import threading
from dataclasses import replace

import kit
import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import both_stores, inside, read_only

import torch_ros
from torch_ros.dcp import ROSWriter
from torch_ros.errors import (
    ContentChanged,
    DeadlineExceeded,
    ManifestMismatch,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.features.reading.reads import Given
from torch_ros.shard.checkpoint import LoadRequest
from torch_ros.shard.seams import Feature
from torch_ros.shard.verification import Verification

endpoint = pytest.fixture(kit.store)  # in memory, where nothing else is said


def content(seed=1):
    made = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(6, 4, generator=made),
        "b": torch.randn(7, generator=made).to(torch.bfloat16),
        "steps": torch.tensor(seed),
        "none": torch.empty(0, 3),
    }


def publisher(opened, version=1, name="trainer", tensors=None):
    handle = opened(name, content(version) if tensors is None else tensors)
    handle.publish(version)
    return handle


def zeros(*names):
    everything = content()
    return {fqn: torch.zeros_like(everything[fqn]) for fqn in names or everything}


def word(handle):
    return int(inside(handle).mailbox._word[0])


@both_stores
def test_contents_tell_every_name_with_its_dtype_and_shape(opened):
    publisher(opened)
    found = opened("engine").contents()
    assert found.version == 1
    assert found.objects == ()
    assert list(found.tensors) == sorted(content())
    for fqn, tensor in content().items():
        assert found.tensors[fqn] == (tensor.dtype, tensor.shape)


def test_contents_are_of_all_ranks_and_tell_objects_apart(opened, ranks, pool):
    first, second = ranks("trainer")
    for handle, fqn in ((first, "a"), (second, "b")):
        handle.register({fqn: torch.ones(3)})
    list(pool.map(lambda handle: handle.publish(1), (first, second)))
    assert list(opened("engine").contents(1).tensors) == ["a", "b"]

    other = opened("other", run="new")
    writer = ROSWriter(5, handle=other)
    dcp.save({"model": {"w": torch.ones(2)}, "step": 7}, storage_writer=writer, no_dist=True)
    found = opened("engine").contents("latest")
    tensors = {"model.w": (torch.float32, torch.Size([2]))}
    assert found.uid
    assert found == torch_ros.Contents(5, tensors, ("step",), other.run, found.uid)


def test_contents_wait_for_a_version_and_say_when_it_is_gone(opened):
    engine = opened("engine")
    with pytest.raises(DeadlineExceeded, match="none is available yet"):
        engine.contents(timeout_s=0.2)
    trainer = publisher(opened)
    trainer.unpublish()
    trainer.publish(2)
    with pytest.raises(VersionNotFound):
        engine.contents(1)
    assert engine.contents("latest").version == 2


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("get", ["replicate", "stream"])
def test_latest_is_the_newest_though_an_older_one_was_seen_before(opened, ranks, pool, get, count):
    publisher(opened, 1, "first", content(1))
    engines = ranks("engine", count)
    assert engines[0].contents("latest").version == 1
    with pytest.raises(ManifestMismatch):
        given = Given(inside(engines[0]).tensors, {"v": torch.ones(1)})
        engines[0].checkpoints.check(LoadRequest(1, None, given))
    publisher(opened, 2, "second", content(1))
    into = [zeros() for _ in engines]

    def come(rank):
        if get == "stream":
            return engines[rank].stream("latest", ["w"], buffer_bytes=64).version
        engines[rank].register(into[rank])
        return engines[rank].replicate("latest")

    assert list(pool.map(come, range(count))) == [2] * count


@both_stores
def test_a_read_brings_a_whole_version_or_a_part_and_serves_nothing(opened):
    trainer, engine = publisher(opened), opened("engine")
    for names in ((), ("w", "steps"), ("none",)):
        into = zeros(*names)
        report = engine.read("latest", into)
        assert report is engine.last_read
        assert (report.version, report.source) == (1, "trainer")
        assert report.bytes_total == sum(tensor.nbytes for tensor in into.values())
        for fqn, tensor in into.items():
            assert torch.equal(tensor, content()[fqn])
        assert engine.version is None
        assert word(engine) == 0
        assert engine.list() == {1: {trainer.replica}}


@pytest.mark.parametrize("before", ["read", "register"])
def test_a_read_into_the_same_tensors_looks_at_their_places_only(opened, before):
    trainer, engine, into = publisher(opened), opened("engine"), zeros()
    boxes = {(0, 0): torch.zeros(2, 4), (2, 0): torch.zeros(4, 4)}
    into["w"] = torch_ros.Chunked((6, 4), torch.float32, boxes)
    if before == "read":
        engine.read(1, into)
    else:
        engine.register(into)
    registered = inside(engine).tensors.registered
    trainer.publish_copy(2, content(2))
    engine.read(2, dict(into))
    assert inside(engine).tensors.registered is registered
    assert torch.equal(torch.cat(list(boxes.values())), content(2)["w"])
    engine.serve()


@pytest.mark.parametrize("way", ["moved", "a box moved", "turned", "another", "by other names"])
def test_a_read_into_other_places_than_before_finds_them(opened, way):
    made = {"w": torch.arange(16.0).view(4, 4), "v": torch.ones(4, 4)}
    publisher(opened, tensors=made)
    engine = opened("engine")
    box = torch.zeros(4, 4)
    into = {"w": torch_ros.Chunked((4, 4), box.dtype, {(0, 0): box}), "v": torch.zeros(4, 4)}
    engine.read(1, into)
    box.zero_()
    if way == "moved":
        into["v"].data = torch.zeros(4, 4)
    elif way == "a box moved":
        box.data = torch.zeros(4, 4)
    elif way == "turned":
        box.data = box.data.t()
    elif way == "another":
        into["v"] = torch.zeros(4, 4)
    else:
        into = {"w": into["v"], "v": into["w"]}
    engine.read(1, into)
    found = {fqn: box if type(one) is torch_ros.Chunked else one for fqn, one in into.items()}
    assert all(torch.equal(found[fqn], one) for fqn, one in made.items())


def test_a_tensor_that_has_another_dtype_since_the_last_read_is_refused(opened):
    publisher(opened)
    engine, into = opened("engine"), zeros("w")
    engine.read(1, into)
    into["w"].data = into["w"].data.view(torch.int32)
    with pytest.raises(ManifestMismatch, match="int32"):
        engine.read(1, into)


@pytest.mark.parametrize(
    ("into", "found"),
    [
        ({"w": torch.zeros(6, 5)}, "6, 5"),
        ({"w": torch.zeros(6, 4, dtype=torch.float64)}, "float64"),
        ({"w2": torch.zeros(6, 4)}, "w2"),
        ({"w": torch.zeros(1, 4).expand(6, 4)}, "share memory"),
        ({"w": "no tensor"}, "str"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_given_up(opened, into, found):
    trainer = publisher(opened)
    engine = opened("engine", zeros())
    engine.replicate(1)
    trainer.unpublish()
    trainer.publish(2)
    with pytest.raises(UsageError, match=found):
        engine.read(2, into)
    assert engine.version == 1
    assert engine.list() == {1: {"engine"}, 2: {"trainer"}}


def test_a_version_that_only_this_replica_has_is_not_given_up_to_read_it(opened):
    trainer = publisher(opened)
    with pytest.raises(UsageError, match="the only one that holds version 1"):
        trainer.read("latest", zeros())
    assert trainer.version == 1


def test_an_error_on_one_rank_refuses_the_read_on_all_and_the_next_one_works(opened, ranks, pool):
    publisher(opened)
    engines = ranks("engine")
    for handle in engines:
        handle.register(zeros())
    list(pool.map(lambda handle: handle.replicate(1), engines))

    def read(rank, into):
        try:
            return engines[rank].read("latest", into)
        except TorchRosError as error:
            return error

    bad = [zeros("w"), {"w": torch.zeros(5)}]
    errors = list(pool.map(read, range(2), bad))
    assert [type(error) for error in errors] == [ManifestMismatch] * 2
    assert [handle.version for handle in engines] == [1, 1]

    good = [zeros("w"), zeros("b")]
    reports = list(pool.map(read, range(2), good))
    assert [report.version for report in reports] == [1, 1]
    assert torch.equal(good[0]["w"], content()["w"])
    assert torch.equal(good[1]["b"], content()["b"])
    assert [handle.version for handle in engines] == [None, None]


@both_stores
def test_memory_that_may_only_be_read_is_published_and_not_read_into(opened, tmp_path):
    bad = zeros("b") | {"w": read_only(tmp_path / "w", 6, 4)}
    publisher(opened, tensors=bad)
    reader, good = opened("reader"), {fqn: torch.ones_like(bad[fqn]) for fqn in bad}
    reader.register(good)
    reader.replicate(1)
    assert not any(tensor.any() for tensor in good.values())

    other = opened("other", bad)
    with pytest.raises(UsageError, match="replicate: tensor 'w' lies in memory that this process"):
        other.replicate(1)
    with pytest.raises(UsageError, match="read 1: tensor 'w' lies in memory that this process"):
        reader.read(1, bad)
    assert (reader.version, other.version) == (1, None)


def test_memory_of_one_rank_that_may_only_be_read_ends_the_call_on_all(
    opened, ranks, pool, tmp_path
):
    publisher(opened)
    engines = ranks("engine")
    targets = [zeros(), zeros() | {"w": read_only(tmp_path / "w", 6, 4)}]
    for handle, tensors in zip(engines, targets, strict=True):
        handle.register(tensors)

    def replicate(handle):
        with pytest.raises(TorchRosError, match="tensor 'w' lies in memory"):
            handle.replicate(1)

    list(pool.map(replicate, engines))
    assert [handle.version for handle in engines] == [None, None]


def test_all_ranks_read_the_same_version_whatever_each_saw_first(opened, ranks, pool):
    trainer = publisher(opened)
    engines, into = ranks("engine"), [zeros("steps"), zeros("steps")]
    for version in range(2, 6):
        trainer.unpublish()
        moved = pool.submit(trainer.publish, version)
        reports = list(pool.map(lambda n: engines[n].read("latest", into[n]), range(2)))
        moved.result()
        assert len({report.version for report in reports}) == 1


def test_parts_that_overlap_are_not_taken_for_the_whole_where_digests_are_compared(
    opened, ranks, pool
):
    whole = torch.arange(16.0).reshape(4, 4)
    trainer = opened("trainer", {"w": whole}, digests="full")
    trainer.publish(1)
    engines, rows = ranks("engine", digests="full"), [torch.zeros(2, 4), torch.zeros(2, 4)]

    def read(rank):  # as many elements as there are, but one row twice, and the first not
        box = {(2 - rank, 0): rows[rank]}
        return engines[rank].read(1, {"w": torch_ros.Chunked((4, 4), torch.float32, box)}).version

    assert list(pool.map(read, range(2))) == [1, 1]
    assert torch.equal(rows[0], whole[2:])
    assert torch.equal(rows[1], whole[1:3])


@both_stores
def test_a_second_read_into_the_same_tensors_registers_nothing(opened):
    trainer, engine, into = publisher(opened), opened("engine"), zeros()
    engine.read(1, into)
    before = inside(engine).mailbox._tensors
    trainer.unpublish()
    trainer.publish(2)
    engine.read(2, into)
    assert inside(engine).mailbox._tensors is before is not None
    engine.unregister()
    assert inside(engine).mailbox._tensors is None


def test_a_read_that_fails_holds_nothing_and_forgets_the_tensors(opened):
    trainer, engine = publisher(opened), opened("engine")
    with pytest.raises(DeadlineExceeded):
        engine.read(2, zeros(), timeout_s=0.2)
    assert inside(engine).tensors.registered is None
    engine.register(zeros())
    assert engine.replicate(1) == 1
    assert trainer.version == 1


# serve


def reader(opened, name="engine", names=(), **options):
    engine, into = opened(name, **options), zeros(*names)
    engine.read("latest", into)
    return engine, into


def refused_to_serve(engine, error, match=""):
    with pytest.raises(error, match=match):
        engine.serve()
    assert engine.version is None
    assert word(engine) == 0
    assert engine.replica not in engine.list().get(1, ())


@both_stores
def test_what_was_read_is_served_where_it_lies_until_it_is_unpublished(opened):
    trainer = publisher(opened)
    engine, into = reader(opened)
    assert engine.serve() == 1 == engine.version
    assert engine.list() == {1: {"trainer", "engine"}}
    trainer.close()
    follower, got = reader(opened, "follower")
    assert follower.last_read.source == "engine"
    assert torch.equal(got["w"], content()["w"])
    engine.unpublish()
    assert word(engine) == 0
    into["w"].zero_()
    assert engine.list() == {}


def test_a_version_that_nobody_holds_any_more_is_there_again_when_it_is_served(opened):
    trainer = publisher(opened)
    engine, _ = reader(opened)
    trainer.unpublish()
    assert engine.list() == {}
    engine.serve()
    follower = opened("follower", zeros())
    assert follower.replicate(1) == 1


def test_there_is_nothing_to_serve_unless_it_was_read_and_nothing_has_come_since(opened):
    trainer = publisher(opened)
    engine = opened("engine")
    refused_to_serve(engine, UsageError, "nothing was read")
    engine.read(1, zeros())
    engine.unregister()
    refused_to_serve(engine, UsageError, "nothing was read")
    engine.register(zeros())
    refused_to_serve(engine, UsageError, "nothing was read")
    engine.replicate(1)
    with pytest.raises(UsageError, match="nothing was read"):
        engine.serve()
    engine.read(1, zeros())
    engine.serve()
    with pytest.raises(UsageError, match="nothing was read"):  # a second time
        engine.serve()
    assert engine.version == 1
    engine.unpublish()
    refused_to_serve(engine, UsageError, "nothing was read")
    engine.read(1, zeros())
    with pytest.raises(ManifestMismatch):  # refused before anything has changed
        engine.read(1, {"w": torch.zeros(1)})
    engine.serve()
    assert trainer.list() == {1: {"trainer", "engine"}}


class Interrupted(BaseException):
    """Ctrl-C."""


class InterruptsEnds(Feature):
    def read_ends(self, ref, call):
        raise Interrupted


def test_a_read_that_was_interrupted_when_all_had_come_can_be_served(opened):
    publisher(opened)
    engine, interrupts = opened("engine"), InterruptsEnds()
    inside(engine).attach(interrupts)
    with pytest.raises(Interrupted):
        engine.read(1, zeros())
    inside(engine).features.remove(interrupts)
    assert engine.serve() == 1


def test_a_load_of_tensors_that_were_checked_before_is_planned_for_what_it_finds(opened):
    """Without the version that they were checked for: it may be another one by now."""
    publisher(opened)
    engine, planned = opened("engine"), []

    class Noting(Given):
        def fill(self, layouts):
            planned.append(layouts)
            return super().fill(layouts)

    into = Noting(inside(engine).tensors, zeros())
    request = LoadRequest(1, None, into)
    target = engine.checkpoints.check(request)
    planned.clear()
    engine.checkpoints.load(replace(request, target=target))
    assert len(planned) == 1
    assert engine.version == 1


def test_a_part_is_not_served_and_what_it_lacks_is_named(opened):
    publisher(opened)
    engine, _ = reader(opened, names=["w", "b"])
    lacking = ", ".join(map(repr, sorted(content().keys() - {"w", "b"})))
    refused_to_serve(engine, ManifestMismatch, f"found {lacking} that no .* is not served")


def test_a_part_of_a_tensor_is_not_served(opened):
    publisher(opened, tensors={"w": torch.ones(4, 4)})
    engine = opened("engine")
    half = torch_ros.Chunked((4, 4), torch.float32, {(0, 0): torch.zeros(2, 4)})
    engine.read(1, {"w": half})
    refused_to_serve(engine, ManifestMismatch, "every element")


@pytest.mark.parametrize("depth", ["sampled", "full"])
@pytest.mark.parametrize(("theirs", "ours"), [(True, True), (True, False), (False, True)])
def test_what_was_written_to_is_not_served_where_anybody_has_digests(opened, depth, theirs, ours):
    trainer = opened("trainer", content(), digests=depth if theirs else "off")
    trainer.publish(1)
    engine, into = reader(opened, digests=depth if ours else "off")
    into["w"].neg_()
    refused_to_serve(engine, ContentChanged, "'w'")
    into["w"].neg_()
    assert engine.serve() == 1
    _, got = reader(opened, "follower", digests=depth)
    assert torch.equal(got["w"], content()["w"])


def test_a_version_that_is_gone_or_was_published_anew_is_not_served(opened):
    trainer = publisher(opened)
    engine, _ = reader(opened)
    trainer.unpublish()
    trainer.publish(1)  # nobody holds it: another content, for all that anybody knows
    refused_to_serve(engine, VersionNotFound, "published anew")
    engine.read(1, zeros())
    trainer.unpublish()
    trainer.publish(2)
    refused_to_serve(engine, VersionNotFound, "gone")


def test_ranks_serve_together_or_not_at_all(opened, ranks, pool):
    trainer = opened("trainer", content(), digests="full")
    trainer.publish(1)
    engines, into = ranks("engine"), [zeros("w", "steps"), zeros("b", "none")]

    def serve(engine):
        try:
            return engine.serve(timeout_s=10)
        except TorchRosError as error:
            return type(error)

    def read(rank):
        return engines[rank].read("latest", into[rank])

    list(pool.map(read, range(2)))
    into[1]["b"].zero_()
    assert list(pool.map(serve, engines)) == [ContentChanged] * 2
    assert trainer.list() == {1: {"trainer"}}
    list(pool.map(read, range(2)))
    engines[1].unregister()
    assert list(pool.map(serve, engines)) == [UsageError] * 2
    list(pool.map(read, range(2)))
    assert list(pool.map(serve, engines)) == [1, 1]
    trainer.close()
    follower, got = reader(opened, "follower", digests="full")
    assert follower.last_read.source == "engine"
    assert torch.equal(got["b"], content()["b"])


def test_ranks_that_read_different_versions_serve_neither(opened, ranks, pool):
    publisher(opened)
    engines = ranks("engine")
    list(pool.map(lambda engine: engine.read(1, zeros()), engines))
    brought = inside(engines[1]).tensors.brought
    other = replace(brought, ref=msgspec.structs.replace(brought.ref, uid="f" * 16))
    inside(engines[1]).tensors.brought = other

    def serve(engine):
        with pytest.raises(TorchRosError) as error:
            engine.serve(timeout_s=10)
        return str(error.value)

    said = list(pool.map(serve, engines))
    assert any("make the same reads" in text or "published anew" in text for text in said), said
    assert [engine.version for engine in engines] == [None, None]


def test_what_a_reader_of_a_relay_lacks_is_named(opened, pool, monkeypatch):
    begun, come, expect = threading.Event(), threading.Event(), Verification.expect

    def relays(_done, _total):
        begun.set()
        assert come.wait(20)

    def expects(self, feed, source):
        expect(self, feed, source)
        if not source.is_full:
            come.set()

    monkeypatch.setattr(Verification, "expect", expects)
    publisher(opened)
    relay, lacking = opened("relay", on_progress=relays), opened("lacking")
    relay.register(zeros())
    lacking.register(zeros("w", "b"))
    first = pool.submit(relay.replicate)
    assert begun.wait(20)
    with pytest.raises(ManifestMismatch, match="found 'none', 'steps' that no rank"):
        lacking.replicate()
    assert first.result(20) == 1
