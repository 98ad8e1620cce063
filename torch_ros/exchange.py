"""How one process shows its tensors to others, and how another finds and reads them.

No server and no listener is involved. The shard record in etcd holds a `Card`: what is needed to
connect, and where the mailbox is. The mailbox is a small region at an address that never changes;
it says where the manifest is now; the manifest says where the tensors are. All three steps are
one-sided reads. Mailbox and manifest carry digests, so a read that a rewrite overlapped is noticed
and never believed.

The first eight bytes of the mailbox are the *word*: what content this process serves, because of
which call of its group, and how much of it is there. Readers ask for it before a read, to know
what they may read, and again after the bytes have landed: only if it still names the same do they
count. Whoever takes its tensors back clears the word first, so no read that overlaps a later write
is ever counted, however long the reader was stopped and whatever became of its lease. (The idea is
a seqlock's, with the word on the writer's side.)
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from torch_ros.errors import SourceLost, TorchRosError, TransferFailed, UsageError
from torch_ros.p2p.transport import HOST, Peer, Read, Region, Registration, Spans, Transport
from torch_ros.store.run import Deadline
from torch_ros.weights.columns import distinct
from torch_ros.weights.digest import Depth
from torch_ros.weights.manifest import Layout, Manifest

log = logging.getLogger(__name__)

MAILBOX_BYTES = 4096
WORD_BYTES = 8
HEADER_BYTES = 32  # the word, the notice's length, its digest
EVERYTHING = 2**32 - 1  # as a position: all that is shown is there
PEERS_MAX = 4096  # connections kept; the least recently used is closed first
ATTACHED_MAX = 256  # registrations known of one peer
POSTED_MAX = 2  # manifests: of each of two buffers that are published in turn
READ_BYTES = 32 << 20  # of one read: on one host a read is a copy that this process waits for
FLIGHT = 2  # reads in flight at a time
MANIFEST_BYTES_MAX = 1 << 30  # some million chunks
POLL_S = 0.0002
ADDRESS_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Digests:
    """What a process knows of the content that it shows."""

    depth: Depth = "off"
    chunks: tuple[int, ...] = ()  # of each chunk that it has, or nothing
    totals: Mapping[str, int] = field(default_factory=dict)  # of each whole tensor, or nothing


@dataclass(frozen=True, slots=True)
class Word:
    """What a process serves: its group's call, and how many of its chunks are there, in order."""

    mark: int = 0  # of `store.records.mark`; 0: nothing
    position: int = 0

    def pack(self) -> int:
        return self.mark << 32 | self.position

    @classmethod
    def unpack(cls, value: int) -> Word:
        return cls(value >> 32, value & EVERYTHING)


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


@dataclass(slots=True)
class _Posted:
    """A manifest in registered memory."""

    manifest: Manifest
    buffer: npt.NDArray[np.uint8]
    registration: Registration
    notice: bytes = b""

    def write(self, manifest: Manifest, content: bytes) -> None:
        """Who reads what was there before notices by the digest."""
        self.notice = b""  # should Ctrl-C come before the next one is there
        self.manifest = manifest
        self.buffer[: len(content)] = np.frombuffer(content, np.uint8)
        where = self.buffer.ctypes.data, len(content), _digest(content)
        self.notice = msgspec.msgpack.encode(Notice(*where, self.registration.descriptor))


class Offer:
    """What this process shows. Not safe for use by several threads at once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._mailbox = np.zeros(MAILBOX_BYTES, np.uint8)
        self._word = self._mailbox[:WORD_BYTES].view(np.uint64)  # aligned: read whole or not at all
        registration = self._own = transport.register([_region(self._mailbox)])
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
        self.before_withdraw: Callable[[], None] = lambda: None
        """Called before registered memory is let go: whoever reads into it closes the reads."""
        # The last two, the one that is shown first: two buffers may be published in turn, and then
        # nothing is registered or fetched anew.
        self._posted: list[_Posted] = []

    @property
    def manifest(self) -> Manifest | None:
        """What is shown."""
        return self._posted[0].manifest if self._posted else None

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

    def show_digests(self, digests: Digests) -> None:
        """Say what the content of the same tensors is now."""
        manifest = self.manifest
        assert manifest is not None
        now = msgspec.structs.replace(
            manifest, depth=digests.depth, digests=digests.chunks, totals=dict(digests.totals)
        )
        if now != manifest:
            self._post(now)

    def _post(self, manifest: Manifest) -> None:
        posted = next((each for each in self._posted if each.manifest == manifest), None)
        if posted is None or not posted.notice:
            posted = self._written(manifest)
        notice = posted.notice
        assert HEADER_BYTES + len(notice) <= MAILBOX_BYTES
        content = len(notice).to_bytes(8, "little") + _digest(notice) + notice
        self._mailbox[8 : 8 + len(content)] = np.frombuffer(content, np.uint8)
        self._posted = [posted, *(each for each in self._posted if each is not posted)]

    def _written(self, manifest: Manifest) -> _Posted:
        """In the buffer of the two that is not shown, if it fits."""
        content = manifest.encode()
        spare = self._posted[-1] if len(self._posted) == POSTED_MAX else None
        if spare is None or spare.buffer.nbytes < len(content):
            buffer = np.zeros(len(content) + len(content) // 8, np.uint8)  # digests vary in size
            posted = _Posted(manifest, buffer, self._transport.register([_region(buffer)]))
            if spare is not None:
                self._posted.remove(spare)
                spare.registration.close()
            spare = posted
        spare.write(manifest, content)
        return spare

    def serve(self, mark: int, position: int) -> None:
        """From now on the first `position` blocks of what is shown are there, of what `mark` is."""
        self._word[0] = Word(mark, position).pack()

    def void(self) -> None:
        """Nothing counts any more that is read from now on. Before memory is written to."""
        self._word[0] = 0

    def withdraw(self) -> None:
        """Show nothing. Idempotent. Afterwards the memory may be freed."""
        self._mailbox[:] = 0
        for posted in self._posted:
            posted.registration.close()
        if self._tensors is not None:
            self.before_withdraw()
            self._tensors.close()
        self._posted, self._tensors, self._regions = [], None, ()

    def close(self) -> None:
        """Withdraw, for good."""
        self.withdraw()
        self._own.close()


@dataclass(frozen=True, slots=True)
class Shown:
    """What a process shows, as it was read from its mailbox."""

    agent: str
    mailbox_address: int
    word: Word
    manifest: Manifest | None
    problem: str = ""  # why there is no manifest


@dataclass(slots=True)
class _KeptRead:
    """One that is made again and again, into the same memory."""

    buffer: npt.NDArray[np.uint8]
    read: Read
    is_late: bool = False  # in flight still, since nobody waited for it any longer

    def ask(self, deadline: Deadline, still: Callable[[], None]) -> bytes:
        while self.is_late and not self.read.is_done():  # what that brings is of no use
            deadline.check("what was asked for earlier is still to be read")
            still()
            time.sleep(POLL_S)
        self.is_late = False
        try:
            perform([self.read], deadline, still=lambda _: still(), pause_s=0.0)
        except TransferFailed:
            raise
        except TorchRosError:
            self.is_late = True
            raise
        return self.buffer.tobytes()


class _Mailbox:
    """A peer's: its word is asked for after every batch, all of it at every call."""

    def __init__(self, transport: Transport, peer: Peer, address: int) -> None:
        buffer = np.zeros(MAILBOX_BYTES + WORD_BYTES, np.uint8)
        self._registration = transport.register([_region(buffer)])
        self._kept: list[_KeptRead] = []
        try:
            for part in (buffer[:MAILBOX_BYTES], buffer[MAILBOX_BYTES:]):
                spans = np.array([[address, part.ctypes.data, part.nbytes]], np.uint64)
                self._kept.append(_KeptRead(part, peer.prepare(spans)))
        except BaseException:
            self.close()
            raise
        self.whole, self.word = self._kept

    @property
    def is_late(self) -> bool:
        """Whether an answer is due that nobody waits for any more."""
        return any(kept.is_late for kept in self._kept)

    def close(self) -> None:
        close_all([kept.read for kept in self._kept])
        self._registration.close()


class Intake:
    """What this process reads. Not safe for use by several threads at once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._attached: dict[str, set[bytes]] = {}
        self._manifests: dict[str, dict[bytes, Manifest]] = {}  # agent -> by digest, the last ones
        self._mailboxes: dict[tuple[str, int], _Mailbox] = {}
        self.before_forget: Callable[[str], None] = lambda _: None
        """Called before a peer is disconnected: whoever has reads from it closes them."""

    def shown(
        self, card: bytes, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> Shown:
        """What the process behind `card` shows now; it is connected from then on.

        Without a manifest if it shows none, or rewrote it while it was read.

        Args:
            still: Called while its answer is waited for.

        Raises:
            TransferFailed: It is gone, or shows what cannot be read.
        """
        with _believing("?", "its card"):
            where = msgspec.msgpack.decode(card, type=Card)
        if not 0 <= where.mailbox_address <= ADDRESS_MAX - MAILBOX_BYTES:
            raise TransferFailed(where.agent, f"no mailbox can be at {where.mailbox_address}")
        if len(self._attached.get(where.agent, ())) > ATTACHED_MAX:
            self.forget(where.agent)  # it registers anew all the time; only a new start forgets
        with _believing(where.agent, "its card"):
            peer = self._peer(where)
        mailbox = where.agent, where.mailbox_address
        if where.mailbox not in self._attached.get(where.agent, ()) and mailbox in self._mailboxes:
            self._mailboxes.pop(mailbox).close()  # an earlier one, of an offer that is gone
        self._attach(peer, where.mailbox)
        # First: who serves something has shown it before, and nothing says in which order the
        # bytes of one read are fetched.
        word = self._word(*mailbox, deadline, still)
        box = self._ask(*mailbox, "whole", deadline, still)
        length, digest = int.from_bytes(box[8:16], "little"), box[16:HEADER_BYTES]
        content = box[HEADER_BYTES : HEADER_BYTES + length]
        if length == 0 or _digest(content) != digest:
            problem = "its mailbox does not fit its digest" if length else "it shows no tensors"
            return Shown(*mailbox, word, None, problem)
        with _believing(where.agent, "its notice"):
            notice = msgspec.msgpack.decode(content, type=Notice)
        known = self._manifests.setdefault(where.agent, {})
        if notice.digest not in known:
            manifest = self._read_bytes(peer, notice, deadline, still)
            if _digest(manifest) != notice.digest:
                return Shown(*mailbox, word, None, "its manifest does not fit its digest")
            with _believing(where.agent, "its manifest"):
                decoded = Manifest.decode(manifest)
            if len(known) == POSTED_MAX:
                del known[next(iter(known))]
            known[notice.digest] = decoded
        return Shown(*mailbox, word, known[notice.digest])

    def manifest(
        self, card: bytes, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> tuple[str, Manifest]:
        """The agent behind `card`, connected, and the tensors that it shows now.

        Raises:
            TransferFailed: It is gone, shows nothing, or rewrote it while it was read.
        """
        shown = self.shown(card, deadline, still)
        if shown.manifest is None:
            raise TransferFailed(shown.agent, f"{shown.problem} (unregistered meanwhile?)")
        return shown.agent, shown.manifest

    def word(
        self, shown: Shown, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> Word:
        """What that process serves now.

        Args:
            still: Called while its answer is waited for.

        Raises:
            TransferFailed: It is gone.
        """
        return self._word(shown.agent, shown.mailbox_address, deadline, still)

    def _word(
        self, agent: str, address: int, deadline: Deadline, still: Callable[[], None]
    ) -> Word:
        answer = self._ask(agent, address, "word", deadline, still)
        return Word.unpack(int.from_bytes(answer, "little"))

    def _ask(
        self,
        agent: str,
        address: int,
        what: Literal["word", "whole"],
        deadline: Deadline,
        still: Callable[[], None],
    ) -> bytes:
        key = (agent, address)
        if key not in self._mailboxes:
            with _believing(agent, "its mailbox"):
                self._mailboxes[key] = _Mailbox(self._transport, self._peers[agent], address)
        mailbox = self._mailboxes[key]
        try:
            return (mailbox.word if what == "word" else mailbox.whole).ask(deadline, still)
        except SourceLost:
            self.forget(agent)
            raise
        except TransferFailed:
            self._mailboxes.pop(key).close()
            raise
        except TorchRosError:  # its answer, if one comes, goes where nothing else does
            raise
        except BaseException:
            self._mailboxes.pop(key).close()
            raise

    def is_near(self, agents: Iterable[str]) -> bool:
        """Whether all of these, which are connected, are read by copying."""
        return all(self._peers[agent].is_near for agent in agents)

    def prepare(
        self,
        agent: str,
        manifest: Manifest,
        spans: Spans,
        *,
        source_device: int = HOST,
        target_device: int = HOST,
    ) -> list[Read]:
        """Reads of `spans` from `agent`, each of about `READ_BYTES`. The caller closes them."""
        with _believing(agent, "its memory"):
            return self._prepared(agent, manifest, spans, source_device, target_device)

    def _prepared(
        self,
        agent: str,
        manifest: Manifest,
        spans: Spans,
        source_device: int,
        target_device: int,
    ) -> list[Read]:
        peer = self._peers[agent]
        self._attach(peer, manifest.descriptor)
        spans = _cut(joined(spans))
        ends = np.cumsum(spans[:, 2])
        cuts = np.searchsorted(ends, np.arange(READ_BYTES, int(ends[-1]), READ_BYTES)) + 1
        reads: list[Read] = []
        try:
            for part in filter(len, np.split(spans, distinct(cuts))):
                reads += [
                    peer.prepare(part, source_device=source_device, target_device=target_device)
                ]
        except BaseException:
            close_all(reads)
            raise
        return reads

    def forget(self, agent: str) -> None:
        """Disconnect from an agent, so that the next `manifest` starts afresh."""
        if any(box.is_late for (owner, _), box in self._mailboxes.items() if owner == agent):
            self._peers[agent].cut()
        self.before_forget(agent)
        self._attached.pop(agent, None)
        self._manifests.pop(agent, None)
        for key in [key for key in self._mailboxes if key[0] == agent]:
            self._mailboxes.pop(key).close()
        if peer := self._peers.pop(agent, None):
            peer.close()

    def leave(self, agent: str) -> None:
        """Disconnect from one that does not answer, and end what is read from it."""
        if peer := self._peers.get(agent):
            peer.cut()
        self.forget(agent)

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
        self, peer: Peer, notice: Notice, deadline: Deadline, still: Callable[[], None]
    ) -> bytes:
        address, size_bytes = notice.address, notice.size_bytes
        if not (0 < size_bytes <= MANIFEST_BYTES_MAX and 0 <= address <= ADDRESS_MAX - size_bytes):
            reason = f"its manifest cannot be {size_bytes} bytes at {address}"
            raise TransferFailed(peer.agent, reason)
        buffer = np.empty(size_bytes, np.uint8)
        registration = self._transport.register([_region(buffer)])
        try:
            spans = np.array([[address, buffer.ctypes.data, size_bytes]], np.uint64)
            with _believing(peer.agent, "its manifest"):
                self._attach(peer, notice.descriptor)
                read = peer.prepare(spans)
            try:
                perform([read], deadline, still=lambda _: still())
            except TransferFailed:
                raise
            except TorchRosError:
                self.leave(peer.agent)
                raise
            finally:
                read.close()
        finally:
            registration.close()
        return buffer.tobytes()


@contextmanager
def _believing(agent: str, what: str) -> Iterator[None]:
    """A card or notice that nothing can be done with is its peer's failure, whatever it raises."""
    try:
        yield
    except (
        msgspec.MsgspecError,
        UsageError,
        ValueError,
        ArithmeticError,
        TypeError,
        MemoryError,
    ) as error:
        raise TransferFailed(agent, f"{what} cannot be used: {error}") from error


def joined(spans: Spans) -> Spans:
    """The same bytes, in one span where some touch on both sides: tensors may lie side by side.

    In the order of the first of each.
    """
    order = np.lexsort((spans[:, 0], spans[:, 1] - spans[:, 0]))
    source, target, size = spans[order].T
    touches = (source[:-1] + size[:-1] == source[1:]) & (target[:-1] + size[:-1] == target[1:])
    if not touches.any():
        return spans
    starts = np.flatnonzero(np.concatenate(([True], ~touches)))
    runs = spans[order[starts]]
    runs[:, 2] = np.add.reduceat(size, starts)
    return runs[np.argsort(np.minimum.reduceat(order, starts))]


def _cut(spans: Spans) -> Spans:
    """The same bytes in spans of at most `READ_BYTES`: on one host a span is one long copy, in
    which this process looks neither at the clock nor after its own readers.
    """
    if int(spans[:, 2].max()) <= READ_BYTES:
        return spans
    counts = (spans[:, 2] + np.uint64(READ_BYTES - 1)) // np.uint64(READ_BYTES)
    cut = np.repeat(spans, counts.astype(np.int64), axis=0)
    firsts = np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))
    done = (np.arange(len(cut), dtype=np.uint64) - firsts) * np.uint64(READ_BYTES)
    cut[:, :2] += done[:, None]
    cut[:, 2] = np.minimum(cut[:, 2] - done, np.uint64(READ_BYTES))
    return cut


def perform(
    reads: Sequence[Read],
    deadline: Deadline,
    *,
    may_post: Callable[[Read], bool] = lambda _: True,
    landed: Callable[[Read], None] = lambda _: None,
    blocked: Callable[[], None] = lambda: None,
    still: Callable[[Sequence[Read]], None] = lambda _: None,
    flight: int = FLIGHT,
    pause_s: float = POLL_S,
) -> None:
    """Post the reads in order and see them through. On an error some may be in flight.

    Args:
        may_post: Whether what this read is after is there.
        landed: Called with each read that has.
        blocked: Called when nothing is in flight and the next read may not be posted: waits.
        still: Called again and again with those that are in flight.
        flight: How many are in flight at a time.

    Raises:
        TransferFailed: A peer is gone.
        DeadlineExceeded: Too slow.
    """
    waiting = deque(reads)
    flying: list[Read] = []
    while waiting or flying:
        while waiting and len(flying) < flight and may_post(waiting[0]):
            flying.append(waiting[0])
            waiting.popleft().post()
        done = [read for read in flying if read.is_done()]
        for read in done:
            flying.remove(read)
            landed(read)
        left = sum(read.size_bytes for read in (*waiting, *flying))
        if left:
            deadline.check(f"{left} bytes are still to be read")
        still(flying)
        if not done and flying:
            time.sleep(pause_s)
        elif not done and waiting:
            blocked()


def close_all(reads: Sequence[Read]) -> None:
    """Release reads. No byte of theirs lands after this returned, or was ended by Ctrl-C."""
    for number, read in enumerate(reads):
        try:
            read.close()
        except (KeyboardInterrupt, SystemExit):  # once more, while it waited
            close_all(reads[number:])
            raise
