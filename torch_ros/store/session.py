"""This process's life in the store: a lease, kept alive until it is lost or given up."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch_ros.errors import AccessDenied, StoreUnavailable, TorchRosError
from torch_ros.printable import log_of
from torch_ros.store.kv import KV
from torch_ros.store.latch import Latch

log: logging.Logger = log_of(__name__)

GRANT_TIMEOUT_S = 5.0
CLOSE_S = 2.0  # the lease ends by itself, so nobody waits long for its revocation
RETRY_S_MIN, RETRY_S_MAX = 0.2, 1.0


def boot_time() -> float:
    """Seconds on a clock that goes on while the host sleeps, as etcd's does elsewhere."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Session:
    """A lease and the thread that renews it, from construction to `close`.

    When the lease is lost, `on_lost(reason)` is called once, from that thread, which then ends.
    It is not called after `close`. In a child of ``fork()`` the session is not valid, and `close`
    does nothing: the lease is the parent's.

    Args:
        ttl_s: How long the keys of a dead process stay. etcd may grant more.
        name: Whose session this is, for logs.
        clock: Seconds, like `boot_time`.

    Raises: StoreUnavailable: No lease was granted.
    """

    def __init__(
        self,
        kv: KV,
        *,
        ttl_s: int,
        on_lost: Callable[[str], None],
        name: str,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._kv, self._on_lost, self._name, self._clock = kv, on_lost, name, clock
        sent_s = clock()
        lease_id, granted_s = kv.grant(ttl_s, timeout_s=GRANT_TIMEOUT_S)
        self.lease_id: int = lease_id
        # Until then the lease is certainly alive: etcd counts from when it got the request.
        self.deadline: float = sent_s + granted_s
        self.answers: bool = True  # etcd has answered the last request
        self.round_trip_s: float = clock() - sent_s  # of the last request
        self._interval_s = granted_s / 3
        self._pid = os.getpid()
        self._is_lost = False
        self._closing = Latch()
        self._thread = threading.Thread(target=self._run, name=f"session {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had: nobody would renew the lease
            with suppress(TorchRosError):
                kv.revoke(self.lease_id, timeout_s=CLOSE_S)
            raise

    def is_valid(self) -> bool:
        """Whether the lease is certainly alive."""
        is_over = self._is_lost or self._closing.is_set() or os.getpid() != self._pid
        return not is_over and self._clock() < self.deadline

    def close(self) -> None:
        """Revoke the lease, so that its keys go now. Takes at most 2 s. Idempotent."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._closing.set()
        started_s = time.monotonic()
        try:
            self._kv.revoke(self.lease_id, timeout_s=CLOSE_S)
        except TorchRosError as error:
            log.info("%s: its lease was not revoked and ends by itself: %s", self._name, error)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, started_s + CLOSE_S - time.monotonic()))

    def _run(self) -> None:
        """Renew until the lease is lost, and tell of that whatever ended it: nobody else would."""
        try:
            reason = self._keep_alive()
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody renews the lease now
            reason = f"its lease is not renewed any more ({type(error).__name__}: {error})"
        if not self._closing.is_set():
            self._is_lost = True
            self._on_lost(reason)

    def _keep_alive(self) -> str:
        """Renew the lease until it is lost or given up; why it was lost."""
        pause_s = self._interval_s
        silence = ""  # what etcd's failure to answer was, while it does not
        while not self._closing.wait(min(pause_s, max(0.0, self.deadline - self._clock()))):
            sent_s = self._clock()
            if sent_s >= self.deadline:
                return f"its lease was not renewed in time ({silence or 'it was suspended'})"
            timeout_s = min(self._interval_s, self.deadline - sent_s)
            try:
                granted_s = self._kv.keep_alive(self.lease_id, timeout_s=timeout_s)
            # Users and certificates are exchanged while we run; until the lease ends that may pass.
            except (StoreUnavailable, AccessDenied) as error:
                if not silence:
                    left_s = self.deadline - self._clock()
                    log.warning("%s: %s; its lease ends in %.1f s", self._name, error, left_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX) if silence else RETRY_S_MIN
                silence, self.answers = error.reason, False
                continue
            self.answers, self.round_trip_s = True, self._clock() - sent_s
            if granted_s == 0:
                return "its lease has ended"
            self.deadline = sent_s + granted_s
            if silence:
                log.info("%s: etcd answers again; its lease is renewed", self._name)
            pause_s, silence = self._interval_s, ""
        return ""
