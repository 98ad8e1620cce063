"""Updates by deltas: real publishers and readers, in memory and over etcd."""

import asyncio
import itertools
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

import torch_ros
from torch_ros.errors import (
    ClosedError,
    CorruptDelta,
    DeadlineExceeded,
    SourceLost,
    UsageError,
    VersionNotFound,
)
from torch_ros.metrics import HandleCollector
from torch_ros.shard import prefetching
from torch_ros.transfer import delta_reading, deltas
from torch_ros.transfer.delta_reading import DeltaRead

FAR = torch_ros.Costs(read_bytes_per_s=1e7)  # so that deltas are faster, and waited for


@pytest.fixture
def options(endpoint):
    return {"endpoint": endpoint, "digests": "full", "timeout_s": 20}


@pytest.fixture
def pair(options):
    model = "m-" + uuid.uuid4().hex[:8]
    trainer = torch_ros.open(model, replica="trainer", **options)
    rollout = torch_ros.open(model, replica="rollout", costs=FAR, **options)
    yield trainer, rollout
    rollout.close()
    trainer.close()


def weights():
    return {"w": torch.randn(400, 1000).bfloat16(), "b": torch.randn(5), "s": torch.tensor(1.0)}


def step(tensors, version):
    """Change few elements; among them NaN and -0.0."""
    places = torch.randint(0, tensors["w"].numel(), (2000,))
    tensors["w"].view(-1)[places] += 1
    tensors["b"][version % 5] = (float("nan"), -0.0, 0.0)[version % 3]
    tensors["s"] += 1


def assert_same(found, expected):
    for name, tensor in expected.items():
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), name


def write_astray(found, tensors):
    """Where no delta has anything, which would write over it."""
    same = (found["w"] == tensors["w"]).view(-1).nonzero()[0]
    found["w"].view(-1)[same] += 1


def publish(trainer, version, tensors):
    """Publish, and wait until its delta is made: the next save would end that."""
    trainer.publish_copy(version, tensors, deltas=8)
    end_s, making = time.monotonic() + 20, trainer._shard.deltas._making
    while making is not None and not making.has_ended:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def first(trainer, rollout):
    tensors = weights()
    publish(trainer, 0, tensors)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    rollout.register(found)
    rollout.replicate()
    return tensors, found


@pytest.mark.parametrize("links", [1, 3, 5])
def test_an_update_takes_the_changes_since_the_version_that_is_held(pair, links):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    for version in range(1, links + 1):
        step(tensors, version)
        publish(trainer, version, tensors)
    assert rollout.update() is True
    read = rollout.last_read
    assert (read.via, read.base, read.links) == ("delta", 0, links)
    assert read.bytes_read < read.bytes_total / 10
    assert_same(found, tensors)


def test_tensors_that_were_written_to_are_read_in_full_and_so_from_then_on(pair):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    for version in (1, 2):
        step(tensors, version)
        publish(trainer, version, tensors)
        if version == 1:
            write_astray(found, tensors)
        assert rollout.update() is True
        assert rollout.last_read.via == "full"
        assert_same(found, tensors)
    rollout.unpublish()
    rollout.unregister()
    rollout.register(found)
    rollout.replicate()
    step(tensors, 3)
    publish(trainer, 3, tensors)
    rollout.update()
    assert rollout.last_read.via == "delta"
    assert_same(found, tensors)


@pytest.mark.parametrize(
    ("stage", "error"),
    [("stage", CorruptDelta("x", "y", "z")), ("scatter", MemoryError()), ("find", None)],
)
def test_an_attempt_that_fails_is_a_read_in_full(pair, monkeypatch, stage, error):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    step(tensors, 1)
    publish(trainer, 1, tensors)
    was = getattr(DeltaRead, stage)

    def fails(*args, **options):
        was(*args, **options)
        if error is not None:
            raise error

    monkeypatch.setattr(DeltaRead, stage, fails)
    assert rollout.update() is True
    assert rollout.last_read.via == "full"
    assert_same(found, tensors)


def test_ctrl_c_while_deltas_are_applied_leaves_a_base_to_nobody(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    step(tensors, 1)
    publish(trainer, 1, tensors)
    with monkeypatch.context() as patched:
        was = DeltaRead.scatter

        def interrupted(self, staged):
            was(self, dict(list(staged.items())[:1]))
            raise KeyboardInterrupt

        patched.setattr(DeltaRead, "scatter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollout.update()
    assert rollout.version is None
    rollout.update()
    assert rollout.last_read.via == "full"
    assert_same(found, tensors)


def test_an_update_to_what_has_not_changed_brings_nothing(pair):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    publish(trainer, 1, tensors)
    rollout.update()
    read = rollout.last_read
    assert (read.via, read.changed) == ("delta", 0)
    assert_same(found, tensors)


@pytest.mark.long
def test_heads_that_are_large_beside_the_tensors_are_not_read(pair, monkeypatch):
    trainer, rollout = pair
    tensors = {f"t{number}": torch.zeros(()) for number in range(1000)}
    publish(trainer, 0, tensors)
    found = {name: torch.ones(()) for name in tensors}
    rollout.register(found)
    rollout.replicate()
    tensors["t7"] += 1
    publish(trainer, 1, tensors)
    monkeypatch.setattr(DeltaRead, "_heads", lambda *_: pytest.fail("heads are read"))
    assert rollout.prefetch() is None
    rollout.update()
    assert rollout.last_read.via == "full"
    assert_same(found, tensors)


def test_tied_tensors_are_changed_once(pair):
    trainer, rollout = pair
    tensors, found = weights(), weights()
    tensors["again"], found["again"] = tensors["w"], found["w"]
    publish(trainer, 0, tensors)
    rollout.register(found)
    rollout.replicate()
    step(tensors, 1)
    publish(trainer, 1, tensors)
    rollout.update()
    assert rollout.last_read.via == "delta"
    assert_same(found, tensors)


# Prefetch


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
    assert rollout._shard.observed.staged["prefetched"]() == 0


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
    labels = rollout._shard.observed.tally.whose._asdict()

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
    assert rollout._shard.ahead.kept is None
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


def test_a_number_that_was_published_anew_is_not_what_was_prefetched(pair):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    assert rollout.prefetch(1) == 1
    trainer.unpublish()
    step(tensors, 1)
    publish(trainer, 1, tensors)
    assert rollout.update(1) is True
    assert not rollout.last_read.prefetched
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
            patched.setattr(rollout._shard.group, "catch_up", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rollout.unpublish()
    assert rollout._shard.ahead.kept is None


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


@contextmanager
def being_made(trainer, monkeypatch):
    """Within, deltas are made when the event that it yields is set, unless they are cut off."""
    made, was = threading.Event(), deltas.compare

    def compare(older, newer):
        making = trainer._shard.deltas._making
        while not (making.is_told_to_stop or made.wait(0.01)):
            pass
        return was(older, newer)

    with monkeypatch.context() as patched:
        patched.setattr(deltas, "compare", compare)
        try:
            yield made
        finally:
            made.set()


@contextmanager
def looks(monkeypatch, count, then):
    """Within, `then` is called before the look at a source's tables that has this number."""
    was, numbers = DeltaRead._tables, itertools.count(1)

    def tables(self):
        if next(numbers) == count:
            then()
        return was(self)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaRead, "_tables", tables)
        yield


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


def test_how_long_a_delta_takes_is_told_by_its_copy_and_not_by_what_is_read_of_it(
    options, monkeypatch
):
    model, whole, last = "m-" + uuid.uuid4().hex[:8], torch.zeros(1 << 24), (1 << 24) - 1000
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        trainer = stack.enter_context(torch_ros.open(model, replica="trainer", **options))
        publish(trainer, 0, {"w": whole})  # 64 MiB: 25 ms
        slow = torch_ros.Costs(read_bytes_per_s=1e5)  # of 4 kB: 20 ms would be worth a wait

        def join(rank, costs):
            group = {"replica": "rollout", "rank": rank, "world_size": 2}
            return stack.enter_context(torch_ros.open(model, **group, costs=costs, **options))

        rollouts = [*pool.map(join, (0, 1), (None, slow))]
        for handle, (start, end) in zip(rollouts, ((0, last), (last, 1 << 24)), strict=True):
            part = torch.ones(end - start)
            handle.register({"w": torch_ros.Chunked(whole.shape, whole.dtype, {(start,): part})})
        [*pool.map(lambda handle: handle.replicate(), rollouts)]
        with being_made(trainer, monkeypatch), looks(monkeypatch, 3, pytest.fail):
            trainer.publish_copy(1, {"w": whole}, deltas=8)
            [*pool.map(lambda handle: handle.update(), rollouts)]
        assert [handle.last_read.via for handle in rollouts] == ["full", "full"]
        [*pool.map(lambda handle: handle.close(), rollouts)]


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
    assert rollout._shard.ahead.kept is None
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
    monkeypatch.setattr(prefetching, "RETRY_S", 20)
    lost = threading.Event()

    def lose(*_):
        lost.set()
        raise SourceLost("trainer", "it is gone", 0, 0)

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
def test_prefetches_and_updates_beside_each_other_are_exact(pair):
    trainer, rollout = pair
    tensors, found = first(trainer, rollout)
    contents, is_over, staged = [], threading.Event(), []

    def prefetch():
        while not is_over.is_set():
            staged.append(rollout.prefetch())

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(prefetch)
        try:
            contents.append({name: tensor.clone() for name, tensor in tensors.items()})
            for version in range(1, 16):
                step(tensors, version)
                contents.append({name: tensor.clone() for name, tensor in tensors.items()})
                publish(trainer, version, tensors)
                if version % 3 == 0:
                    assert rollout.prefetch() == version
                if version % 3 != 1:
                    rollout.update()
                    assert version % 3 or rollout.last_read.prefetched
                    assert_same(found, contents[rollout.version])
        finally:
            is_over.set()
        ended.result()
    assert rollout._shard.observed.tally.corrupt == 0
    assert any(staged)


@pytest.mark.long
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


# With NIXL a Ctrl-C may leave an open file behind, of which other tests of this process would tell.
@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
# A Ctrl-C that comes in a finalizer is told, and lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_prefetch_leaves_a_handle_that_prefetches_again(pair, monkeypatch):
    trainer, rollout = pair
    tensors, found = changed(trainer, rollout)
    monkeypatch.setattr(prefetching, "RETRY_S", 0.0)
    was, rng, interrupted = signal.signal(signal.SIGALRM, signal.default_int_handler), Random(7), 0
    rollout.prefetch()
    rollout._shard.ahead.forget()
    began_s = time.perf_counter()
    rollout.prefetch()  # connected, as most are
    usual_s = time.perf_counter() - began_s
    try:
        for _ in range(100):
            rollout._shard.ahead.forget()
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
    assert not rollout._shard.beside
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
    monkeypatch.setattr(prefetching, "CLOSE_S", 30.0)
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
        patched.setattr(delta_reading.torch, "empty", empty)
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
    assert rollout._shard.observed.tally.prefetches == {"KeyboardInterrupt": 1}


def test_a_prefetch_needs_digests_of_all_bytes():
    handle = torch_ros.open("m", endpoint=f"memory://{uuid.uuid4().hex}")
    with handle, pytest.raises(UsageError, match="digests='full'"):
        handle.prefetch()
