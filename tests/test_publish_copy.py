"""Publishing a copy: cast, gathered, free to change at once. One process, memory and etcd."""

import uuid

import pytest
import torch

import torch_ros
from torch_ros.errors import UsageError, VersionConflict


@pytest.fixture(params=["memory", "etcd"])
def opened(request):
    endpoint = f"memory://{uuid.uuid4().hex}"
    if request.param == "etcd":
        endpoint = request.getfixturevalue("etcd_endpoint")
    model, handles = "m-" + uuid.uuid4().hex[:8], []

    def open_(replica):
        options = {"endpoint": endpoint, "timeout_s": 20, "ttl_s": 5}
        handles.append(torch_ros.open(model, replica=replica, **options))
        return handles[-1]

    yield open_
    for handle in handles:
        handle.close()


def test_the_tensors_may_change_as_soon_as_it_returns(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    source, target = torch.arange(1000.0), torch.zeros(1000)
    rollout.register({"w": target})
    for version in range(4):
        source.fill_(version)
        trainer.publish_copy(version, {"w": source})
        source.fill_(-1)
        assert rollout.update() is True
        assert torch.equal(target, torch.full((1000,), float(version)))
    assert trainer.version == 3


def test_masters_are_cast_but_for_those_that_are_named(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    masters = {
        "layer.weight": torch.randn(64, 33),
        "layer.norm.weight": torch.randn(64),
        "step": torch.tensor(7),
    }
    trainer.publish_copy(1, masters, dtype=torch.bfloat16, keep_dtype=("*.norm.*",))
    got = {
        "layer.weight": torch.zeros(64, 33, dtype=torch.bfloat16),
        "layer.norm.weight": torch.zeros(64),
        "step": torch.tensor(0),
    }
    rollout.register(got)
    rollout.replicate()
    assert torch.equal(got["layer.weight"], masters["layer.weight"].bfloat16())
    assert torch.equal(got["layer.norm.weight"], masters["layer.norm.weight"])
    assert got["step"] == 7


def test_tensors_of_any_stride_and_none_at_all_are_gathered(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    tensors = {
        "transposed": torch.randn(40, 30).t(),
        "column": torch.randn(128, 64)[:, 5:9],
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(2.5),
    }
    trainer.publish_copy(1, tensors)
    got = {fqn: torch.zeros(tensor.shape) for fqn, tensor in tensors.items()}
    rollout.register(got)
    rollout.replicate()
    assert all(torch.equal(got[fqn], tensor) for fqn, tensor in tensors.items())


def test_buffers_are_registered_once_and_used_in_turn(opened):
    trainer = opened("trainer")
    shown = []
    for version in range(4):
        trainer.publish_copy(version, {"w": torch.randn(1000)})  # allocated anew
        shown.append(trainer._shard.mailbox.manifest)
    places = [manifest.addresses for manifest in shown]
    assert places[0] == places[2] != places[1] == places[3]
    assert len({manifest.descriptor for manifest in shown}) == 1


def test_a_copy_that_does_not_fit_is_refused_and_what_is_held_stays(opened):
    trainer = opened("trainer")
    bf16 = torch.bfloat16
    trainer.publish_copy(1, {"w": torch.ones(1000)}, dtype=bf16, copy_bytes=5000)
    with pytest.raises(UsageError, match=r"12160 bytes .*copy_bytes=9000"):
        # 2 x 4032 would fit, but not beside what is published still.
        trainer.publish_copy(2, {"w": torch.ones(1000)}, copy_bytes=9000)
    assert trainer.list() == {1: {"trainer"}}
    trainer.publish_copy(2, {"w": torch.ones(1000)}, dtype=bf16, copy_bytes=5000)
    assert trainer.list() == {2: {"trainer"}}
    with pytest.raises(UsageError, match=r"4096 bytes .*copy_bytes=4000"):
        trainer.publish_copy(3, {"w": torch.ones(10)}, copy_bytes=4000)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int1, torch.bits8, torch.float8_e5m2])
def test_dtypes_that_torch_cannot_copy_are_copied(opened, dtype):
    sent = torch.arange(8, dtype=torch.uint8)
    got = torch.zeros_like(sent)
    trainer, rollout = opened("trainer"), opened("rollout")
    trainer.publish_copy(1, {"w": sent.view(dtype)})
    rollout.register({"w": got.view(dtype)})
    assert rollout.replicate() == 1
    assert torch.equal(got, sent)


def test_what_cannot_be_cast_to_is_named(opened):
    with pytest.raises(UsageError, match=r"dtype=torch\.int8"):
        opened("trainer").publish_copy(1, {"w": torch.ones(3)}, dtype=torch.int8)


def test_a_copy_that_was_refused_does_not_bring_the_next_into_published_memory(opened):
    trainer = opened("trainer")
    rollout, target = opened("rollout"), torch.zeros(1000)
    rollout.register({"w": target})
    trainer.publish_copy(7, {"w": torch.full((1000,), 7.0)})
    with pytest.raises(VersionConflict):
        trainer.publish_copy(6, {"w": torch.full((1000,), 6.0)})
    held = trainer.checkpoints.registered.memory[0]
    unpublish = trainer._shard.unpublish

    def look(deadline, **options):
        assert torch.equal(held, torch.full((1000,), 7.0)), "written while it was published"
        unpublish(deadline, **options)

    trainer._shard.unpublish = look
    trainer.publish_copy(8, {"w": torch.full((1000,), 8.0)})
    rollout.replicate()
    assert torch.equal(target, torch.full((1000,), 8.0))
