"""Copies of versions in host memory, that outlive the tensors they were made from."""

import itertools
import logging
import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from torch_ros.allocation import allocating
from torch_ros.copies.room import available_bytes, ranks_here
from torch_ros.deadline import Deadline, wall_ms
from torch_ros.errors import BackendError, ClosedError, SeatLost
from torch_ros.features.retention.copying import CopiedPart, copying, releasing
from torch_ros.p2p.lasting import LastingMemory
from torch_ros.p2p.pages import Pages
from torch_ros.p2p.transport import Transport
from torch_ros.printable import log_of
from torch_ros.protocol.group import Group
from torch_ros.protocol.keys import copy_of
from torch_ros.protocol.outage import Patience
from torch_ros.protocol.records import Kept, mark
from torch_ros.protocol.seat import Seat
from torch_ros.shard.core import shard_of
from torch_ros.spans import HOST, Region
from torch_ros.store.run import Reminder
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.transfer.mailbox import Digests, Mailbox
from torch_ros.transfer.registered import LocalState
from torch_ros.transfer.staging_buffers import aligned
from torch_ros.weights.local import copy_bits, packed
from torch_ros.weights.manifest import Layout

log: logging.Logger = log_of(__name__)

CLOSE_S = 5.0  # a wait for the store looks at least every 2 s whether its handle is closed


class HostCopy:
    """One rank's part: contiguous chunks, shown in a mailbox of their own, until `close`.

    The tensors that it is made from are free when this returns.

    Args:
        memory: Of each chunk of `layout`.
        call: The number of the call that gives the version up, which stands in the mark.
    """

    kept: Kept
    call: int

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        memory: Sequence[torch.Tensor],
        kept: Kept,
        call: int,
        digests: Digests,
        pages: Pages,
    ) -> None:
        self.kept, self.call = kept, call
        ends = [0, *itertools.accumulate(aligned(tensor.nbytes) for tensor in memory)]
        self.size_bytes: int = ends[-1]
        with ExitStack() as undo:  # lasting memory is only unmapped by its `close`
            with allocating("a copy of what is unpublished", ends[-1]):
                self._memory = LastingMemory(ends[-1])
            undo.callback(self._memory.close)
            room = torch.from_numpy(self._memory.bytes)
            self._chunks = [
                room[start : start + t.nbytes].view(t.dtype).view(t.shape)
                for start, t in zip(ends, memory, strict=False)
            ]
            regions = [Region(room.data_ptr(), room.nbytes)] if room.nbytes else []
            pages.ask(regions)
            for chunk, tensor in zip(self._chunks, memory, strict=True):
                copy_bits(chunk, tensor)
            addresses = [room.data_ptr() + start for start in ends[:-1]]
            self.mailbox: Mailbox = Mailbox(transport)
            undo.callback(self.mailbox.close)
            self.mailbox.show(packed(layout), addresses, [HOST] * len(addresses), regions)
            self.mailbox.show_digests(digests)
            self.mailbox.serve(mark(kept.ref.uid, call), ALL_BLOCKS)
            undo.pop_all()

    def close(self) -> None:
        self.mailbox.close()
        self._chunks.clear()
        self._memory.close()


def _require_room(needed_bytes: int) -> None:
    """Refuse what the kernel would only refuse by ending the process, in the middle of the copy.

    Raises: MemoryError: This host, or a cgroup of this process, has too little.
    """
    free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        needed, free = needed_bytes / 1e9, free_bytes / 1e9
        raise MemoryError(f"a copy takes {needed:.1f} GB of host memory, and {free:.1f} are free")


class Copies:
    """The copies that one rank has made, each with the thread that offers it while it is needed."""

    def __init__(self, group: Group, transport: Transport, pages: Pages) -> None:
        self._group, self._transport, self._pages = group, transport, pages
        # By the call that made it: under each seat that is taken again it has another name.
        self._copies: dict[int, HostCopy] = {}
        self._threads: dict[int, threading.Thread] = {}  # that offer them while they are needed

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def size_bytes(self) -> int:
        """The size of all copies. Any thread may ask."""
        return sum(copy.size_bytes for copy in list(self._copies.values()))

    @property
    def made(self) -> list[HostCopy]:
        return list(self._copies.values())

    def make(
        self, number: int, registered: LocalState, digests: Digests, *, is_optional: bool = False
    ) -> Mailbox:
        """This rank's part of a copy of the version that call `number` gives up.

        One that was made in an earlier try of the same call is shown again.

        Raises: MemoryError: Memory is short.
        """
        if number not in self._copies:
            # An optional copy is made only if all ranks here have room for theirs; a needed one, if
            # this rank has.
            ranks = ranks_here(self._group.seat.world_size) if is_optional else 1
            _require_room(registered.bytes_total * ranks)
            kept = self._group.ledger.holds
            assert kept is not None
            layout, memory = registered.layout, registered.memory
            self._copies[number] = HostCopy(
                self._transport, layout, memory, kept, number, digests, self._pages
            )
        return self._copies[number].mailbox

    def keep(self) -> None:
        """Offer each copy, in a thread of its own, for as long as it is needed; then free it.

        Where none is to be had, or Ctrl-C comes before it starts, the next unpublish tries again.
        """
        self._threads = {n: each for n, each in self._threads.items() if each.is_alive()}
        for number, copy in list(self._copies.items()):
            if number in self._threads:
                continue
            version, args = copy.kept.ref.version, (number, self._group.seat)
            name = f"torch_ros keeps {version}"
            thread = threading.Thread(target=self._keep, args=args, name=name, daemon=True)
            self._threads[number] = thread  # before it starts: none is there that is not known
            try:
                thread.start()
            except RuntimeError as error:
                text = "the copy of version %d has no thread until the next unpublish: %s"
                log.warning(text, version, error)

    def close(self) -> None:
        """Let go of all of them, once the group is closed and before the transport is.

        A thread that is inside NIXL when the interpreter ends takes the process down with it.
        """
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join(CLOSE_S)
        while self._copies:
            self._copies.popitem()[1].close()

    def _keep(self, number: int, seat: Seat) -> None:
        """Offer a copy under each seat of this rank, until nobody needs it; then free it."""
        copy, group = self._copies[number], self._group
        version = copy.kept.ref.version
        shard, reminder = shard_of(copy.mailbox), Reminder()
        forever = Deadline(f"keeping version {version}", math.inf)
        while True:
            inst, session = copy_of(seat.inst, copy.call), group.session
            try:
                part = CopiedPart(inst, copy.call, shard, wall_ms())
                if group.run(copying(seat, copy.kept, part), forever):
                    group.run(releasing(seat, copy.kept.ref, inst), forever)
                break
            except SeatLost as lost:
                group.fence(lost, session)
            except BackendError as error:
                if reminder.is_due():
                    log.warning("keeping version %d: %s", version, error)
                group.pause()
            except ClosedError:
                break
            try:  # the next incarnation offers the copy again, under a name of its own
                group.await_seat(forever, Patience(peers_s=math.inf))
            except (SeatLost, ClosedError):
                break
            seat = group.seat
        if group.ledger.is_closed:  # a close may let readers finish first: `close` frees it
            return
        del self._copies[number]
        copy.close()
        log.info("the copy of version %d in host memory is released", version)
