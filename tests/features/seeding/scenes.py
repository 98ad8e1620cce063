"""Scenes of versions that are fetched into a datacenter while its replicas go on: I15."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from checks import demand
from features.retention.afar import SLOW_S, _reading
from replicas import TTL_S, Process
from scenes import SCENES, Scene, alike, meet, publish, puts, replicate, scenes_of, unpublish
from seeding import crossings

from torch_ros.errors import UsageError
from torch_ros.features.seeding.forerunner import STUCK_S

POLL_S = 0.5
WAIT_S = 60.0
SOON_S = 5.0  # for what is looked at every 2 s to be read; the world is a slow one
AT_ONCE_S = 2.0  # what an update takes that finds nothing, or orders; the world is a slow one


def _poll(
    me: Process, wanted: int, limit_s: float = 400.0, *, enough: int = 1 << 30
) -> list[float]:
    """Update until a version is there. How long each update took that brought nothing.

    Args:
        enough: After so many the link is a fast one.
    """
    scene, handle, took_s = me.world, me.handle, []
    until_s = scene.now_s + limit_s
    while handle.version != wanted:
        began_s, held = scene.now_s, handle.version
        is_new = handle.update(timeout_s=100)
        demand(is_new == (handle.version != held), f"{me}: update said {is_new}")
        scene.checks.returned(me, handle.version)
        if not is_new:
            took_s.append(scene.now_s - began_s)
            if len(took_s) > enough:
                scene.slow_s[me] = 0.0
            scene.sleep(POLL_S)
        demand(scene.now_s < until_s, f"I6: {me} never gets version {wanted}")
    return took_s


def _released(me: Process) -> None:
    ahead = me.ahead
    me.world.when(lambda: ahead._room is None, f"the copy of {me} let go of", 2 * TTL_S)


def _train(me: Process, names: tuple[str, ...], *, versions: int = 2) -> None:
    scene = me.world
    for version in range(1, versions + 1):
        if version > 1:
            unpublish(me)
        publish(me, version, version)
        scene.reach(f"{version}", until=(*(f"{name} has {version}" for name in names),))
    scene.until(*names)


def _stay(me: Process, names: tuple[str, ...]) -> None:
    me.world.reach(me.start.replica, until=(*names,))


def _first(me: Process) -> None:
    """All of the rollouts begin with version 1."""
    me.world.until("1")
    replicate(me)
    me.world.reach(f"{me.start.replica} has 1", until="2")


def _play(scene: Scene, follow: Callable, *, count: int = 3, size: int = 0, **options) -> None:
    names = tuple(f"r{number}" for number in range(count))
    size = size or 1 + scene.seed % 2
    scene.start("t", partial(_train, names=names), size=1, datacenter="west")
    for name in names:
        made = {"datacenter": "east", "seeding": "host", **options}
        scene.start(name, partial(follow, names=names), size=size, **made)
    scene.play()


def often_asked(scene: Scene) -> None:
    """A fetch that takes longer than the calls that a group remembers is none of these."""

    def follow(me: Process, names) -> None:
        _first(me)
        scene.slow_s[me] = 15.0
        took_s = _poll(me, 2, enough=100)
        demand(len(took_s) > 100, f"it came within {len(took_s)} updates")
        demand(max(took_s) < AT_ONCE_S, f"I15: {me} waited for its forerunner: {max(took_s)}")
        scene.reach(f"{me.start.replica} has 2")
        _stay(me, names)

    _play(scene, follow, count=1, size=4)


def ordered_twice(scene: Scene) -> None:
    """Replicas that order at the same moment make one seed."""

    def follow(me: Process, names) -> None:
        _first(me)
        began = f"{me.start.replica} orders"
        others = [f"{name} orders" for name in names]
        # All have decided from views in which nobody fetches; then all announce it.
        scene.hold(began, me, _fills_ahead, lambda: {*others} <= scene.reached)
        _poll(me, 2)
        scene.reach(f"{me.start.replica} has 2")
        scene.reached.update(others)
        _released(me)
        _stay(me, names)

    _play(scene, follow, count=2, size=1)
    demand(crossings(scene) == 2, f"I15: {crossings(scene)} replicas read from afar")


def idle_again(scene: Scene) -> None:
    """I6: who looks out orders what is newest when its forerunner has ended without anything."""
    ended_s = [0.0]

    def ends() -> bool:
        ended_s[0] = ended_s[0] or ("3" in scene.reached and scene.now_s + 1.0)
        return bool(ended_s[0]) and scene.now_s > ended_s[0]

    def follow(me: Process, names) -> None:
        _first(me)
        if not me.rank:
            scene.hold("fills", me, _fills_ahead, ends)
        demand(me.handle.update(wait_s=300.0, timeout_s=100), f"I6: {me} waited in vain")
        demand(me.handle.version == 3, f"{me} is at {me.handle.version}, which was gone")
        took_s = scene.now_s - ended_s[0]
        demand(took_s < SOON_S, f"I6: {me} has it {took_s:.1f} s after its forerunner was idle")
        scene.reach(f"{me.start.replica} has 3")
        _stay(me, names)

    def train(me: Process) -> None:
        publish(me, 1, 1)
        scene.reach("1", until="r0 has 1")
        unpublish(me)
        publish(me, 2, 2)
        scene.reach("2", until="fills")
        unpublish(me)
        publish(me, 3, 3)
        scene.reach("3", until="r0")

    scene.start("t", train, size=1, datacenter="west")
    options = {"datacenter": "east", "seeding": "host"}
    scene.start("r0", partial(follow, names=("r0",)), size=1, **options)
    scene.play()


def _fills_ahead(what: object) -> bool:
    is_put = puts("/holdings/")(what)
    return is_put and any("%2Bhost@" in getattr(op, "key", "") for op in what.txn.ops)


def _seed_of(scene: Scene) -> Process:
    [process] = scene.start_named("r0").processes
    return process


def _seed_fetches(scene: Scene) -> bool:
    there = scene.store.entries
    return any("/readers/" in key and "/r0%2Bhost@" in key for key in there)


def seed_fails(scene: Scene, *, is_killed: bool) -> None:
    """A datacenter whose seed is dead, or stuck, is another's to fetch for."""

    def follow(me: Process, names) -> None:
        if me.start.replica == "r0":
            _lead(me)
            return
        _first(me)
        scene.when(lambda: _seed_fetches(scene), "the seed fetching")
        if is_killed:
            scene.at(scene.now_s, scene.kill_process, _seed_of(scene))
        _poll(me, 2, 2 * TTL_S + 5 if is_killed else STUCK_S + 30)
        scene.reach("r0 has 2")
        scene.reach(f"{me.start.replica} has 2")
        scene.reach("r0")
        _stay(me, names)

    def _lead(me: Process) -> None:
        _first(me)
        scene.slow_s[me] = 1000.0
        demand(not me.handle.update(timeout_s=100), "it went to what is far")
        scene.until("r0 has 2")

    _play(scene, follow, count=2, size=1)


def no_memory_ahead(scene: Scene) -> None:
    """An update of which one rank has no memory for a copy fails on all, and all go on."""

    def follow(me: Process, names) -> None:
        _first(me)
        if me.rank:
            me.ahead._bytes_max = 1
        try:
            me.handle.update(timeout_s=100)
        except UsageError as error:
            demand("seeding='host'" in str(error), f"{error}")
        else:
            demand(False, f"I15: {me} has its forerunner fetch what no peer has memory for")
        demand(me.handle.version == 1, f"{me} has given up what it held")
        meet(me, "failed")
        me.ahead._bytes_max = None
        _poll(me, 2)
        scene.reach("r0 has 2")
        _stay(me, names)

    _play(scene, follow, count=1, size=2)


def passed_by(scene: Scene) -> None:
    """Without forerunners a version that is being read here is passed by once, then read along."""

    def seed(me: Process) -> None:
        _first(me)
        scene.slow_s[me] = 1.0
        scene.reach("seed")
        demand(me.handle.update(timeout_s=100) and me.handle.version == 2, "it had 2 to go to")
        scene.reach("r0 has 2")
        _stay(me, ("r0", "r1"))

    def follow(me: Process) -> None:
        _first(me)
        there = scene.store.entries
        scene.when(lambda: any(map(_reads, there)), "the seed reading")
        scene.until("3")
        demand(not me.handle.update(timeout_s=100), f"{me} goes to what is only coming")
        demand(me.handle.version == 1, f"{me} has given up what it had")
        scene.reach(f"{me} has passed by")  # else who comes late goes with its peer at once
        scene.until(*(f"{each} has passed by" for each in scene.start_named("r1").processes))
        demand(me.handle.update(timeout_s=100), f"{me} is told to wait for ever")
        scene.checks.returned(me, me.handle.version)
        demand(me.handle.version == 2, f"{me} passes by what is here for what is far")
        demand(me.handle.last_read.source == "r0", f"{me} reads from {me.handle.last_read.source}")
        _stay(me, ("r0", "r1"))

    def train(me: Process) -> None:
        publish(me, 1, 1)
        scene.reach("1", until=("r0 has 1", "r1 has 1"))
        unpublish(me)
        publish(me, 2, 2)
        scene.reach("2", until="seed")
        _stay(me, ("r0", "r1"))

    def train_on(me: Process) -> None:
        scene.until("2")
        there = scene.store.entries
        scene.when(lambda: any(map(_reads, there)), "the seed reading")
        publish(me, 3, 3)
        scene.reach("3")
        _stay(me, ("r0", "r1"))

    size = 1 + scene.seed % 2
    scene.start("t", train, size=1, datacenter="west")
    scene.start("t2", train_on, size=1, datacenter="west")
    scene.start("r0", seed, size=1, datacenter="east")
    scene.start("r1", follow, size=size, datacenter="east")
    scene.play()


def _reads(key: str) -> bool:
    return "/readers/" in key and f"/{2:020d}/" in key and "/r0@" in key


def waits_for_a_copy(scene: Scene) -> None:
    """A follower of what is far goes to the copy here as soon as that is whole."""
    size = 1 + scene.seed % 2
    told: dict[int, list] = {}

    def follow(me: Process) -> None:
        mine: list[int] = []
        for version in me.handle.follow(stop=lambda: len(mine) == 2, timeout_s=WAIT_S):
            scene.checks.returned(me, version)
            mine.append(version)
            scene.reach(f"r has {version}")
        demand(me.handle.last_read.source == "r+host", f"{me} has read what is far")
        told[me.rank] = mine
        if len(told) == size:
            alike(scene, told)
        scene.until("over")

    def train(me: Process) -> None:
        publish(me, 1, 1)
        scene.until("r has 1")
        unpublish(me)
        publish(me, 2, 2)
        scene.until("over")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("r", follow, size=size, datacenter="east", seeding="host")
    scene.play()


def waits_for_a_neighbour(scene: Scene) -> None:
    """A replica that passes by what is far goes to it as soon as a neighbour has all of it.

    The trainer offers it already, so that nobody writes the version's record then.
    """
    size = 1 + scene.seed % 2

    def train(me: Process) -> None:
        publish(me, 1, 1)
        scene.until("r has 1")
        unpublish(me)
        publish(me, 2, 2)
        scene.until("over")

    def come(me: Process) -> None:
        scene.until("r has 1")
        scene.slow_s[me] = SLOW_S
        replicate(me, 2)
        scene.reach("n has 2", until="over")

    def look_out(me: Process) -> None:
        replicate(me, 1)
        scene.reach("r has 1")
        _reading(scene, "n")
        is_new = me.handle.update(wait_s=WAIT_S, timeout_s=100)
        demand(is_new and "n has 2" in scene.reached, "I6: it did not wait for its neighbour")
        scene.checks.returned(me, me.handle.version)
        demand(me.handle.last_read.source == "n", f"{me} has read what is far")
        scene.reach("over")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("n", come, size=1, datacenter="east")
    scene.start("r", look_out, size=size, datacenter="east")
    scene.play()


SCENES |= scenes_of(__name__) | {
    "seed ahead dies": partial(seed_fails, is_killed=True),
    "seed ahead is stuck": partial(seed_fails, is_killed=False),
}
