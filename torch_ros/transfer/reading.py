"""Carries out read plans: posts the transfers, and asks at the right moments whether they count.

The steps are those of docs/PROTOCOL.md#reading.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, zip_longest
from typing import TypeVar

import numpy as np

from torch_ros.costs import HOST_COSTS, Costs
from torch_ros.deadline import Deadline
from torch_ros.errors import SourceLost, TransferFailed
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Transfer, Transport
from torch_ros.transfer.batches import STEP_BYTES, Batch, Preparation, close_batches
from torch_ros.transfer.feed import Arrivals, Feed, Following, Judge, Supply
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.posting import FLIGHT, TRANSFER_BYTES, Watcher, perform
from torch_ros.transfer.registered import Phase
from torch_ros.transfer.staging_buffers import Staging
from torch_ros.transfer.stall import SILENCE_S
from torch_ros.weights.manifest import Layout
from torch_ros.weights.plan import ReadPlan, plan

PLANS_MAX = 8  # kept; a plan of 70,000 chunks is some 10 MB
# Prepared batches are kept for the reads that an unchanged job needs at every step: in a burst each
# other rollout is a source at times. A span takes about half a KiB, and to prepare it takes ten
# times as long as to post it again.
PREPARED_MAX, PREPARED_SPANS_MAX, PREPARED_BATCHES_MAX = 16, 200_000, 20_000
STREAMED_MAX = 1024  # instead of 16: a stream makes a read of each buffer that it fills
# A slow source has the time of everything in flight at this speed: its word is answered behind it.
SLOW_BYTES_PER_S = 20e6
STEPS_FLIGHT = FLIGHT * TRANSFER_BYTES // STEP_BYTES  # transfers in flight that are short

# Key of prepared batches: by process its plan, agent, descriptor, addresses; and the target's.
_Key = tuple[tuple[tuple[int, str, bytes, tuple[int, ...]], ...], tuple[int, ...]]


class ReadingRoom:
    """A feature's own memory, into which it reads what sources show beside their tensors."""

    held_bytes: int = 0  # the size of the memory that there is; any thread may ask

    def __init__(self, transport: Transport, peers: Peers, pages: Pages) -> None:
        self.transport, self.peers, self.pages = transport, peers, pages

    def forget(self, agent: str | None = None) -> None:
        """End the reads from an agent, or all. None of their bytes lands after this."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the memory, until it is used again."""
        raise NotImplementedError


R = TypeVar("R", bound=ReadingRoom)


class Reading:
    """The reads of this process: its peers, plans, staging and prepared batches.

    One thread at a time. `staging_bytes` is the size of each device's buffer; `costs` are those
    of all peers, if the user knows better than their ways. Some reads stay prepared, for the next
    ones into the same memory; more of them if it `streams`.
    """

    def __init__(
        self,
        transport: Transport,
        staging_bytes: int,
        costs: Costs | None,
        pages: Pages,
        *,
        streams: bool = False,
    ) -> None:
        self._transport, self._pages, self._streams = transport, pages, streams
        self.peers: Peers = Peers(transport, self.forget)
        self._staging = Staging(transport, staging_bytes, pages)
        self._rooms: dict[type[ReadingRoom], ReadingRoom] = {}
        self._costs = costs
        self._plans: OrderedDict[tuple[Costs, tuple[str, ...]], ReadPlan] = OrderedDict()
        self._prepared: OrderedDict[_Key, tuple[Sequence[Supply], Sequence[Batch]]] = OrderedDict()

    @property
    def staging_bytes(self) -> int:
        """The size of the staging buffers that there are. Any thread may ask."""
        return self._staging.held_bytes + sum(room.held_bytes for room in [*self._rooms.values()])

    def beside(self) -> Reading:
        """Another, for a thread of its own, and the reads of streams."""
        size_bytes = self._staging.size_bytes
        return Reading(self._transport, size_bytes, self._costs, self._pages, streams=True)

    def room(self, kind: type[R]) -> R:
        """The one of that kind, made when it is first asked for."""
        room = self._rooms.get(kind) or kind(self._transport, self.peers, self._pages)
        assert isinstance(room, kind)
        self._rooms[kind] = room
        return room

    def close_rooms(self) -> None:
        for room in self._rooms.values():
            room.close()

    def costs(self, agents: Iterable[str]) -> Costs:
        """The costs of reads from these agents, which are connected."""
        return self._costs or self.peers.costs(agents)

    def plan(
        self, sources: Sequence[Layout], target: Layout, rank: int, costs: Costs = HOST_COSTS
    ) -> ReadPlan:
        """Plan how to fill `target` from `sources`. Plans are kept: layouts seldom change.

        Args:
            costs: Of the sources' ways, by `peers`.

        Raises: ManifestMismatch, UsageError: See `weights.plan.plan`.
        """
        costs = self._costs or costs
        key = (costs, (target.digest, *(layout.digest for layout in sources)))
        if key not in self._plans:
            self._plans[key] = plan(
                sources,
                target,
                staging_bytes=self._staging.size_bytes,
                target_rank=rank,
                costs=costs,
            )
            if len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def supply(self, feed: Feed, target: Layout, rank: int) -> Supply:
        """The feed, which is connected, with the plan of how to fill `target` from it."""
        costs = self.peers.costs([agent for agent, _ in feed.manifests])
        return Supply(self.plan(feed.layouts, target, rank, costs), feed)

    def read(
        self,
        supplies: Sequence[Supply],
        phase: Phase,
        progress: Arrivals,
        deadline: Deadline,
        counted: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Fill the missing blocks of `phase` as planned. Nothing is in flight when this ends.

        Args:
            supplies: One for each of the sources, which take turns.
            phase: The target of the plans; its memory is registered.
            counted: Called with the size in bytes of each batch that counts.

        Raises:
            SourceLost: A source is gone, or does not serve the call any more.
            DeadlineExceeded: Too slow.
        """
        done = progress.done[phase.blocks]
        if done.all():
            return
        reads = ReadPass(self.peers, supplies, phase, progress, deadline, counted)
        try:
            if done.any():  # the rest, after a source was lost
                preparation = Preparation(self.peers, self._staging, phase)
                batches = preparation.batches(supplies, np.flatnonzero(~done))
                try:
                    reads.perform(batches)
                finally:
                    close_batches(batches)
            else:
                reads.perform(self._all_batches(supplies, phase))
        except BaseException as error:
            self.forget()  # then nothing is in flight any more
            if isinstance(error, TransferFailed):
                self.peers.forget(error.agent)
                raise reads.lost(error) from error
            raise

    def _all_batches(self, supplies: Sequence[Supply], phase: Phase) -> Sequence[Batch]:
        """Prepare all of a phase. The batches are kept: the next step only posts them again."""
        sources = tuple(
            (id(supply.plan), agent, manifest.descriptor, manifest.addresses)
            for supply in supplies
            for agent, manifest in supply.feed.manifests
        )
        key = (sources, phase.addresses)
        if key not in self._prepared:
            everything = np.arange(phase.layout.blocks.total)
            batches = Preparation(self.peers, self._staging, phase).batches(supplies, everything)
            self._prepared[key] = supplies, batches  # the plans too: ids must not be used again
            while len(self._prepared) > 1 and self._keeps_too_much():
                _, (_, old) = self._prepared.popitem(last=False)
                close_batches(old)
        self._prepared.move_to_end(key)
        return self._prepared[key][1]

    def _keeps_too_much(self) -> bool:
        kept = self._prepared.values()
        spans = sum(supply.plan.span_count for all_, _ in kept for supply in all_)
        batches = sum(len(each) for _, each in kept)
        most = STREAMED_MAX if self._streams else PREPARED_MAX
        return len(kept) > most or spans > PREPARED_SPANS_MAX or batches > PREPARED_BATCHES_MAX

    def forget(self, agent: str | None = None) -> None:
        """Close the transfers from an agent, or all: before it, or their target, is let go."""
        for room in self._rooms.values():
            room.forget(agent)
        gone = [
            key
            for key in self._prepared
            if agent is None or agent in [source for _, source, _, _ in key[0]]
        ]
        close_batches([batch for key in gone for batch in self._prepared.pop(key)[1]])

    def close(self) -> None:
        """Let go of the staging memory. `peers` is closed by itself."""
        self.forget()
        self._staging.close()
        self.close_rooms()


class ReadPass(Watcher):
    """One pass of a read over its sources: follows each batch from its first byte to its count."""

    def __init__(
        self,
        peers: Peers,
        supplies: Sequence[Supply],
        phase: Phase,
        progress: Arrivals,
        deadline: Deadline,
        counted: Callable[[int], object],
    ) -> None:
        self._phase, self._progress = phase, progress
        self._deadline, self._counted = deadline, counted
        in_flight = min(FLIGHT * TRANSFER_BYTES, sum(tensor.nbytes for tensor in phase.memory))
        limit_s = SILENCE_S + in_flight / SLOW_BYTES_PER_S
        self._sources = [Following(peers, each, progress, deadline, limit_s) for each in supplies]
        self._judge = Judge()
        if len(supplies) == 1 and (judge := supplies[0].feed.source.judge) is not None:
            self._judge = judge(self._sources[0], progress)
        else:
            progress.tell_rate(0)  # nobody measures it here
        self._batch_of: dict[Transfer, Batch] = {}
        self._left: dict[Batch, int] = {}  # transfers of it that have not landed

    def perform(self, batches: Sequence[Batch]) -> None:
        """Read and count the batches, in order. Staged pieces are read while theirs is counted."""
        self._judge.begins(batches)
        self._left = {batch: len(batch.transfers) for batch in batches}
        self._batch_of = {each: batch for batch in batches for each in batch.transfers}
        waiting: list[Batch] = []
        for batch in batches:
            if batch.transfers:
                waiting.append(batch)
            else:  # only staged: all batches before it go first, so that all count in order
                self._post(waiting)
                waiting = []
                while not self._sources[batch.supply].has(batch.needs):
                    self.blocked()
                self._count_if_served([batch])
        self._post(waiting)

    def lost(self, error: TransferFailed) -> SourceLost:
        """Say of which source the process is that has failed, and how far the read is."""
        return next(
            source.lost(rank, error.reason)
            for source in self._sources
            for rank, state in enumerate(source.feed.states)
            if state.agent == error.agent
        )

    def _post(self, batches: Sequence[Batch]) -> None:
        flight = sum(FLIGHT if source.is_near else STEPS_FLIGHT for source in self._sources)
        most = len(self._sources) * FLIGHT * TRANSFER_BYTES
        perform(_in_turns(batches), self._deadline, self, flight=flight, flight_bytes=most)

    def may_post(self, transfer: Transfer) -> bool:
        batch = self._batch_of[transfer]
        return self._sources[batch.supply].has(batch.needs)

    def landed(self, transfers: Sequence[Transfer]) -> None:
        """Count the batches that are whole now: those of one source by one look at its words."""
        self._judge.lands(sum(each.size_bytes for each in transfers))
        ended: list[Batch] = []
        for batch in (self._batch_of[transfer] for transfer in transfers):
            self._sources[batch.supply].silence.reset()
            self._left[batch] -= 1
            if not self._left[batch]:
                ended.append(batch)
        for supply in sorted({batch.supply for batch in ended}):
            self._count_if_served([batch for batch in ended if batch.supply == supply])
        self._judge.landed(self._batch_of[transfers[-1]])

    def blocked(self) -> None:
        """Wait for the relays: the next blocks are not there yet."""
        for source in self._sources:
            if not source.feed.source.is_full:
                source.wait_for_more()
        self._judge.resumes()

    def still(self, flying: Sequence[Transfer]) -> None:
        """Note the silence of the sources of these transfers; no answer is due from the others."""
        if flying:
            self._judge.looks()
        waited_for = {self._batch_of[transfer].supply for transfer in flying}
        for number, source in enumerate(self._sources):
            if number in waited_for:
                source.look()
            else:
                source.silence.reset()

    def _count_if_served(self, batches: Sequence[Batch]) -> None:
        """Read the staged parts of batches of one source; count these if it serves them still.

        All their other bytes have landed, and a source changes its word before it writes again.
        Raises: SourceLost: It does not serve them any more; none of these counts.
        """
        source = self._sources[batches[0].supply]
        landed = [each for batch in batches for each in batch.transfers]
        for batch in batches:
            landed += self._read_staged(batch)
        bytes_read = sum(each.size_bytes for each in landed)
        for rank in sorted({rank for batch in batches for rank in batch.needs}):
            source.ask(rank)  # reads its word again, and raises if that has another mark
        source.feed.source.check()  # raises without a seat: another process may have it by now
        blocks = np.concatenate([batch.blocks for batch in batches])
        self._progress.add(self._phase.blocks[blocks], bytes_read)
        self._progress.note_ways(landed)
        self._counted(bytes_read)
        self._judge.counts(bytes_read)

    def _read_staged(self, batch: Batch) -> list[Transfer]:
        """Read the staged pieces of a batch through the buffer, group after group, to their places.
        Return the transfers, all of which have landed, for the counts.
        """
        source = self._sources[batch.supply]
        watcher = Watcher(source.look)
        for group in batch.staged:
            source.silence.reset()
            perform(group.transfers, self._deadline, watcher)
            if batch.is_repeated:  # bytes that do not count must not overwrite those that do
                for rank in sorted({piece.source_rank for _, piece in group.places}):
                    source.ask(rank)
            group.copy_out(self._phase.memory)
        return [transfer for group in batch.staged for transfer in group.transfers]


def _in_turns(batches: Sequence[Batch]) -> list[Transfer]:
    """Return their transfers. Neighbouring batches of different sources take turns."""
    transfers: list[Transfer] = []
    # Sources 0, 1, 2, 0, 1 are two groups: in each, the next batch is of the next source.
    for _, some in groupby(enumerate(batches), lambda each: each[0] - each[1].supply):
        rows = zip_longest(*(batch.transfers for _, batch in some))
        transfers += [each for row in rows for each in row if each is not None]
    return transfers
