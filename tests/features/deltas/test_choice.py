"""The choice between deltas and a read in full; the proof of all chunks behind it."""

import pytest
import torch

from torch_ros.codec.delta import pieces
from torch_ros.costs import HOST_COSTS, TCP_COSTS
from torch_ros.features.deltas.rules import DeltaWork, are_faster, full_s, reaches, wait_s
from torch_ros.weights.digest import chunk_digests, first_unproven, totals
from torch_ros.weights.local import LocalChunk, LocalTensor, build, local_chunks

GIB = 1 << 30


def one_percent(share):
    """The deltas of such a share of a GiB of bfloat16."""
    changed = int(GIB / 2 * share)
    return DeltaWork(3 * changed, changed, 1000)


@pytest.mark.parametrize(
    ("share", "here", "across"),
    [(0.0, True, True), (0.001, False, True), (0.01, False, True), (0.03, False, True),
     (0.1, False, False), (1.0, False, False)],
)  # fmt: skip
def test_deltas_are_chosen_where_they_win_clearly(share, here, across):
    assert are_faster(one_percent(share), GIB, HOST_COSTS) == here
    assert are_faster(one_percent(share), GIB, TCP_COSTS) == across


def test_one_percent_of_few_tensors_is_no_clear_win_within_a_host():
    """It took 1.11 of a read in full, of 256 MiB in 64 tensors."""
    changed = 1_342_000
    assert not are_faster(DeltaWork(3 * changed, changed, 64), GIB // 4, HOST_COSTS)
    assert are_faster(DeltaWork(3 * changed, changed, 64), GIB // 4, TCP_COSTS)


def test_a_delta_that_cannot_come_in_time_is_not_waited_for():
    assert wait_s(GIB, GIB, HOST_COSTS) == 0
    assert wait_s(GIB, GIB, TCP_COSTS) == full_s(GIB, TCP_COSTS) / 2
    assert wait_s(8 * GIB, GIB, TCP_COSTS) == 0
    assert wait_s(GIB // 8, GIB, HOST_COSTS) == full_s(GIB, HOST_COSTS) / 2


def test_no_more_than_a_quarter_of_the_target_is_staged():
    assert are_faster(DeltaWork(GIB // 4, 0, 0), GIB, TCP_COSTS)
    assert not are_faster(DeltaWork(GIB // 4 + 1, 0, 0), GIB, TCP_COSTS)


def test_columns_need_all_that_lies_between_their_first_and_last_place():
    whole = torch.zeros(4, 10)
    source, _ = build(local_chunks({"a": whole, "b": torch.zeros(7)}), {})
    columns = [LocalChunk((0, first), whole[:, first : first + 2].clone()) for first in (2, 6)]
    held = LocalTensor("a", whole.dtype, tuple(whole.shape), tuple(columns), spread=True)
    target, _ = build([held], {})
    assert reaches(pieces([source], target)) == {0: {0: (2, 38)}}


def layouts_of(*ranks):
    built = [build(local_chunks(tensors), {}) for tensors in ranks]
    layouts = [layout for layout, _ in built]
    return layouts, [chunk_digests(layout, memory, depth="full") for layout, memory in built]


def test_chunks_that_ranks_have_in_common_are_all_proven():
    same = {"a": torch.arange(6.0), "b": torch.arange(3.0)}
    layouts, chunks = layouts_of(same, same)
    found = totals(layouts, chunks, depth="full")
    assert first_unproven(layouts, chunks, found) is None
    layouts, chunks = layouts_of(same, same | {"b": torch.zeros(3)})
    assert totals(layouts, chunks, depth="full") == found  # the lowest rank's counts
    assert first_unproven(layouts, chunks, found) == "b"


def test_a_tensor_without_total_is_not_proven():
    layouts, chunks = layouts_of({"a": torch.arange(6.0)})
    assert first_unproven(layouts, chunks, {}) == "a"
