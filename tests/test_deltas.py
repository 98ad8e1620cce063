"""Updates by deltas: real publishers and readers, in memory and over etcd."""

import time
import uuid

import pytest
import torch

import torch_ros
from torch_ros.errors import CorruptDelta
from torch_ros.transfer.delta_reading import DeltaRead

FAR = torch_ros.Costs(read_bytes_per_s=1e7)  # so that deltas are faster, and waited for


@pytest.fixture(params=["memory", "etcd"])
def pair(request):
    endpoint = f"memory://{uuid.uuid4().hex}"
    if request.param == "etcd":
        endpoint = request.getfixturevalue("etcd_endpoint")
    options = {"endpoint": endpoint, "digests": "full", "timeout_s": 20}
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
            found["w"][7, 7] += 1  # where no delta has anything, most likely
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

    def fails(*args):
        was(*args)
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
