"""How a process on the same host is known to have made the descriptor that names it.

Each process keeps a voucher open, a sealed file in memory with the digests of its descriptors. A
reader looks for it among the files of the process that a descriptor names:
docs/protocol/nixl.md#vouchers.
"""

import fcntl
import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

_NAME = "torch_ros voucher"
_LINK = f"/memfd:{_NAME} (deleted)"  # as the kernel shows it
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_BYTES_MAX = 1 << 20  # of a voucher: 50,000 descriptors
LOOKS_MAX = 8  # at a voucher that is replaced meanwhile

_File = tuple[int, int, int]  # device, inode and time of its last change


class Process(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process, for those who see the same process numbers."""

    pid: int = 0
    namespace: int = 0  # its inode; another container has another one
    voucher: int = -1  # the number under which it has that open


class _Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    agent: str
    pid: int
    started: int  # in ticks since the host was
    digests: tuple[bytes, ...]


class Unproven(Exception):
    """The process does not vouch for it; why."""


class LetGo(Unproven):
    """The process has ended, or has this registered no more: that happens, and is no attack."""


class _ReplacedError(Exception):
    """The voucher that was looked at is not the one that is shown now."""


class Voucher:
    """This process's voucher, for one agent; at first for no descriptor.

    Raises: OSError: The system has no such files; or its /proc numbers processes as another
        namespace does, so that what is proven there is not what would be read.
    """

    def __init__(self, agent: str) -> None:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
            raise OSError("/proc is of another pid namespace than this process")
        self._agent, self._fd = agent, -1
        self._started = started_at(line_of("self"))
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        self._fd = self._written(())
        self._files = {_file(os.fstat(self._fd))}  # one of them is under that number
        self.process: Process = Process(os.getpid(), namespace, self._fd)

    def show(self, digests: Iterable[bytes]) -> None:
        """From now on vouch for these, and for no others.

        Raises: OSError: It cannot be written; this process vouches for nothing any more.
        """
        try:
            fd = self._written(tuple(digests))
            try:
                # Somebody may have closed all files of this process; the number is not ours then.
                if not self._is_open():
                    raise OSError("it was closed by another part of this process")
                self._files = {_file(os.fstat(self._fd)), _file(os.fstat(fd))}
                os.dup2(fd, self._fd, inheritable=False)
            finally:
                os.close(fd)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        fd, is_open = self._fd, self._is_open()
        self._fd = -1
        if is_open:
            os.close(fd)

    def _written(self, digests: tuple[bytes, ...]) -> int:
        """Return the descriptor of a new, sealed file that vouches for these."""
        content = _Content(self._agent, os.getpid(), self._started, digests)
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(msgspec.msgpack.encode(content))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _is_open(self) -> bool:
        try:
            return self._fd >= 0 and _file(os.fstat(self._fd)) in self._files
        except OSError:
            return False


class Neighbour:
    """Another process on this host, of the same user. Safe to use from many threads.

    Held by its folder in /proc: once the process has ended there is nothing in that, also if
    another one has got its number. So what has been found there says that it has had its number
    all the time.

    Raises: Unproven: There is no such process, or it is not one to be read from.
    """

    def __init__(self, agent: str, process: Process) -> None:
        self.agent: str = agent
        self.process: Process = process
        self._lock = threading.Lock()
        self._known: tuple[_File, frozenset[bytes]] | None = None
        try:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
            self.folder: int = os.open(f"/proc/{process.pid}", flags)
        except (OSError, ValueError) as error:
            raise Unproven(f"process {process.pid} is not to be found ({error})") from error
        if os.fstat(self.folder).st_uid != os.geteuid():
            self.close()
            raise Unproven(f"process {process.pid} is another user's")

    def vouched(self) -> frozenset[bytes]:
        """Digests of the descriptors that it has registered now.

        Raises: Unproven: It has ended, or shows no voucher of its own.
        """
        at = f"fd/{self.process.voucher}"
        with self._lock:
            for _ in range(LOOKS_MAX):
                try:
                    file = _file(os.stat(at, dir_fd=self.folder))
                    if self._known is None or self._known[0] != file:
                        self._known = self._read(at)
                except _ReplacedError:
                    continue
                except (OSError, OverflowError) as error:
                    reason = f"the voucher of process {self.process.pid} cannot be read ({error})"
                    has_ended = isinstance(error, FileNotFoundError | ProcessLookupError)
                    raise (LetGo if has_ended else Unproven)(reason) from error
                return self._known[1]
        raise Unproven(f"process {self.process.pid} shows another voucher at each look")

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            folder, self.folder = self.folder, -1
            if folder >= 0:
                os.close(folder)

    def _read(self, at: str) -> tuple[_File, frozenset[bytes]]:
        """Return which file it is, and its digests, if only this process can have made it."""
        pid = self.process.pid
        # To open something else than a file may block, or do something; to find it does not.
        found = os.open(at, os.O_PATH | os.O_CLOEXEC, dir_fd=self.folder)
        try:
            here, held = f"/proc/self/fd/{found}", os.fstat(found)
            if not stat.S_ISREG(held.st_mode) or os.readlink(here) != _LINK:  # noqa: PTH115
                raise Unproven(f"process {pid} has something else where its voucher should be")
            if held.st_uid != os.geteuid():
                raise Unproven(f"what process {pid} shows was made by another user")
            if held.st_size > _BYTES_MAX:
                raise Unproven(f"the voucher of process {pid} has {held.st_size} bytes")
            fd = os.open(here, os.O_RDONLY | os.O_CLOEXEC)
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
                content = os.pread(fd, _BYTES_MAX, 0)
            finally:
                os.close(fd)
        finally:
            os.close(found)
        if seals & _SEALS != _SEALS:
            raise Unproven(f"the voucher of process {pid} can be written to")
        mode = self.mode(self.process.voucher, held.st_ino)
        if mode is None:  # it has shown another one since; nothing is wrong with that
            raise _ReplacedError
        if mode != os.O_RDWR:
            raise Unproven(f"process {pid} only reads the voucher that it shows")
        try:
            said = msgspec.msgpack.decode(content, type=_Content)
        except (msgspec.DecodeError, ValueError) as error:
            raise Unproven(f"the voucher of process {pid} is none of this release") from error
        started = started_at(self.read("stat"))
        if (said.agent, said.pid, said.started) != (self.agent, pid, started):
            raise Unproven(
                f"process {pid} shows a voucher of agent {said.agent}, process {said.pid}, begun at"
                f" {said.started}; expected agent {self.agent}, process {pid}, begun at {started}"
            )
        return _file(held), frozenset(said.digests)

    def mode(self, number: int, inode: int) -> int | None:
        """How it has that file open: O_RDWR as who made it has; None: another file is there.

        Raises: OSError: As `read`.
        """
        lines = self.read(f"fdinfo/{number}").splitlines()
        said = dict(line.split(":", 1) for line in lines if ":" in line)
        if int(said.get("ino", inode)) != inode:  # kernels before 5.14 do not say
            return None
        return int(said["flags"], 8) & os.O_ACCMODE

    def read(self, name: str) -> str:
        """A text of the kernel's about the process.

        Raises: OSError: It has ended, or the kernel does not allow it.
        """
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.folder)
        with os.fdopen(fd, errors="replace") as file:
            return file.read()


def _file(found: os.stat_result) -> _File:
    return found.st_dev, found.st_ino, found.st_ctime_ns


def line_of(pid: int | str) -> str:
    """The kernel's line about a process. It cuts names after 15 bytes, also within a character."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace")


def started_at(text: str) -> int:
    """The 22nd field of a process's `stat`; the second, in brackets, may have spaces in it."""
    return int(text.rpartition(")")[2].split()[19])
