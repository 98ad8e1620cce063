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
    """Sets the word as the group's calls go: readers believe it, whatever became of a call."""

    def __init__(self, group: Group, mailbox: Mailbox, features: Sequence[Feature]) -> None:
        self._ledger, self._mailbox, self._features = group.ledger, mailbox, features
        self._ledger.skip = self.skip  # called where it learns of a call that this rank missed

    def serve(self, mark: int, buffer: Buffer | None = None) -> None:
        """Let all of a call's content be read; `buffer`, if it is a copy's, is told its word."""
        self._mailbox.serve(mark, ALL_BLOCKS)
        if buffer is not None:
            buffer.name(Word(mark, ALL_BLOCKS).pack())

    def show_nothing(self, mark: int, buffer: Buffer | None = None) -> None:
        """Name the call, and no byte of it: only its end says whether what is there is its content.

        Until then it is not known whether this publisher has the same bytes as another one of the
        same number, or whether tensors that were made of deltas are right.
        """
        self._mailbox.serve(mark, 0)
        if buffer is not None:  # borrowers find it in the store, perhaps before this rank knows
            buffer.name(Word(mark, 0).pack())

    def void(self) -> None:
        """Clear it: tensors are written to, or taken back, next."""
        self._mailbox.void()
        for feature in self._features:
            feature.hides()

    def void_unless_held(self) -> None:
        """Clear it if the replica holds nothing: where a call ends, and before the next begins.

        Where it has learned late that a call ended well, after `show_nothing`: serve all of that.
        """
        held = self._ledger.held
        if self._ledger.holds is None:
            self.void()
        elif held is not None and self._mailbox.word == Word(mark(held.ref.uid, held.call), 0):
            self.serve_held()

    def serve_held(self) -> None:
        """Serve what the replica holds, after the word was cleared and before anybody wrote."""
        if (held := self._ledger.held) is not None:
            self.serve(mark(held.ref.uid, held.call))

    def skip(self, learn: Callable[[], None]) -> None:
        """Learn the end of a call that the peers made without this rank.

        That may be an unpublish, after which the tensors' owner writes: the word is cleared first.
        """
        self.void()
        try:
            learn()
        finally:
            self.serve_held()
