"""Pieces that are made elsewhere and brought to host memory; on the CPU, where none overlap.

`tests/gpu` has them on a GPU.
"""
# needs features transforms

import pytest
import torch

from torch_ros import MXFP8, NVFP4, Cast, Float8
from torch_ros.copies import buffers as copy_buffers
from torch_ros.copies.buffers import make
from torch_ros.copies.ferry import CROSSING_MAX, Ferry
from torch_ros.copies.transforms import Making
from torch_ros.weights.local import local_chunks


def test_few_pieces_are_under_way_and_all_are_there_in_the_end():
    ferry = Ferry()
    made = [torch.full((3, 2), float(number)) for number in range(5)]
    places = [torch.zeros(2, 3).t() for _ in made]
    for number, (tensor, place) in enumerate(zip(made, places, strict=True)):
        ferry.bring([tensor], [place])
        there = [bool((each == at).all()) for at, each in enumerate(places)]
        assert sum(not each for each in there[1 : number + 1]) <= CROSSING_MAX
        assert not any(there[number + 1 :])
        tensor.fill_(-1)  # it is not needed any more
    ferry.land()
    ferry.land()
    assert all(bool((place == number).all()) for number, place in enumerate(places))


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8, torch.complex64, torch.float64])
def test_any_dtype_crosses(dtype):
    made = torch.arange(32, dtype=torch.uint8).view(dtype)
    place = torch.zeros(32, dtype=torch.uint8).view(dtype)
    ferry = Ferry()
    ferry.bring([made], [place])
    ferry.land()
    assert torch.equal(made.view(torch.uint8), place.view(torch.uint8))


@pytest.mark.parametrize(
    "transforms",
    [(), (Cast(torch.bfloat16),), (Float8(["w"], block=(2, 4)),), (MXFP8(["w"]),), (NVFP4(["w"]),)],
    ids=repr,
)
@pytest.mark.parametrize("piece_bytes", [1, 200, 1 << 20])
def test_pieces_that_are_ferried_are_those_that_are_made_in_place(
    monkeypatch, transforms, piece_bytes
):
    monkeypatch.setattr(copy_buffers, "PIECE_BYTES", piece_bytes)
    [tensor] = local_chunks({"w": torch.randn(11, 32)})
    [chunk] = tensor.chunks
    making, ferry = Making.of(tensor, transforms), Ferry()
    here, brought = (
        {
            name: torch.zeros(sizes, dtype=making.outputs[name].dtype)
            for name, (_, sizes) in making.boxes(chunk).items()
        }
        for _ in range(2)
    )
    make(making, chunk.tensor, here, None)
    make(making, chunk.tensor, brought, ferry)
    ferry.land()
    for name, expected in here.items():
        assert torch.equal(brought[name].view(torch.uint8), expected.view(torch.uint8))
        assert expected.float().any()
