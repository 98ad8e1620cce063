"""Scenes of bursts in which somebody dies, or is slow: I8."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

from checks import demand
from farewell import read_from
from replicas import Process
from scenes import MANY_TENSORS, SCENES, Scene, publish, replicate

from torch_ros.protocol import keys as k
from torch_ros.transfer import pace


def _chain(scene: Scene, names: tuple[str, ...], lasting: tuple[str, ...], read, **options) -> None:
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
        scene.start(name, follow, size=1, **options)


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


TENSORS = tuple((f"w{number:02}", (12,)) for number in range(20))


@contextmanager
def _judged(seconds: float = 0.5):
    """Tensors of these worlds are small: so little is enough to see who is slow."""
    limits = {"PACE_S": seconds, "PACE_BYTES": 90, "CAUGHT_UP_BYTES": 32}
    with ExitStack() as stack:
        for name, value in limits.items():
            stack.enter_context(patch.object(pace, name, value))
        yield


def _relays(scene: Scene, name: str) -> bool:
    of = {
        k.replica_of(k.parse_holding(key).inst): held for key, held in scene.checks.holdings.items()
    }
    return of[name].is_relay


def slow_relay(scene: Scene) -> None:
    """I8: who is slow leaves its source once, then passes nothing on; nobody suspects it."""
    scene.shapes = TENSORS

    def read(me: Process) -> None:
        name = me.start.replica
        scene.slow_s[me] = 0.2 if name == "r0" else 0.02
        replicate(me)
        demand(_relays(scene, name) == (name != "r1"), f"I8: {name} is slow, or not")
        demand(name != "r1" or "r2 has it" in scene.reached, "I8: all wait for a slow one")
        demand(not any("/suspects/" in key for key in scene.store._entries), "R3: it is suspected")

    def slow_down() -> None:
        [slow] = scene.start_named("r1").processes
        scene.when(lambda: scene.checks._shown(slow)[1], "r1 having something")
        scene.slow_s[slow] = 1.0

    _chain(scene, ("r0", "r1", "r2"), ("r0", "r1", "r2"), read)
    scene.spawn(scene.start_named("t").processes[0], "slows", slow_down)
    with _judged():
        scene.play()
    found = read_from(scene, "r1")
    demand(found == {"r0", "t"}, f"I8: a slow one reads from {sorted(found)}")


def last_relay(scene: Scene) -> None:
    """I8: who is slow passes on what it has if hardly anybody else does."""
    scene.shapes = TENSORS

    def read(me: Process) -> None:
        scene.slow_s[me] = 0.02
        replicate(me)
        demand(_relays(scene, me.start.replica), "I8: too few pass it on")

    def slow_down() -> None:
        [first], [slow] = (scene.start_named(name).processes for name in ("r0", "r1"))
        scene.when(lambda: scene.checks._shown(slow)[1], "r1 having something")
        scene.slow_s[first], scene.slow_s[slow] = 0.2, 1.0
        scene.when(lambda: "t" in read_from(scene, "r1"), "r1 leaving r0")
        scene.slow_s[first] = 0.0

    _chain(scene, ("r0", "r1"), ("r0", "r1"), read)
    scene.spawn(scene.start_named("t").processes[0], "slows", slow_down)
    with _judged():
        scene.play()


def slow_seed(scene: Scene) -> None:
    """I13: nobody goes far away for speed, and a seed passes on what it has."""
    scene.shapes = TENSORS
    slow_s = {"r0": 0.2, "r1": 1.0}

    def read(me: Process) -> None:
        scene.slow_s[me] = slow_s[me.start.replica]
        replicate(me)
        demand(_relays(scene, me.start.replica), "I8: too few pass it on")

    _chain(scene, ("r0", "r1"), ("r0", "r1"), read, datacenter="east")
    with _judged():
        scene.play()
    found = read_from(scene, "r1")
    demand(found == {"r0"}, f"I13: a slow one reads from {sorted(found)}")


def slow_for_all(scene: Scene) -> None:
    """I8: where everybody is slow, everybody relays."""
    scene.shapes = MANY_TENSORS

    def read(me: Process) -> None:
        scene.slow_s[me] = 1.0
        replicate(me)
        demand(me.handle.last_read.reroutes == 0, "I8: it left who is as slow as all others")
        demand(_relays(scene, me.start.replica), "I8: one of many that are slow does not relay")

    _chain(scene, ("r0", "r1", "r2"), ("r0", "r1", "r2"), read)
    with _judged(3.0):
        scene.play()


SCENES |= {
    "place of the dead": place_of_the_dead,
    "slow relay": slow_relay,
    "last relay": last_relay,
    "slow seed": slow_seed,
    "slow for all": slow_for_all,
}
