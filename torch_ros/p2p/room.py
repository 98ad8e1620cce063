"""Whether this process may open the files that NIXL, UCX and gRPC take; they abort without."""

import os
import resource
from pathlib import Path

from torch_ros.errors import UsageError

FILES = 40  # a handle has 26 before its first peer


def require_files() -> None:
    """Raises: UsageError: This process may open too few more, or /proc does not tell."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    except OSError as error:
        raise UsageError(
            f"the open files of this process cannot be seen ({error}); mount /proc in its "
            "container or namespace"
        ) from error
    if limit != resource.RLIM_INFINITY and limit - count < FILES:
        raise UsageError(
            f"this process has {count} files open and may have {limit}: expected room for {FILES} "
            "more, for sockets and events of a handle; raise the limit (ulimit -n, or "
            "resource.setrlimit)"
        )


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
