"""The mailbox that this process shows to readers, and its word: how much may be read.

The word keeps I2, docs/PROTOCOL.md#invariants: after `unpublish` no read from that memory counts.

    word              is set by                        and means
    0                 void, withdraw, and at first     nothing may be read
    mark, 0           serve, when a read begins        the content of this call; no block is there
    mark, n           serve, when a batch counts       its first n blocks are there
    mark, ALL_BLOCKS  serve, at publish or at the end  all of it is there

From each state the word may move to any below it, while the mark is the same, and to 0. It moves to
another mark only over 0 or with memory that did not change. Layout and addresses change only at 0.

`shard/word.py` decides when: it clears the word wherever a call of the group ends and nothing is
held, and before tensors are taken back without etcd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from torch_ros.digests import digest_of
from torch_ros.p2p.lasting import LastingMemory
from torch_ros.p2p.transport import Registration, Transport
from torch_ros.spans import Region
from torch_ros.transfer.card import MAILBOX_BYTES, RATE_BYTES, WORD_BYTES, Card, Notice, Word
from torch_ros.weights.manifest import Depth, Layout, Manifest

MANIFESTS_KEPT = 2  # two buffers may be published in turn: then nothing is registered anew


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the content that a process shows, as far as it knows them."""

    depth: Depth = "off"
    chunks: tuple[int, ...] = ()  # one for each chunk of this process, or none
    totals: Mapping[str, int] = field(default_factory=dict)  # one for each whole tensor, or none


def region_of(buffer: npt.NDArray[np.uint8]) -> Region:
    return Region(buffer.ctypes.data, buffer.nbytes)


@dataclass(slots=True)
class _ManifestBuffer:
    """A manifest in memory that peers read, and the notice that tells them where."""

    manifest: Manifest
    memory: LastingMemory
    registration: Registration
    notice: bytes = b""  # as it goes into the mailbox; empty: the manifest is not written

    def write(self, manifest: Manifest, content: bytes) -> None:
        """Overwrite the manifest. A reader that gets a mix of bytes sees that by the digest."""
        self.notice = b""  # not written, should Ctrl-C come before the next notice is there
        self.manifest = manifest
        buffer = self.memory.bytes
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
        where = buffer.ctypes.data, len(content), digest_of(content)
        self.notice = Notice(*where, self.registration.descriptor).pack()

    def close(self) -> None:
        self.registration.close()
        self.memory.close()


class Mailbox:
    """This process's mailbox. Not safe for use by several threads at once.

    `before_withdraw` is called before registered tensors are let go, to close reads into them.
    """

    def __init__(
        self, transport: Transport, before_withdraw: Callable[[], None] = lambda: None
    ) -> None:
        self._transport, self._before_withdraw = transport, before_withdraw
        self._lasting = LastingMemory(MAILBOX_BYTES)
        self._memory = self._lasting.bytes
        self._word = self._memory[:WORD_BYTES].view(np.uint64)  # aligned: read whole
        self._rate = self._memory[-RATE_BYTES:].view(np.uint64)  # aligned too
        self._own = transport.register([region_of(self._memory)])  # until `close`
        where = self._own.descriptor, self._memory.ctypes.data
        self.card: bytes = msgspec.msgpack.encode(
            Card(transport.agent, transport.connection, *where)
        )
        self._tensors: Registration | None = None  # of `regions`
        self.regions: tuple[Region, ...] = ()  # of what is shown; the same until it changes
        self._manifests: list[_ManifestBuffer] = []  # the first one is shown

    @property
    def manifest(self) -> Manifest | None:
        return self._manifests[0].manifest if self._manifests else None

    def show(
        self,
        layout: Layout,
        addresses: Sequence[int],
        devices: Sequence[int],
        regions: Sequence[Region],
    ) -> Manifest:
        """Register `regions` and say what is in them. Equal regions stay registered.

        The memory must stay allocated until `withdraw`, or the next `show`, has returned.
        """
        if self._tensors is None or self.regions != tuple(regions):
            self.withdraw()
            self._tensors = self._transport.register(regions)
            self.regions = tuple(regions)
        manifest = Manifest(layout, tuple(addresses), tuple(devices), self._tensors.descriptor)
        if self.manifest != manifest:
            self._post(manifest)
        return manifest

    def show_digests(
        self, digests: Digests, more: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Say what the content of the tensors shown is now.

        Args:
            more: Addresses of what features show of it, by name.
        """
        manifest = self.manifest
        assert manifest is not None
        now = msgspec.structs.replace(
            manifest,
            depth=digests.depth,
            digests=digests.chunks,
            totals=dict(digests.totals),
            more=dict(more),
        )
        if now != manifest:
            self._post(now)

    def _post(self, manifest: Manifest) -> None:
        """Have the mailbox name this manifest, which is written only if it is not kept already."""
        written = next((each for each in self._manifests if each.manifest == manifest), None)
        if written is None or not written.notice:
            written = self._written(manifest)
        end = WORD_BYTES + len(written.notice)
        assert end <= MAILBOX_BYTES - RATE_BYTES
        self._memory[WORD_BYTES:end] = np.frombuffer(written.notice, np.uint8)
        self._manifests = [written, *(each for each in self._manifests if each is not written)]

    def _written(self, manifest: Manifest) -> _ManifestBuffer:
        """Write it into the buffer that is not shown, if it fits, else into a new one."""
        content = manifest.encode()
        spare = self._manifests[-1] if len(self._manifests) == MANIFESTS_KEPT else None
        if spare is None or spare.memory.bytes.nbytes < len(content):
            memory = LastingMemory(len(content) + len(content) // 8)  # digests vary in size
            registration = self._transport.register([region_of(memory.bytes)])
            if spare is not None:
                self._manifests.remove(spare)
                spare.close()
            spare = _ManifestBuffer(manifest, memory, registration)
        spare.write(manifest, content)
        return spare

    @property
    def word(self) -> Word:
        """What readers are told now."""
        return Word.unpack(int(self._word[0]))

    def serve(self, mark: int, position: int) -> None:
        """Set the word: the first `position` blocks of the content `mark` may be read."""
        self._word[0] = Word(mark, position).pack()

    def tell_rate(self, bytes_per_s: int) -> None:
        """Tell readers how fast bytes land here; 0: not known. No byte counts by it."""
        self._rate[0] = bytes_per_s

    def void(self) -> None:
        """Clear the word: no read counts that ends from now on. Call it before a write."""
        self._word[0] = 0

    def withdraw(self) -> None:
        """Show nothing. Afterwards the tensors' memory may be freed. Idempotent."""
        self._memory[:] = 0
        while self._manifests:  # none that is closed stays, should Ctrl-C come
            self._manifests.pop().close()
        if self._tensors is not None:
            self._before_withdraw()
            self._tensors.close()
        self._tensors, self.regions = None, ()

    def close(self) -> None:
        self.withdraw()
        self._own.close()
        # The old memory may become another mailbox's: what is still called here writes elsewhere.
        self._memory = np.zeros(MAILBOX_BYTES, np.uint8)
        self._word = self._memory[:WORD_BYTES].view(np.uint64)
        self._rate = self._memory[-RATE_BYTES:].view(np.uint64)
        self._lasting.close()
