"""Scenes of a replica's end: readers finish, or go on elsewhere; archivers get the last version."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from checks import demand, never
from kit import feature
from replicas import TTL_S, Process
from scenes import (
    LINGER_S,
    SCENES,
    SIZE,
    SOON_S,
    Scene,
    _close,
    deletes,
    meet,
    publish,
    puts,
    read_from,
    replicate,
    scenes_of,
    unpublish,
)

from torch_ros.errors import NotAvailable, TorchRosError
from torch_ros.features.handover.flow import Handover
from torch_ros.protocol import keys as k
from torch_ros.protocol.records import VersionRef

DEATH_S = 30.0  # from the notice on
UPLOAD_S = 3.0


def _leave(me: Process, within_s: float) -> float:
    """Leave, and be killed when the time is over. Returns how long leaving took."""
    scene, began_s = me.world, me.world.now_s
    me.closing_s, me.start.linger_s = began_s, within_s
    scene.at(began_s + DEATH_S, partial(scene.kill_process, me))
    me.handle.leave(within_s=within_s)
    scene.reach(f"{me} has left")
    return scene.now_s - began_s


def leaves(scene: Scene, *, read_s: float, within_s: float, reroutes: int) -> None:
    """I8: who reads from a replica that leaves may finish, or goes on elsewhere; nobody comes."""
    size = 1 + scene.seed % 2

    def read(me: Process) -> None:
        scene.until("r0 has it")
        scene.slow_s[me] = read_s
        began_s = scene.now_s
        replicate(me, 1)
        found, took_s = me.handle.last_read.reroutes, scene.now_s - began_s
        demand(found == reroutes, f"I8: {found} re-routes from a replica that left")
        demand(took_s < DEATH_S, f"I6: its reader took {took_s:.0f} s")
        scene.reach("r1 has it", until="late has it")

    def leaving(me: Process) -> None:
        scene.until("t")
        replicate(me, 1)
        scene.reach("r0 has it")
        readers = scene.start_named("r1").processes
        scene.when(lambda: all(reader.reads_from for reader in readers), "a reader")
        scene.reach("leaves")
        took_s = _leave(me, within_s)
        demand(took_s < within_s + 3, f"I6: it took {took_s:.0f} s to leave within {within_s:.0f}")

    def late(me: Process) -> None:
        scene.until("leaves")
        scene.sleep(1)
        offered = me.handle.list(timeout_s=5)[1]
        demand("r0" not in offered, "I7: who leaves is offered")
        replicate(me, 1)
        demand("r0" not in read_from(scene, "late"), "I8: a newcomer is sent to who leaves")
        scene.reach("late has it")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t", until="late has it")

    # The trainer is far away, so the two read from the one that leaves.
    scene.start("t", train, size=1, datacenter="west")
    scene.start("r0", leaving, size=size, spot=scene.seed % 3 == 0)
    scene.play(r1=read, late=late)


def leaves_with_a_copy(scene: Scene) -> None:
    """I6: a rank that leaves and a peer that keeps a copy do not undo each other's work."""

    def read(me: Process) -> None:
        scene.until("t")
        scene.slow_s[me] = 0.6
        replicate(me)
        demand(me.handle.last_read.reroutes == 1, "I8: a reader of a copy was not let finish")
        scene.reach("r has it")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        [reader] = scene.start_named("r").processes
        scene.when(lambda: reader.reads_from, "a reader")
        me.handle.unpublish(timeout_s=10)
        scene.when(lambda: any("+" in inst for _, inst, _ in reader.reads_from), "a copy read")
        if me.rank:
            scene.until("r has it")
            return
        before = scene.store.rev
        _leave(me, 20.0)
        written = scene.store.rev - before
        demand(written < 20, f"I6: {written} writes while it left")

    scene.start("t", train, size=2, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


def _archive(me: Process, uploads: Callable[[VersionRef], object]) -> None:
    """As `torch-ros archive` does, until the scene is over; `uploads` writes what was read."""
    scene, seen = me.world, None
    while "over" not in scene.reached:
        me.handle.archives.say(seen)
        scene.reach(f"{me.start.replica} says {seen.version if seen else None}")
        latest = me.handle.fleet(timeout_s=20).latest
        if latest in (None, seen):
            scene.sleep(0.2)
            continue
        try:
            me.streamed(latest.version)
        except NotAvailable:  # it went meanwhile
            continue
        uploads(latest)
        seen = latest


def _archiver(scene: Scene, uploads: Callable[[VersionRef], object] | None = None) -> list[str]:
    """The uids that are in its bucket, in order."""
    there: list[str] = []

    def upload(ref: VersionRef) -> None:
        scene.sleep(UPLOAD_S)
        there.append(ref.uid)

    script = partial(_archive, uploads=uploads or upload)
    scene.start("a", script, size=1, spot=True, sharding="whole")
    return there


def _two_versions(me: Process, *, number: int = 2) -> None:
    """The first one is in the bucket when the second one is published."""
    publish(me, 1)
    me.world.until("a says 1")
    unpublish(me)
    publish(me, number, 8)


def last_version(scene: Scene) -> None:
    """A trainer that closes right after its last publication stays until a bucket has that."""
    size, is_told = 1 + scene.seed % 2, scene.seed % 3 == 0
    there = _archiver(scene)

    def train(me: Process) -> None:
        _two_versions(me)
        took_s = _leave(me, DEATH_S - 2) if is_told else _close(me)
        demand(len(there) == 2, "I4: the last version is not in the bucket")
        demand(took_s < UPLOAD_S + TTL_S, f"I6: it stayed {took_s:.0f} s for what the bucket has")
        scene.reach(f"{me.rank} is over", until=(*(f"{rank} is over" for rank in range(size)),))
        scene.reach("over")

    scene.start("t", train, size=size, linger_s=LINGER_S)
    scene.play()


def last_version_anew(scene: Scene) -> None:
    """A bucket in which its number has another content has not got the last version."""
    there = _archiver(scene)

    def train(me: Process) -> None:
        _two_versions(me, number=1)
        _close(me)
        demand(len({*there}) == 2, "I4: the last version is not in the bucket")
        scene.reach("over")

    scene.start("t", train, size=1, linger_s=LINGER_S)
    scene.play()


def bucket_is_dead(scene: Scene) -> None:
    """I6: an archiver whose bucket does not answer costs `linger_s`; an unpublish, nothing."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.when(lambda: scene.start_named("a").processes[0].handle, "an archiver")
        scene.until("a says None")
        for version in (2, 3):
            took_s = unpublish(me)
            demand(took_s < SOON_S, f"I6: an unpublish took {took_s:.0f} s beside an archiver")
            publish(me, version, 5 + version)
        demand(not scene.seen["unpublished with a copy"], "I6: a copy was made for an archiver")
        took_s = _close(me)
        demand(LINGER_S <= took_s < LINGER_S + SOON_S, f"I6: it stayed {took_s:.0f} s")
        scene.reach("over")

    _archiver(scene, lambda _: scene.until("over"))
    scene.start("t", train, size=1, linger_s=LINGER_S)
    scene.play()


def archiver_is_ahead(scene: Scene) -> None:
    """I6: nobody stays with an older version than the one that the bucket has."""
    _archiver(scene)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("a says 2")
        took_s = _close(me)
        demand(took_s < SOON_S, f"I6: it stayed {took_s:.0f} s with an older version")
        scene.reach("over")

    def publish_newer(me: Process) -> None:
        scene.until("a says 1")
        publish(me, 2, 8)
        scene.until("over")

    scene.start("t", train, size=1, linger_s=LINGER_S)
    scene.start("u", publish_newer, size=1, spot=True)  # it does not count for what is retained
    scene.play()


def archived_elsewhere(scene: Scene) -> None:
    """I6: no archiver is stayed for with what others hold, and is wanted here."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("over")

    def read(me: Process) -> None:
        replicate(me, 1)
        scene.until("r1 is here", "a says None")
        took_s = _close(me)
        demand(took_s < SOON_S, f"I6: it stayed {took_s:.0f} s with what another holds")
        scene.reach("over")

    def want(me: Process) -> None:
        scene.reach("r1 is here", until="over")

    here = {"size": 1, "datacenter": "east"}
    _archiver(scene, lambda _: scene.until("over"))
    scene.start("t", train, size=1, datacenter="west")
    scene.start("r", read, linger_s=LINGER_S, **here)
    scene.start("r1", want, spot=True, retain=("latest@here",), **here)
    scene.play()


def archiver_comes_back(scene: Scene) -> None:
    """An archiver that has taken another seat is stayed for, as before."""
    there = _archiver(scene)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("a says 1")
        [archiver] = scene.start_named("a").processes
        group = archiver.shard.group
        before = group.seat
        scene.end_lease(archiver)
        scene.when(lambda: group.seat is not before and group.state == "seated", "another seat")
        scene.sleep(1)
        unpublish(me)
        publish(me, 2, 8)
        _close(me)
        demand(len(there) == 2, "I4: the last version is not in the bucket")
        scene.reach("over")

    scene.start("t", train, size=1, linger_s=LINGER_S)
    scene.play()


def lingers(scene: Scene) -> None:
    """I4: what only a job has that ends stays until somebody has it whom that may take a while."""
    kind = scene.random()

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("has 1")
        unpublish(me)
        publish(me, 2, 8)
        scene.reach(f"{me} has 2")
        if kind < 0.3:  # what lingers is the copy
            unpublish(me)
        scene.sleep(me.rank * 5 * kind)  # they do not all end at once
        took_s = _close(me)
        demand(took_s < 20, f"I6: it lingered for {took_s:.0f} s with what another has")

    def read(me: Process) -> None:
        replicate(me, 1)
        scene.reach("has 1", until="t.1/0 has 2")
        scene.sleep(8)
        with never(TorchRosError, "I4: version 2 is lost"):
            demand(me.handle.update(timeout_s=5), "I4: version 2 is lost")
        scene.checks.returned(me, 2)

    scene.start("r", read, size=1, retain=("latest",))
    scene.start("t", train, size=1 if kind < 0.5 else SIZE, linger_s=30.0)
    scene.play()
    demand(scene.seen["lingers"], "I4: nothing lingered")


def drains_at_the_end(scene: Scene) -> None:
    """A reader may finish when the last one has what lingers, and nobody else comes."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("has 1")
        scene.when(lambda: scene.start_named("r0").processes[0].reads_from, "a reader")
        _close(me)
        scene.reach("closed")

    def slow(me: Process) -> None:  # it begins before the end
        scene.until("has 1")
        scene.slow_s[me] = 1.2
        replicate(me, 1)
        demand(me.handle.last_read.reroutes == 0, "I6: a reader was not let finish")
        scene.sleep(10)

    def late(me: Process) -> None:
        scene.until("has it")
        states = lambda: {held.state for held in scene.checks.holdings.values()}
        scene.when(lambda: "draining" in states() or "closed" in scene.reached, "draining")
        replicate(me, 1)
        demand("closed" not in scene.reached, "I6: it did not wait for who reads")
        read_from = {source for source, reader in scene.edges if k.replica_of(reader) == "r2"}
        demand(not any(map(k.lingers, read_from)), "I6: a newcomer is sent to what drains")

    def quick(me: Process) -> None:
        scene.until("has 1")
        scene.when(lambda: scene.seen["lingers"], "lingering")
        replicate(me, 1)
        scene.reach("has it", until="closed")
        scene.sleep(30)

    scene.start("r0", slow, size=1, spot=True)
    scene.start("r1", quick, size=1, retain=("latest",))
    scene.start("r2", late, size=1, spot=True)
    scene.start("t", train, size=1, linger_s=30.0)
    scene.play()


def both_close(scene: Scene) -> None:
    """Two last holders that close at once do not both take the other for a witness."""

    def train(me: Process) -> None:
        scene.until(*(["t has 1"] if me.start.replica == "u" else []))
        publish(me, 1)
        scene.reach(f"{me.start.replica} has 1", until=("t has 1", "u has 1"))
        if me.start.replica == "t":
            gone = lambda: "u looks" in scene.reached
            scene.hold("t looks", me, deletes("/holdings/"), gone)
        else:
            scene.hold("u looks", me, deletes("/holdings/"), lambda: "t looks" in scene.reached)
        _close(me)
        scene.reach("closed")

    def read(me: Process) -> None:
        scene.until("t looks")
        scene.sleep(10)
        with never(TorchRosError, "I4: version 1 is lost"):
            replicate(me, timeout_s=5)

    scene.start("r", read, size=1, retain=("latest",))
    scene.start("t", train, size=1, linger_s=30.0)
    scene.start("u", train, size=1, linger_s=30.0)
    scene.play()


def no_witness(scene: Scene) -> None:
    """I4: what lingers goes, so who gives up the same version does not count on it."""

    def train(me: Process) -> None:
        publish(me, 1)
        _close(me)

    def read(me: Process) -> None:
        scene.when(lambda: scene.seen["lingers"], "lingering")
        lasting = lambda what: deletes("/holdings/")(what) and deletes("linger")(what)
        [trainer] = scene.start_named("t").processes
        scene.hold("leaves", trainer, lasting, lambda: "gave up" in scene.reached)
        replicate(me, 1)
        scene.until("leaves")
        unpublish(me)
        scene.reach("gave up")
        scene.sleep(40)
        names = me.handle.list(timeout_s=5)
        demand(1 in names, "I4: version 1 is lost")

    scene.start("r", read, size=1, retain=("latest",))
    scene.start("t", train, size=1, linger_s=30.0)
    scene.play()


def dies_lingering(scene: Scene) -> None:
    """I7: what lingers goes when one of its processes dies."""

    def train(me: Process) -> None:
        publish(me, 1)
        _close(me)

    def watch(me: Process) -> None:
        scene.when(lambda: scene.seen["lingers"], "lingering")
        [key] = [key for key in scene.checks.holdings if "linger" in key]
        anchor = scene.store.entries[key].lease_id
        processes = scene.start_named("t").processes
        lease_of = lambda p: feature(p.handle, Handover)._closing._lease.lease_id
        other = next(p for p in processes if lease_of(p) != anchor)
        scene.at(scene.now_s, scene.kill_process, other)
        scene.sleep(TTL_S + 3)
        demand(not scene.checks.holdings, "I7: a process is dead, and what it had is offered")

    scene.start("r", watch, size=1, retain=("latest",))
    scene.start("t", train, linger_s=60.0)
    scene.play()


def ends_half_released(scene: Scene) -> None:
    """I7: of a copy that one rank lets go, its peer, which comes later, offers nothing."""

    def train(me: Process) -> None:
        publish(me, 1)
        unpublish(me)
        meet(me, "has a copy")
        seat = me.shard.group.seat
        scene.hold(f"{me} comes back", me, puts("/shards/t@"), lambda: "u has 2" in scene.reached)
        if me.rank == 0:
            scene.end_lease(me)
        else:  # its peer finds that nobody needs the copy now, and takes its part away
            scene.hold("its part", me, puts("/shards/t+"), lambda: "0 let go" in scene.reached)
        scene.when(lambda: me.shard.group.seat is not seat, "another seat")
        scene.when(lambda: me.rank or not me.copies, "the copy let go")
        scene.reach(f"{me.rank} let go")
        publish(me, 3)
        if me.rank == 0:
            scene.when(lambda: any("/ready/t@" in key for key in scene.store.entries), "a peer")
        _close(me)

    def overtake(me: Process) -> None:
        scene.until("t.1/0 comes back")
        publish(me, 2)
        scene.reach("u has 2")
        scene.sleep(60)

    def read(me: Process) -> None:
        scene.when(lambda: scene.seen["lingers"], "lingering")
        replicate(me, 3)

    scene.start("r", read, size=1, retain=("latest",))
    scene.start("t", train, linger_s=30.0)
    scene.play(u=overtake)


SCENES |= scenes_of(__name__) | {
    "leaves": partial(leaves, read_s=0.5, within_s=20.0, reroutes=0),
    "leaves in a hurry": partial(leaves, read_s=1.0, within_s=2.0, reroutes=1),
}
