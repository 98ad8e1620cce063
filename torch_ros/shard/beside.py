"""Threads beside a shard's calls: how they are woken, and how they end."""

from torch_ros.errors import ClosedError
from torch_ros.store.latch import Latch


class Dropped(ClosedError):
    """Nobody wants any more what a thread reads.

    One of ours: nobody waits for a source that is mute.
    """


class Bell:
    """Rung by any thread, in a finalizer too. Who waits takes the latch, then looks, then waits."""

    def __init__(self) -> None:
        self.latch: Latch = Latch()

    def ring(self) -> None:
        rung, self.latch = self.latch, Latch()
        rung.set()
