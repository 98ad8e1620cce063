"""How much memory this host has for copies."""

import math
import os
from contextlib import suppress
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> float:
    """Memory that is free, or that the kernel would free, on this host and in its container.

    Infinite where neither is told.
    """
    found = [math.inf]
    with suppress(OSError, ValueError, KeyError):
        told = _figures(root / "proc/meminfo")
        found.append(1024 * told["MemAvailable:"])
    with suppress(OSError, ValueError, KeyError):
        group = root / "sys/fs/cgroup"
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(most - used + _figures(group / "memory.stat")["inactive_file"])
    return min(found)


def ranks_here(world_size: int) -> int:
    """How many ranks of a replica may be on this host: all, if nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _figures(path: Path) -> dict[str, int]:
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
