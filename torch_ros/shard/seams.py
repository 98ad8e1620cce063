"""The seams at which features meet a shard: docs/ARCHITECTURE.md#features.

The core calls them, and names no feature. A feature has those that it needs.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch_ros.deadline import Deadline
from torch_ros.errors import TorchRosError
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.calls import Effects
from torch_ros.protocol.reaching import ClaimedSources
from torch_ros.protocol.records import Call, VersionRef
from torch_ros.protocol.sources import Source
from torch_ros.protocol.versions import Spec
from torch_ros.shard.report import Stopwatch, Via
from torch_ros.store.loops import Step
from torch_ros.store.txn import View
from torch_ros.transfer.attending import Attendant, Copier
from torch_ros.transfer.feed import Judging, Progress, Supply
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.meter import Meter
from torch_ros.transfer.reading import Reading
from torch_ros.transfer.registered import LocalState


@dataclass(frozen=True, slots=True)
class Base:
    """The version that a handle held until the call that reads the next one, and its tensors."""

    ref: VersionRef
    registered: LocalState


@dataclass(frozen=True, slots=True)
class Change:
    """A way from what a rank's tensors have to another content, which sources show.

    Args:
        supplies: How the tensors would be read in full, from each source: the way if this fails.
        reading: The handle's way to read spans: bytes of the change are read by it, too.
        hurries: An engine stands still meanwhile; not while the change is only staged.
    """

    base: Base
    ref: VersionRef
    supplies: Sequence[Supply]
    reading: Reading
    deadline: Deadline
    hurries: bool


class Staged(Protocol):
    """A change that lies in memory of this process, which nobody writes to any more."""

    @property
    def size_bytes(self) -> int:
        """The size of the memory."""

    @property
    def line(self) -> str:
        """The change as a log tells it."""

    def apply(self, progress: Progress) -> Via | None:
        """Fill the base's tensors with the next content; None: it cannot, read it in full."""


class Supplier(Protocol):
    """One rank's way to a version that no replica has, such as a bucket.

    It is made for one replicate of the user's, and lasts over all seats and tries of that.
    """

    where: str  # for reports
    called: str  # its name in `Asked`: a rank that has none makes another call, and all are told

    def choose(
        self, call: GroupCall, rule: Callable[..., Step[Call]], claim: Callable[[Effects], None]
    ) -> None:
        """Decide a version that replicas have, and claim sources; or one to bring from elsewhere.

        Args:
            rule: The rule for versions that replicas have; it may be given another `spec`.
            claim: Makes the call's decision, by the rule that it is given, and claims sources.
        """

    def fill(self, call: GroupCall, meter: Meter) -> Progress:
        """Fill the registered tensors with what was decided, and show them. The word is clear."""

    def is_passed_over(self, decided: Call, error: TorchRosError) -> bool:
        """Note that the version could not be read. Whether to make the call again, for another."""


class Judges(Protocol):
    """How one rank judges the sources of one replicate, over all seats and tries."""

    def of(self, claimed: ClaimedSources, source: Source) -> Judging:
        """Makes the judge of that source, for each pass in which it is the only one."""


class Tracing:
    """Where a program traces the calls of a shard. This one traces nothing."""

    def around(self, name: str, **attributes: int) -> AbstractContextManager[None]:
        """The trace of a call, as long as the block lasts."""
        return nullcontext()

    def traceparent(self) -> str:
        """The context of the call that is traced, as W3C writes it; "": none is."""
        return ""

    def link(self, parent: str) -> None:
        """The call that is traced reads what was published in that context."""


class Shown(NamedTuple):
    """A version that a rank shows in a mailbox of its own, beside what it holds."""

    ref: VersionRef
    call: int  # that made it
    inst: str  # that offers it
    mailbox: Mailbox


class Feature:
    """Told of what happens to the shard that it is attached to. Each method does nothing here.

    Called in the order in which features were attached, by the thread that makes the call under
    way, unless a method says otherwise.
    """

    # What is registered, and what is held

    def registers(self) -> None:
        """The owner has registered tensors anew."""

    def examines(self, tensors: LocalState) -> None:
        """Tensors are registered by their owner, or to be published.

        Raises: UsageError: They may not be.
        """

    def offers(self) -> None:
        """The registered tensors are a version from now on."""

    def lets_go(self) -> None:
        """The tensors that were registered are not any more; keep none of their memory."""

    def gives_up(self) -> None:
        """The held version is given up, or let go of, and nothing is read into it."""

    def hides(self) -> None:
        """The word is cleared: no content is shown from now on."""

    # An unpublish

    def unpublishes(self) -> None:
        """An unpublish begins, and nothing has changed yet."""

    def sees(self, view: View) -> None:
        """An unpublish is decided from this view; told of each until it ends."""

    def acts_first(self, call: GroupCall, decided: Call) -> None:
        """Do this rank's part of what an unpublish, as it is recorded, asks of each rank first.

        Raises: TorchRosError: It ends the call.
        """

    def takes_back(self) -> None:
        """The tensors are about to be taken back without etcd, where the version stays held."""

    def has_given_up(self) -> None:
        """An unpublish has ended, well or not, or the tensors were taken back without etcd."""

    def has_unpublished(self, held: VersionRef, deadline: Deadline) -> None:
        """It has ended: what was held is the owner's again.

        Raises: ContractBroken: And what was read of it is not what was published.
        """

    def shows(self) -> Iterable[Shown]:
        """The versions that it shows beside what is held."""
        return ()

    # A copy that is published

    def attend(self, copier: Copier, version: int) -> Attendant | None:
        """A save begins that publishes a copy. Who attends is told of the copy until its end."""
        return None

    # A version that is read

    def read_begins(self, call: Deadline) -> None:
        """A call that reads a version, or a part of one, begins.

        Raises: UsageError: It may not.
        """

    def read_ends(self, ref: VersionRef | None, call: Deadline) -> None:
        """It has brought all that was asked for; None: there was nothing. Not told if it fails."""

    def looked_at(self, ref: VersionRef) -> None:
        """The contents of a version were looked at, which its number stands for now."""

    def seeks(self, view: View, held: VersionRef) -> None:
        """A newer version than what is held is looked for, in this view of all versions."""

    def supplier(self, spec: Spec, deadline: Deadline) -> Supplier | None:
        """A replicate begins. A way of the feature's own to what it reads; None: it has none."""
        return None

    def judges(self) -> Judges | None:
        """A replicate begins. How its sources are judged; None: they are not."""
        return None

    def overwrites(self) -> None:
        """A version is about to be read into the tensors of `register`."""

    def fill(self, progress: Progress, change: Change | None, watch: Stopwatch) -> Via | None:
        """All is planned, and the first byte not read; bring all of it in another way.

        Called again when a source was lost.

        Args:
            change: From what the tensors have to what is read. None: nothing is known of what they
                have, or another feature has filled them, or no digest would show a wrong byte.

        Returns:
            The way by which all was brought, for reports. None: nothing was, and blocks are read.

        Raises: SourceLost, DeadlineExceeded, SeatLost: As any read.
        """
        return None

    def stage(self, change: Change) -> Staged | None:
        """Bring a change here, and leave the tensors as they are. May be called by any thread.

        Returns:
            None: there is no such change, or it is not worth it.

        Raises:
            SourceLost, DeadlineExceeded: As any read.
            CorruptDelta: The source shows what it should not.
            MemoryError: There is too little.
        """
        return None

    def has_read_wrong(self) -> None:
        """The ranks have compared what they have read, and it was not what was published."""

    # The end

    def closes(self) -> None:
        """The handle is about to be closed, and all is as it was. Any thread calls."""

    def leaves(self, linger_s: float, *, drains: bool) -> bool:
        """Leave in a way of the feature's, while calls raise and the lease lives; whether it has.

        Args:
            linger_s: How long that may take. Any thread may end it by `nobody_waits`.
            drains: Whether readers of what is held are let finish.
        """
        return False

    def nobody_waits(self) -> None:
        """Nobody waits for the closing any more; also before it has begun. Any thread calls."""

    def has_closed(self) -> None:
        """Nothing is shown any more, and no call is under way; the transport goes next."""
