"""A save and a load call down through the house; the few calls that go up are counted here."""

import sys
import threading
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import torch_ros
from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.memory.store import MemoryKV

PACKAGE = str(Path(torch_ros.__file__).parent) + "/"
FLOORS = {
    "face": 4,
    "dcp": 4,
    "shard": 3,
    "transfer": 2,
    "protocol": 2,
    "p2p": 1,
    "weights": 1,
    "store": 1,
    "memory": 1,
}


def floor_of(code):
    """The floor of a function of ours; 0 is the ground, None what is not ours."""
    if not code.co_filename.startswith(PACKAGE):
        return None
    return FLOORS.get(code.co_filename.removeprefix(PACKAGE).split("/")[0], 0)


def calls_up(action):
    """The functions of `shard` and `dcp` that lower floors call, with their numbers.

    Rules that the store's loops evaluate are not counted: they are values with a name.
    """
    found = Counter()

    def look(frame, event, _):
        if event != "call" or (callee := floor_of(frame.f_code)) is None or callee < 3:
            return
        caller = frame.f_back
        while caller is not None and floor_of(caller.f_code) is None:
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename.endswith("/store/loops.py"):
            return
        if floor_of(caller.f_code) < callee:
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(before)
    return found


def state():
    return {"w": torch.rand(4, 3), "step": 1}


def test_few_calls_go_up(handles):
    trainer, rollout = handles
    save = calls_up(lambda: dcp.save(state(), storage_writer=ROSWriter(1, handle=trainer)))
    load = calls_up(lambda: dcp.load(state(), storage_reader=ROSReader(1, handle=rollout)))
    assert save.total() <= 2, save  # the call's body, and what sums up its ranks' answers
    # As with a save; a fetch; the state dict is filled and vetted; whether the read is displayed.
    assert load.total() <= 6, load


def test_a_call_up_is_seen(handles):
    trainer, _ = handles
    trainer.register({"w": torch.ones(3)})
    assert calls_up(lambda: trainer.publish(1))["_Publication.perform"] == 1


def test_a_load_decides_from_what_its_first_look_has_read(handles, monkeypatch):
    """A load reads three times beside its commits: a look, the holder's shards, the claim."""
    trainer, rollout = handles
    read, reads = MemoryKV.read, []

    def counted(self, request, *, timeout_s):
        if threading.current_thread() is threading.main_thread():
            reads.append(request)
        return read(self, request, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryKV, "read", counted)
    for version in (1, 2):
        trainer.unpublish()
        save_with(ROSWriter(version, handle=trainer))
        rollout.unpublish()
        reads.clear()
        load_with(ROSReader("latest", handle=rollout))
        assert rollout.version == version
        assert len(reads) == 3


def save_with(writer):
    planner = writer.planner()
    dcp.save({"a": torch.ones(4)}, storage_writer=writer, planner=planner, no_dist=True)


def load_with(reader):
    planner = reader.planner()
    dcp.load({"a": torch.zeros(4)}, storage_reader=reader, planner=planner, no_dist=True)
