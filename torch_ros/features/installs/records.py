"""The records of installs: docs/protocol/installs.md#records-and-keys."""

from __future__ import annotations

import msgspec

from torch_ros.protocol.records import Carried, Number, Record, VersionRef

NAME = "install"  # in a Shard record, and in the key


class Rejection(Record, frozen=True):
    """An install that failed."""

    ref: VersionRef  # what it was to bring
    rank: Number  # that found it
    reason: str


class Install(Record, frozen=True):
    """`carried/<inst>/install`: the version that an engine uses, as `ShardHandle.installs` says.

    Attributes:
        attempt: The number of the install that was begun last.
        active: The version that all ranks use; None: none, or nobody knows.
        trying: The version that is being installed.
        floor: The last one that was active: older ones of its run are refused.
        rejected: The last install that failed, until that version or a newer one is active.
    """

    attempt: Number = 0
    active: VersionRef | None = None
    trying: VersionRef | None = None
    floor: VersionRef | None = None
    rejected: Rejection | None = None

    def entered(self, ref: VersionRef, attempt: int) -> Install:
        """As an attempt begins: active at nothing."""
        if ref == self.active:  # its bytes come again
            return self
        return self.begun(ref, attempt)

    def begun(self, ref: VersionRef, attempt: int) -> Install:
        """As an attempt begins that brings other bytes than those which are active."""
        return Install(attempt, None, ref, self.floor, self.rejected)

    def left(self, ref: VersionRef) -> Install:
        """As it ends when all ranks have left well, with this content."""
        later = self.rejected if self.rejected and self.rejected.ref.follows(ref) else None
        return Install(self.attempt, ref, None, ref, later)

    def refused(self, rejection: Rejection) -> Install:
        """As it ends when one has left badly."""
        return Install(self.attempt, None, None, self.floor, rejection)

    @property
    def carried(self) -> Carried:
        """The record that a rank brings along when it comes back.

        Within one attempt, a rank that left badly is believed, then one that knows all left well.
        """
        weight = 2 * (self.trying is None) + (self.active is None)
        return Carried(msgspec.Raw(self.encode()), self.attempt, weight)
