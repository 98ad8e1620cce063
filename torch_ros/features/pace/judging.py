"""A rank that is slower than a near relay steps aside, or leaves that: docs/protocol/pace.md."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch_ros.features.pace import rules
from torch_ros.features.pace.rates import Landings, Pace
from torch_ros.protocol import sources
from torch_ros.protocol.keys import replica_of
from torch_ros.protocol.reaching import ClaimedSources, Left
from torch_ros.protocol.sources import Source
from torch_ros.shard.seams import Feature
from torch_ros.store.txn import one
from torch_ros.transfer.batches import Batch
from torch_ros.transfer.feed import Arrivals, Following, Judge

LEFT_MAX = 2  # sources that give too little, in a call; or newcomers were followed for ever
ASK_AGAIN_S = 10.0  # after no answer: a slow reader whose store is away has to go on reading


class Pacing(Feature):
    """The reads of one shard are judged."""

    def judges(self) -> "PacedSources":
        return PacedSources()


class PacedSources:
    """As `Judges`, of near relays, and of full ones beside a relay that was left."""

    def __init__(self) -> None:
        self._rate = 0.0  # at which a near relay got the version that gave too little of it
        self._slowness: Slowness | None = None

    def of(self, claimed: ClaimedSources, source: Source) -> Callable[[Following, Arrivals], Judge]:
        if self._slowness is None or self._slowness.claimed is not claimed:
            self._slowness = Slowness(claimed)
        is_near = source.datacenter == claimed.call.seat.datacenter
        # A full one shows no rate; another may have.
        pace = Pace(self._rate) if is_near and (self._rate or not source.is_full) else None
        return partial(PacedRead, pace, partial(self._fell_behind, self._slowness, source))

    def _fell_behind(
        self, slowness: "Slowness", source: Source, rate: float, hush: Callable[[], object]
    ) -> None:
        self._rate = rate
        slowness.fell_behind(source, hush)


class Slowness:
    """The steps of a rank against slowness among the sources that its group has claimed."""

    def __init__(self, claimed: ClaimedSources) -> None:
        self.claimed = claimed
        self._judged: set[str] = set()  # sources that gave too little
        self._asks_s = 0.0  # when it may ask again whether to step aside
        self._is_aside = rules.rests(claimed.known)  # it relays nothing
        self._left = int(self._is_aside)  # how many of them; who rests has a leaf's place already

    def fell_behind(self, source: Source, hush: Callable[[], object]) -> None:
        """Do what a rank does that gets much less than a near relay which it reads.

        Args:
            hush: Passes nothing on any more.

        Raises: SourceLost: It is left for another near one.
        """
        claimed, call = self.claimed, self.claimed.call
        if source.inst in self._judged or time.monotonic() < self._asks_s:
            return
        ranges = sources.source_ranges(call.seat, call.ref)
        is_blamed = claimed.is_displaced and not self._left  # whoever was there may have been fast
        if not (self._is_aside or is_blamed):
            reads = sources.reads_of(call.seat, call.ref, source.inst)
            aside = partial(rules.step_aside, seat=call.seat, call=call.decided, reads=reads)
            known = claimed.glance((*ranges, *map(one, reads)), aside, unknown=None)
            if known is None:  # it may have stepped aside, and tells its readers what it has
                self._asks_s = time.monotonic() + ASK_AGAIN_S
                return
            claimed.known, self._is_aside = known, rules.is_aside(known)
        self._judged.add(source.inst)
        if self._is_aside:
            hush()
        if self._left >= (LEFT_MAX if self._is_aside else 1):
            return
        rule = partial(
            rules.another, seat=call.seat, call=claimed.known, source=source, tried=claimed.tried
        )
        if place := claimed.glance(ranges, rule, unknown=""):
            self._left += 1
            left = Left(replica_of(source.inst), "it gets much more than it gives")
            left.place = place
            raise left


class PacedRead(Judge):
    """One pass over a source; tells readers the rate too.

    Args:
        pace: None: the source cannot be judged.
        fell_behind: Told the source's rate, and how to pass nothing on.
    """

    def __init__(
        self,
        pace: Pace | None,
        fell_behind: Callable[[float, Callable[[], object]], None],
        following: Following,
        progress: Arrivals,
    ) -> None:
        self._pace, self._fell_behind = pace, fell_behind
        self._following, self._progress = following, progress
        self.landings = None if following.is_near else Landings(time.monotonic())
        self._is_window = False  # the last landing ended one
        self._unseen: deque[Batch] = deque()  # that the source was not seen to have yet
        self._landed = self._shown = 0

    def begins(self, batches: Sequence[Batch]) -> None:
        if self.landings is None:
            self._progress.tell_rate(0)
        self._unseen.extend(batches)

    def looks(self) -> None:
        if self.landings is not None:
            self.landings.look(time.monotonic())

    def resumes(self) -> None:
        if self.landings is not None:
            self.landings.resume(time.monotonic())

    def lands(self, size_bytes: int) -> None:
        if self.landings is None:
            return
        self._is_window = self.landings.land(time.monotonic(), size_bytes)
        if self._is_window:  # told before the end, which tells that there is no rate any more
            self._progress.tell_rate(self.landings.told)

    def counts(self, size_bytes: int) -> None:
        """Compare what has landed with what the source got meanwhile, if that is a near relay."""
        self._landed += size_bytes
        if self._pace is None:
            return
        while self._unseen and self._following.has(self._unseen[0].needs):
            self._shown += self._unseen.popleft().size_bytes
        self.keep_up(time.monotonic(), self._landed, self._shown)

    def keep_up(self, now_s: float, landed: int, shown: int) -> None:
        """Compare the bytes that count with those that were to be read until now."""
        if (pace := self._pace) is not None and pace.is_behind(now_s, landed, shown):
            self._fell_behind(pace.rate, self._progress.hush)

    def landed(self, batch: Batch) -> None:
        if self._is_window:
            self.compare(batch.needs)

    def compare(self, ranks: Iterable[int]) -> None:
        """After a window: whether it was slow beside the relay's own, whose ranks are asked."""
        pace, landings = self._pace, self.landings
        if pace is None or landings is None or self._following.feed.source.is_full:
            return
        told = self._following.rate(ranks) if landings.last < math.inf else math.inf
        if pace.is_slower(landings.last, told):
            self._fell_behind(pace.rate, self._progress.hush)
