"""Scenes of versions whose publisher writes to them."""

from __future__ import annotations

from unittest.mock import patch

from checks import Broken, demand
from replicas import Process
from scenes import SCENES, Scene, publish, replicate, scenes_of

from torch_ros.errors import ContractBroken
from torch_ros.features.contract.flow import Contract
from torch_ros.features.contract.writes import Write


def withdrawn(scene: Scene) -> None:
    """I1: a version that its publisher wrote to is taken from nobody who holds it."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("r.1 has 1")
        held = me.shard.held
        [contract] = (each for each in me.shard.features if isinstance(each, Contract))
        try:
            with patch.object(contract, "_written", lambda: Write("w0", is_certain=True)):
                me.handle.unpublish()
        except ContractBroken:
            me.scribble_if_free()
        else:
            raise Broken("a write to what was published is not told")
        demand(me.handle.version is None, "I2: it raised, and a version is held")
        scene.reach("withdrawn", until="n has none")
        publish(me, 2, 8)
        demand(me.shard.held.uid != held.uid, "I1: another content has its uid")
        scene.until("r.1 has 2", "n.2 has 2")

    def read(me: Process) -> None:
        replicate(me)
        scene.reach(f"{me.start} has 1", until=("withdrawn", "n has none"))
        _go_to(me, 2)
        scene.checks.returned(me, 2)
        scene.reach(f"{me.start} has 2", until=("r.1 has 2", "n.2 has 2"))

    def come(me: Process) -> None:
        scene.until("withdrawn")
        found = me.handle.replicate(missing_ok=True, timeout_s=20)
        demand(found is None, f"I1: version {found} is taken from who holds it")
        scene.reach("n has none")
        _go_to(me, 2)
        scene.checks.returned(me, 2)
        scene.reach(f"{me.start} has 2", until=("r.1 has 2", "n.2 has 2"))

    def _go_to(me: Process, version: int) -> None:
        while me.handle.version != version:
            me.handle.update(timeout_s=20)
            scene.sleep(0.1)

    scene.play(t=train, r=read, n=come)


SCENES |= scenes_of(__name__)
