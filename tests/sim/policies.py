"""Scenes of replicas whose updates go by a policy of the user's own: I3."""

from __future__ import annotations

from functools import partial

from checks import demand
from replicas import Process
from scenes import SCENES, Scene, publish, scenes_of

NUMBERS = (1, 2, 3, 4, 5)


class OfTwoMinds:
    """Even versions only; the first rank is for the newest of them, the others for the oldest."""

    def __init__(self, rank: int) -> None:
        self._index = -1 if rank else 0

    def choose(self, available, held):
        even = [number for number in available if number % 2 == 0]
        return even[self._index] if even else None


def _train(me: Process, number: int) -> None:
    me.world.until(*map(str, range(1, number)))
    publish(me, number, number)
    me.world.reach(f"{number}", until="over")


def chosen(scene: Scene) -> None:
    """All ranks go to the version that one of them has chosen, though newer ones are there."""
    size, told = 1 + scene.seed % 3, dict[int, int | None]()

    def follow(me: Process) -> None:
        scene.until(*map(str, NUMBERS))
        is_new = me.handle.update(timeout_s=100)
        demand(is_new and me.handle.version in {2, 4}, f"I3: {me} is at {me.handle.version}")
        scene.checks.returned(me, me.handle.version)
        told[me.rank] = me.handle.version
        scene.when(lambda: len(told) == size, "the answers of all ranks")
        demand(len({*told.values()}) == 1, f"I3: the ranks differ: {told}")
        scene.reach("over")

    for number in NUMBERS:
        scene.start(f"t{number}", partial(_train, number=number), size=1)
    scene.start("r", follow, size=size, policy=OfTwoMinds)
    scene.play()


SCENES |= scenes_of(__name__)
