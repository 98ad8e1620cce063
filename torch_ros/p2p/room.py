"""Whether this process may open the files that NIXL, UCX and gRPC take; they abort without."""

import errno
import math
import os
import resource
from contextlib import suppress
from pathlib import Path

from torch_ros.errors import UsageError

FILES = 40  # a handle has 26 before its first peer
PEER_FILES = 8  # with four more UCX connects to one
WAY_OUT = "raise the limit (ulimit -n, or resource.setrlimit)"


def require_files() -> None:
    """Raises: UsageError: This process may open too few more, or /proc does not tell."""
    limit = _limit()
    try:
        count = _count(limit)
    except OSError as error:
        raise UsageError(
            f"the open files of this process cannot be seen ({error}); mount /proc in its "
            "container or namespace"
        ) from error
    if limit - count < FILES:
        raise UsageError(
            f"this process has {count} files open and may have {limit}: expected room for {FILES} "
            f"more, for sockets and events of a handle; {WAY_OUT}"
        )


def lacking() -> str:
    """Text to append to an error of NIXL's: the limit, if it leaves no room for a peer; or ""."""
    limit = _limit()
    with suppress(OSError):
        if limit - (count := _count(limit)) < PEER_FILES:
            return f" (this process has {count} files open and may have {limit}: {WAY_OUT})"
    return ""


def _limit() -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _count(limit: float) -> float:
    """How many files this process has open, of so many. Raises: OSError: /proc does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError as error:
        if error.errno == errno.EMFILE:  # not one is left, to look with
            return limit
        raise


def require_home() -> None:
    """Raises: UsageError: NIXL cannot look for its own file in this user's home directory."""
    home = Path(os.environ.get("HOME", ""))
    try:
        (home / ".nixl.cfg").stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # few have one
    except OSError as error:
        raise UsageError(
            f"HOME={home}: NIXL looks for a file there, which this user may not ({error}); set "
            "HOME to a directory that it may enter"
        ) from error
