"""Scenes of replicas that wait for versions, and follow them, all ranks alike: I3, I6."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from checks import demand, never
from replicas import Process
from scenes import SCENES, Scene, publish, scenes_of, unpublish

from torch_ros.errors import TorchRosError

VERSIONS = 5
SOON_S = 5.0  # for all ranks to hear of something; the world is a slow one
WAIT_S = 60.0


def _train(me: Process, versions: int, *, pause_s: float) -> None:
    scene = me.world
    for version in range(1, versions + 1):
        publish(me, version, version)
        scene.reach(f"{version}")
        scene.sleep(pause_s * scene.random())
        if version < versions:
            unpublish(me)
    scene.until("over")


def _alike(scene: Scene, told: dict[int, list]) -> None:
    answers = list(told.values())
    demand(all(each == answers[0] for each in answers), f"I3: the ranks differ: {told}")
    scene.reach("over")


def waits_for_versions(scene: Scene) -> None:
    """Ranks wait for as long as the first of them does, and get the same answers."""
    size, told = 2 + scene.seed % 2, dict[int, list]()

    def follow(me: Process) -> None:
        mine: list[int | None] = []
        began_s = scene.now_s
        while len(mine) < 12:
            # One is told to wait for a second, the others for longer than the scene lasts.
            wait_s = 1.0 if me.rank == scene.seed % size else 400.0
            is_new = me.handle.update(wait_s=wait_s, timeout_s=100)
            mine.append(me.handle.version if is_new else None)
            if is_new:
                scene.checks.returned(me, me.handle.version)
        took_s = scene.now_s - began_s
        demand(took_s < 12 * SOON_S, f"I6: {me} waited for {took_s:.0f} s, longer than its peers")
        told[me.rank] = mine
        if len(told) == size:
            _alike(scene, told)
        scene.until("over")

    scene.start("t", partial(_train, versions=4, pause_s=3.0), size=1)
    scene.start("r", follow, size=size)
    scene.play()
    demand(told[0][-1] is None and 4 in told[0], f"I6: a version never came: {told}")


def told_to_stop(scene: Scene, *, closes: bool = False) -> None:
    """One rank is told to stop, whenever, and all stop after the same version.

    Args:
        closes: Each rank closes at once, though its peers may be between two versions. It is told
            after the last version, and so while it looks out.
    """
    size, told = 1 + scene.seed % 3, dict[int, list]()
    whom, when_s, stopped_s = scene.seed // 3 % size, 8 * scene.random(), list[float]()

    def is_told(me: Process) -> bool:
        is_told = me.rank == whom and scene.now_s > began_s + when_s
        is_told = is_told and (not closes or me.handle.version == VERSIONS)
        if is_told and not stopped_s:
            stopped_s.append(scene.now_s)
        return is_told

    began_s = scene.now_s

    def follow(me: Process) -> None:
        mine: list[int] = []
        for version in me.handle.follow(stop=partial(is_told, me), timeout_s=WAIT_S):
            scene.checks.returned(me, version)
            mine.append(version)
            scene.sleep(scene.random() * me.rank)
        took_s = scene.now_s - stopped_s[0]
        demand(took_s < 2 * SOON_S, f"I6: {me} stopped {took_s:.0f} s after it was told")
        told[me.rank] = mine
        if closes:
            me.handle.close(linger_s=0)
        if len(told) == size:
            _alike(scene, told)
        scene.until("over")

    scene.start("t", partial(_train, versions=VERSIONS, pause_s=3.0), size=1)
    scene.start("r", _or_says(follow), size=size)
    scene.play()


def _or_says(follow: Callable[[Process], None]) -> Callable[[Process], None]:
    def say(me: Process) -> None:
        with never(TorchRosError, f"I6: {me} was told"):
            follow(me)

    return say


def slow_rank_told_to_stop(scene: Scene) -> None:
    """A rank that comes when its peers have decided, each time, is asked all the same."""
    told: dict[int, list] = {}

    def follow(me: Process) -> None:
        mine: list[int] = []
        is_slow = me.rank == 1
        for version in me.handle.follow(stop=lambda: is_slow and len(mine) > 1, timeout_s=WAIT_S):
            scene.checks.returned(me, version)
            mine.append(version)
            demand(version < 6, "I6: a rank that was told to stop is never asked")
            if is_slow:
                scene.reach(f"slow has {version}", until=f"{version + 1}")
                scene.sleep(SOON_S)
        told[me.rank] = mine
        if len(told) == 2:
            _alike(scene, told)
        scene.until("over")

    def train(me: Process) -> None:
        for version in range(1, 8):
            publish(me, version, version)
            scene.reach(f"{version}")
            awaited = {f"slow has {version}", "over"}
            scene.when(partial(scene.reached.intersection, awaited), "a reader")
            if "over" in scene.reached:
                return
            unpublish(me)

    scene.start("t", train, size=1)
    scene.play(2, r=_or_says(follow))
    demand(told[0] == [1, 2], f"I6: its peers stopped after {told[0]}")


SCENES |= scenes_of(__name__)
SCENES["told to stop, and closes"] = partial(told_to_stop, closes=True)
