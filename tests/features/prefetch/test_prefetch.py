"""Deltas that are staged before an update: real publishers and readers."""
# needs features deltas

import asyncio
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from random import Random

import prometheus_client
import pytest
import torch
from features.deltas import changing
from features.deltas.changing import (
    FAR,
    assert_same,
    being_made,
    first,
    looks,
    publish,
    step,
    weights,
    write_astray,
)
from kit import inside

import torch_ros
from torch_ros.errors import ClosedError, DeadlineExceeded, SourceLost, UsageError, VersionNotFound
from torch_ros.features.deltas import side_room
from torch_ros.features.deltas.reading import DeltaRead
from torch_ros.features.prefetch import flow
from torch_ros.metrics import HandleCollector

options = pytest.fixture(changing.options)
pair = pytest.fixture(changing.pair)


def changed(trainer, rollout):
    """A trainer that has published 1 after 0, which the rollout holds."""
    tensors, found = first(trainer, rollout)
    step(tensors, 1)
    publish(trainer, 1, tensors)
    return tensors, found


@pytest.fixture
def no_delta_is_read(monkeypatch):
    """From when it is called."""

    def refuse():
        for name in ("find", "stage"):
            monkeypatch.setattr(DeltaRead, name, lambda *_, **__: pytest.fail("a delta is read"))

    return refuse


def test_an_update_applies_what_was_prefetched_and_reads_no_delta(pair, no_delta_is_read):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    before = {name: tensor.clone() for name, tensor in found.items()}
    assert rollout.prefetch() == 1
    assert rollout.version == 0
    assert_same(found, before)
    no_delta_is_read()
    assert rollout.prefetch("latest") == 1  # it is here
    assert rollout.update() is True
    read = rollout.last_read
    assert (read.via, read.base, read.links, read.prefetched) == ("delta", 0, 1, True)
    assert 0 < read.bytes_read == sum(read.ways.values()) < read.bytes_total / 10
    assert_same(found, tensors)
    assert rollout.prefetch() is None
    assert inside(rollout).observed.staged["prefetched"]() == 0


def test_collectors_are_told_how_versions_came(pair):
    trainer, rollout = pair
    tensors, _ = first(trainer, rollout)
    read = [rollout.last_read.bytes_read]
    for version in (1, 2):
        step(tensors, version)
        publish(trainer, version, tensors)
        if version == 2:
            assert [rollout.prefetch(), rollout.prefetch()] == [2, 2]
        rollout.update()
        read.append(rollout.last_read.bytes_read)
    rollout.prefetch()
    with pytest.raises(VersionNotFound):
        rollout.prefetch(1)
    registry = prometheus_client.CollectorRegistry()
    registry.register(HandleCollector())
    labels = inside(rollout).observed.tally.whose._asdict()

    def figures(name, label, *values):
        value = registry.get_sample_value
        return [value(f"torch_ros_{name}_total", {**labels, label: each}) for each in values]

    via = "full", "delta", "prefetched"
    assert figures("reads_via", "via", *via) == [1, 1, 1]
    assert figures("read_via_bytes", "via", *via) == read
    assert figures("prefetches", "outcome", "staged", "nothing", "VersionNotFound") == [2, 1, 1]


def test_what_leads_to_another_version_is_dropped(pair):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    assert rollout.prefetch() == 1
    step(tensors, 2)
    publish(trainer, 2, tensors)
    assert rollout.update() is True
    read = rollout.last_read
    assert (read.version, read.via, read.links, read.prefetched) == (2, "delta", 2, False)
    assert rollout._prefetching.ahead.kept is None
    assert_same(found, tensors)


def test_the_newest_prefetch_counts(pair):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    assert rollout.prefetch() == 1
    step(tensors, 2)
    publish(trainer, 2, tensors)
    assert rollout.prefetch() == 2
    rollout.update()
    assert (rollout.last_read.links, rollout.last_read.prefetched) == (2, True)
    assert_same(found, tensors)


def test_what_was_prefetched_is_applied_when_its_publisher_has_gone(pair, options):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    assert rollout.prefetch() == 1
    with torch_ros.open(rollout.model, **options) as other:
        other.register({name: torch.empty_like(tensor) for name, tensor in tensors.items()})
        other.replicate()
        trainer.unpublish()
        assert rollout.update() is True
    assert rollout.last_read.prefetched
    assert_same(found, tensors)


@pytest.mark.parametrize("call", ["unpublish", "read again"])
def test_what_leads_from_what_is_not_held_any_more_is_dropped(pair, call):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    assert rollout.prefetch() == 1
    rollout.unpublish()
    assert rollout.prefetch() is None
    if call == "read again":
        found["w"].zero_()
    rollout.update()
    assert (rollout.last_read.via, rollout.last_read.prefetched) == ("full", False)
    assert_same(found, tensors)


@pytest.mark.parametrize("call", ["unpublish", "publish_copy"])
def test_what_was_prefetched_goes_where_its_base_is_given_up_also_if_that_fails(
    pair, monkeypatch, call
):
    trainer, rollout = pair
    tensors, _ = changed(trainer, rollout)
    assert rollout.prefetch() == 1
    if call == "publish_copy":
        rollout.publish_copy(2, tensors)
    else:

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(inside(rollout).group, "catch_up", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rollout.unpublish()
    assert rollout._prefetching.ahead.kept is None


def test_a_stray_write_before_a_prefetched_update_is_found(pair):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    assert rollout.prefetch() == 1
    write_astray(found, tensors)
    assert rollout.update() is True
    assert rollout.last_read.via == "full"
    assert_same(found, tensors)


def test_inference_tensors_are_prefetched_for(pair):
    trainer, rollout = pair
    with torch.inference_mode():
        tensors, found = changed(trainer, rollout)
        assert rollout.prefetch() == 1
    assert rollout.update() is True
    assert rollout.last_read.prefetched
    assert_same(found, tensors)


def test_nothing_is_prefetched_where_nothing_is_newer_or_held_or_worth_it(pair):
    trainer, rollout = pair
    assert rollout.prefetch() is None  # nothing is held
    tensors, found = first(trainer, rollout)
    assert rollout.prefetch() is None  # nothing is newer
    with pytest.raises(VersionNotFound):
        trainer.publish_copy(5, tensors)
        rollout.prefetch(3)
    for tensor in tensors.values():
        tensor.add_(1)
    publish(trainer, 6, tensors)
    assert rollout.prefetch() is None  # all has changed
    assert rollout.update() is True
    assert_same(found, tensors)


def test_a_prefetch_waits_for_a_delta_that_is_being_made_and_an_update_does_not(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    step(tensors, 1)
    with being_made(trainer, monkeypatch) as made:
        trainer.publish_copy(1, tensors, deltas=8)
        with looks(monkeypatch, 20, made.set):  # an update has given up long before
            assert rollout.prefetch() == 1
    rollout.update()
    assert rollout.last_read.prefetched
    step(tensors, 2)
    with being_made(trainer, monkeypatch):
        trainer.publish_copy(2, tensors, deltas=8)
        rollout.update()
        assert rollout.last_read.via == "full"
    assert_same(found, tensors)


def test_a_prefetch_that_waits_for_a_delta_ends_at_its_deadline(pair, monkeypatch):
    trainer, rollout = pair
    tensors, _ = first(trainer, rollout)
    with being_made(trainer, monkeypatch):
        trainer.publish_copy(1, tensors, deltas=8)
        with pytest.raises(DeadlineExceeded):
            rollout.prefetch(timeout_s=0.3)


@pytest.mark.parametrize("call", ["update", "unpublish", "publish", "close"])
def test_a_prefetch_that_waits_for_a_delta_ends_where_that_is_of_no_use(pair, monkeypatch, call):
    trainer, rollout = pair
    tensors, _ = first(trainer, rollout)
    there = threading.Event()
    with (
        being_made(trainer, monkeypatch),
        ThreadPoolExecutor(1) as pool,
        looks(monkeypatch, 2, there.set),
    ):
        trainer.publish_copy(1, tensors, deltas=8)
        ended = pool.submit(rollout.prefetch)
        assert there.wait(20)
        if call == "publish":
            trainer.publish_copy(2, tensors, deltas=8)
        else:
            getattr(rollout, call)()
        if call == "close":
            with pytest.raises(ClosedError):
                ended.result(10)
        else:
            assert ended.result(10) is None


@contextmanager
def meanwhile(rollout, monkeypatch):
    """Within, a prefetch stands where all has landed and no word was asked; yields its future."""
    there, go_on, was = threading.Event(), threading.Event(), DeltaRead._certify

    def certify(self, ranks):
        there.set()
        assert go_on.wait(20)
        was(self, ranks)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patched:
        patched.setattr(DeltaRead, "_certify", certify)
        ended = pool.submit(rollout.prefetch)
        assert there.wait(20)
        patched.setattr(DeltaRead, "_certify", was)
        try:
            yield ended
        finally:
            go_on.set()


def test_an_update_does_not_wait_for_a_prefetch_which_then_is_in_vain(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    with meanwhile(rollout, monkeypatch) as ended:
        assert rollout.update() is True
        assert (rollout.last_read.via, rollout.last_read.prefetched) == ("delta", False)
    assert ended.result() is None
    assert rollout._prefetching.ahead.kept is None
    assert_same(found, tensors)


def test_a_source_that_goes_on_meanwhile_is_prefetched_from_again(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    with meanwhile(rollout, monkeypatch) as ended:
        step(tensors, 2)
        publish(trainer, 2, tensors)
    assert ended.result() == 2
    rollout.update()
    assert (rollout.last_read.links, rollout.last_read.prefetched) == (2, True)
    assert_same(found, tensors)


def test_a_source_that_leaves_meanwhile_leaves_nothing_staged(pair, monkeypatch):
    trainer, rollout = pair
    changed(trainer, rollout)
    with meanwhile(rollout, monkeypatch) as ended:
        trainer.unpublish()
    assert ended.result() is None  # and nothing is newer


@pytest.mark.parametrize("end", ["unpublish", "close", "deadline"])
def test_a_prefetch_that_will_look_again_ends_where_that_is_of_no_use(pair, monkeypatch, end):
    trainer, rollout = pair
    changed(trainer, rollout)
    monkeypatch.setattr(flow, "RETRY_S", 20)
    lost = threading.Event()

    def lose(*_):
        lost.set()
        raise SourceLost("trainer", "it is gone")

    monkeypatch.setattr(DeltaRead, "_certify", lose)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(rollout.prefetch, timeout_s=1 if end == "deadline" else 50)
        assert lost.wait(20)
        if end != "deadline":
            getattr(rollout, end)()
        error = {"close": ClosedError, "deadline": DeadlineExceeded}.get(end)
        with pytest.raises(error) if error else nullcontext():
            assert ended.result(10) is None


@pytest.mark.long
# With NIXL a Ctrl-C may leave an open file behind, of which other tests of this process would tell.
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
# A Ctrl-C that comes in a finalizer is told, and lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_prefetch_leaves_a_handle_that_prefetches_again(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    monkeypatch.setattr(flow, "RETRY_S", 0.0)
    was, rng, interrupted = signal.signal(signal.SIGALRM, signal.default_int_handler), Random(7), 0
    rollout.prefetch()
    rollout._prefetching.ahead.forget()
    began_s = time.perf_counter()
    rollout.prefetch()  # connected, as most are
    usual_s = time.perf_counter() - began_s
    try:
        for _ in range(100):
            rollout._prefetching.ahead.forget()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, usual_s))
                try:
                    rollout.prefetch()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, was)
    assert interrupted > 10
    assert not inside(rollout).beside
    assert rollout.prefetch() == 1
    rollout.update()
    assert rollout.last_read.prefetched
    assert_same(found, tensors)


def test_a_prefetch_that_waits_for_another_ends_at_its_deadline(pair, monkeypatch):
    trainer, rollout = pair
    changed(trainer, rollout)
    with meanwhile(rollout, monkeypatch) as ended:
        with pytest.raises(DeadlineExceeded, match="another prefetch"):
            rollout.prefetch(timeout_s=0.1)
        assert not ended.done()
    assert ended.result() == 1
    assert rollout.prefetch(timeout_s=20) == 1


def test_a_prefetch_of_a_task_that_is_cancelled_waits_for_no_other(pair, monkeypatch):
    trainer, rollout = pair
    changed(trainer, rollout)

    async def cancelled():
        waits = asyncio.create_task(rollout.aio.prefetch())
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    with meanwhile(rollout, monkeypatch) as ended:
        asyncio.run(cancelled())
        assert not ended.done()
    assert ended.result() == 1


def test_closing_leaves_and_then_waits_for_a_prefetch(pair, monkeypatch):
    trainer, rollout = pair
    changed(trainer, rollout)
    monkeypatch.setattr(flow, "CLOSE_S", 30.0)
    with meanwhile(rollout, monkeypatch) as ended:
        closing, end_s = threading.Thread(target=rollout.close), time.monotonic() + 10
        closing.start()
        while 0 in trainer.list():
            assert time.monotonic() < end_s
            time.sleep(0.001)
        assert closing.is_alive()
    with pytest.raises(ClosedError):
        ended.result()
    closing.join()
    with pytest.raises(ClosedError):
        rollout.prefetch()


def test_a_prefetch_of_asyncio_goes_on_beside_other_calls(pair):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)

    async def both():
        assert await rollout.aio.prefetch() == 1
        assert await rollout.aio.update() is True

    asyncio.run(both())
    assert rollout.last_read.prefetched
    assert_same(found, tensors)


def test_a_signal_handler_makes_no_call_within_a_prefetch(pair, monkeypatch):
    trainer, rollout = pair
    changed(trainer, rollout)
    was, refused = DeltaRead._certify, []

    def handler(self, ranks):
        for call in (rollout.update, rollout.prefetch, rollout.close):
            with pytest.raises(UsageError, match="in the middle of"):
                call()
            refused.append(call)
        was(self, ranks)

    monkeypatch.setattr(DeltaRead, "_certify", handler)
    assert rollout.prefetch() == 1
    assert len(refused) == 3


def test_a_prefetch_for_which_there_is_no_memory_stages_nothing(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    was = torch.empty

    def empty(*sizes, **options):
        return was(1 << 60 if sizes[0] else 0, **options)  # torch raises, as where memory is short

    with monkeypatch.context() as patched:
        patched.setattr(side_room.torch, "empty", empty)
        assert rollout.prefetch() is None
    assert rollout.prefetch() == 1
    rollout.update()
    assert_same(found, tensors)


def test_a_prefetch_that_ctrl_c_ends_is_counted(pair, monkeypatch):
    trainer, rollout = pair
    changed(trainer, rollout)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(DeltaRead, "_certify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rollout.prefetch()
    assert inside(rollout).observed.tally.ended["prefetches"] == {"KeyboardInterrupt": 1}


def test_a_prefetch_needs_digests_of_all_bytes():
    handle = torch_ros.open("m", endpoint=f"memory://{uuid.uuid4().hex}")
    with handle, pytest.raises(UsageError, match="digests='full'"):
        handle.prefetch()


def test_replicas_that_update_at_once_need_no_delta_from_those_that_they_read_from(options):
    model = "m-" + uuid.uuid4().hex[:8]
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        trainer = stack.enter_context(torch_ros.open(model, replica="trainer", **options))
        tensors = weights()
        publish(trainer, 0, tensors)
        rollouts, founds = [], []
        for number in range(4):
            handle = torch_ros.open(model, replica=f"rollout-{number}", costs=FAR, **options)
            rollouts.append(stack.enter_context(handle))
            founds.append({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
            handle.register(founds[-1])
            handle.replicate()
        step(tensors, 1)
        publish(trainer, 1, tensors)
        assert [*pool.map(lambda handle: handle.prefetch(), rollouts)] == [1, 1, 1, 1]
        assert all(pool.map(lambda handle: handle.update(), rollouts))
        assert all(handle.last_read.prefetched for handle in rollouts)
        for found in founds:
            assert_same(found, tensors)
