"""Which bytes are registered: against one flag per byte."""

import numpy as np
import pytest

from torch_ros.errors import TransferFailed
from torch_ros.p2p.regions import cut, merge
from torch_ros.spans import HOST, Region


def bounds(cover):
    return list(zip(cover.starts.tolist(), cover.ends.tolist(), strict=True))


@pytest.mark.parametrize(
    ("regions", "on_host", "on_gpu"),
    [
        ([(10, 5)], [(10, 15)], [(10, 15)]),
        ([(15, 5), (10, 5)], [(10, 20)], [(10, 15), (15, 20)]),
        ([(10, 5), (14, 5)], [(10, 19)], [(10, 19)]),
        ([(10, 50), (20, 5), (30, 5)], [(10, 60)], [(10, 60)]),
        ([(10, 5), (16, 5)], [(10, 15), (16, 21)], [(10, 15), (16, 21)]),
    ],
)
def test_regions_merge(regions, on_host, on_gpu):
    for device, expected in ((HOST, on_host), (0, on_gpu)):
        cover = merge(device, [Region(*region, device) for region in regions], key=1)
        assert bounds(cover) == expected


def test_pieces_cover_exactly_what_the_spans_do():
    refused = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        sources, targets = ([random_cover(random, key) for key in range(3)] for _ in range(2))
        spans = np.stack(
            (random.integers(0, 90, 2), random.integers(0, 90, 2), random.integers(1, 9, 2)), axis=1
        ).astype(np.uint64)
        wanted = sorted(byte for span in spans.tolist() for byte in bytes_of(span))
        is_covered = all(inside(s, sources) and inside(t, targets) for s, t in wanted)
        try:
            pieces = cut("agent", spans, sources, targets).tolist()
        except TransferFailed:
            refused += 1
            assert not is_covered
            continue
        assert sorted(byte for piece in pieces for byte in bytes_of(piece)) == wanted
        for source, target, size, source_key, target_key in pieces:
            for address, key, covers in (
                (source, source_key, sources),
                (target, target_key, targets),
            ):
                [cover] = [cover for cover in covers if cover.key == key]
                assert any(a <= address and address + size <= b for a, b in bounds(cover))
    assert 30 < refused < 270  # both happen


def random_cover(random, key):
    regions = zip(
        random.integers(0, 95, 9).tolist(), random.integers(1, 12, 9).tolist(), strict=True
    )
    return merge(HOST, [Region(*region) for region in regions], key=key)


def bytes_of(span):
    return [(span[0] + i, span[1] + i) for i in range(span[2])]


def inside(address, covers):
    return any(a <= address < b for cover in covers for a, b in bounds(cover))
