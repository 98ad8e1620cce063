"""Scenes of bursts in which somebody dies, or is slow: I8."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import wires
from checks import demand
from replicas import Process
from scenes import SCENES, Scene, publish, puts, read_from, replicate, scenes_of

from torch_ros.costs import NIXL_COSTS
from torch_ros.features.pace import rates
from torch_ros.protocol import keys as k
from torch_ros.protocol import reaching
from torch_ros.transfer import reading


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
        scene.reach(f"{me.start.replica} has it", until=(*(f"{name} has it" for name in lasting),))

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t", until=(*(f"{name} has it" for name in lasting),))

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
            stack.enter_context(patch.object(rates, name, value))
        yield


@contextmanager
def _compared():
    """No process copies from another: those that land slowly are found by that alone."""
    limits = {
        (rates, "PACE_S"): 1e9,
        (rates, "LANDINGS"): 2,
        (rates, "WINDOW_BYTES"): 1,
        (wires, "LOOK_S"): 0.02,
        (wires._Peer, "costs"): NIXL_COSTS,
        (reading, "STEPS_FLIGHT"): 1,
    }
    with ExitStack() as stack:
        for (owner, name), value in limits.items():
            stack.enter_context(patch.object(owner, name, value))
        yield


def _relays(scene: Scene, name: str) -> bool:
    of = {
        k.replica_of(k.parse_holding(key).inst): held for key, held in scene.checks.holdings.items()
    }
    return of[name].is_relay


def _strike(scene: Scene, process: Process, strike: Callable[[], object]) -> None:
    """Play the scene, and do `strike` when that process has something of the version."""

    def watch() -> None:
        scene.when(lambda: scene.checks._shown(process)[1], f"{process} having something")
        strike()

    scene.spawn(scene.start_named("t").processes[0], "strikes", watch)
    with _judged():
        scene.play()


def _straggle(
    scene: Scene,
    names: tuple[str, ...],
    *,
    slow: str = "r1",
    strike: Callable[[], object] | None = None,
    first: Callable[[Process], object] = lambda _: None,
    then: Callable[[Process], object] = lambda _: None,
    lasting: tuple[str, ...] = (),
    **options,
) -> None:
    """Play a chain in which `slow` gets little from when it has something.

    Args:
        strike: Done then, instead of that.
        first: Done by each replica before it reads; `then` afterwards.
    """
    scene.shapes = TENSORS

    def read(me: Process) -> None:
        scene.slow_s[me] = 0.2 if me.start.replica == "r0" else 0.02
        first(me)
        replicate(me)
        then(me)

    _chain(scene, names, lasting or names, read, **options)
    [process] = scene.start_named(slow).processes
    _strike(scene, process, strike or partial(scene.slow_s.__setitem__, process, 1.0))


def _all_relay_but(scene: Scene, name: str) -> Callable[[Process], None]:
    def check(me: Process) -> None:
        expected = me.start.replica != name
        demand(_relays(scene, me.start.replica) == expected, f"I8: {me} relays, or not")

    return check


def _reads_from(scene: Scene, name: str, *expected: str) -> None:
    found = read_from(scene, name)
    demand(found == {*expected}, f"I8: {name} reads from {sorted(found)}")


def slow_relay(scene: Scene) -> None:
    """I8: who is slow passes nothing on, and reads from the last one; nobody suspects it."""

    def then(me: Process) -> None:
        _all_relay_but(scene, "r1")(me)
        is_last = me.start.replica != "r1" or "r2 has it" in scene.reached
        demand(is_last, "I8: all wait for a slow one")
        demand(not any("/suspects/" in key for key in scene.store.entries), "R3: it is suspected")

    _straggle(scene, ("r0", "r1", "r2"), then=then)
    _reads_from(scene, "r1", "r0", "r2")


def kept_place(scene: Scene) -> None:
    """I8: who is slow and stays where it is leaves that place to the next newcomer."""

    def first(me: Process) -> None:
        if me.start.replica == "r3":
            scene.when(lambda: not _relays(scene, "r2"), "r2 stepping aside")

    _straggle(scene, ("r0", "r1", "r2", "r3"), slow="r2", first=first)
    _reads_from(scene, "r2", "r1")
    _reads_from(scene, "r3", "r1")


def unheard(scene: Scene, *, dies: bool = False) -> None:
    """No cycle: who does not hear that it has stepped aside reads from older ones for now.

    Args:
        dies: Its source is gone meanwhile. False: it steps aside as soon as it is told.
    """
    names = ("r0", "r1", "r2")

    def strike() -> None:
        source, slow, reader = (scene.start_named(name).processes[0] for name in names)

        def steps_aside(what: object) -> bool:
            if not puts("/holdings/")(what):
                return False
            scene.cut(reader, 7.0)  # it cannot learn either that there is another place for it
            scene.cut(slow, reaching.GLANCE_S + 0.7)
            if dies:
                scene.at(scene.now_s + 3.0, partial(scene.kill_process, source))
            return True

        scene.losses[slow] = steps_aside, "lose reply"
        scene.slow_s[slow] = 1.0

    _straggle(scene, names, strike=strike, lasting=names[1:])
    _reads_from(scene, "r1", "r0", "r2", *["t"][: int(dies)])


def settled_leaf(scene: Scene) -> None:
    """I8: who is slow goes to a better place once, however many come after it."""
    names = ("r0", "r1", "r2", "r3", "r4", "r5")

    def first(me: Process) -> None:
        name = me.start.replica
        if name > "r2":
            before = names[names.index(name) - 1]
            is_told = lambda: before in read_from(scene, "r1") or "r1 has it" in scene.reached
            scene.when(is_told, f"r1 reading from {before}")

    _straggle(scene, names, first=first)
    _reads_from(scene, "r1", "r0", "r2", "r3")


def slow_source(scene: Scene) -> None:
    """I8: one that is slow for its readers only is left by the second; that one relays on."""

    def strike() -> None:
        """A reader of r1 is slow meanwhile."""
        readers = [scene.start_named(name).processes[0] for name in ("r2", "r3")]
        of_r1 = lambda reader: any("r1@" in inst for _, inst, _ in reader.reads_from)
        while "r3 has it" not in scene.reached:
            for reader in readers:
                scene.slow_s[reader] = 1.0 if of_r1(reader) else 0.02
            scene.sleep(0.01)

    names = ("r0", "r1", "r2", "r3")
    _straggle(scene, names, strike=strike, then=_all_relay_but(scene, "r2"))
    found = read_from(scene, "r3")
    # It leaves r1, too, if r1 has not got everything meanwhile.
    demand(
        {"r2", "r1"} <= found, f"I8: who takes the place of a slow one reads from {sorted(found)}"
    )


def _slow_in_turn(scene: Scene) -> None:
    """r1 is slow, then r2, which has come to the source of r1."""
    slow, next_one = (scene.start_named(name).processes[0] for name in ("r1", "r2"))
    scene.slow_s[slow] = 1.0
    scene.when(lambda: "r0" in read_from(scene, "r2"), "r2 losing r1")
    scene.slow_s[next_one] = 1.0


def last_relay(scene: Scene) -> None:
    """I8: who is slow passes on what it has if hardly anybody else does."""

    def strike() -> None:
        _slow_in_turn(scene)
        scene.when(lambda: "t" in read_from(scene, "r2"), "r2 leaving r0")

    _straggle(scene, ("r0", "r1", "r2"), strike=strike, then=_all_relay_but(scene, "r1"))


def slow_seed(scene: Scene) -> None:
    """I13: nobody goes far away for speed, and a seed passes on what it has."""
    strike, then = partial(_slow_in_turn, scene), _all_relay_but(scene, "r1")
    _straggle(scene, ("r0", "r1", "r2"), strike=strike, then=then, datacenter="east")
    for name in ("r1", "r2"):
        found = read_from(scene, name)
        demand("t" not in found, f"I13: a slow one reads from {sorted(found)}")


def _beside(scene: Scene, slow_s: dict[str, float], *, later_s: float = 0.0) -> None:
    """Play a chain in which reads of each replica take so long, or as long for all `later_s`."""
    scene.shapes = TENSORS

    def read(me: Process) -> None:
        scene.slow_s[me] = slow_s[me.start.replica]
        replicate(me)
        _all_relay_but(scene, "" if later_s else "r2")(me)

    def watch() -> None:
        last = scene.start_named("r3").processes[0]
        scene.when(lambda: scene.checks._shown(last)[1], f"{last} having something")
        for name in slow_s:
            scene.slow_s[scene.start_named(name).processes[0]] = later_s

    _chain(scene, tuple(slow_s), tuple(slow_s), read)
    if later_s:
        scene.spawn(scene.start_named("t").processes[0], "watches", watch)
    with _compared():
        scene.play()


def slow_behind_a_slow_one(scene: Scene) -> None:
    """I8: who is slow is found though it gets all that its source has, in the time that is left."""
    _beside(scene, {"r0": 0.4, "r1": 0.02, "r2": 0.3, "r3": 0.02})
    _reads_from(scene, "r2", "r1", "r3")
    _reads_from(scene, "r3", "r2", "r1")


def all_become_slow(scene: Scene) -> None:
    """I8: who becomes slow with its source relays on."""
    _beside(scene, dict.fromkeys(("r0", "r1", "r2", "r3"), 0.02), later_s=0.4)


def _versions(scene: Scene, relays: dict[int, bool], *, ranks: int = 1, **options) -> None:
    """r1, of which a rank is slow in version 1, relays the others or not, with r0 and r2 beside.

    They come in order, except in version 4, where r1 is the first.
    """
    scene.shapes = TENSORS
    names = ("r0", "r1", "r2")

    def follow(me: Process) -> None:
        name = me.start.replica
        for version, is_relay in relays.items():
            order = ("r1", "r0", "r2") if version == 4 else names
            before = ("t", *order)[order.index(name)]
            scene.until(f"{version}")
            if before != "t":
                peers = scene.start_named(before).processes
                scene.when(lambda peers=peers: all(p.reads_from for p in peers), "the one before")
            scene.slow_s[me] = 0.2 if name == order[0] else 0.02
            replicate(me, version)
            rests = not _relays(scene, name)
            expected = name == "r1" and not is_relay
            demand(rests == expected, f"I8: {name} relays version {version}, or not")
            scene.reach(f"{me} has {version}")
            everybody = [p for each in names for p in scene.start_named(each).processes]
            scene.until(*(f"{p} has {version}" for p in everybody))
            me.handle.unpublish()
            scene.reach(f"{me} is done with {version}")

    def train(me: Process) -> None:
        everybody = [p for each in names for p in scene.start_named(each).processes]
        for version in relays:
            publish(me, version)
            scene.reach(f"{version}", until=(*(f"{p} is done with {version}" for p in everybody),))
            me.handle.unpublish()

    scene.start("t", train, size=1)
    for name in names:
        scene.start(name, follow, size=ranks if name == "r1" else 1, **options)
    slow = scene.start_named("r1").processes[-1]
    _strike(scene, slow, partial(scene.slow_s.__setitem__, slow, 1.0))


def rests_once(scene: Scene) -> None:
    """I8: who was slow passes nothing on in the next version, and in none after that."""
    _versions(scene, {1: False, 2: False, 3: True})


def peer_rests(scene: Scene) -> None:
    """I8: whichever rank was slow, and whichever decides."""
    _versions(scene, {1: False, 2: False, 3: True}, ranks=2)


def seed_rests_not(scene: Scene) -> None:
    """I13: who was slow passes on what it has where nobody near has it."""
    _versions(scene, {1: False, 4: True}, datacenter="east")


SCENES |= scenes_of(__name__)
SCENES["unheard, and orphaned"] = partial(unheard, dies=True)
