"""A whole version that is read into a part of it, told apart from a part that is meant."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import memory
from torch import nn

from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.weights.left_out import left_out
from torch_ros.weights.manifest import OBJECT, Layout, TensorRecord

endpoint = pytest.fixture(memory)

TOLD = "are not read, beside others that are"


def module():
    """A module with buffers of its own and of a part."""
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.register_buffer("scale", torch.ones(1))
    return made


@pytest.fixture
def saved(opened):
    trainer, state = opened("trainer"), module().state_dict()
    optimizer = {"state": {"0.weight": {"exp_avg": torch.zeros(2, 2)}}}
    state_dict = {"model": state, "optim": optimizer, "step": 7}
    dcp.save(state_dict, storage_writer=ROSWriter(1, handle=trainer))
    return trainer


def loads(handle, state_dict, **options):
    dcp.load(state_dict, storage_reader=ROSReader(1, handle=handle, **options))


def test_a_load_without_buffers_is_told_once(opened, saved, caplog):
    handle = opened("rollout")
    for _ in range(2):
        loads(handle, {"model": dict(module().named_parameters())})
    [told] = [record.getMessage() for record in caplog.records if TOLD in record.getMessage()]
    assert "4 tensors of version 1" in told
    assert "'model.1.num_batches_tracked', 'model.1.running_mean'" in told
    assert "partial=True" in told


@pytest.mark.parametrize("way", ["all of the model", "partial", "the optimizer"])
def test_a_part_that_is_meant_is_not_told(opened, saved, caplog, way):
    state, handle = module().state_dict(), opened("rollout")
    if way == "all of the model":
        loads(handle, {"model": state})
    elif way == "partial":
        loads(handle, {"model": {"0.weight": state["0.weight"]}}, partial=True)
    else:
        loads(handle, {"optim": {"state": {"0.weight": {"exp_avg": torch.ones(2, 2)}}}})
    assert TOLD not in caplog.text


@pytest.mark.parametrize("partial", [False, True])
def test_a_read_of_parameters_alone_is_told_unless_it_is_meant(opened, caplog, partial):
    trainer, handle = opened("trainer", module()), opened("rollout")
    trainer.publish(1)
    handle.read(1, dict(module().named_parameters()), partial=partial)
    assert (TOLD in caplog.text) is not partial


def test_a_module_that_is_read_lacks_nothing(opened, caplog):
    trainer, handle, mine = opened("trainer", module()), opened("rollout"), module()
    trainer.publish(1)
    handle.read(1, mine)
    assert TOLD not in caplog.text


def layout(*names, dtype="float32"):
    return Layout(tuple(TensorRecord(fqn, dtype, (1,)) for fqn in names), ())


@pytest.mark.parametrize(
    ("mine", "of_all", "of_several"),
    [
        (["a.weight"], ["a.bias", "b.weight"], ["a.bias"]),
        (["a.weight", "a.bias"], ["b.weight"], []),  # another rank's layer
        (["b.weight"], ["a.weight", "a.bias"], []),
        ([], [], []),
    ],
)
def test_ranks_that_have_layers_each_lack_none(mine, of_all, of_several):
    version = [layout("a.weight", "a.bias"), layout("b.weight"), layout("a.note", dtype=OBJECT)]
    assert left_out(version, layout(*mine), is_all=True) == of_all
    assert left_out(version, layout(*mine), is_all=False) == of_several
