"""Scenes of replicas in two datacenters, of which the trainer is in the west: I13."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from checks import demand
from replicas import Process
from scenes import (
    MANY_TENSORS,
    SCENES,
    Scene,
    _see_few,
    publish,
    puts,
    replicate,
    scenes_of,
    unpublish,
)

from torch_ros.errors import TorchRosError
from torch_ros.protocol import keys as k
from torch_ros.protocol.records import Suspect
from torch_ros.store.txn import Put, Txn

ROLLOUTS = tuple(f"r{number}" for number in range(5))


def crossings(scene: Scene) -> int:
    """How many replicas have read from another datacenter."""
    place = {inst: start.datacenter for inst, start in scene.checks.starts.items()}
    pairs = {(source, reader) for source, reader in scene.edges if reader in place}
    return len({reader for source, reader in pairs if place[source] != place[reader]})


def _stay(me: Process, *others: str) -> None:
    me.world.reach(me.start.replica, until=(*others,))


def burst_across(scene: Scene) -> None:
    """I13, I8: of a burst in the east one replica reads from afar, and the others form a chain."""

    def read(me: Process) -> None:
        scene.until("w")
        replicate(me)
        _stay(me, *ROLLOUTS)

    def follow(me: Process) -> None:
        scene.until("t")
        replicate(me)
        _stay(me, *ROLLOUTS)

    def train(me: Process) -> None:
        publish(me, 1)
        _stay(me, *ROLLOUTS)

    for name in ROLLOUTS:
        scene.start(name, read, size=1 + scene.seed % 2, datacenter="east")
    scene.start("t", train, datacenter="west")
    scene.start("w", follow, size=1, datacenter="west")
    scene.play()
    demand(crossings(scene) == 1, f"I13: {crossings(scene)} replicas read from afar")
    demand(scene.claims == 1, f"I8: a source fed {scene.claims} readers at a time")


def far_copies(scene: Scene) -> None:
    """A trainer is not held up by a slow link while somebody beside it has its version too."""

    def read(me: Process) -> None:
        scene.until("t", "w")
        scene.slow_s[me] = 3.0
        replicate(me)
        scene.reach("r")

    def relay(me: Process) -> None:
        scene.until("t")
        replicate(me)
        scene.reach("w", until="r")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        [reader] = scene.start_named("r").processes
        scene.when(lambda: reader.reads_from, "reading", 100.0)
        unpublish(me)
        scene.until("r")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("w", relay, size=1, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()
    of = {k.replica_of(source) for source, reader in scene.edges if k.replica_of(reader) == "r"}
    demand(of == {"w"}, f"I13: a slow link holds up {of}")


def third_datacenter(scene: Scene) -> None:
    """A reader across one slow link does not wait for another link."""

    def read(me: Process, after: str) -> None:
        scene.until(after)
        if after == "t":
            scene.slow_s[me] = 3.0
            scene.hold("seed", me, puts("/readers/"), lambda: True, is_reply=True)
        began_s = scene.now_s
        replicate(me)
        took_s = scene.now_s - began_s
        demand(after == "t" or took_s < 5, f"I6: {me} waited {took_s:.0f} s for another link")
        _stay(me, "e", "n")

    scene.start("t", lambda me: (publish(me, 1), _stay(me, "e", "n")), datacenter="west")
    scene.start("e", partial(read, after="t"), size=1, datacenter="east")
    scene.start("n", partial(read, after="seed"), size=1, datacenter="north")
    scene.play()


def few_seen(scene: Scene) -> None:
    """I13: who sees only some of many replicas looks at all before it reads from afar."""
    _see_few(1, 1, 1)
    names = "near", "w0", "w1", "w2", "late"

    def read(me: Process) -> None:
        name = me.start.replica
        before = ("t", *names[: names.index(name)])
        scene.until(*before)
        scene.slow_s[me] = 1.0 if name == "late" else 3.0
        scene.reach(name) if name != "late" else None
        replicate(me)
        scene.reach(f"{name} has it", until=(*(f"{name} has it" for name in names),))

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t", until=(*(f"{name} has it" for name in names),))

    scene.start("t", train, size=1, datacenter="west")
    for name in names:
        place = "west" if name.startswith("w") else "east"
        scene.start(name, read, size=1, datacenter=place)
    scene.play()
    demand(crossings(scene) == 1, f"I13: {crossings(scene)} replicas read from afar")


def busy_source(scene: Scene) -> None:
    """I13: a near source that somebody reads from comes before an idle far one."""
    scene.shapes = MANY_TENSORS

    def read(me: Process) -> None:
        scene.until("t", "r", "streams")
        replicate(me)
        scene.reach("late")

    def serve(me: Process) -> None:
        scene.until("t")
        replicate(me)
        _stay(me, "late", "streamed")

    def consume(me: Process) -> None:
        scene.until("r")
        scene.slow_s[me] = 5.0
        scene.hold("streams", me, puts("/readers/"), lambda: True, is_reply=True)
        me.streamed(1, timeout_s=100)
        scene.reach("streamed")

    def train(me: Process) -> None:
        publish(me, 1)
        _stay(me, "late")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("r", serve, size=1, datacenter="east")
    scene.start("r1", consume, size=1, datacenter="east")
    scene.start("late", read, size=1, datacenter="east")
    scene.play()


def suspected_seed(scene: Scene) -> None:
    """I13: nobody reads from afar because somebody suspects the near source."""

    def read(me: Process) -> None:
        name = me.start.replica
        scene.until("t", *(("r",) if name == "late" else ()))
        replicate(me)
        _stay(me, "late")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t", until="r")
        seed = scene.start_named("r").processes[0].handle._shard.group.seat.inst
        seat = me.shard.group.seat
        key = scene.keys.suspect(seed, seat.inst)
        scene.store.commit(Txn(ops=(Put(key, Suspect("").encode(), seat.lease_id),)))
        scene.store_changed("a suspicion")
        scene.until("late")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("r", read, datacenter="east")
    scene.start("late", read, size=1, datacenter="east")
    scene.play()
    demand(crossings(scene) == 1, f"I13: {crossings(scene)} replicas read from afar")


def mute(scene: Scene, muted_s: float, reroutes: int, among: int = 0) -> None:
    """A near source that does not answer is left for a far one when it cannot be just slow.

    Args:
        among: So many come later, and are all that is seen at first.
    """
    if among:
        _see_few(1, 1, 1)

    def read(me: Process) -> None:
        scene.until("t", "r")
        scene.slow_s[me] = 1.5
        began_s = scene.now_s
        replicate(me)
        took_s, found = scene.now_s - began_s, me.handle.last_read.reroutes
        demand(found == reroutes, f"I13: {found} re-routes from a source mute for {muted_s} s")
        demand(took_s < 60, f"I6: a mute source held its reader up for {took_s:.0f} s")
        scene.reach("late")

    def serve(me: Process) -> None:
        scene.until("t")
        replicate(me)
        scene.reach("r")
        readers = scene.start_named("late").processes
        scene.when(lambda: any(reader.reads_from for reader in readers), "a reader")
        scene.sleep(scene.random())
        me.mute_until_s = scene.now_s + muted_s
        scene.reach("mute", until="late")

    def follow(me: Process) -> None:
        scene.until("mute")
        with suppress(TorchRosError):
            replicate(me, timeout_s=60)
        scene.until("late")

    def train(me: Process) -> None:
        publish(me, 1)
        _stay(me, "late")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("r", serve, size=1, datacenter="east")
    scene.start("late", read, size=1, datacenter="east")
    for number in range(among):
        scene.start(f"r{number}", follow, size=1, datacenter="east")
    scene.play()


def mute_stream(scene: Scene) -> None:
    """A stream among many leaves a mute source, though all that it sees at first still fill."""
    _see_few(1, 1, 1)

    def consume(me: Process) -> None:
        scene.until("t", "w", "f")
        began_s = scene.now_s
        scene.slow_s[me] = 1.0
        me.streamed(1, timeout_s=100)
        took_s = scene.now_s - began_s
        demand(took_s < 40, f"I6: a mute source held a stream up for {took_s:.0f} s")
        scene.reach("late")

    def serve(me: Process) -> None:
        name = me.start.replica
        if name == "t":
            publish(me, 1)
        else:
            scene.until("t")
            replicate(me)
        scene.reach(name)
        mine = f"{name}@"
        is_read = lambda: any(s.startswith(mine) and "+stream" in r for s, r in scene.edges)
        scene.when(lambda: is_read() or "mute" in scene.reached, "a stream")
        if "mute" not in scene.reached:
            scene.reach("mute")
            me.mute_until_s = scene.now_s + 80
        scene.until("late")

    def fill(me: Process) -> None:
        scene.until("w")
        scene.slow_s[me] = 3.0
        scene.hold("f", me, puts("/readers/"), lambda: True, is_reply=True)
        with suppress(TorchRosError):
            replicate(me, timeout_s=60)

    scene.play(t=serve, w=serve, rf=fill, r=consume)


def seed_dies(scene: Scene) -> None:
    """I13: when a seed dies, one of those who waited for it is the next, and no more than one."""

    def read(me: Process) -> None:
        scene.until("t")
        scene.slow_s[me] = 1.0
        replicate(me)
        _stay(me, *ROLLOUTS[1:])

    def seed(me: Process) -> None:
        scene.until("t")
        scene.slow_s[me] = 3.0
        scene.reach("seed")
        replicate(me)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t", until="seed")
        [process] = scene.start_named("r0").processes
        scene.when(lambda: process.reads_from, "the seed reading")
        kill = partial(scene.kill_process, process)
        scene.at(scene.now_s + 3 * scene.random(), kill)
        scene.until(*ROLLOUTS[1:])

    scene.start("t", train, size=1, datacenter="west")
    scene.start("r0", seed, size=1, datacenter="east")
    for name in ROLLOUTS[1:]:
        scene.start(name, read, size=1, datacenter="east")
    scene.play()
    demand(crossings(scene) <= 2, f"I13: {crossings(scene)} replicas read from afar")


SCENES |= scenes_of(__name__) | {
    "mute seed": partial(mute, muted_s=8.0, reroutes=0),
    "mute for long": partial(mute, muted_s=50.0, reroutes=1),
    "mute among many": partial(mute, muted_s=50.0, reroutes=1, among=2),
}
