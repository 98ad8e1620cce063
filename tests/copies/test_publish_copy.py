"""Publishing a copy: cast, quantised, gathered. One process, memory and etcd."""
# needs features transforms

import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from kit import inside

import torch_ros
from torch_ros import NVFP4, Cast, Chunked, Float8
from torch_ros.copies import buffers as copy_buffers
from torch_ros.copies.turns import Turns
from torch_ros.errors import CallMismatch, ManifestMismatch, UsageError, VersionConflict


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
    cast = Cast(torch.bfloat16, keep=("*.norm.*",))
    trainer.publish_copy(1, masters, transform=cast)
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
        shown.append(inside(trainer).mailbox.manifest)
    places = [manifest.addresses for manifest in shown]
    assert places[0] == places[2] != places[1] == places[3]
    assert len({manifest.descriptor for manifest in shown}) == 1


@pytest.mark.parametrize("borrow_bytes", [0, 1 << 20])
def test_buffers_that_became_too_small_are_given_back(opened, borrow_bytes):
    trainer, rooms = opened("trainer", borrow_bytes=borrow_bytes), []
    for version in range(1, 5):
        trainer.publish_copy(version, {"w": torch.zeros(1000 * version)})
        rooms += map(weakref.ref, trainer.checkpoints.registered.pools)
    gc.collect()
    assert [room() is not None for room in rooms] == [False] * 6 + [True] * 2


def test_a_copy_that_does_not_fit_is_refused_and_what_is_held_stays(opened):
    trainer = opened("trainer")
    bf16 = Cast(torch.bfloat16)
    trainer.publish_copy(1, {"w": torch.ones(1000)}, transform=bf16, copy_bytes=5000)
    with pytest.raises(UsageError, match=r"12160 bytes .*copy_bytes=9000"):
        # 2 x 4032 would fit, but not beside what is published still.
        trainer.publish_copy(2, {"w": torch.ones(1000)}, copy_bytes=9000)
    assert trainer.list() == {1: {"trainer"}}
    trainer.publish_copy(2, {"w": torch.ones(1000)}, transform=bf16, copy_bytes=5000)
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


def test_a_copy_that_was_refused_does_not_bring_the_next_into_published_memory(opened):
    trainer = opened("trainer")
    rollout, target = opened("rollout"), torch.zeros(1000)
    rollout.register({"w": target})
    trainer.publish_copy(7, {"w": torch.full((1000,), 7.0)})
    with pytest.raises(VersionConflict):
        trainer.publish_copy(6, {"w": torch.full((1000,), 6.0)})
    held = trainer.checkpoints.registered.memory[0]
    unpublish = inside(trainer).unpublish

    def look(deadline, **options):
        assert torch.equal(held, torch.full((1000,), 7.0)), "written while it was published"
        unpublish(deadline, **options)

    inside(trainer).unpublish = look
    trainer.publish_copy(8, {"w": torch.full((1000,), 8.0)})
    rollout.replicate()
    assert torch.equal(target, torch.full((1000,), 8.0))


STRUCK = ("shard/checkpoint.py", "copies/buffers.py", "copies/turns.py")


# A generator that Ctrl-C ends where it is let go of says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
def test_ctrl_c_at_any_moment_brings_no_copy_into_what_is_published(monkeypatch):
    """Where a signal handler may run: at the beginning of a function, or behind one in C."""
    moments = itertools.count()

    def strike(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(STRUCK):
            nonlocal left
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def take(turns, size_bytes):
        room, shown = taken(turns, size_bytes), trainer.checkpoints.registered
        if trainer.version is not None and shown is not None:
            published = {tensor.untyped_storage().data_ptr() for tensor in shown.memory}
            assert room.untyped_storage().data_ptr() not in published
        return room

    taken = Turns.take
    monkeypatch.setattr(Turns, "take", take)
    left = -1
    while left < 0:
        left = moment = next(moments)
        trainer = torch_ros.open("m", endpoint=f"memory://{moment}", replica="trainer")
        trainer.publish_copy(1, {"w": torch.ones(3)})
        with suppress(KeyboardInterrupt):
            sys.setprofile(strike)
            try:
                trainer.publish_copy(2, {"w": torch.ones(3)})
            finally:
                sys.setprofile(None)
        trainer.publish_copy(3, {"w": torch.ones(3)})
        trainer.close()
    assert moment > 50


# Quantised


def quantised(tensor, rows, columns):
    """The recipe in plain torch, of a matrix that is a multiple of such blocks."""
    blocks = tensor.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest == 0, 1, largest / 448)
    made = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return made.flatten(2).flatten(0, 1), scales


def same(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


MATRICES = {"q_proj.weight": (512, 256), "down_proj.weight": (256, 1024)}


@pytest.mark.parametrize(("block", "suffix"), [(None, "_scale"), ((128, 128), "_scale_inv")])
def test_half_the_bytes_are_read_and_they_are_what_plain_torch_makes(opened, block, suffix):
    trainer, rollout = opened("trainer"), opened("rollout")
    weights = {fqn: torch.randn(shape).bfloat16() for fqn, shape in MATRICES.items()}
    weights["q_proj.weight"][:128] = 0
    trainer.publish_copy(1, weights, transform=Float8(["*_proj.weight"], block=block))
    expected = {}
    for fqn, tensor in weights.items():
        rows, columns = block or (1, tensor.shape[1])
        expected[fqn], expected[fqn + suffix] = quantised(tensor, rows, columns)
    got = {fqn: torch.empty_like(tensor) for fqn, tensor in expected.items()}
    rollout.register(got)
    assert rollout.replicate() == 1
    assert all(same(got[fqn], tensor) for fqn, tensor in expected.items())
    before = sum(tensor.nbytes for tensor in weights.values())
    assert rollout.last_read.bytes_total <= 0.52 * before
    assert bool((got["q_proj.weight" + suffix][0] == 1).all())


def test_quantised_copies_take_turns_in_two_buffers_that_stay(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    both = [Float8(["w"]), Cast(torch.bfloat16)]
    got = {
        "w": torch.zeros(8, 16, dtype=torch.float8_e4m3fn),
        "w_scale": torch.zeros(8, 1),
        "norm": torch.zeros(3, dtype=torch.bfloat16),
    }
    rollout.register(got)
    shown = []
    for version in range(4):
        weights = {"w": torch.full((8, 16), 1.0 + version), "norm": torch.full((3,), 2.0)}
        trainer.publish_copy(version, weights, transform=both)
        shown.append(inside(trainer).mailbox.manifest)
        weights["w"].fill_(-1)
        assert rollout.update() is True
        assert torch.equal(got["w"].float() * got["w_scale"], torch.full((8, 16), 1.0 + version))
    places = [manifest.addresses for manifest in shown]
    assert places[0] == places[2] != places[1] == places[3]
    assert len({manifest.descriptor for manifest in shown}) == 1


def test_a_copy_for_the_host_of_tensors_on_the_host_is_the_same(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    source, got = torch.randn(30, 7), torch.zeros(30, 7)
    trainer.publish_copy(1, {"w": source}, to="cpu")
    rollout.register({"w": got})
    rollout.replicate()
    assert torch.equal(got, source)


# Several ranks


@pytest.fixture
def ranks(opened):
    with ThreadPoolExecutor(2) as pool:
        join = lambda rank: opened("trainer", rank=rank, world_size=2)
        handles = list(pool.map(join, range(2)))

        def publish(version, shards, **options):
            """Returns what each rank was told: the answer, or the error."""

            def one(rank):
                mine = {name: values[rank] for name, values in options.items()}
                try:
                    return handles[rank].publish_copy(version, shards[rank], **mine)
                except Exception as error:  # looked at by the caller
                    return error

            return list(pool.map(one, range(2)))

        yield publish, handles


def rows(tensor, *edges):
    """A shard for each rank: rows of one tensor."""
    return [
        {"w": Chunked(tensor.shape, tensor.dtype, {(a, 0): tensor[a:b]})}
        for a, b in zip((0, *edges), (*edges, len(tensor)), strict=True)
    ]


@pytest.mark.parametrize(("block", "edge"), [(None, 77), ((128, 128), 128)])
def test_ranks_quantise_their_shards_alone_and_any_sharding_reads_them(opened, ranks, block, edge):
    publish, _ = ranks
    tensor = torch.randn(256, 384)
    recipe = Float8(["w"], block=block)
    assert publish(1, rows(tensor, edge), transform=[recipe] * 2) == [True, True]
    high, wide = block or (1, 384)
    expected, scales = quantised(tensor, high, wide)
    suffix = "_scale_inv" if block else "_scale"
    got = {"w": torch.empty_like(expected), "w" + suffix: torch.empty_like(scales)}
    rollout = opened("rollout", got)
    assert rollout.replicate() == 1
    assert same(got["w"], expected)
    assert same(got["w" + suffix], scales)


@pytest.mark.parametrize("is_first", [False, True])
def test_what_fails_on_one_rank_is_an_error_on_both_and_nothing_is_given_up(ranks, is_first):
    publish, handles = ranks
    tensor = torch.ones(256, 128)
    both = {"transform": [Float8(["w"])] * 2}
    held = {}
    if not is_first:
        assert publish(1, rows(tensor, 128), **both) == [True, True]
        held = {1: {"trainer"}}
    tensor[200, 7] = float("nan")
    found = publish(2, rows(tensor, 128), **both)
    assert [type(error) for error in found] == [UsageError] * 2
    assert all("'w' has elements that are not finite" in str(error) for error in found)
    tensor[200, 7] = 1
    found = publish(2, rows(tensor, 100), transform=[Float8(["w"], block=(128, 128))] * 2)
    assert [type(error) for error in found] == [UsageError] * 2
    assert all("cuts dimension 0 at 100, inside of block 0" in str(error) for error in found)
    assert handles[0].list() == held
    assert [handle.version for handle in handles] == [None if is_first else 1] * 2
    assert publish(3, rows(tensor, 100), **both) == [True, True]
    assert handles[0].list() == {3: {"trainer"}}


@pytest.mark.parametrize("is_first", [False, True])
def test_ranks_with_different_transforms_are_told_and_nothing_is_given_up(ranks, is_first):
    publish, handles = ranks
    shards = rows(torch.randn(256, 128), 128)
    by_rows, by_blocks = Float8(["w"]), Float8(["w"], block=(128, 128))
    if not is_first:
        assert publish(1, shards, transform=[by_rows, by_rows]) == [True, True]
    found = publish(2, shards, transform=[by_rows, by_blocks])
    assert [type(error) for error in found] == [ManifestMismatch] * 2
    assert "equal transforms on all ranks" in str(found[0])
    assert "block=(128, 128)" in str(found[1])
    assert handles[0].list() == ({} if is_first else {1: {"trainer"}})
    assert publish(2, shards, transform=[by_blocks, by_blocks]) == [True, True]
    assert handles[0].list() == {2: {"trainer"}}


def test_ranks_that_are_told_one_global_scale_make_together_what_one_rank_makes(opened, ranks):
    publish, handles = ranks
    tensor = torch.randn(6, 64)
    told, other = (NVFP4(["w"], global_scales={"w": scale}) for scale in (700.0, 701.0))
    untold = publish(1, rows(tensor, 2), transform=[NVFP4(["w"])] * 2)
    assert [type(error) for error in untold] == [UsageError] * 2
    assert all("'w_global_scale' is made of the whole tensor" in str(error) for error in untold)
    unequal = publish(1, rows(tensor, 2), transform=[told, other])
    assert [type(error) for error in unequal] == [ManifestMismatch] * 2
    assert handles[0].list() == {}
    assert publish(1, rows(tensor, 2), transform=[told] * 2) == [True, True]
    assert opened("alone").publish_copy(2, {"w": tensor}, transform=told)
    reader, found = opened("reader"), []
    for version in (1, 2):
        got = {
            "w_packed": torch.empty(6, 32, dtype=torch.uint8),
            "w_scale": torch.empty(6, 4, dtype=torch.float8_e4m3fn),
            "w_global_scale": torch.empty(1),
        }
        reader.read(version, got)
        found.append(got)
    assert found[0]["w_global_scale"].tolist() == [700]
    assert all(same(one, found[1][fqn]) for fqn, one in found[0].items())


@pytest.mark.parametrize("has_one", [0, 1])
def test_a_transform_on_one_rank_only_is_an_error_on_both(ranks, has_one):
    publish, handles = ranks
    shards, recipes = rows(torch.randn(4, 2), 2), [None, None]
    recipes[has_one] = Cast(torch.bfloat16)
    found = publish(1, shards, transform=recipes)
    assert [type(error) for error in found] == [CallMismatch] * 2
    assert handles[0].list() == {}
    assert publish(1, shards, transform=[None, None]) == [True, True]
    found = publish(2, shards, transform=recipes)
    assert [type(error) for error in found] == [ManifestMismatch] * 2
    assert handles[0].list() == {1: {"trainer"}}


def test_what_is_shown_of_the_last_copy_is_not_written_by_one_that_fails(ranks, monkeypatch):
    publish, handles = ranks
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", 1024)
    tensor = torch.ones(256, 128)
    both = {"transform": [Float8(["w"])] * 2}
    assert publish(1, rows(tensor, 128), **both) == [True, True]
    shown = [handle.checkpoints.registered.memory for handle in handles]
    before = [[part.clone() for part in parts] for parts in shown]
    tensor.fill_(5)
    tensor[255, 127] = float("inf")  # in the last of many pieces
    for version in (2, 3):
        assert not any(answer is True for answer in publish(version, rows(tensor, 128), **both))
    for parts, copies in zip(shown, before, strict=True):
        assert all(same(part, copy) for part, copy in zip(parts, copies, strict=True))
