"""Scenes of engines, and of trainers that wait for them: I10."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from checks import demand
from replicas import TTL_S, Breaks, Process
from scenes import SCENES, Scene, publish, puts, scenes_of, unpublish
from world import Broken

from torch_ros.errors import CallMismatch, InstallRejected, TorchRosError

HEARD_S = 0.1  # from the last answer to the end of the wait for it


def waited(me: Process, version: int, timeout_s: float = 100) -> None:
    began_s = me.world.now_s
    found = me.handle.wait_installed(version, timeout_s=timeout_s)
    me.world.checks.waited(me, version, found, began_s)


def wiped_while_waited(scene: Scene) -> None:
    """A store that is wiped makes no replica go: the trainer waits for one that is back late."""

    def train(me: Process) -> None:
        publish(me, 1)
        waited(me, 1)
        unpublish(me)
        publish(me, 2)
        scene.cut(scene.start_named("r1").processes[0], 1.2 * TTL_S)
        scene._wipe()
        waited(me, 2)
        scene.reach("waited")

    def follow(me: Process) -> None:
        for version in (1, 2):
            me.installed(version)
        scene.until("waited")

    scene.start("t", train, size=1)
    scene.start("r0", follow, installs=True)
    scene.start("r1", follow, size=1, installs=True)
    scene.play()


def published_in_a_block(scene: Scene) -> None:
    """The content that was read is active, not the one that had its number before."""

    def train(me: Process) -> None:
        publish(me, 1, content=5)
        scene.until("entered")
        unpublish(me)
        publish(me, 1, content=6)
        scene.reach("again")
        waited(me, 1)
        scene.reach("waited")

    def follow(me: Process) -> None:
        with me.handle.installing(1):
            scene.reach("entered", until="again")
            me.handle.replicate(1)
            me.engine = 6
        scene.until("waited")

    scene.start("t", train, size=1)
    scene.start("r", follow, size=1, installs=True)
    scene.play()


def told_later(scene: Scene) -> None:
    """A rejection that the store did not take is told when it is back, whatever its rank does."""

    def train(me: Process) -> None:
        publish(me, 1)
        try:
            waited(me, 1, timeout_s=60)
        except InstallRejected:
            scene.reach("told")
        demand("told" in scene.reached, "I10: a rejection was told to nobody")

    def follow(me: Process) -> None:
        try:
            with me.handle.installing(1):
                scene.cut(me, 8.0)
                raise Breaks
        except Breaks:
            scene.until("told", limit_s=100)

    scene.start("t", train)
    scene.start("r", follow, size=1, installs=True)
    scene.play()


def heard_at_once(scene: Scene) -> None:
    """The last answer itself wakes a trainer that waits, which looks at nothing on a schedule."""

    def train(me: Process) -> None:
        publish(me, 1)
        waited(me, 1)
        answers = [s for told in scene.checks.installs.values() for s, each in told if each.active]
        late_s = scene.now_s - max(answers)
        demand(late_s <= HEARD_S, f"I10: the last answer is heard {late_s:.2f} s late")
        scene.reach("heard")

    def follow(me: Process, after_s: float) -> None:
        scene.sleep(after_s)
        me.installed(1)
        scene.until("heard")

    scene.start("t", train, size=1)
    for number, after_s in enumerate((0.0, 2.3, 5.7)):
        scene.start(f"r{number}", partial(follow, after_s=after_s), installs=True)
    scene.play()


def one_left_badly(scene: Scene, *, lease_ends: bool) -> None:
    """A rank that has left badly, and has put its old weights back, is believed."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("r.1/0", "r.1/1")
        scene.reach("over")

    def follow(me: Process) -> None:
        try:
            me.installed(1, timeout_s=3 if me.rank == 0 else 30)
        except Exception:  # its owner puts the old weights back
            me.engine = None
        if lease_ends and me.rank == 1:
            scene.end_lease(me)
        scene.sleep(2.5 * TTL_S)
        scene.checks.uses(me)
        scene.reach(str(me), until="over")

    scene.start("t", train, size=1)
    rollout = scene.start("r", follow, installs=True)
    first = rollout.processes[0]
    # The first rank is ready, and hears nothing more before its deadline is over.
    scene.hold(
        "ready",
        first,
        lambda what: "ready" in str(what) and first.engine is not None,
        lambda: True,
        meanwhile=lambda: scene.cut(first, 9.0),
        is_reply=True,
    )
    scene.play()


def rejected_since(scene: Scene) -> None:
    """A rank is told that it has rejected what its peers enter again; then it can be installed."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("r.1/0 has it", "r.1/1 has it")
        waited(me, 1)
        scene.reach("over")

    def follow(me: Process) -> None:
        if me.rank == 0:
            with suppress(TorchRosError):
                me.installed(1, timeout_s=1)  # it gives up while it is cut off
                raise Broken("it has heard of the end")
            scene.when(lambda: "r.1/1 leaves" in scene.reached, "its peer at the end of a block")
        else:
            me.installed(1, pause_s=0.5)  # its peer is ready before, and does not hear the end
            scene.hold("r.1/1 leaves", me, puts("/ready/"), lambda: True)
        refused, told = 0, set[type]()
        while me.engine is None or not refused:
            try:
                me.installed(1, timeout_s=20)
            except (TorchRosError, CallMismatch) as error:  # perhaps they are out of step, too
                me.engine = None
                refused += 1
                told.add(type(error))
                demand(refused < 5, f"I10: it is not installed any more: {error}")
        is_told = me.rank == 1 or InstallRejected in told
        demand(is_told, f"I10: {me} has rejected it, and is told {told}")
        scene.reach(f"{me} has it", until="over")

    scene.start("t", train, size=1)
    first = scene.start("r", follow, installs=True).processes[0]
    scene.hold(
        "ready",
        first,
        lambda what: puts("/ready/")(what) and first.engine is not None,
        lambda: True,
        meanwhile=lambda: scene.cut(first, 9.0),
        is_reply=True,
    )
    scene.play()


def trained_anew(scene: Scene) -> None:
    """A trainer that comes back when nobody has anything is followed by who had a newer run."""

    def follow(me: Process) -> None:
        publishes = lambda trainer: (publish(trainer, 5), scene.sleep(1000))
        trainer = scene.start("t", publishes, size=1, run="new")
        me.installed(5)
        me.handle.unpublish()  # as in the middle of an update
        scene.at(scene.now_s, scene.kill_process, trainer.processes[0])
        scene.when(lambda: not scene.checks.holdings, "the lease has ended")
        scene.start("t", train, size=1)
        me.installed("latest")
        scene.reach("followed")

    def train(me: Process) -> None:
        publish(me, 6)
        scene.until("followed")

    scene.start("r", follow, size=1, installs=True)
    scene.play()


SCENES |= scenes_of(__name__) | {
    "left badly": partial(one_left_badly, lease_ends=False),
    "left badly, and came back": partial(one_left_badly, lease_ends=True),
}
