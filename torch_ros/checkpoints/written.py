"""A version as files: safetensors as Hugging Face has them, or torch's own checkpoint."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from secrets import token_hex

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import torch_ros
from torch_ros.allocation import allocating
from torch_ros.checkpoints import framing
from torch_ros.checkpoints.framing import FILE_BYTES, INDEX, NAMES, Tensors, size_bytes
from torch_ros.errors import FolderError, TorchRosError, UsageError, VersionNotFound, reason

BUFFER_BYTES = 64 << 20
BUFFER_S, READ_S = 300.0, 3600.0  # that one buffer, or all at once, may take
NAMES_MAX = 10  # another process takes one for left behind only in the moment before it is locked
_NO_RIGHT = "name a folder that this user may write to"
_NO_ROOM = "make room, or name a folder on another disk"
_ADVICE = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOTEMPTY: "somebody has made it meanwhile: name another folder, or remove it",
    errno.EBUSY: "a disk is mounted there: name a folder within it",
}

OnBytes = Callable[[int, int], None]  # told how many are written, and of how many


def selected(contents: torch_ros.Contents, patterns: Sequence[str]) -> Tensors:
    """The tensors whose names match one of the shell patterns; all of them without any.

    Raises:
        UsageError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in contents.tensors):
            raise UsageError(f"no tensor of version {contents.version} matches {pattern!r}")
    return {
        name: tensor for name, tensor in contents.tensors.items() if is_selected(name, patterns)
    }


def require_same(model: str, contents: torch_ros.Contents, uid: str) -> None:
    """The content that is read is the one whose names were told before.

    Raises:
        VersionNotFound: Its number was published anew since, in this run or in another.
    """
    if uid != contents.uid:
        why = "it was published anew, or another run has begun, since this command began"
        raise VersionNotFound(model, str(contents.version), why)


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all of it is on disk; or is removed.

    It lies in a hidden folder beside, which its writer has locked. What a killed writer has left is
    removed by the next one for the same name: the kernel has let go of its lock, in whatever
    namespace it ran. Where files cannot be locked, nobody removes what is left.

    Raises:
        UsageError: There is something of that name already, or it is where this process works.
        FolderError: The disk is full, or cannot be written; nothing is left.
    """
    with folder_errors(folder):
        place = _place(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(place)
        hidden, lock = _hidden(place)
        try:
            made = hidden / "made"
            made.mkdir()
            yield made
            for path in (*made.rglob("*"), made):
                _sync(path)
            made.rename(place)
            _sync(place.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
            if lock is not None:
                os.close(lock)


@contextmanager
def folder_errors(folder: Path) -> Iterator[None]:
    """Makes what the system says about this folder, or a file in it, a FolderError."""
    try:
        yield
    except TorchRosError:  # a deadline is an OSError, too
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "name another folder")
        raise FolderError(str(folder), error.strerror or str(error), advice) from error


def _place(folder: Path) -> Path:
    """Where it will be: a link to an empty folder stays, and that folder is filled."""
    place = Path(os.path.realpath(folder))  # `resolve` raises for links in a circle
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise UsageError(f"{folder} is there already: name another folder, or remove it")
    if place == Path.cwd():  # which would be a folder without a name afterwards
        raise UsageError(f"{folder} is the folder in which this process works: name one within it")
    return place


def _remove_left(place: Path) -> None:
    hidden = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]+\.part")
    for left in place.parent.iterdir():
        if hidden.fullmatch(left.name) and not left.is_symlink():  # to a folder of others
            with suppress(OSError):  # another user's; or files cannot be locked here
                if (lock := _locked(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)


def _hidden(place: Path) -> tuple[Path, int | None]:
    """A new folder, and its lock; None: files cannot be locked here."""
    for _ in range(NAMES_MAX):
        path = place.with_name(f".{place.name}.{token_hex(8)}.part")
        path.mkdir()
        try:
            lock = _locked(path)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}:
                shutil.rmtree(path, ignore_errors=True)
                raise
            return path.rename(path.with_suffix(".unlocked")), None
        if lock is not None:
            return path, lock
    raise FolderError(str(place), f"others removed {NAMES_MAX} folders beside it", "try again")


def _locked(hidden: Path) -> int | None:
    """The lock of a hidden folder; None: another process has it, or has removed the folder."""
    try:
        lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.fstat(lock).st_nlink > 0
    except BlockingIOError:
        is_there = False
    except BaseException:
        os.close(lock)
        raise
    if is_there:
        return lock
    os.close(lock)
    return None


def _sync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def write_safetensors(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    tensors: Tensors,
    folder: Path,
    progress: OnBytes,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors of a version as they come, through two buffers of 64 MiB.

    Raises:
        UsageError: The format has no name for a dtype.
    """
    odd = next((name for name, (dtype, _) in tensors.items() if dtype not in NAMES), None)
    if odd is not None:
        raise UsageError(f"{odd!r} is {tensors[odd][0]}, which safetensors has no name for")
    files = framing.files(tensors, file_bytes)
    about = {"format": "pt", "torch_ros.model": handle.model, "torch_ros.run": contents.run}
    about["torch_ros.version"] = str(contents.version)
    total, done = sum(map(size_bytes, tensors.values())), 0
    with handle.stream(
        contents.version, list(tensors), buffer_bytes=BUFFER_BYTES, timeout_s=BUFFER_S
    ) as stream:
        require_same(handle.model, contents, stream.uid)
        for file, inside in files.items():
            with (folder / file).open("wb") as out:
                out.write(framing.header(inside, about))
                for content in framing.contents(inside, stream):
                    done += out.write(content)
                    progress(done, total)
    if len(files) > 1:
        (folder / INDEX).write_bytes(framing.index(files, total))


def write_dcp(
    handle: torch_ros.ShardHandle,
    contents: torch_ros.Contents,
    tensors: Tensors,
    folder: Path,
    progress: OnBytes,
) -> None:
    """Write tensors of a version as `dcp.load` reads them. Takes memory for all of them.

    Raises:
        MemoryError: There is too little.
    """
    total = sum(map(size_bytes, tensors.values()))
    with allocating("all of a version", total, "safetensors take 128 MiB"):
        state = {
            name: torch.empty(shape, dtype=dtype, device="cpu")
            for name, (dtype, shape) in tensors.items()
        }
    report = handle.read(contents.version, state, timeout_s=READ_S)
    require_same(handle.model, contents, report.uid)
    try:
        with warnings.catch_warnings():  # that no other process takes part
            warnings.simplefilter("ignore", UserWarning)
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    except CheckpointException as error:  # of Ctrl-C, too
        raise reason(error) from None
    progress(total, total)
