"""How much memory this process may take for copies: of its host, and of the groups it is in."""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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


def available_bytes(root: Path = Path("/")) -> float:
    """Memory that is free, or that the kernel would free, on this host and in each group.

    Swap is no room. Infinite where nothing is told.
    """

    def read(name: str) -> str:
        with suppress(OSError, ValueError):  # not there, not for us, no text
            return (root / name.lstrip("/")).read_text()
        return ""

    found = [1024 * _figures(read("proc/meminfo")).get("MemAvailable:", math.inf)]
    for names, folder in groups(read("proc/self/cgroup"), read("proc/self/mountinfo")):
        found.append(left_in(names, lambda name, folder=folder: read(f"{folder}/{name}")))  # type: ignore[misc]
    return min(found)


def ranks_here(world_size: int) -> int:
    """How many ranks of a replica may be on this host: all, if nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def groups(cgroup: str, mountinfo: str) -> Iterator[tuple[Names, PurePosixPath]]:
    """The folders of the groups that a process is in, each before the one around it.

    Args:
        cgroup: Its /proc/self/cgroup: a path for each hierarchy.
        mountinfo: Its /proc/self/mountinfo. A mount shows a hierarchy from its `root` on: in a
            container, that may be the container's own group.
    """
    paths = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    is_told = False
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        here, (fstype, *options) = fields.split(" "), kind.split(" ")
        if fstype == "cgroup" and "memory" not in options[-1].split(","):
            continue
        if fstype in paths and len(here) > 4:
            is_told = True
            names = V2 if fstype == "cgroup2" else V1
            top, own = PurePosixPath(_plain(here[4])), PurePosixPath(paths[fstype])
            yield from ((names, folder) for folder in _upward(top, own, _plain(here[3])))
    if not is_told:  # where a sandbox keeps them from us, they are at their usual place
        yield V2, PurePosixPath("/sys/fs/cgroup")


def _upward(top: PurePosixPath, own: PurePosixPath, root: str) -> Iterator[PurePosixPath]:
    """From a process's own group up to the mount point, at which there is the group `root`."""
    # One that is outside of what is mounted has no folder: nothing but the top is told of it.
    parts = own.relative_to(root).parts if own.is_relative_to(root) else ()
    if ".." not in parts:
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), 0, -1))
    yield top


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


def _plain(field: str) -> str:
    r"""A path in mountinfo, where a space is `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _figures(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
