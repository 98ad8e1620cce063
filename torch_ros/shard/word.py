"""The word of this process's mailbox: when it is set and cleared. `transfer/mailbox.py` says why.

While a version is read, `Progress` tells here how much of it is there.
"""

from collections.abc import Callable, Sequence

from torch_ros.protocol.group import Group
from torch_ros.protocol.records import mark
from torch_ros.shard.seams import Feature
from torch_ros.transfer.card import ALL_BLOCKS, Word
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.registered import Buffer


class OwnWord:
    """The word follows the group's calls: readers believe it, whatever became of a call."""

    def __init__(self, group: Group, mailbox: Mailbox, features: Sequence[Feature]) -> None:
        self._ledger, self._mailbox, self._features = group.ledger, mailbox, features
        self._ledger.skip = self.skip

    def serve(self, mark: int, buffer: Buffer | None = None) -> None:
        """All of a call's content is there, and in this buffer."""
        self._mailbox.serve(mark, ALL_BLOCKS)
        if buffer is not None:
            buffer.name(Word(mark, ALL_BLOCKS).pack())

    def show_nothing(self, mark: int, buffer: Buffer | None = None) -> None:
        """What is there may not be the call's content: that is known when the call has ended."""
        self._mailbox.serve(mark, 0)
        if buffer is not None:  # the store may say that the call has ended before this rank knows
            buffer.name(Word(mark, 0).pack())

    def void(self) -> None:
        """Clear it: tensors are written to, or taken back, next."""
        self._mailbox.void()
        for feature in self._features:
            feature.hides()

    def void_unless_held(self) -> None:
        """Clear it if the replica holds nothing: where a call ends, and before the next begins.

        If it holds what was unproven, and this rank has learned the end late, tell all of it.
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
