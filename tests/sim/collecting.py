"""A scene of a collector that clears what nobody uses, while calls run: I4, I5."""

from __future__ import annotations

from checks import demand
from replicas import Process
from scenes import SCENES, Scene, deletes, makes_full, publish, replicate, scenes_of, unpublish

from torch_ros.cli import clearing
from torch_ros.errors import Contention
from torch_ros.protocol import keys as k


def cleared_meanwhile(scene: Scene) -> None:
    """A version that somebody serves, between a collector's look and its deletion, stays."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("holds 1", "has read 1")
        for version in (2, 3, 4):
            unpublish(me)
            publish(me, version)
            scene.reach(f"{version}", until="cleared")
        scene.until("over")

    def go_on(me: Process) -> None:
        replicate(me, 1)
        scene.reach("holds 1", until="2")
        me.handle.update(timeout_s=100)
        scene.checks.returned(me, me.handle.version)
        scene.reach("nobody holds 1", until="over")

    def serve(me: Process) -> None:
        me.read(1, 100)
        scene.reach("has read 1", until="clears")
        scene.hold("completes", me, makes_full, lambda: "cleared" in scene.reached)
        me.handle.serve(timeout_s=100)
        scene.until("over")

    def read(me: Process) -> None:
        scene.until("cleared")
        replicate(me, 1)
        scene.reach("read", until="over")

    def collect(me: Process) -> None:
        kv = me.shard.group.kv
        scene.until("nobody holds 1")
        scene.hold("clears", me, deletes("versions"), lambda: "completes" in scene.reached)
        while not {"read", "4"} <= scene.reached:
            try:
                clearing.clear(kv, "m")
            except Contention:  # the others are quick: it looks again
                continue
            for run, version in _held(scene):
                is_there = scene.keys.version(run, version) in scene.store.entries
                demand(is_there, f"I4: version {version} is held, and its record was cleared")
            scene.reach("cleared")
            scene.sleep(scene.random())
        demand("clears" in scene.reached, "the collector never came between")
        scene.reach("over")

    scene.start("t", train, size=1)
    for number, script in enumerate((go_on, serve, read, collect)):
        scene.start(f"r{number}", script, size=1)
    scene.play()


def _held(scene: Scene) -> set[tuple[str, int]]:
    """The runs and numbers that somebody holds, by the records."""
    found = (k.parse_holding(key) for key in scene.store.entries if "/holdings/" in key)
    return {(each.run, each.version) for each in found}


SCENES |= scenes_of(__name__)
