"""Fetches versions into host memory, for a replica that goes on with what it has meanwhile.

docs/protocol/seeding.md. It is a replica of its own, of the same processes; each rank's part of
it is moved by a thread, by calls that stand in the same order in the updates of all ranks.
"""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch

from torch_ros.copies.room import available_bytes, ranks_here
from torch_ros.deadline import Deadline
from torch_ros.errors import (
    BackendError,
    ClosedError,
    DeadlineExceeded,
    ManifestMismatch,
    SeatLost,
    UsageError,
)
from torch_ros.features.seeding.fetching import fetch_version
from torch_ros.features.seeding.rules import await_spare, spare_ranges
from torch_ros.p2p.lasting import LastingMemory
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.group import GroupTask
from torch_ros.protocol.keys import family
from torch_ros.protocol.outage import Patience
from torch_ros.protocol.records import Asked, Outcome, VersionRef
from torch_ros.protocol.seat import recorded
from torch_ros.shard.beside import Bell
from torch_ros.shard.collective import collectively, end_for_peers
from torch_ros.shard.core import Shard
from torch_ros.shard.seams import Feature
from torch_ros.transfer.registered import LocalState
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.weights.local import LocalChunk, LocalTensor
from torch_ros.weights.manifest import Layout, dtype_named

log: logging.Logger = log_of(__name__)

STUCK_S = 120.0  # without a batch, after which others shall have their turn; slow links need 60 s
REST_S = 10.0  # after a failure, in which others may be luckier
RETRY_S = 0.5
LOOK_S = 2.0  # who waits looks this often, whatever he heard
CLOSE_S = 5.0  # a wait for the store looks at least every 2 s whether its handle is closed


@dataclass(frozen=True, slots=True)
class Order:
    """A version that all ranks have agreed to have fetched."""

    ref: VersionRef
    layout: Layout  # of this rank's part
    nonce: str  # of the forerunner, should it have to be opened; the same on all ranks


class Room:
    """Host memory for one rank's part of a version, until `close`."""

    def __init__(self, layout: Layout) -> None:
        records = [layout.tensors[chunk.tensor] for chunk in layout.chunks]
        dtypes = [dtype_named(record.dtype) for record in records]
        sizes = [
            math.prod(chunk.sizes) * dtype.itemsize
            for chunk, dtype in zip(layout.chunks, dtypes, strict=True)
        ]
        ends = [0, *itertools.accumulate(map(aligned, sizes))]
        self.size_bytes: int = ends[-1]
        self._memory = LastingMemory(ends[-1])  # peers may ask for it late
        room = torch.from_numpy(self._memory.bytes)
        chunks: dict[int, list[LocalChunk]] = {n: [] for n in range(len(layout.tensors))}
        for chunk, dtype, start, size in zip(layout.chunks, dtypes, ends, sizes, strict=False):
            tensor = room[start : start + size].view(dtype).view(chunk.sizes)
            chunks[chunk.tensor].append(LocalChunk(chunk.offsets, tensor))
        spread = {chunk.tensor for chunk in layout.chunks if chunk.spread}
        self.state: LocalState = LocalState(
            [
                LocalTensor(
                    record.fqn,
                    dtype_named(record.dtype),
                    record.shape,
                    tuple(chunks[number]),
                    spread=number in spread,
                )
                for number, record in enumerate(layout.tensors)
            ],
            {},
            {},
        )

    def close(self) -> None:
        self._memory.close()


class Forerunner(Feature):
    """One rank's part of it: a thread from the first order on, and a handle of its own.

    Args:
        shard: The replica's.
        open_: Takes the seat, with a nonce; reads by it tell the function how far they are.
        bytes_max: Of host memory, on this rank; None: what the host has.
    """

    def __init__(
        self,
        shard: Shard,
        open_: Callable[[str, Deadline, Callable[[int, int], object]], Shard],
        bytes_max: int | None,
    ) -> None:
        self._of, self._open, self._bytes_max = shard, open_, bytes_max
        self._orders = deque[Order]()
        self._news = Bell()
        self._is_busy = self._is_closed = False
        self._rests_until_s = 0.0
        self._unfit: tuple[VersionRef, ManifestMismatch] | None = None
        self._began_s = self._moved_s = 0.0  # the fetch under way; when a batch of it came
        self._has_all = False
        self._shard: Shard | None = None
        self._room: Room | None = None
        self._thread: threading.Thread | None = None
        shard.attach(self)
        shard.observed.staged["forerunner"] = lambda: room.size_bytes if (room := self._room) else 0

    # Called by the replica

    @property
    def is_idle(self) -> bool:
        """Whether it would begin now with what it is told to fetch."""
        is_at_rest = time.monotonic() >= self._rests_until_s
        return not (self._orders or self._is_busy) and is_at_rest

    def fetch(self, ref: VersionRef, deadline: Deadline) -> None:
        """Have a version fetched, by all ranks, once all have the memory. Does not wait for it.

        Raises: UsageError: A rank has not. The same on all ranks, and nothing is fetched.
        """
        shard, asked = self._of, self._of.asked.check
        registered = shard.tensors.require(deadline.what)
        number = 0

        def check(call: GroupCall) -> None:
            nonlocal number
            self._require_room(registered.bytes_total)
            call.decide((), recorded)
            call.finish("", lambda _: call.complete(Outcome()))
            number = call.number

        if shard.is_alone:
            self._require_room(registered.bytes_total)
        else:
            shard.make(GroupTask("agree", asked, deadline, check))
        self._orders.append(Order(ref, registered.layout, self._nonce(number)))
        if self._thread is None:
            name = f"torch_ros fetches for {shard.group.seat.replica}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._news.ring()

    def require_fit(self, ref: VersionRef) -> None:
        """Raises: ManifestMismatch: It was to be fetched before, and is not for these tensors."""
        if self._unfit is not None and self._unfit[0] == ref:
            raise self._unfit[1]

    def _nonce(self, number: int) -> str:
        """A name for its start that all ranks know, and no other start has."""
        seat = self._of.group.seat
        if seat.world_size == 1:
            return ""
        return blake2b(f"{family(seat.nonce)}/{number}".encode(), digest_size=4).hexdigest()

    def _require_room(self, size_bytes: int) -> None:
        seat = self._of.group.seat
        limit, there = "and seeding_bytes allows", self._bytes_max or 0.0
        if self._bytes_max is None:
            size_bytes, there = size_bytes * ranks_here(seat.world_size), available_bytes()
            limit = "with its peers here, and this host has"
        if size_bytes > there:
            raise UsageError(
                f"seeding='host': rank {seat.rank} needs {size_bytes} bytes of host memory for a "
                f"copy, {limit} {there}; set seeding_bytes, or use seeding='foreground'"
            )

    def closes(self) -> None:
        """End it; what it has is offered no more."""
        self._is_closed = True
        self._news.ring()
        if self._shard is not None:
            self._shard.close(0.0)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # Its thread

    def _run(self) -> None:
        while not self._is_closed:
            latch = self._news.latch
            self._is_busy = bool(self._orders)
            try:
                if self._orders:
                    self._obey(self._orders.popleft())
                elif self._room is not None:
                    self._await_spare()
                    self._release()
                else:
                    latch.wait(LOOK_S)
            except _Interrupted:
                pass
            except Exception as error:  # noqa: BLE001  # updates wait for what it does next
                if not self._is_closed:
                    log.warning("%r: its forerunner: %s", self._of, error)
                    self._rests_until_s = time.monotonic() + REST_S
                    latch.wait(RETRY_S)
        self._let_go()

    def _obey(self, order: Order) -> None:
        self._release()
        shard, asked = self._seated(order), Asked("fetch", order.ref.version)
        try:
            self._room = Room(order.layout)
            shard.tensors.show(self._room.state)
        except (BackendError, MemoryError, OSError, RuntimeError) as error:
            self._let_go()
            # Its peers are in that call, or will be, and would wait until it seems stuck.
            shard.busy(partial(end_for_peers, shard, asked, error), is_member=False)
            raise
        self._began_s = self._moved_s = time.monotonic()
        self._has_all = False
        moves = partial(self._check_moves, asked)
        deadline = Deadline(f"{asked}", math.inf, check_open=moves)
        fetch = partial(fetch_version, shard, order.ref, asked, deadline)
        is_there = False
        try:
            is_there = collectively(shard, asked, lambda _: fetch())
        except ManifestMismatch as error:
            self._unfit = order.ref, error
            raise
        finally:
            if not is_there and shard.held is None:
                self._let_go()

    def _seated(self, order: Order) -> Shard:
        """Its handle; another one, if that was lost for good."""
        shard = self._shard
        if shard is not None and shard.state in ("gone", "closed"):
            self._shard = None
            shard.close(0.0)
        if self._shard is None:
            deadline = Deadline(
                f"open the forerunner of {self._of!r}",
                self._of.settings.timeout_s,
                check_open=self._check_open,
            )
            self._shard = self._open(order.nonce, deadline, self._note_progress)
            if self._is_closed:  # which `close` may not have seen
                self._shard.close(0.0)
                self._check_open()
        return self._shard

    def _await_spare(self) -> None:
        """Wait until nobody needs what is here, or something is ordered."""
        shard = self._shard
        assert shard is not None
        group, forever = shard.group, Deadline("", math.inf, check_open=self._check_orders)
        while (ref := shard.held) is not None and shard.state != "gone":
            seat, session = group.seat, group.session
            rule = partial(await_spare, seat=seat, ref=ref)
            try:
                group.ask(spare_ranges(seat, ref), rule, forever)
            except SeatLost as lost:
                group.fence(lost, session)
                group.await_seat(forever, Patience(peers_s=math.inf))
            except BackendError:
                group.pause()
            else:
                return

    def _release(self) -> None:
        """Give up what is here, once nobody reads it."""
        shard = self._shard
        if shard is None or self._room is None:
            return
        asked = Asked("release")
        deadline = Deadline(f"{asked}", math.inf, check_open=self._check_open)
        if shard.state != "gone":
            collectively(shard, asked, lambda _: shard.unpublish(deadline))
        self._let_go()

    def _let_go(self) -> None:
        """Free the memory, which nobody is offered."""
        room, self._room = self._room, None
        if self._shard is not None:
            self._shard.word.void()
            with suppress(Exception):  # its transport has ended
                self._shard.tensors.withdraw()
        if room is not None:
            room.close()
            log.info("%r: its forerunner's copy is released", self._of)

    # Whether it goes on

    def _note_progress(self, done: int, total: int) -> None:
        self._moved_s, self._has_all = time.monotonic(), done >= total

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self._of!r} is closed")

    def _check_orders(self) -> None:
        self._check_open()
        if self._orders:
            raise _Interrupted

    def _check_moves(self, asked: Asked) -> None:
        """Raise if it is stuck, for as long as its peers may need that have as much to read."""
        self._check_open()
        limit_s = STUCK_S + (self._moved_s - self._began_s if self._has_all else 0.0)
        if time.monotonic() - self._moved_s > limit_s:
            raise DeadlineExceeded(f"{asked}", limit_s, "nothing came in that time")


class _Interrupted(Exception):
    pass
