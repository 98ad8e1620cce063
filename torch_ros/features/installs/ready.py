"""Whether the engine of a replica uses a version: each rank says so in a file on its host.

A probe reads these files: it asks no etcd, and no thread of a busy engine. A process that has ended
is known by its number and start time; what a killed start has left counts until the next one lives.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from torch_ros import environment
from torch_ros.errors import BackendError, ClosedError, UsageError
from torch_ros.features.installs.records import Install
from torch_ros.p2p.voucher import line_of, started_at
from torch_ros.protocol.records import VersionRef

GONE = ("", "Z", "X")  # states of processes that have ended


class RankUse(msgspec.Struct, frozen=True):
    """The file of one rank: it says what that rank's engine uses."""

    start: str  # in which all ranks were opened; a replica that is started again has another
    rank: int
    pid: int
    started: int  # in ticks since the host was
    install: Install


class Probe(NamedTuple):
    """The question of a probe: whether a replica's engine uses a version, this one or a new one."""

    model: str
    replica: str
    version: int | None = None
    behind: int | None = None  # numbers that it may be behind the newest; None: any


class ReadyAnswer(NamedTuple):
    """The answer to a probe."""

    version: int | None
    reason: str = ""  # "": it is ready
    doubt: str = ""  # of one that is ready: what etcd did not say


def decide(
    probe: Probe, told: Sequence[RankUse], newest: Callable[[], VersionRef | None]
) -> ReadyAnswer:
    """Decide whether a replica is ready. An etcd that is away makes nobody unready.

    Args:
        told: By the ranks of this replica on this host.
        newest: Asks etcd for the newest version that is offered; called with `behind` alone.
    """
    found = in_use(told, [state_of(each) for each in told])
    if isinstance(found, str):
        return ReadyAnswer(None, found)
    latest, doubt = None, ""
    if probe.behind is not None:
        try:
            latest = newest()
        except (BackendError, ClosedError) as error:
            doubt = f"nobody knows how far behind it is: {error}"
    return ReadyAnswer(
        found.version, lack_of(found, probe.version, latest, probe.behind or 0), doubt
    )


def all_told(model: str, replica: str) -> list[RankUse]:
    """Read the files of a replica's ranks on this host, by rank.

    Raises:
        OSError: The folder is another user's, or cannot be read.
        UsageError: A file is of another release.
    """
    files = folder().glob(f"{file_name(model, replica)}-*[0-9]")
    return sorted(_read(files), key=lambda told: told.rank)


def _read(files: Iterator[Path]) -> Iterator[RankUse]:
    for file in files:
        try:
            yield msgspec.json.decode(file.read_bytes(), type=RankUse)
        except FileNotFoundError:  # its process has closed its handle meanwhile
            continue
        except msgspec.MsgspecError as error:
            raise UsageError(f"{file} is not of this release: {error}") from error


def in_use(told: Sequence[RankUse], states: Sequence[str]) -> VersionRef | str:
    """The version that all ranks here use; or the reason for which there is none.

    Args:
        states: Of each one's process, as the kernel writes them; "": it has ended.
    """
    there = list(zip(told, states, strict=True))
    living = {each.start for each, state in there if state not in GONE}
    # Without what an earlier start has left.
    here = [(each, state) for each, state in there if state not in GONE or living <= {each.start}]
    for each, state in here:
        if state in GONE:
            return f"rank {each.rank}, process {each.pid}, has ended"
        if state in ("T", "t"):
            return f"rank {each.rank}, process {each.pid}, is stopped"
        if each.install.active is None:
            return f"rank {each.rank} {_doing(each.install)}"
    if not here:
        return "no engine of this user on this host has told of it"
    used = {each.install.active for each, _ in here}
    [first, *others] = used
    return "its ranks use different versions" if others or first is None else first


def shown(told: RankUse) -> RankUse:
    """Without the words of an error, which may name tensors: for pages, its class is enough."""
    if (rejected := told.install.rejected) is None:
        return told
    cut = msgspec.structs.replace(rejected, reason=rejected.reason.partition(":")[0])
    return msgspec.structs.replace(
        told, install=msgspec.structs.replace(told.install, rejected=cut)
    )


def _doing(install: Install) -> str:
    if install.trying is not None:
        return f"is installing version {install.trying.version}"
    if (rejected := install.rejected) is not None:
        return f"has no version: {rejected.ref.version} was rejected: {rejected.reason}"
    return "has no version yet"


def lack_of(active: VersionRef, version: int | None, newest: VersionRef | None, most: int) -> str:
    """The reason for which that version is not the one that is asked for; "": it is.

    Args:
        version: The number that is asked for; None: any.
        newest: The newest that is offered; None: it is not asked for, or there is none.
        most: How many numbers `active` may be behind that.
    """
    if version is not None and active.version != version:
        return f"it uses version {active.version}, not {version}"
    if newest is None or newest.order <= active.order:
        return ""
    if newest.run != active.run:
        return f"it uses version {active.version} of run {active.run}, and {newest.run} is newer"
    behind = newest.version - active.version
    return f"it uses version {active.version}, {behind} behind" if behind > most else ""


def state_of(told: RankUse) -> str:
    """The state of a rank's process, as the kernel writes it; "": it has ended."""
    try:
        line = line_of(told.pid)
    except OSError:
        return ""
    return line.rpartition(")")[2].split()[0] if started_at(line) == told.started else ""


def folder() -> Path:
    """The folder of this user's files, made if it is not there.

    Raises: OSError: It is another user's, who could say what he likes; or there is none.
    """
    given = environment.value(environment.READY_DIR) or "/tmp"  # noqa: S108  # vetted below
    found = Path(given) / f"torch-ros-{os.geteuid()}"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    its = found.lstat()
    if not stat.S_ISDIR(its.st_mode) or its.st_uid != os.geteuid():
        raise OSError(f"{found} is not a folder of this user; set {environment.READY_DIR}")
    return found


def file_name(model: str, replica: str) -> str:
    return blake2b(f"{model}\0{replica}".encode(), digest_size=16).hexdigest()
