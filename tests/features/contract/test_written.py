"""Writes under a published version: found by torch's counts, told, and the version withdrawn."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import memory
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import torch_ros
from torch_ros.dcp import ROSWriter
from torch_ros.errors import ContractBroken, VersionNotFound

endpoint = pytest.fixture(memory)

TOLD = "was probably written to while"


@pytest.fixture
def opened_with():
    return {"rank": 0, "world_size": 1}


def write(model):
    with torch.no_grad():
        model.weight.add_(1)


def step(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def load(model):
    model.load_state_dict(nn.Linear(4, 4).state_dict())


GIVEN = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
    "parameters": lambda model: dict(model.named_parameters()),
    "plain": lambda model: {"weight": model.weight.detach(), "bias": model.bias.detach()},
}


@pytest.mark.parametrize("change", [write, step, load])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_write_to_what_is_published_is_an_error_of_unpublish(opened, change, given, caplog):
    model, trainer = nn.Linear(4, 4), opened("trainer")
    trainer.register(given(model))
    trainer.publish(1)
    change(model)
    with pytest.raises(ContractBroken, match=r"version 1 .* tensor '(weight|bias)'"):
        trainer.unpublish()
    assert trainer.version is None
    assert trainer.list() == {}
    trainer.publish(2)
    trainer.unpublish()
    assert TOLD not in caplog.text


def test_a_copy_takes_the_place_of_what_was_written_to_and_that_is_told(opened, caplog):
    model, trainer, rollout = nn.Linear(4, 4), opened("trainer"), opened("rollout")
    trainer.register(model)
    trainer.publish(1)
    write(model)
    trainer.publish_copy(2, model)
    assert "version 1 was overwritten while it was published" in caplog.text
    assert trainer.list() == {2: {"trainer"}}
    mine = nn.Linear(4, 4)
    rollout.register(mine)
    assert rollout.replicate() == 2
    assert torch.equal(mine.weight, model.weight)


def test_a_number_that_was_withdrawn_is_published_again_with_other_bytes(opened):
    model, trainer, rollout = nn.Linear(4, 4), opened("trainer"), opened("rollout")
    trainer.register(model)
    trainer.publish(1)
    write(model)
    with pytest.raises(ContractBroken):
        trainer.unpublish()
    trainer.publish(1)
    got = nn.Linear(4, 4)
    rollout.register(got)
    assert rollout.replicate(1) == 1
    assert torch.equal(got.weight, model.weight)


def test_digests_that_differ_withdraw_a_version_too(opened):
    model, trainer = nn.Linear(4, 4), opened("trainer", check_contract=True)
    rollout, newcomer = opened("rollout"), opened("newcomer")
    trainer.register(model)
    trainer.publish(1)
    for reader in (rollout, newcomer):
        reader.register(nn.Linear(4, 4))
    rollout.replicate()
    model.weight.data.add_(1)  # not counted
    with pytest.raises(ContractBroken, match="'weight'"):
        trainer.unpublish()
    assert newcomer.replicate(missing_ok=True) is None


FREED = {
    "resize_": lambda model: model.weight.untyped_storage().resize_(0),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("how", FREED)
@pytest.mark.parametrize("given", GIVEN)
def test_memory_that_is_freed_while_it_is_published_is_an_error(opened, how, given):
    trainer, model = opened("trainer"), nn.Linear(4, 4)
    trainer.register(GIVEN[given](model))
    trainer.publish(1)
    FREED[how](model)
    with pytest.raises(ContractBroken, match="the memory of tensor '(weight|bias)' was freed"):
        trainer.unpublish()
    assert trainer.version is None
    assert trainer.list() == {}


def test_a_retained_version_is_not_copied_from_memory_that_was_freed(opened, caplog):
    trainer, model = opened("trainer", retain=("latest",)), nn.Linear(4, 4)
    trainer.register(model)
    trainer.publish(1)
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(ContractBroken, match="was freed"):
        trainer.unpublish()
    assert trainer.list() == {}
    assert "cannot be copied: the memory of tensor 'weight' was freed" in caplog.text


@pytest.mark.parametrize("kind", ["dcp", "view", "DTensor"])
def test_a_write_that_is_likely_is_a_warning_and_given_once(opened, mesh, kind, caplog):
    trainer, storage = opened("trainer"), torch.zeros(8)
    model = nn.Linear(4, 4)
    tensors = {
        "dcp": model.state_dict,  # aliases, whose count may be that of memory that has moved
        "view": lambda: {"w": storage[:4]},
        "DTensor": lambda: {"w": DTensor.from_local(storage, mesh, [Shard(0)])},
    }[kind]()
    if kind != "dcp":
        trainer.register(tensors)
    for version in (1, 2):
        if kind == "dcp":
            dcp.save(tensors, storage_writer=ROSWriter(version, handle=trainer))
        else:
            trainer.publish(version)
        write(model)
        if kind == "DTensor":
            tensors["w"].add_(1)
        elif kind == "view":
            storage[4:].add_(1)  # counted with the rest
        trainer.unpublish()
        assert caplog.text.count(TOLD) == 1


def test_a_sharded_state_dict_that_is_written_to_is_told(opened, mesh, caplog):
    trainer = opened("trainer")
    whole = DTensor.from_local(torch.zeros(8), mesh, [Shard(0)])
    dcp.save({"w": whole}, storage_writer=ROSWriter(1, handle=trainer))
    whole.add_(1)
    dcp.save({"w": whole}, storage_writer=ROSWriter(2, handle=trainer))
    assert caplog.text.count(TOLD) == 1
    assert "'w'" in caplog.text
    assert trainer.version == 2


def test_what_the_library_and_a_guarded_optimizer_write_is_never_told(opened, caplog):
    model, trainer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), opened("trainer")
    first, second = opened("first"), opened("second")
    trainer.register(model)
    mine = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    first.register(mine)
    second.register(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).state_dict())
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
    ]
    for optimizer in optimizers:
        trainer.guard(optimizer)
    for version in range(6):
        trainer.publish(version)
        first.update()
        second.update()
        model(torch.ones(2, 4)).sum().backward()
        optimizers[version % 3].step()
        optimizers[version % 3].zero_grad()
    trainer.unpublish()
    first.unpublish()  # becomes a publisher of what it has read
    first.publish(6)
    second.update()
    first.unpublish()
    write(mine[0])  # after the return
    first.publish(7)
    assert TOLD not in caplog.text


def test_a_read_that_is_served_and_then_written_to_is_told(opened, caplog):
    trainer, engine, mine = opened("trainer"), opened("engine"), {"w": torch.zeros(4)}
    trainer.register({"w": torch.ones(4)})
    trainer.publish(1)
    engine.read(1, mine)
    mine["w"].copy_(torch.ones(4))  # its caller's, before it is served
    engine.serve()
    engine.unpublish()
    assert TOLD not in caplog.text
    engine.read(1, mine)
    engine.serve()
    mine["w"].add_(1)
    engine.unpublish()
    assert caplog.text.count(TOLD) == 1
    reader = opened("reader")
    reader.register({"w": torch.zeros(4)})
    assert reader.replicate() == 1, "a reader withdraws nothing"


def test_tensors_of_inference_mode_are_not_counted(opened):
    trainer = opened("trainer")
    with torch.inference_mode():
        weights = {"w": torch.zeros(4)}
    trainer.register(weights)
    trainer.publish(1)
    with torch.inference_mode():
        weights["w"].add_(1)
    trainer.unpublish()


def test_buffers_that_a_forward_pass_writes_are_told(opened):
    model, trainer = nn.BatchNorm1d(4), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    model(torch.randn(3, 4))
    with pytest.raises(ContractBroken, match=r"'num_batches_tracked'.*BatchNorm"):
        trainer.unpublish()


def test_an_outage_gives_the_tensors_back_before_the_error(opened, monkeypatch, caplog):
    model, trainer = nn.Linear(4, 4), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    write(model)

    def away(*_):
        raise torch_ros.errors.StoreUnavailable("etcd", 1.0, "away")

    monkeypatch.setattr("torch_ros.features.contract.flow.run", away)
    with pytest.raises(ContractBroken):
        trainer.unpublish()
    assert trainer.version is None
    assert "still pass it on" in caplog.text


@pytest.mark.parametrize("times", [0, 9])
def test_a_tensor_that_was_swapped_for_another_was_not_written_to(opened, caplog, times):
    model, trainer, other = nn.Linear(4, 4), opened("trainer"), nn.Linear(4, 4)
    write(model)
    for _ in range(times):
        write(other)
    trainer.register(model)
    trainer.publish(1)
    torch.utils.swap_tensors(model.weight, other.weight)
    trainer.unpublish()
    assert TOLD not in caplog.text


def test_a_written_tensor_that_has_moved_since_is_told_by_its_name(opened, caplog):
    model, trainer = nn.Linear(4, 4), opened("trainer")
    trainer.register(model)
    trainer.publish(1)
    with torch.no_grad():
        model.weight.add_(1)
    model.weight.data = model.weight.data.clone()
    trainer.unpublish()
    assert "writes to tensor 'weight'" in caplog.text


def test_a_read_under_way_of_what_its_publisher_withdraws_does_not_complete(opened):
    trainer, told = opened("trainer", check_contract=True, drain_s=0), []
    tensors = {"w": torch.zeros(4)}

    def arrived(done, total):
        if done < total or told:
            return
        tensors["w"].add_(1)
        with pytest.raises(ContractBroken) as broken:
            trainer.unpublish()
        told.append(broken)

    rollout = opened("rollout", on_progress=arrived)
    trainer.register(tensors)
    trainer.publish(1)
    rollout.register({"w": torch.ones(4)})
    with pytest.raises(VersionNotFound, match="its publisher withdrew it"):
        rollout.replicate(1)
    assert told
    assert rollout.version is None
