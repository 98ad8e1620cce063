"""How many bytes deltas have, and how fast they are made and applied, beside a copy of the same
chunk. One thread, no servers.

Weights in float32 take a step of equal length, as Adam's first, and are rounded to bfloat16: small
weights change more often than large ones. The step is so long that the given share of the elements
changes; for all of them, the lowest bit of each is flipped. Best of the rounds, in the thread's CPU
seconds, since cores may be shared; GB/s of the chunk, not of the delta, and in brackets how many
times as long as the copy. Prints a row of JSON per share, then a table.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from torch_ros.codec.delta import Delta, Piece, apply, compare, encode, merge, pieces, words
from torch_ros.weights.digest import change_digest, digest
from torch_ros.weights.local import LocalChunk, LocalTensor, build, local_chunks

SHARES = (0.001, 0.01, 0.03, 0.1, 1.0)
STEPS_TRIED = 24  # halvings of an interval, on a logarithmic scale


def contents(share: float, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The base, and the newer content."""
    drawn = torch.Generator().manual_seed(0)
    weights = torch.randn(elements, generator=drawn) * 0.02
    signs = torch.randint(0, 2, (elements,), generator=drawn) * 2.0 - 1
    base = weights.to(torch.bfloat16)
    if share == 1:
        return base, (base.view(torch.int16) ^ 1).view(torch.bfloat16)
    some = slice(0, 1 << 20)
    low, high = 1e-9, 1e-1
    for _ in range(STEPS_TRIED):
        step = (low * high) ** 0.5
        new = (weights[some] + step * signs[some]).to(torch.bfloat16)
        changed = (new.view(torch.int16) != base[some].view(torch.int16)).double().mean()
        low, high = (low, step) if changed > share else (step, high)
    return base, (weights + low * signs).to(torch.bfloat16)


def part(whole: torch.Tensor, box: tuple[slice, slice]) -> tuple[torch.Tensor, Piece]:
    """A target that has this box, and the piece of a source that has the whole."""
    target = whole[box].clone()
    offsets = tuple(span.start or 0 for span in box)
    chunks = (LocalChunk(offsets, target),)
    source, _ = build(local_chunks({"w": whole}), {})
    held = LocalTensor("w", whole.dtype, tuple(whole.shape), chunks, spread=True)
    (piece,) = pieces([source], build([held], {})[0])
    return target, piece


def cpu_s(call: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begun = time.thread_time()
        call()
        taken.append(time.thread_time() - begun)
    return min(taken)


def measured(share: float, elements: int, rounds: int) -> dict[str, float]:
    """Bytes of a full copy per byte of the delta, the share, and GB/s by what is done."""
    base, new = (content.view(-1, 4096) for content in contents(share, elements))
    rows, columns = base.shape[0] // 8, base.shape[1] // 8
    target, piece = part(base, (slice(None), slice(None)))
    some_rows = part(base, (slice(rows, 2 * rows), slice(None)))
    some_columns = part(base, (slice(None), slice(columns, 2 * columns)))
    changed = list(compare(base, new))
    delta = Delta.of(base, new)
    arrays = (delta.elements, delta.index, delta.gaps, delta.values)
    older = words(base)
    before_and_after = [(each.places, older[each.places], each.values) for each in delta.decode()]
    whole = {"global_shape": tuple(base.shape), "depth": "full"}
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(base),
        "compare": lambda: [None for _ in compare(base, new)],
        "encode": lambda: encode(changed, item_bytes=2),
        "received": lambda: Delta.received(*arrays),
        "apply": lambda: apply(delta, target, piece),
        "apply to 1/8 of rows": lambda: apply(delta, *some_rows),
        "apply to 1/8 of columns": lambda: apply(delta, *some_columns),
        "apply, digest": lambda: apply(delta, target, piece, depth="full"),
        "change_digest": lambda: [change_digest(*each, **whole) for each in before_and_after],
        "digest": lambda: digest(new, offsets=(0, 0), **whole),
        "merge of 2": lambda: merge([delta, delta]),
    }
    found = {name: base.nbytes / cpu_s(call, rounds) / 1e9 for name, call in calls.items()}
    return {"share": delta.changed / elements, "smaller": base.nbytes / delta.size_bytes, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(share, given.size_mib << 19, given.rounds) for share in SHARES]
    for row in rows:
        print(json.dumps(row))
    print(f"\n{'changed':24}" + "".join(f"{row['share']:>16.2%}" for row in rows))
    print(f"{'bytes of a full copy, of':24}" + "".join(f"{row['smaller']:>16.1f}" for row in rows))
    for name in list(rows[0])[2:]:
        speeds = (f"{row[name]:.2f} ({row['copy'] / row[name]:.2g})" for row in rows)
        print(f"{name:24}" + "".join(f"{speed:>16}" for speed in speeds))


if __name__ == "__main__":
    main()
