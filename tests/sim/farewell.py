"""Scenes of a replica that is told its end: readers finish, or find somebody else by the word."""

from __future__ import annotations

from functools import partial

from checks import demand
from replicas import Process
from scenes import SCENES, Scene, publish, replicate

from torch_ros.protocol import keys as k

DEATH_S = 30.0  # from the notice on


def read_from(scene: Scene, name: str) -> set[str]:
    """The replicas that it has read from, or was sent to."""
    return {k.replica_of(source) for source, reader in scene.edges if k.replica_of(reader) == name}


def _leave(me: Process, within_s: float) -> float:
    """Leave, and be killed when the time is over. Returns how long leaving took."""
    scene, began_s = me.world, me.world.now_s
    me.closing_s, me.start.linger_s = began_s, within_s
    scene.at(began_s + DEATH_S, partial(scene.kill_process, me))
    me.handle.leave(within_s=within_s)
    scene.reach(f"{me} has left")
    return scene.now_s - began_s


def leaves(scene: Scene, *, read_s: float, within_s: float, reroutes: int) -> None:
    """I8: who reads from a replica that leaves may finish, or goes on elsewhere; nobody comes."""
    size = 1 + scene.seed % 2

    def read(me: Process) -> None:
        scene.until("r0 has it")
        scene.slow_s[me] = read_s
        began_s = scene.now_s
        replicate(me, 1)
        found, took_s = me.handle.last_read.reroutes, scene.now_s - began_s
        demand(found == reroutes, f"I8: {found} re-routes from a replica that left")
        demand(took_s < DEATH_S, f"I6: its reader took {took_s:.0f} s")
        scene.reach("r1 has it")
        scene.until("late has it")

    def leaving(me: Process) -> None:
        scene.until("t")
        replicate(me, 1)
        scene.reach("r0 has it")
        readers = scene.start_named("r1").processes
        scene.when(lambda: all(reader.reads_from for reader in readers), "a reader")
        scene.reach("leaves")
        took_s = _leave(me, within_s)
        demand(took_s < within_s + 3, f"I6: it took {took_s:.0f} s to leave within {within_s:.0f}")

    def late(me: Process) -> None:
        scene.until("leaves")
        scene.sleep(1)
        offered = me.handle.list(timeout_s=5)[1]
        demand("r0" not in offered, "I7: who leaves is offered")
        replicate(me, 1)
        demand("r0" not in read_from(scene, "late"), "I8: a newcomer is sent to who leaves")
        scene.reach("late has it")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        scene.until("late has it")

    # The trainer is far away, so the two read from the one that leaves.
    scene.start("t", train, size=1, datacenter="west")
    scene.start("r0", leaving, size=size, spot=scene.seed % 3 == 0)
    scene.start("r1", read, size=1)
    scene.start("late", late, size=1)
    scene.play()


def leaves_with_a_copy(scene: Scene) -> None:
    """I6: a rank that leaves and a peer that keeps a copy do not undo each other's work."""

    def read(me: Process) -> None:
        scene.until("t")
        scene.slow_s[me] = 0.6
        replicate(me)
        demand(me.handle.last_read.reroutes == 1, "I8: a reader of a copy was not let finish")
        scene.reach("r has it")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        [reader] = scene.start_named("r").processes
        scene.when(lambda: reader.reads_from, "a reader")
        me.handle.unpublish(timeout_s=10)
        scene.when(lambda: any("+" in inst for _, inst, _ in reader.reads_from), "a copy read")
        if me.rank:
            scene.until("r has it")
            return
        before = scene.store.rev
        _leave(me, 20.0)
        written = scene.store.rev - before
        demand(written < 20, f"I6: {written} writes while it left")

    scene.start("t", train, size=2, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


SCENES |= {
    "leaves with a copy": leaves_with_a_copy,
    "leaves": partial(leaves, read_s=0.5, within_s=20.0, reroutes=0),
    "leaves in a hurry": partial(leaves, read_s=1.0, within_s=2.0, reroutes=1),
}
