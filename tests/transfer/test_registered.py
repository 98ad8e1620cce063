"""Which memory is registered for tensors that share it, and in how many spans it is read."""

import itertools
import uuid
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit import inside
from torch.distributed.tensor import DTensor, Shard

import torch_ros
from torch_ros.p2p.nixl import NixlTransport
from torch_ros.spans import Region
from torch_ros.transfer import reading
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.transfer.feed import Progress
from torch_ros.transfer.named import NamedTensors
from torch_ros.transfer.posting import joined
from torch_ros.transfer.registered import LocalState, as_segments
from torch_ros.weights.local import local_chunks

COUNT, ELEMENTS = 2000, 16


def registered(tensors):
    return LocalState(local_chunks(tensors), {}, {})


def side_by_side(value, count=COUNT):
    storage = torch.full((count * ELEMENTS,), value, dtype=torch.int16)
    return {f"t{i}": row for i, row in enumerate(storage.view(count, ELEMENTS))}


def test_tensors_that_fill_one_storage_are_one_registration():
    tensors = side_by_side(1)
    [region] = registered(tensors).regions
    assert region == Region(tensors["t0"].data_ptr(), COUNT * ELEMENTS * 2)
    transport = NixlTransport()
    try:
        [cover] = transport.register([region]).covers
        assert len(cover.starts) == 1
    finally:
        transport.close()


def told(target, *batches):
    """The positions that readers are told as these chunks arrive."""
    positions = []
    mailbox = SimpleNamespace(
        serve=lambda _, position: positions.append(position), tell_rate=lambda _: None
    )
    progress = Progress(mailbox, target)
    for chunks in batches:
        progress.add(np.array(chunks), 0)
    return positions


def test_a_tied_tensor_is_there_with_the_one_that_is_read_for_it():
    shared, between = torch.zeros(8), torch.zeros(8)
    target = registered({"a": shared, "b": between, "c": shared.view(8), "d": shared.view(2, 4)})
    assert target.ties == {2: 0}, "only what has the same shape"
    assert [record.fqn for record in target.phases[-1].layout.tensors] == ["a", "b", "c", "d"]
    assert [chunk.tensor for chunk in target.phases[-1].layout.chunks] == [0, 1, 3]
    assert target.phases[-1].blocks.tolist() == [0, 1, 3]
    assert told(target, [1], [0, 3]) == [0, ALL_BLOCKS]


def test_what_is_written_twice_is_told_when_all_that_is_written_there_has_arrived():
    """A reader of this process would take what a later read may just be writing over."""
    fused, other = torch.zeros(12), torch.zeros(4)
    parts = {"k": fused[:6], "q": fused[6:], "fused": fused, "other": other, "z": torch.zeros(1)}
    target = registered(parts)  # fused, k, other, q, z
    group = target.overlaps[0]
    assert target.overlaps.tolist() == [group, group, -1, group, -1]
    assert told(target, [0], [1], [2], [3], [4]) == [0, 0, 0, 4, ALL_BLOCKS]
    apart = registered({"k": fused[:6], "q": fused[6:], "tied": fused[6:]})
    assert apart.overlaps is None
    assert told(apart, [0], [1]) == [1, ALL_BLOCKS]


def test_a_gap_in_a_storage_is_not_registered():
    row = torch.zeros(100, dtype=torch.uint8)
    tensors = {"a": row[:10], "b": row[10:20], "c": row[21:30], "d": row[25:28], "e": row[30:40]}
    start = row.data_ptr()
    assert registered(tensors).regions == [Region(start, 20), Region(start + 21, 19)]


def test_two_storages_are_two_regions_even_where_they_touch():
    memory = torch.zeros(64, dtype=torch.uint8).numpy()
    halves = {"a": torch.from_numpy(memory[:32]), "b": torch.from_numpy(memory[32:])}
    assert [region.size_bytes for region in registered(halves).regions] == [32, 32]


def test_tensors_on_a_gpu_are_registered_with_the_allocation_that_they_lie_in():
    segments = [Region(1000, 100, 0), Region(1100, 100, 0), Region(1000, 50, 1)]
    within = {
        Region(1000, 10, 0): segments[0],
        Region(1050, 50, 0): segments[0],
        Region(1100, 1, 0): segments[1],
        Region(1040, 10, 1): segments[2],
    }
    alone = {
        Region(1090, 20, 0),  # of two of them; so of something else
        Region(1040, 20, 1),
        Region(900, 10, 0),
        Region(1000, 10, 2),
        Region(1000, 10),
    }
    assert as_segments(within, segments) == set(segments)
    assert as_segments(alone, segments) == alone
    assert as_segments(alone | within.keys(), []) == alone | within.keys()


def test_tensors_side_by_side_at_both_ends_are_read_as_one_span():
    model, endpoint = "m", f"memory://{uuid.uuid4().hex}"
    sent, got = side_by_side(7), side_by_side(0)
    with (
        torch_ros.open(model, endpoint=endpoint, replica="trainer") as trainer,
        torch_ros.open(model, endpoint=endpoint, replica="rollout") as rollout,
    ):
        trainer.register(sent)
        trainer.publish(1)
        rollout.register(got)
        rollout.replicate()
        assert all(bool((tensor == 7).all()) for tensor in got.values())
        [(_, batches)] = inside(rollout).reading._prepared.values()
        assert [len(read._pieces) for batch in batches for read in batch.transfers] == [1]


@pytest.mark.parametrize(
    ("bound", "most", "kept"),
    [("PREPARED_MAX", 2, 2), ("PREPARED_SPANS_MAX", 20, 2), ("PREPARED_SPANS_MAX", 5, 1)],
)
def test_reads_of_the_last_sources_are_kept_up_to_a_bound(monkeypatch, bound, most, kept):
    monkeypatch.setattr(reading, bound, most)
    model, endpoint = "m", f"memory://{uuid.uuid4().hex}"
    got, seen = {f"t{i}": torch.zeros(4) for i in range(10)}, []
    with ExitStack() as opened:

        def joined_as(name):
            return opened.enter_context(torch_ros.open(model, endpoint=endpoint, replica=name))

        rollout = joined_as("rollout")
        rollout.register(got)
        for version in (1, 2, 3):
            trainer = joined_as(f"trainer {version}")
            trainer.register({name: torch.full((4,), float(version)) for name in got})
            trainer.publish(version)
            rollout.unpublish()
            rollout.replicate(version)
            *_, (_, batches) = inside(rollout).reading._prepared.values()
            seen.append([read for batch in batches for read in batch.transfers])
        assert all(bool((tensor == 3).all()) for tensor in got.values())
        assert len(inside(rollout).reading._prepared) == kept
        for number, reads in enumerate(seen):
            assert all(read._is_closed == (number < 3 - kept) for read in reads)


def test_joined_spans_are_the_same_bytes_and_as_few_as_can_be():
    for seed in range(100):
        random = np.random.default_rng(seed)
        runs = []  # bytes that follow each other on both sides, with room around them
        for number in range(random.integers(1, 5)):
            cuts = np.unique(random.integers(1, 90, random.integers(0, 6)))
            ends = [0, *cuts.tolist(), 90]
            source, target = (
                1000 * number,
                2**63 + 1000 * int(random.permutation(9)[0]) + 10_000 * number,
            )
            runs.append([(source + a, target + a, b - a) for a, b in itertools.pairwise(ends)])
        rows = [row for run in runs for row in run]
        spans = np.array([rows[i] for i in random.permutation(len(rows))], np.uint64)
        expected = {(run[0][0], run[0][1], 90) for run in runs}
        assert {tuple(span) for span in joined(spans).tolist()} == expected, seed
        assert len(joined(spans)) == len(expected), seed


def test_spans_that_touch_on_one_side_only_stay_apart_and_in_order():
    spans = np.array([(50, 10, 5), (55, 20, 5), (0, 25, 5), (5, 31, 5)], np.uint64)
    assert joined(spans).tolist() == spans.tolist()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "DTensor"])
def test_a_tensor_that_has_moved_is_found_where_it_is(mesh, is_sharded):
    def tensor(value):
        made = torch.full((4,), float(value))
        return DTensor.from_local(made, mesh, [Shard(0)]) if is_sharded else made

    def move(tensor, value):
        there = torch.full((4,), float(value))
        if is_sharded:
            tensor._local_tensor = there
        else:
            tensor.data = there

    endpoint = f"memory://{uuid.uuid4().hex}"
    sent, got = ({name: tensor(value) for name in "abc"} for value in (1, 0))
    with (
        torch_ros.open("m", endpoint=endpoint, replica="trainer", rank=0, world_size=1) as trainer,
        torch_ros.open("m", endpoint=endpoint, replica="rollout", rank=0, world_size=1) as rollout,
    ):
        trainer.register(sent)
        rollout.register(got)
        trainer.publish(1)
        rollout.update()
        trainer.unpublish()
        move(sent["b"], 2)
        trainer.publish(2)
        move(got["c"], -1)
        assert rollout.update()
        assert [float(got[name].sum()) for name in "abc"] == [4, 8, 4]


def test_a_tensor_that_is_cut_otherwise_in_place_is_published_as_it_is():
    endpoint = f"memory://{uuid.uuid4().hex}"
    turned, shorter = torch.arange(6.0).view(2, 3), torch.arange(4.0).view(4, 1)
    with (
        torch_ros.open("m", endpoint=endpoint, replica="trainer") as trainer,
        torch_ros.open("m", endpoint=endpoint, replica="rollout") as rollout,
    ):
        trainer.register({"turned": turned, "shorter": shorter})
        trainer.publish(1)
        trainer.unpublish()
        turned.t_()
        shorter.resize_(2, 1)
        trainer.publish(2)
        got = {"turned": torch.zeros(3, 2), "shorter": torch.zeros(2, 1)}
        rollout.register(got)
        rollout.replicate()
        assert torch.equal(got["turned"], turned)
        assert torch.equal(got["shorter"], shorter)


def strided():
    return torch.arange(16.0).view(4, 4).t()


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (torch.zeros(2, 3), lambda t: setattr(t, "data", torch.zeros(2, 3))),
        (torch.zeros(2, 3), lambda t: setattr(t, "data", t.data.view(3, 2))),
        (torch.zeros(4, 4), lambda t: setattr(t, "data", t.data.t())),
        (torch.zeros(4), lambda t: t.resize_(3)),
        (torch.zeros(2, 3), lambda t: t.resize_(3, 2)),
        (torch.zeros(2, 3), lambda t: t.set_(torch.zeros(2, 3))),
        (torch.zeros(4, 4), lambda t: t.set_(t.untyped_storage(), 0, (4, 4), (1, 4))),
        (torch.zeros(2, 3), lambda t: t.t_()),
        (torch.zeros(4, 4), lambda t: t.t_()),
        (torch.zeros(1, 4), lambda t: t.t_()),
        (torch.zeros(1, 4), lambda t: t.squeeze_()),
        (torch.zeros(4), lambda t: t.untyped_storage().resize_(1 << 20)),
        (strided(), lambda t: t.t_()),
        (strided(), lambda t: t.as_strided_((4, 4), (1, 3))),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "parameter", "DTensor"])
def test_a_change_of_memory_or_shape_or_strides_is_noticed(mesh, kind, tensor, change):
    mine = tensor.clone()  # keeps the strides
    given = [torch.zeros(4, 4), mine, torch.zeros(4, 4).t()]
    if kind == "parameter":
        given = [torch.nn.Parameter(t, requires_grad=False) for t in given]
        mine = given[1]
    elif kind == "DTensor":
        given = [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in given]
        mine = given[1]._local_tensor
    tensors = dict(zip("abc", given, strict=True))
    named = NamedTensors(tensors, tensors)
    mine.data.add_(1)
    assert named.moved == []
    with torch.no_grad():
        change(mine)
    assert named.moved == ["b"]


def test_pinned_and_empty_memory_is_kept_from_huge_pages(monkeypatch):
    tensors = {"a": torch.zeros(8), "pinned": torch.zeros(16), "none": torch.zeros(0)}
    tensors["tied"] = tensors["a"].view(2, 4)
    pinned = tensors["pinned"].data_ptr()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() == pinned)
    found = registered(tensors).unpinned()
    assert found == ([Region(tensors["a"].data_ptr(), 32)], {"a device has pinned it": 64})
