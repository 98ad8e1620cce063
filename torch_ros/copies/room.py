"""How much memory this process may take for copies: of its host, and of the groups it is in."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_ros.copies import cgroups

UNLIMITED = 1 << 60  # cgroup v1 writes no limit as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class Names:
    """The files in which a version of cgroups tells about memory."""

    limits: tuple[str, ...]
    used: str
    cached: tuple[str, ...]  # in memory.stat: the file cache that the kernel drops first


V1 = Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "inactive_file"),
)
# Above memory.high nobody is killed, but the kernel slows all down that the group does.
V2 = Names(("memory.max", "memory.high"), "memory.current", ("inactive_file",))
NAMES: Mapping[cgroups.Version, Names] = {"v1": V1, "v2": V2}


def available_bytes(root: Path = cgroups.ROOT) -> float:
    """Memory that is free, or that the kernel would free, on this host and in each group.

    Swap is no room. Infinite where nothing is told. A limit of this process alone (ulimit) does not
    count: an allocation beyond it is an error, and nobody is killed.
    """
    read = cgroups.reader(root)
    found = [1024 * _figures(read("proc/meminfo")).get("MemAvailable:", math.inf)]
    for version, folder in cgroups.own("memory", read):
        found.append(left_in(NAMES[version], lambda name, folder=folder: read(f"{folder}/{name}")))  # type: ignore[misc]
    return min(found)


def ranks_here(world_size: int) -> int:
    """How many ranks of a replica may be on this host: all, if nobody says."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else world_size


def left_in(names: Names, read: Callable[[str], str]) -> float:
    """The bytes that a group may still take; infinite if it has no limit, or does not tell.

    Args:
        read: The text of one of its files; "" if that cannot be read.
    """
    limits = [int(text) for name in names.limits if (text := read(name).strip()).isdecimal()]
    used = read(names.used).strip()
    limit = min(limits, default=UNLIMITED)
    if limit >= UNLIMITED or not used.isdecimal():
        return math.inf
    stat = _figures(read("memory.stat"))
    cached = next((stat[name] for name in names.cached if name in stat), 0)
    return max(0, limit - max(0, int(used) - cached))


def _figures(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
