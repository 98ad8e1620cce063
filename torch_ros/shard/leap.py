"""One rank's attempt to go from the version that it held to the next one by deltas."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_ros.errors import CorruptDelta
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall
from torch_ros.shard.ahead import Prefetched
from torch_ros.shard.base import Base
from torch_ros.shard.core import Shard
from torch_ros.transfer.delta_reading import DeltaRead, Staged
from torch_ros.transfer.feed import Progress, Supply

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class Applied:
    """The deltas that have filled a target."""

    base: int  # the version that they lead from
    links: int
    changed: int  # elements
    is_ahead: bool  # they had been staged by a prefetch

    @property
    def told(self) -> tuple[Literal["delta"], int, int, int, bool]:
        """In a report."""
        return "delta", self.base, self.links, self.changed, self.is_ahead


class Leap:
    """It brings everything, or leaves the rank where it was: with all blocks to be read."""

    def __init__(self, shard: Shard, call: GroupCall, base: Base, progress: Progress) -> None:
        self._shard, self._call, self._base, self._progress = shard, call, base, progress

    def over(self, supplies: Sequence[Supply], ahead: Prefetched | None) -> Applied | None:
        """Try it with what is staged already, or with the first source that shows deltas.

        None: read it in full.

        Raises:
            SourceLost, DeadlineExceeded, SeatLost: As any read.
        """
        if self._base.registered is not self._progress.target:
            return None
        is_ahead = ahead is not None and ahead.leads(self._base, self._call.ref)
        found = (ahead.read, ahead.staged) if ahead and is_ahead else self._staged(supplies)
        if found is None:
            return None
        read, staged = found
        try:
            read.scatter(staged)
        except MemoryError:
            log.warning("%s: there is too little memory to apply deltas", self._what)
            return None
        self._progress.fill(read.bytes_read)
        self._progress.ways.update(read.ways)
        return Applied(self._base.ref.version, read.links, read.changed, is_ahead)

    @property
    def _what(self) -> str:
        return f"version {self._call.ref.version} of {self._shard.model!r} is read in full"

    def _staged(self, supplies: Sequence[Supply]) -> tuple[DeltaRead, Staged] | None:
        reads = (self._read(supply) for supply in supplies)
        read = next((each for each in reads if each.is_possible()), None)
        if read is None:
            return None
        try:
            chains = read.find(self._base.ref.uid, self._call.ref.uid, hurries=True)
            staged = read.stage(chains) if chains is not None else None
        except (CorruptDelta, MemoryError) as error:
            log.warning("%s: %s", self._what, error)
            return None
        return (read, staged) if staged is not None else None

    def _read(self, supply: Supply) -> DeltaRead:
        shard, target = self._shard, self._progress.target
        costs = shard.reading.costs([agent for agent, _ in supply.feed.manifests])
        rank, deadline = shard.group.seat.rank, self._call.deadline
        return DeltaRead(shard.reading.room, supply, target, rank, costs, deadline)
