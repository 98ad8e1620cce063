"""Scenes of replicas that stage deltas before an update: I1, whatever comes between."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

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
from scenes import SCENES, Scene, scenes_of

from torch_ros.errors import ClosedError, SourceLost
from torch_ros.features.deltas import reading as delta_reading


def prefetched(scene: Scene) -> None:
    """I1: some ranks have staged a chain of deltas before they update, and others have not."""
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
        scene.reach(f"{me} made 4", until=(*has(scene, "r", 4),))

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
            scene.at(scene.now_s + 0.2, partial(scene.suspend, me, 8.0))

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
        scene.reach(f"{me} made 3", until=(*has(scene, "r", 3),))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 3" for rank in range(2)))
        scene.spawn(me, "prefetches", partial(prefetch, me))
        scene.until("landed")
        me.handle.update(2, timeout_s=100)
        holds(me, 2)
        scene.reach("updated", until="prefetched")
        update(me, "full", 3)
        scene.reach(f"{me} has 3")

    def prefetch(me: Process) -> None:
        me.handle.prefetch(timeout_s=100)
        scene.reach("prefetched")

    def stand(me: Process) -> None:
        if "landed" not in scene.reached:
            scene.reach("landed", until="updated")

    def seed(me: Process) -> None:
        me.handle.replicate(2, timeout_s=100)
        scene.reach(f"{me} has 2", until=(*has(scene, "r", 3),))

    train(scene, script)
    scene.start("r", read, size=1, digests="full")
    scene.start("r2", seed, size=1, digests="full")
    with before(scene, delta_reading.DeltaRead, "_certify", stand):
        played(scene)


def prefetch_of_another(scene: Scene) -> None:
    """I1: what was staged for a number is not applied for other content of that number."""

    def script(me: Process, publisher: Publisher) -> None:
        publisher.save(2)
        scene.reach(f"{me} made 2", until="r.1/0 staged 2")
        me.handle.unpublish(timeout_s=100)
        publisher.save(2, bases=[1], content=102)
        scene.reach(f"{me} made 2 again", until=(*has(scene, "r", 2),))

    def read(me: Process) -> None:
        first(me)
        scene.until(*(f"t.0/{rank} made 2" for rank in range(2)))
        staged = me.handle.prefetch(timeout_s=100)
        demand(staged == 2, f"{me} has staged {staged}")
        scene.reach(f"{me} staged 2", until=(*(f"t.0/{rank} made 2 again" for rank in range(2)),))
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
            scene.reach(f"{me} made {version}", until=(*has(scene, "r", version),))

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


SCENES |= scenes_of(__name__)
