"""A peer on this host, and reads of its memory: docs/protocol/nixl.md#the-order-of-a-read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import msgspec
import numpy as np

from torch_ros.costs import HOST_COSTS, Costs
from torch_ros.digests import digest_of
from torch_ros.errors import ClosedError, TransferFailed, UsageError
from torch_ros.features.shortcuts import cma
from torch_ros.features.shortcuts.copying import SharedCopy, copy
from torch_ros.features.shortcuts.mapped import MappedMemory, Mapping
from torch_ros.p2p.regions import Cover, Uint64s, cut
from torch_ros.p2p.transport import Peer, Transfer
from torch_ros.p2p.voucher import LetGo, Neighbour, Process, Unproven
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Spans

if TYPE_CHECKING:
    from torch_ros.features.shortcuts.transport import ShortcutRegistration, ShortcutTransport

log = log_of(__name__)

REFUSED_MAX = 4096  # agents that are not warned of again
# Registrations of less are words, mailboxes, manifests: not worth a look at what is mapped here,
# which takes a millisecond or two.
LOOK_BYTES = 1 << 20
# A read of as much, as of a word or a mailbox, is an answer of its process: see `is_running`.
ANSWER_BYTES = 4096
FROZEN_S = 1.0  # until it is looked again whether a process is frozen, which takes 0.3 ms


class Elsewhere(Unproven):
    """It is not where this process could copy from, or one of the two copies nothing; why."""


class _Said(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    @classmethod
    def decode(cls, agent: str, said: bytes) -> Self:
        """Raises: TransferFailed: These are other bytes."""
        try:
            return msgspec.msgpack.decode(said, type=cls)
        except (msgspec.DecodeError, ValueError) as error:
            raise TransferFailed(agent, f"these bytes are no {cls.__name__}") from error


class ShortcutCard(_Said, frozen=True):
    agent: str
    host: str  # of the process; empty if it is left to the base
    process: Process
    base: bytes  # what the base says; last, so that it notices what was cut off


class ShortcutDescriptor(_Said, frozen=True):
    host: str
    bounds: bytes  # the starts, then the ends, of all that is registered in host memory
    process: Process
    base: bytes

    @property
    def regions(self) -> tuple[Uint64s, Uint64s]:
        starts, ends = np.frombuffer(self.bounds, np.uint64).reshape(2, -1)
        return starts, ends

    def __post_init__(self) -> None:
        self.regions  # noqa: B018  # raises


@dataclass(eq=False)
class ShortcutTransfer:
    """A read that is copied here.

    The peer vouches for its memory before the copy and again after it: one that has ended can still
    be copied from. Few bytes, as of a word, land only when it has vouched: no look before.
    """

    peer: ShortcutPeer
    copies: Spans  # whose sources are mapped at these addresses of this process
    reads: Spans  # whose sources the kernel copies, at these addresses of the peer
    mappings: AbstractSet[Mapping]
    digests: AbstractSet[bytes]  # of the descriptors that name the sources
    targets: Sequence[ShortcutRegistration]

    def __post_init__(self) -> None:
        here = [("mapped", self.copies), ("cma", self.reads)]
        self.ways = tuple((way, int(rows[:, 2].sum())) for way, rows in here if len(rows))
        self.size_bytes: int = sum(size_bytes for _, size_bytes in self.ways)
        threads, pid = self.peer.transport.threads, self.peer.pid or 0
        self._is_small = self.size_bytes <= ANSWER_BYTES
        self._answer: cma.Answer | None = None
        if self._is_small and len(self.reads) == 1 and not len(self.copies):
            self._answer = cma.Answer(pid, *self.reads[0].tolist())
        self._parts = [
            *(partial(copy, share) for share in threads.shares(self.copies)),
            *(partial(cma.read, pid, share) for share in threads.shares(self.reads)),
        ]
        self._lock = threading.Lock()  # held while this is posted, or its copies are ended
        self._copying = SharedCopy()
        self._state: Literal["idle", "posted", "closed"] = "idle"
        self.peer.transport.reads.add(self)

    def post(self) -> None:
        self.peer.transport.refuse_fork()
        with self._lock:
            self._refuse_gone()
            if self._answer is None:
                self.peer.refuse_unvouched(self.digests)
                self._copying.drop()  # of an earlier post, if Ctrl-C ended the wait for it
                self._copying = SharedCopy(self._parts)
                self.peer.transport.threads.begin(self._copying)
            self._state = "posted"

    def is_done(self) -> bool:
        self.peer.transport.refuse_fork()
        if self._state != "posted":
            raise ClosedError("this read was not posted, or was closed")
        copying = self._copying
        try:
            if self._answer:
                return self._is_answered(self._answer)
            if not copying.is_done() or (self._is_small and not self.peer.is_running()):
                return False
            self.peer.refuse_unvouched(self.digests)  # the last look: all bytes are here
        except BaseException as error:
            copying.drop()
            if isinstance(error, OSError):
                reason = f"its memory cannot be read ({error.strerror or error})"
                raise TransferFailed(self.peer.agent, reason) from error
            raise
        return True

    def _is_answered(self, answer: cma.Answer) -> bool:
        with self._lock:
            self._refuse_gone()
            if not (answer.look() and self.peer.is_running()):
                return False
            self.peer.refuse_unvouched(self.digests)  # the last look
            answer.land()
            return True

    def _refuse_gone(self) -> None:
        """Raises: ClosedError, TransferFailed: It is closed, or what it is read from, or into."""
        if self._state == "closed":
            raise ClosedError("this read was closed")
        if not all(registration.is_open for registration in self.targets):
            raise TransferFailed(self.peer.agent, "the memory it lands in was unregistered")
        if not all(mapping.is_open for mapping in self.mappings):
            raise TransferFailed(self.peer.agent, "its shared memory is not mapped any more")

    def close(self) -> None:
        transport = self.peer.transport
        if not transport.is_foreign:
            self.settle("closed")
            with transport.lock:
                transport.reads.discard(self)

    def settle(self, state: Literal["idle", "closed"] | None = None) -> None:
        """Drop what has not been copied, and wait until no byte is being copied."""
        with self._lock:
            self._state = state or self._state
            self._copying.drop()


class ShortcutPeer:
    """A `Peer` that is copied from as far as its process vouches for its memory.

    Raises: TransferFailed: It is not to be copied from, and the base does not reach it.
    """

    def __init__(self, transport: ShortcutTransport, said: ShortcutCard) -> None:
        self.transport: ShortcutTransport = transport
        self.agent: str = said.agent
        self.mapped: MappedMemory = MappedMemory()
        # The peer's, if its memory can be read through the kernel; 0: it cannot; None: not tried.
        self.pid: int | None = None
        # The regions that it vouches for, the newest first, and the digests of their descriptors.
        self._covers: dict[Cover, bytes] = {}
        self._base: Peer | None = None
        self._connection = said.base
        self._connecting = threading.RLock()  # never taken with the transport's lock held
        self._untold: dict[bytes, bytes] = {}  # by digest, what the base has not been told
        self._has_other = False  # the base alone can read something of it
        self._is_closed = False
        self._is_frozen, self._looked_s = False, -FROZEN_S
        self._process: Neighbour | None = None  # None: it is left to the base
        self._kept = ExitStack()
        try:
            process = transport.found(said.agent, said.host, said.process)
            self._kept.callback(process.close)
            process.vouched()
            line = f"task/{said.process.pid}/stat"  # that of the process sums over all threads
            self._stat = os.open(line, os.O_RDONLY | os.O_CLOEXEC, dir_fd=process.folder)
            self._kept.callback(os.close, self._stat)
            self._process = process
        except (Unproven, OSError) as error:
            self._kept.close()
            self._refuse(error if isinstance(error, Unproven) else LetGo(error))
            self._has_other = True
            self.base()
        with transport.lock:
            transport.peers.add(self)

    @property
    def costs(self) -> Costs:
        return HOST_COSTS if self.pid or self._base is None else self._base.costs

    def base(self) -> Peer:
        """This peer by the base, which is connected now if it was not, and told of all memory.

        Raises: TransferFailed: It cannot be reached so.
        """
        with self._connecting:
            self.refuse_closed()
            if self._base is None:
                self._base = base = self.transport.base.connect(self._connection)
                if self._is_closed or base.agent != self.agent:
                    self._base = None
                    base.close()
                    self.refuse_closed()  # meanwhile
                    raise TransferFailed(self.agent, f"its connection is of {base.agent!r}")
            for of, descriptor in tuple(self._untold.items()):
                if of in self._vouched():
                    self._base.attach(descriptor)
                del self._untold[of]
            return self._base

    def attach(self, descriptor: bytes) -> None:
        self.refuse_closed()
        if not descriptor:
            return
        said = ShortcutDescriptor.decode(self.agent, descriptor)
        of, is_whole = digest_of(descriptor), False
        if self._process:
            self.transport.unmap_abandoned()
        with self._connecting:
            with self.transport.lock:
                # Whatever was there, trusted or not, is another's now.
                self.mapped.forget(*said.regions)
                try:
                    if self._process and self in self.transport.peers:
                        is_whole = self._trust(self._process, said, of)
                except Unproven as error:
                    if isinstance(error, LetGo) and said.host:  # the base is not to read it either
                        raise TransferFailed(self.agent, str(error)) from error
                    self._refuse(error)
                self._has_other |= not is_whole
            if is_whole:
                self._untold[of] = said.base
            else:
                self.base().attach(said.base)

    def _trust(self, process: Neighbour, said: ShortcutDescriptor, of: bytes) -> bool:
        """Copy this memory from now on, if the process itself says that it is its own; return
        whether the kernel reads all of it. `of` is the digest of the descriptor.

        Raises: Unproven: It does not, or the kernel does not.
        """
        pid = process.process.pid
        if not said.host:
            raise LetGo(f"process {pid} vouches for nothing any more")
        if (said.host, said.process) != (self.transport.host, process.process):
            raise Unproven(f"it names another process than process {pid}")
        vouched = process.vouched()
        if of not in vouched:
            raise LetGo(f"process {pid} does not vouch for this descriptor")
        self._covers = {cover: known for cover, known in self._covers.items() if known in vouched}
        self._untold = {known: each for known, each in self._untold.items() if known in vouched}
        starts, ends = said.regions
        if int((ends - starts).sum()) >= LOOK_BYTES:
            others = sum(len(each.mapped.mappings) for each in self.transport.peers - {self})
            self.mapped.map(process, starts, ends, of, elsewhere=others)
        if self.pid == 0 or not self.transport.threads.count:
            self.pid = 0
        elif len(starts):
            self._try(process, of, starts[[0, -1]])
            cover = Cover(next(self.transport.keys), HOST, starts, ends)
            self._covers = {cover: of} | self._covers
        return self.pid != 0

    def _try(self, process: Neighbour, of: bytes, starts: Uint64s) -> None:
        """Read a byte at each address; the first trial decides about the peer, a later one about
        this memory. Raises: Unproven: The kernel does not allow it, or it was let go of.
        """
        pid = process.process.pid
        here = np.zeros(len(starts), np.uint8)
        targets = here.ctypes.data + np.arange(len(starts), dtype=np.uint64)
        try:
            cma.read(pid, np.stack((starts, targets, np.ones_like(starts)), axis=1))
        except OSError as error:
            if of not in process.vouched():
                raise LetGo(f"process {pid} has let go of this memory") from error
            self.pid = self.pid or 0
            raise Unproven(f"the kernel does not read it: {error}") from error
        if self.pid is None:
            self.pid, count = pid, self.transport.threads.count
            log.info("agent %s: the kernel reads its memory, for %d threads", self.agent, count)

    def _refuse(self, error: Unproven) -> None:
        """Log why the base reads the peer's memory: once as a warning, unless that is common."""
        refused = self.transport.refused
        if isinstance(error, LetGo | Elsewhere):
            log.info("agent %s: its memory is read in another way (%s)", self.agent, error)
        elif self.agent not in refused:
            if len(refused) >= REFUSED_MAX:
                refused.clear()
            refused.add(self.agent)
            text = "agent %s: its memory is not copied but read in another way (%s)"
            log.warning(text, self.agent, error)

    def refuse_unvouched(self, digests: AbstractSet[bytes]) -> None:
        """Refuse a peer that has let go of what is read, or has ended.

        Raises: TransferFailed: It has.
        """
        if self._is_closed:
            raise TransferFailed(self.agent, "the connection was closed")
        if not digests <= self._vouched():
            raise TransferFailed(self.agent, "it has let go of the memory")

    def _vouched(self) -> AbstractSet[bytes]:
        """Raises: TransferFailed: It shows no voucher."""
        try:
            return self._process.vouched() if self._process else frozenset()
        except Unproven as error:
            raise TransferFailed(self.agent, str(error)) from error

    def is_running(self) -> bool:
        """Whether its process is not stopped, traced or frozen. Raises: OSError: It has ended."""
        if self._is_closed:  # the file's number may be another one's
            raise TransferFailed(self.agent, "the connection was closed")
        line = os.pread(self._stat, 1024, 0)  # more than the kernel's line about a process has
        if self._process and time.monotonic() - self._looked_s >= FROZEN_S:
            self._is_frozen = self.transport.is_frozen(self._process.process.pid)
            self._looked_s = time.monotonic()
        return not self._is_frozen and line[line.rfind(b")") + 2 :][:1] not in (b"T", b"t")

    def is_beyond(self, limit_s: float) -> bool:
        return self._process is None and self.base().is_beyond(limit_s)

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> Transfer:
        self.refuse_closed()
        if source_device == target_device == HOST and self._process:
            try:
                with self.transport.lock:
                    return self._copied(spans)
            except (TransferFailed, UsageError):
                if not self._has_other:  # else the base may know these addresses
                    raise
        devices = {"source_device": source_device, "target_device": target_device}
        return self.base().prepare(spans, **devices)

    def _copied(self, spans: Spans) -> ShortcutTransfer:
        """Return a read that copies all of it.

        Raises: TransferFailed, UsageError: As `prepare`; or some of it cannot be copied.
        """
        known = self.mapped
        owners = {each.cover: each for each in reversed(self.transport.registrations) if each.cover}
        sources = tuple(self._covers) or known.covers
        pieces = cut(self.agent, spans, sources, tuple(owners))
        is_mapped, row, at = known.find(pieces[:, 0], pieces[:, 2])
        copies, reads = pieces[is_mapped, :3], pieces[~is_mapped, :3]
        copies[:, 0] = at[is_mapped]
        rows = [known.rows[index] for index in set(row[is_mapped].tolist())]
        used, landing = set(pieces[~is_mapped, 3].tolist()), set(pieces[:, 4].tolist())
        digests = {of for cover, of in self._covers.items() if cover.key in used}
        digests |= {each[3] for each in rows}
        targets = [owner for cover, owner in owners.items() if cover.key in landing]
        return ShortcutTransfer(self, copies, reads, {each[2] for each in rows}, digests, targets)

    def unmap(self, mappings: Iterable[Mapping]) -> None:
        """Give up some mappings; reads of them fail from then on."""
        gone = set(mappings)
        with self.transport.lock:
            self.mapped.drop(gone)
            reads = [read for read in self.transport.reads if not gone.isdisjoint(read.mappings)]
        for read in reads:
            read.settle()
        for mapping in gone:
            mapping.close()

    def refuse_closed(self) -> None:
        self.transport.refuse_closed()
        if self._is_closed:
            raise ClosedError(f"the connection to agent {self.agent!r} was closed")

    def cut(self) -> None:
        if self._base:
            self._base.cut()

    def close(self) -> None:
        transport = self.transport
        if transport.is_foreign:
            return
        self._is_closed = True
        if base := self._base:
            base.close()
        with transport.lock:
            transport.peers.discard(self)  # `attach` maps nothing more
            left = tuple(self.mapped.mappings.values())
            reads = [read for read in transport.reads if read.peer is self]
        for read in reads:
            read.settle()
        self.unmap(left)
        self._kept.close()
