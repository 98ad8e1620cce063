"""A shard puts a copy aside of what is retained and goes, and offers it for as long as needed."""

import logging
from collections.abc import Iterator

from torch_ros.deadline import wall_ms
from torch_ros.errors import BackendError
from torch_ros.features.retention.copying import CopiedPart, copying, do_without
from torch_ros.features.retention.host_copies import Copies
from torch_ros.features.retention.rules import Wish, retained_here, retentions
from torch_ros.printable import log_of
from torch_ros.protocol import life
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.keys import copy_of
from torch_ros.protocol.ledger import Ledger
from torch_ros.protocol.records import Call, ShardRecord
from torch_ros.protocol.versions import Spec
from torch_ros.shard.core import Shard, shard_of
from torch_ros.shard.seams import Feature, Shown
from torch_ros.store.txn import View

log: logging.Logger = log_of(__name__)


class Retention(Feature):
    """One shard's part in the copies of its replica."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.copies: Copies = Copies(shard.group, shard.transport, shard.pages)
        self._retained: frozenset[Spec] | None = None  # by others, at its last look; None: none yet
        shard.observed.staged["copies"] = lambda: self.copies.size_bytes

    def sees(self, view: View) -> None:
        """Note what others retain: without etcd, `takes_back` can ask nobody."""
        seat = self._shard.group.seat
        anywhere = retentions(view.seen(seat.keys.groups()))
        here = retained_here(view, seat.keys, seat.datacenter)
        self._retained = frozenset((*anywhere, *here))

    def acts_first(self, call: GroupCall, decided: Call) -> None:
        """Make this rank's part of a copy that the call asks for, and wait until all is offered.

        Without memory for it, tell the peers and the log, and let the unpublish go on.
        """
        if not decided.copy:
            return
        seat, kept = call.seat, self._shard.group.ledger.holds
        if kept is None:  # the peers copy what they hold, and this rank holds nothing
            raise call.mismatch(decided)
        try:
            shown = self._copy(decided.number, is_optional=decided.is_optional)
        except (BackendError, RuntimeError, MemoryError, OSError) as error:
            call.settle(seat.own, lambda view: do_without(view, seat, call.number))
            text = (
                "%s: waiting for readers in other datacenters: %s"
                if decided.is_optional
                else "%s: this version may be lost, it cannot be copied: %s"
            )
            log.warning(text, call.asked, error)
        else:
            part = CopiedPart(decided.copy, call.number, shown, wall_ms())
            call.seating.run(copying(seat, kept, part), call.deadline, call.patience)

    def takes_back(self) -> None:
        """Copy a retained version that may be nowhere else. It is offered when etcd is back."""
        shard = self._shard
        number, held = must_copy(shard.group.ledger, self._retained), shard.held
        if number is None or shard.tensors.registered is None:
            return
        try:
            self._copy(number)
        except (BackendError, RuntimeError, MemoryError) as error:
            version = held.version if held else None
            log.warning("version %s may be lost, it cannot be copied: %s", version, error)

    def _copy(self, number: int, *, is_optional: bool = False) -> ShardRecord:
        """Copy this rank's part of the held version, which call `number` gives up.

        Args:
            is_optional: For far readers only: not made unless all ranks here have room for theirs.

        Returns: The record by which readers find that copy.

        Raises: MemoryError: There is too little of it, or the held tensors are not there.
        """
        shard = self._shard
        shard.tensors.require_there()
        registered = shard.tensors.registered
        assert registered is not None
        mailbox = self.copies.make(number, registered, shard.digests, is_optional=is_optional)
        return shard_of(mailbox)

    def has_given_up(self) -> None:
        self.copies.keep()

    def shows(self) -> Iterator[Shown]:
        seat = self._shard.group.seat
        for copy in self.copies.made:
            yield Shown(copy.kept.ref, copy.call, copy_of(seat.inst, copy.call), copy.mailbox)

    def has_closed(self) -> None:
        self.copies.close()


def must_copy(ledger: Ledger, retained: frozenset[Spec] | None) -> int | None:
    """The number under which to copy what is taken back without etcd. None: no copy is needed.

    Nobody can be asked, so it is needed unless this rank is sure that nobody retains the version
    (docs/protocol/unattended.md#taking-tensors-back).

    Args:
        retained: By others, when this rank last looked; None: it never did.
    """
    with ledger.lock:
        kept, unfinished = ledger.holds, ledger.unfinished
        if ledger.standing.state != "away" or kept is None or ledger.seat.spot:
            return None
        was_ready = unfinished is not None and unfinished.life in life.WAS_READY
        if ledger.held is None and not (was_ready and kept.layout):
            return None  # nobody was told of it, or it may be a part
        own = [Wish.parse(text).spec for text in ledger.seat.keeper.retain]
        if retained is not None and not any(
            spec.absolute in (None, kept.ref.version)  # any `latest-<k>` may be this one by now
            for spec in (*own, *retained)
        ):
            return None
        return ledger.unpublish_number
