"""The change that one rank has staged ahead of its next update."""

import threading
from dataclasses import dataclass

from torch_ros.protocol.records import VersionRef
from torch_ros.shard.seams import Base, Staged


@dataclass(frozen=True, slots=True, eq=False)
class Prefetched:
    """A change that leads from one content to another."""

    base: Base
    ref: VersionRef
    staged: Staged

    def leads(self, base: Base, ref: VersionRef) -> bool:
        """Whether applied to that base, in those very tensors, they make that content."""
        is_same = self.base.registered is base.registered and self.base.ref.uid == base.ref.uid
        return is_same and self.ref.uid == ref.uid


class Ahead:
    """The findings of a rank's last prefetch: one, or nothing. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Prefetched | None = None
        self.turn: int = 0
        """Of whoever fetches: what he brings is kept if nothing was taken meanwhile."""

    @property
    def kept(self) -> Prefetched | None:
        return self._kept

    def keep(self, found: Prefetched, turn: int) -> bool:
        """Whether it was kept."""
        with self._lock:
            if turn == self.turn:
                self._kept = found
            return turn == self.turn

    def forget(self) -> None:
        """Let go of what there is. Whoever fetches goes on."""
        with self._lock:
            self._kept = None

    def take(self) -> Prefetched | None:
        """Take the findings, which are gone then; whoever fetches now has fetched in vain."""
        with self._lock:
            self.turn += 1
            found, self._kept = self._kept, None
            return found
