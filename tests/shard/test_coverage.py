"""Replicas whose ranks lack something hold nothing; how often they look at each other."""

import random
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ros
from torch_ros import Chunked
from torch_ros.dcp import ROSReader
from torch_ros.errors import ManifestMismatch, TorchRosError
from torch_ros.shard.manifests import Manifests

SHAPE = (6, 4)
TENSORS = {"w": torch.arange(24.0).reshape(SHAPE), "b": torch.arange(3.0)}


@pytest.fixture
def opened(pool):
    endpoint, handles = f"memory://{uuid.uuid4().hex}", []

    def open_(replica, size=1, **options):
        options = {"endpoint": endpoint, "timeout_s": 10, **options}
        join = lambda rank: torch_ros.open(
            "m", replica=replica, rank=rank, world_size=size, **options
        )
        ranks = list(pool.map(join, range(size)))
        handles.extend(ranks)
        return ranks

    yield open_
    for closed in [pool.submit(handle.close, linger_s=0.0) for handle in handles]:
        closed.result()


@pytest.fixture
def looks(monkeypatch):
    """The replicas whose manifests were looked at to complete a call."""
    seen = []
    own = Manifests.own

    def counted(self, deadline):
        seen.append(self._group.seat.replica)
        return own(self, deadline)

    monkeypatch.setattr(Manifests, "own", counted)
    return seen


def answer(call):
    try:
        return call()
    except TorchRosError as error:
        return error


def together(pool, ranks, call):
    """What each rank's call returned or raised."""
    return list(pool.map(lambda rank: answer(lambda: call(rank)), ranks))


def rows(count, *, without=None):
    """For each rank its rows of w, as a Chunked, and all of b; `without` that row of w."""
    parts = []
    for rank in range(count):
        mine = [row for row in range(rank, SHAPE[0], count) if row != without]
        boxes = {(row, 0): TENSORS["w"][row : row + 1].clone() for row in mine}
        parts.append({"w": Chunked(SHAPE, torch.float32, boxes), "b": TENSORS["b"].clone()})
    return parts


def register(ranks, parts):
    for rank, part in zip(ranks, parts, strict=True):
        rank.register(part)


def offered(ranks):
    return ranks[0].list()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_group_that_lacks_one_element_never_becomes_a_holder(opened, pool, size, seed):
    rng = random.Random(f"{size}/{seed}")
    trainer, reader = opened("trainer", size), opened("reader", size)
    lacking = rng.randrange(24)
    row, column = divmod(lacking, 4)
    parts = rows(size)
    held = parts[row % size]["w"]
    boxes = {at: box for at, box in held.chunks.items() if at != (row, 0)}
    whole_row = held.chunks[row, 0]
    boxes |= {(row, 0): whole_row[:, :column], (row, column + 1): whole_row[:, column + 1 :]}
    parts[row % size]["w"] = Chunked(SHAPE, torch.float32, boxes)

    register(trainer, parts)
    for error in together(pool, trainer, lambda rank: rank.publish(1)):
        assert isinstance(error, ManifestMismatch)
        assert "tensor 'w': expected the ranks of this replica to have every" in str(error)
        assert f"the box from {[row, column]} to {[row + 1, column + 1]}" in str(error)
    assert offered(trainer) == {}
    for rank in trainer:
        rank.unregister()
    register(trainer, rows(size))
    assert together(pool, trainer, lambda rank: rank.publish(2)) == [True] * size

    register(reader, parts)
    for error in together(pool, reader, lambda rank: rank.replicate(2)):
        assert isinstance(error, ManifestMismatch)
        assert f"the box from {[row, column]} to {[row + 1, column + 1]}" in str(error)
    assert offered(trainer) == {2: {"trainer"}}
    assert [rank.version for rank in reader] == [None] * size


def read(rank, part):
    return rank.read(1, part).version


def load(rank, part):
    reader = ROSReader(1, handle=rank)
    dcp.load(part, storage_reader=reader, no_dist=True)
    return reader.version


@pytest.mark.parametrize("digests", ["off", "full"])
@pytest.mark.parametrize(("get", "size"), [(read, 1), (read, 2), (load, 1)])
def test_a_part_that_was_asked_for_is_read_and_is_no_witness(opened, pool, get, size, digests):
    (trainer,) = opened("trainer", retain=("latest",), digests=digests)
    readers, (late,) = opened("reader", size, digests=digests), opened("late", digests=digests)
    trainer.register(TENSORS)
    trainer.publish(1)
    parts = rows(size, without=4)
    assert together(pool, readers, lambda rank: get(rank, parts[rank.rank])) == [1] * size
    assert [rank.version for rank in readers] == [None] * size
    for part in parts:
        for (row, _), box in part["w"].chunks.items():
            assert torch.equal(box[0], TENSORS["w"][row])
    assert offered(readers) == {1: {"trainer"}}
    trainer.unpublish()
    (copy,) = offered(readers)[1]
    assert copy.startswith("trainer+"), "the only copy that counts was put aside"
    got = {fqn: torch.zeros_like(tensor) for fqn, tensor in TENSORS.items()}
    late.register(got)
    late.replicate(1)
    assert all(torch.equal(got[fqn], tensor) for fqn, tensor in TENSORS.items())


def test_ranks_look_at_each_other_once(opened, pool, looks):
    trainer, reader = opened("trainer", 3), opened("reader", 2)
    register(trainer, rows(3))
    register(reader, rows(2))
    for version in range(1, 5):
        assert together(pool, trainer, lambda rank, v=version: rank.publish(v)) == [True] * 3
        assert together(pool, reader, lambda rank: rank.update()) == [True] * 2
        assert together(pool, trainer, lambda rank: rank.unpublish()) == [None] * 3
    assert sorted(looks) == ["reader", "trainer"]


def test_ranks_that_save_a_few_state_dicts_in_turn_look_once_at_each(opened, pool, looks):
    trainer = opened("trainer", 2)
    for version in range(1, 7):
        parts = rows(2) if version % 2 else [{"x": part["w"]} for part in rows(2)]
        save = lambda rank, v=version, p=parts: rank.publish_copy(v, p[rank.rank])
        assert together(pool, trainer, save) == [True] * 2
    assert len(looks) == 2


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_that_have_everything_do_not_look(opened, pool, looks, size):
    trainer, reader = opened("trainer", size), opened("reader", size)
    register(trainer, [TENSORS] * size)
    blank = [{fqn: torch.zeros_like(t) for fqn, t in TENSORS.items()} for _ in range(size)]
    register(reader, blank)
    together(pool, trainer, lambda rank: rank.publish(1))
    assert together(pool, reader, lambda rank: rank.replicate(1)) == [1] * size
    assert looks == []


def test_other_boxes_of_the_same_tensors_are_looked_at_anew(opened, pool, looks):
    trainer = opened("trainer", 2)
    register(trainer, rows(2))
    assert together(pool, trainer, lambda rank: rank.publish(1)) == [True] * 2
    for row in (0, 5):
        together(pool, trainer, lambda rank: rank.unpublish())
        for rank in trainer:
            rank.unregister()
        register(trainer, rows(2, without=row))
        for _ in range(2):  # a failure is not remembered as a proof
            for error in together(pool, trainer, lambda rank: rank.publish(2)):
                assert isinstance(error, ManifestMismatch)
    assert len(looks) == 5
