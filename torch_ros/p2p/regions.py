"""Which bytes of a process are registered: arithmetic over addresses, no transport."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_ros.errors import TransferFailed, UsageError
from torch_ros.spans import HOST, Region, Spans

Uint64s = npt.NDArray[np.uint64]

# One piece of a read: addresses in source and target, bytes, keys of the covers of both.
Pieces = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """The regions of one registration on one device: disjoint, in order of address."""

    key: int  # unique among the covers of an agent
    device: int
    starts: Uint64s
    ends: Uint64s


def merge(device: int, regions: Sequence[Region], *, key: int) -> Cover:
    """One cover of `regions`, all on `device`. Regions in host memory that touch become one. Those
    on a GPU only do if they overlap: two allocations may lie side by side, and a registration
    cannot span two of them there.

    Raises: UsageError: An empty region.
    """
    for region in regions:
        if region.size_bytes <= 0:
            raise UsageError(f"a region of {region.size_bytes} bytes cannot be registered")
    bounds = np.array([(r.address, r.address + r.size_bytes) for r in regions], np.uint64)
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    starts, ends = bounds[:, 0], np.maximum.accumulate(bounds[:, 1])
    apart = starts[1:] > ends[:-1] if device == HOST else starts[1:] >= ends[:-1]
    is_first = np.concatenate(([True], apart))
    is_last = np.concatenate((apart, [True]))
    return Cover(key, device, starts[is_first], ends[is_last])


def cut(agent: str, spans: Spans, sources: Sequence[Cover], targets: Sequence[Cover]) -> Pieces:
    """`spans` in pieces of which each lies in one region at either end; in no special order.

    `sources` are attached memory of the agent, `targets` registered memory of this process.

    Raises:
        TransferFailed: A byte that is not covered.
        UsageError: No spans, or an empty one.
    """
    if not (len(spans) and spans[:, 2].all()):
        raise UsageError("a read needs at least one span, and no span may be empty")
    rounds: list[Pieces] = []
    rest = spans  # each round takes of every span what one region at either end has
    while len(rest):
        source_keys, source_room = room(rest[:, 0], rest[:, 2], sources)
        target_keys, target_room = room(rest[:, 1], rest[:, 2], targets)
        _refuse_gap(agent, "source", rest[:, 0], source_room, "attached")
        _refuse_gap(agent, "target", rest[:, 1], target_room, "registered")
        taken = np.minimum(rest[:, 2], np.minimum(source_room, target_room))
        rounds.append(np.stack((rest[:, 0], rest[:, 1], taken, source_keys, target_keys), axis=1))
        is_cut = taken < rest[:, 2]
        step = taken[is_cut]
        rest = np.stack(
            (rest[is_cut, 0] + step, rest[is_cut, 1] + step, rest[is_cut, 2] - step), axis=1
        )
    return np.concatenate(rounds)


def room(addresses: Uint64s, sizes: Uint64s, covers: Sequence[Cover]) -> tuple[Uint64s, Uint64s]:
    """For each address: the key of a cover that has it, and the bytes from there on; else 0. Where
    two cover a byte, the longer one wins, then the first one.
    """
    keys, found = np.zeros_like(addresses), np.zeros_like(addresses)
    for cover in covers:
        if (found >= sizes).all():
            break
        region = np.searchsorted(cover.starts, addresses, side="right") - 1
        ends = cover.ends[region]
        here = np.where((region >= 0) & (ends > addresses), ends - addresses, 0)
        is_better = here > found
        keys[is_better], found[is_better] = cover.key, here[is_better]
    return keys, found


def _refuse_gap(agent: str, side: str, addresses: Uint64s, room: Uint64s, lacks: str) -> None:
    if not room.all():
        raise TransferFailed(
            agent, f"{side} address {addresses[room == 0][0]:#x} is in no memory that is {lacks}"
        )
