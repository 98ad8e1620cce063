"""A transport that copies out of processes on the same host, and leaves the rest to another.

It maps memory that is a file, once, and reads other memory through the kernel (cma), with several
threads. docs/protocol/nixl.md#copies says which copies count, and why.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from torch_ros.costs import HOST_COSTS, Costs
from torch_ros.digests import digest_of
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.shortcuts import cma
from torch_ros.features.shortcuts.copying import CopyThreads, SharedCopy, copy
from torch_ros.features.shortcuts.mapped import MappedMemory, Mapping
from torch_ros.p2p import shared
from torch_ros.p2p.regions import Cover, Uint64s, merge, room
from torch_ros.p2p.transport import Peer, Registration, Transfer, Transport
from torch_ros.p2p.voucher import LetGo, Neighbour, Process, Unproven, Voucher
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Region, Spans

log: logging.Logger = log_of(__name__)

Bools = npt.NDArray[np.bool_]

# Registrations of less are words, mailboxes, manifests: not worth a look at what is mapped here,
# which takes a millisecond or two.
LOOK_BYTES = 1 << 20

# Below, one more request to the other transport costs more than it saves.
CMA_BYTES = 1 << 20

REFUSED_MAX = 4096  # agents that are not warned of again

_agents = set[str]()  # of this process: only descriptors of theirs may name it


class _Descriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    host: str  # of the process; empty if it is left to the other transport
    bounds: bytes  # the starts, then the ends, of all that is registered in host memory
    process: Process
    base: bytes  # what the other transport says; last, so that it notices what was cut off


class ShortcutRegistration:
    """A `Registration` whose descriptor also says where host memory is, and in which process."""

    cover: Cover | None

    def __init__(
        self, transport: ShortcutTransport, base: Registration, cover: Cover | None
    ) -> None:
        self._transport, self._base, self.cover = transport, base, cover
        self.is_open: bool = True
        self.descriptor: bytes = b""
        if base.descriptor:
            bounds = np.stack((cover.starts, cover.ends)).tobytes() if cover else b""
            said = _Descriptor(transport.host, bounds, transport.process, base.descriptor)
            self.descriptor = msgspec.msgpack.encode(said)

    def close(self) -> None:
        transport = self._transport
        if transport.is_foreign:
            return
        with transport.lock:
            self.is_open = False  # no read into it is posted from here on
            if self in transport.registrations:
                transport.registrations.remove(self)
                transport.vouch()  # from here on no peer's copy of this memory counts
            reads = [read for read in transport.reads if self in read.targets]
        for read in reads:
            read.settle()  # without the lock: a part that is being copied is waited for
        self._base.close()


@dataclass(eq=False)
class ShortcutTransfer:
    """A read of which some is copied here, and at least a byte is left to the other transport.

    That byte shows that the peer lives: one that has ended can still be copied from. The peer has
    to vouch for its memory before the copy and again after it.
    """

    peer: ShortcutPeer
    base: Transfer
    copies: Spans  # whose sources are mapped at these addresses of this process
    reads: Spans  # whose sources the kernel copies, at these addresses of the peer
    mappings: AbstractSet[Mapping]
    digests: AbstractSet[bytes]  # of the descriptors that name the sources
    targets: AbstractSet[ShortcutRegistration]

    def __post_init__(self) -> None:
        here = [("mapped", self.copies), ("cma", self.reads)]
        copied = [(way, int(spans[:, 2].sum())) for way, spans in here if len(spans)]
        self.ways: tuple[tuple[str, int], ...] = (*copied, *self.base.ways)
        self.copied_bytes: int = sum(size_bytes for _, size_bytes in copied)
        self.size_bytes: int = self.base.size_bytes + self.copied_bytes
        threads, pid = self.peer.transport.threads, self.peer.pid or 0
        self._parts = [
            *(partial(copy, share) for share in threads.shares(self.copies)),
            *(partial(cma.read, pid, share) for share in threads.shares(self.reads)),
        ]
        self._lock = threading.Lock()  # held while this is posted, or its copies are ended
        self._copying = SharedCopy()
        self.peer.transport.reads.add(self)

    def post(self) -> None:
        transport = self.peer.transport
        transport.refuse_fork()
        with self._lock:
            if not all(registration.is_open for registration in self.targets):
                raise TransferFailed(self.peer.agent, "the memory it lands in was unregistered")
            if not all(mapping.is_open for mapping in self.mappings):
                raise TransferFailed(self.peer.agent, "its shared memory is not mapped any more")
            self.peer.refuse_unvouched(self.digests)
            self._copying.drop()  # of an earlier post, if Ctrl-C ended the call that waited for it
            self.base.post()
            self._copying = SharedCopy(self._parts)
            transport.threads.begin(self._copying)

    def is_done(self) -> bool:
        self.peer.transport.refuse_fork()
        copying = self._copying
        try:
            has_rest = self.base.is_done()  # asked each time: it makes progress only then
            if not (copying.is_done() and has_rest):
                return False
            self.peer.refuse_unvouched(self.digests)
        except BaseException as error:
            copying.drop()
            if isinstance(error, OSError):
                reason = f"its memory cannot be read ({error.strerror})"
                raise TransferFailed(self.peer.agent, reason) from error
            raise
        return True

    def close(self) -> None:
        transport = self.peer.transport
        if transport.is_foreign:
            return
        with self._lock:
            self._copying.drop()
            self.base.close()
        with transport.lock:
            transport.reads.discard(self)

    def settle(self) -> None:
        """Drop what has not been copied, and wait until no byte is being copied."""
        with self._lock:
            self._copying.drop()


class ShortcutPeer:
    """A `Peer` that is copied from as far as its process vouches for its memory."""

    def __init__(self, transport: ShortcutTransport, base: Peer) -> None:
        self.transport: ShortcutTransport = transport
        self.agent: str = base.agent
        self._base = base
        self.mapped: MappedMemory = MappedMemory()
        # The peer's, if its memory can be read through the kernel; 0: it cannot; None: not tried.
        self.pid: int | None = None
        self._process: Neighbour | None = None  # the peer's, if it is on this host
        # The regions that it vouches for, the newest first, and the digests of their descriptors.
        self._covers: dict[Cover, bytes] = {}
        self._keys = itertools.count()
        with transport.lock:
            transport.peers.add(self)

    @property
    def costs(self) -> Costs:
        return HOST_COSTS if self.pid else self._base.costs

    def attach(self, descriptor: bytes) -> None:
        if not descriptor:
            self._base.attach(descriptor)
            return
        starts, ends, said = _unpack(self.agent, descriptor)
        self._base.attach(said.base)
        is_here = self.transport.is_used and said.host == self.transport.host
        if is_here:
            self.transport.unmap_abandoned()
        with self.transport.lock:
            self.mapped.forget(starts, ends)  # whatever was there, trusted or not, is another's now
            if is_here and len(starts) and self in self.transport.peers:
                try:
                    self._trust(said.process, digest_of(descriptor), starts, ends)
                except Unproven as error:
                    self._refuse(error)

    def _trust(self, process: Process, of: bytes, starts: Uint64s, ends: Uint64s) -> None:
        """Copy this memory from now on, if the process itself says that it is its own.

        `of` is the digest of the descriptor that names the memory. Raises: Unproven: It does not.
        """
        transport = self.transport
        own = transport.process  # without a pid if it cannot vouch, and so cannot prove either
        if not (own.pid and process.pid) or process.namespace != own.namespace:
            log.info("agent %s: its process number is of another namespace", self.agent)
            return
        if process.pid == transport.never and self.agent not in _agents:  # else: a peer in here
            raise Unproven("it names this process")
        if self._process is None:
            self._process = Neighbour(self.agent, process)
        if self._process.process != process:
            raise Unproven(f"it names another process than process {self._process.process.pid}")
        vouched = self._process.vouched()
        if of not in vouched:
            raise LetGo(f"process {process.pid} does not vouch for this descriptor")
        kept = {cover: known for cover, known in self._covers.items() if known in vouched}
        self._covers = {Cover(next(self._keys), HOST, starts, ends): of} | kept
        if self.pid is None:
            self.pid = self._reachable(process.pid, int(starts[0]))
        if int((ends - starts).sum()) >= LOOK_BYTES:
            others = sum(len(each.mapped.mappings) for each in transport.peers - {self})
            self.mapped.map(self._process, starts, ends, of, elsewhere=others)

    def _refuse(self, error: Unproven) -> None:
        """Log why NIXL reads the peer's memory: once as a warning, unless it has just let go."""
        if isinstance(error, LetGo):
            log.info("agent %s: its memory is read through NIXL (%s)", self.agent, error)
            return
        if self.agent not in self.transport.refused:
            if len(self.transport.refused) >= REFUSED_MAX:
                self.transport.refused.clear()
            self.transport.refused.add(self.agent)
            log.warning(
                "agent %s: its memory is not copied but read through NIXL, which is slower (%s)."
                " Run both ends on this host as one user, with the same release; if they are,"
                " somebody else has written to the keys of this model",
                self.agent,
                error,
            )

    def refuse_unvouched(self, digests: AbstractSet[bytes]) -> None:
        """Refuse a peer that has let go of what is read, or has ended.

        Raises: TransferFailed: It has.
        """
        try:
            if self._process and digests <= self._process.vouched():
                return
            reason = "it has let go of the memory"
        except Unproven as error:
            reason = str(error)
        raise TransferFailed(self.agent, reason)

    def _reachable(self, pid: int, address: int) -> int:
        """Return `pid`, if threads may read its memory and the kernel lets them; else 0."""
        if not self.transport.threads.count:
            return 0
        byte = np.zeros(1, np.uint8)
        try:
            cma.read(pid, np.array([(address, byte.ctypes.data, 1)], np.uint64))
        except OSError as error:
            log.warning("agent %s: its memory is not read directly (%s)", self.agent, error)
            return 0
        log.info(
            "agent %s: its memory is read by %d threads", self.agent, self.transport.threads.count
        )
        return pid

    def is_beyond(self, limit_s: float) -> bool:
        return self._base.is_beyond(limit_s)

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> Transfer:
        with self.transport.lock:
            if source_device == target_device == HOST and (read := self._prepare_copied(spans)):
                return read
        return self._base.prepare(spans, source_device=source_device, target_device=target_device)

    def _prepare_copied(self, spans: Spans) -> ShortcutTransfer | None:
        """A read that copies as much as it can; None: nothing, or too little."""
        transport, known = self.transport, self.mapped
        if not (len(spans) and (known.rows or self._covers)):
            return None
        owners = {each.cover: each for each in reversed(transport.registrations) if each.cover}
        keys, there = room(spans[:, 1], spans[:, 2], tuple(owners))
        # Spans that are empty, or not registered here, are left to the other transport, to refuse.
        is_sound = (spans[:, 2] > 0) & (there >= spans[:, 2])
        is_mapped, row, sources = known.find(spans[:, 0], spans[:, 2])
        is_mapped &= is_sound
        is_read, digests = self._readable(spans, is_sound & ~is_mapped)
        is_taken = is_mapped | is_read
        rest, taken = spans[~is_taken], spans.copy()
        if not len(rest):  # the other transport is left the last byte
            source, target, size_bytes = spans[-1].tolist()
            taken[-1, 2] = last = size_bytes - 1
            rest = np.array([(source + last, target + last, 1)], np.uint64)
        taken[is_mapped, 0] = sources[is_mapped]
        copies, reads = (taken[these & (taken[:, 2] > 0)] for these in (is_mapped, is_read))
        if not len(copies) and not len(reads):
            return None
        rows = [known.rows[index] for index in set(row[is_mapped].tolist())]
        used, digests = {each[2] for each in rows}, digests | {each[3] for each in rows}
        taken_keys = set(keys[is_taken].tolist())
        targets = {owner for cover, owner in owners.items() if cover.key in taken_keys}
        base = self._base.prepare(rest)
        return ShortcutTransfer(self, base, copies, reads, used, digests, targets)

    def _readable(self, spans: Spans, among: Bools) -> tuple[Bools, set[bytes]]:
        """Those spans `among` these that the kernel reads, and the digests of their descriptors."""
        if not (self.pid and self._covers and int(spans[among, 2].sum()) >= CMA_BYTES):
            return np.zeros_like(among), set()
        keys, offered = room(spans[:, 0], spans[:, 2], tuple(self._covers))
        is_read = among & (offered >= spans[:, 2])
        read_keys = set(keys[is_read].tolist())
        return is_read, {of for cover, of in self._covers.items() if cover.key in read_keys}

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

    def cut(self) -> None:
        self._base.cut()

    def close(self) -> None:
        if self.transport.is_foreign:
            return
        self._base.close()
        with self.transport.lock:
            self.transport.peers.discard(self)  # `attach` maps nothing more
            left, process = tuple(self.mapped.mappings.values()), self._process
        self.unmap(left)
        if process:
            process.close()


class ShortcutTransport:
    """Another transport, and copies out of a peer's memory where both are on one host.

    Both ends need it. Threads copy from `post` on; `is_done` waits for them, or copies what is too
    little for them.

    After `fork`, calls in the child raise `ClosedError`, and to close something does nothing.

    Args:
        base: For all else; belongs to this from then on.
        is_used: False: talk to peers that copy, but leave it all to `base`, in both directions.
        threads: How many copy at the same time. 0: one, and only out of shared memory.
    """

    is_used: bool
    connection: bytes
    agent: str

    def __init__(self, base: Transport, *, is_used: bool = True, threads: int = 0) -> None:
        self._base, self.is_used = base, is_used
        self.agent, self.connection = base.agent, base.connection
        self.threads: CopyThreads = CopyThreads(threads)
        _agents.add(self.agent)
        self._voucher: Voucher | None = None
        if is_used:
            try:
                self._voucher = Voucher(base.agent)
            except OSError as error:
                reason = f"no voucher: {error}"
                log.warning("peers on this host read through NIXL, which is slower (%s)", reason)
        self.host: str = shared.host() if self._voucher else ""
        self.process: Process = self._voucher.process if self._voucher else Process()
        self.never: int = os.getpid()  # the process whose memory no other may name: this one
        # Never waited for with the lock of a read held.
        self.lock: threading.RLock = threading.RLock()
        self.registrations: list[ShortcutRegistration] = []
        self.peers: set[ShortcutPeer] = set()
        self.reads: set[ShortcutTransfer] = set()
        self.refused: set[str] = set()  # agents of which the log has a warning
        self._keys = itertools.count()
        self._pid = os.getpid()

    @property
    def is_copied_from(self) -> bool:
        return bool(self.host and self.threads.count)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, which has inherited no mapping."""
        return os.getpid() != self._pid

    def register(self, regions: Sequence[Region]) -> ShortcutRegistration:
        """Do as `Transport.register`, and vouch for it before any peer can learn the descriptor."""
        self.refuse_fork()
        base = self._base.register(regions)
        on_host = [region for region in regions if region.device == HOST]
        cover = merge(HOST, on_host, key=next(self._keys)) if on_host else None
        registration = ShortcutRegistration(self, base, cover)
        with self.lock:
            self.registrations.append(registration)
            self.vouch()
        return registration

    def vouch(self) -> None:
        """Vouch for all registrations, and for nothing else. The caller holds the lock."""
        if self._voucher is None:
            return
        try:
            self._voucher.show(digest_of(each.descriptor) for each in self.registrations)
        except OSError as error:
            reason = "peers on this host read it through NIXL, which is slower"
            log.warning("the voucher of agent %s is lost (%s); %s", self.agent, error, reason)
            self._voucher, self.host = None, ""
        except BaseException:  # Ctrl-C: the memory may be freed after this
            self.vouch()
            raise

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:
        """Do as `Transport.prove`, by the voucher of the process that the descriptor names."""
        said, own = _unpack(agent, descriptor)[2], self.process
        if not (said.host and said.process.pid and self.is_used and own.pid):
            raise Unproven('both ends need transport="auto", and a /proc of their own')
        if said.host != self.host:
            raise Unproven("it is on another host")
        if said.process.namespace != own.namespace:
            raise Unproven("it is in another pid namespace, as of another container")
        if said.process.pid == self.never:
            raise Unproven("it is in this very process")
        process = Neighbour(agent, said.process)
        try:
            if digest_of(descriptor) not in process.vouched():
                raise LetGo(f"process {said.process.pid} does not vouch for its mailbox")
        except BaseException:
            process.close()
            raise
        return process

    def connect(self, connection: bytes) -> ShortcutPeer:
        self.refuse_fork()
        peer = ShortcutPeer(self, self._base.connect(connection))
        self.unmap_abandoned()
        return peer

    def unmap_abandoned(self) -> None:
        """Unmap what peers have let go of: a mapping keeps the file's memory allocated."""
        with self.lock:
            found = {
                peer: [each for each in peer.mapped.mappings.values() if each.is_abandoned]
                for peer in self.peers
            }
        for peer, mappings in found.items():
            if mappings:
                log.info("agent %s: it has let go of %d mappings", peer.agent, len(mappings))
                peer.unmap(mappings)

    def close(self) -> None:
        if self.is_foreign:
            return
        with self.lock:
            for registration in self.registrations:
                registration.is_open = False
            if self._voucher:  # from here on no peer's copy of this process's memory counts
                self._voucher.close()
                self._voucher = None
            _agents.discard(self.agent)
            reads = tuple(self.reads)
        self._base.close()
        for read in reads:
            read.settle()
        with self.lock:
            peers = tuple(self.peers)
            self.registrations.clear()
        for peer in peers:
            peer.close()
        self.threads.close()

    def refuse_fork(self) -> None:
        if self.is_foreign:
            raise ClosedError(f"the transport of agent {self.agent!r} belongs to another process")


def process_of(agent: str, descriptor: bytes) -> tuple[str, Process]:
    """The host and the process that a descriptor names; host "": it is not to be copied from.

    Raises: TransferFailed: These are other bytes.
    """
    _, _, said = _unpack(agent, descriptor)
    return said.host, said.process


def _unpack(agent: str, descriptor: bytes) -> tuple[Uint64s, Uint64s, _Descriptor]:
    """Return the starts and ends of the registered regions, and the whole descriptor.

    Raises: TransferFailed: These are other bytes.
    """
    try:
        said = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        starts, ends = np.frombuffer(said.bounds, np.uint64).reshape(2, -1)
    except (msgspec.DecodeError, ValueError) as error:
        reason = "these bytes are no descriptor of a ShortcutTransport"
        raise TransferFailed(agent, reason) from error
    return starts, ends, said
