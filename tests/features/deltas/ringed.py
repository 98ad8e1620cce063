"""A publisher that makes its ring of deltas by hand, and what its readers are to have.

It has two buffers, whose contents differ in some of the cells only; some cells go from A to B and
back to A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from checks import demand
from replicas import Process
from scenes import Scene
from world import few_change

from torch_ros.codec.delta import Delta
from torch_ros.codec.table import (
    NAME,
    TABLE_BYTES,
    DeltaEntry,
    DeltaHead,
    DeltaTable,
    padded,
)
from torch_ros.digests import digest_of
from torch_ros.features.deltas import reading as delta_reading
from torch_ros.shard.checkpoint import SaveRequest
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import LocalChunk, LocalTensor

RING_BYTES = 1 << 16


class Publisher:
    """Two buffers, and a ring in which deltas lie; of one process.

    Args:
        room: Where in the ring the next delta is written, if it is not behind the last one.
    """

    def __init__(self, me: Process) -> None:
        self.me, self.uids, self.entries = me, dict[int, str](), list[DeltaEntry]()
        self.ring = torch.zeros(RING_BYTES, dtype=torch.uint8)
        self.buffers = [torch.zeros(len(me.cells), dtype=torch.int64) for _ in range(2)]
        self.chunks: dict[int, list[torch.Tensor]] = {}  # of each version
        self._end = TABLE_BYTES

    def _tensors(self, memory: torch.Tensor) -> list[LocalTensor]:
        made, begin = [], 0
        for tensor in self.me.tensors:
            [chunk] = tensor.chunks
            part = memory[begin : begin + chunk.tensor.numel()].view(chunk.tensor.shape)
            begin += part.numel()
            copy = LocalChunk(chunk.offsets, part)
            made.append(LocalTensor(tensor.fqn, tensor.dtype, tensor.shape, (copy,), spread=True))
        return made

    def save(
        self,
        version: int,
        *,
        bases: Sequence[int] | None = None,
        coming: bool = False,
        content: int | None = None,
    ):
        """Publish a version; then make the deltas from `bases`, by default the one before.

        Args:
            coming: Say that one is being made, which is not so.
            content: If it is not that of its number.
        """
        me = self.me
        me.world.contents[version] = version if content is None else content
        buffer = self.buffers[version % 2]
        buffer.numpy()[:] = me.expected(me.world.contents[version])
        state = LocalState(self._tensors(buffer), {}, {}, pools=[self.ring])
        me.handle.checkpoints.save(SaveRequest(version, state, timeout_s=100))
        shard = me.shard
        self.uids[version] = shard.held.uid
        self.chunks[version] = [chunk.clone() for chunk in shard.tensors.registered.memory]
        for base in (version - 1,) if bases is None else bases:
            if base in self.chunks:
                self.make(base, version)
        uids = self.uids.get(version - 1, ""), self.uids[version]
        self.show(uids[0] if coming else None)

    def show(self, coming: str | None = None) -> None:
        """Write the table, and say where it is."""
        table = DeltaTable(tuple(self.entries), coming)
        self.ring.numpy()[:TABLE_BYTES] = np.frombuffer(table.encode(), np.uint8)
        mailbox = self.me.shard.mailbox
        where = self.ring.data_ptr()
        mailbox._post(msgspec.structs.replace(mailbox.manifest, more={NAME: where}))

    def make(self, base: int, version: int) -> None:
        pairs = zip(self.chunks[base], self.chunks[version], strict=True)
        found = [Delta.of(*pair) for pair in pairs]
        rows = np.array([len(each.index) for each in found])
        widths = np.array([each.gaps.itemsize for each in found])
        layout = self.me.shard.tensors.registered.layout
        index = np.concatenate([each.index for each in found])
        head, ring, begin = DeltaHead.of(layout, index, rows, widths), self.ring.numpy(), self._end
        for each, *places in zip(found, head.gaps, head.values, strict=True):
            for place, array in zip(places, (each.gaps, each.values), strict=True):
                content = array.view(np.uint8)
                ring[begin + place : begin + place + len(content)] = content
        encoded, at = head.encode(), begin + head.body_bytes
        ring[at : at + len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._end = begin + padded(head.body_bytes + len(encoded))
        where = self.ring.data_ptr() + begin, head.body_bytes, len(encoded)
        entry = DeltaEntry(self.uids[base], self.uids[version], *where, digest_of(encoded))
        self.entries.insert(0, entry)

    def reuse(self) -> None:
        """From here on deltas lie where the first ones lay; those are not listed any more."""
        self.entries, self._end = [], TABLE_BYTES


@contextmanager
def chosen():
    """The estimate always says deltas."""
    with patch.object(delta_reading, "are_faster", lambda *_: True):
        yield


def played(scene: Scene) -> None:
    scene.cells = few_change
    with chosen():
        scene.play()


def corrupt(me: Process) -> int:
    return me.shard.observed.tally.corrupt


def holds(me: Process, version: int) -> None:
    found = me.handle.version
    demand(found == version, f"{me} has version {found}, not {version}")
    expected = me.expected(me.world.contents[version])
    is_whole = np.array_equal(me.cells, expected)
    demand(is_whole, f"I1: {me} has {version} as {me.cells}, not {expected}")


def update(
    me: Process, expected: str, version: int, *, wrong: int = 0, ahead: bool = False
) -> None:
    """Go to a version, in a way that is known."""
    me.handle.update(timeout_s=100)
    holds(me, version)
    read = me.handle.last_read
    demand(read.prefetched == ahead, f"{me} has prefetched {version}: {read.prefetched}")
    demand(read.via == expected, f"I1: {me} has read {version} by {read.via}, not {expected}")
    demand(corrupt(me) == wrong, f"I1: what {me} has read was wrong {corrupt(me)} times")


def first(me: Process) -> None:
    me.handle.replicate(1, timeout_s=100)
    holds(me, 1)
    me.world.reach(f"{me} has 1")


def has(scene: Scene, name: str, what: object) -> list[str]:
    return [f"{process} has {what}" for process in scene.start_named(name).processes]


def train(scene: Scene, script: Callable[[Process, Publisher], None], **options) -> None:
    """A trainer that has published 1, and goes on when `r` has it."""

    def run(me: Process) -> None:
        publisher = Publisher(me)
        publisher.save(1)
        scene.until(*has(scene, "r", 1))
        script(me, publisher)

    options = {"size": 2, "digests": "full", "borrow_bytes": 1} | options
    scene.start("t", run, **options)


@contextmanager
def before(scene: Scene, owner: object, name: str, then: Callable[[Process], object]):
    """Do something in the process that calls this, right before it does."""
    was = getattr(owner, name)

    def call(*args, **kwargs):
        then(scene.current.process)
        return was(*args, **kwargs)

    with patch.object(owner, name, call):
        yield
