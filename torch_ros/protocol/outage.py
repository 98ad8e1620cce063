"""How long a call waits for a seat that its process has lost. Pure."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outage:
    """All that a process knows about the seat that it has lost."""

    ttl_s: float
    lost_s: float  # for how long it has had no seat
    alone_s: float | None  # for how long etcd has answered, and only peers are missing
    is_away: bool  # etcd did not answer when it last tried to come back
    has_failed: bool  # a call waited in vain


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
        """Whether its process has no other way than to fail."""
        return not self.is_unpublish and self.store_wait_s is None and self.peers_s is None

    def left_s(self, outage: Outage, called_s: float) -> float:
        """How much longer to wait. Not above 0: not at all.

        Args:
            called_s: How long ago the call was made.
        """
        ttl_s = outage.ttl_s
        if self.store_wait_s is not None:
            return self.store_wait_s - called_s
        if self.is_unpublish:
            return 0.0 if outage.is_away else ttl_s - max(called_s, outage.lost_s)
        if self.is_usual and outage.has_failed and outage.lost_s >= 2 * ttl_s:
            return 0.0
        if outage.alone_s is None:
            return math.inf
        return (2 * ttl_s if self.peers_s is None else self.peers_s) - outage.alone_s
