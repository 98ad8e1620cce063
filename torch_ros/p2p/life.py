"""Whether a process that was once told of is the one that has its number now, and what it does."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from torch_ros.p2p import mapped
from torch_ros.p2p.voucher import started_at

# "replaced": it is gone, and another one has its number by now.
State = Literal[
    "running", "stopped", "traced", "gone", "replaced", "hidden", "other container", "other host"
]
# By the kernel's letter; of those that have ended the parent has not been told yet.
_BY_LETTER: Mapping[str, State] = {
    "T": "stopped",
    "t": "traced",
    "Z": "gone",
    "X": "gone",
    "x": "gone",
}


class Life(NamedTuple):
    """The marks of one process among all that have, or had, its number; zeros: nobody knows."""

    boot: str = ""  # of the kernel: the same in all containers of a host
    namespace: int = 0  # its inode: another container numbers its processes anew
    started: int = 0  # in ticks since the kernel was


def own() -> Life:
    """Return those of this process; without what the system does not show."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return Life(mapped.host(), namespace, started_at(Path("/proc/self/stat").read_text()))
    except OSError:
        return Life()


def look(pid: int, life: Life) -> State:
    """Return the state of that process, as far as it can be seen from here."""
    here = own()
    if not here.boot or life.boot != here.boot:
        return "other host"
    if life.namespace != here.namespace:
        return "other container"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        letter = stat.rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended, or /proc hides what is another user's
        return "hidden" if _is_there(pid) else "gone"
    if started_at(stat) != life.started:
        return "replaced"
    return _BY_LETTER.get(letter, "running")


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
