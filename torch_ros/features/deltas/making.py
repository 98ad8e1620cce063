"""Deltas between a publisher's copies, for readers that have an older one.

docs/protocol/deltas.md#making-a-delta says why readers may believe them. A thread makes each,
between two saves, from two buffers of copies that nobody writes to meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torch_ros.allocation import allocating
from torch_ros.codec.delta import Changed, compare, encode
from torch_ros.codec.table import TABLE_BYTES, DeltaEntry, DeltaHead, DeltaTable, padded
from torch_ros.digests import digest_of
from torch_ros.p2p.lasting import LastingMemory
from torch_ros.printable import log_of
from torch_ros.transfer.posting import POLL_S
from torch_ros.transfer.registered import LocalState

log: logging.Logger = log_of(__name__)

# A chunk of which more has changed makes a delta that no reader would take. The fewest are encoded
# in 40 ms, for which a fill may have to wait.
CHANGED_SHARE, CHANGED_MIN = 1 / 16, 1 << 20

Outcome = Literal["made", "cut off", "too large", "failed"]


class RingRoom(NamedTuple):
    """Where a ring takes in the next delta."""

    start: int
    size_bytes: int

    def overlaps(self, start: int, end: int) -> bool:
        return start < self.start + self.size_bytes and self.start < end


class Ring:
    """The table, and the deltas that it lists: memory that is registered with the copies.

    Nobody waits for readers of it: `p2p.lasting` says why it stays mapped.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        with allocating("the memory that deltas are published from", size_bytes):
            self._lasting = LastingMemory(size_bytes)
        self.bytes: npt.NDArray[np.uint8] = self._lasting.bytes
        self.pool: torch.Tensor = torch.from_numpy(self.bytes)
        self.table = DeltaTable()
        self._made_bytes = 0  # of the last delta; of its room, if it was too large for that
        self.write(self.table)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def room(self) -> RingRoom:
        """The room of the next delta: behind the newest, if that fits, else at the beginning."""
        size = self.size_bytes - TABLE_BYTES
        if self._made_bytes:
            size = min(size, padded(2 * self._made_bytes))
        newest = self.table.entries[:1]
        start = max((self._span(each)[1] for each in newest), default=TABLE_BYTES)
        return RingRoom(start if start + size <= self.size_bytes else TABLE_BYTES, size)

    def outside(self, room: RingRoom) -> tuple[DeltaEntry, ...]:
        """The deltas that stay when one is written into that room."""
        return tuple(each for each in self.table.entries if not room.overlaps(*self._span(each)))

    def filled(self, size_bytes: int) -> None:
        """The last delta took so many bytes."""
        self._made_bytes = size_bytes

    def write(self, table: DeltaTable) -> None:
        self.table = table
        self.bytes[:TABLE_BYTES] = np.frombuffer(table.encode(), np.uint8)

    def close(self) -> None:
        """Nobody here writes to it any more."""
        self._lasting.close()

    def _span(self, entry: DeltaEntry) -> tuple[int, int]:
        start = entry.address - self.address
        return start, padded(start + entry.body_bytes + entry.head_bytes)


@dataclass(frozen=True, slots=True)
class PublishedCopy:
    """A copy that is held, or was, and its content's uid."""

    uid: str
    copy: LocalState


@dataclass(frozen=True, slots=True)
class PlannedDelta:
    """A delta that may be made when a save has ended well.

    Args:
        base: None: there is none, and no delta will be made.
        room: Chosen once for a save, however often that is offered: its readers may be at all that
            was listed beside it.
        entries: Those outside of the room.
    """

    version: int
    base: PublishedCopy | None
    copy: LocalState
    ring: Ring
    room: RingRoom
    entries: tuple[DeltaEntry, ...]
    entries_max: int

    def base_of(self, uid: str) -> PublishedCopy | None:
        """What a delta to this content leads from; none leads from a content to itself."""
        return self.base if self.base is not None and self.base.uid != uid else None


class _ToldToStop(Exception):
    pass


class _TooLarge(Exception):
    pass


class _Making:
    """One delta on its way. The table is the thread's until it has ended."""

    def __init__(self, planned: PlannedDelta, base: PublishedCopy, uid: str) -> None:
        self._planned, self._base, self._uid = planned, base, uid
        self.is_told_to_stop = False
        self.has_ended = False
        self.outcome: Outcome = "failed"
        self.size_bytes = 0
        self.elapsed_s = 0.0
        self._turns = [1]  # whoever takes it: the thread, or who ends it before it has begun

    def takes_turn(self) -> bool:
        """Whether this is the first to ask."""
        try:
            self._turns.pop()  # one operation: neither Ctrl-C nor another thread comes between
        except IndexError:
            return False
        return True

    def run(self, on_end: Callable[["_Making"], object]) -> None:
        if not self.takes_turn():
            return
        began_s, planned, entries = time.perf_counter(), self._planned, self._planned.entries
        try:
            made = self._made()
            self.outcome = "made"
            entries = (made, *entries)[: planned.entries_max]
        except _ToldToStop:
            self.outcome = "cut off"
        except _TooLarge:
            self.outcome = "too large"
        except Exception:
            log.exception("no delta to version %d: an error", planned.version)
        finally:
            if self.outcome in ("cut off", "too large"):
                log.info("no delta to version %d: %s", planned.version, self.outcome)
            try:
                self.elapsed_s = time.perf_counter() - began_s
                planned.ring.write(DeltaTable(entries))
                on_end(self)
            finally:
                self.has_ended = True

    def _made(self) -> DeltaEntry:
        planned = self._planned
        layout = planned.copy.layout
        indices, widths = [], []
        for older, newer in zip(self._base.copy.memory, planned.copy.memory, strict=True):
            changes = self._watched(compare(older, newer), newer.numel(), newer.element_size())
            index, gaps, values = encode(changes, item_bytes=newer.element_size())
            indices.append(index)
            widths.append(gaps.itemsize)
            self._put(gaps.view(np.uint8))
            self._put(values.view(np.uint8))
        rows = np.array([len(index) for index in indices], np.int64)
        whole = np.concatenate(indices) if indices else np.empty((0, 4), np.uint32)
        head = DeltaHead.of(layout, whole, rows, np.array(widths, np.int64))
        body_bytes, payload = self.size_bytes, head.encode()
        assert head.body_bytes == body_bytes
        self._put(np.frombuffer(payload, np.uint8))
        planned.ring.filled(self.size_bytes)
        log.info(
            "a delta of %d bytes to version %d: %d of %d elements have changed",
            self.size_bytes,
            planned.version,
            head.changed,
            sum(chunk.numel() for chunk in planned.copy.memory),
        )
        address = planned.ring.address + planned.room.start
        where = address, body_bytes, len(payload)
        return DeltaEntry(self._base.uid, self._uid, *where, digest_of(payload))

    def _watched(
        self, changes: Iterable[Changed], elements: int, item_bytes: int
    ) -> Iterator[Changed]:
        """The same, unless they become too many, or somebody wants the buffers."""
        left = self._planned.room.size_bytes - self.size_bytes
        fit = left // (1 + item_bytes)
        most, count = max(CHANGED_MIN, int(elements * CHANGED_SHARE)), 0
        self._look()
        for each in changes:
            count += len(each.places)
            if count > fit:
                self._give_up()
            if count > most:
                raise _TooLarge
            yield each
            self._look()

    def _look(self) -> None:
        if self.is_told_to_stop:
            raise _ToldToStop

    def _put(self, array: npt.NDArray[np.uint8]) -> None:
        room = self._planned.room
        start = room.start + self.size_bytes
        self.size_bytes += padded(array.nbytes)
        if self.size_bytes > room.size_bytes:
            self._give_up()
        self._planned.ring.bytes[start : start + array.nbytes] = array

    def _give_up(self) -> None:
        self._planned.ring.filled(self._planned.room.size_bytes)
        raise _TooLarge


class CopyDeltas:
    """The deltas of one process: at most one is being made.

    Args:
        on_end: Called when the making of one has ended, by the thread that made it, with the
            outcome, its bytes so far, and how many seconds it took.
    """

    def __init__(self, on_end: Callable[[Outcome, int, float], object] = lambda *_: None) -> None:
        self._on_end = on_end
        self._ring: Ring | None = None  # that is shown
        self._next: Ring | None = None  # that will be
        self._published: PublishedCopy | None = None
        self._making: _Making | None = None
        self._was_cut_off = False  # the last one: nobody waits for the next
        self._is_closed = False

    @property
    def size_bytes(self) -> int:
        """The size of the ring. Any thread may ask."""
        return sum(ring.size_bytes for ring in self._rings)

    @property
    def _rings(self) -> set[Ring]:
        return {ring for ring in (self._ring, self._next) if ring is not None}

    # The thread

    def stop(self) -> None:
        """Tell the thread to stop: no version that is offered has a use for its delta."""
        if (making := self._making) is not None:
            making.is_told_to_stop = True

    def end(self) -> None:
        """Have the thread ended, and nothing said to come. Afterwards buffers may be written to.

        It takes as long as the thread needs for 262,144 elements, or to encode the changes of one
        chunk. After Ctrl-C in it, call it again.
        """
        self.stop()
        if (making := self._making) is not None:
            if not making.takes_turn():
                while not making.has_ended:
                    time.sleep(POLL_S)
            self._making = None
        if self._ring is not None and self._ring.table.coming is not None:
            self._ring.write(DeltaTable(self._ring.table.entries))

    def start(self, planned: PlannedDelta | None, uid: str) -> None:
        """A call has ended well, that offered a copy as `uid`; make the delta. Does not raise."""
        base = planned.base_of(uid) if planned is not None else None
        if planned is None or base is None or self._is_closed:
            return
        self._making = making = _Making(planned, base, uid)
        run = threading.Thread(
            target=making.run, args=(self._ended,), name="torch_ros delta", daemon=True
        )
        try:
            run.start()
        except RuntimeError as error:  # no thread to be had
            log.warning("no delta to version %d: %s", planned.version, error)
            self.end()

    def _ended(self, making: _Making) -> None:
        self._was_cut_off = making.outcome == "cut off"
        self._on_end(making.outcome, making.size_bytes, making.elapsed_s)

    # What a save does, in this order

    def base(self, uid: str | None, copy: LocalState | None) -> PublishedCopy | None:
        """What is held where a save begins, if it was published from a copy that is there still."""
        known = self._published
        if known is None or known.uid != uid or known.copy is not copy:
            return None
        return known

    def prepare(self, size_bytes: int) -> torch.Tensor | None:
        """A ring of that size, to be registered with a copy; the one before stays until then."""
        shown, spare, self._next = self._ring, self._next, None
        for ring in (shown, spare):
            if ring is not None and ring.size_bytes == size_bytes:
                self._next = ring
        if spare is not None and spare not in (shown, self._next):
            spare.close()
        if self._next is None and size_bytes:
            self._next = Ring(size_bytes)
        return self._next.pool if self._next is not None else None

    def shown(
        self, base: PublishedCopy | None, copy: LocalState, version: int, entries_max: int
    ) -> PlannedDelta | None:
        """The copy is registered, and its ring; choose where its delta would be. The word is 0."""
        before, self._ring = self._ring, self._next
        if before is not None and before is not self._ring:
            before.close()
        if (ring := self._ring) is None:
            return None
        if base is not None and base.copy.layout != copy.layout:
            base = None
        room = ring.room() if base is not None else RingRoom(TABLE_BYTES, 0)
        return PlannedDelta(version, base, copy, ring, room, ring.outside(room), entries_max)

    def offer(self, planned: PlannedDelta | None, uid: str, *, is_made: bool) -> int:
        """Write the table of a content that is about to be served; its address, 0: there is none.

        Args:
            is_made: Whether the delta will be, if it can.
        """
        if planned is None:
            return 0
        base = planned.base_of(uid) if is_made and not self._was_cut_off else None
        planned.ring.write(DeltaTable(planned.entries, base.uid if base is not None else None))
        return planned.ring.address

    def published(self, uid: str, copy: LocalState) -> None:
        """This copy is held."""
        self._published = PublishedCopy(uid, copy)

    def forget(self) -> None:
        """The registered copy is about to be written to: it is no base any more."""
        self.end()
        self._published = None

    def close(self) -> None:
        """Nothing is shown any more, nor will be."""
        self._is_closed = True
        self.forget()
        for ring in self._rings:
            ring.close()
        self._ring = self._next = None
