"""What was once wrong, with both planners: dcp's own and those that leave planning for later."""

import contextlib
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ros.dcp import ROSReader, ROSWriter, objects
from torch_ros.errors import ManifestMismatch
from torch_ros.shard.tensors import Tensors

both_planners = pytest.mark.parametrize("is_own", [False, True], ids=["dcp's", "ours"])


class Unknown:
    """dcp knows nothing about it."""


def save(handle, version, state_dict, *, is_own=True, **options):
    handle.unpublish()
    writer = ROSWriter(version, handle=handle)
    planner = writer.planner() if is_own else None
    dcp.save(state_dict, storage_writer=writer, planner=planner, **options)


def load(handle, state_dict, version="latest", *, is_own=True, reader=ROSReader, **options):
    reader = reader(version, handle=handle)
    planner = reader.planner() if is_own else None
    dcp.load(state_dict, storage_reader=reader, planner=planner, **options)


def overtaken(publish):
    """A reader before which another version comes, once it has planned."""

    class Overtaken(ROSReader):
        def read_data(self, plan, planner):
            publish()
            return super().read_data(plan, planner)

    return Overtaken


@both_planners
@pytest.mark.parametrize(
    "then",
    [
        {"x": torch.full((8, 3), 2.0), "step": 2},
        {"x": torch.full((4, 3), 2.0)},
        {"x": torch.full((4, 3), 2, dtype=torch.bfloat16), "step": 2},
    ],
    ids=["another shape", "one less", "another dtype"],
)
def test_a_plan_for_one_version_does_not_read_another_with_other_tensors(handles, is_own, then):
    trainer, rollout = handles
    save(trainer, 1, {"x": torch.full((4, 3), 1.0), "step": 1})
    mine = {"x": torch.zeros(4, 3), "step": 0}
    with pytest.raises(CheckpointException) as caught:
        load(rollout, mine, is_own=is_own, reader=overtaken(lambda: save(trainer, 2, then)))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, ManifestMismatch)
    assert "load again" in str(error)
    assert not mine["x"].any()
    assert rollout.version is None
    again = {fqn: torch.zeros_like(v) if fqn != "step" else 0 for fqn, v in then.items()}
    load(rollout, again, is_own=is_own)
    assert all(torch.equal(again[fqn], then[fqn]) for fqn in then if fqn != "step")


@both_planners
@pytest.mark.parametrize("more", [{}, {"optimizer": torch.ones(5)}], ids=["the same", "more"])
def test_a_plan_for_one_version_reads_the_next_with_the_same_tensors(handles, is_own, more):
    trainer, rollout = handles
    save(trainer, 1, {"x": torch.full((4, 3), 1.0), "text": "short"})
    then = {"x": torch.full((4, 3), 2.0), "text": "much longer than before", **more}
    mine = {"x": torch.zeros(4, 3), "text": ""}
    load(rollout, mine, is_own=is_own, reader=overtaken(lambda: save(trainer, 2, then)))
    assert rollout.version == (None if more else 2)
    assert torch.equal(mine["x"], then["x"])
    assert mine["text"] == then["text"]


@both_planners
def test_what_a_partial_load_has_not_planned_for_is_not_passed_over(handles, is_own):
    """Nor remembered as not being there."""
    trainer, rollout = handles
    save(trainer, 1, {"a": torch.ones(3)})
    then = {"a": torch.full((3,), 2.0), "b": torch.full((2,), 2.0)}
    mine = {fqn: torch.zeros_like(tensor) for fqn, tensor in then.items()}
    for version in (1, 2):
        kind = overtaken(lambda: save(trainer, 2, then)) if version == 1 else ROSReader
        reader = kind("latest", handle=rollout)
        planner = (
            reader.planner(allow_partial_load=True)
            if is_own
            else DefaultLoadPlanner(allow_partial_load=True)
        )
        if version == 1:
            with pytest.raises(CheckpointException, match="load again"):
                dcp.load(mine, storage_reader=reader, planner=planner)
        else:
            dcp.load(mine, storage_reader=reader, planner=planner)
    assert all(torch.equal(mine[fqn], then[fqn]) for fqn in then)


@contextlib.contextmanager
def as_rank(rank, world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size // 2, 2))
    finally:
        dist.destroy_process_group()


@both_planners
@pytest.mark.parametrize(
    "rank", [0, *(pytest.param(rank, marks=pytest.mark.long) for rank in (1, 2, 3))]
)
def test_a_rank_with_several_parts_of_a_dtensor_saves_and_loads_them_all(
    handles, rank, is_own, monkeypatch
):
    """torch gives them one offset: dcp plans as if they lay side by side."""
    trainer, rollout = handles
    shown, show = [], Tensors.show
    monkeypatch.setattr(
        Tensors, "show", lambda self, state, **_: shown.append(show(self, state)) or shown[-1]
    )
    whole = torch.arange(24.0).reshape(8, 3)
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    with as_rank(rank, 4) as mesh:
        mine = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        expected = mine.to_local().clone()
        assert expected[1:3, 0].diff() != 3, "two parts"
        for version in (1, 2):  # planned, and as remembered
            with pytest.raises(
                CheckpointException, match="'w': expected the ranks"
            ):  # one rank of four
                save(trainer, version, {"w": mine}, is_own=is_own, no_dist=True)
            chunks = shown[-1].layout.chunks
            rows = [range(c.offsets[0], c.offsets[0] + c.sizes[0]) for c in chunks]
            assert [row for part in rows for row in part] == (expected[:, 0] // 3).tolist()
    for version in (3, 4):
        save(trainer, version, {"w": whole + version})
        with as_rank(rank, 4) as mesh:
            local = torch.zeros(4, 3)
            got = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=(3, 1)
            )
            load(rollout, {"w": got}, is_own=is_own, no_dist=True)
        assert torch.equal(local, expected + version)


@both_planners
def test_what_this_handle_published_is_not_read_again_into_the_same_tensors(handles, is_own):
    trainer, _ = handles
    mine = {"w": torch.ones(4), "step": 3}
    save(trainer, 1, mine, is_own=is_own)
    mine["step"] = 0
    load(trainer, mine, is_own=is_own)  # the only holder
    assert (trainer.version, trainer.last_read.bytes_read) == (1, 0)
    assert mine["step"] == 3


def test_an_object_that_is_remembered_is_not_read_into(handles):
    """Registered objects are read buffers, too, of the same handle's loads."""
    trainer, rollout = handles
    weight = torch.ones(3)
    save(trainer, 1, {"w": weight, "lr": 0.1})
    trainer.unpublish()
    trainer.unregister()
    save(trainer, 2, {"w": weight, "lr": 0.1})  # remembered, and registered anew
    trainer.unpublish()
    trainer.checkpoints.registered.objects["lr"].zero_()
    save(trainer, 3, {"w": weight, "lr": 0.1})
    got = {"w": torch.zeros(3), "lr": 0.0}
    load(rollout, got)
    assert got["lr"] == 0.1


def test_a_partial_load_leaves_objects_as_they_are_whatever_is_in_them(handles):
    trainer, rollout = handles
    save(trainer, 1, {"w": torch.ones(3)})
    unknown = Unknown()
    left = {"tuple": (unknown, 2), "list": [torch.float32], "size": torch.Size([2]), "one": unknown}
    got = {"w": torch.zeros(3), **left}
    for _ in range(2):
        rollout.unpublish()
        reader = ROSReader("latest", handle=rollout)
        planner = reader.planner(allow_partial_load=True)
        assert isinstance(planner, DefaultLoadPlanner)
        dcp.load(got, storage_reader=reader, planner=planner)
        assert all(got[key] is left[key] for key in ("tuple", "size", "one"))
        assert got["list"] == [torch.float32]


def test_a_state_dict_of_odd_containers_keeps_its_tensors_and_its_keys(handles):
    """dcp calls all keys strings, and does not look into every Mapping."""
    trainer, rollout = handles
    tensor = torch.ones(3)
    saved = {"history": {0: 0.5, 1: 0.4}, "w": tensor, "step": 5}
    save(trainer, 1, saved)
    got = {"history": {0: 0.0, 1: 0.0}, "w": torch.zeros(3), "step": 0}
    mine, settings = got["w"], UserDict(a=1, b=2)
    for _ in range(3):
        rollout.unpublish()
        got["step"], got["history"][0] = 0, 0.0
        load(rollout, got)
        assert got == {**saved, "w": mine}
        assert got["w"] is mine
        assert torch.equal(mine, tensor)
    odd = {"settings": settings, "hist": [{}, {"a": 1}], "x": {0: Unknown}, "w": mine, "step": 0}
    for _ in range(2):
        rollout.unpublish()
        reader = ROSReader("latest", handle=rollout)
        planner = reader.planner(allow_partial_load=True)
        dcp.load(odd, storage_reader=reader, planner=planner)
        assert odd["settings"] is settings
        assert odd["w"] is mine
        assert odd["step"] == 5
        assert (odd["hist"], odd["x"]) == ([{}, {"a": 1}], {0: Unknown})


def test_an_object_from_a_device_that_is_not_here_is_on_the_cpu(handles, monkeypatch):
    trainer, rollout = handles
    save(trainer, 1, {"w": torch.ones(3), "extra": (torch.ones(2), 5)})
    load_ = torch.load

    def without_gpu(*args, **options):
        if options.get("map_location") is None:
            raise RuntimeError("Attempting to deserialize object on CUDA device 7")
        return load_(*args, **options)

    monkeypatch.setattr(torch, "load", without_gpu)
    got = {"w": torch.zeros(3), "extra": None}
    load(rollout, got)
    assert torch.equal(got["extra"][0], torch.ones(2))


def test_objects_arrive_on_the_device_they_were_on(handles, monkeypatch):
    trainer, rollout = handles
    save(trainer, 1, {"w": torch.ones(3), "extra": (torch.ones(2), 5), "step": 7})
    places, restored = [], objects._RESTORED

    def noting(storage, place):
        places.append(place)
        return restored(storage, place)

    monkeypatch.setattr(objects, "_RESTORED", noting)
    got = {"w": torch.zeros(3), "extra": None, "step": 0}
    load(rollout, got)
    assert torch.equal(got["extra"][0], torch.ones(2))
    assert got["step"] == 7
    assert places == ["cpu"], "the only storage, once"


def test_a_dtensor_that_waits_for_a_reduction_is_named(handles):
    trainer, rollout = handles
    save(trainer, 1, {"w": torch.ones(3)})
    reader = ROSReader(1, handle=rollout)
    with as_rank(0, 2) as mesh:
        state = {"w": DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()])}
        own = {"storage_reader": reader, "planner": reader.planner()}
        for call in (
            lambda: dcp.load(state, no_dist=True, **own),
            lambda: save(trainer, 2, state, no_dist=True),
        ):
            with pytest.raises(CheckpointException, match="'w' is a DTensor with a pending reduct"):
                call()
