"""Deltas of one handle: those of its copies, and the step from what it held to the next version."""

import logging
from dataclasses import dataclass

from torch_ros.errors import CorruptDelta
from torch_ros.features.deltas.copies import Attending, DeltaOptions
from torch_ros.features.deltas.making import CopyDeltas, Outcome
from torch_ros.features.deltas.reading import DeltaRead, DeltasOf
from torch_ros.features.deltas.side_room import SideRoom
from torch_ros.printable import log_of
from torch_ros.shard.core import Shard
from torch_ros.shard.report import Stopwatch, Via
from torch_ros.shard.seams import Change, Feature, Staged
from torch_ros.transfer.attending import Attendant, Copier
from torch_ros.transfer.feed import Progress, Supply

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StagedDeltas:
    """Deltas that lead from a base to another content."""

    base: int  # the version
    read: DeltaRead
    found: DeltasOf
    size_bytes: int
    what: str  # that is read in full if they cannot be applied

    @property
    def line(self) -> str:
        """How much has changed, and has come."""
        return f"{self.read.changed} elements in {self.read.reads.bytes_read / 1e6:.1f} MB"

    def apply(self, progress: Progress) -> Via | None:
        """All of them, or the target is to be read in full."""
        try:
            self.read.scatter(self.found)
        except MemoryError:
            log.warning("%s: there is too little memory to apply deltas", self.what)
            return None
        progress.fill(self.read.reads.bytes_read)
        progress.ways.update(self.read.reads.ways)
        return Via("delta", self.base, self.read.links, self.read.changed)


class Deltas(Feature):
    """Made of this handle's copies, and applied to what it has read."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.copies = CopyDeltas(self._made)
        self._is_trusted = True  # what is registered
        shard.observed.staged["deltas"] = lambda: self.copies.size_bytes
        shard.attach(self)

    # Making

    def _made(self, outcome: Outcome, size_bytes: int, elapsed_s: float) -> None:
        """The making of one has ended. By the thread that made it."""
        tally = self._shard.observed.tally
        tally.ended["deltas"][outcome] += 1
        if outcome == "made":
            tally.sums["delta_bytes"] += size_bytes
            tally.sums["delta_s"] += elapsed_s

    def attend(self, copier: Copier, version: int) -> Attendant:
        held, shard = self._shard.held, self._shard
        base = self.copies.base(held.uid if held else None, shard.tensors.registered)
        options = DeltaOptions.among(copier.more)
        return Attending(self.copies, options, base, version, shard.settings.depth)

    def hides(self) -> None:
        self.copies.stop()

    def overwrites(self) -> None:
        self.copies.forget()  # they lead to a copy that is given up

    def has_closed(self) -> None:
        self.copies.close()

    # Applying

    def registers(self) -> None:
        self._is_trusted = True

    def has_read_wrong(self) -> None:
        if self._is_trusted:
            self._is_trusted = False
            log.warning(
                "no deltas are read into these tensors any more, until they are registered again: "
                "somebody may write to them while a version is held"
            )

    def fill(self, progress: Progress, change: Change | None, watch: Stopwatch) -> Via | None:
        """Bring everything, or leave the rank where it was: with all blocks to be read."""
        if change is None:
            return None
        try:
            staged = self.stage(change)
        except (CorruptDelta, MemoryError) as error:
            log.warning("%s: %s", self._in_full(change), error)
            staged = None
        via = staged.apply(progress) if staged is not None else None
        watch.lap("delta")
        return via

    def stage(self, change: Change) -> Staged | None:
        """Read and prove the deltas of the first source that shows some."""
        if not self._is_trusted:
            return None
        room = change.reading.room(SideRoom)
        reads = (self._read(room, change, supply) for supply in change.supplies)
        read = next((each for each in reads if each.is_possible()), None)
        if read is None:
            return None
        chains = read.find(change.base.ref.uid, change.ref.uid, hurries=change.hurries)
        found = read.stage(chains) if chains is not None else None
        if found is None:
            return None
        version, what = change.base.ref.version, self._in_full(change)
        return StagedDeltas(version, read, found, room.held_bytes, what)

    def _in_full(self, change: Change) -> str:
        return f"version {change.ref.version} of {self._shard.model!r} is read in full"

    def _read(self, room: SideRoom, change: Change, supply: Supply) -> DeltaRead:
        costs = change.reading.costs([agent for agent, _ in supply.feed.manifests])
        target, rank = change.base.registered, self._shard.group.seat.rank
        return DeltaRead(room, supply, target, rank, costs, change.deadline)
