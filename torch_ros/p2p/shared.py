"""Memory that is a file, which other processes on the same host can map."""

import ctypes
import fcntl
import mmap
import os
import weakref
from pathlib import Path

# The same in all containers of a host, another one after each start of its kernel.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_TMPFS = 0x01021994  # by the kernel's magic.h

# Python's own mmap keeps a file descriptor for each mapping: a model of a thousand shared tensors
# would use up what a process has.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


def host() -> str:
    """The boot id of this host: if it is the same, an inode is the same file."""
    return _BOOT_ID.read_text().strip()


def allocate(size_bytes: int) -> mmap.mmap:
    """Memory of this process that others on this host can map.

    Raises: OSError: There is not as much.
    """
    fd = os.memfd_create("torch_ros", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)  # now, or whoever touches it first may be killed
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or whoever maps it may be killed
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def read_only(fd: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The first bytes of a file, mapped for as long as anybody has the answer. Inherited by `fork`.
    A write to it ends the process.

    Raises: OSError: This process cannot have it.
    """
    address = map_file(fd, size_bytes, 0)
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(memory, unmap, address, size_bytes).atexit = False
    return memory


def map_file(fd: int, size_bytes: int, offset: int) -> int:
    """Map a part of a file, only to be read, and return its address until `unmap`.

    Raises: OSError: This process cannot have it.
    """
    address: int = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def unmap(address: int, size_bytes: int) -> None:
    _libc.munmap(address, size_bytes)


def refuse_others(fd: int) -> None:
    """Raises: OSError: The file is not on tmpfs, as a memfd is."""
    said = (ctypes.c_long * 64)()  # twice what the kernel writes
    if _libc.fstatfs(fd, said) != 0 or said[0] != _TMPFS:
        raise OSError("the file is not on tmpfs")
