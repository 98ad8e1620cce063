"""Memory that is a file, as torch's shared memory: found in another process, mapped from there."""

import ctypes
import itertools
import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace

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
_FOLDER = "/dev/shm/"  # noqa: S108
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
    paths: tuple[str, ...] = ()  # where this process may find the file


def find(process: Neighbour, starts: Uint64s, ends: Uint64s) -> tuple[Stretch, ...]:
    """The parts of these disjoint regions, in order, that are files and may be mapped; in order.

    Raises: OSError: The process has ended, or the kernel does not allow it.
    """
    firsts, lasts = starts.tolist(), ends.tolist()
    shared = [
        (stretch, name)
        for stretch, name in _shared(process.read("maps"))
        if (after := bisect_right(lasts, stretch.address)) < len(lasts)
        and firsts[after] < stretch.address + stretch.size_bytes
    ]
    paths = _paths(process, {name for _, name in shared})
    return tuple(replace(stretch, paths=paths[name]) for stretch, name in shared)


def _shared(maps: str) -> Iterator[tuple[Stretch, str]]:
    """Yield what is MAP_SHARED in a /proc/<pid>/maps, each with the name that its file has there.

    Bytes that were written to a private mapping are not in the file.
    """
    for line in maps.splitlines():
        addresses, flags, offset, device, inode, *path = line.split(maxsplit=5)
        if flags.endswith("s") and inode != "0":  # shared, and a file
            start, end = (int(part, 16) for part in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            file = (os.makedev(major, minor), int(inode))
            yield Stretch(start, end - start, int(offset, 16), file), "".join(path)


def _paths(process: Neighbour, names: set[str]) -> dict[str, tuple[str, ...]]:
    """Where the files that have these names in a process may be: there, or among its open ones.

    A memfd, and what torch shares by default, has no name any more. No other folder is looked into:
    who may write there can put a filesystem of his own under a name.
    """
    paths = {name: (name,) * name.startswith(_FOLDER) for name in names}
    for number in os.listdir(f"/proc/{process.process.pid}/fd") if names else ():  # noqa: PTH208
        path = f"/proc/{process.process.pid}/fd/{number}"
        with suppress(OSError):
            name = os.readlink(path)  # noqa: PTH115  # asks no filesystem
            if name in names:
                paths[name] += (path,)
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
        fd, self._path = _open(stretch)
        try:
            # A touch would kill where it is not in the file, or not to be allocated then.
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
        return _file_at(self._path) != self.stretch.file

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


def _open(stretch: Stretch) -> tuple[int, str]:
    """Open the stretch's very file, by the first path that leads there; return that path, too."""
    for path in stretch.paths:
        with suppress(FileNotFoundError):
            # To open something else than a file may block, or do something; to find it does not.
            found = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if _file_at(f"/proc/self/fd/{found}") == stretch.file:
                    refuse_others(found)
                    return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC), path
            finally:
                os.close(found)
    raise FileNotFoundError(f"{', '.join(stretch.paths) or 'no path'}: not there, or another file")
