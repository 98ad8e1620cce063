"""Scenes of replicas that wait for versions, follow them, or choose them: I3, I6."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from checks import demand, never
from parts import LONG_S, _end, _train, _waits
from parts import SOON_S as LEFT_S
from replicas import Process
from scenes import SCENES, Scene, alike, meet, publish, scenes_of, unpublish

from torch_ros.errors import CallAborted, DeadlineExceeded, TorchRosError
from torch_ros.protocol.records import Asked

VERSIONS = 5
NUMBERS = (1, 2, 3, 4, 5)  # of the versions from which a policy chooses
SOON_S = 5.0  # for all ranks to hear of something; the world is a slow one
WAIT_S = 60.0


def _train_some(me: Process, versions: int, *, pause_s: float) -> None:
    scene = me.world
    for version in range(1, versions + 1):
        publish(me, version, version)
        scene.reach(f"{version}")
        scene.sleep(pause_s * scene.random())
        if version < versions:
            unpublish(me)
    scene.until("over")


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
            alike(scene, told)
        scene.until("over")

    scene.start("t", partial(_train_some, versions=4, pause_s=3.0), size=1)
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
            alike(scene, told)
        scene.until("over")

    scene.start("t", partial(_train_some, versions=VERSIONS, pause_s=3.0), size=1)
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
            alike(scene, told)
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


def _first_version(me: Process) -> None:
    """Leave a loop over versions after the first one."""
    for version in me.handle.follow(timeout_s=LONG_S):
        me.world.checks.returned(me, version)
        break


def leaves_a_loop(scene: Scene) -> None:
    """I6: a rank that leaves its loop over the versions alone ends it on all, soon."""
    whom = scene.seed % 2

    def leave(me: Process) -> None:
        _first_version(me)
        scene.reach(f"{me} has 1")

    def follow(me: Process) -> None:
        versions = me.handle.follow(timeout_s=LONG_S)
        scene.checks.returned(me, next(versions))
        scene.reach(f"{me} has 1", until="2 is there")
        began_s = scene.now_s
        try:
            next(versions)
            demand(False, f"I3: {me} goes on without its peer")
        except CallAborted:
            took_s = scene.now_s - began_s
            demand(took_s < LEFT_S, f"I6: its peer has left, and {me} waited for {took_s:.0f} s")
        except DeadlineExceeded as error:
            demand(False, f"I6: its peer has left, and {me} waited: {error}")

    def both(me: Process) -> None:
        (leave if me.rank == whom else follow)(me)
        _end(me)

    scene.start("t", _train, size=1)
    scene.play(2, r=both)


def follows_again(scene: Scene) -> None:
    """I3: a rank that leaves its loop as its peers do is waited for when they begin another."""

    def follow(me: Process) -> None:
        _first_version(me)
        scene.reach(f"{me} has 1", until="2 is there")
        if me.rank == scene.seed % 2:
            scene.when(lambda: _waits(scene, Asked("follow", "latest")), "a peer that waits")
            scene.sleep(LEFT_S)
        with never(TorchRosError, f"I3: {me} is in step, and is told"):
            _first_version(me)
        demand(me.handle.version == 2, f"I3: {me} has {me.handle.version}")
        meet(me, "is done")
        scene.reach("over")

    scene.start("t", _train, size=1)
    scene.play(2, r=follow)


class OfTwoMinds:
    """Even versions only; the first rank is for the newest of them, the others for the oldest."""

    def __init__(self, rank: int) -> None:
        self._index = -1 if rank else 0

    def choose(self, available, held):
        even = [number for number in available if number % 2 == 0]
        return even[self._index] if even else None


def _train_one(me: Process, number: int) -> None:
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
        scene.start(f"t{number}", partial(_train_one, number=number), size=1)
    scene.start("r", follow, size=size, policy=OfTwoMinds)
    scene.play()


SCENES |= scenes_of(__name__)
SCENES["told to stop, and closes"] = partial(told_to_stop, closes=True)
