"""How fast digests are, beside torch's copy and with one to so many threads. No servers.

Each thread digests some rows of its own. Best of the rounds; GB/s of the tensor, also where a
sample reads less of it. Prints a row of JSON per result, then a table.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import get_args

import torch
from harness import seconds, timed

from torch_ros.weights.digest import chunk_digests, combine, digest
from torch_ros.weights.local import build, local_chunks
from torch_ros.weights.manifest import Depth

SIZE_BYTES = 256 << 20
SMALL_TENSORS = 70_000


def chunks() -> dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Local tensor, global shape and offsets, by name."""
    memory = torch.empty(SIZE_BYTES, dtype=torch.uint8).random_()
    single, half = memory.view(torch.float32), memory.view(torch.bfloat16)
    rows, odd = half.view(-1, 4096), half[: 4097 * 30_000].view(-1, 4097)
    columns = rows[:, 1024:2048]
    return {
        "fp32 [.., 4096]": whole(single.view(-1, 4096)),
        "bf16 [.., 4096]": whole(rows),
        "bf16, 1-d": whole(half),
        "bf16, columns of TP(4)": (columns, tuple(rows.shape), (0, 1024)),
        "bf16 [.., 4097], words not aligned": whole(odd),
    }


def whole(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    return tensor, tuple(tensor.shape), (0,) * tensor.ndim


def digest_in_parts(
    pool: ThreadPoolExecutor,
    parts: int,
    chunk: torch.Tensor,
    shape: Sequence[int],
    offsets: Sequence[int],
    depth: Depth,
) -> int:
    def of_rows(rows: torch.Tensor, first: int) -> int:
        there = (offsets[0] + first, *offsets[1:])
        return digest(rows, global_shape=shape, offsets=there, depth=depth)

    step = -(-chunk.shape[0] // parts)
    firsts = range(0, chunk.shape[0], step)
    return combine(pool.map(of_rows, chunk.split(step), firsts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts = range(1, given.threads + 1)
    found: dict[str, list[float]] = {}

    target = torch.empty(SIZE_BYTES, dtype=torch.uint8)
    source = torch.zeros_like(target)
    copying_s = min(timed(lambda: target.copy_(source), given.rounds))
    found["torch copy"] = [SIZE_BYTES / copying_s / 1e9]
    for name, (chunk, shape, offsets) in chunks().items():
        size_bytes = prod(chunk.shape) * chunk.element_size()
        for depth in get_args(Depth)[1:]:
            speeds = found[f"{name}, {depth}"] = []
            for count in counts:
                with ThreadPoolExecutor(count) as pool:
                    parts = (pool, count, chunk, shape, offsets, depth)
                    call = partial(digest_in_parts, *parts)
                    taken_s = min(timed(call, given.rounds))
                speeds.append(size_bytes / taken_s / 1e9)
    for case, speeds in found.items():
        print(json.dumps({"case": case, "gb_per_s_by_threads": speeds}))

    small = {f"layer.{number}": torch.ones(64, 8) for number in range(SMALL_TENSORS)}
    layout, memory = build(local_chunks(small), {})
    taken_s = seconds(lambda: chunk_digests(layout, memory, depth="full"))
    print(json.dumps({"case": f"{SMALL_TENSORS} tensors of 2 KiB", "seconds": taken_s}))

    print(f"\n{'GB/s':46}" + "".join(f"{count:>6} thr" for count in counts))
    for case, speeds in found.items():
        print(f"{case:46}" + "".join(f"{speed:10.2f}" for speed in speeds))


if __name__ == "__main__":
    main()
