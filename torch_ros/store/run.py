"""Performs what the loop asks for: deadlines, patience with etcd, and log lines live here."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import AccessDenied, StoreUnavailable
from torch_ros.printable import log_of
from torch_ros.store.kv import KV
from torch_ros.store.txn import UNKNOWN, Changes, Commit, Follow, Read, Reply, Steps, T, View, Watch

OnFailure = Callable[[StoreUnavailable | AccessDenied, float], None]
"""Told of each request that fails, and for how long such requests have failed by now; raises when
that is too long for the caller."""
log: logging.Logger = log_of(__name__)

REQUEST_TIMEOUT_S = 5.0  # one round trip; etcd elects a new leader within about this
RETRY_S = 0.2
LOOK_S = 2.0  # a wait asks this often whether to go on: each time etcd begins a new watch
REMIND_S = 10.0  # a wait looks again this often, whatever it hears
FOLLOW_S = 0.05  # between two looks at what changes all the time
PATIENCE_S = 10.0  # a wait of this length is worth a line
LINES_S = 60.0  # what lasts for longer than this is said again this often
ALARM_S = 60.0  # steps and imports of others take less; a wait of this length is worth a warning


def next_line_s(after_s: float) -> float:
    """When what was last said after `after_s` seconds is said again: 2, 4, 8 ... 60 s, 120 s ..."""
    return max(2.0, min(2 * after_s, LINES_S * (after_s // LINES_S + 1)))


class Reminder:
    """When something that lasts is worth a line in the log: more and more rarely.

    Args:
        first_s: How long it lasts before it is worth the first one.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self._began_s, self._next_s = time.monotonic(), first_s

    @property
    def lasts_s(self) -> float:
        return time.monotonic() - self._began_s

    def is_due(self) -> bool:
        """Whether to say it now; asking counts as saying."""
        if (lasts_s := self.lasts_s) < self._next_s:
            return False
        self._next_s = next_line_s(lasts_s)
        return True


class Failures:
    """How long requests have failed: those that read, and those that write, each by themselves.

    An etcd may refuse the one and answer the other.

    Args:
        on_failure: None: a request that etcd denies fails at once, and others until the deadline.
    """

    def __init__(self, on_failure: OnFailure | None) -> None:
        self._on_failure = on_failure
        self._since_s: dict[type[Read | Commit], float] = {}

    def note(
        self, request: Read | Commit, sent_s: float, error: StoreUnavailable | AccessDenied
    ) -> bool:
        """Note a request that failed. Whether it is the first since others were answered.

        Raises: A denial; or as `on_failure` does when requests have failed for too long.
        """
        if self._on_failure is None and isinstance(error, AccessDenied):
            raise error
        is_first = not self._since_s
        self._since_s.setdefault(type(request), sent_s)
        if self._on_failure is not None:
            self._on_failure(error, time.monotonic() - min(self._since_s.values()))
        return is_first

    def end(self, request: Read | Commit) -> None:
        self._since_s.pop(type(request), None)

    def denied(self, error: AccessDenied) -> None:
        """Note a denied watch. The next request tells whether that was a mistake."""
        if self._on_failure is None:
            raise error
        time.sleep(RETRY_S)


def run(
    steps: Steps[T],
    kv: KV,
    deadline: Deadline,
    *,
    check: Callable[[], None] | None = None,
    on_failure: OnFailure | None = None,
) -> T:
    """Drive `steps` to its end. `check` raises when this process may not go on (fenced, closed).

    While etcd is away, requests are repeated until the deadline. A commit is not: whether it
    applied is unknown, so the loop looks again.

    Args:
        on_failure: Raises when requests have failed for too long. Those that etcd denies are
            repeated, too, where it is given.

    Raises:
        DeadlineExceeded: With the last reason for waiting.
        StoreUnavailable: etcd did not answer before the deadline.
    """
    failures = Failures(on_failure)
    reply: View | Reply | Changes | float | None = None
    reminder = Reminder(PATIENCE_S)
    while True:
        if check is not None:
            check()
        try:
            request = steps.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        match request:
            case Watch():
                wait = partial(kv.wait, request)
                try:
                    reply = _wait(request, wait, kv.endpoint, deadline, check, reminder)
                except AccessDenied as error:
                    failures.denied(error)
                    reply = 0.0
            case Follow():
                reply = _follow(request, kv, deadline, check, reminder)
            case Read() | Commit():
                reply = _send(request, kv, deadline, check, failures)


def _send(
    request: Read | Commit,
    kv: KV,
    deadline: Deadline,
    check: Callable[[], None] | None,
    failures: Failures,
) -> View | Reply:
    """Send a request until it is answered; a commit once, as `run` says."""
    while True:
        # At least one try, and a short one at that, even when the time is over: what a call
        # leaves behind is cleaned up with the same requests.
        timeout_s = max(0.5, min(REQUEST_TIMEOUT_S, deadline.left_s()))
        sent_s = time.monotonic()
        try:
            reply: View | Reply
            match request:
                case Read():
                    reply = kv.read(request, timeout_s=timeout_s)
                case Commit(txn):
                    reply = kv.commit(txn, timeout_s=timeout_s)
        except (StoreUnavailable, AccessDenied) as error:
            is_first = failures.note(request, sent_s, error)
            if deadline.left_s() <= 0:
                raise
            if is_first:
                log.warning("%s: %s; trying again", deadline.what, error)
            if check is not None:
                check()
            time.sleep(RETRY_S)
            if isinstance(request, Commit):
                return UNKNOWN
        else:
            failures.end(request)
            return reply


def _follow(
    request: Follow,
    kv: KV,
    deadline: Deadline,
    check: Callable[[], None] | None,
    reminder: Reminder,
) -> Changes | None:
    """The changes; empty ones after `limit_s`. None: read again, as one does every REMIND_S."""
    changes: Changes | None = None

    def is_told(*, timeout_s: float) -> bool:
        nonlocal changes
        changes = kv.follow(request, timeout_s=timeout_s)
        return changes is None or bool(changes.entries)

    # All that changes meanwhile takes one look at the records, and not many.
    time.sleep(min(FOLLOW_S, max(0.0, deadline.left_s())))
    watch = Watch(request.ranges, request.after_rev, request.reason, request.limit_s)
    waited_s = _wait(watch, is_told, kv.endpoint, deadline, check, reminder)
    is_over = waited_s < REMIND_S and request.limit_s < math.inf
    return changes if changes and (changes.entries or is_over) else None


def _wait(
    watch: Watch,
    wait: Callable[..., bool],
    endpoint: str,
    deadline: Deadline,
    check: Callable[[], None] | None,
    reminder: Reminder,
) -> float:
    """Seconds waited: until `wait`, which blocks for a slice of the time, says that something may
    have changed; until `watch` ends; or for REMIND_S, to look again whatever happened.
    """
    started_s = time.monotonic()
    is_asked = check is not None or watch.until is not None or deadline.is_cut is not None
    look_s = min(LOOK_S, REMIND_S) if is_asked else REMIND_S  # the longest slice
    while (waited_s := time.monotonic() - started_s) < REMIND_S:
        if watch.until is not None and watch.until():
            break
        if deadline.left_s() <= 0:
            deadline.check(watch.reason + deadline.hint(watch))
        deadline.check_open()
        if watch.reason and reminder.is_due():
            # A call in the background that takes as long as it takes waits in order.
            is_usual = reminder.lasts_s < ALARM_S or math.isinf(deadline.timeout_s)
            level = logging.INFO if is_usual else logging.WARNING
            log.log(
                level,
                "%s: waiting for %.0f s, with etcd at %s: %s%s",
                deadline.what,
                reminder.lasts_s,
                endpoint,
                watch.reason,
                deadline.hint(watch),
            )
        slice_s = min(deadline.left_s(), watch.limit_s - waited_s, look_s)
        if slice_s <= 0 or wait(timeout_s=slice_s):
            return time.monotonic() - started_s
        if check is not None:
            check()
    return waited_s
