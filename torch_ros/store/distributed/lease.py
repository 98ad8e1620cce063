"""One lease for all processes of a job: their records outlive each of them, and not all."""

import logging
import threading
import time

from torch_ros.deadline import Deadline
from torch_ros.errors import AccessDenied, BackendError, StoreUnavailable
from torch_ros.printable import log_of
from torch_ros.store.distributed.once import look
from torch_ros.store.kv import KV
from torch_ros.store.latch import Latch
from torch_ros.store.run import REQUEST_TIMEOUT_S, RETRY_S, run
from torch_ros.store.txn import UNKNOWN, Commit, Get, Put, Reply, Steps, Txn, View, one

log: logging.Logger = log_of(__name__)

CLOSE_S = 2.0


class SharedLease:
    """The lease whose record is `key`: granted to its first client, kept alive by all.

    Raises: StoreUnavailable, DeadlineExceeded: etcd did not answer.
    """

    key: str
    id: int

    def __init__(self, kv: KV, key: str, ttl_s: int, deadline: Deadline) -> None:
        self.key, self._kv = key, kv
        self.lost: str = ""  # why, once it is
        self.id, self._granted_s = self._join(ttl_s, deadline)
        self._closing = Latch()
        self._thread = threading.Thread(target=self._run, name=f"lease {key}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises: BackendError: It has ended, as far as we know."""
        if self.lost:
            raise BackendError(
                f"the store at {self._kv.endpoint}{self.key.removesuffix('/lease')} is gone: "
                f"{self.lost}; open it again"
            )

    def compare(self, view: View) -> None:
        """Raises: BackendError: `view`, which has the lease's record, is not of our time."""
        found = view.entries.get(self.key)
        if found is None or found.lease_id != self.id:
            self.lost = self.lost or "its lease has ended"
        self.check()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _join(self, ttl_s: int, deadline: Deadline) -> tuple[int, int]:
        """Find or make the lease, and renew it. Its id, and the seconds that etcd granted."""
        while True:
            try:
                joined = run(self._found_or_granted(ttl_s), self._kv, deadline)
                # A lease that ends now takes its record along, and the next try finds none.
                granted_s = self._kv.keep_alive(joined, timeout_s=REQUEST_TIMEOUT_S)
            except StoreUnavailable:
                if deadline.left_s() < RETRY_S:
                    raise
            else:
                if granted_s > 0:
                    return joined, granted_s
                deadline.check("its lease has just ended")
            time.sleep(RETRY_S)

    def _found_or_granted(self, ttl_s: int) -> Steps[int]:
        """The lease of the record. Where there is none, one that is granted here and recorded."""
        granted = 0  # the lease of this client, which may come too late; 0: none
        while True:
            view = yield from look(Get(one(self.key)))
            found = view.entries.get(self.key)
            if found is not None:
                if granted not in (0, found.lease_id):  # of no use
                    self._kv.revoke(granted, timeout_s=REQUEST_TIMEOUT_S)
                return found.lease_id
            if not granted:
                granted, _ = self._kv.grant(ttl_s, timeout_s=REQUEST_TIMEOUT_S)
            txn = Txn((view.unchanged(self.key),), (Put(self.key, b"", granted),))
            reply: Reply = yield Commit(txn)
            if reply is not UNKNOWN and not reply.applied:  # else the next look finds a record
                # Somebody was faster, or the lease has ended meanwhile.
                self._kv.revoke(granted, timeout_s=REQUEST_TIMEOUT_S)
                granted = 0

    def _run(self) -> None:
        """Renew until closed. Only etcd says that the lease is over: others renew it too."""
        pause_s = self._granted_s / 3
        while not self._closing.wait(pause_s):
            try:
                granted_s = self._kv.keep_alive(self.id, timeout_s=REQUEST_TIMEOUT_S)
            except (StoreUnavailable, AccessDenied) as error:
                log.warning("%s: %s; trying again", self.key, error)
                # A password may come late; to compare a wrong one is a lot of work for etcd.
                is_denied = isinstance(error, AccessDenied)
                pause_s = self._granted_s / 6 if is_denied else RETRY_S
            except Exception as error:  # noqa: BLE001  # whatever it is, nobody renews it now
                self.lost = f"its lease is not renewed any more ({type(error).__name__}: {error})"
                return
            else:
                pause_s = self._granted_s / 3
                if granted_s == 0:
                    self.lost = "its lease has ended"
                    return
