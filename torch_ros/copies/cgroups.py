"""The groups that this process is in, which share the memory and the cores that they may use."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Literal

Version = Literal["v1", "v2"]
ROOT = Path("/")


def reader(root: Path = ROOT) -> Callable[[str], str]:
    """Reads a file below `root`; "" where it is not there, not for us, or no text."""

    def read(name: str) -> str:
        with suppress(OSError, ValueError):
            return (root / name.lstrip("/")).read_text()
        return ""

    return read


def own(controller: str, read: Callable[[str], str]) -> Iterator[tuple[Version, PurePosixPath]]:
    """The folders in which this process's groups tell about `controller`, and their version."""
    return folders(controller, read("proc/self/cgroup"), read("proc/self/mountinfo"))


def folders(
    controller: str, cgroup: str, mountinfo: str
) -> Iterator[tuple[Version, PurePosixPath]]:
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
        if not controllers or controller in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    is_told = False
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        here, (fstype, *options) = fields.split(" "), kind.split(" ")
        if fstype == "cgroup" and controller not in options[-1].split(","):
            continue
        if fstype in paths and len(here) > 4:
            is_told = True
            top, group = PurePosixPath(_plain(here[4])), PurePosixPath(paths[fstype])
            version: Version = "v2" if fstype == "cgroup2" else "v1"
            yield from ((version, folder) for folder in _upward(top, group, _plain(here[3])))
    if not is_told:  # where a sandbox keeps them from us, they are at their usual place
        yield "v2", PurePosixPath("/sys/fs/cgroup")


def _upward(top: PurePosixPath, own: PurePosixPath, root: str) -> Iterator[PurePosixPath]:
    """From a process's own group up to the mount point, at which there is the group `root`."""
    # A group outside of what is mounted has no folder: of those around it only the top is seen.
    parts = own.relative_to(root).parts if own.is_relative_to(root) else ()
    if ".." not in parts:
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), 0, -1))
    yield top


def _plain(field: str) -> str:
    r"""A path in mountinfo, where a space is `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def cores(root: Path = ROOT) -> float:
    """How many cores' time the groups of this process may take; infinite where nothing is told."""
    read = reader(root)
    return min(_quota(version, read, folder) for version, folder in own("cpu", read))


def _quota(version: Version, read: Callable[[str], str], folder: PurePosixPath) -> float:
    names = ("cpu.max",) if version == "v2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    said = " ".join(read(f"{folder}/{name}") for name in names).split()  # "max" or -1: no limit
    quota, period = map(int, said) if len(said) == 2 and all(map(str.isdecimal, said)) else (0, 0)
    return quota / period if quota and period else math.inf
