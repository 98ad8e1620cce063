"""Updates by deltas between any two shardings, in every dtype, with real publishers and readers.

TORCH_ROS_FUZZ=n tries n times as much.
"""

import math
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from features.deltas.changing import made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_ros
from torch_ros import Chunked

TIMES = int(os.environ.get("TORCH_ROS_FUZZ", "1"))
FAR = torch_ros.Costs(read_bytes_per_s=1e3)  # deltas are faster wherever they are smaller
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
LARGE = (700, 200)  # of three segments; few of so many change, as a part may need them all
SMALL = [(), (0,), (1,), (7,), (0, 3), (6, 5), (4, 3, 5)]


def content(rng, shape, dtype):
    high = 2 if dtype == torch.bool else 256
    raw = rng.integers(0, high, math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(
        shape, dtype=dtype
    )  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def changed(rng, tensor):
    """The same with another lowest or highest bit in some elements; of small ones, in none too."""
    new = tensor.clone()
    # Room for a delta is twice the one before, so all are about as large.
    if new.shape == LARGE or (new.numel() and rng.random() < 0.7):
        each = new.reshape(-1).view(torch.uint8).view(new.numel(), -1)
        places = rng.integers(0, new.numel(), max(1, new.numel() // 200))
        is_sign = new.dtype != torch.bool and rng.random() < 0.5  # NaNs and -0.0, too
        each[places, -1 if is_sign else 0] ^= 0x80 if is_sign else 1
    return new


def halves(rng, box):
    """Two boxes for it, unevenly."""
    dim = int(rng.integers(len(box)))
    part = box[dim]
    quarter = (part.stop - part.start) // 4
    mark = int(rng.integers(part.start + quarter, part.stop - quarter + 1))
    parts = slice(part.start, mark), slice(mark, part.stop)
    return [(*box[:dim], each, *box[dim + 1 :]) for each in parts]


def cut(rng, shape, ranks):
    """The boxes of a tensor that each rank has: uneven, of all of it, or for small ones none."""
    whole = tuple(slice(0, size) for size in shape)
    if not shape or 0 in shape or rng.random() < 0.2:
        is_everywhere = shape == LARGE or rng.random() < 0.5
        return [[whole], *([whole] if is_everywhere else [] for _ in range(ranks - 1))]
    of_ranks = [[box] for box in halves(rng, whole)] if ranks == 2 else [[whole]]
    return [halves(rng, *boxes) if rng.random() < 0.4 else boxes for boxes in of_ranks]


def share(tensors, cuts, rank, memory):
    """What a rank has of them."""
    return {
        fqn: Chunked(
            tensor.shape,
            tensor.dtype,
            {tuple(p.start for p in box): memory(tensor[box]) for box in cuts[fqn][rank]},
        )
        for fqn, tensor in tensors.items()
    }


def elsewhere(rng, tensor):
    """Zeros of that shape, at times with its dimensions turned around or with gaps between."""
    match rng.integers(3):
        case 0:
            turned = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype)
            return turned.permute([*range(tensor.ndim)][::-1])
        case 1:
            wide = torch.zeros([size + 1 for size in tensor.shape], dtype=tensor.dtype)
            return wide[tuple(slice(1, None) for _ in tensor.shape)]
        case _:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)


@pytest.mark.timeout(120 + 10 * TIMES)
@settings(
    max_examples=12 * TIMES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    database=None,
)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
)
@pytest.mark.long
def test_any_sharding_follows_any_other_by_deltas_in_any_dtype(seed, dtype, sizes):
    rng = np.random.default_rng(seed)
    dtypes = [dtype, *(DTYPES[n] for n in rng.integers(len(DTYPES), size=4))]
    shapes = [LARGE, *(SMALL[n] for n in rng.integers(len(SMALL), size=4))]
    tensors = {
        f"t{n}": content(rng, *each) for n, each in enumerate(zip(shapes, dtypes, strict=True))
    }
    options = {"endpoint": "memory://" + uuid.uuid4().hex, "digests": "full", "timeout_s": 20}
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:

        def at_all(function, handles):
            return list(pool.map(function, range(len(handles)), handles))

        def replica(name, size, **more):
            def open_(rank):
                return torch_ros.open(
                    "m", replica=name, rank=rank, world_size=size, **options, **more
                )

            handles = list(pool.map(open_, range(size)))
            stack.callback(at_all, lambda _, handle: handle.close(linger_s=0), handles)
            return handles

        trainer, rollout = replica("t", sizes[0]), replica("r", sizes[1], costs=FAR)
        cuts, own = (
            {fqn: cut(rng, tensor.shape, size) for fqn, tensor in tensors.items()} for size in sizes
        )

        def publish(version):
            def publish_own(rank, handle):
                copied = share(tensors, cuts, rank, torch.clone)
                handle.publish_copy(version, copied, deltas=8, delta_bytes=1 << 20)
                made(handle)

            at_all(publish_own, trainer)

        publish(0)
        places = [
            share(tensors, own, rank, lambda part: elsewhere(rng, part)) for rank in range(sizes[1])
        ]
        at_all(lambda rank, handle: handle.register(places[rank]), rollout)
        at_all(lambda _, handle: handle.replicate(), rollout)
        version = 0
        for links in (1, int(rng.integers(1, 4))):
            for _ in range(links):
                version += 1
                tensors = {fqn: changed(rng, tensor) for fqn, tensor in tensors.items()}
                publish(version)
            assert all(at_all(lambda _, handle: handle.update(), rollout))
            for rank, (handle, found) in enumerate(zip(rollout, places, strict=True)):
                read = handle.last_read
                assert (read.via, read.base, read.links) == ("delta", version - links, links)
                expected = share(tensors, own, rank, torch.clone)
                for fqn, whole in found.items():
                    for at, box in whole.chunks.items():
                        assert torch.equal(bits(box), bits(expected[fqn].chunks[at])), fqn
