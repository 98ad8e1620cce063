"""Carries a read plan out: what `weights` decided, with the reads that `p2p` offers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from torch_ros.exchange import Intake, close_all, perform
from torch_ros.p2p.transport import HOST, Region, Registration, Transport
from torch_ros.store.run import Deadline
from torch_ros.weights.manifest import Layout, Manifest
from torch_ros.weights.plan import ReadPlan, StagedCopy, copy_staged, plan

PLANS_MAX = 8  # kept; a plan of 70,000 chunks is some 10 MB
ALIGNMENT_BYTES = 64


class Reading:
    """Plans, and the staging buffer that short strided runs go through. One thread at a time."""

    def __init__(self, transport: Transport, intake: Intake, staging_bytes: int) -> None:
        self._transport, self._intake, self._staging_bytes = transport, intake, staging_bytes
        self._plans: OrderedDict[tuple[str, ...], ReadPlan] = OrderedDict()
        self._staging: dict[torch.device, tuple[torch.Tensor, Registration]] = {}

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
        shown: Sequence[tuple[str, Manifest]],
        memory: Sequence[torch.Tensor],
        deadline: Deadline,
        *,
        check: Callable[[], None],
        done: Callable[[int], None],
    ) -> None:
        """Fill `memory` as planned. When this returns or raises, nothing is in flight any more.

        Args:
            shown: Agent and manifest of each source rank, connected by the intake.
            memory: Of each chunk of the plan's target; registered.
            check: Called between reads; raises to stop.
            done: Called with the bytes of each read that has landed.

        Raises:
            TransferFailed: A source is gone.
            DeadlineExceeded: Too slow.
        """
        routes = plan.bind(
            [manifest.addresses for _, manifest in shown],
            [chunk.data_ptr() for chunk in memory],
            source_devices=[manifest.devices for _, manifest in shown],
            target_devices=[chunk.get_device() if chunk.is_cuda else HOST for chunk in memory],
        )
        is_tied = len({chunk.data_ptr() for chunk in memory}) < len(memory)
        reads = []
        try:
            for route, spans in routes.items():
                reads += self._intake.prepare(
                    *shown[route.source_rank],
                    # Tied at both ends: once is enough.
                    np.unique(spans, axis=0) if is_tied else spans,
                    source_device=route.source_device,
                    target_device=route.target_device,
                )
            perform(reads, deadline, check=check, done=done)
        finally:
            close_all(reads)
        for device in sorted({memory[s.target_chunk].device for s in plan.staged}, key=str):
            pieces = [s for s in plan.staged if memory[s.target_chunk].device == device]
            staging = self._staging_on(device, sum(map(_room, pieces)))
            for batch in _batches(pieces, staging.numel()):
                self._read_staged(batch, staging, shown, deadline, check, done)
                for offset, piece in batch:
                    copy_staged(staging[offset:], piece, memory[piece.target_chunk])
                if device.type == "cuda":  # the next batch overwrites what is copied from
                    torch.cuda.current_stream(device).synchronize()

    def _read_staged(
        self,
        batch: Sequence[tuple[int, StagedCopy]],
        staging: torch.Tensor,
        shown: Sequence[tuple[str, Manifest]],
        deadline: Deadline,
        check: Callable[[], None],
        done: Callable[[int], None],
    ) -> None:
        routes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for offset, piece in batch:
            manifest = shown[piece.source_rank][1]
            source = manifest.addresses[piece.source_chunk] + piece.source_offset_bytes
            route = (piece.source_rank, manifest.devices[piece.source_chunk])
            span = (source, staging.data_ptr() + offset, piece.size_bytes)
            routes.setdefault(route, []).append(span)
        target_device = staging.get_device() if staging.is_cuda else HOST
        reads = []
        try:
            for (rank, source_device), spans in routes.items():
                reads += self._intake.prepare(
                    *shown[rank],
                    np.array(spans, np.uint64),
                    source_device=source_device,
                    target_device=target_device,
                )
            perform(reads, deadline, check=check, done=done)
        finally:
            close_all(reads)

    def _staging_on(self, device: torch.device, wanted_bytes: int) -> torch.Tensor:
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
        for _, registration in self._staging.values():
            registration.close()
        self._staging.clear()


def _room(piece: StagedCopy) -> int:
    return -(-piece.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _batches(
    pieces: Sequence[StagedCopy], staging_bytes: int
) -> Iterator[list[tuple[int, StagedCopy]]]:
    """Pieces that fit into staging together, with the aligned offset of each."""
    batch: list[tuple[int, StagedCopy]] = []
    end = 0
    for piece in pieces:
        if batch and end + _room(piece) > staging_bytes:
            yield batch
            batch, end = [], 0
        batch.append((end, piece))
        end += _room(piece)
    if batch:
        yield batch
