"""The RDMA libraries of this host, which are loaded before NIXL loads its own copies.

NIXL's wheel brings a libibverbs and a libnl-route. UCX's module for EFA takes libefa of the host,
which needs the host's. If the host's libnl-route is loaded for that module, the linker looks for
its functions in the wheel's copy before itself. Its constructors then register traffic classes
with the copy, which refuses them, having others of the same names; at exit its destructors take
them out of a list in which they never were: SIGSEGV after the program's last line. A libnl-route
that was loaded before that module finds its own functions. LD_PRELOAD does not help: it makes the
host's functions visible to the wheel's copy, which then does the same.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

VERBS = "libibverbs.so.1"  # it alone needs libnl-route
NETLINK = "libnl-route-3.so.200"
OTHERS = ("libefa.so.1", "librdmacm.so.1")
UCX_MODULE = "libuct_ib_efa.so"
DEVICES = Path("/dev/infiniband")  # of this container; /sys/class has those of its host


class _Link(ctypes.Structure):
    """The dynamic linker's record of a library; glibc's `link_map`."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


def has_devices() -> bool:
    """Whether this process may have a device that speaks RDMA."""
    return any(DEVICES.glob("uverbs*"))


def load_first() -> None:
    """Load this host's libraries, if it has any, before NIXL loads its copies."""
    _load(VERBS)


@cache
def warn_if_mixed() -> None:
    """Say once that something made a UCX backend before `load_first`. Nothing helps then."""
    names = [Path(path).name for path in _loaded()]
    modules = [at for at, name in enumerate(names) if name.startswith(UCX_MODULE)]
    if modules and NETLINK in names[modules[0] :]:  # loaded for that module, behind it
        log.warning(
            "NIXL was used in this process before torch_ros was imported, and its copy of %s was "
            "mixed with this host's: the process will end with SIGSEGV (exit code 139) after its "
            "last line; import torch_ros first",
            NETLINK,
        )


def libraries() -> list[str]:
    """The files of this host's, as far as they can be loaded here."""
    for name in OTHERS:
        _load(name)
    return sorted(path for path in _loaded() if Path(path).name in {VERBS, NETLINK, *OTHERS})


def _load(name: str) -> None:
    with suppress(OSError):  # it is not here, or is of no use: UCX cannot load it either
        ctypes.CDLL(name)


def _loaded() -> Iterator[str]:
    """The files of all libraries of this process, in the order in which they were loaded."""
    at = ctypes.CDLL(None)._handle  # noqa: SLF001  # a pointer to the first of a list
    while at:
        link = _Link.from_address(at)
        yield os.fsdecode(link.name or b"")
        at = link.next
