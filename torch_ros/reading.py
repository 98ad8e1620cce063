"""Carries read plans out: what `weights` decided, with the reads that `p2p` offers.

What is read from a source counts once the source, asked after the bytes have landed, still serves
the same content. Everything here is about asking at the right moments: before a read, whether what
it is after is there; after it, whether it counts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, zip_longest

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.errors import SourceLost, TransferFailed
from torch_ros.exchange import (
    EVERYTHING,
    FLIGHT,
    READ_BYTES,
    Intake,
    Offer,
    Shown,
    close_all,
    perform,
)
from torch_ros.p2p.transport import HOST, Read, Region, Registration, Spans, Transport
from torch_ros.registered import Part, Registered
from torch_ros.store.run import Deadline
from torch_ros.weights.columns import Ints, distinct, numbered, sum_before
from torch_ros.weights.manifest import BLOCK_BYTES, Blocks, Layout, Manifest
from torch_ros.weights.plan import (
    Costs,
    DirectSpans,
    ReadPlan,
    Route,
    StagedCopy,
    copy_staged,
    plan,
)

PLANS_MAX = 8  # kept; a plan of 70,000 chunks is some 10 MB
# Of reads kept, for what an unchanged job needs at every step: in a burst, each other rollout is a
# source at times. A span takes about half a KiB, and ten times as long to prepare as to post again.
PREPARED_MAX, PREPARED_SPANS_MAX = 16, 200_000
ALIGNMENT_BYTES = 64
BATCH_BYTES = 64 << 20  # read between two questions whether it counts
POLL_S_MIN, POLL_S_MAX = 0.0002, 0.01  # between questions to a source that is filling itself
STALL_S = 1.0  # without progress, until the store is asked whether the source is there at all
SILENCE_S = 4.0  # without an answer, until another source is better
# Until what is in flight has come from a source that is slow; its word is answered behind it.
SLOW_BYTES_PER_S = 20e6
BLINK_S = 0.1  # of a wait counts at most: this process may have been stopped meanwhile
TORN_S = 1.0  # that a process may show what does not fit together: to rewrite it takes microseconds


class Progress:
    """How much of what this rank is filling is there, and told to its own readers."""

    def __init__(self, offer: Offer, target: Registered) -> None:
        self._offer, self._target, self._mark = offer, target, 0
        self.done: npt.NDArray[np.bool_] = np.zeros(target.layout.blocks.total, np.bool_)
        self.bytes_read = 0
        self.added: Callable[[int], object] = lambda _: None
        """Called with the bytes of whatever is there from then on."""

    def serve(self, mark: int) -> None:
        """Say so from now on."""
        self._mark = mark
        self._tell()

    def add(self, blocks: Ints, bytes_read: int) -> None:
        """These blocks are there, and count."""
        self.done[blocks] = True
        tied, read = self._target.tied_blocks
        self.done[tied] = self.done[read]
        self.bytes_read += bytes_read
        self._tell()
        self.added(bytes_read)

    def _tell(self) -> None:
        told, overlaps = self.done, self._target.overlaps
        if overlaps is not None:
            # What is there may be written over once more, for another name, with what is not
            # certain yet.
            is_open = np.isin(overlaps, overlaps[~told]) & (overlaps >= 0)
            told = told & ~is_open
        is_all = bool(told.all())
        self._offer.serve(self._mark, EVERYTHING if is_all else int(np.argmin(told)))


@dataclass(frozen=True, slots=True)
class Feed:
    """The processes of a source, and how to ask the store whether it is still there."""

    replica: str
    mark: int
    is_full: bool
    shown: Sequence[Shown]
    is_there: Callable[[], bool]
    has_other: Callable[[], bool]
    """Whether somebody else has the version too."""
    check: Callable[[], None]
    """Raises if it is of no use to go on: this process has lost its seat, or closes."""

    @property
    def manifests(self) -> list[tuple[str, Manifest]]:
        return [(s.agent, s.manifest) for s in self.shown if s.manifest is not None]

    @property
    def layouts(self) -> list[Layout]:
        return [manifest.layout for _, manifest in self.manifests]


@dataclass(frozen=True, slots=True, eq=False)
class Supply:
    """A source, and how a target is filled from it."""

    plan: ReadPlan
    feed: Feed


def connect(
    intake: Intake,
    cards: Sequence[bytes],
    deadline: Deadline,
    *,
    replica: str,
    mark: int,
    is_full: bool,
    is_there: Callable[[], bool],
    has_other: Callable[[], bool],
    check: Callable[[], None],
) -> Feed:
    """Reach the processes of a source; wait for those of a relay that have not begun.

    Raises:
        SourceLost: One is gone or mute, serves something else, or shows what it should not.
    """
    shown = []
    for rank, card in enumerate(cards):
        silence, patience, torn = (
            Patience(replica, deadline, is_there, has_other)
            for has_other in (has_other, None, None)
        )
        while True:
            silence.reset()
            try:
                now = intake.shown(card, deadline, partial(silence.look, _mute(rank, replica)))
            except TransferFailed as error:
                intake.forget(error.agent)
                raise SourceLost(replica, f"rank {rank}: {error.reason}", 0, 0) from error
            if now.word.mark == mark and now.manifest is not None:
                shown.append(now)
                break
            if now.word.mark != mark and (is_full or now.word.mark):
                raise SourceLost(replica, f"rank {rank} does not serve it any more", 0, 0)
            if now.word.mark != mark:
                torn.reset()
            elif torn.still_s > TORN_S:
                raise SourceLost(replica, f"rank {rank}: {now.problem}", 0, 0)
            reason = f"rank {rank} of {replica!r} does not show it yet"
            torn.look(reason)
            patience.wait(reason)
    return Feed(replica, mark, is_full, shown, is_there, has_other, check)


def _mute(rank: int, replica: str) -> str:
    return f"rank {rank} of {replica!r} does not answer"


class Patience:
    """Waiting for a source.

    Args:
        is_there: Asked every `STALL_S` while nothing comes.
        has_other: Asked then too, after `limit_s`; None: it answers, and so is not left for others.
    """

    def __init__(
        self,
        replica: str,
        deadline: Deadline,
        is_there: Callable[[], bool],
        has_other: Callable[[], bool] | None = None,
        limit_s: float = SILENCE_S,
    ) -> None:
        self._replica, self._deadline, self._limit_s = replica, deadline, limit_s
        self._is_there, self._has_other = is_there, has_other
        self.reset()

    def reset(self) -> None:
        """Something came."""
        self._pause_s, self.still_s = POLL_S_MIN, 0.0
        self._ask_s, self._looked_s = STALL_S, time.monotonic()

    def look(self, reason: str) -> None:
        """Nothing has come since the last look.

        Raises:
            SourceLost: The source is gone; or it is mute, and another one is not.
        """
        now_s = time.monotonic()
        self.still_s += min(now_s - self._looked_s, BLINK_S)
        self._looked_s = now_s
        self._deadline.check(reason)
        if self.still_s < self._ask_s:
            return
        self._ask_s = self.still_s + STALL_S
        if not self._is_there():
            raise SourceLost(self._replica, f"it is gone, and {reason}", 0, 0)
        if self._has_other and self.still_s > self._limit_s and self._has_other():
            raise SourceLost(self._replica, f"{reason}, for {self.still_s:.0f} s", 0, 0)
        self._looked_s = time.monotonic()

    def wait(self, reason: str) -> None:
        self.look(reason)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, POLL_S_MAX)


class Reading:
    """Plans, and the staging buffer that short strided runs go through. One thread at a time."""

    def __init__(
        self, transport: Transport, intake: Intake, staging_bytes: int, costs: tuple[Costs, Costs]
    ) -> None:
        self.intake = intake
        self._transport, self._staging_bytes = transport, staging_bytes
        self._near_costs, self._far_costs = costs
        self._plans: OrderedDict[tuple[Costs, tuple[str, ...]], ReadPlan] = OrderedDict()
        self._staging: dict[torch.device, tuple[torch.Tensor, Registration]] = {}
        self._prepared: OrderedDict[_Key, tuple[Sequence[Supply], Sequence[_Batch]]] = OrderedDict()
        intake.before_forget = self.forget

    def prepared(self, supplies: Sequence[Supply], part: Part) -> Sequence[_Batch]:
        """All of what is to be read, as reads; kept: the next step only posts them again."""
        sources = tuple(
            (id(supply.plan), agent, manifest.descriptor, manifest.addresses)
            for supply in supplies
            for agent, manifest in supply.feed.manifests
        )
        key = (sources, part.addresses)
        if key not in self._prepared:
            everything = np.arange(part.layout.blocks.total)
            batches = _all_batches(self, supplies, part, everything)
            self._prepared[key] = supplies, batches  # the plans too: ids must not be used again
            while len(self._prepared) > 1 and self._is_too_much():
                _, (_, old) = self._prepared.popitem(last=False)
                close_batches(old)
        self._prepared.move_to_end(key)
        return self._prepared[key][1]

    def _is_too_much(self) -> bool:
        kept = [supply.plan.span_count for all_, _ in self._prepared.values() for supply in all_]
        return len(self._prepared) > PREPARED_MAX or sum(kept) > PREPARED_SPANS_MAX

    def forget(self, agent: str | None = None) -> None:
        """Give up the reads from an agent, or all: before it, or what they fill, is let go."""
        gone = [
            key
            for key in self._prepared
            if agent is None or agent in [source for _, source, _, _ in key[0]]
        ]
        close_batches([batch for key in gone for batch in self._prepared.pop(key)[1]])

    def plan(
        self, sources: Sequence[Layout], target: Layout, rank: int, *, is_near: bool = True
    ) -> ReadPlan:
        """How to fill `target` from `sources`; kept, since layouts seldom change.

        Args:
            is_near: The sources are read by copying.

        Raises: ManifestMismatch, UsageError: See `weights.plan.plan`.
        """
        costs = self._near_costs if is_near else self._far_costs
        key = (costs, (target.digest, *(layout.digest for layout in sources)))
        if key not in self._plans:
            self._plans[key] = plan(
                sources,
                target,
                staging_bytes=self._staging_bytes,
                target_rank=rank,
                costs=costs,
            )
            if len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def read(
        self,
        supplies: Sequence[Supply],
        part: Part,
        progress: Progress,
        deadline: Deadline,
    ) -> None:
        """Fill what is missing of `part` as planned. Nothing is in flight any more at its end.

        Args:
            supplies: From each of the sources, which take turns.
            part: The plans' target; its memory is registered.

        Raises:
            SourceLost: A source is gone, or does not serve the call any more.
            DeadlineExceeded: Too slow.
        """
        _Run(self, supplies, part, progress, deadline).run()

    def staging_on(self, device: torch.device) -> torch.Tensor:
        """A registered buffer: the same one every time, since reads into it are kept."""
        if device not in self._staging:
            buffer = torch.empty(
                self._staging_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device
            )
            at = device.index if buffer.is_cuda else HOST
            region = Region(buffer.data_ptr(), buffer.nbytes, at)
            self._staging[device] = (buffer, self._transport.register([region]))
        return self._staging[device][0]

    def close(self) -> None:
        self.forget()
        for _, registration in self._staging.values():
            registration.close()
        self._staging.clear()


_Key = tuple[tuple[tuple[int, str, bytes, tuple[int, ...]], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """Pieces that are in staging at the same time, and the reads that bring them there."""

    staging: torch.Tensor
    pieces: Sequence[tuple[int, StagedCopy]]  # each with its offset
    reads: Sequence[Read]


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Target blocks that are read from one source, and begin to count, together."""

    supply: int  # the number of its source among the run's
    blocks: Ints
    needs: Mapping[int, int]  # source rank -> how many of its blocks have to be there
    reads: Sequence[Read]
    staged: Sequence[_Staged]
    is_repeated: bool  # some of what is staged is there already, and may be read from


def close_batches(batches: Sequence[_Batch]) -> None:
    reads = [read for batch in batches for read in batch.reads]
    close_all(reads + [read for batch in batches for group in batch.staged for read in group.reads])


def _all_batches(
    reading: Reading, supplies: Sequence[Supply], part: Part, missing: Ints
) -> Sequence[_Batch]:
    """What fills the target blocks `missing`, in their order. The caller closes the reads."""
    target, memory = part.layout.blocks, part.memory
    staged = {piece.target_chunk for supply in supplies for piece in supply.plan.staged}
    # What is staged is copied into a chunk as a whole, and so belongs together.
    leaders = np.arange(target.total)
    for chunk in staged:
        start = target.starts[chunk]
        leaders[start : start + target.counts[chunk]] = start
    leaders = leaders[missing]
    sizes = _block_bytes(target, memory)[missing]
    turns = _as_one(sum_before(sizes) // BATCH_BYTES % len(supplies), leaders)
    batches: list[_Batch] = []
    try:
        for index, supply in enumerate(supplies):
            own = turns == index
            if own.any():
                batches += _batches(reading, index, supply, part, missing[own], leaders[own])
    except BaseException:
        close_batches(batches)
        raise
    return sorted(batches, key=lambda batch: int(batch.blocks[0]))


def _as_one(values: Ints, leaders: Ints) -> Ints:
    """`values`, where those with the same leader have that of the first of them."""
    _, first, inverse = np.unique(leaders, return_index=True, return_inverse=True)
    return values[first][inverse]


def _block_bytes(blocks: Blocks, memory: Sequence[torch.Tensor]) -> Ints:
    owner, ordinal = numbered(blocks.counts)
    sizes = np.fromiter((tensor.nbytes for tensor in memory), np.int64, len(memory))[owner]
    is_last = ordinal == blocks.counts[owner] - 1
    return np.where(is_last, sizes - ordinal * BLOCK_BYTES, BLOCK_BYTES)


def _batches(
    reading: Reading, index: int, supply: Supply, part: Part, missing: Ints, leaders: Ints
) -> Iterator[_Batch]:
    target, plan, memory = part.layout.blocks, supply.plan, part.memory
    direct, block = _by_block(plan.direct, target)
    staged = plan.staged
    bytes_of = np.zeros(target.total, np.int64)
    np.add.at(bytes_of, block, direct.size_bytes)
    chunk_of_piece = np.array([piece.target_chunk for piece in staged], np.int64)
    np.add.at(bytes_of, target.starts[chunk_of_piece], [piece.size_bytes for piece in staged])
    numbers = np.full(target.total, -1, np.int64)
    numbers[missing] = _as_one(sum_before(bytes_of[missing]) // BATCH_BYTES, leaders)
    # Both are sorted by target chunk, so that each batch is a slice of what is missing.
    spans = np.flatnonzero(numbers[block] >= 0)
    span_numbers = numbers[block[spans]]
    number_of_chunk = np.maximum.reduceat(numbers, target.starts)
    is_partly_there = np.minimum.reduceat(numbers, target.starts) < 0
    rows = np.flatnonzero(number_of_chunk[chunk_of_piece] >= 0)
    piece_numbers = number_of_chunk[chunk_of_piece[rows]]
    for number in distinct(numbers[missing]).tolist():
        mine = spans[slice(*np.searchsorted(span_numbers, [number, number + 1]))]
        some = rows[slice(*np.searchsorted(piece_numbers, [number, number + 1]))]
        only = direct.take(mine)
        pieces = [staged[row] for row in some.tolist()]
        reads = _prepare(reading.intake, replace(plan, direct=only, staged=()), supply.feed, memory)
        try:
            groups = _staged(reading, supply.feed, pieces, memory)
        except BaseException:
            close_all(reads)
            raise
        yield _Batch(
            index,
            missing[numbers[missing] == number],
            _needs(supply.feed, only, pieces),
            reads,
            groups,
            bool(is_partly_there[chunk_of_piece[some]].any()),
        )


def _by_block(direct: DirectSpans, target: Blocks) -> tuple[DirectSpans, Ints]:
    """The spans, cut where a block of the target ends; and the block that each is in."""
    starts, ends = direct.target_offset_bytes, direct.target_offset_bytes + direct.size_bytes
    first = target.at(direct.target_chunk, starts)
    last = target.at(direct.target_chunk, ends - 1)
    owner, ordinal = numbered(last - first + 1)
    block = first[owner] + ordinal
    cut = direct.take(owner)
    begin = (block - target.starts[cut.target_chunk]) * BLOCK_BYTES
    end = np.where(block == last[owner], ends[owner], begin + BLOCK_BYTES)
    begin = np.maximum(begin, starts[owner])
    return replace(
        cut,
        source_offset_bytes=cut.source_offset_bytes + begin - starts[owner],
        target_offset_bytes=begin,
        size_bytes=end - begin,
    ), block


def _needs(feed: Feed, direct: DirectSpans, staged: Sequence[StagedCopy]) -> dict[int, int]:
    """How far each rank of a source that is filling itself must have come."""
    blocks = [layout.blocks for layout in feed.layouts]
    needs: dict[int, int] = {}
    for rank in distinct(direct.source_rank).tolist():
        spans = direct.take(direct.source_rank == rank)
        ends = spans.source_offset_bytes + spans.size_bytes - 1
        needs[rank] = int(blocks[rank].at(spans.source_chunk, ends).max()) + 1
    for piece in staged:
        rank, end = piece.source_rank, piece.source_offset_bytes + piece.size_bytes - 1
        at = blocks[rank].at(np.array([piece.source_chunk]), np.array([end]))
        needs[rank] = max(needs.get(rank, 0), int(at[0]) + 1)
    return needs


def _prepare(
    intake: Intake, plan: ReadPlan, feed: Feed, memory: Sequence[torch.Tensor]
) -> list[Read]:
    if not plan.span_count:
        return []
    manifests = feed.manifests
    routes = plan.bind(
        [manifest.addresses for _, manifest in manifests],
        [chunk.data_ptr() for chunk in memory],
        source_devices=[manifest.devices for _, manifest in manifests],
        target_devices=[chunk.get_device() if chunk.is_cuda else HOST for chunk in memory],
    )
    return _prepare_routes(intake, feed, routes)


def _prepare_routes(intake: Intake, feed: Feed, routes: Mapping[Route, Spans]) -> list[Read]:
    manifests, reads = feed.manifests, list[Read]()
    try:
        for route, rows in routes.items():
            reads += intake.prepare(
                *manifests[route.source_rank],
                rows,
                source_device=route.source_device,
                target_device=route.target_device,
            )
    except BaseException:
        close_all(reads)
        raise
    return reads


def _staged(
    reading: Reading, feed: Feed, staged: Sequence[StagedCopy], memory: Sequence[torch.Tensor]
) -> list[_Staged]:
    groups: list[_Staged] = []
    try:
        for device in sorted({memory[piece.target_chunk].device for piece in staged}, key=str):
            staging = reading.staging_on(device)
            here = [piece for piece in staged if memory[piece.target_chunk].device == device]
            for pieces in _that_fit(here, staging.numel()):
                reads = _prepare_staged(reading.intake, feed, pieces, staging)
                groups.append(_Staged(staging, pieces, reads))
    except BaseException:
        for group in groups:
            close_all(group.reads)
        raise
    return groups


def _prepare_staged(
    intake: Intake, feed: Feed, pieces: Sequence[tuple[int, StagedCopy]], staging: torch.Tensor
) -> list[Read]:
    manifests, target = feed.manifests, staging.get_device() if staging.is_cuda else HOST
    routes: dict[Route, list[tuple[int, int, int]]] = {}
    for offset, piece in pieces:
        _, manifest = manifests[piece.source_rank]
        source = manifest.addresses[piece.source_chunk] + piece.source_offset_bytes
        route = Route(piece.source_rank, manifest.devices[piece.source_chunk], target)
        span = (source, staging.data_ptr() + offset, piece.size_bytes)
        routes.setdefault(route, []).append(span)
    spans = {route: np.array(rows, np.uint64) for route, rows in routes.items()}
    return _prepare_routes(intake, feed, spans)


class _Run:
    """What the plans for one target say, carried out once."""

    def __init__(
        self,
        reading: Reading,
        supplies: Sequence[Supply],
        part: Part,
        progress: Progress,
        deadline: Deadline,
    ) -> None:
        self._reading, self._intake = reading, reading.intake
        self._supplies, self._part, self._memory = supplies, part, part.memory
        self._progress, self._deadline = progress, deadline
        feeds = [supply.feed for supply in supplies]
        self._patience = [Patience(each.replica, deadline, each.is_there) for each in feeds]
        in_flight = min(FLIGHT * READ_BYTES, sum(tensor.nbytes for tensor in part.memory))
        limit_s = SILENCE_S + in_flight / SLOW_BYTES_PER_S
        self._silence = [
            Patience(each.replica, deadline, each.is_there, each.has_other, limit_s)
            for each in feeds
        ]
        # By supply and source rank, when it was last asked.
        self._there = [
            [EVERYTHING if supply.feed.is_full else 0] * len(supply.feed.shown)
            for supply in supplies
        ]
        self._batch_of: dict[Read, _Batch] = {}
        self._reads_left: dict[_Batch, int] = {}

    def run(self) -> None:
        done = self._progress.done[self._part.blocks]
        if done.all():
            return
        try:
            if done.any():  # what a source that was lost has left to do
                missing = np.flatnonzero(~done)
                batches = _all_batches(self._reading, self._supplies, self._part, missing)
                try:
                    self._perform(batches)
                finally:
                    close_batches(batches)
            else:
                self._perform(self._reading.prepared(self._supplies, self._part))
        except BaseException as error:
            self._reading.forget()  # what is still in flight has ended then
            if isinstance(error, TransferFailed):
                self._intake.forget(error.agent)
                raise self._lost(*self._place_of(error.agent), error.reason) from error
            raise

    def _perform(self, batches: Sequence[_Batch]) -> None:
        self._reads_left = {batch: len(batch.reads) for batch in batches}
        self._batch_of = {read: batch for batch in batches for read in batch.reads}
        waiting: list[_Batch] = []
        for batch in batches:
            if batch.reads:
                waiting.append(batch)
            else:  # staged only: what comes before it first
                self._post(waiting)
                waiting = []
                self._await(batch)
                self._end(batch)
        self._post(waiting)

    def _post(self, batches: Sequence[_Batch]) -> None:
        perform(
            _in_turns(batches),
            self._deadline,
            may_post=lambda read: self._is_there(self._batch_of[read]),
            landed=self._landed,
            blocked=self._blocked,
            still=self._still,
            flight=FLIGHT * len(self._supplies),
        )

    def _still(self, flying: Sequence[Read]) -> None:
        waited_for = {self._batch_of[read].supply for read in flying}
        for number, silence in enumerate(self._silence):
            if number in waited_for:
                self._look(number)
            else:
                silence.reset()

    def _look(self, number: int) -> None:
        feed = self._supplies[number].feed
        try:
            self._silence[number].look(f"{feed.replica!r} does not answer")
        except SourceLost as lost:
            for shown in feed.shown:
                self._intake.leave(shown.agent)
            done, total = self._progress.bytes_read, self._supplies[number].plan.bytes_read
            raise SourceLost(lost.replica, lost.what, done, total) from lost

    def _landed(self, read: Read) -> None:
        batch = self._batch_of[read]
        self._silence[batch.supply].reset()
        self._reads_left[batch] -= 1
        if not self._reads_left[batch]:
            self._end(batch)

    def _end(self, batch: _Batch) -> None:
        """The direct reads of a batch have landed. The rest of it; then see whether it counts."""
        bytes_read = sum(read.size_bytes for read in batch.reads)
        if batch.staged:
            bytes_read += self._read_staged(batch)
        for rank in batch.needs:
            self._ask(batch.supply, rank)
        self._supplies[batch.supply].feed.check()
        self._progress.add(self._part.blocks[batch.blocks], bytes_read)

    def _is_there(self, batch: _Batch) -> bool:
        there = self._there[batch.supply]
        return all(there[rank] >= position for rank, position in batch.needs.items())

    def _await(self, batch: _Batch) -> None:
        while not self._is_there(batch):
            self._blocked()

    def _blocked(self) -> None:
        """A source, itself filling, does not have what comes next. Wait for more."""
        for number, supply in enumerate(self._supplies):
            if supply.feed.is_full:
                continue
            before = list(self._there[number])
            for rank in range(len(before)):
                self._ask(number, rank)
            if self._there[number] != before:
                self._patience[number].reset()
                continue
            self._patience[number].wait(f"{supply.feed.replica!r} has no more of it than before")

    def _ask(self, number: int, rank: int) -> None:
        feed = self._supplies[number].feed
        word = self._intake.word(feed.shown[rank], self._deadline, partial(self._look, number))
        self._silence[number].reset()
        if word.mark != feed.mark:
            raise self._lost(number, rank, "it does not serve it any more")
        self._there[number][rank] = word.position

    def _place_of(self, agent: str) -> tuple[int, int]:
        """The supply and the rank there."""
        return next(
            (number, rank)
            for number, supply in enumerate(self._supplies)
            for rank, shown in enumerate(supply.feed.shown)
            if shown.agent == agent
        )

    def _lost(self, number: int, rank: int, reason: str) -> SourceLost:
        supply = self._supplies[number]
        done, total = self._progress.bytes_read, supply.plan.bytes_read
        return SourceLost(supply.feed.replica, f"rank {rank}: {reason}", done, total)

    # Staged

    def _read_staged(self, batch: _Batch) -> int:
        for group in batch.staged:
            self._silence[batch.supply].reset()
            perform(group.reads, self._deadline, still=lambda _: self._look(batch.supply))
            if batch.is_repeated:  # it must not be written over with what does not count
                for rank in sorted({piece.source_rank for _, piece in group.pieces}):
                    self._ask(batch.supply, rank)
            for offset, piece in group.pieces:
                copy_staged(group.staging[offset:], piece, self._memory[piece.target_chunk])
            if group.staging.is_cuda:  # the next ones overwrite what is copied from
                torch.cuda.current_stream(group.staging.device).synchronize()
        return sum(read.size_bytes for group in batch.staged for read in group.reads)


def _in_turns(batches: Sequence[_Batch]) -> list[Read]:
    """Their reads; of batches that follow each other, and have other sources, in turns."""
    reads: list[Read] = []
    for _, some in groupby(enumerate(batches), lambda each: each[0] - each[1].supply):
        rows = zip_longest(*(batch.reads for _, batch in some))
        reads += [read for row in rows for read in row if read is not None]
    return reads


def _room(piece: StagedCopy) -> int:
    return -(-piece.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _that_fit(
    pieces: Sequence[StagedCopy], staging_bytes: int
) -> Iterator[list[tuple[int, StagedCopy]]]:
    """Pieces that fit into staging together, with the aligned offset of each."""
    group: list[tuple[int, StagedCopy]] = []
    end = 0
    for piece in pieces:
        if group and end + _room(piece) > staging_bytes:
            yield group
            group, end = [], 0
        group.append((end, piece))
        end += _room(piece)
    if group:
        yield group
