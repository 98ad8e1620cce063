"""Copies out of processes on the same host, words and all, in front of another transport."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from torch_ros.digests import digest_of
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.shortcuts.copying import CopyThreads
from torch_ros.features.shortcuts.peer import (
    Elsewhere,
    ShortcutCard,
    ShortcutDescriptor,
    ShortcutPeer,
    ShortcutTransfer,
)
from torch_ros.p2p import shared
from torch_ros.p2p.regions import Cover, merge
from torch_ros.p2p.transport import Registration, Transport
from torch_ros.p2p.voucher import LetGo, Neighbour, Process, Unproven, Voucher
from torch_ros.printable import log_of
from torch_ros.spans import HOST, Region

log = log_of(__name__)

_agents = set[str]()  # of this process: only cards of theirs may name it
_transports: weakref.WeakSet[ShortcutTransport] = weakref.WeakSet()


class ShortcutRegistration:
    """A `Registration` whose descriptor also says where host memory is, and in which process."""

    def __init__(
        self, transport: ShortcutTransport, base: Registration, cover: Cover | None
    ) -> None:
        self._transport, self._base, self.cover = transport, base, cover
        self.is_open: bool = True
        self.descriptor: bytes = b""
        if base.descriptor:
            bounds = np.stack((cover.starts, cover.ends)).tobytes() if cover else b""
            host = transport.host if transport.voucher else ""
            said = ShortcutDescriptor(host, bounds, transport.process, base.descriptor)
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


class ShortcutTransport:
    """Copies out of a peer's memory where both ends have this on one host, else another transport.

    Threads copy from `post` on; `is_done` waits for them, or copies what is too little for them. A
    peer is connected by the base only if something of it cannot be copied.

    After `fork`, calls in the child raise `ClosedError`, and to close something does nothing.

    Args:
        base: For peers elsewhere, and memory that cannot be copied; belongs to this from then on.
        is_used: False: talk to peers that copy, but leave it all to `base`, in both directions.
        threads: How many copy at the same time. 0: one, and only out of shared memory.
        is_frozen: Whether a process cannot run, because of its cgroup.
    """

    def __init__(
        self,
        base: Transport,
        *,
        is_used: bool = True,
        threads: int = 0,
        is_frozen: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.base, self.is_used, self.is_frozen = base, is_used, is_frozen
        self.agent: str = base.agent
        self.threads: CopyThreads = CopyThreads(threads)
        _agents.add(self.agent)
        self.voucher: Voucher | None = None
        try:
            self.voucher = Voucher(base.agent) if is_used else None
        except OSError as error:
            log.warning("peers on this host read in another way (no voucher: %s)", error)
        self.host: str = shared.host() if self.voucher else ""
        self.process: Process = self.voucher.process if self.voucher else Process()
        said = ShortcutCard(self.agent, self.host, self.process, base.connection)
        self.connection: bytes = msgspec.msgpack.encode(said)
        self.never: int = os.getpid()  # the process whose memory no other may name: this one
        # Never waited for with the lock of a read held.
        self.lock: threading.RLock = threading.RLock()
        self.registrations: list[ShortcutRegistration] = []
        self.peers: set[ShortcutPeer] = set()
        self.reads: set[ShortcutTransfer] = set()
        self.refused: set[str] = set()  # agents of which the log has a warning
        self.keys = itertools.count()  # of covers, of this process and of peers
        self.is_closed: bool = False
        self._pid = os.getpid()
        _transports.add(self)

    @property
    def is_copied_from(self) -> bool:
        return self.voucher is not None and self.threads.count > 0

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, which has inherited no mapping."""
        return os.getpid() != self._pid

    def register(self, regions: Sequence[Region]) -> ShortcutRegistration:
        """Do as `Transport.register`, and vouch for it before any peer can learn the descriptor."""
        self.refuse_closed()
        base = self.base.register(regions)
        on_host = [region for region in regions if region.device == HOST]
        cover = merge(HOST, on_host, key=next(self.keys)) if on_host else None
        registration = ShortcutRegistration(self, base, cover)
        with self.lock:
            self.registrations.append(registration)
            self.vouch()
        return registration

    def vouch(self) -> None:
        """Vouch for all registrations, and for nothing else. The caller holds the lock."""
        if self.voucher is None:
            return
        try:
            self.voucher.show(digest_of(each.descriptor) for each in self.registrations)
        except OSError as error:
            log.warning("the voucher of agent %s is lost (%s)", self.agent, error)
            self.voucher = None
        except BaseException:  # Ctrl-C: the memory may be freed after this
            self.vouch()
            raise

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:
        """Do as `Transport.prove`, by the voucher of the process that the descriptor names."""
        said = ShortcutDescriptor.decode(agent, descriptor)
        process = self.found(agent, said.host, said.process)
        try:
            if said.process.pid == self.never:
                raise Elsewhere("it is in this very process")
            if digest_of(descriptor) not in process.vouched():
                raise LetGo(f"process {said.process.pid} does not vouch for its mailbox")
        except BaseException:
            process.close()
            raise
        return process

    def found(self, agent: str, host: str, process: Process) -> Neighbour:
        """The process, to look at its voucher; the caller closes it. Raises: Unproven: Why not."""
        own = self.process  # without a pid if it cannot vouch, and so cannot prove either
        if not (host and process.pid and self.is_used and own.pid):
            raise Elsewhere('both ends need transport="auto" or "tcp", and a /proc of their own')
        if host != self.host:
            raise Elsewhere("it is on another host")
        if process.namespace != own.namespace:
            raise Elsewhere("it is in another pid namespace, as of another container")
        if process.pid == self.never and agent not in _agents:  # else: a peer in here
            raise Unproven("it names this process")
        return Neighbour(agent, process)

    def connect(self, connection: bytes) -> ShortcutPeer:
        """Know a peer. The base connects at once only to one that is not to be copied from."""
        self.refuse_closed()
        said = ShortcutCard.decode("?", connection)
        if said.agent == self.agent:
            raise TransferFailed(said.agent, "an agent cannot connect to itself")
        peer = ShortcutPeer(self, said)
        self.unmap_abandoned()
        return peer

    def unmap_abandoned(self) -> None:
        """Unmap what peers have let go of: a mapping keeps the file's memory allocated."""
        with self.lock:
            found = [(peer, tuple(peer.mapped.mappings.values())) for peer in self.peers]
        for peer, mappings in found:
            if gone := [each for each in mappings if each.is_abandoned]:
                log.info("agent %s: it has let go of %d mappings", peer.agent, len(gone))
                peer.unmap(gone)

    def close(self) -> None:
        if self.is_foreign:
            return
        with self.lock:
            self.is_closed = True
            for registration in self.registrations:
                registration.is_open = False
            if self.voucher:  # from here on no peer's copy of this process's memory counts
                self.voucher.close()
                self.voucher = None
            _agents.discard(self.agent)
        self.base.close()
        with self.lock:
            peers = tuple(self.peers)
            self.registrations.clear()
        for peer in peers:
            peer.close()
        self.threads.close()

    def refuse_closed(self) -> None:
        self.refuse_fork()
        if self.is_closed:
            raise ClosedError(f"the transport of agent {self.agent!r} is closed")

    def refuse_fork(self) -> None:
        if self.is_foreign:
            raise ClosedError(f"the transport of agent {self.agent!r} belongs to another process")


@atexit.register
def _close_all() -> None:
    for transport in tuple(_transports):  # before memory is freed for which a voucher stands
        transport.close()
