"""Streams of a version's tensors through two buffers: over memory, and over etcd with NIXL."""

import gc
import itertools
import sys
import threading
import time
from contextlib import suppress

import kit
import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import both_stores, inside, publisher, until

import torch_ros
from torch_ros import errors
from torch_ros.dcp import ROSWriter
from torch_ros.features.streams import filling
from torch_ros.features.streams import stream as streams
from torch_ros.memory.transport import MemoryTransfer
from torch_ros.shard.tally import tallies
from torch_ros.store.txn import Read
from torch_ros.transfer.batches import Preparation
from torch_ros.transfer.card import WORD_BYTES

endpoint = pytest.fixture(kit.store)  # in memory, where nothing else is said
ROW = 1024  # bytes of one of the tensors below


def rows(count, seed=1):
    made = torch.Generator().manual_seed(seed)
    return {f"w{n:02d}": torch.randn(ROW // 4, generator=made) for n in range(count)}


def readers(handle):
    """The reader records that are there now."""
    group = inside(handle).group
    return list(group.kv.read(Read((group.seat.keys.readers(),)), timeout_s=5).entries)


def streams_of(handle):
    return handle._streams._open


def is_over(handle):
    """Whether nothing of any stream is left."""
    return not streams_of(handle) and not readers(handle)


@pytest.fixture
def patient(monkeypatch):
    """A consumer that stands still is noticed soon."""
    monkeypatch.setattr(filling, "IDLE_S", 0.05)


# What comes out


@both_stores
def test_every_tensor_comes_whole_in_the_order_that_was_asked_for(opened):
    tensors = {
        **rows(9),
        "bf16": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "strided": torch.randn(8, 6).t(),
        "large": torch.randn(5 * ROW // 4),
    }
    publisher(opened, tensors)
    engine, fqns = opened("engine"), sorted(tensors, reverse=True)
    with engine.stream("latest", fqns, buffer_bytes=2 * ROW) as stream:
        assert stream.version == 1
        came = [fqn for fqn, tensor in stream if _same(tensor, tensors[fqn])]
    assert came == fqns
    until(lambda: is_over(engine))
    assert list(engine.stream(1, [], buffer_bytes=1)) == []
    assert [fqn for fqn, _ in engine.stream(1, ["empty", "scalar"], buffer_bytes=1)] == [
        "empty",
        "scalar",
    ]


def _same(tensor, other):
    assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    assert torch.equal(tensor, other)
    return True


def test_sharded_and_replicated_sources_are_put_together(opened, ranks, pool):
    whole = torch.randn(8, 6)
    trainers = ranks("trainer", 2)
    for rank, handle in enumerate(trainers):
        half = {(4 * rank, 0): whole[4 * rank : 4 * rank + 4].clone()}
        part = torch_ros.Chunked((8, 6), torch.float32, half)
        handle.register({"cut": part, "equal": torch.arange(5.0)})
    list(pool.map(lambda handle: handle.publish(1), trainers))
    got = dict(opened("engine").stream(1, ["equal", "cut"], buffer_bytes=1 << 20))
    assert _same(got["cut"], whole)
    assert _same(got["equal"], torch.arange(5.0))


def test_a_tensor_is_valid_until_its_buffer_ends_and_a_buffer_is_filled_while_one_is_used(opened):
    tensors = rows(8)
    publisher(opened, tensors)
    stream = opened("engine").stream(1, tensors, buffer_bytes=2 * ROW)
    here = []
    for count, (fqn, tensor) in enumerate(stream, start=1):
        here.append((fqn, tensor))
        assert stream.left_in_buffer == count % 2
        if not stream.left_in_buffer:
            # The next buffer has landed in other memory, and these are what they were.
            buffers = min(count // 2 + 1, 4)
            until(lambda buffers=buffers: stream._filling.landed >= buffers)
            for name, kept in here:
                assert _same(kept, tensors[name])
            here = []


def test_memory_is_two_buffers_and_a_larger_tensor_has_one_for_itself(opened):
    tensors = {**rows(6), "large": torch.randn(4 * ROW // 4)}
    publisher(opened, tensors)
    stream = opened("engine").stream(1, tensors_in("w", 6, "large"), buffer_bytes=2 * ROW)
    assert stream._filling._buffers.sizes == [2 * ROW, 4 * ROW]  # buffers 0 and 2, and 1 and 3
    assert len(list(stream)) == 7


def test_the_next_stream_finds_all_prepared_unless_a_tensor_of_the_last_one_is_kept(
    opened, monkeypatch
):
    tensors, prepared = rows(8), []
    trainer, engine = publisher(opened, tensors), opened("engine")
    batches = Preparation.batches

    def noted(self, *args):
        prepared.append(1)
        return batches(self, *args)

    monkeypatch.setattr(Preparation, "batches", noted)

    def publish(version):
        trainer.unpublish()
        for tensor in tensors.values():
            tensor.add_(1)
        trainer.publish(version)

    def places(version, rows=2):
        until(lambda: is_over(engine))
        del prepared[:]
        found = set()
        with engine.stream(version, tensors, buffer_bytes=rows * ROW) as stream:
            for fqn, tensor in stream:
                assert _same(tensor, tensors[fqn])
                found.add(tensor.data_ptr())
        return found

    first = places(1)
    assert (len(first), len(prepared)) == (4, 4)
    publish(2)
    assert places(2) == first
    assert not prepared
    next(engine.stream(2, tensors, buffer_bytes=2 * ROW))  # it stops in the middle
    gc.collect()
    publish(3)
    assert places(3) == first

    kept = dict(engine.stream(3, tensors, buffer_bytes=2 * ROW))
    expected = {fqn: tensor.clone() for fqn, tensor in tensors.items()}
    publish(4)
    assert places(4).isdisjoint(first)
    for fqn in list(tensors)[4:]:  # of the last two buffers
        assert _same(kept[fqn], expected[fqn])
    for size in (3, 2, 8):  # the same tensors, divided otherwise
        places(4, size)


def tensors_in(prefix, count, *others):
    return [f"{prefix}{n:02d}" for n in range(count)] + list(others)


# Beside the handle's other work


@pytest.mark.long
@both_stores
def test_a_stream_leaves_what_is_held_and_served_alone(opened):
    trainer, engine = publisher(opened, rows(6)), opened("engine")
    mine = {fqn: torch.zeros_like(tensor) for fqn, tensor in rows(6).items()}
    engine.register(mine)
    engine.replicate(1)
    word, shown = inside(engine).mailbox._word[0], inside(engine).mailbox.manifest
    stream = engine.stream(1, mine, buffer_bytes=ROW)
    next(stream)
    assert engine.version == 1
    assert inside(engine).mailbox._word[0] == word != 0
    assert inside(engine).mailbox.manifest is shown
    follower = opened("follower", {fqn: torch.zeros_like(tensor) for fqn, tensor in mine.items()})
    assert follower.replicate(1) == 1
    engine.unpublish()  # in the middle of the stream
    trainer.unpublish()
    trainer.publish(2)
    engine.update("latest")
    assert engine.version == 2
    assert len(list(stream)) == 5  # on from the follower, where it has to
    assert engine.version == 2


def test_several_streams_of_one_handle_do_not_disturb_each_other(opened, pool):
    tensors = rows(12)
    publisher(opened, tensors)
    engine = opened("engine")
    streams = [engine.stream(1, tensors, buffer_bytes=size * ROW) for size in (1, 3, 5)]

    def consume(stream):
        return [fqn for fqn, tensor in stream if _same(tensor, tensors[fqn])]

    assert list(pool.map(consume, streams)) == [list(tensors)] * 3
    until(lambda: is_over(engine))


def test_the_ranks_of_a_group_stream_different_names_of_the_same_version(opened, ranks, pool):
    trainer = publisher(opened, rows(6))
    engines = ranks("engine")

    def stream(engine, names):
        return engine.stream("latest", names, buffer_bytes=ROW)

    for version in range(2, 5):
        trainer.unpublish()
        published = pool.submit(trainer.publish, version)
        streams = list(pool.map(stream, engines, [tensors_in("w", 3), ["w05"]]))
        published.result()
        assert len({stream.version for stream in streams}) == 1
        assert [len(list(stream)) for stream in streams] == [3, 1]
    assert [len(inside(e).group.ledger.ended) for e in engines] == [3, 3]


def test_bad_arguments_of_one_rank_are_no_business_of_the_others(opened, ranks, pool):
    publisher(opened, rows(3))
    engines = ranks("engine")

    def stream(rank, fqns):
        if rank:
            with pytest.raises(errors.UsageError, match="twice"):
                engines[rank].stream(1, fqns, buffer_bytes=1)
        else:
            assert len(list(engines[rank].stream(1, fqns, buffer_bytes=1))) == 1

    list(pool.map(stream, range(2), [["w00"], ["w00", "w00"]]))
    streams = pool.map(lambda e: e.stream(1, ["w01"], buffer_bytes=1), engines)
    assert [len(list(stream)) for stream in streams] == [1, 1]
    for bad in ({"fqns": "w00"}, {"buffer_bytes": 0}):
        options = {"fqns": ["w00"], "buffer_bytes": 1, **bad}
        with pytest.raises(errors.UsageError):
            opened("alone").stream(1, options["fqns"], buffer_bytes=options["buffer_bytes"])
    assert is_over(engines[0])


def test_a_name_that_is_no_tensor_of_the_version_is_refused_at_once(opened):
    trainer = opened("trainer")
    writer = ROSWriter(1, handle=trainer)
    dcp.save({"w": torch.ones(3), "step": 7}, storage_writer=writer, no_dist=True)
    engine = opened("engine")
    for fqn in ("v", "step"):
        with pytest.raises(errors.ManifestMismatch, match=fqn):
            engine.stream(1, ["w", fqn], buffer_bytes=64)
    with pytest.raises(errors.DeadlineExceeded):
        engine.stream(2, ["w"], buffer_bytes=64, timeout_s=0.2)
    with pytest.raises(errors.VersionNotFound, match="no replica but this one"):
        trainer.stream(1, ["w"], buffer_bytes=64)
    until(lambda: is_over(engine))


# Consumers that stand still


def test_a_source_that_has_the_version_again_by_another_call_is_looked_at_anew(opened, patient):
    tensors = rows(8)
    trainer, source = publisher(opened, tensors), opened("source")
    places = [{fqn: torch.zeros(ROW // 4) for fqn in tensors} for _ in range(2)]
    source.register(places[0])
    source.replicate(1)
    trainer.unpublish()
    engine = opened("engine")
    stream = engine.stream(1, tensors, buffer_bytes=ROW)
    came = [next(stream)]
    until(lambda: not readers(engine))
    spare = opened("spare", {fqn: torch.zeros(ROW // 4) for fqn in tensors})
    spare.replicate(1)
    source.unpublish()
    source.unregister()
    for place in places[0].values():
        place.fill_(-1)
    source.register(places[1])
    source.replicate(1)  # the same content, elsewhere
    spare.unpublish()
    came += [(fqn, tensor.clone()) for fqn, tensor in stream]
    for fqn, tensor in came[1:]:
        assert _same(tensor, tensors[fqn])
    assert len(came) == len(tensors)


@pytest.mark.long
@both_stores
def test_time_in_which_the_consumer_does_other_things_is_no_waiting(opened):
    tensors = rows(6)
    publisher(opened, tensors)
    stream = opened("engine").stream(1, tensors, buffer_bytes=ROW, timeout_s=2.0)
    next(stream)
    threading.Event().wait(2.5)
    assert len(list(stream)) == 5


# Ends


@pytest.mark.long
@both_stores
def test_a_stream_that_is_dropped_closed_or_left_leaves_nothing(opened):
    tensors = rows(9)
    trainer, engine = publisher(opened, tensors), opened("engine")

    def stream():
        return engine.stream(1, tensors, buffer_bytes=ROW)

    next(stream())  # nobody refers to it any more
    gc.collect()
    until(lambda: is_over(engine))

    def fail():
        for _ in stream():
            raise KeyError("of the consumer")

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    until(lambda: is_over(engine))

    closed = stream()
    fqn, tensor = next(closed)
    closed.close()
    closed.close()
    assert is_over(engine)
    assert list(closed) == []
    assert _same(tensor, tensors[fqn])

    with stream() as left:
        next(left)
    assert is_over(engine)
    began_s = time.monotonic()
    trainer.unpublish()
    assert time.monotonic() - began_s < 5


@both_stores
def test_closing_the_handle_ends_its_streams(opened):
    tensors = rows(9)
    trainer, engine = publisher(opened, tensors), opened("engine")
    streams = [engine.stream(1, tensors, buffer_bytes=ROW) for _ in range(2)]
    fqn, tensor = next(streams[0])
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < 5
    assert not readers(trainer)
    assert not streams_of(engine)
    assert _same(tensor, tensors[fqn])
    with pytest.raises(errors.ClosedError):
        next(streams[0])
    streams[0].close()
    streams[1].close()
    assert list(streams[0]) == []


def test_a_stream_that_is_closed_waits_for_no_word_of_a_mute_source(opened, monkeypatch):
    tensors = rows(5)
    publisher(opened, tensors)
    stream, is_done = opened("engine").stream(1, tensors, buffer_bytes=ROW), MemoryTransfer.is_done
    until(lambda: stream._filling.landed == 2)
    mute, asked = threading.Event(), threading.Event()

    def answers(self):
        is_word = self.size_bytes == WORD_BYTES
        asked.set() if is_word else None
        return is_done(self) and not (is_word and mute.is_set())

    monkeypatch.setattr(MemoryTransfer, "is_done", answers)
    mute.set()
    next(stream)
    next(stream)  # the third buffer is filled from here on
    assert asked.wait(10)
    stream.close()
    assert stream._filling.over.is_set()
    (mailbox,) = stream._filling._lane.reading.peers._mailboxes.values()
    assert mailbox.is_late  # into memory that nothing else uses
    mute.clear()


def test_ctrl_c_while_a_buffer_is_awaited_costs_nothing(opened, monkeypatch):
    tensors = rows(4)
    publisher(opened, tensors)
    engine = opened("engine")
    stream = engine.stream(1, tensors, buffer_bytes=ROW)
    latch, interrupted = filling.Latch.wait, []

    def interrupt(self, timeout_s):
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return latch(self, timeout_s)

    held, post = threading.Event(), MemoryTransfer.post

    def slow_post(self):
        held.wait(5)
        post(self)

    came = [next(stream)[0], next(stream)[0]]
    monkeypatch.setattr(MemoryTransfer, "post", slow_post)
    monkeypatch.setattr(filling.Latch, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        while True:
            came.append(next(stream)[0])
    held.set()
    came += [fqn for fqn, _ in stream]
    assert came == list(tensors)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_ctrl_c_at_any_line_of_the_consumer_costs_nothing(opened, patient, monkeypatch):
    monkeypatch.setattr(filling, "LOOK_S", 0.05)
    tensors = rows(5)
    publisher(opened, tensors)
    engine = opened("engine")
    line = 1
    while struck(lambda: consume(engine, tensors), line):
        until(lambda: is_over(engine))
        line += 1
    assert line > 50
    until(lambda: not any("streams" in each.name for each in threading.enumerate()))


def consume(engine, tensors):
    came = []
    stream = engine.stream(1, tensors, buffer_bytes=2 * ROW)
    for _ in range(2):  # on after Ctrl-C
        with suppress(KeyboardInterrupt):
            for fqn, _ in stream:
                came.append(fqn)
    assert came == list(tensors)


def struck(call, at_line):
    """Whether a Ctrl-C came in `call`, at that line of those of this thread's part in streams."""
    lines = itertools.count(1)

    def trace(frame, event, _):
        if frame.f_code.co_filename not in {streams.__file__, filling.__file__}:
            return None
        if event == "line" and next(lines) == at_line:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(None)
    return next(lines) > at_line


def test_a_handle_that_closes_beside_a_stream_that_begins_leaves_none(opened, monkeypatch):
    tensors = rows(5)
    publisher(opened, tensors)
    engine, beside = opened("engine"), streams.Filling

    def closing(shard, *args):
        shard.is_closed = True
        engine._streams.closes()
        return beside(shard, *args)

    monkeypatch.setattr(streams, "Filling", closing)
    with pytest.raises(errors.ClosedError):
        engine.stream(1, tensors, buffer_bytes=ROW)
    assert not streams_of(engine)
    inside(engine).is_closed = False


def test_a_reading_that_another_stream_takes_first_is_not_missed(opened):
    tensors = rows(5)
    publisher(opened, tensors)
    engine = opened("engine")

    class Taken(list):
        def pop(self, *_):
            self.clear()
            return super().pop()

    engine._streams._spare = Taken([None])
    assert len(list(engine.stream(1, tensors, buffer_bytes=ROW))) == 5
    until(lambda: is_over(engine))
    engine._streams._spare = list(engine._streams._spare)


# Sources that fail


def test_what_is_not_what_was_published_is_read_elsewhere_or_refused(opened):
    tensors = rows(4)
    trainer = publisher(opened, tensors, digests="full")
    good = opened("good", digests="full")
    good.register({fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()})
    good.replicate(1)
    tensors["w01"][3] += 1  # while it is published
    for depth in ("full", "sampled"):
        got = dict(opened(digests=depth).stream(1, tensors, buffer_bytes=1 << 20))
        assert not torch.equal(got["w01"], tensors["w01"])
    good.close()
    with pytest.raises(errors.CorruptWeights, match="w01"):
        dict(opened(digests="full").stream(1, tensors, buffer_bytes=ROW))
    assert dict(opened("trusts").stream(1, tensors, buffer_bytes=ROW)).keys() == tensors.keys()
    assert trainer.version == 1


def test_a_mute_source_is_not_left_for_one_that_has_failed_before(opened):
    tensors = rows(5)
    holders = [publisher(opened, tensors), opened("other")]
    holders[1].register({fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()})
    holders[1].replicate(1)
    stream = opened("engine").stream(1, tensors, buffer_bytes=ROW)
    until(lambda: stream._filling.landed == 2)
    (source, supply), tried = stream._filling._at, stream._filling._sources.tried
    assert supply.feed.source.has_other(5.0)
    tried.update(inside(handle).group.seat.inst for handle in holders)
    tried[source.inst] = 0
    assert not supply.feed.source.has_other(5.0)


def test_digests_of_the_first_source_hold_for_those_that_have_none(opened):
    tensors = rows(5)
    trainer, other = publisher(opened, tensors, digests="full"), opened("other")
    stream = opened("engine", digests="full").stream(1, tensors, buffer_bytes=ROW)
    wrong = {fqn: tensor.clone() for fqn, tensor in tensors.items()}
    wrong["w03"][0] += 1
    other.register(wrong)
    other.publish(1)
    until(lambda: stream._filling.landed == 2)
    trainer.close()
    came = []

    def consume():
        for fqn, tensor in stream:
            assert _same(tensor, tensors[fqn])
            came.append(fqn)

    with pytest.raises(errors.CorruptWeights, match="w03"):
        consume()
    assert came == ["w00", "w01", "w02"]
    [tally] = [
        tally for whose, tally in tallies.all().items() if whose[:2] == (trainer.model, "engine")
    ]
    assert (tally.corrupt, tally.reroutes) == (2, 2)  # the trainer was lost, then other's bytes


def test_a_lease_of_a_stream_that_ends_costs_one_request_more(opened):
    tensors = rows(6)
    publisher(opened, tensors)
    engine = opened("engine")
    stream = engine.stream(1, tensors, buffer_bytes=ROW)
    next(stream)
    session = stream._filling._sources._session
    inside(engine).group.kv.revoke(session.lease_id, timeout_s=5)
    until(lambda: not session.is_valid())
    assert len(list(stream)) == 5
    until(lambda: is_over(engine))
