"""Memory that is a file: found in this process, mapped from another one on the same host.

What torch calls shared memory, a memfd and a file in /dev/shm are all files to the kernel. Two
processes that map one see the same bytes, and no system call is needed to read them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torch_ros.p2p.regions import Cover

# The same in all containers of a host, another one after each start of its kernel.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_BLOCK_BYTES = 512  # what st_blocks counts, whatever the filesystem

# Python's own mmap keeps a file descriptor for each mapping: a model of a thousand shared tensors
# would use up what a process has.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


_File = tuple[int, int]  # device and inode: no two files that are there have the same on one host


class Stretch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Addresses of a process behind which there is a file."""

    address: int
    size_bytes: int
    offset: int  # where it begins in the file
    device: int
    inode: int
    paths: tuple[str, ...]  # where another process may find the file


@dataclass(frozen=True, slots=True)
class _Line:
    """One mapping of /proc/self/maps that is shared with whoever else maps the file."""

    start: int
    end: int
    offset: int
    file: _File
    path: str


def host() -> str:
    """Which host this is: where it is the same, an inode is the same file."""
    return _BOOT_ID.read_text().strip()


def allocate(size_bytes: int) -> mmap.mmap:
    """Memory of this process that others on this host can map.

    Raises:
        OSError: There is not as much.
    """
    fd = os.memfd_create("torch_ros", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size_bytes)  # now, or whoever touches it first may be killed
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def find(cover: Cover) -> tuple[Stretch, ...]:
    """What of `cover` is a file that others may be able to map; in order of address."""
    lines = [line for line in _shared(_maps()) if _is_in(cover, line)]
    if not lines:
        return ()
    paths = _paths(lines)
    return tuple(
        Stretch(line.start, line.end - line.start, line.offset, *line.file, paths[line.file])
        for line in lines
        if line.file in paths
    )


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text(errors="replace").splitlines()


def _shared(lines: Iterable[str]) -> list[_Line]:
    """Those that are MAP_SHARED: what a private mapping was written to is not in the file."""
    shared = []
    for line in lines:
        addresses, flags, offset, device, inode, *path = line.split(maxsplit=5)
        if flags.endswith("s") and inode != "0":
            start, end = (int(part, 16) for part in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            file = (os.makedev(major, minor), int(inode))
            shared.append(_Line(start, end, int(offset, 16), file, "".join(path)))
    return shared


def _is_in(cover: Cover, line: _Line) -> bool:
    after = bisect_right(cover.ends, line.start)
    return after < len(cover.ends) and bool(cover.starts[after] < line.end)


def _paths(lines: Iterable[_Line]) -> dict[_File, tuple[str, ...]]:
    """Where to find the files: by name, or among what this process has open.

    A memfd, and what torch shares by default, has no name any more.
    """
    paths = defaultdict[_File, tuple[str, ...]](tuple)
    wanted = {line.file: line.path for line in lines}
    for file, path in wanted.items():
        if _file_at(path) == file:
            paths[file] += (path,)
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names, not paths
        found = _file_at(f"/proc/self/fd/{number}")
        if found in wanted:
            paths[found] += (f"/proc/{os.getpid()}/fd/{number}",)
    return dict(paths)


def _file_at(path: str) -> _File | None:
    """The file at `path`, if there is one. Opens nothing."""
    with suppress(OSError):
        found = os.stat(path)  # noqa: PTH116  # often, and of strings
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino
    return None


class Mapping:
    """A stretch of another process, to be read at `address` in this one, until `close`.

    Not inherited by `fork`. It keeps the file's memory allocated, also when its process has let
    go of it: see `is_abandoned`.

    Raises:
        OSError: This process cannot have it, and why.
    """

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        self.is_open = True
        fd, self._path = _open(stretch)
        try:
            _refuse_faults(fd, stretch)
            size = stretch.size_bytes
            flags = (mmap.PROT_READ, mmap.MAP_SHARED)
            address = _libc.mmap(None, size, *flags, fd, stretch.offset)
            if address == _FAILED:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self._path)
        finally:
            os.close(fd)
        self.address: int = address
        _libc.madvise(address, size, mmap.MADV_DONTFORK)

    @property
    def is_abandoned(self) -> bool:
        """Whether the process no longer has the file where it had it, or is gone."""
        return _file_at(self._path) != (self.stretch.device, self.stretch.inode)

    def close(self) -> None:
        """Nobody may be reading it. Idempotent."""
        address, self.address, self.is_open = self.address, 0, False
        if address:
            _libc.munmap(address, self.stretch.size_bytes)


def _open(stretch: Stretch) -> tuple[int, str]:
    """A descriptor of the file, and the path that led there."""
    for path in stretch.paths:
        with suppress(FileNotFoundError):
            # To open something else than a file may block, or do something; to find it does not.
            found = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if _file_at(f"/proc/self/fd/{found}") == (stretch.device, stretch.inode):
                    return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC), path
            finally:
                os.close(found)
    raise FileNotFoundError(f"{', '.join(stretch.paths)}: not there, or another file")


def _refuse_faults(fd: int, stretch: Stretch) -> None:
    """What is not in the file, or cannot be allocated when it is touched, kills who touches it."""
    found, end = os.fstat(fd), stretch.offset + stretch.size_bytes
    if found.st_size <= end - mmap.PAGESIZE:
        raise OSError(f"the file has {found.st_size} bytes, {end} are mapped by its process")
    if found.st_blocks * _BLOCK_BYTES < found.st_size:
        raise OSError("the file has holes")
