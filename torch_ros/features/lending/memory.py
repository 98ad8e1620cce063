"""Memory that is lent: a file that processes on this host map and lock, until they leave.

docs/protocol/lending.md says why a lock of the kernel's, and no record, keeps a buffer from being
filled under its borrowers (I11).

    fill     word     manifest       set by      means
    0        0                       begin       it is being written, or was when its process ended
    n        0                       end         the n-th content, all of it
    n        0        where it is    describe    and what is in it
    n        w        where it is    name        and which version that is

The lender writes only between `begin` and `end`, and only to what is closed.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from hashlib import blake2b

import numpy as np

from torch_ros.p2p import shared
from torch_ros.p2p.voucher import Neighbour

HEADER_BYTES = 4096  # a page: the chunks behind it are aligned
_WORDS = 4  # of the header: fill, word, offset and size of the manifest

# A file that is cut short under its borrower would end the borrower.
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class NotLent(Exception):
    """The process has no buffer with that content that may be lent."""


class NotYet(Exception):
    """The buffer is there, and its process has yet to learn whether it is what is looked for."""


class Closed(Exception):
    """The buffer is there, and its process lends no more now."""


def _name(agent: str) -> str:
    """The name of the files of an agent; several may be in one process."""
    return f"torch_ros lent {blake2b(agent.encode(), digest_size=8).hexdigest()}"


class LentMemory:
    """Memory of this process that it may lend: closed at first, so that nobody has it.

    Args:
        size_bytes: Of `bytes`, in which contents and their manifests lie.

    Raises: OSError: There is not as much.
    """

    content_bytes: int

    def __init__(self, agent: str, size_bytes: int) -> None:
        self._fd = os.memfd_create(_name(agent), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._file = _file(self._fd)
        weakref.finalize(self, _let_go, self._fd, self._file)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.is_closed: bool = True
        self._size_bytes = HEADER_BYTES + size_bytes
        # Now, or whoever touches it first may be killed.
        os.posix_fallocate(self._fd, 0, self._size_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(self._fd, self._size_bytes)
        self._header = np.frombuffer(memory, np.uint64)[:_WORDS]
        self._fills = self.content_bytes = 0
        self._all = memoryview(memory)
        self.bytes: memoryview = self._all[HEADER_BYTES:]

    def close(self) -> bool:
        """Lend it to nobody from now on; False: somebody has it."""
        if not self.is_closed:
            self.is_closed = self._locks(fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self.is_closed

    def open(self) -> None:
        """Lend it to all that come."""
        self.is_closed = False  # before it is open: Ctrl-C may come in between
        self._locks(fcntl.LOCK_UN)

    def _locks(self, how: int) -> bool:
        # Another part of this process may have closed the file, and the number be another's.
        with suppress(OSError):  # somebody has it; or that cannot be known
            if _file(self._fd) == self._file:
                fcntl.flock(self._fd, how)
                return True
        return False

    def begin(self) -> None:
        """Before the first byte of a content is written."""
        assert self.is_closed, "somebody may have it"
        self._header[:2] = 0

    def end(self, content_bytes: int) -> None:
        """After the last byte was written."""
        self.content_bytes = content_bytes
        self._fills += 1
        self._header[0] = self._fills

    def describe(self, manifest: bytes) -> None:
        """Say what the content is. The manifest goes to the end, which the content leaves free."""
        start = self._size_bytes - len(manifest)
        self._all[start:] = manifest
        self._header[2:] = start, len(manifest)

    def name(self, word: int) -> None:
        """Say which version the content is."""
        self._header[1] = word

    def offset_of(self, address: int) -> int:
        """Where in the file a byte of this process is; 0: it is elsewhere."""
        offset: int = address - self._header.ctypes.data
        return offset if HEADER_BYTES <= offset < self._size_bytes else 0


class Loan:
    """The buffer of another process whose content has this word, locked and mapped.

    `memory` is for reading: a write to it ends the process with SIGSEGV. It stays mapped for as
    long as anything refers to it, and is locked until `end`.

    Args:
        before: The word that it has before: see `NotYet`.

    Raises:
        NotLent: There is none.
        NotYet: It has the word `before`.
        Closed: It is not lent now.
        OSError: The process has ended, or the kernel does not allow it.
    """

    def __init__(self, process: Neighbour, word: int, before: int | None = None) -> None:
        self._fd = _found(process, word, before)
        self._end = weakref.finalize(self, _let_go, self._fd, _file(self._fd), os.getpid())
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Closed from error
        if _word(self._fd) != word:
            raise NotLent  # any more: it was locked too late
        size_bytes = os.fstat(self._fd).st_size
        self.memory: ctypes.Array[ctypes.c_ubyte] = shared.read_only(self._fd, size_bytes)
        self._header = (ctypes.c_uint64 * _WORDS).from_buffer(self.memory)
        self._fill = self._header[0]

    @property
    def manifest(self) -> bytes:
        start, size = self._header[2:]
        return bytes(memoryview(self.memory)[start : start + size])

    @property
    def is_intact(self) -> bool:
        """Whether nothing was written there since it was lent."""
        return self._fill == self._header[0] != 0

    def end(self) -> None:
        """Unlock it, unless this is a forked child: the lock is the parent's. Idempotent."""
        self._end()


_File = tuple[int, int]  # device and inode: no two files that are there have the same


def _file(fd: int) -> _File:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _let_go(fd: int, file: _File, owner: int = -1) -> None:
    """Close a file, unless another part of this process has; unlock it before, as its owner.

    It stays locked otherwise until its last mapping is gone.
    """
    with suppress(OSError):
        if _file(fd) == file:
            if os.getpid() == owner:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for children that were forked meanwhile
            os.close(fd)


def _found(process: Neighbour, word: int, before: int | None) -> int:
    """Open the file of that process whose content has this word, for reading only."""
    link = f"/memfd:{_name(process.agent)} (deleted)"  # as the kernel shows it
    folder = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=process.folder)
    try:
        for number in os.listdir(folder):  # noqa: PTH208
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(number, dir_fd=folder) != link:
                    continue
                fd = _opened(process, folder, number)
                if (found := _word(fd)) == word:
                    return fd
                os.close(fd)
                if found == before:
                    raise NotYet
    finally:
        os.close(folder)
    raise NotLent


def _opened(process: Neighbour, folder: int, number: str) -> int:
    """Open a file that the process has open under that number, if it is one that it has made.

    Raises: FileNotFoundError: It is another one.
    """
    # To open something else than a file may block, or do something; to find it does not.
    found = os.open(number, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
    try:
        shared.refuse_others(found)
        held = os.fstat(found)
        # A borrower has it open for reading only.
        if held.st_uid != os.geteuid() or process.mode(int(number), held.st_ino) != os.O_RDWR:
            raise FileNotFoundError
        fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        os.close(fd)
        raise FileNotFoundError
    return fd


def _word(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, 8), "little")
