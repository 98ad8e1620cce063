"""The base of deltas: the content that a handle held until the call that reads the next one."""

import logging
from dataclasses import dataclass

from torch_ros.printable import log_of
from torch_ros.protocol.ledger import Ledger
from torch_ros.protocol.records import VersionRef, mark
from torch_ros.shard.tensors import Tensors
from torch_ros.transfer.card import ALL_BLOCKS, Word
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.registered import Registered

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class Base:
    """A version, and the tensors that have it."""

    ref: VersionRef
    registered: Registered


class Bases:
    """The contents to which deltas may be applied in one handle."""

    def __init__(self, ledger: Ledger, mailbox: Mailbox, tensors: Tensors) -> None:
        self._ledger, self._mailbox, self._tensors = ledger, mailbox, tensors
        self.is_trusted: bool = True

    def now(self) -> Base | None:
        """What the handle has read and holds now, right before it unpublishes that."""
        kept, registered = self._ledger.held, self._tensors.registered
        if kept is None or registered is None or kept.is_original or not self.is_trusted:
            return None
        everything = Word(mark(kept.ref.uid, kept.call), ALL_BLOCKS)
        return Base(kept.ref, registered) if self._mailbox.word == everything else None

    def distrust(self) -> None:
        """Give none from now on: what was read was not what was published."""
        if self.is_trusted:
            self.is_trusted = False
            log.warning(
                "no deltas are read into these tensors any more, until they are registered again: "
                "somebody may write to them while a version is held"
            )

    def begin(self) -> None:
        """Their owner registers tensors anew."""
        self.is_trusted = True
