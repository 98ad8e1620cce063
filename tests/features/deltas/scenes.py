"""Scenes of replicas that read deltas: I1, whoever stands still, fails or writes meanwhile."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from unittest.mock import patch

from checks import demand
from features.deltas.ringed import (
    Publisher,
    before,
    corrupt,
    first,
    has,
    holds,
    played,
    train,
    update,
)
from replicas import Process
from scenes import SCENES, Scene, puts, scenes_of

from torch_ros.errors import SourceLost, TorchRosError
from torch_ros.features.deltas import reading as delta_reading
from torch_ros.features.deltas import rules as delta_choice
from torch_ros.store.txn import Watch
from torch_ros.transfer import feed, reading
from torch_ros.transfer.card import ALL_BLOCKS


def by_deltas(scene: Scene) -> None:
    """I1: chains of one to three deltas, in another sharding."""
    order = (2, 4, 7)

    def script(me: Process, publisher: Publisher) -> None:
        for version in range(2, 8):
            publisher.save(version)
            if version in order:
                scene.reach(f"{me} made {version}", until=(*has(scene, "r", version),))

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
        scene.reach("saved", until=(*has(scene, "r", 4),))

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
            scene.at(scene.now_s + 0.2, partial(scene.suspend, me, 8.0))

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
        scene.reach(f"{me} made 2", until=(*has(scene, "r", 2),))
        publisher.save(3)
        scene.reach(f"{me} made 3", until=(*has(scene, "r", 3),))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        update(me, "full", 2, wrong=1)
        scene.reach(f"{me} has 2", until=(*(f"t.0/{rank} made 3" for rank in range(2)),))
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
        scene.reach(f"{me} made 2", until="r is full")
        me.handle.unpublish(timeout_s=100)  # nobody else has it
        scene.reach(f"{me} left", until=("r2.2/0 has 2", *has(scene, "r", 2)))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        if me.rank == 0:
            waits = partial(awaits_end, me)
            goes_on = lambda: fails or "r2.2/0 has 2" in scene.reached
            cut_off = lambda: fails and scene.cut(me, 9.0)
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
        word = me.shard.mailbox.word
        demand(word.position == ALL_BLOCKS, f"I6: {me} holds 2, and shows {word}")
        scene.reach(f"{me} has 2", until=("r2.2/0 has 2", *has(scene, "r", 2)))

    def follow(me: Process) -> None:
        scene.until("late", "t.0/0 left", "t.0/1 left")
        me.handle.replicate(2, timeout_s=30)
        holds(me, 2)
        scene.reach(f"{me} has 2", until=(*has(scene, "r", 2),))

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
    word = me.shard.mailbox.word
    return word.mark > 0 and word.position == 0


def base_once(scene: Scene) -> None:
    """I1: what deltas have half changed is no base for others."""
    struck: list[Process] = []

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2", until="struck")
        publisher.save(3, bases=[1])  # it does not name what went from A to B and back
        scene.reach(f"{me} made 3", until=(*has(scene, "r", 3),))

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
            scene.reach("struck", until=("t.0/0 made 3", "t.0/1 made 3"))

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
            scene.reach(f"{me} made {version}", until=(*has(scene, "r", version),))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        update(me, "delta", 2)
        me.handle.unpublish(timeout_s=100)
        me.scribble_if_free()
        scene.reach(f"{me} has 2", until=(*(f"t.0/{rank} made 3" for rank in range(2)),))
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
        scene.reach(f"{me} made 2", until=(*has(scene, "r", 2),))

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


def delta_coming(scene: Scene) -> None:
    """I6: a delta that is being made is waited for, and not for ever."""

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2, bases=[], coming=True)
        scene.reach(f"{me} made 2", until=(*has(scene, "r", 2),))
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


SCENES |= scenes_of(__name__) | {
    "stray cell, seat lost": partial(stray_cell, loses_seat=True),
    "late end, learned later": partial(late_end, fails=True),
}
