"""The feed of a target: a source's processes, and how they are followed, also while they fill.

A relay is a source that is still filling itself. `connect` waits until it begins, `Following` until
it has the next blocks, and `Progress` tells this rank's own readers how far this rank is.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from torch_ros.deadline import Deadline
from torch_ros.errors import SourceLost, TransferFailed
from torch_ros.p2p.transport import Transfer
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.peers import Peers, PeerState
from torch_ros.transfer.registered import LocalState
from torch_ros.transfer.stall import SourceWait
from torch_ros.weights.columns import Bools, Ints
from torch_ros.weights.manifest import Layout, Manifest
from torch_ros.weights.plan import ReadPlan

if TYPE_CHECKING:
    from torch_ros.transfer.batches import Batch

TORN_S = 1.0  # for which a mailbox may contradict itself: to rewrite it takes microseconds


class Arrivals:
    """The blocks of a target that have arrived, and are as they should be. This has no readers."""

    def __init__(self, blocks: int) -> None:
        self.done: Bools = np.zeros(blocks, np.bool_)
        self.bytes_read: int = 0
        self.ways: Counter[str] = Counter()  # how many of these bytes came by each

    def add(self, blocks: Ints, bytes_read: int) -> None:
        """Count these blocks."""
        self.done[blocks] = True
        self.bytes_read += bytes_read

    def hush(self) -> None:
        """Tell readers of nothing before all is there, so that they go elsewhere."""

    def tell_rate(self, bytes_per_s: float) -> None:
        """Tell readers how fast bytes land here; 0: not known."""

    def note_ways(self, transfers: Iterable[Transfer]) -> None:
        """Count the ways of transfers whose blocks count."""
        for transfer in transfers:
            for way, size_bytes in transfer.ways:
                self.ways[way] += size_bytes


class Progress(Arrivals):
    """Arrivals, and the word that tells them to this rank's readers."""

    def __init__(self, mailbox: Mailbox, target: LocalState) -> None:
        super().__init__(target.layout.blocks.total)
        self._mailbox, self._is_hushed = mailbox, False
        self.target: LocalState = target
        self.mark: int = 0
        self.tell_rate(0)
        self.is_unproven = False  # see `fill`

    def serve(self, mark: int) -> None:
        """Tell readers from now on what is there, as a part of the content with this mark."""
        self.mark = mark
        self._tell()

    def hush(self) -> None:
        self._is_hushed = True
        self._mailbox.void()

    def speak(self) -> None:
        """Tell readers again what is there, from the next `serve` on."""
        self._is_hushed = False

    def tell_rate(self, bytes_per_s: float) -> None:
        self._mailbox.tell_rate(int(bytes_per_s))

    def fill(self, bytes_read: int) -> None:
        """Count all blocks: a feature has made them of what was here, which may have been wrong. So
        readers are told nothing of them before `prove`.
        """
        self.is_unproven = True
        self.done[:] = True
        self.bytes_read += bytes_read

    def prove(self) -> None:
        """Tell readers of what `fill` counted: the ranks have compared it, and the call is over."""
        if self.is_unproven:
            self.is_unproven = False
            self._tell()

    def add(self, blocks: Ints, bytes_read: int) -> None:
        super().add(blocks, bytes_read)
        tied, read = self.target.tied_blocks
        self.done[tied] = self.done[read]  # the same memory, by another name
        self._tell()

    def _tell(self) -> None:
        """Set the word: to the blocks before the first that is missing, or may be written again."""
        told, overlaps = self.done & (not self.is_unproven), self.target.overlaps
        if overlaps is not None:
            # A block that has arrived may be written over once more, for another name, with bytes
            # that are not certain yet.
            is_open = np.isin(overlaps, overlaps[~told]) & (overlaps >= 0)
            told = told & ~is_open
        position = _position(told)
        if position == ALL_BLOCKS:
            self.tell_rate(0)  # nothing lands here any more: nobody compares with what was once
        if not self._is_hushed or position == ALL_BLOCKS:
            self._mailbox.serve(self.mark, position)


def _position(told: Bools) -> int:
    """How many blocks there are before the first that may not be read; ALL_BLOCKS: none."""
    return ALL_BLOCKS if told.all() else int(np.argmin(told))


@dataclass(frozen=True, slots=True)
class FeedSource:
    """A source as the store has it, and how to ask about it."""

    replica: str
    mark: int  # that its ranks' words must have
    is_full: bool  # False: a relay, which is filling itself
    is_there: Callable[[], bool]  # asks the store whether the source is still there
    has_other: Callable[[float], bool]  # asks whom to read from, if it is mute for so long
    check: Callable[[], None]  # raises if this process has lost its seat, or closes
    judge: "Judging | None" = None  # of how fast it is; used where it is a read's only source


@dataclass(frozen=True, slots=True)
class Feed:
    source: FeedSource
    states: Sequence[PeerState]  # of its ranks, as `connect` found each: with a manifest

    @property
    def manifests(self) -> list[tuple[str, Manifest]]:
        return [(each.agent, each.manifest) for each in self.states if each.manifest is not None]

    @property
    def layouts(self) -> list[Layout]:
        return [manifest.layout for _, manifest in self.manifests]


@dataclass(frozen=True, slots=True, eq=False)
class Supply:
    plan: ReadPlan
    feed: Feed


def connect(peers: Peers, cards: Sequence[bytes], source: FeedSource, deadline: Deadline) -> Feed:
    """Reach the processes of a source; wait for those of a relay that have not begun.

    Raises:
        SourceLost: A process is gone or mute, serves something else, or shows what it should not.
    """
    states = [_attend(peers, card, rank, source, deadline) for rank, card in enumerate(cards)]
    return Feed(source, states)


def _attend(
    peers: Peers, card: bytes, rank: int, source: FeedSource, deadline: Deadline
) -> PeerState:
    """Wait until a rank serves the source's content, and return what it shows then. Three waits,
    each with an end of its own: `silence` for an answer, `torn` for a mailbox that fits its digest,
    and `patience` for a relay to begin.
    """
    replica, mark = source.replica, source.mark
    silence = SourceWait(replica, deadline, source.is_there, source.has_other)
    torn = SourceWait(replica, deadline, source.is_there)
    patience: SourceWait | None = None
    mute = f"rank {rank} of {replica!r} does not answer"
    while True:
        silence.reset()
        try:
            look = partial(silence.look, mute)
            state = peers.state(card, deadline, look, serves=True)
            state = _certified(peers, state, mark, deadline, look)
        except TransferFailed as error:
            peers.forget(error.agent)
            raise SourceLost(replica, f"rank {rank}: {error.reason}") from error
        if patience is None:  # how often to look depends on where it is, known once it answers
            is_eager = not peers.is_near([state.agent])
            patience = SourceWait(replica, deadline, source.is_there, is_eager=is_eager)
        if state.word.mark == mark and state.manifest is not None:
            return state
        if state.word.mark != mark and (source.is_full or state.word.mark):
            raise SourceLost(replica, f"rank {rank} does not serve it any more").orderly()
        if state.word.mark != mark:
            torn.reset()  # a relay that has not begun may change its mailbox
        elif torn.still_s > TORN_S:
            raise SourceLost(replica, f"rank {rank}: {state.problem}")
        reason = f"rank {rank} of {replica!r} does not show it yet"
        torn.look(reason)
        patience.wait(reason)


def _certified(
    peers: Peers, state: PeerState, mark: int, deadline: Deadline, look: Callable[[], None]
) -> PeerState:
    """Return the state; if it has digests, with a word that was read after them. The word in
    `state` was read before, so the digests may be of the content that came next. Bytes of tensors
    have a later look at the word when their batch counts; digests have this one only.
    """
    if state.word.mark != mark or not state.manifest or state.manifest.depth == "off":
        return state
    return replace(state, word=peers.word(state, deadline, look))


class Judge:
    """Told how a read goes from its only source. Each method does nothing here. A judge that finds
    too little coming from the source raises `Left`.
    """

    def begins(self, batches: "Sequence[Batch]") -> None:
        """These are to be read, in this order."""

    def looks(self) -> None:
        """Something is on its way."""

    def resumes(self) -> None:
        """The source may have more again: it had no more, so nothing was on its way."""

    def lands(self, size_bytes: int) -> None:
        """Some bytes have landed, and do not count yet."""

    def counts(self, size_bytes: int) -> None:
        """So many bytes count now."""

    def landed(self, batch: "Batch") -> None:
        """Called after `lands`, and `counts` if batches became whole; `batch` landed last."""


class Following:
    """A source that is read from: asks it whether it still serves, and how much of it is there.
    After `limit_s` without an answer another source is better. `progress` says in a SourceLost how
    much was read until then, and changes nothing.
    """

    def __init__(
        self, peers: Peers, supply: Supply, progress: Arrivals, deadline: Deadline, limit_s: float
    ) -> None:
        self._peers, self._progress, self._deadline = peers, progress, deadline
        self.feed: Feed = supply.feed
        self._bytes_total = supply.plan.bytes_read
        source = supply.feed.source
        self.is_near: bool = peers.is_near([state.agent for state in supply.feed.states])
        there, is_eager = source.is_there, not self.is_near
        # For a relay's next blocks. `silence` is for answers: it alone prefers another source.
        self._patience = SourceWait(source.replica, deadline, there, is_eager=is_eager)
        self.silence: SourceWait = SourceWait(
            source.replica, deadline, source.is_there, source.has_other, limit_s
        )
        # As each rank was last seen. Of a full source this is never asked: its words may say less,
        # as a rank may learn late that it is full.
        self._positions = [ALL_BLOCKS if source.is_full else 0] * len(supply.feed.states)

    def has(self, needs: Mapping[int, int]) -> bool:
        """Whether each rank was seen to have as many blocks as `needs` says of it."""
        return all(self._positions[rank] >= needed for rank, needed in needs.items())

    def ask(self, rank: int) -> None:
        """Read a rank's word again. Raises: SourceLost: It serves something else, or is gone."""
        word = self._peers.word(self.feed.states[rank], self._deadline, self.look)
        self.silence.reset()
        if word.mark != self.feed.source.mark:
            raise self.lost(rank, "it does not serve it any more").orderly()
        if not self.feed.source.is_full:
            self._positions[rank] = word.position

    def rate(self, ranks: Iterable[int]) -> int:
        """How fast bytes land at the slowest of these ranks; 0: that is not known."""
        states = [self.feed.states[rank] for rank in ranks]
        return min(self._peers.rate(state, self._deadline, self.look) for state in states)

    def wait_for_more(self) -> None:
        """Ask a relay how far it is; wait a little if it has no more than before."""
        before = list(self._positions)
        for rank in range(len(before)):
            self.ask(rank)
        if self._positions != before:
            self._patience.reset()
        else:
            self._patience.wait(f"{self.feed.source.replica!r} has no more of it than before")

    def look(self) -> None:
        """Note that an answer is still awaited.

        Raises: SourceLost: The source is gone, or mute while another is not; it is disconnected.
        """
        try:
            self.silence.look(f"{self.feed.source.replica!r} does not answer")
        except SourceLost as lost:
            for state in self.feed.states:
                self._peers.leave(state.agent)
            again = SourceLost(lost.replica, lost.what, *self._so_far())  # with what was read
            raise (again.orderly() if lost.is_orderly else again) from lost

    def lost(self, rank: int, reason: str) -> SourceLost:
        return SourceLost(self.feed.source.replica, f"rank {rank}: {reason}", *self._so_far())

    def _so_far(self) -> tuple[int, int]:
        return self._progress.bytes_read, self._bytes_total


Judging = Callable[[Following, Arrivals], Judge]
