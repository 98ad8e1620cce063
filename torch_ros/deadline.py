"""When a call ends, and what the time is."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch_ros.errors import DeadlineExceeded


class Cancelled(BaseException):
    """Nobody waits for this call any more: it ends, as by Ctrl-C, where it waits next."""


is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("is_cancelled", default=None)
"""Set by `face/aio.py` in a thread that makes a call for a task: was the task cancelled?"""


def unless_cancelled(check: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """`check`, and a check whether anybody still waits for the call that this thread makes."""
    is_cut = is_cancelled.get()

    def check_both() -> None:
        check()
        if is_cut is not None and is_cut():
            raise Cancelled("its task was cancelled")

    return check_both


def wall_ms() -> int:
    """The wall clock, for people and pictures: nothing is ever decided by it."""
    return int(1000 * time.time())


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a call: `what` is being done, within `timeout_s` from when this was made.

    `check_open` raises when the call is to end earlier. `hint` adds to the reason for a wait
    something that helps people; it may ask etcd. `is_cut`, asked every 2 s, says that nobody waits
    for the call any longer: then its time is over, also where `check_open` is not asked.
    """

    what: str
    timeout_s: float
    started_s: float = field(default_factory=time.monotonic)
    check_open: Callable[[], object] = lambda: None
    hint: Callable[..., str] = lambda _: ""
    is_cut: Callable[[], bool] | None = None

    def left_s(self) -> float:
        if self.is_cut is not None and self.is_cut():
            return 0.0
        return self.started_s + self.timeout_s - time.monotonic()

    def check(self, reason: str) -> None:
        """Raises: DeadlineExceeded: With `reason`, when the time is over."""
        self.check_open()
        if self.left_s() <= 0:
            raise DeadlineExceeded(self.what, self.timeout_s, reason)
