"""What the second and every later step of an unchanged job leaves out."""

from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import memory

from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.memory.transport import MemoryPeer, MemoryTransport
from torch_ros.transfer import peers, reading

endpoint = pytest.fixture(memory)

STEPS = 6
ONCE = 3  # steps until all is known: two buffers take turns


@pytest.fixture
def counted(monkeypatch):
    """How often this process registers, plans, prepares reads and fetches manifests."""
    counts = Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(MemoryTransport, "register")
    count(MemoryPeer, "prepare")
    count(MemoryPeer, "attach")
    count(peers.Peers, "_read_bytes")
    count(reading, "plan")
    return counts


def tensors(value):
    return {f"t{i}": torch.full((5, 3), float(value)) for i in range(20)}


@pytest.mark.parametrize("digests", ["off", "full"])
@pytest.mark.parametrize("mode", ["in place", "copy"])
def test_publish_and_update_register_plan_prepare_and_fetch_nothing(opened, counted, mode, digests):
    trainer, rollout = (opened(name, digests=digests) for name in ("trainer", "rollout"))
    sent, got = tensors(0), tensors(-1)
    rollout.register(got)
    if mode == "in place":
        trainer.register(sent)
    for version in range(STEPS):
        if version == ONCE:
            counted.clear()
        if mode == "in place":
            trainer.unpublish()
            for tensor in sent.values():
                tensor.fill_(version)
            trainer.publish(version)
        else:
            trainer.publish_copy(version, tensors(version))  # allocated anew
        assert rollout.update()
        assert all(bool((tensor == version).all()) for tensor in got.values())
    if digests == "off":
        assert counted == Counter()
    else:  # other content has other digests, which are in the manifest
        assert counted.keys() <= {"_read_bytes", "register", "prepare"}
        of_a_fetch = counted["_read_bytes"]
        assert counted["register"] == counted["prepare"] == of_a_fetch <= 2 * (STEPS - ONCE)


@pytest.mark.parametrize("is_own", [True, False], ids=["our planners", "dcp's planners"])
def test_save_and_load_register_plan_prepare_and_fetch_nothing(opened, counted, is_own):
    trainer, rollout = opened("trainer"), opened("rollout")
    sent, got = tensors(0), tensors(-1)
    for version in range(STEPS):
        if version == ONCE:
            counted.clear()
        trainer.unpublish()
        for tensor in sent.values():
            tensor.fill_(version)
        writer = ROSWriter(version, handle=trainer)
        saved = {"model": {name: tensor.detach() for name, tensor in sent.items()}, "step": 1}
        dcp.save(saved, storage_writer=writer, planner=writer.planner() if is_own else None)
        reader = ROSReader("latest", handle=rollout)
        loaded = {"model": {name: tensor.detach() for name, tensor in got.items()}, "step": 0}
        dcp.load(loaded, storage_reader=reader, planner=reader.planner() if is_own else None)
        assert all(bool((tensor == version).all()) for tensor in got.values())
        assert loaded["step"] == 1
    assert counted == Counter()
