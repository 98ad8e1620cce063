"""The seam between the protocol and what stores its records."""

from typing import Protocol

from torch_ros.store.txn import Changes, Follow, Read, Reply, Txn, View, Watch


class KV(Protocol):
    """etcd, or something that passes `tests/contract/test_kv.py`. Safe to call from many threads.

    Every method raises `StoreUnavailable` when there is no answer within `timeout_s`,
    `AccessDenied` when etcd does not let this process do it, and `ClosedError` after `close`. What
    may have reached etcd is not sent again.
    """

    endpoint: str  # for messages; without credentials

    def read(self, request: Read, *, timeout_s: float) -> View: ...

    def commit(self, txn: Txn, *, timeout_s: float) -> Reply:
        """After `StoreUnavailable` the transaction may or may not have applied.

        It does not apply either when a `Put` names a lease that has ended.

        Raises: UsageError: It is larger than etcd allows, or changes a key twice.
        """

    def wait(self, watch: Watch, *, timeout_s: float) -> bool:
        """Block until something in the ranges may have changed; False: not within `timeout_s`.

        May return True early, never late: after a lost connection or a compacted revision, or
        when the store is behind `after_rev` because it was wiped, it returns True, so that the
        caller looks again. It does not raise for those.
        """

    def follow(self, request: Follow, *, timeout_s: float) -> Changes | None:
        """Block until something in the ranges has changed; then all that has, as of one revision.

        Without entries: nothing has, within `timeout_s`. None where `wait` would be early: what
        has changed cannot be told, so the caller reads. It does not raise for that.
        """

    def grant(self, ttl_s: int, *, timeout_s: float) -> tuple[int, int]:
        """A new lease: its id, and the seconds really granted."""

    def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        """Renew a lease. Seconds granted from when this was sent; 0: the lease has ended."""

    def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        """End a lease now; its keys vanish at one revision. Ended already: nothing happens."""

    def close(self) -> None: ...
