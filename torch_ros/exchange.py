"""How one process shows its tensors to others, and how another finds and reads them.

No server and no listener is involved. The shard record in etcd holds a `Card`: what is needed to
connect, and where the mailbox is. The mailbox is a small region at an address that never changes;
it says where the manifest is now; the manifest says where the tensors are. All three steps are
one-sided reads. Mailbox and manifest carry digests, so a read that a rewrite overlapped is noticed
and never believed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from torch_ros.errors import PeerError, TransferFailed
from torch_ros.p2p.transport import HOST, Peer, Read, Region, Registration, Spans, Transport
from torch_ros.store.run import Deadline
from torch_ros.weights.manifest import Layout, Manifest

log = logging.getLogger(__name__)

MAILBOX_BYTES = 4096
HEADER_BYTES = 32  # a progress word (later: pipelined reads), the notice's length, its digest
PEERS_MAX = 4096  # connections kept; the least recently used is closed first
ATTACHED_MAX = 256  # registrations known of one peer
BATCH_BYTES = 64 << 20  # a read is posted in parts of this size, with a look at the clock between
POLL_S = 0.0002


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to reach a process; below 8 KiB."""

    agent: str
    connection: bytes
    mailbox: bytes  # descriptor of the region that holds it
    mailbox_address: int


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the mailbox says: where the manifest is."""

    address: int
    size_bytes: int
    digest: bytes
    descriptor: bytes


def _digest(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _region(buffer: npt.NDArray[np.uint8]) -> Region:
    return Region(buffer.ctypes.data, buffer.nbytes)


class Offer:
    """What this process shows. Not safe for use by several threads at once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._mailbox = np.zeros(MAILBOX_BYTES, np.uint8)
        registration = transport.register([_region(self._mailbox)])
        self.card = msgspec.msgpack.encode(
            Card(
                transport.agent,
                transport.connection,
                registration.descriptor,
                self._mailbox.ctypes.data,
            )
        )
        self._tensors: Registration | None = None
        self._regions: tuple[Region, ...] = ()
        self._manifest: tuple[npt.NDArray[np.uint8], Registration] | None = None
        self.manifest: Manifest | None = None

    def show(
        self,
        layout: Layout,
        addresses: Sequence[int],
        devices: Sequence[int],
        regions: Sequence[Region],
    ) -> Manifest:
        """Register `regions` and say what is in them. What was shown before and is the same stays.

        The memory must stay allocated until `withdraw`, or the next `show`, has returned.
        """
        if self._tensors is None or self._regions != tuple(regions):
            self.withdraw()
            self._tensors = self._transport.register(regions)
            self._regions = tuple(regions)
        manifest = Manifest(layout, tuple(addresses), tuple(devices), self._tensors.descriptor)
        if self.manifest != manifest:
            self._post(manifest)
        return manifest

    def _post(self, manifest: Manifest) -> None:
        content = manifest.encode()
        buffer = np.frombuffer(content, np.uint8).copy()
        registration = self._transport.register([_region(buffer)])
        notice = msgspec.msgpack.encode(
            Notice(buffer.ctypes.data, buffer.nbytes, _digest(content), registration.descriptor)
        )
        assert HEADER_BYTES + len(notice) <= MAILBOX_BYTES
        header = b"\0" * 8 + len(notice).to_bytes(8, "little") + _digest(notice)
        self._mailbox[: HEADER_BYTES + len(notice)] = np.frombuffer(header + notice, np.uint8)
        if self._manifest is not None:
            self._manifest[1].close()
        self._manifest, self.manifest = (buffer, registration), manifest

    def withdraw(self) -> None:
        """Show nothing. Idempotent. Afterwards the memory may be freed."""
        self._mailbox[:] = 0
        if self._manifest is not None:
            self._manifest[1].close()
        if self._tensors is not None:
            self._tensors.close()
        self._manifest = self._tensors = self.manifest = None
        self._regions = ()


class Intake:
    """What this process reads. Not safe for use by several threads at once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._attached: dict[str, set[bytes]] = {}
        self._manifests: dict[str, tuple[bytes, Manifest]] = {}  # agent -> digest, manifest

    def manifest(self, card: bytes, deadline: Deadline) -> tuple[str, Manifest]:
        """The agent behind `card`, connected, and what it shows now.

        Raises:
            TransferFailed: It is gone, shows nothing, or rewrote it while it was read.
        """
        try:
            where = msgspec.msgpack.decode(card, type=Card)
        except msgspec.DecodeError as error:
            raise PeerError(f"a shard record that this release cannot read: {error}") from error
        if len(self._attached.get(where.agent, ())) > ATTACHED_MAX:
            self.forget(where.agent)  # it registers anew all the time; only a new start forgets
        peer = self._peer(where)
        box = self._read_bytes(peer, where.mailbox, where.mailbox_address, MAILBOX_BYTES, deadline)
        length, digest = int.from_bytes(box[8:16], "little"), box[16:HEADER_BYTES]
        content = box[HEADER_BYTES : HEADER_BYTES + length]
        if length == 0 or _digest(content) != digest:
            raise TransferFailed(where.agent, "it shows no tensors (unregistered meanwhile?)")
        notice = msgspec.msgpack.decode(content, type=Notice)
        known = self._manifests.get(where.agent)
        if known is None or known[0] != notice.digest:
            shown = self._read_bytes(
                peer, notice.descriptor, notice.address, notice.size_bytes, deadline
            )
            if _digest(shown) != notice.digest:
                raise TransferFailed(where.agent, "its manifest changed while it was read")
            known = (notice.digest, Manifest.decode(shown))
            self._manifests[where.agent] = known
        return where.agent, known[1]

    def prepare(
        self,
        agent: str,
        manifest: Manifest,
        spans: Spans,
        *,
        source_device: int = HOST,
        target_device: int = HOST,
    ) -> list[Read]:
        """Reads of `spans` from `agent`, each of about `BATCH_BYTES`. The caller closes them."""
        peer = self._peers[agent]
        self._attach(peer, manifest.descriptor)
        spans = _cut(spans)
        ends = np.cumsum(spans[:, 2])
        cuts = np.searchsorted(ends, np.arange(BATCH_BYTES, int(ends[-1]), BATCH_BYTES)) + 1
        reads: list[Read] = []
        try:
            for part in filter(len, np.split(spans, np.unique(cuts))):
                reads += [
                    peer.prepare(part, source_device=source_device, target_device=target_device)
                ]
        except BaseException:
            close_all(reads)
            raise
        return reads

    def forget(self, agent: str) -> None:
        """Disconnect from an agent, so that the next `manifest` starts afresh."""
        self._attached.pop(agent, None)
        self._manifests.pop(agent, None)
        if peer := self._peers.pop(agent, None):
            peer.close()

    def close(self) -> None:
        for agent in list(self._peers):
            self.forget(agent)

    def _peer(self, where: Card) -> Peer:
        if where.agent not in self._peers:
            if len(self._peers) >= PEERS_MAX:
                self.forget(next(iter(self._peers)))
            self._peers[where.agent] = self._transport.connect(where.connection)
        self._peers.move_to_end(where.agent)
        return self._peers[where.agent]

    def _attach(self, peer: Peer, descriptor: bytes) -> None:
        attached = self._attached.setdefault(peer.agent, set())
        if descriptor not in attached:
            peer.attach(descriptor)
            attached.add(descriptor)

    def _read_bytes(
        self, peer: Peer, descriptor: bytes, address: int, size_bytes: int, deadline: Deadline
    ) -> bytes:
        self._attach(peer, descriptor)
        buffer = np.empty(size_bytes, np.uint8)
        registration = self._transport.register([_region(buffer)])
        try:
            spans = np.array([[address, buffer.ctypes.data, size_bytes]], np.uint64)
            read = peer.prepare(spans)
            try:
                perform([read], deadline)
            finally:
                read.close()
        finally:
            registration.close()
        return buffer.tobytes()


def _cut(spans: Spans) -> Spans:
    """The same bytes in spans of at most `BATCH_BYTES`: on one host a span is one long copy, in
    which this process looks neither at the clock nor after its own readers.
    """
    if int(spans[:, 2].max()) <= BATCH_BYTES:
        return spans
    counts = (spans[:, 2] + np.uint64(BATCH_BYTES - 1)) // np.uint64(BATCH_BYTES)
    cut = np.repeat(spans, counts.astype(np.int64), axis=0)
    firsts = np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))
    done = (np.arange(len(cut), dtype=np.uint64) - firsts) * np.uint64(BATCH_BYTES)
    cut[:, :2] += done[:, None]
    cut[:, 2] = np.minimum(cut[:, 2] - done, np.uint64(BATCH_BYTES))
    return cut


def perform(
    reads: Sequence[Read],
    deadline: Deadline,
    *,
    check: Callable[[], None] = lambda: None,
    done: Callable[[int], None] = lambda _: None,
) -> None:
    """Post the reads and see them through, two at a time. On an error some may be in flight.

    Args:
        check: Called between reads; raises to stop.
        done: Called with the bytes of each read that has landed.

    Raises:
        TransferFailed: A peer is gone.
        DeadlineExceeded: Too slow.
    """
    waiting = list(reversed(reads))
    flying: list[Read] = []
    while waiting or flying:
        while waiting and len(flying) < 2:
            read = waiting.pop()
            read.post()
            flying.append(read)
        landed = [read for read in flying if read.is_done()]
        for read in landed:
            flying.remove(read)
            done(read.size_bytes)
        check()
        left = sum(read.size_bytes for read in (*waiting, *flying))
        deadline.check(f"{left} bytes are still to be read")
        if not landed:
            time.sleep(POLL_S)


def close_all(reads: Sequence[Read]) -> None:
    """Release reads. No byte of theirs lands after this returned."""
    for read in reads:
        read.close()
