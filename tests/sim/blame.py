"""The wait-graph, asked whom it blames: one thing is wrong, and the records must tell which.

    .venv/bin/python tests/sim/blame.py --seeds 10000

Each seed draws a kind of fault, sizes, who is hit and when somebody looks.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from random import Random

from replicas import Process
from scenes import Scene, publish, replicate

from torch_ros.cli.waits import Why, why
from torch_ros.errors import StoreUnavailable, TorchRosError
from torch_ros.protocol.keys import Keys, parse_model
from torch_ros.protocol.records import SchemaRecord, VersionRecord
from torch_ros.store.txn import Put, Read, Txn

FOR_EVER_S = 10_000.0
SETTLES_S = 2.0  # until all who can have done what they could
ENOUGH = 0.99
STEPS_MAX = 20_000


@dataclass
class Question:
    """Asked about a replica, and the answers that are right."""

    replica: str
    is_right: Callable[[Why], bool]
    version: int | None = None
    look_s: float = SETTLES_S  # after the beginning


class Blamed(Scene):
    """A scene that is looked at in the middle, and left there."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.dice = Random(f"blame/{seed}")

    def ranks(self, least: int = 1) -> int:
        return self.dice.randint(least, 4)

    def watch(self, until_s: float) -> None:
        for _ in range(STEPS_MAX):
            if self.now_s >= until_s or not self.actors:
                return
            if not self.step() and self.actors:
                self.now_s = max(self.now_s, min(self.next_timer_s(), until_s))
        raise AssertionError(f"seed {self.seed}: it takes more than {STEPS_MAX} steps")


Kind = Callable[[Blamed], Question]


def calmly(me: Process, *acts: Callable[[Process], object]) -> None:
    """Do this, whatever comes of it, and stay."""
    for act in acts:
        try:
            act(me)
        except TorchRosError as error:
            me.world.tell(me, f"raises {error}")
            break
    me.world.sleep(FOR_EVER_S)


def trainer(scene: Blamed, *acts: Callable[[Process], object], size: int = 0, **options) -> None:
    def first(me: Process) -> None:
        publish(me, 1)
        scene.reach(str(me))

    scene.start("t", lambda me: calmly(me, first, *acts), size=size or scene.ranks(), **options)


def followers(scene: Blamed, least: int = 0) -> None:
    """Replicas that have what there is, and nothing to do with what is wrong."""
    for number in range(scene.dice.randint(least, 2)):
        scene.start(f"r{number}x", lambda me: calmly(me, quickly), size=scene.ranks())


def quickly(me: Process) -> None:
    replicate(me, timeout_s=FOR_EVER_S)


def culprit(found: Why) -> str:
    return found.hops[-1].replica


def blames(replica: str) -> Callable[[Why], bool]:
    """All of it, whatever its state: nothing else tells which rank."""
    return lambda found: culprit(found) == replica and found.kind in {"process", "gone"}


def was_here(found: Why) -> bool:
    """Each process that is blamed had its seat, and lost it."""
    return bool(found.processes) and all(
        each.host and each.pid and not each.is_seated for each in found.processes
    )


def only(replica: str, rank: int) -> Callable[[Why], bool]:
    return lambda found: (
        culprit(found) == replica and [each.rank for each in found.processes] == [rank]
    )


def rank_never_comes(scene: Blamed) -> Question:
    size = scene.ranks(2)
    missing = scene.dice.randrange(size)
    trainer(scene)
    followers(scene)
    start = scene.start("r", lambda me: calmly(me, quickly), size=size)
    scene.kill_process(start.processes[missing])
    return Question("r", only("r", missing))


def rank_not_in_the_call(scene: Blamed) -> Question:
    """A replica that reads lacks it, or a trainer that a reader waits for."""
    size = scene.ranks(2)
    missing = scene.dice.randrange(size)
    is_of_trainer = scene.dice.random() < 0.5
    who = "t" if is_of_trainer else "r"

    def act(me: Process, do: Callable[[Process], object]) -> None:
        if (me.start.replica, me.rank) != (who, missing):
            do(me)

    sizes = {who: size}
    publishes = partial(act, do=lambda me: publish(me, 1, timeout_s=FOR_EVER_S))
    reads = partial(act, do=quickly)
    scene.start("t", lambda me: calmly(me, publishes), size=sizes.get("t", scene.ranks()))
    scene.start("r", lambda me: calmly(me, reads), size=sizes.get("r", scene.ranks()))
    return Question(scene.dice.choice(["r", who]), only(who, missing))


def rank_dies(scene: Blamed) -> Question:
    """Its peers come back, and wait for it: nobody starts it again."""
    size = scene.ranks(2)
    dies = scene.dice.randrange(size)
    trainer(scene)
    start = scene.start("r", lambda me: calmly(me, quickly), size=size)
    scene.at(scene.now_s + 1.0, partial(scene.kill_process, start.processes[dies]))

    def is_right(found: Why) -> bool:
        return only("r", dies)(found) and was_here(found)

    return Question("r", is_right, look_s=scene.dice.choice([25.0, 40.0]))


def other_call(scene: Blamed) -> Question:
    size = scene.ranks(2)
    other = scene.dice.randrange(size)
    trainer(scene)
    followers(scene)

    def read(me: Process) -> None:
        replicate(me, 1 if me.rank == other else "latest", timeout_s=FOR_EVER_S)

    scene.start("r", lambda me: calmly(me, read), size=size)

    def is_right(found: Why) -> bool:
        """Nobody but itself knows who is right: one of two that differ is that rank."""
        ranks = {each.rank for each in found.processes}
        return culprit(found) == "r" and other in ranks and "different calls" in found.hops[-1].text

    return Question("r", is_right)


def slow_reader(scene: Blamed) -> Question:
    """A trainer drains, and one rank of a reader is slow."""
    size = scene.ranks()
    slow = scene.dice.randrange(size)

    def read(me: Process) -> None:
        if me.rank == slow:
            scene.slow_s[me] = FOR_EVER_S
        quickly(me)

    def drain(me: Process) -> None:
        readers = scene.start_named("r").processes
        scene.when(lambda: readers[slow].reads_from, "a reader")
        me.handle.unpublish(timeout_s=FOR_EVER_S)

    trainer(scene, drain, drain_s=FOR_EVER_S)
    scene.start("r", lambda me: calmly(me, read), size=size)
    return Question("t", only("r", slow), look_s=4.0)


def source_dies(scene: Blamed) -> Question:
    """The only one that has the version, in the middle of a read."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 5.0
        replicate(me, timeout_s=FOR_EVER_S)

    def die() -> None:
        scene.when(lambda: all(p.reads_from for p in scene.start_named("r").processes), "reads")
        for process in scene.start_named("t").processes:
            scene.at(scene.now_s, partial(scene.kill_process, process))

    trainer(scene)
    start = scene.start("r", lambda me: calmly(me, read), size=scene.ranks())
    scene.spawn(start.processes[0], "watches", die)
    return Question("r", blames("t"), look_s=scene.dice.choice([3.0, 5.0, 8.0, 30.0]))


def source_stops(scene: Blamed) -> Question:
    """It does not answer, of one that reads from it or of one that reads behind that."""
    is_mute = scene.dice.random() < 0.5

    def stop(me: Process) -> None:
        if is_mute:
            me.mute_until_s = scene.now_s + FOR_EVER_S
        scene.reach(f"{me} stops")

    def read(me: Process) -> None:
        scene.until(*(f"{each} stops" for each in scene.start_named("t").processes))
        if not is_mute:
            scene.slow_s[me] = FOR_EVER_S
        quickly(me)

    def read_behind(me: Process) -> None:
        scene.when(lambda: all(p.reads_from for p in scene.start_named("r").processes), "reads")
        quickly(me)

    trainer(scene, stop)
    scene.start("r", lambda me: calmly(me, read), size=scene.ranks())
    if scene.dice.random() < 0.5:
        scene.start("rb", lambda me: calmly(me, read_behind), size=scene.ranks())
    asked = scene.dice.choice([each.replica for each in scene.starts if each.replica != "t"])
    return Question(asked, blames("t"), look_s=scene.dice.choice([1.5, 2.0, 3.0]))


def store_away(scene: Blamed) -> Question:
    trainer(scene)
    followers(scene)
    scene.start("r", lambda me: calmly(me, quickly), size=scene.ranks())
    scene.at(scene.now_s + scene.dice.random(), partial(scene.store_away, FOR_EVER_S))
    return Question("r", lambda _: False)  # etcd itself is named, or nothing


def wrong_model(scene: Blamed) -> Question:
    """Nobody publishes under this name, and another model has nearly the same."""
    other = scene.dice.choice(["mm", "m-"])
    puts = (
        Put(Keys(other).schema(), SchemaRecord(1, "0").encode()),
        Put(Keys(other).version("run", 1), VersionRecord("u", "L/1/8").encode()),
    )
    scene.store.commit(Txn((), puts))
    scene.store.fresh.clear()
    for number in range(scene.ranks()):
        scene.start(f"r{number}", lambda me: calmly(me, quickly), size=scene.ranks())

    def is_right(found: Why) -> bool:
        models = {parse_model(key) for key in scene.store.entries} - {"m"}
        return found.kind == "version" and get_close_matches("m", sorted(models), 1) == [other]

    return Question("r0", is_right)


def nobody_has_it(scene: Blamed) -> Question:
    """Its trainer is there, and publishes nothing, or not this number."""
    is_number = scene.dice.random() < 0.5
    version = 5 if is_number else None

    def read(me: Process) -> None:
        replicate(me, 5 if is_number else "latest", timeout_s=FOR_EVER_S)

    if is_number:
        trainer(scene)
        followers(scene)
    else:
        scene.start("t", calmly, size=scene.ranks())
    scene.start("r", lambda me: calmly(me, read), size=scene.ranks())
    return Question("r", lambda found: found.kind == "version", version)


def part_of_a_copy(scene: Blamed) -> Question:
    """A version is retained, and one rank does not come to copy its part."""
    size = scene.ranks(2)
    missing = scene.dice.randrange(size)

    def give_up(me: Process) -> None:
        scene.until(*(f"t.{me.start.number}/{rank}" for rank in range(size)))
        if me.rank != missing:
            me.handle.unpublish(timeout_s=FOR_EVER_S)

    trainer(scene, give_up, size=size, retain=("latest",))
    return Question("t", only("t", missing))


def copy_waits(scene: Blamed) -> Question:
    """A copy stays until another replica has the version: nobody reads it, or one is slow."""
    size, is_read = scene.ranks(), scene.dice.random() < 0.5
    slow = scene.dice.randrange(size)

    def read(me: Process) -> None:
        scene.when(lambda: any("+" in key for key in scene.checks.holdings), "a copy")
        if me.rank == slow:
            scene.slow_s[me] = FOR_EVER_S
        quickly(me)

    trainer(scene, lambda me: me.handle.unpublish(timeout_s=FOR_EVER_S), retain=("latest",))
    if is_read:
        scene.start("r", lambda me: calmly(me, read), size=size)
        return Question("t", only("r", slow), look_s=4.0)
    return Question("t", lambda found: (found.kind, culprit(found)) == ("version", "t"))


def install_not_entered(scene: Blamed) -> Question:
    """An engine does not install the newest version, or one rank of it does not."""
    size, all_of_it = scene.ranks(), scene.dice.random() < 0.5
    late = scene.dice.randrange(size)

    def install(me: Process) -> None:
        scene.until("t.0/0")
        if not all_of_it and me.rank != late:
            me.installed(1, timeout_s=FOR_EVER_S)

    def used(me: Process) -> None:
        me.handle.wait_installed(1, timeout_s=FOR_EVER_S)

    trainer(scene, used)
    scene.start("r", lambda me: calmly(me, install), size=size, installs=True)
    right = blames("r") if all_of_it else only("r", late)
    return Question("t", right, look_s=4.0)


def lease_ends(scene: Blamed) -> Question:
    """All processes of a replica stop; its lease is over, and nothing but its name is known."""
    trainer(scene)
    start = scene.start("r", lambda me: calmly(me, quickly), size=scene.ranks())
    for process in start.processes:
        scene.at(scene.now_s + 1.0, partial(scene.kill_process, process))

    def is_right(found: Why) -> bool:
        ranks = [each.rank for each in found.processes]
        return blames("r")(found) and ranks == list(range(start.size)) and was_here(found)

    return Question("r", is_right, look_s=scene.dice.choice([25.0, 40.0]))


def trainer_stops(scene: Blamed) -> Question:
    """Its rollout has all that there is, and waits for what does not come."""
    trainer(scene)
    scene.start("r", lambda me: calmly(me, quickly), size=scene.ranks())
    for process in scene.start_named("t").processes:
        scene.at(scene.now_s + 2.0, partial(scene.kill_process, process))

    def is_right(found: Why) -> bool:
        return blames("t")(found) and was_here(found)

    return Question("r", is_right, look_s=scene.dice.choice([25.0, 40.0]))


def trainer_is_silent(scene: Blamed) -> Question:
    """It has its seat, and publishes nothing more; nobody but itself knows why."""
    size = scene.ranks()
    trainer(scene, size=size)
    scene.start("r", lambda me: calmly(me, quickly), size=scene.ranks())

    def is_right(found: Why) -> bool:
        ranks = [each.rank for each in found.processes if each.is_seated and each.replica == "t"]
        return (found.kind, culprit(found), ranks) == ("nothing", "t", list(range(size)))

    return Question("r", is_right)


KINDS: dict[str, Kind] = {
    "a rank never comes": rank_never_comes,
    "a rank is not in the call": rank_not_in_the_call,
    "a rank dies": rank_dies,
    "CallMismatch": other_call,
    "a slow reader in a drain": slow_reader,
    "a source that dies": source_dies,
    "a source that is slow, or stops": source_stops,
    "etcd is away": store_away,
    "a wrong model name": wrong_model,
    "nobody has the version": nobody_has_it,
    "a part of a copy is missing": part_of_a_copy,
    "a retained copy that waits": copy_waits,
    "an install that is not entered": install_not_entered,
    "a lease that ends": lease_ends,
    "a trainer that stops": trainer_stops,
    "a trainer that is silent": trainer_is_silent,
}


def ask(scene: Blamed, question: Question) -> tuple[bool, str]:
    """Whether the right one is blamed, and the words."""
    try:
        if scene.down_until_s > scene.now_s:
            raise StoreUnavailable("sim://", 1.0, "it is away")
        view = scene.store.read(Read((scene.keys.all(),)))
    except StoreUnavailable:
        return True, "etcd"  # the command says so, and where it looked
    found = why(view, scene.keys, question.replica, question.version)
    words = " | ".join(f"{hop.replica}: {hop.text}" for hop in found.hops)
    return question.is_right(found), f"{found.kind}: {words} {found.processes}"


def blame(seed: int) -> tuple[str, bool, str]:
    """The kind of the seed's fault, whether the right one was blamed, and the words."""
    kind = [*KINDS][seed % len(KINDS)]
    scene = Blamed(seed)
    with scene.inhabited():
        question = KINDS[kind](scene)
        scene.watch(scene.now_s + question.look_s + scene.dice.random())
        return kind, *ask(scene, question)


def play(first: int, count: int, *, workers: int = 1, story: int = 5) -> Counter[tuple[str, bool]]:
    """How often each kind was told right, and not; prints some of those that were not."""
    counted: Counter[tuple[str, bool]] = Counter()
    seeds = range(first, first + count)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(workers, gc.disable, maxtasksperchild=50) as pool:
        found = pool.imap(blame, seeds, 10) if workers > 1 else map(blame, seeds)
        for seed, (kind, is_right, words) in zip(seeds, found, strict=True):
            counted[kind, is_right] += 1
            if not is_right and counted[kind, False] <= story:
                print(f"seed {seed}, {kind}: {words}")
    return counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    given = parser.parse_args()
    began_s = time.monotonic()
    counted = play(given.first, given.seeds, workers=given.workers)
    for kind in KINDS:
        right, wrong = counted[kind, True], counted[kind, False]
        print(f"{right:6} of {right + wrong:6}  {kind}")
    right = sum(count for (_, is_right), count in counted.items() if is_right)
    took_s = time.monotonic() - began_s
    print(f"{right} of {given.seeds} right ({right / given.seeds:.2%}), {took_s:.0f} s")
    return right < ENOUGH * given.seeds


if __name__ == "__main__":
    sys.exit(main())
