"""The peers of a process: connections to other processes, and what their mailboxes say.

Nothing that a peer shows is trusted: a card, notice or manifest that makes no sense is the failure
of that peer, and nobody else's.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from torch_ros.costs import HOST_COSTS, Costs
from torch_ros.deadline import Deadline
from torch_ros.digests import digest_of
from torch_ros.errors import SourceLost, TorchRosError, TransferFailed, UsageError
from torch_ros.p2p.transport import Peer, Transfer, Transport
from torch_ros.spans import HOST, Spans
from torch_ros.transfer.card import (
    ADDRESS_MAX,
    HEADER_BYTES,
    MAILBOX_BYTES,
    RATE_BYTES,
    WORD_BYTES,
    Card,
    Notice,
    Word,
)
from torch_ros.transfer.mailbox import MANIFESTS_KEPT, region_of
from torch_ros.transfer.posting import POLL_S, Watcher, close_all, parts, perform
from torch_ros.weights.manifest import Manifest

PEERS_MAX = 4096  # connections kept; the least recently used is closed first
ATTACHED_MAX = 256  # registrations known of one peer
MANIFEST_BYTES_MAX = 1 << 30  # some million chunks
Asked = Literal["word", "whole", "rate"]

# Errors of whoever takes a card, notice or manifest at its word.
_UNUSABLE = (msgspec.MsgspecError, UsageError, ValueError, ArithmeticError, TypeError, MemoryError)


@dataclass(frozen=True, slots=True)
class PeerState:
    """All that a process shows in its mailbox, at one look."""

    agent: str
    mailbox_address: int
    word: Word
    manifest: Manifest | None
    problem: str = ""  # why there is no manifest


@dataclass(slots=True)
class _Question:
    """A transfer that is posted again and again, into the same memory."""

    buffer: npt.NDArray[np.uint8]
    transfer: Transfer
    is_late: bool = False  # in flight still: whoever asked ran out of time

    def ask(self, deadline: Deadline, still: Callable[[], None]) -> bytes:
        """Return what is there now; `still` is called while an answer is waited for."""
        while self.is_late and not self.transfer.is_done():  # those bytes are of no use
            deadline.check("an earlier answer is still to be read")
            still()
            time.sleep(POLL_S)
        self.is_late = False
        try:
            perform([self.transfer], deadline, Watcher(still), pause_s=0.0)
        except TorchRosError as error:
            self.is_late = not isinstance(error, TransferFailed)  # a transfer that failed has ended
            raise
        return self.buffer.tobytes()


# Each question's bytes of a mailbox: the first one, how many, and their place in a reader's buffer,
# which is their own: a late answer lands over no other.
_PARTS = {
    "whole": (0, MAILBOX_BYTES, 0),
    "word": (0, WORD_BYTES, MAILBOX_BYTES),
    "rate": (MAILBOX_BYTES - RATE_BYTES, RATE_BYTES, MAILBOX_BYTES + WORD_BYTES),
}


class PeerMailbox:
    """The mailbox of a peer. Its word is read after every batch, all of it at every call."""

    def __init__(self, transport: Transport, peer: Peer, address: int) -> None:
        self._peer, self._address = peer, address
        self._buffer = np.zeros(MAILBOX_BYTES + WORD_BYTES + RATE_BYTES, np.uint8)
        self._registration = transport.register([region_of(self._buffer)])
        self._questions: dict[str, _Question] = {}

    def question(self, what: Asked) -> _Question:
        """Return that question, which stays prepared: it is asked again and again."""
        if what not in self._questions:
            first, size, place = _PARTS[what]
            part = self._buffer[place : place + size]
            spans = np.array([[self._address + first, part.ctypes.data, size]], np.uint64)
            self._questions[what] = _Question(part, self._peer.prepare(spans))
        return self._questions[what]

    @property
    def is_late(self) -> bool:
        """Whether an answer is due that nobody waits for any more."""
        return any(question.is_late for question in self._questions.values())

    def close(self) -> None:
        close_all([question.transfer for question in self._questions.values()])
        self._registration.close()


class Peers:
    """The processes that this one reads from. Not safe for use by several threads at once.

    `before_forget` is called with an agent before it is disconnected, to close reads from it.
    """

    def __init__(
        self, transport: Transport, before_forget: Callable[[str], None] = lambda _: None
    ) -> None:
        self._transport, self._before_forget = transport, before_forget
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._attached: dict[str, set[bytes]] = {}
        self._manifests: dict[str, dict[bytes, Manifest]] = {}  # agent -> by digest, the last ones
        self._mailboxes: dict[tuple[str, int], PeerMailbox] = {}

    def state(
        self,
        card: bytes,
        deadline: Deadline,
        still: Callable[[], None] = lambda: None,
        *,
        serves: bool = False,
    ) -> PeerState:
        """Connect to the process behind `card`, if need be, and see what it shows now.

        The state has no manifest if the process shows none, or rewrote it while it was read.
        `still` is called while an answer is waited for.

        Args:
            serves: True: only the word is asked of a process that serves nothing.

        Raises: TransferFailed: The process is gone, or shows what cannot be read.
        """
        with _believing("?", "its card"):
            where = Card.decode(card)
        peer, mailbox = self._reach(where), (where.agent, where.mailbox_address)
        # The word first: a process shows something before it serves it, and nothing says in which
        # order the bytes of one read are fetched.
        word = self.word(where, deadline, still)
        if serves and not word.mark:
            return PeerState(*mailbox, word, None, "it serves nothing")
        box = self._ask(where, "whole", deadline, still)
        length = int.from_bytes(box[WORD_BYTES : 2 * WORD_BYTES], "little")
        content = box[HEADER_BYTES : HEADER_BYTES + length]
        if length == 0 or digest_of(content) != box[2 * WORD_BYTES : HEADER_BYTES]:
            problem = "its mailbox does not fit its digest" if length else "it shows no tensors"
            return PeerState(*mailbox, word, None, problem)
        with _believing(where.agent, "its notice"):
            notice = msgspec.msgpack.decode(content, type=Notice)
        manifest = self._manifest(peer, notice, deadline, still)
        problem = "" if manifest is not None else "its manifest does not fit its digest"
        return PeerState(*mailbox, word, manifest, problem)

    def manifest(
        self, card: bytes, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> tuple[str, Manifest]:
        """Return the agent behind `card`, connected, and the manifest that it shows now.

        Raises: TransferFailed: It is gone, shows nothing, or rewrote it while it was read.
        """
        state = self.state(card, deadline, still)
        if state.manifest is None:
            raise TransferFailed(state.agent, f"{state.problem} (unregistered meanwhile?)")
        return state.agent, state.manifest

    def word(
        self, where: Card | PeerState, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> Word:
        """Read the word of that process, which is connected. Raises: TransferFailed: It is gone."""
        return Word.unpack(int.from_bytes(self._ask(where, "word", deadline, still), "little"))

    def rate(
        self, where: PeerState, deadline: Deadline, still: Callable[[], None] = lambda: None
    ) -> int:
        """Read how fast bytes land at that process, which is connected; 0: not known.

        Raises: TransferFailed: It is gone.
        """
        return int.from_bytes(self._ask(where, "rate", deadline, still), "little")

    def costs(self, agents: Iterable[str]) -> Costs:
        """The costs of reads from these, which are connected: of the slowest."""
        found = [self._peers[agent].costs for agent in agents]
        return min(found, key=lambda each: (each.read_bytes_per_s, -each.descriptor_s))

    def is_near(self, agents: Iterable[str]) -> bool:
        """Whether all of these, which are connected, are read by copying: on this host."""
        return all(self._peers[agent].costs == HOST_COSTS for agent in agents)

    def prepare(
        self,
        agent: str,
        manifest: Manifest,
        spans: Spans,
        *,
        source_device: int = HOST,
        target_device: int = HOST,
    ) -> list[Transfer]:
        """Prepare transfers of `spans` from `agent`. The caller closes them."""
        transfers: list[Transfer] = []
        devices = {"source_device": source_device, "target_device": target_device}
        with _believing(agent, "its memory"):
            peer = self._peers[agent]
            self._attach(peer, manifest.descriptor)
            try:
                for part in parts(spans):
                    transfers += [peer.prepare(part, **devices)]
            except BaseException:
                close_all(transfers)
                raise
        return transfers

    def forget(self, agent: str) -> None:
        """Disconnect from an agent, so that the next `state` starts afresh."""
        if any(box.is_late for (owner, _), box in self._mailboxes.items() if owner == agent):
            self._peers[agent].cut()  # closing the mailbox would wait for that answer
        self._before_forget(agent)
        self._attached.pop(agent, None)
        self._manifests.pop(agent, None)
        for key in [key for key in self._mailboxes if key[0] == agent]:
            self._mailboxes.pop(key).close()
        if peer := self._peers.pop(agent, None):
            peer.close()

    def leave(self, agent: str) -> None:
        """Disconnect from an agent that does not answer, and end all reads from it."""
        if peer := self._peers.get(agent):
            peer.cut()
        self.forget(agent)

    def close(self) -> None:
        for agent in list(self._peers):
            self.forget(agent)

    def _reach(self, where: Card) -> Peer:
        """Connect to the process, if need be, and learn of the memory that its mailbox is in."""
        if not 0 <= where.mailbox_address <= ADDRESS_MAX - MAILBOX_BYTES:
            raise TransferFailed(where.agent, f"no mailbox can be at {where.mailbox_address}")
        if len(self._attached.get(where.agent, ())) > ATTACHED_MAX:
            self.forget(where.agent)  # it registers ever anew, and only a new connection forgets
        with _believing(where.agent, "its card"):
            peer = self._connected(where)
        mailbox = where.agent, where.mailbox_address
        if where.mailbox not in self._attached.get(where.agent, ()) and mailbox in self._mailboxes:
            self._mailboxes.pop(mailbox).close()  # of an earlier mailbox at this address
        self._attach(peer, where.mailbox)
        return peer

    def _connected(self, where: Card) -> Peer:
        if where.agent not in self._peers:
            if len(self._peers) >= PEERS_MAX:
                self.forget(next(iter(self._peers)))  # the one used longest ago
            self._peers[where.agent] = self._transport.connect(where.connection)
        self._peers.move_to_end(where.agent)
        return self._peers[where.agent]

    def _attach(self, peer: Peer, descriptor: bytes) -> None:
        attached = self._attached.setdefault(peer.agent, set())
        if descriptor not in attached:
            peer.attach(descriptor)
            attached.add(descriptor)

    def _ask(
        self, where: Card | PeerState, what: Asked, deadline: Deadline, still: Callable[[], None]
    ) -> bytes:
        """Read a part of the mailbox of a process that is connected."""
        key = agent, address = where.agent, where.mailbox_address
        with _believing(agent, "its mailbox"):
            if key not in self._mailboxes:
                self._mailboxes[key] = PeerMailbox(self._transport, self._peers[agent], address)
            question = self._mailboxes[key].question(what)
        try:
            return question.ask(deadline, still)
        except SourceLost:  # from `still`: nobody waits for this process any more
            self.forget(agent)
            raise
        except BaseException as error:
            # Kept after a deadline: its answer may still come, into memory that nothing else uses.
            if isinstance(error, TransferFailed) or not isinstance(error, TorchRosError):
                self._mailboxes.pop(key).close()
            raise

    def _manifest(
        self, peer: Peer, notice: Notice, deadline: Deadline, still: Callable[[], None]
    ) -> Manifest | None:
        """Return the manifest that the notice names; None if it was rewritten meanwhile."""
        known = self._manifests.setdefault(peer.agent, {})
        if notice.digest not in known:
            content = self._read_bytes(peer, notice, deadline, still)
            if digest_of(content) != notice.digest:
                return None
            with _believing(peer.agent, "its manifest"):
                decoded = Manifest.decode(content)
            if len(known) == MANIFESTS_KEPT:  # as many as the peer itself keeps
                del known[next(iter(known))]
            known[notice.digest] = decoded
        return known[notice.digest]

    def _read_bytes(
        self, peer: Peer, notice: Notice, deadline: Deadline, still: Callable[[], None]
    ) -> bytes:
        """Read the manifest that the notice tells of, into memory registered just for it."""
        address, size_bytes = notice.address, notice.size_bytes
        if not (0 < size_bytes <= MANIFEST_BYTES_MAX and 0 <= address <= ADDRESS_MAX - size_bytes):
            reason = f"its manifest cannot be {size_bytes} bytes at {address}"
            raise TransferFailed(peer.agent, reason)
        buffer = np.empty(size_bytes, np.uint8)
        with closing(self._transport.register([region_of(buffer)])):
            spans = np.array([[address, buffer.ctypes.data, size_bytes]], np.uint64)
            with _believing(peer.agent, "its manifest"):
                self._attach(peer, notice.descriptor)
                transfer = peer.prepare(spans)
            with closing(transfer):
                try:
                    perform([transfer], deadline, Watcher(still))
                # Cut what `still` gives up. After a deadline, other threads may still read from it.
                except SourceLost:
                    self.leave(peer.agent)
                    raise
        return buffer.tobytes()


@contextmanager
def _believing(agent: str, what: str) -> Iterator[None]:
    """Make any error about a card, notice or manifest a failure of the peer that made it."""
    try:
        yield
    except _UNUSABLE as error:
        raise TransferFailed(agent, f"{what} cannot be used: {error}") from error
