"""Memory that is a sealed file, as of copies: found in another process, mapped from there."""

import ctypes
import fcntl
import itertools
import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_ros.p2p.regions import Cover, Uint64s
from torch_ros.p2p.shared import map_file, refuse_others, unmap
from torch_ros.p2p.voucher import Neighbour
from torch_ros.printable import log_of
from torch_ros.spans import HOST

log = log_of(__name__)

# Linux gives a process 65,530 mappings, and one that has no more cannot allocate memory.
MAPPINGS_MAX = 16_384
_MEMFD = "/memfd:"  # as the kernel names what has no name elsewhere
_BLOCK_BYTES = 512  # what st_blocks counts, whatever the filesystem

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_File = tuple[int, int]  # device and inode: no two files that are there have the same on one host


@dataclass(frozen=True, slots=True)
class Stretch:
    """Addresses of a process behind which there is a file."""

    address: int
    size_bytes: int
    offset: int  # where it begins in the file
    file: _File
    path: str  # where this process may find the file; "": it is not open there


def find(process: Neighbour, starts: Uint64s, ends: Uint64s) -> tuple[Stretch, ...]:
    """The parts of these disjoint regions, in order, that are memfds; in order.

    Raises: OSError: The process has ended, or the kernel does not allow it.
    """
    firsts, lasts = starts.tolist(), ends.tolist()
    return tuple(
        stretch
        for stretch in _shared(process.read("maps"), _memfds(process))
        if (after := bisect_right(lasts, stretch.address)) < len(lasts)
        and firsts[after] < stretch.address + stretch.size_bytes
    )


def _shared(maps: str, paths: dict[_File, str]) -> Iterator[Stretch]:
    """Yield what is a memfd in a /proc/<pid>/maps, and MAP_SHARED: bytes that were written to a
    private mapping are not in the file.
    """
    for line in maps.splitlines():
        addresses, flags, offset, device, inode, *path = line.split(maxsplit=5)
        if flags.endswith("s") and "".join(path).startswith(_MEMFD):
            start, end = (int(part, 16) for part in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            file = (os.makedev(major, minor), int(inode))
            yield Stretch(start, end - start, int(offset, 16), file, paths.get(file, ""))


def _memfds(process: Neighbour) -> dict[_File, str]:
    """The memfds that a process has open, and where: elsewhere they have no name."""
    paths = {}
    for number in os.listdir(f"/proc/{process.process.pid}/fd"):  # noqa: PTH208
        path = f"/proc/{process.process.pid}/fd/{number}"
        with suppress(OSError):  # to read the link asks no filesystem
            if os.readlink(path).startswith(_MEMFD) and (file := _file_at(path)):  # noqa: PTH115
                paths[file] = path
    return paths


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

    Raises: OSError: This process cannot have it, and why.
    """

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        self.is_open: bool = True
        fd = _open(stretch)
        try:
            # A touch would kill where it is not in the file, any more or at all, or not allocated.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # the first look
                raise OSError("the file may be cut short")
            found, end = os.fstat(fd), stretch.offset + stretch.size_bytes
            if found.st_size <= end - mmap.PAGESIZE:
                raise OSError(f"the file has {found.st_size} bytes, its process maps {end}")
            if found.st_blocks * _BLOCK_BYTES < found.st_size:
                raise OSError("the file has holes")
            self.address: int = map_file(fd, stretch.size_bytes, stretch.offset)
        finally:
            os.close(fd)
        _libc.madvise(self.address, stretch.size_bytes, mmap.MADV_DONTFORK)

    @property
    def is_abandoned(self) -> bool:
        """Whether the process no longer has the file where it had it, or is gone."""
        return _file_at(self.stretch.path) != self.stretch.file

    def close(self) -> None:
        """Nobody may be reading it. Idempotent."""
        address, self.address, self.is_open = self.address, 0, False
        if address:
            unmap(address, self.stretch.size_bytes)


# From, to, the mapping of these addresses, and the digest of the descriptor that names them.
_Row = tuple[int, int, Mapping, bytes]


class MappedMemory:
    """The memory of one peer that is mapped here. The caller holds the transport's lock."""

    def __init__(self) -> None:
        self.mappings: dict[Stretch, Mapping] = {}
        self._keep(())

    def _keep(self, rows: Iterable[_Row]) -> None:
        """Know these rows of registered memory, which are disjoint, and no others."""
        self.rows = sorted(rows, key=lambda row: row[0])
        starts, ends = (np.array([row[at] for row in self.rows], np.uint64) for at in (0, 1))
        self._cover = Cover(0, HOST, starts, ends)
        self.covers: tuple[Cover, ...] = (self._cover,) if self.rows else ()
        shifts = [row[2].address - row[2].stretch.address for row in self.rows]
        self._shifts = np.array(shifts, np.int64).view(np.uint64)  # it wraps, and back again

    def find(
        self, addresses: Uint64s, sizes: Uint64s
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], Uint64s]:
        """Say for each span whether it lies in one row, in which, and where its bytes are here."""
        row = np.searchsorted(self._cover.starts, addresses, side="right") - 1
        if not self.rows:
            return np.zeros(len(row), np.bool_), row, addresses
        ends = self._cover.ends[row]
        is_inside = (row >= 0) & (ends > addresses) & (ends - addresses >= sizes)
        return is_inside, row, addresses + self._shifts[row]

    def forget(self, starts: Uint64s, ends: Uint64s) -> None:
        """Forget rows that meet these regions, disjoint and in order: these are described anew."""
        after = np.searchsorted(ends, self._cover.starts, side="right")
        beyond = np.append(starts, np.uint64(2**64 - 1))[after]
        self._keep(itertools.compress(self.rows, beyond >= self._cover.ends))

    def drop(self, gone: AbstractSet[Mapping]) -> None:
        """Leave out these mappings. The caller closes them once no copy reads them."""
        for mapping in gone:
            mapping.is_open = False
            self.mappings.pop(mapping.stretch, None)
        self._keep([row for row in self.rows if row[2] not in gone])

    def map(
        self, process: Neighbour, starts: Uint64s, ends: Uint64s, of: bytes, *, elsewhere: int
    ) -> None:
        """Map what can be mapped of these addresses, which a descriptor of digest `of` names; other
        peers have `elsewhere` mappings, and all together `MAPPINGS_MAX`.
        """
        agent = process.agent
        rows, refused = list(self.rows), list[OSError]()
        try:
            stretches = find(process, starts, ends)
        except OSError as error:
            log.info("agent %s: the kernel does not say what it has mapped (%s)", agent, error)
            return
        for stretch in stretches:
            try:
                if stretch not in self.mappings:
                    if elsewhere + len(self.mappings) >= MAPPINGS_MAX:
                        raise OSError(f"there are {MAPPINGS_MAX} mappings already")
                    self.mappings[stretch] = Mapping(stretch)
                mapping = self.mappings[stretch]
            except OSError as error:
                refused.append(error)
                continue
            begin, end = stretch.address, stretch.address + stretch.size_bytes
            those = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(starts, end))
            for start, stop in zip(starts[those].tolist(), ends[those].tolist(), strict=True):
                rows.append((max(start, begin), min(stop, end), mapping, of))
        self._keep(rows)
        if stretches:
            log.info(
                "agent %s: %.0f MB of its shared memory are mapped here, and %d of %d pieces not%s",
                *(agent, sum(row[1] - row[0] for row in rows) / 1e6, len(refused), len(stretches)),
                f" ({refused[0]})" if refused else "",
            )


def _open(stretch: Stretch) -> int:
    """Open the stretch's very file."""
    if stretch.path:
        # To open something else than a file may block, or do something; to find it does not.
        found = os.open(stretch.path, os.O_PATH | os.O_CLOEXEC)
        try:
            if _file_at(f"/proc/self/fd/{found}") == stretch.file:
                refuse_others(found)
                return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(found)
    raise FileNotFoundError(f"{stretch.path or 'no path'}: not there, or another file")
