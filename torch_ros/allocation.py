"""Memory of this process: an error that there is too little names the size, and a limit of its."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SHORT = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC)
_LIMITS = (
    ("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS, "VmSize:"),
    ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA, "VmData:"),
)


@contextmanager
def allocating(what: str, size_bytes: int, way_out: str = "") -> Iterator[None]:
    """Within it, host memory is allocated, by torch or from the kernel, and nothing else is done.

    Args:
        what: It is for; begins the message.
        way_out: Ends it.

    Raises:
        MemoryError: There is too little.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:  # torch's word for it is the first
        if isinstance(error, OSError) and error.errno not in _SHORT:
            raise
        ends = "; ".join(filter(None, (limited(), way_out)))
        text = f"{what} takes {size_bytes} bytes of host memory, and there is too little"
        raise MemoryError(f"{text}: {ends}" if ends else text) from error


def limited() -> str:
    """The limits of this process that leave it something to take; "": it has none."""
    return ", ".join(f"{name} leaves {left} bytes" for name, left in limits())


def limits() -> Iterator[tuple[str, int]]:
    """Each limit of this process, and the bytes that it leaves."""
    used: dict[str, int] = {}
    for name, kind, line in _LIMITS:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = used or _used()
            yield name, max(0, limit - used.get(line, 0))


def _used() -> dict[str, int]:
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
        words = [line.split() for line in lines if line.endswith(" kB")]
        return {each[0]: 1024 * int(each[1]) for each in words}
    return {}
