"""Updates by deltas: real publishers and readers, in memory and over etcd."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from features.deltas import changing
from features.deltas.changing import (
    assert_same,
    being_made,
    first,
    looks,
    publish,
    step,
    weights,
    write_astray,
)

import torch_ros
from torch_ros.errors import CorruptDelta
from torch_ros.features.deltas.reading import DeltaRead

options = pytest.fixture(changing.options)
pair = pytest.fixture(changing.pair)


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
