"""Coverage by arithmetic, against boxes that are painted into arrays."""

import random
import re

import numpy as np
import pytest
import torch

from torch_ros import Chunked
from torch_ros.errors import ManifestMismatch
from torch_ros.weights.coverage import is_whole, require_whole, sharding
from torch_ros.weights.local import build, local_chunks


def layout_of(tensors, objects=None):
    return build(local_chunks(tensors), objects or {})[0]


def cut(shape, rng):
    """Random boxes that are the whole together, each element once: offsets and sizes."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(6) if shape else 0):
        offsets, sizes = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        at = rng.randrange(sizes[dim] + 1)
        low, high, after = list(sizes), list(sizes), list(offsets)
        low[dim], high[dim], after[dim] = at, sizes[dim] - at, offsets[dim] + at
        boxes += [(offsets, tuple(low)), (tuple(after), tuple(high))]
    return [(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]


def scattered(shapes, rng, rank_count):
    """For each rank, the boxes that it has of each tensor; some boxes are on several ranks."""
    ranks = [{fqn: {} for fqn in shapes} for _ in range(rank_count)]
    for fqn, shape in shapes.items():
        for offsets, sizes in cut(shape, rng):
            for rank in rng.sample(range(rank_count), rng.choice([1, 1, 1, rank_count])):
                ranks[rank][fqn][offsets] = torch.zeros(sizes)
    return ranks


def layouts_of(shapes, ranks):
    return [
        layout_of({fqn: Chunked(shapes[fqn], torch.float32, held) for fqn, held in boxes.items()})
        for boxes in ranks
    ]


def missing(shapes, ranks):
    """The elements that no rank has, by tensor."""
    left = {fqn: np.ones(shape, np.bool_) for fqn, shape in shapes.items()}
    for boxes in ranks:
        for fqn, held in boxes.items():
            for offsets, box in held.items():
                ends = [start + size for start, size in zip(offsets, box.shape, strict=True)]
                left[fqn][tuple(map(slice, offsets, ends))] = False
    return {fqn: cells for fqn, cells in left.items() if cells.any()}


@pytest.mark.parametrize("seed", range(60))
def test_ranks_are_whole_if_and_only_if_no_element_is_missing(seed):
    rng = random.Random(seed)
    shapes = {
        f"t{number}": tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4)))
        for number in range(rng.randrange(1, 4))
    }
    ranks = scattered(shapes, rng, rng.randrange(1, 5))
    require_whole(layouts_of(shapes, ranks))
    held = [(rank, fqn, at) for rank in ranks for fqn, boxes in rank.items() for at in boxes]
    rank, fqn, offsets = rng.choice(held)
    box = rank[fqn].pop(offsets)
    wide = [dim for dim, size in enumerate(box.shape) if size > 1]
    if wide and rng.random() < 0.8:  # the last slice of it is missing, often one element
        dim = rng.choice(wide)
        rank[fqn][offsets] = box.narrow(dim, 0, box.shape[dim] - 1)
    lacks = missing(shapes, ranks)
    layouts = layouts_of(shapes, ranks)
    assert is_whole(layouts) == (not lacks)
    if not lacks:
        return
    with pytest.raises(ManifestMismatch) as caught:
        require_whole(layouts)
    name, first, last = re.search(
        r"tensor '(\w+)'.* box from (\[.*?\]) to (\[.*?\]);", str(caught.value)
    ).groups()
    box = tuple(slice(a, b) for a, b in zip(eval(first), eval(last), strict=True))
    assert lacks[name][box].all(), "that very box is missing"


def test_the_sharding_is_the_tensors_and_the_boxes():
    whole, other = torch.zeros(4, 6), torch.zeros(6, 4).t()
    one = sharding(layout_of({"w": whole}))
    assert one.is_whole
    assert sharding(layout_of({"w": other})) == one, "strides do not matter"
    halves = {(0, 0): whole[:2], (2, 0): whole[2:]}
    cut_ = sharding(layout_of({"w": Chunked((4, 6), torch.float32, halves)}))
    assert not cut_.is_whole
    half = sharding(layout_of({"w": Chunked((4, 6), torch.float32, {(0, 0): whole[:2]})}))
    none = sharding(layout_of({"w": Chunked((4, 6), torch.float32, {})}))
    renamed = sharding(layout_of({"v": whole}))
    cast = sharding(layout_of({"w": whole.int()}))
    assert len({each.digest for each in (one, cut_, half, none, renamed, cast)}) == 6


def test_objects_are_whole_where_they_are_and_of_any_size():
    sizes = [torch.zeros(size, dtype=torch.uint8) for size in (3, 5)]
    there = [sharding(layout_of({"empty": torch.zeros(0, 2)}, {"step": each})) for each in sizes]
    assert there[0] == there[1] != sharding(layout_of({"empty": torch.zeros(0, 2)}))
    assert there[0].is_whole
    require_whole([layout_of({}, {"step": sizes[0]}), layout_of({}, {"step": sizes[1]})])


def test_ranks_with_other_tensors_of_one_name_are_refused():
    layouts = [layout_of({"w": torch.zeros(2)}), layout_of({"w": torch.zeros(3)})]
    with pytest.raises(ManifestMismatch, match="on rank 1"):
        require_whole(layouts)
    assert not is_whole(layouts)
