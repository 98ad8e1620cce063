"""Folders of files in a host's memory, for engines that load by a path: each content is there once.

A process pins the folder that it uses, by a lock that ends with the process; a folder that nobody
pins is swept when another one is written. One process writes, and others wait for it.
"""

import fcntl
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

from torch_ros.errors import DeadlineExceeded, FolderError, TorchRosError

MEMORY = Path("/dev/shm")  # noqa: S108  # vetted below
LOOK_S = 0.01  # between two looks at a folder that another process writes
WHOLE = "whole"  # the file that comes last


class Pinned:
    """A folder that stays as long as this process has not let go of it, or dropped this.

    Args:
        path: Where it is.
        descriptor: Of it, open and locked; closed once, however often it is let go.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._close = weakref.finalize(self, os.close, descriptor)

    def let_go(self) -> None:
        """Remove the folder, unless another process uses it; and those that a process has left.

        May be called again.
        """
        self._close()
        with suppress(FileNotFoundError):  # somebody has removed them all
            sweep(self.path.parent)


def pinned(
    uid: str, write: Callable[[Path], object], timeout_s: float, root: Path | None = None
) -> Pinned:
    """The folder of a content, which is written if it is not there.

    Args:
        uid: Of the content.
        write: Puts the files into a folder; its errors are raised, and nothing is left then.
        timeout_s: For another process to write it.

    Raises:
        FolderError: There is no room, or this user may not write there.
        DeadlineExceeded: The other process has not written it.
    """
    root = root or _own(MEMORY)
    path, until_s = root / blake2b(uid.encode(), digest_size=16).hexdigest(), _now_s() + timeout_s
    while True:
        with suppress(FileNotFoundError):  # a sweep has come in between
            path.mkdir(mode=0o700, exist_ok=True)
            descriptor, is_kept = os.open(path, os.O_RDONLY | os.O_DIRECTORY), False
            try:
                is_kept = _holds(path, descriptor, write, root)
            finally:
                if not is_kept:
                    os.close(descriptor)
            if is_kept:
                return Pinned(path, descriptor)
        if _now_s() > until_s:
            reason = f"another process writes {path}, and does not end"
            raise DeadlineExceeded("a load of an adapter", timeout_s, reason)
        time.sleep(LOOK_S)


def _holds(path: Path, descriptor: int, write: Callable[[Path], object], root: Path) -> bool:
    """Whether it is whole, and this process pins it; written by this one, if by nobody else."""
    if not _locks(descriptor, fcntl.LOCK_SH) or not _is_there(path, descriptor):
        return False
    if (path / WHOLE).exists():
        return True
    if not _locks(descriptor, fcntl.LOCK_EX) or not _is_there(path, descriptor):
        return False
    if not (path / WHOLE).exists():  # as after a process that was killed in the middle
        try:
            write(path)
            (path / WHOLE).touch()
        except BaseException as error:
            shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, TorchRosError):
                advice = "give it more room (docker run --shm-size), or load fewer adapters"
                raise FolderError(str(path), error.strerror or str(error), advice) from error
            raise
    # The kernel lets go of one lock before it takes the other: look again.
    is_kept = _locks(descriptor, fcntl.LOCK_SH) and _is_there(path, descriptor)
    sweep(root)
    return is_kept


def sweep(root: Path) -> None:
    """Remove the folders that no process pins."""
    for path in root.iterdir():
        with suppress(OSError):  # another process sweeps too
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _locks(descriptor, fcntl.LOCK_EX) and _is_there(path, descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _own(memory: Path) -> Path:
    """The folder of this user, made if it is not there; another user's could say what he likes.

    If another user has taken its name, it has a longer one, by which all processes find it.
    """
    root = memory / f"torch-ros-adapters-{os.geteuid()}"
    try:
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        there = (root, *sorted(memory.glob(f"{root.name}-*")))
        own = next(filter(_is_own, there), None)
        return own or Path(mkdtemp(prefix=f"{root.name}-", dir=memory))
    except OSError as error:
        raise FolderError(str(root), error.strerror or str(error), "let this user write") from error


def _is_own(path: Path) -> bool:
    with suppress(FileNotFoundError):  # one of those with longer names is gone
        its = path.lstat()
        return stat.S_ISDIR(its.st_mode) and its.st_uid == os.geteuid()
    return False


def _locks(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to what was opened: a sweep may have come in between."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _now_s() -> float:
    return time.monotonic()
