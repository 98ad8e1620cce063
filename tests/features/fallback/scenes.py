"""Scenes of a bucket below all runs: who reads it, when, and that a trainer is newer for all."""

from __future__ import annotations

from functools import partial

import numpy as np
from buckets import OLD_NUMBER, OLD_RUN, PIECES, READ_S, URL, ModelBucket
from checks import demand
from replicas import TTL_S, Process
from scenes import (
    LINGER_S,
    SCENES,
    SOON_S,
    Scene,
    _close,
    publish,
    puts,
    replicate,
    scenes_of,
    unpublish,
)

from torch_ros.errors import BucketError, UsageError


def _with_bucket(scene: Scene, **options) -> ModelBucket:
    def on_begin(of, content: int) -> None:
        scene.contents[of.version] = content
        scene.reach("the bucket is read")

    scene.below = ModelBucket(scene, **options)
    scene.below.on_begin = on_begin
    return scene.below


def _versions(scene: Scene) -> float:
    """How much of a version was read from the bucket."""
    return scene.below.cells / sum(np.prod(shape) for _, shape in scene.shapes)


def cold_start(scene: Scene) -> None:
    """I8: of many replicas that start where nothing is left, one reads the bucket."""
    bucket, count = _with_bucket(scene, list_s=1.5 * TTL_S), 6
    bucket.archive(7, 70)
    names = [f"r{number}" for number in range(count)]

    def read(me: Process) -> None:
        scene.until(*(f"{name} is open" for name in names)) if scene.seed % 2 else None
        replicate(me)
        demand(me.shard.held.run == "bucket", "it is of another run")
        scene.reach(str(me))
        scene.when(lambda: sum("/" in each for each in scene.reached) == everyone, "all have it")

    everyone = 0
    for number, name in enumerate(names):
        size = 1 + (scene.seed + number) % 2
        everyone += size
        start = scene.start(name, read, size=size, bucket=URL)
        scene.at(scene.now_s, scene.reach, f"{name} is open")
        assert start.bucket
    scene.play()
    demand(_versions(scene) == 1, f"I8: {_versions(scene)} versions were read from the bucket")


def decided_at_once(scene: Scene) -> None:
    """I8: of two that decide to read the bucket in the same moment, one does."""
    _with_bucket(scene).archive(7, 70)

    def read(me: Process) -> None:
        is_first = me.start.replica == "r0"
        mine, other = ("r0 decides", "r1 decides")[:: 1 if is_first else -1]
        scene.hold(mine, me, puts("/runs/bucket"), lambda: other in scene.reached)
        replicate(me)
        scene.reach(str(me), until=(*map(str, scene.processes),))

    for name in ("r0", "r1"):
        scene.start(name, read, size=1, bucket=URL)
    scene.play()
    demand(_versions(scene) == 1, f"I8: {_versions(scene)} versions were read from the bucket")


def reader_of_a_bucket_dies(scene: Scene) -> None:
    """I6: if who reads the bucket dies, or loses its seat, another one reads it; all have it."""
    bucket, names = _with_bucket(scene), ["r0", "r1", "r2"]
    bucket.archive(7, 70)
    victims: list[Process] = []

    def strike() -> None:
        if victims:
            return
        victim = scene.current.process
        victims.append(victim)
        if scene.seed % 2:
            scene.at(scene.now_s, scene.kill_process, victim)
        else:
            scene.at(scene.now_s, scene.end_lease, victim)

    bucket.on_read = strike

    def read(me: Process) -> None:
        replicate(me, timeout_s=300)
        scene.reach(str(me))
        have = lambda each: each.is_gone or str(each) in scene.reached
        scene.when(lambda: all(map(have, scene.processes)), "all have it")

    for name in names:
        scene.start(name, read, size=1 + scene.seed // 2 % 2, bucket=URL, sharding="whole")
    scene.play()
    read_by = sum(str(each) in scene.reached for each in scene.processes)
    demand(read_by >= 2, "I6: nobody has it")


def _store_away(scene: Scene) -> None:
    """I16: time in which the store does not answer does not count, nor that of an earlier seat."""
    bucket = _with_bucket(scene)
    bucket.archive(70, 70)

    def train(me: Process) -> None:
        publish(me, 1, 11)
        scene.reach("held")
        scene.cut(me, 3.8 * TTL_S)
        scene.until("r has it", limit_s=600)

    def read(me: Process) -> None:
        scene.until("held")
        scene.sleep(1.1 * TTL_S)
        scene.at(scene.now_s + 1.2 * TTL_S, scene.store_away, 1.4 * TTL_S + scene.random())
        replicate(me)
        demand(me.handle.version == 1, f"I16: it has {me.handle.version}")
        scene.reach("r has it")

    scene.start("t", train, size=1)
    scene.start("r", read, size=1, bucket=URL)
    scene.play()
    demand(not bucket.lists, "I16: the bucket was asked, and a trainer was about to come back")


def trainer_restarts(scene: Scene) -> None:
    """I16: a trainer goes on with the bucket's run and its newest; its next is newer for all."""
    bucket = _with_bucket(scene)
    bucket.archive(98, 70)
    number = 98 if scene.seed % 2 else 99

    def train(me: Process) -> None:
        began_s, seat = scene.now_s, me.shard.group.seat
        demand(seat.run == OLD_RUN, f"I16: it publishes in {seat.run}")
        demand(seat.run_number > OLD_NUMBER, f"I16: its run has number {seat.run_number}")
        got = me.handle.replicate("latest", missing_ok=True, timeout_s=100)
        demand(got == 98, f"I16: a trainer that begins again has {got}")
        took_s = scene.now_s - began_s
        demand(took_s < 4 * TTL_S + 3 * READ_S * PIECES, f"I6: it took {took_s:.0f} s")
        scene.until("r has 98")
        unpublish(me)
        scene.contents[number] = 20
        me.fill(20)
        me.handle.publish(number, timeout_s=100)
        scene.reach("published", until=("r has its", "late"))

    def read(me: Process) -> None:
        replicate(me)
        scene.reach("r has 98", until="published")
        is_new = me.handle.update(number, timeout_s=100)
        demand(is_new, "I16: it stays with the bucket's version of that number")
        demand(me.shard.held.run != "bucket", "I16: it has the bucket's")
        scene.reach("r has its", until="late")

    def late(me: Process) -> None:
        scene.until("published")
        replicate(me)
        held = me.shard.held
        demand((held.version, held.run == "bucket") == (number, False), f"I16: it has {held}")
        scene.reach("late", until="r has its")

    scene.start("t", train, size=1 + scene.seed // 2 % 2, bucket=URL)
    scene.start("r", read, size=1, bucket=URL)
    scene.start("late", late, size=1, bucket=URL)
    scene.play()


def only_an_archiver_is_left(scene: Scene) -> None:
    """I16: a trainer that begins again beside an archiver alone may publish from there on."""
    bucket = _with_bucket(scene)

    def first(me: Process) -> None:
        publish(me, 6, 50)
        bucket.archive(4, 40, run=me.handle.run)
        scene.reach("published", until="a is here")
        unpublish(me)
        _close(me)
        scene.reach("gone")

    def archive(me: Process) -> None:
        me.handle.archives.say(None)
        scene.reach("a is here", until="over")

    def second(me: Process) -> None:
        got = me.handle.replicate("latest", missing_ok=True, timeout_s=100)
        demand(got == 4, f"I16: it begins with {got}")
        unpublish(me)
        publish(me, 5, 60)
        scene.reach("over")

    scene.start("t", first, size=1)
    scene.start("a", archive, size=1, spot=True)
    scene.at(scene.now_s + 2.5 * TTL_S, lambda: scene.start("u", second, size=1, bucket=URL))
    scene.play()


def killed_in_a_publication(scene: Scene) -> None:
    """I16: what the dead have left is nobody's: a trainer that begins again has the bucket's."""
    _with_bucket(scene).archive(7, 70)

    def first(me: Process) -> None:
        if me.rank == 0:  # the other one never comes
            scene.at(scene.now_s + 1.0, strike)
            publish(me, 8, 80)
        scene.until("over")

    def strike() -> None:
        demand(scene.checks.holdings, "nothing is being published")
        for process in scene.start_named("t").processes:
            scene.kill_process(process)
        scene.at(scene.now_s, partial(scene.start, "u", second, size=1, bucket=URL))

    def second(me: Process) -> None:
        got = me.handle.replicate("latest", missing_ok=True, timeout_s=100)
        demand(got == 7, f"I16: it begins with {got}")
        scene.reach("over")

    scene.play(2, t=first)


def corrupt_in_a_bucket(scene: Scene) -> None:
    """I1, I6: a version that is corrupt leads to the one before, at once, and on all ranks."""
    bucket = _with_bucket(scene, slow=10.0)
    bucket.archive(6, 60)
    bucket.corrupt.add(bucket.archive(7, 70))
    bucket.corrupt.add(bucket.archive(8, 80))

    size = 1 + scene.seed % 2

    def read(me: Process) -> None:
        replicate(me, timeout_s=400)
        took_s = scene.now_s - bucket.first_s if bucket.first_s else 0.0
        most_s = 3 * PIECES * READ_S + 2 * TTL_S
        if size > 1:  # the other rank gives up when it hears that its peer has
            most_s = 2 * (PIECES * READ_S + 1.5 * TTL_S) + 10 * PIECES * READ_S + TTL_S
        demand(me.handle.version == 6, f"I1: it has {me.handle.version}")
        demand(took_s < most_s, f"I6: it took {took_s:.0f} s")
        scene.reach(str(me), until=(*map(str, scene.processes),))

    for name in ("r0", "r1"):
        scene.start(name, read, size=size, bucket=URL)
    scene.play()
    demand(_versions(scene) <= 3, f"I8: {_versions(scene)} versions were read from the bucket")


def trained_while_corrupt(scene: Scene) -> None:
    """I16: who could not read a version waits anew, if a trainer has published meanwhile."""
    bucket = _with_bucket(scene)
    bucket.archive(7, 70)
    bucket.corrupt.add(bucket.archive(8, 80))
    bucket.on_read = lambda: scene.reach("it is read")

    def train(me: Process) -> None:
        scene.until("it is read")
        publish(me, 1, 11)
        unpublish(me)
        scene.sleep(1.8 * TTL_S)
        publish(me, 2, 12)
        scene.until("r has it")

    def read(me: Process) -> None:
        replicate(me)
        demand(me.handle.version == 2, f"I16: it has {me.handle.version}")
        scene.reach("r has it")

    scene.start("t", train, size=1)
    scene.start("r", read, size=1, bucket=URL)
    scene.play()


def all_corrupt_in_a_bucket(scene: Scene) -> None:
    """I6: where no version can be read, that is said, and nothing is held."""
    bucket = _with_bucket(scene)
    for version in (6, 7):
        bucket.corrupt.add(bucket.archive(version, 10 * version))

    def read(me: Process) -> None:
        try:
            me.handle.replicate("latest", missing_ok=bool(scene.seed % 2), timeout_s=100)
            demand(False, "I1: it has something")
        except BucketError:
            demand(me.handle.version is None, "it holds something")
        scene.reach(str(me), until=(*map(str, scene.processes),))

    scene.start("r", read, size=1 + scene.seed // 2 % 2, bucket=URL)
    scene.play()


def dead_lineage(scene: Scene) -> None:
    """I16: what an ended lineage left is older than what lives: in the bucket, and out of it."""
    bucket = _with_bucket(scene)
    dead = bucket.archive(101, 50, born_ms=50)

    def first(me: Process) -> None:
        replicate(me)
        demand(me.handle.version == 101, "it has another one")
        scene.cut(me, 6 * TTL_S)
        scene.sleep(1.5 * TTL_S)
        bucket.archive(99, 60, born_ms=60)
        scene.reach("cut off", until="r1 has it")
        group = me.shard.group
        scene.when(lambda: group.state == "seated" and scene.now_s > me.cut_until_s, "a seat")
        scene.reach("back", until="late has it")

    def second(me: Process) -> None:
        scene.until("cut off")
        replicate(me)
        demand(me.handle.version == 99, f"I16: it has {me.handle.version}, of an ended lineage")
        scene.reach("r1 has it", until="late has it")

    def late(me: Process) -> None:
        scene.until("back")
        replicate(me)
        demand(me.handle.version == 99, f"I16: it has {me.handle.version}, of an ended lineage")
        scene.reach("late has it")

    assert dead
    scene.start("r0", first, size=1, bucket=URL)
    scene.start("r1", second, size=1, bucket=URL)
    scene.start("late", late, size=1, bucket=URL)
    scene.play()


def _opens_beside(scene: Scene) -> None:
    """I16: a trainer that opens beside who holds the bucket's version publishes in its own run."""
    _with_bucket(scene).archive(98, 70)

    def read(me: Process) -> None:
        me.handle.replicate("latest", timeout_s=100)
        scene.reach("r has 98", until="t has published")
        demand(me.handle.update(timeout_s=100), "I16: the trainer's is not newer")
        demand(me.shard.held.run != "bucket", "I16: it has the bucket's")
        scene.until("expected")
        scene.reach("over")

    def train(me: Process) -> None:
        publish(me, 3, 30)
        demand(me.handle.run != "bucket", "I16: a trainer publishes in the bucket's run")
        scene.reach("t has published", until="over")

    def expect(me: Process) -> None:
        scene.until("r has 98")
        replicate(me, 3)
        demand(me.shard.held.run != "bucket", "I16: it has the bucket's")
        scene.reach("expected", until="over")

    def starts() -> None:
        scene.start("t", train, size=1)

    scene.start("r", read, size=1, bucket=URL)
    scene.start("e", expect, size=1)
    scene.at(scene.now_s + 5 * TTL_S, starts)
    scene.play()


def goes_back(scene: Scene) -> None:
    """I16: who has held a trainer's version waits for its next one, for ever if it has to."""
    bucket = _with_bucket(scene)
    bucket.archive(98, 70)

    def train(me: Process) -> None:
        publish(me, 3, 30)
        scene.until("r has it")
        unpublish(me)
        scene.reach("t has none")
        scene.sleep(5 * TTL_S)
        publish(me, 4, 40)
        scene.until("over")

    def read(me: Process) -> None:
        replicate(me)
        scene.reach("r has it")
        unpublish(me)
        scene.until("t has none")
        replicate(me)
        demand(me.handle.version == 4, f"I16: it has gone back to {me.handle.version}")
        scene.reach("over")

    scene.start("t", train, size=1)
    scene.start("r", read, size=1, bucket=URL)
    scene.play()
    demand(not bucket.lists, "I16: the bucket was asked")


def nothing_to_archive(scene: Scene) -> None:
    """I6: nobody stays for an archiver with what comes from a bucket."""
    _with_bucket(scene).archive(98, 70)

    def read(me: Process) -> None:
        replicate(me)
        took_s = _close(me)
        demand(took_s < SOON_S, f"I6: it stayed {took_s:.0f} s with what is in the bucket")
        scene.reach("over")

    def archive(me: Process) -> None:
        me.handle.archives.say(None)
        scene.until("over")

    scene.start("r", read, size=1, bucket=URL, linger_s=LINGER_S)
    scene.start("a", archive, size=1, spot=True)
    scene.play()


def a_bucket_of_one_rank(scene: Scene, has_one: int = 0) -> None:
    """I6: what one rank must do and another one cannot ends the call for both, by name."""
    _with_bucket(scene).archive(98, 70)

    def read(me: Process) -> None:
        started_s = scene.now_s
        try:
            me.handle.replicate(timeout_s=10 * TTL_S)
        except UsageError as error:
            demand("was opened without bucket=..." in str(error), f"I6: it raises {error}")
        else:
            demand(False, "I6: the ranks read, and one of them has no bucket")
        demand(scene.now_s - started_s < 5 * TTL_S, "I6: it waited for what cannot come")
        demand(me.handle.version is None, "I9: it holds what the group has not read")
        scene.reach(str(me), until=(*map(str, scene.processes),))

    scene.start("r", read, size=2, bucket=(None, URL) if has_one else (URL, None))
    scene.play()


SCENES |= scenes_of(__name__) | {
    "store away, and a bucket": _store_away,
    "opens beside a bucket's": _opens_beside,
    "a bucket of the last rank": partial(a_bucket_of_one_rank, has_one=1),
}
