"""Boxes of random views, against a copy of every element."""

import random
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_ros.integrations.boxes import PAIRS_MAX, Frame, pairs, uncovered

CHOICES = st.lists(st.integers(0, 2**16), max_size=30)


def a_view(tensor, pick):
    """A random view of a tensor."""
    for _ in range(pick(6)):
        dim = pick(tensor.ndim) if tensor.ndim else 0
        size = tensor.shape[dim] if tensor.ndim else 1
        match pick(8):
            case 0 if tensor.ndim > 1:
                tensor = tensor.transpose(dim, pick(tensor.ndim))
            case 1 if tensor.ndim:
                begin = pick(size)
                tensor = tensor.narrow(dim, begin, 1 + pick(size - begin))
            case 2 if tensor.ndim:
                tensor = tensor[
                    (*[slice(None)] * dim, slice(pick(min(size, 2)), None, 1 + pick(3)))
                ]
            case 3 if tensor.is_contiguous():
                tensor = tensor.view(-1)
            case 4 if tensor.ndim and size:
                tensor = tensor.unflatten(dim, (1 + pick(3), -1)) if size % 6 == 0 else tensor
            case 5 if tensor.ndim > 1:
                tensor = tensor.diagonal()
            case 6 if tensor.ndim and size > 1:
                tensor = tensor.unfold(dim, 2, 1)
            case 7:
                tensor = tensor.unsqueeze(pick(tensor.ndim + 1))
    return tensor


def _pairs(*tensors):
    return pairs(*map(Frame.of, tensors))


@settings(max_examples=300, deadline=None)
@given(choices=CHOICES)
@example(choices=[])
def test_pairs_are_what_a_copy_does(choices):
    left = iter(choices)

    def pick(count):
        return next(left, 0) % count

    shape = [(12, 6), (6,), (3, 4, 6), (1, 6, 1), (36,), ()][pick(6)]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    if pick(2) and whole.ndim == 2:
        whole = whole.t().contiguous().t()
    copied = a_view(whole, pick)
    room = [n + pick(2) for n in copied.shape]
    target = torch.full([room[dim] for dim in range(len(room))], -1)
    written = target
    for dim, size in enumerate(copied.shape):
        written = written.narrow(dim, room[dim] - size, size)
    if pick(2) and target.is_contiguous() and target.ndim:  # the same memory in one dimension
        target = target.view(-1)
    found = _pairs(whole, copied, target, written)
    if copied.numel() <= PAIRS_MAX:
        assert found is not None
    written.copy_(copied)
    seen = torch.zeros_like(target, dtype=torch.bool)
    for pair in found:
        box = slices(pair.target, pair.target_sizes)
        assert not seen[box].any()
        seen[box] = True
        of = slices(pair.source, pair.source_sizes)
        ones, others = ([dim[side] for dim in pair.dims] for side in (0, 1))
        assert torch.equal(inner(whole[of], ones), inner(target[box], others))
    assert torch.equal(seen, target >= 0)


def slices(offsets, sizes):
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def inner(tensor, dims):
    """These dimensions; the others have size 1."""
    rest = [dim for dim in range(tensor.ndim) if dim not in dims]
    return tensor.permute([*dims, *rest]).reshape([tensor.shape[dim] for dim in dims])


def test_one_box_says_where_a_whole_tensor_goes_flat_or_not():
    whole, flat = torch.empty(4, 6), torch.empty(24)
    assert len(_pairs(whole, whole, whole, whole)) == 1
    assert len(_pairs(whole, whole.view(24), flat, flat)) == 4
    assert len(_pairs(whole, whole.view(24)[3:17], flat, flat[:14])) == 3


def test_a_shuffle_of_too_many_boxes_is_none():
    whole = torch.empty(2 * PAIRS_MAX + 2, device="meta")
    other = torch.empty(PAIRS_MAX + 1, device="meta")
    assert _pairs(whole, whole[::2], other, other) is None


@pytest.mark.parametrize("seed", range(40))
def test_what_boxes_leave_uncovered_is_counted(seed):
    generator = random.Random(seed)
    shape = tuple(generator.randrange(1, 6) for _ in range(generator.randrange(4)))
    covered, boxes = torch.zeros(shape, dtype=torch.bool), []
    for _ in range(generator.randrange(8)):
        offsets = tuple(generator.randrange(size) for size in shape)
        sizes = tuple(
            generator.randrange(1, size - at + 1) for at, size in zip(offsets, shape, strict=True)
        )
        boxes.append((offsets, sizes))
        ends = zip(offsets, sizes, strict=True)
        covered[tuple(slice(at, at + size) for at, size in ends)] = True
    assert uncovered(shape, boxes) == int((~covered).sum())


def test_nothing_is_uncovered_in_an_empty_tensor():
    assert uncovered((0, 3), []) == 0


def test_thousands_of_boxes_side_by_side_are_counted_at_once():
    boxes = [((row, column), (1, 1)) for row in range(64) for column in range(64)]
    random.Random(0).shuffle(boxes)
    began_s = time.perf_counter()
    assert uncovered((64, 64), boxes) == 0
    assert time.perf_counter() - began_s < 5
