"""Whether a process that was once told of is the one that has its number now, and what it does."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Literal, NamedTuple

from torch_ros.p2p import shared
from torch_ros.p2p.voucher import line_of, started_at
from torch_ros.protocol.records import SeenRecord

# "closed": it lives, and has closed its sign. "frozen": by its cgroup. "replaced": it is gone, and
# another one has its number by now.
State = Literal[
    "running",
    "stopped",
    "traced",
    "frozen",
    "closed",
    "gone",
    "replaced",
    "hidden",
    "other container",
    "other host",
]
# By the kernel's letter; of those that have ended the parent has not been told yet.
_BY_LETTER: Mapping[str, State] = {
    "T": "stopped",
    "t": "traced",
    "Z": "gone",
    "X": "gone",
    "x": "gone",
}

_SIGN = "torch_ros open"
_CGROUPS = Path("/sys/fs/cgroup")
# Where a frozen group says so: in version 2 of cgroups, there beside others of version 1, and in 1.
_FROZEN = (
    ("", "", "cgroup.events", "frozen 1"),
    ("", "unified", "cgroup.events", "frozen 1"),
    ("freezer", "freezer", "freezer.state", "FROZEN"),
)


class Sign:
    """A file in memory that is mapped as long as something lives in this process, until `close`.

    Others of this host see by its name, "" where the system shows no such files, whether it is. It
    takes a page of addresses, and no open file: a process may have many handles, or close all its
    files.
    """

    def __init__(self) -> None:
        self.name: str = token_hex(8)
        self._page: object = None
        try:
            self._page = _shown_page(self.name)
        except OSError:
            self.name = ""

    def close(self) -> None:
        """Idempotent."""
        self._page = None  # nobody else has it


class Life(NamedTuple):
    """The marks of one process among all that have, or had, its number; zeros: nobody knows."""

    boot: str = ""  # of the kernel: the same in all containers of a host
    namespace: int = 0  # its inode: another container numbers its processes anew
    started: int = 0  # in ticks since the kernel was
    sign: str = ""  # the name of the one that it has open


def own() -> Life:
    """Return those of this process; without what the system does not show."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return Life(shared.host(), namespace, started_at(line_of("self")))
    except OSError:
        return Life()


def seen_here(sign: Sign) -> SeenRecord:
    """This process, as people find it also when it has lost its seat."""
    return SeenRecord(socket.gethostname(), os.getpid(), 0, *own()._replace(sign=sign.name))


def look(pid: int, life: Life) -> State:
    """Return the state of that process, as far as it can be seen from here."""
    here = own()
    if not here.boot or life.boot != here.boot:
        return "other host"
    if life.namespace != here.namespace:
        return "other container"
    try:
        stat = line_of(pid)
        letter = stat.rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended, or /proc hides what is another user's
        return "hidden" if _is_there(pid) else "gone"
    if started_at(stat) != life.started:
        return "replaced"
    state = _BY_LETTER.get(letter, "running")
    # To root, one that has ended shows no files: it has closed none of them itself.
    if state != "gone" and life.sign and _has_closed(pid, life.sign):
        return "closed"
    return "frozen" if state == "running" and is_frozen(pid) else state


def _shown_page(sign: str) -> object:
    """A page of the file of that name, mapped for as long as anybody has the answer.

    Raises: OSError: The system has no such files, or does not show them.
    """
    fd = os.memfd_create(f"{_SIGN} {sign}", os.MFD_CLOEXEC)
    try:
        page = shared.read_only(fd, 1)
    finally:
        os.close(fd)
    if _has_closed(os.getpid(), sign):
        raise OSError("/proc/self/maps shows no files in memory")
    return page


def _has_closed(pid: int, sign: str) -> bool:
    """Whether this process has the file mapped no more; False if it cannot be seen.

    One that is ending may have no memory any more, before it has ended.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    return maps != "" and f"/memfd:{_SIGN} {sign} (deleted)\n" not in maps


def is_frozen(pid: int) -> bool:
    """Whether its cgroup, or one around it, is frozen; False if that cannot be seen."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            for controller, mounted, name, says in _FROZEN:
                told = _CGROUPS / mounted / path.lstrip("/") / name
                with suppress(OSError):
                    if controllers == controller and says in told.read_text().splitlines():
                        return True
    return False


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
