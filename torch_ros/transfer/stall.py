"""A source that makes no progress, or does not answer: how long a reader stays with it."""

import time
from collections.abc import Callable

from torch_ros.deadline import Deadline
from torch_ros.errors import SourceLost

POLL_S_MIN, POLL_S_MAX = 0.0002, 0.01  # between questions to a source that is filling itself
EAGER_POLL_S = 0.00005  # the same, to a relay on another host
EAGER_S = 2.0  # of a wait for that, in which questions do not grow rarer
STALL_S = 1.0  # without progress, until the store is asked whether the source is there at all
SILENCE_S = 4.0  # without an answer, until another source is better
BLINK_S = 0.1  # of a wait counts at most: this process may have been stopped meanwhile


class SourceWait:
    """A wait for a source: for an answer, if it `has_other`, or else for progress.

    Args:
        is_there: Asks the store for the source, every `STALL_S` while nothing comes.
        has_other: After `limit_s`, asks then too whether another source is better, given for how
            long nothing came. None: the source answers, and is not left for another.
        is_eager: For `EAGER_S` it is asked without pauses that grow: over many hosts a chain waits
            at each hop for the next question. On one host those that copy need the processors.
    """

    def __init__(
        self,
        replica: str,
        deadline: Deadline,
        is_there: Callable[[], bool],
        has_other: Callable[[float], bool] | None = None,
        limit_s: float = SILENCE_S,
        *,
        is_eager: bool = False,
    ) -> None:
        self._eager_s = EAGER_S if is_eager else 0.0
        self._replica, self._deadline, self._limit_s = replica, deadline, limit_s
        self._is_there, self._has_other = is_there, has_other
        self.reset()

    def reset(self) -> None:
        """Begin anew: something came."""
        self._pause_s = EAGER_POLL_S if self._eager_s else POLL_S_MIN
        self.still_s: float = 0.0
        self._ask_s, self._looked_s = STALL_S, time.monotonic()

    def look(self, reason: str) -> None:
        """Note that nothing has come since the last look.

        Raises:
            SourceLost: The source is gone; or it is mute, and another one is not.
            DeadlineExceeded: The wait took too long; `reason` says for what.
        """
        now_s = time.monotonic()
        self.still_s += min(now_s - self._looked_s, BLINK_S)
        self._looked_s = now_s
        self._deadline.check(reason)
        if self.still_s < self._ask_s:
            return
        self._ask_s = self.still_s + STALL_S
        if self.still_s < self._limit_s:  # the next question comes at `limit_s`, not behind it
            self._ask_s = min(self._ask_s, self._limit_s)
        if not self._is_there():
            raise SourceLost(self._replica, f"it is gone, and {reason}").orderly()
        if self._has_other and self.still_s >= self._limit_s and self._has_other(self.still_s):
            raise SourceLost(self._replica, f"{reason}, for {self.still_s:.1f} s")
        self._looked_s = time.monotonic()  # the time of these questions is no silence

    def wait(self, reason: str) -> None:
        """Look, then sleep: at last each time a little longer."""
        self.look(reason)
        time.sleep(self._pause_s)
        if self.still_s >= self._eager_s:
            self._pause_s = min(2 * self._pause_s, POLL_S_MAX)
