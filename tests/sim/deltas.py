"""Scenes of replicas that read deltas: I1, whoever stands still, fails or writes meanwhile.

Publishers make their rings by hand here: they have two buffers, whose contents differ in some of
the cells only; some cells go from A to B and back to A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from checks import demand
from replicas import Process
from scenes import SCENES, Scene, puts
from world import few_change

from torch_ros.errors import ClosedError, SourceLost, TorchRosError
from torch_ros.shard.checkpoint import SaveRequest
from torch_ros.store.txn import Watch
from torch_ros.transfer import delta_reading, feed, reading
from torch_ros.transfer.card import ALL_BLOCKS
from torch_ros.transfer.registered import LocalState
from torch_ros.weights import delta_choice
from torch_ros.weights.delta import Delta
from torch_ros.weights.delta_table import (
    TABLE_BYTES,
    DeltaEntry,
    DeltaHead,
    DeltaTable,
    digest_of,
    padded,
)
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
        shard = me.handle._shard
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
        mailbox = self.me.handle._shard.mailbox
        where = self.ring.data_ptr()
        mailbox._post(msgspec.structs.replace(mailbox.manifest, deltas=where))

    def make(self, base: int, version: int) -> None:
        pairs = zip(self.chunks[base], self.chunks[version], strict=True)
        found = [Delta.of(*pair) for pair in pairs]
        rows = np.array([len(each.index) for each in found])
        widths = np.array([each.gaps.itemsize for each in found])
        layout = self.me.handle._shard.tensors.registered.layout
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
    return me.handle._shard.observed.tally.corrupt


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


def by_deltas(scene: Scene) -> None:
    """I1: chains of one to three deltas, in another sharding."""
    order = (2, 4, 7)

    def script(me: Process, publisher: Publisher) -> None:
        for version in range(2, 8):
            publisher.save(version)
            if version in order:
                scene.reach(f"{me} made {version}")
                scene.until(*has(scene, "r", version))

    def read(me: Process) -> None:
        first(me)
        for version in order:
            scene.until(*(f"t.0/{rank} made {version}" for rank in range(2)))
            update(me, "delta", version)
            scene.reach(f"{me} has {version}")
        scene.until(*has(scene, "r", order[-1]))  # a rank that closes ends what its peers hold

    train(scene, script)
    scene.start("r", read, size=scene.rng.choice([1, 2, 3]), digests="full")
    played(scene)


@contextmanager
def before(scene: Scene, owner: object, name: str, then: Callable[[Process], object]):
    """Do something in the process that calls this, right before it does."""
    was = getattr(owner, name)

    def call(*args, **kwargs):
        then(scene.current.process)
        return was(*args, **kwargs)

    with patch.object(owner, name, call):
        yield


def rewritten(scene: Scene) -> None:
    """I1: bytes that landed when their source had something else there are not applied."""
    late: list[Process] = []

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.when(lambda: late, "a reader whose reads are late")
        publisher.reuse()
        for version in (3, 4):
            publisher.save(version)
        scene.reach("saved")
        scene.until(*has(scene, "r", 4))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        with suppress(SourceLost):
            me.handle.update(timeout_s=100)
        scene.slow_s[me] = 0.0
        demand(me.handle.version != 2, "its source stayed")
        scene.until("saved")
        me.handle.update(timeout_s=100)
        holds(me, 4)
        scene.reach(f"{me} has 4")

    def is_late(me: Process) -> None:
        if me.handle.version is None and me not in late:
            late.append(me)
            scene.slow_s[me] = 6.0  # they land while it stands still
            scene.at(scene.now_s + 0.2, partial(scene._suspend, me, 8.0))

    train(scene, script, drain_s=2.0)
    scene.start("r", read, size=1, digests="full")
    heads, scatters = (delta_reading.DeltaHead, "segments"), (delta_reading.DeltaRead, "scatter")
    refused = lambda me: demand(False, f"I1: {me} applies what nobody vouches for")
    with before(scene, *heads, is_late), before(scene, *scatters, refused):
        played(scene)


def stray_cell(scene: Scene, *, loses_seat: bool = False) -> None:
    """I1: what deltas have made of a base that was written to is told to nobody."""
    strays: list[Process] = []

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.until(*has(scene, "r", 2))
        publisher.save(3)
        scene.reach(f"{me} made 3")
        scene.until(*has(scene, "r", 3))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        update(me, "full", 2, wrong=1)
        scene.reach(f"{me} has 2")
        scene.until(*(f"t.0/{rank} made 3" for rank in range(2)))
        update(me, "full", 3, wrong=1)  # whoever has done so will do it again
        scene.reach(f"{me} has 3")
        scene.until(*has(scene, "r", 3))  # who leaves ends the replica

    def scribble(me: Process) -> None:
        if not strays:
            strays.append(me)
            me.cells[1] += 7  # a cell that no delta names

    def strike(me: Process) -> None:
        if loses_seat and len(strays) == 1:
            strays.append(me)
            scene.end_lease(me)

    train(scene, script)
    scene.start("r", read, size=2, digests="full")
    scatters, fills = (delta_reading.DeltaRead, "scatter"), (feed.Progress, "fill")
    with before(scene, *scatters, scribble), before(scene, *fills, strike):
        played(scene)
    demand(strays, "no delta was applied")


def late_end(scene: Scene, *, fails: bool = False) -> None:
    """I6: who finds a replica full reads from a rank that has not learned that it is.

    Args:
        fails: The rank's call has failed for it, and it learns the end in its next call.
    """

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.until("r is full")
        me.handle.unpublish(timeout_s=100)  # nobody else has it
        scene.reach(f"{me} left")
        scene.until("r2.2/0 has 2", *has(scene, "r", 2))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        if me.rank == 0:
            waits = partial(awaits_end, me)
            goes_on = lambda: fails or "r2.2/0 has 2" in scene.reached
            cut_off = lambda: fails and scene._cut(me, 9.0)
            scene.hold("late", me, waits, goes_on, meanwhile=cut_off)
        else:  # the last one knows the end at once
            comes = lambda what: puts("/ready/")(what) and has_applied(me)
            scene.hold("last", me, comes, lambda: "late" in scene.reached)
        with suppress(TorchRosError) if fails and me.rank == 0 else nullcontext():
            me.handle.update(timeout_s=2 if fails and me.rank == 0 else 100)
        if fails:
            scene.until("r2.2/0 has 2")
        me.handle.update(timeout_s=100)
        holds(me, 2)
        word = me.handle._shard.mailbox.word
        demand(word.position == ALL_BLOCKS, f"I6: {me} holds 2, and shows {word}")
        scene.reach(f"{me} has 2")
        scene.until("r2.2/0 has 2", *has(scene, "r", 2))

    def follow(me: Process) -> None:
        scene.until("late", "t.0/0 left", "t.0/1 left")
        me.handle.replicate(2, timeout_s=30)
        holds(me, 2)
        scene.reach(f"{me} has 2")
        scene.until(*has(scene, "r", 2))

    def watch() -> None:
        scene.until("late")
        of_r = lambda: [held for held in scene.checks.holdings.values() if not held.is_original]
        is_full = lambda: any(held.state == "full" and held.call > 2 for held in of_r())
        scene.when(is_full, "r full")
        scene.reach("r is full")

    train(scene, script)
    scene.start("r", read, size=2, digests="full")
    scene.start("r2", follow, size=1, digests="full")
    scene.spawn(scene.start_named("t").processes[0], "watches", watch)
    played(scene)


def awaits_end(me: Process, what: object) -> bool:
    """Whether it waits for the end of a call in which it has applied deltas."""
    return isinstance(what, Watch) and has_applied(me)


def has_applied(me: Process) -> bool:
    """Whether it has applied deltas, in a call whose end it has not learned."""
    word = me.handle._shard.mailbox.word
    return word.mark > 0 and word.position == 0


def base_once(scene: Scene) -> None:
    """I1: what deltas have half changed is no base for others."""
    struck: list[Process] = []

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.until("struck")
        publisher.save(3, bases=[1])  # it does not name what went from A to B and back
        scene.reach(f"{me} made 3")
        scene.until(*has(scene, "r", 3))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        with suppress(TorchRosError):
            me.handle.update(timeout_s=100)
        scene.until(*(f"t.0/{rank} made 3" for rank in range(2)))
        me.handle.update(timeout_s=100)
        holds(me, 3)
        demand(corrupt(me) == 0, f"I1: {me} has applied deltas to another content")
        scene.reach(f"{me} has 3")

    scatter = delta_reading.DeltaRead.scatter

    def fails(self, staged) -> None:
        scatter(self, staged)
        struck.append(scene.current.process)
        if len(struck) == 1:
            raise MemoryError

    def strike(me: Process) -> None:
        if struck and "struck" not in scene.reached:
            scene.end_lease(me)
            scene.reach("struck")
            scene.until("t.0/0 made 3", "t.0/1 made 3")

    train(scene, script, drain_s=2.0)
    scene.start("r", read, size=1, digests="full")
    failing = patch.object(delta_reading.DeltaRead, "scatter", fails)
    with failing, before(scene, reading.Reading, "read", strike):
        played(scene)
    demand(struck, "no delta was applied")


def not_held(scene: Scene) -> None:
    """I1: tensors that their owner has taken back are no base."""

    def script(me: Process, publisher: Publisher) -> None:
        for version in (2, 3):
            publisher.save(version)
            scene.reach(f"{me} made {version}")
            scene.until(*has(scene, "r", version))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        update(me, "delta", 2)
        me.handle.unpublish(timeout_s=100)
        me.scribble_if_free()
        scene.reach(f"{me} has 2")
        scene.until(*(f"t.0/{rank} made 3" for rank in range(2)))
        update(me, "full", 3)
        scene.reach(f"{me} has 3")

    train(scene, script)
    scene.start("r", read, size=1, digests="full")
    played(scene)


def one_without_digests(scene: Scene) -> None:
    """I1: nobody holds what deltas have made, and not all ranks can compare."""
    strays: list[Process] = []

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.until(*has(scene, "r", 2))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        update(me, "full", 2, wrong=1)
        scene.reach(f"{me} has 2")

    def scribble(me: Process) -> None:
        strays.append(me)
        me.cells[1] += 7

    train(scene, script)
    scene.start("r", read, size=2, digests=("full", "off"))
    with before(scene, delta_reading.DeltaRead, "scatter", scribble):
        played(scene)
    demand(strays, "no delta was applied")
    demand(not scene.suspects, f"I13: {scene.suspects}, and what was held was wrong")


def coming(scene: Scene) -> None:
    """I6: a delta that is being made is waited for, and not for ever."""

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2, bases=[], coming=True)
        scene.reach(f"{me} made 2")
        scene.until(*has(scene, "r", 2))
        publisher.save(3, bases=[], coming=True)
        scene.reach(f"{me} made 3")
        scene.sleep(2.0)
        publisher.make(2, 3)
        publisher.show()
        scene.until(*has(scene, "r", 3))

    def read(me: Process) -> None:
        first(me)
        for version, via in ((2, "full"), (3, "delta")):
            scene.until(*(f"t.0/{rank} made {version}" for rank in range(2)))
            began_s = scene.now_s
            update(me, via, version)
            took_s = scene.now_s - began_s
            demand(took_s < 10.0, f"I6: {me} waited for a delta, {took_s} s")
            scene.reach(f"{me} has {version}")

    train(scene, script)
    scene.start("r", read, size=1, digests="full")
    with patch.object(delta_choice, "full_s", lambda *_: 10.0):
        played(scene)


def prefetched(scene: Scene) -> None:
    """I1: some ranks have staged a chain of deltas before they update, and others have not."""
    order = (2, 4, 7)

    def script(me: Process, publisher: Publisher) -> None:
        for version in range(2, 8):
            publisher.save(version)
            if version in order:
                scene.reach(f"{me} made {version}")
                scene.until(*has(scene, "r", version))

    def read(me: Process) -> None:
        first(me)
        for version in order:
            scene.until(*(f"t.0/{rank} made {version}" for rank in range(2)))
            is_ahead = me.rank != version % 3
            if is_ahead:
                staged = me.handle.prefetch(timeout_s=100)
                demand(staged == version, f"{me} has staged {staged}, not {version}")
            update(me, "delta", version, ahead=is_ahead)
            scene.reach(f"{me} has {version}")
        scene.until(*has(scene, "r", 7))  # who leaves ends the replica

    train(scene, script)
    scene.start("r", read, size=scene.rng.choice([1, 2, 3]), digests="full")
    played(scene)


def prefetch_rewritten(scene: Scene) -> None:
    """I1: changes that landed when their source had something else there are not kept."""
    late: list[Process] = []

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.when(lambda: late, "a prefetch whose reads are late")
        publisher.reuse()
        publisher.save(3)
        publisher.reuse()
        publisher.save(4, bases=[1])
        scene.reach(f"{me} made 4")
        scene.until(*has(scene, "r", 4))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        staged = None
        with suppress(SourceLost):
            staged = me.handle.prefetch(timeout_s=100)
        demand(staged != 2, f"I1: {me} keeps what nobody vouches for")
        scene.slow_s[me] = 0.0
        scene.until(*(f"t.0/{rank} made 4" for rank in range(2)))
        me.handle.update(timeout_s=100)
        holds(me, 4)
        demand(corrupt(me) == 0, f"I1: {me} has applied what nobody vouches for")
        scene.reach(f"{me} has 4")

    def is_late(me: Process) -> None:
        if me not in late:
            late.append(me)
            scene.slow_s[me] = 6.0  # they land while it stands still
            scene.at(scene.now_s + 0.2, partial(scene._suspend, me, 8.0))

    train(scene, script, drain_s=2.0)
    scene.start("r", read, size=1, digests="full")
    with before(scene, delta_reading.DeltaHead, "segments", is_late):
        played(scene)


def prefetch_in_vain(scene: Scene) -> None:
    """I1: what was staged beside an update is not applied to what that has brought."""

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2, bases=[])
        scene.until(*has(scene, "r2", 2))
        publisher.save(3, bases=[1])  # it does not name what went from A to B and back
        scene.reach(f"{me} made 3")
        scene.until(*has(scene, "r", 3))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 3" for rank in range(2)))
        scene.spawn(me, "prefetches", partial(prefetch, me))
        scene.until("landed")
        me.handle.update(2, timeout_s=100)
        holds(me, 2)
        scene.reach("updated")
        scene.until("prefetched")
        update(me, "full", 3)
        scene.reach(f"{me} has 3")

    def prefetch(me: Process) -> None:
        me.handle.prefetch(timeout_s=100)
        scene.reach("prefetched")

    def stand(me: Process) -> None:
        if "landed" not in scene.reached:
            scene.reach("landed")
            scene.until("updated")

    def seed(me: Process) -> None:
        me.handle.replicate(2, timeout_s=100)
        scene.reach(f"{me} has 2")
        scene.until(*has(scene, "r", 3))

    train(scene, script)
    scene.start("r", read, size=1, digests="full")
    scene.start("r2", seed, size=1, digests="full")
    with before(scene, delta_reading.DeltaRead, "_certify", stand):
        played(scene)


def prefetch_of_another(scene: Scene) -> None:
    """I1: what was staged for a number is not applied for other content of that number."""

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2")
        scene.until("r.1/0 staged 2")
        me.handle.unpublish(timeout_s=100)
        publisher.save(2, bases=[1], content=102)
        scene.reach(f"{me} made 2 again")
        scene.until(*has(scene, "r", 2))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        staged = me.handle.prefetch(timeout_s=100)
        demand(staged == 2, f"{me} has staged {staged}")
        scene.reach(f"{me} staged 2")
        scene.until(*(f"t.0/{rank} made 2 again" for rank in range(2)))
        update(me, "delta", 2)
        scene.reach(f"{me} has 2")

    train(scene, script)
    scene.start("r", read, size=1, digests="full")
    played(scene)


def prefetch_beside(scene: Scene) -> None:
    """I1, I6: one that is under way at any moment of an update, or of the end, is in no way."""
    last = 6

    def script(me: Process, publisher: Publisher) -> None:
        for version in range(2, last + 1):
            publisher.save(version)
            scene.reach(f"{me} made {version}")
            scene.until(*has(scene, "r", version))

    def read(me: Process) -> None:
        first(me)
        scene.spawn(me, "prefetches", partial(prefetch, me))
        scene.slow_s[me] = scene.rng.choice([0.0, 0.05, 0.2])
        for version in range(2, last + 1):
            scene.until(*(f"t.0/{rank} made {version}" for rank in range(2)))
            scene.sleep(scene.rng.uniform(0.0, 0.5))
            me.handle.update(timeout_s=100)
            holds(me, version)
            scene.reach(f"{me} has {version}")
        demand(corrupt(me) == 0, f"I1: what {me} has read was wrong {corrupt(me)} times")
        scene.until(*has(scene, "r", last))
        me.handle.close()
        scene.until(f"{me} prefetches no more", limit_s=5.0)

    def prefetch(me: Process) -> None:
        with suppress(ClosedError):
            while True:
                with suppress(SourceLost):
                    me.handle.prefetch(timeout_s=100)
                scene.sleep(scene.rng.uniform(0.0, 0.2))
        scene.reach(f"{me} prefetches no more")

    train(scene, script, drain_s=2.0)
    scene.start("r", read, size=scene.rng.choice([1, 2]), digests="full")
    played(scene)


MINE = {
    "by deltas": by_deltas,
    "rewritten": rewritten,
    "stray cell": stray_cell,
    "stray cell, seat lost": partial(stray_cell, loses_seat=True),
    "late end": late_end,
    "late end, learned later": partial(late_end, fails=True),
    "base once": base_once,
    "not held": not_held,
    "one without digests": one_without_digests,
    "delta coming": coming,
    "prefetched": prefetched,
    "prefetch rewritten": prefetch_rewritten,
    "prefetch in vain": prefetch_in_vain,
    "prefetch of another": prefetch_of_another,
    "prefetch beside": prefetch_beside,
}
SCENES |= MINE
