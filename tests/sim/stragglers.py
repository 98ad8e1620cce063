"""Scenes of bursts in which somebody dies, or is slow: I8."""

from __future__ import annotations

from functools import partial

from checks import demand
from farewell import read_from
from replicas import Process
from scenes import SCENES, Scene, publish, replicate


def _chain(scene: Scene, names: tuple[str, ...], lasting: tuple[str, ...], read) -> None:
    """A trainer, and replicas of one rank each, of which each reads from the one before.

    They stay until those that are `lasting` have the version.
    """

    def follow(me: Process) -> None:
        before = ("t", *names)[names.index(me.start.replica)]
        if before == "t":
            scene.until("t")
        else:
            [source] = scene.start_named(before).processes
            scene.when(lambda: source.reads_from, f"{before} reading")
        read(me)
        scene.reach(f"{me.start.replica} has it")
        scene.until(*(f"{name} has it" for name in lasting))

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        scene.until(*(f"{name} has it" for name in lasting))

    scene.start("t", train, size=1)
    for name in names:
        scene.start(name, follow, size=1)


def place_of_the_dead(scene: Scene) -> None:
    """I8: who loses a source takes its place, and not one more of who feeds the whole burst."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 1.0
        replicate(me)

    def watch() -> None:
        [dies], [orphan] = (scene.start_named(name).processes for name in ("r1", "r2"))
        scene.when(lambda: orphan.reads_from, "r2 reading")
        scene.at(scene.now_s, partial(scene.kill_process, dies))

    _chain(scene, ("r0", "r1", "r2"), ("r0", "r2"), read)
    scene.spawn(scene.start_named("t").processes[0], "watches", watch)
    scene.play()
    found = read_from(scene, "r2")
    demand(found == {"r1", "r0"}, f"I8: an orphan reads from {sorted(found)}")


SCENES |= {"place of the dead": place_of_the_dead}
