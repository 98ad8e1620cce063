"""Performs what the loop asks for: deadlines, patience with etcd, and log lines live here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch_ros.errors import DeadlineExceeded, StoreUnavailable
from torch_ros.store.kv import KV
from torch_ros.store.txn import UNKNOWN, Commit, Read, Reply, Request, Steps, View, Watch

T = TypeVar("T")
log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0  # one round trip; etcd elects a new leader within about this
RETRY_S = 0.2
LOOK_S = 2.0  # a wait asks this often whether this process may still go on
REMIND_S = 10.0  # a wait says so this often


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a call: `what` is being done, within `timeout_s` from when this was made.

    `check_open` raises when it is to end earlier.
    """

    what: str
    timeout_s: float
    started_s: float = field(default_factory=time.monotonic)
    check_open: Callable[[], object] = lambda: None

    def left_s(self) -> float:
        return self.started_s + self.timeout_s - time.monotonic()

    def check(self, reason: str) -> None:
        """Raises: DeadlineExceeded: With `reason`, when the time is over."""
        self.check_open()
        if self.left_s() <= 0:
            raise DeadlineExceeded(self.what, self.timeout_s, reason)


def run(
    steps: Steps[T], kv: KV, deadline: Deadline, *, check: Callable[[], None] | None = None
) -> T:
    """Drive `steps` to its end. `check` raises when this process may not go on (fenced, closed).

    While etcd is away, requests are repeated until the deadline. A commit is not: whether it
    applied is unknown, so the loop looks again.

    Raises:
        DeadlineExceeded: With the last reason for waiting.
        StoreUnavailable: etcd did not answer before the deadline.
    """
    reply: View | Reply | float | None = None
    while True:
        if check is not None:
            check()
        try:
            request = steps.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reply = _perform(request, kv, deadline, check)


def _perform(
    request: Request, kv: KV, deadline: Deadline, check: Callable[[], None] | None
) -> View | Reply | float:
    if isinstance(request, Watch):
        return _wait(request, kv, deadline, check)
    outage = False
    while True:
        # At least one try, and a short one at that, even when the time is over: what a call
        # leaves behind is cleaned up with the same requests.
        timeout_s = max(0.5, min(REQUEST_TIMEOUT_S, deadline.left_s()))
        try:
            match request:
                case Read():
                    return kv.read(request, timeout_s=timeout_s)
                case Commit(txn):
                    return kv.commit(txn, timeout_s=timeout_s)
        except StoreUnavailable as error:
            if deadline.left_s() <= 0:
                raise
            if not outage:
                log.warning("%s: %s; trying again", deadline.what, error)
            outage = True
            if check is not None:
                check()
            time.sleep(RETRY_S)
            if isinstance(request, Commit):
                return UNKNOWN


def _wait(watch: Watch, kv: KV, deadline: Deadline, check: Callable[[], None] | None) -> float:
    """Seconds waited. Returns to look again from time to time, whatever happened."""
    started_s = time.monotonic()
    look_s = REMIND_S if check is None else min(LOOK_S, REMIND_S)
    while (waited_s := time.monotonic() - started_s) < REMIND_S:
        deadline.check(watch.reason)
        slice_s = min(deadline.left_s(), watch.limit_s - waited_s, look_s)
        if slice_s <= 0 or kv.wait(watch, timeout_s=slice_s):
            return time.monotonic() - started_s
        if check is not None:
            check()
    if watch.reason:
        total_s = deadline.timeout_s - deadline.left_s()
        log.info("%s: waiting for %.0f s: %s", deadline.what, total_s, watch.reason)
    return waited_s
