"""Scenes of what one datacenter retains for itself; the trainer is in the west (I4)."""

from __future__ import annotations

from checks import demand, never
from features.retention.afar import SLOW_S, SOON_S
from replicas import Process
from scenes import SCENES, Scene, publish, puts, replicate, scenes_of, unpublish

from torch_ros.errors import TorchRosError
from torch_ros.protocol import keys as k

HERE = ("latest@here",)


def _publish_two(me: Process) -> None:
    """The first is held here, and beside the trainer, before it goes."""
    scene = me.world
    publish(me, 1)
    scene.reach("t has 1", until=("r has 1", "w has 1"))
    unpublish(me)
    publish(me, 2, 8)
    scene.reach("t has 2")


def _stay(me: Process, *until: str) -> None:
    scene = me.world
    replicate(me, 1)
    scene.reach(f"{me.start.replica} has 1", until=until)


def _update(me: Process, slow_s: float = 0.0) -> None:
    me.world.slow_s[me] = slow_s
    demand(me.handle.update(timeout_s=100, skip=False), "there is nothing newer")
    me.world.checks.returned(me, me.handle.version)


def _sources(scene: Scene, reader: str) -> set[str]:
    """The replicas that it has read from; of copies the name as far as the plus."""
    read = {k.replica_of(source) for source, by in scene.edges if k.replica_of(by) == reader}
    return {name[: name.find("+") + 1] or name for name in read}


def kept_elsewhere(scene: Scene) -> None:
    """Nobody copies for what another datacenter retains for itself."""

    def read(me: Process) -> None:
        _stay(me, "t has 2")
        _update(me)
        scene.reach("r has 2")

    scene.start("t", lambda me: (_publish_two(me), scene.until("r has 2")), datacenter="west")
    scene.start("w", lambda me: _stay(me, "r has 2"), size=1, datacenter="west", retain=HERE)
    scene.start("r", read, size=1, datacenter="east")
    scene.play()
    demand(not scene.seen["unpublished with a copy"], "I4: a copy that nobody wants was made")


def asked_meanwhile(scene: Scene) -> None:
    """I4: who begins to retain a version here while the last one is given up is heard of."""

    def read(me: Process) -> None:
        _stay(me, "t has 2")
        scene.hold("gives up", me, puts("/decisions/r@"), lambda: "opened" in scene.reached)
        _update(me, SLOW_S)
        scene.reach("r has 2")

    def come(me: Process) -> None:
        scene.reach("opened", until="r has 2")

    def meanwhile() -> None:
        scene.start("r1", come, size=1, datacenter="east", retain=HERE)

    def train(me: Process) -> None:
        _publish_two(me)
        scene.until("gives up")
        meanwhile()
        scene.until("r has 2")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("w", lambda me: _stay(me, "r has 2"), size=1, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()
    demand(scene.seen["unpublished with a copy"], "I4: no copy was made")


def closes_here(scene: Scene) -> None:
    """I4: what is retained here lingers for who is here, and for nobody else."""
    is_awaited = scene.seed % 2

    def read(me: Process) -> None:
        _stay(me, "t has 2", *(["r1"] if is_awaited else []))
        me.closing_s = began_s = scene.now_s
        me.handle.close()
        took_s = scene.now_s - began_s
        scene.reach("r closed")
        demand(is_awaited or took_s < SOON_S, f"I6: it stayed {took_s:.0f} s for who is elsewhere")

    def come(me: Process) -> None:
        scene.reach("r1")
        scene.when(lambda: scene.seen["lingers"], "lingering", 20.0)
        with never(TorchRosError, "I4: version 1 is lost here"):
            replicate(me, 1, timeout_s=10)
        demand(_sources(scene, "r1") <= {"r+"}, f"I4: {_sources(scene, 'r1')} were read from")

    scene.start("t", lambda me: (_publish_two(me), scene.until("r closed")), datacenter="west")
    scene.start("w", lambda me: _stay(me, "r closed"), size=1, datacenter="west")
    scene.start("r", read, size=1, datacenter="east", retain=HERE, linger_s=30.0)
    if is_awaited:
        scene.start("r1", come, size=1, datacenter="east")
    scene.play()


SCENES |= scenes_of(__name__)
