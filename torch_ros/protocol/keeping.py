"""Whether a copy of a version may go: the seam at which a feature keeps some. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_ros.protocol.keys import Keys
from torch_ros.store.loops import Step
from torch_ros.store.txn import Guard, Op, Ranges, View

if TYPE_CHECKING:
    from torch_ros.protocol.applicant import Applicant
    from torch_ros.protocol.records import Call, Outcome, VersionRef
    from torch_ros.protocol.seat import Seat


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A copy of a version that may go."""

    inst: str
    datacenter: str
    is_leaving: bool = False  # with all that `inst` offers, copies in host memory included
    retain: tuple[str, ...] = ()  # wishes beside those of groups' records: its own, if that is gone


@dataclass(frozen=True, slots=True)
class Keeping:
    """Whether a copy of a version may go, and what makes that true."""

    is_needed: bool  # it is the last one that counts of a version that is retained
    guards: tuple[Guard, ...]  # under which the answer holds
    is_elsewhere: bool = False  # somebody else has it, and counts
    only_in: str | None = None  # the datacenter where it is needed; None: anywhere


class Keeper:
    """Keeps copies from going. Here, each may go, once nobody reads it."""

    retain: tuple[str, ...] = ()  # what its replica asks everybody to keep

    def ranges(self, keys: Keys, ref: VersionRef, datacenter: str) -> Ranges:
        """All that `keeping` is decided from."""
        del keys, ref, datacenter
        return ()

    def keeping(self, view: View, keys: Keys, ref: VersionRef, given_up: GivenUp) -> Keeping:
        """Would the version be lost to those that retain it, if that copy went?"""
        del view, keys, ref, given_up
        return Keeping(is_needed=False, guards=())

    def unpublish_ranges(self, seat: Seat, ref: VersionRef) -> Ranges:
        """All that `on_unpublish` is decided from, and `why_nobody_else`."""
        del seat, ref
        return ()

    def on_unpublish(
        self, view: View, seat: Seat, call: Call, ref: VersionRef
    ) -> Step[Call | Outcome] | Keeping:
        """A step that comes before readers are waited for; or, after that, `keeping`."""
        del call
        return self.keeping(view, seat.keys, ref, GivenUp(seat.inst, seat.datacenter))

    def why_nobody_else(self, view: View, seat: Seat) -> str:
        """The reason why far readers of what `seat` gives up have no other source."""
        del view, seat
        return "nobody else has it"

    def beside(self, who: Applicant) -> tuple[Op, ...]:
        """Return what is written with a new group's record."""
        del who
        return ()


NO_KEEPER = Keeper()
