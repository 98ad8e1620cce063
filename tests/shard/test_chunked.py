"""Tensors that lie in boxes (`Chunked`), in all that handles do with tensors."""
# needs features transforms

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit import memory

from torch_ros import Cast, Chunked
from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.errors import ContractBroken, UsageError

endpoint = pytest.fixture(memory)

WIDTH = 6  # of each head, here


@pytest.fixture
def opened_with():
    return {"digests": "full"}


def checkpoint(version=0):
    generator = torch.Generator().manual_seed(version)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "q": randn(24, 8),
        "k": randn(24, 8),
        "v": randn(24, 8),
        "conv": randn(5, 7),
        "norm": randn(8),
        "scale": randn(),
        "empty": torch.empty(0, 3),
    }


class Engine:
    """A fused parameter with q, k and v of each head side by side, and one that is transposed."""

    def __init__(self, *, dtype=torch.float32):
        self.fused = torch.zeros(4, 3, WIDTH, 8, dtype=dtype)
        self.conv = torch.zeros(7, 9, dtype=dtype)
        self.norm, self.scale = torch.zeros(8, dtype=dtype), torch.zeros((), dtype=dtype)

    @property
    def tensors(self):
        dtype = self.fused.dtype
        heads = {
            name: {(WIDTH * head, 0): self.fused[head, part] for head in range(4)}
            for part, name in enumerate("qkv")
        }
        conv = {(0, 0): self.conv[:, 2:7].t()}
        return {
            **{name: Chunked((24, 8), dtype, boxes) for name, boxes in heads.items()},
            "conv": Chunked((5, 7), dtype, conv),
            "norm": self.norm,
            "scale": Chunked((), dtype, {(): self.scale}),
            "empty": Chunked((0, 3), dtype, {(0, 0): torch.empty(0, 3, dtype=dtype)}),
        }

    def fill(self, version):
        for fqn, whole in checkpoint(version).items():
            for at, box in getattr(self.tensors[fqn], "chunks", {(): self.tensors[fqn]}).items():
                sizes = box.shape[: len(at)]
                parts = [slice(a, a + size) for a, size in zip(at, sizes, strict=True)]
                box.copy_(whole[tuple(parts)])

    def has(self, version):
        other = Engine(dtype=self.fused.dtype)
        other.fill(version)
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in vars(self))


def blank():
    return {fqn: torch.full_like(tensor, -1) for fqn, tensor in checkpoint().items()}


def is_all_of(version, got):
    return all(torch.equal(got[fqn], tensor) for fqn, tensor in checkpoint(version).items())


def test_a_fused_parameter_is_published_and_read_in_place_and_read_from(opened):
    trainer, engine, rollout = opened("trainer"), opened("engine"), opened("rollout")
    theirs, ours, plain = Engine(), Engine(), blank()
    trainer.register(theirs.tensors)
    engine.register(ours.tensors)
    rollout.register(plain)
    for version in (1, 2):
        theirs.fill(version)
        trainer.publish(version)
        assert engine.update() is True
        assert ours.has(version)
        assert ours.conv[:, :2].eq(0).all(), "written beside the boxes"
        trainer.unpublish()
        assert rollout.update() is True
        assert rollout.last_read.source == "engine"
        assert is_all_of(version, plain)


def test_a_copy_is_cast_and_lies_in_one_piece(opened):
    trainer, rollout, engine = opened("trainer"), opened("rollout"), Engine(dtype=torch.bfloat16)
    source = Engine()
    source.fill(3)
    trainer.publish_copy(3, source.tensors, transform=Cast(torch.bfloat16))
    source.fill(4)
    rollout.register(engine.tensors)
    rollout.replicate()
    assert engine.has(3)


def test_a_box_that_moves_or_no_longer_fits_is_noticed(opened):
    trainer, rollout, got = opened("trainer"), opened("rollout"), torch.zeros(4, 2)
    low, high = torch.zeros(2, 2), torch.ones(2, 2)
    trainer.register({"w": Chunked((4, 2), torch.float32, {(0, 0): low, (2, 0): high})})
    rollout.register({"w": got})
    trainer.publish(1)
    rollout.update()
    trainer.unpublish()
    high.data = torch.full((2, 2), 5.0)
    trainer.publish(2)
    rollout.update()
    assert got.tolist() == [[0, 0], [0, 0], [5, 5], [5, 5]]
    trainer.unpublish()
    high.data = torch.zeros(3, 2)
    with pytest.raises(UsageError, match=r"'w': the box of shape \[3, 2\] at \[2, 0\] is not"):
        trainer.publish(3)


# feature contract {
def test_a_write_to_a_box_breaks_the_contract(opened):
    trainer, engine = opened("trainer", check_contract=True), Engine()
    trainer.register(engine.tensors)
    trainer.publish(1)
    engine.fused[2, 1, 3, 3] = 7.0
    with pytest.raises(ContractBroken, match="'k'"):
        trainer.unpublish()


# } contract
def test_a_retained_version_in_boxes_is_copied_to_host_memory(opened):
    trainer, engine = opened("trainer", retain=("latest",)), Engine()
    engine.fill(1)
    trainer.register(engine.tensors)
    trainer.publish(1)
    trainer.unpublish()
    engine.fill(2)
    rollout, got = opened("rollout"), blank()
    rollout.register(got)
    assert rollout.replicate() == 1
    assert is_all_of(1, got)


@pytest.mark.parametrize("has_own_planner", [False, True])
def test_a_state_dict_of_boxes_is_saved_and_loaded_by_dcp(opened, has_own_planner):
    trainer, engine, rollout = opened("trainer"), opened("engine"), opened("rollout")
    theirs, ours, plain = Engine(), Engine(), {"model": blank(), "step": 0}
    for version in (1, 2):
        trainer.unpublish()
        theirs.fill(version)
        writer = ROSWriter(version, handle=trainer)
        dcp.save(
            {"model": theirs.tensors, "step": version},
            storage_writer=writer,
            planner=writer.planner() if has_own_planner else None,
        )
        for handle, state in ((engine, {"model": ours.tensors, "step": 0}), (rollout, plain)):
            reader = ROSReader(version, handle=handle)
            planner = reader.planner() if has_own_planner else None
            dcp.load(state, storage_reader=reader, planner=planner)
            assert state["step"] == version
            assert handle.version == version, "it serves what it has whole"
        assert ours.has(version)
        assert is_all_of(version, plain["model"])


def test_the_same_state_dict_goes_to_files_of_dcp_and_back(tmp_path):
    theirs, ours = Engine(), Engine()
    theirs.fill(1)
    dcp.save(theirs.tensors, checkpoint_id=tmp_path)
    dcp.load(ours.tensors, checkpoint_id=tmp_path)
    assert ours.has(1)


@pytest.mark.parametrize("counts", [(3, 1), (1, 0), (0, 2), (2, 2)])
def test_ranks_may_have_any_number_of_boxes(opened, counts):
    whole = torch.randn(12, 4)
    cuts = [whole[start : start + 12 // sum(counts)] for start in range(0, 12, 12 // sum(counts))]
    boxes = {(number * len(cut), 0): cut for number, cut in enumerate(cuts)}
    own = [dict(list(boxes.items())[: counts[0]]), dict(list(boxes.items())[counts[0] :])]
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: opened("t", rank=rank, world_size=2), range(2)))
        for handle, mine in zip(ranks, own, strict=True):
            handle.register({"w": Chunked((12, 4), torch.float32, mine)})
        assert list(pool.map(lambda handle: handle.publish(1), ranks)) == [True, True]
        rollout, got = opened("rollout"), torch.zeros(12, 4)
        rollout.register({"w": got})
        assert rollout.replicate() == 1
        assert torch.equal(got, whole)
        for close in [pool.submit(handle.close, linger_s=0.0) for handle in ranks]:
            close.result()
