"""Carries read plans out: what `weights` decided, with the reads that `p2p` offers.

What is read from a source counts once the source, asked after the bytes have landed, still serves
the same content. Everything here is about asking at the right moments: before a read, whether what
it is after is there; after it, whether it counts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.errors import SourceLost, TransferFailed
from torch_ros.exchange import EVERYTHING, Intake, Offer, Shown, close_all, perform
from torch_ros.p2p.transport import HOST, Read, Region, Registration, Transport
from torch_ros.store.run import Deadline
from torch_ros.weights.manifest import Layout, Manifest
from torch_ros.weights.plan import ReadPlan, StagedCopy, copy_staged, plan

PLANS_MAX = 8  # kept; a plan of 70,000 chunks is some 10 MB
PREPARED_MAX = 4  # plans kept with their reads: what an unchanged job needs at every step
ALIGNMENT_BYTES = 64
BATCH_BYTES = 64 << 20  # read between two questions whether it counts
POLL_S_MIN, POLL_S_MAX = 0.0002, 0.01  # between questions to a source that is filling itself
STALL_S = 1.0  # without progress, until the store is asked whether the source is there at all


class Progress:
    """How much of what this rank is filling is there, and told to its own readers."""

    def __init__(self, offer: Offer, chunks: int) -> None:
        self._offer, self._mark = offer, 0
        self.done: npt.NDArray[np.bool_] = np.zeros(chunks, np.bool_)
        self.bytes_read = 0
        self.added: Callable[[int], object] = lambda _: None
        """Called with the bytes of whatever is there from then on."""

    def serve(self, mark: int) -> None:
        """Say so from now on."""
        self._mark = mark
        self._tell()

    def add(self, chunks: npt.NDArray[np.int64], bytes_read: int) -> None:
        """These chunks are there, and count."""
        self.done[chunks] = True
        self.bytes_read += bytes_read
        self._tell()
        self.added(bytes_read)

    def _tell(self) -> None:
        is_all = bool(self.done.all())
        self._offer.serve(self._mark, EVERYTHING if is_all else int(np.argmin(self.done)))


@dataclass(frozen=True, slots=True)
class Feed:
    """The processes of a source, and how to ask the store whether it is still there."""

    replica: str
    mark: int
    is_full: bool
    shown: Sequence[Shown]
    is_there: Callable[[], bool]
    certify: Callable[[], None]
    """Returns once this process's own lease was certainly alive a moment ago; or raises."""

    @property
    def manifests(self) -> list[tuple[str, Manifest]]:
        return [(s.agent, s.manifest) for s in self.shown if s.manifest is not None]


def connect(
    intake: Intake,
    cards: Sequence[bytes],
    deadline: Deadline,
    *,
    replica: str,
    mark: int,
    is_full: bool,
    is_there: Callable[[], bool],
    certify: Callable[[], None],
) -> Feed:
    """Reach the processes of a source; wait for those of a relay that have not begun.

    Raises:
        SourceLost: One is gone, or serves something else.
    """
    shown = []
    for rank, card in enumerate(cards):
        patience = _Patience(replica, deadline, is_there)
        while True:
            try:
                now = intake.shown(card, deadline)
            except TransferFailed as error:
                intake.forget(error.agent)
                raise SourceLost(replica, f"rank {rank}: {error.reason}", 0, 0) from error
            if now.word.mark == mark and now.manifest is not None:
                shown.append(now)
                break
            if now.word.mark != mark and (is_full or now.word.mark):
                raise SourceLost(replica, f"rank {rank} does not serve it any more", 0, 0)
            patience.wait(f"rank {rank} of {replica!r} does not show it yet")
    return Feed(replica, mark, is_full, shown, is_there, certify)


class _Patience:
    """Waiting for a source that is filling itself."""

    def __init__(self, replica: str, deadline: Deadline, is_there: Callable[[], bool]) -> None:
        self._replica, self._deadline, self._is_there = replica, deadline, is_there
        self.reset()

    def reset(self) -> None:
        self._pause_s, self._looked_s = POLL_S_MIN, time.monotonic()

    def wait(self, reason: str) -> None:
        self._deadline.check(reason)
        if time.monotonic() - self._looked_s > STALL_S:
            if not self._is_there():
                raise SourceLost(self._replica, f"it is gone, and {reason}", 0, 0)
            self._looked_s = time.monotonic()
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, POLL_S_MAX)


class Reading:
    """Plans, and the staging buffer that short strided runs go through. One thread at a time."""

    def __init__(self, transport: Transport, intake: Intake, staging_bytes: int) -> None:
        self.intake = intake
        self._transport, self._staging_bytes = transport, staging_bytes
        self._plans: OrderedDict[tuple[str, ...], ReadPlan] = OrderedDict()
        self._staging: dict[torch.device, tuple[torch.Tensor, Registration]] = {}
        self._prepared: OrderedDict[_Key, tuple[ReadPlan, Sequence[_Batch]]] = OrderedDict()
        intake.before_forget = self.forget

    def prepared(
        self, plan: ReadPlan, feed: Feed, memory: Sequence[torch.Tensor]
    ) -> Sequence[_Batch]:
        """All of a plan, with its reads; kept, so that the next step only posts them again."""
        sources = tuple(
            (agent, manifest.descriptor, manifest.addresses) for agent, manifest in feed.manifests
        )
        key = (id(plan), sources, tuple(tensor.data_ptr() for tensor in memory))
        if key not in self._prepared:
            missing = np.arange(len(memory))
            batches = list(_batches(self.intake, plan, feed, memory, missing))
            self._prepared[key] = plan, batches  # the plan too: its id must not be used again
            if len(self._prepared) > PREPARED_MAX:
                _, (_, old) = self._prepared.popitem(last=False)
                close_batches(old)
        self._prepared.move_to_end(key)
        return self._prepared[key][1]

    def forget(self, agent: str | None = None) -> None:
        """Give up the reads from an agent, or all: before it, or what they fill, is let go."""
        for key in list(self._prepared):
            if agent is None or agent in [source for source, _, _ in key[1]]:
                _, batches = self._prepared.pop(key)
                close_batches(batches)

    def plan(self, sources: Sequence[Layout], target: Layout, rank: int) -> ReadPlan:
        """How to fill `target` from `sources`; kept, since layouts seldom change.

        Raises: ManifestMismatch, UsageError: See `weights.plan.plan`.
        """
        key = (target.digest, *(layout.digest for layout in sources))
        if key not in self._plans:
            made = plan(sources, target, staging_bytes=self._staging_bytes, target_rank=rank)
            self._plans[key] = made
            if len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def read(
        self,
        plan: ReadPlan,
        feed: Feed,
        memory: Sequence[torch.Tensor],
        chunks: npt.NDArray[np.int64],
        progress: Progress,
        deadline: Deadline,
    ) -> None:
        """Fill what is missing of `memory` as planned. Nothing is in flight any more at its end.

        Args:
            memory: Of each chunk of the plan's target; registered.
            chunks: The numbers that `progress` has for these chunks.

        Raises:
            SourceLost: The source is gone, or does not serve the call any more.
            DeadlineExceeded: Too slow.
        """
        _Run(self, plan, feed, memory, chunks, progress, deadline).run()

    def staging_on(self, device: torch.device, wanted_bytes: int) -> torch.Tensor:
        """A registered buffer, kept for the next time; never larger than `staging_bytes` asks."""
        size_bytes = min(wanted_bytes, self._staging_bytes + ALIGNMENT_BYTES)
        kept = self._staging.get(device)
        if kept is not None and kept[0].numel() >= size_bytes:
            return kept[0]
        if kept is not None:
            kept[1].close()
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        region = Region(buffer.data_ptr(), size_bytes, device.index if buffer.is_cuda else HOST)
        self._staging[device] = (buffer, self._transport.register([region]))
        return buffer

    def close(self) -> None:
        self.forget()
        for _, registration in self._staging.values():
            registration.close()
        self._staging.clear()


_Key = tuple[int, tuple[tuple[str, bytes, tuple[int, ...]], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Target chunks that are read, and begin to count, together."""

    chunks: npt.NDArray[np.int64]
    needs: Mapping[int, int]  # source rank -> how many of its chunks have to be there
    reads: Sequence[Read]
    staged: Sequence[StagedCopy]


def close_batches(batches: Sequence[_Batch]) -> None:
    for batch in batches:
        close_all(batch.reads)


def _batches(
    intake: Intake,
    plan: ReadPlan,
    feed: Feed,
    memory: Sequence[torch.Tensor],
    missing: npt.NDArray[np.int64],
) -> Iterator[_Batch]:
    """What fills the target chunks `missing`, in their order. The caller closes the reads."""
    direct, staged = plan.direct, plan.staged
    staged_of = [piece.target_chunk for piece in staged]
    bytes_of = np.zeros(len(memory), np.int64)
    np.add.at(bytes_of, direct.target_chunk, direct.size_bytes)
    np.add.at(bytes_of, staged_of, [piece.size_bytes for piece in staged])
    numbers = np.full(len(memory), -1, np.int64)
    ends = np.cumsum(bytes_of[missing])
    numbers[missing] = (ends - bytes_of[missing]) // BATCH_BYTES
    # Both are sorted by target chunk, so that each batch is a slice of what is missing.
    spans = np.flatnonzero(numbers[direct.target_chunk] >= 0)
    pieces = [piece for piece in staged if numbers[piece.target_chunk] >= 0]
    span_numbers = numbers[direct.target_chunk[spans]]
    piece_numbers = numbers[[piece.target_chunk for piece in pieces]]
    for number in np.unique(numbers[missing]).tolist():
        mine = spans[slice(*np.searchsorted(span_numbers, [number, number + 1]))]
        some = pieces[slice(*np.searchsorted(piece_numbers, [number, number + 1]))]
        needs = dict.fromkeys(np.unique(direct.source_rank[mine]).tolist(), 0)
        for rank in needs:
            of_rank = direct.source_rank[mine] == rank
            needs[rank] = int(direct.source_chunk[mine][of_rank].max()) + 1
        for piece in some:
            needs[piece.source_rank] = max(needs.get(piece.source_rank, 0), piece.source_chunk + 1)
        chunks = missing[numbers[missing] == number]
        yield _Batch(chunks, needs, _prepare(intake, plan.only(mine), feed, memory), some)


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
    is_tied = len({chunk.data_ptr() for chunk in memory}) < len(memory)
    reads: list[Read] = []
    try:
        for route, rows in routes.items():
            reads += intake.prepare(
                *manifests[route.source_rank],
                # Tied at both ends: once is enough.
                np.unique(rows, axis=0) if is_tied else rows,
                source_device=route.source_device,
                target_device=route.target_device,
            )
    except BaseException:
        close_all(reads)
        raise
    return reads


class _Run:
    """One plan, carried out once."""

    def __init__(
        self,
        reading: Reading,
        plan: ReadPlan,
        feed: Feed,
        memory: Sequence[torch.Tensor],
        chunks: npt.NDArray[np.int64],
        progress: Progress,
        deadline: Deadline,
    ) -> None:
        self._reading, self._intake = reading, reading.intake
        self._plan, self._feed, self._memory, self._chunks = plan, feed, memory, chunks
        self._progress, self._deadline = progress, deadline
        self._patience = _Patience(feed.replica, deadline, feed.is_there)
        start = EVERYTHING if feed.is_full else 0
        self._there = [start] * len(feed.shown)  # by source rank, when it was last asked
        self._batch_of: dict[Read, _Batch] = {}
        self._reads_left: dict[_Batch, int] = {}

    def run(self) -> None:
        done = self._progress.done[self._chunks]
        if done.all():
            return
        try:
            if done.any():  # what a source that was lost has left to do
                missing = np.flatnonzero(~done)
                args = (self._intake, self._plan, self._feed, self._memory, missing)
                batches: Sequence[_Batch] = list(_batches(*args))
                try:
                    self._perform(batches)
                finally:
                    close_batches(batches)
            else:
                self._perform(self._reading.prepared(self._plan, self._feed, self._memory))
        except BaseException as error:
            self._reading.forget()  # what is still in flight has ended then
            if isinstance(error, TransferFailed):
                agents = [shown.agent for shown in self._feed.shown]
                self._intake.forget(error.agent)
                raise self._lost(agents.index(error.agent), error.reason) from error
            raise

    def _perform(self, batches: Sequence[_Batch]) -> None:
        self._reads_left = {batch: len(batch.reads) for batch in batches}
        self._batch_of = {read: batch for batch in batches for read in batch.reads}
        reads: list[Read] = []
        for batch in batches:
            reads += batch.reads
            if not batch.reads:  # staged only: what comes before it first
                self._post(reads)
                reads = []
                self._await(batch)
                self._end(batch)
        self._post(reads)

    def _post(self, reads: Sequence[Read]) -> None:
        perform(
            reads,
            self._deadline,
            may_post=lambda read: self._is_there(self._batch_of[read]),
            landed=self._landed,
            blocked=self._blocked,
        )

    def _landed(self, read: Read) -> None:
        batch = self._batch_of[read]
        self._reads_left[batch] -= 1
        if not self._reads_left[batch]:
            self._end(batch)

    def _end(self, batch: _Batch) -> None:
        """The direct reads of a batch have landed. The rest of it; then see whether it counts."""
        bytes_read = sum(read.size_bytes for read in batch.reads)
        if batch.staged:
            bytes_read += self._read_staged(batch)
        for rank in batch.needs:
            self._ask(rank)
        self._feed.certify()
        self._progress.add(self._chunks[batch.chunks], bytes_read)

    def _is_there(self, batch: _Batch) -> bool:
        return all(self._there[rank] >= position for rank, position in batch.needs.items())

    def _await(self, batch: _Batch) -> None:
        while not self._is_there(batch):
            self._blocked()

    def _blocked(self) -> None:
        """The source, itself filling, does not have what comes next. Wait for more."""
        before = list(self._there)
        for rank in range(len(self._there)):
            self._ask(rank)
        if self._there != before:
            self._patience.reset()
            return
        self._feed.certify()
        self._patience.wait(f"{self._feed.replica!r} has no more of it than before")

    def _ask(self, rank: int) -> None:
        word = self._intake.word(self._feed.shown[rank], self._deadline)
        if word.mark != self._feed.mark:
            raise self._lost(rank, "it does not serve it any more")
        self._there[rank] = word.position

    def _lost(self, rank: int, reason: str) -> SourceLost:
        done, total = self._progress.bytes_read, self._plan.bytes_read
        return SourceLost(self._feed.replica, f"rank {rank}: {reason}", done, total)

    # Staged

    def _read_staged(self, batch: _Batch) -> int:
        memory, bytes_read = self._memory, 0
        for device in sorted({memory[s.target_chunk].device for s in batch.staged}, key=str):
            pieces = [s for s in batch.staged if memory[s.target_chunk].device == device]
            staging = self._reading.staging_on(device, sum(map(_room, pieces)))
            for group in _that_fit(pieces, staging.numel()):
                bytes_read += self._read_into(group, staging)
                for offset, piece in group:
                    copy_staged(staging[offset:], piece, memory[piece.target_chunk])
                if device.type == "cuda":  # the next ones overwrite what is copied from
                    torch.cuda.current_stream(device).synchronize()
        return bytes_read

    def _read_into(self, group: Sequence[tuple[int, StagedCopy]], staging: torch.Tensor) -> int:
        manifests = self._feed.manifests
        routes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for offset, piece in group:
            manifest = manifests[piece.source_rank][1]
            source = manifest.addresses[piece.source_chunk] + piece.source_offset_bytes
            route = (piece.source_rank, manifest.devices[piece.source_chunk])
            span = (source, staging.data_ptr() + offset, piece.size_bytes)
            routes.setdefault(route, []).append(span)
        target_device = staging.get_device() if staging.is_cuda else HOST
        reads: list[Read] = []
        try:
            for (rank, source_device), spans in routes.items():
                reads += self._intake.prepare(
                    *manifests[rank],
                    np.array(spans, np.uint64),
                    source_device=source_device,
                    target_device=target_device,
                )
            perform(reads, self._deadline)
            return sum(read.size_bytes for read in reads)
        finally:
            close_all(reads)


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
