"""How long a call waits for a seat that its process has lost. Pure."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Outage:
    """All that a process knows about the seat that it has lost."""

    ttl_s: float
    lost_since_s: float = 0.0
    alone_since_s: float | None = None  # since when etcd answers, and only peers are missing
    is_away: bool = False  # etcd did not answer when it last tried to come back
    has_failed: bool = False  # a call waited in vain


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call waits for a lost seat.

    Args:
        is_unpublish: It can do without a seat: the memory itself says no to readers.
        store_wait_s: It goes on without one, after so many seconds.
        peers_s: How long only peers may be missing. None: two TTLs; a peer that lives has noticed
            by then, and one that died may never come.
    """

    is_unpublish: bool = False
    store_wait_s: float | None = None
    peers_s: float | None = None

    @property
    def is_usual(self) -> bool:
        """Whether the call can only fail without a seat, and waits for peers as others do."""
        return not self.is_unpublish and self.store_wait_s is None and self.peers_s is None

    def bears_s(self, ttl_s: float, *, is_refused: bool) -> float:
        """How long requests may fail while the lease is renewed; then the seat is given up, if the
        call can do without one.

        Args:
            is_refused: etcd answers, and says no. A request without an answer may be answered the
                next time: that is borne for as long as the lease would be, in an outage.
        """
        if self.is_unpublish:
            return ttl_s
        if self.store_wait_s is None:
            return math.inf
        return self.store_wait_s if is_refused else max(ttl_s, self.store_wait_s)

    def left_s(self, outage: Outage, called_s: float, now_s: float) -> float:
        """How much longer to wait, at `now_s`, in a call made at `called_s`; 0 or less: no more.

        A publication waits its `store_wait_s`; an unpublish a TTL since the loss, if etcd answers.
        Others wait for etcd to their deadline, and for peers alone 2 TTLs; after one that waited in
        vain, the next ones fail at once.
        """
        ttl_s, lost_s = outage.ttl_s, now_s - outage.lost_since_s
        if self.store_wait_s is not None:
            return self.store_wait_s - (now_s - called_s)
        if self.is_unpublish:
            return 0.0 if outage.is_away else ttl_s - max(now_s - called_s, lost_s)
        if self.is_usual and outage.has_failed and lost_s >= 2 * ttl_s:
            return 0.0
        if outage.alone_since_s is None:
            return math.inf
        alone_s = now_s - outage.alone_since_s
        return (2 * ttl_s if self.peers_s is None else self.peers_s) - alone_s
