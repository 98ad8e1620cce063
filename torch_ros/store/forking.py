"""gRPC in processes that fork. Nothing here imports it.

gRPC stops its threads before a fork and starts them again on both sides, unless another thread is
within gRPC: then the child has locks that nobody gives back, and aborts or hangs in its first
request. A process that closes its last channel ends gRPC, in a thread that gRPC does not wait for.
So `end` waits, and a fork afterwards finds nothing of it. Where it is in use at the fork, the child
sees whether its threads are there again, and refuses to use it if they are not.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_ros.errors import UsageError
from torch_ros.printable import log_of

log = log_of(__name__)

TASKS = Path("/proc/self/task")
THREADS = ("event_engine", "grpc_", "lifeguard")  # their names begin so
END_S = 2.0  # for gRPC to end, or to be there: a millisecond; on busy cores some tens
REQUEST_S = 0.1  # for requests under way to end, as most do within a millisecond
POLL_S = 0.0005
SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


class _Forking:
    """The state of this process for its next fork, and what its parent left in it at the last."""

    def __init__(self) -> None:
        self.users: weakref.WeakSet[object] = weakref.WeakSet()  # who has channels
        self.requests: set[object] = set()  # under way; each a token
        self.watches: set[object] = set()
        self.was_used: bool = False
        self.has_others: bool = False  # not ours, so that gRPC does not end with the last of ours
        self.threads: frozenset[str] = frozenset()  # of gRPC, before the last fork
        self.awaited: frozenset[str] = frozenset()  # which its parent had
        self.is_lost: bool = False  # it did not get them


_here = _Forking()


def begin(user: object) -> None:
    """Say that `user` is about to open channels.

    Raises: UsageError: This process was forked while its parent was within gRPC.
    """
    _here.is_lost = _here.is_lost or not _becomes(lambda: _here.awaited <= _threads(), END_S)
    if _here.is_lost:
        raise UsageError(
            "this process was forked while its parent used etcd, and gRPC does not work in it; "
            "close the parent's handles and stores before the fork, or start this process with "
            "spawn or forkserver"
        )
    given = os.environ.get(SUPPORT, "")
    if not _here.was_used and given.lower() in {"1", "true", "yes"}:
        log.warning(
            "%s=%s lets gRPC hold up each fork of this process for seconds, in which its lease may "
            "end, and its children may hang; unset it",
            *(SUPPORT, given),
        )
    if not _here.users:  # then what is there is others', unless ours was, and has ended since
        _here.has_others = bool(_threads()) and (_here.has_others or not _here.was_used)
    _here.was_used = True
    _here.users.add(user)


@contextmanager
def within(*, is_watch: bool = False) -> Iterator[None]:
    """Note that gRPC is called, as long as the block lasts: no child forked then may use it."""
    token, all_ = object(), _here.watches if is_watch else _here.requests
    all_.add(token)
    try:
        yield
    finally:
        all_.discard(token)


def end(user: object) -> None:
    """Say that `user` has closed its channels. With the last ones gRPC ends before this returns."""
    _here.users.discard(user)
    _await_end()


def _await_end() -> None:
    """Wait for gRPC's threads to end, if the channels that are closed were its last ones."""
    if _here.was_used and not _here.users and not _here.has_others:
        _here.has_others = not _becomes(lambda: not _threads() or bool(_here.users), END_S)


def _becomes(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether `condition` becomes true in that time; gRPC's threads take milliseconds."""
    deadline = time.monotonic() + within_s
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return is_true


def _threads() -> frozenset[str]:
    """The names of gRPC's threads in this process, as the kernel has them."""
    names = []
    for task in _tasks():
        with suppress(OSError):  # it has ended
            names.append((task / "comm").read_text(errors="replace").strip())
    return frozenset(name for name in names if name.startswith(THREADS))


def _tasks() -> list[Path]:
    """This process's threads, of which there is one at least; none: /proc is not mounted."""
    try:
        return list(TASKS.iterdir())
    except OSError:
        return []


def _before() -> None:
    """Make a fork harmless, if that takes no time; otherwise note what the child has to know."""
    _await_end()
    _becomes(lambda: not _here.requests or bool(_here.watches), REQUEST_S)
    _here.threads = _threads()


def _in_child() -> None:
    """Note whether gRPC can be used here: not if the parent was within it, or it did not restart.

    Without /proc, nothing tells: then it cannot where the parent had channels.
    """
    channels = list(_here.users)  # the parent's
    for user in channels:
        # To destroy the parent's channels at the child's exit could wait for threads of the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(user))
    _here.awaited |= _here.threads
    count = len(_tasks())
    was_within = bool(_here.requests or _here.watches)
    is_switched_off = count == 1 and bool(_here.awaited)  # gRPC's own handlers of forks are
    is_unseen = count == 0 and bool(channels)
    _here.is_lost |= was_within or is_switched_off or is_unseen
    _here.has_others |= bool(_here.threads)
    _here.users, _here.requests, _here.watches = weakref.WeakSet(), set(), set()


os.register_at_fork(before=_before, after_in_child=_in_child)
