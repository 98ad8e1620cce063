"""Threads beside a shard's calls: how they are woken, and how they end."""

from torch_ros.errors import ClosedError
from torch_ros.store.latch import Latch


class Dropped(ClosedError):
    """Ends a thread's read that nobody wants any more.

    As an error of ours, it leaves the connections to sources as they are: others read by them.
    """


class Bell:
    """Rung by any thread, or finalizer. Take the latch, look, then wait: so no ring is missed."""

    def __init__(self) -> None:
        self.latch: Latch = Latch()

    def ring(self) -> None:
        rung, self.latch = self.latch, Latch()
        rung.set()
