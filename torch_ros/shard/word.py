"""The word of this process's mailbox: when it is set and cleared. `transfer/mailbox.py` says why.

While a version is read, `Progress` tells here how much of it is there.
"""

from collections.abc import Callable

from torch_ros.p2p.lending import LentMemory
from torch_ros.protocol.group import Group
from torch_ros.protocol.records import mark
from torch_ros.transfer.card import ALL_BLOCKS, Word
from torch_ros.transfer.deltas import CopyDeltas
from torch_ros.transfer.mailbox import Mailbox


class OwnWord:
    """The word follows the group's calls: readers believe it, whatever became of a call."""

    def __init__(self, group: Group, mailbox: Mailbox, deltas: CopyDeltas) -> None:
        self._ledger, self._mailbox, self._deltas = group.ledger, mailbox, deltas
        self._ledger.skip = self.skip

    def serve(self, mark: int, lent: LentMemory | None = None) -> None:
        """All of a call's content is there, and in this buffer, which keeps its name when lent."""
        self._mailbox.serve(mark, ALL_BLOCKS)
        if lent is not None:
            lent.name(Word(mark, ALL_BLOCKS).pack())

    def show_nothing(self, mark: int, lent: LentMemory | None = None) -> None:
        """What is there may not be the call's content: that is known when the call has ended."""
        self._mailbox.serve(mark, 0)
        if lent is not None:  # the store may say that the call has ended before this rank knows
            lent.name(Word(mark, 0).pack())

    def void(self) -> None:
        """Clear it: tensors are written to, or taken back, next."""
        self._mailbox.void()
        self._deltas.stop()

    def void_unless_held(self) -> None:
        """Clear it if the replica holds nothing: where a call ends, and before the next begins.

        If it holds what deltas brought, and this rank has learned that late, tell all of it.
        """
        kept = self._ledger.held
        if self._ledger.holds is None:
            self.void()
        elif kept is not None and self._mailbox.word == Word(mark(kept.ref.uid, kept.call), 0):
            self.serve_held()

    def serve_held(self) -> None:
        """Say what the replica holds, in memory that nobody can have written to since."""
        if (kept := self._ledger.held) is not None:
            self.serve(mark(kept.ref.uid, kept.call))

    def skip(self, learn: Callable[[], None]) -> None:
        """Learn the end of a call that the peers made without this rank."""
        self.void()
        try:
            learn()
        finally:
            self.serve_held()
