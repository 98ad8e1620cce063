"""Scenes of trainers that take tensors back which somebody reads across a slow link: I14."""

from __future__ import annotations

from functools import partial

from checks import Broken, demand
from replicas import TTL_S, Process
from scenes import SCENES, Scene, meet, publish, puts, replicate, scenes_of, unpublish

from torch_ros.errors import DeadlineExceeded, SourceLost
from torch_ros.protocol import keys as k

SOON_S = 2.5  # for a copy, and what it takes in the store; a slow reader takes many times that
SLOW_S = 1.2  # for each read; a source that is much slower would seem mute


def _size(scene: Scene) -> int:
    return 1 + scene.seed % 2


def _reading(scene: Scene, *names: str) -> None:
    readers = [each for name in names for each in scene.start_named(name).processes]
    scene.when(lambda: all(each.reads_from for each in readers), "reading")


def _read(me: Process, slow_s: float = SLOW_S, version: int | str = "latest") -> None:
    scene = me.world
    scene.slow_s[me] = slow_s
    replicate(me, version, timeout_s=200)
    report = me.handle.last_read
    again = report.bytes_read - report.bytes_total
    demand(again <= 64 * report.reroutes, f"I14: {again} bytes were read again")  # two batches
    scene.reach(f"{me.start.replica} has it")


def _copies(scene: Scene) -> set[str]:
    found = {k.parse_holding(key).inst for key in scene.checks.holdings}
    return {inst for inst in found if "+" in inst}


def _released(me: Process, within_s: float) -> None:
    scene = me.world
    scene.when(lambda: not me.copies, "the copy released", within_s)
    demand(not _copies(scene), f"I14: {_copies(scene)} are offered still")
    parts = [key for key in scene.store.entries if "/shards/t+" in key]
    demand(not parts, f"I14: {parts} are left")


def taken_back(scene: Scene) -> None:
    """I14: who reads across a slow link holds nobody up, and goes on from a copy to its end."""
    if scene.seed % 3 == 2:  # whichever: its effect is there
        scene.loses_reply = 20 + int(40 * scene.random())

    def read(me: Process) -> None:
        scene.until("t")
        _read(me)
        report = me.handle.last_read
        demand(report.reroutes == 1, f"I14: {report.reroutes} re-routes")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        took_s = unpublish(me)
        limit_s = SOON_S + 20 * (scene.loses_reply > 0)
        demand(took_s < limit_s, f"I14: a slow link held unpublish up for {took_s:.1f} s")
        scene.until("r has it")
        _released(me, 5.0)

    def follow(me: Process) -> None:  # the copy is not the only one any more
        [reader] = scene.start_named("r").processes
        reads_copy = lambda: any("+" in inst for _, inst, _ in reader.reads_from)
        scene.when(reads_copy, "a copy read")
        replicate(me)
        scene.until("r has it")

    scene.start("t", train, size=_size(scene), datacenter="west", drain_s=1.0)
    scene.start("w", follow, size=1, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()
    demand(scene.seen["unpublished with a copy"], "I14: no copy was made")


def comes_last(scene: Scene) -> None:
    """I14: a near reader that comes while the last look is under way is waited for."""

    def read(me: Process) -> None:
        scene.until("t")
        _read(me)
        scene.until("r has it")

    def come(me: Process) -> None:
        scene.until("reading")
        scene.hold("claims", me, puts("/readers/"), lambda: "gives up" in scene.reached)
        _read(me, 1.0)
        demand(me.handle.last_read.reroutes == 0, "I14: a near reader was not waited for")

    def ends(what: object) -> bool:
        return bool(_copies(scene)) and puts("/decisions/t@")(what)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r1")
        [near] = scene.start_named("r").processes
        scene.reach("reading", until="claims")
        scene.hold("gives up", me, ends, lambda: near.reads_from)
        unpublish(me)
        scene.until("r has it", "r1 has it")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("r1", read, size=1, datacenter="east")
    scene.start("r", come, size=1, datacenter="west")
    scene.play()


def last_of_two(scene: Scene) -> None:
    """I14: of all who have a version that somebody reads from afar, the last one makes a copy."""
    is_race = scene.seed % 2  # else the trainer is first, and its reader has not come to another

    def read(me: Process) -> None:
        scene.until("t")
        _read(me)

    def follow(me: Process) -> None:
        _reading(scene, "r")
        replicate(me)
        scene.reach("w has it", until="gives up" if is_race else "t gave up")
        took_s = unpublish(me)
        demand(took_s < SOON_S, f"I14: a slow link held unpublish up for {took_s:.1f} s")
        scene.reach("w gave up", until="r has it")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t", until="w has it")
        if is_race:
            gone = lambda: "w gave up" in scene.reached
            scene.hold("gives up", me, puts("/decisions/t@"), gone)
        took_s = unpublish(me)
        demand(took_s < SOON_S, f"I14: a slow link held unpublish up for {took_s:.1f} s")
        scene.reach("t gave up", until="r has it")

    scene.start("t", train, size=1, datacenter="west")
    scene.start("w", follow, size=1, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()
    copies = scene.seen["unpublished with a copy"]
    demand(copies == 1, f"I14: {copies} copies were made")


def slow_to_come(scene: Scene) -> None:
    """I14: a copy stays for who has not noticed yet that the tensors have gone."""

    def read(me: Process) -> None:
        scene.until("t")
        _read(me)

    def follow(me: Process) -> None:  # for a moment the copy is not the only one
        scene.until("t gave up")
        replicate(me)
        me.closing_s = scene.now_s
        me.handle.close()

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        unpublish(me)
        scene.reach("t gave up", until="r has it")
        _released(me, 5.0)

    scene.start("t", train, size=_size(scene), datacenter="west")
    scene.start("w", follow, size=1, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


def gone_in_order(scene: Scene) -> None:
    """I8: nobody suspects who takes its tensors back, and has the next version soon."""

    def read(me: Process) -> None:
        scene.until("t", "u")
        scene.slow_s[me] = SLOW_S
        if scene.seed % 2:
            me.streamed("latest", timeout_s=100)
        else:
            replicate(me)
        scene.reach("r has it")

    def train(me: Process) -> None:
        name = me.start.replica
        publish(me, 1)
        scene.reach(name)
        if name == "u":
            scene.until("r has it")
            return
        reads = lambda source: any(k.replica_of(s) == source for s, _ in scene.edges)
        scene.when(lambda: reads("t") or reads("u"), "reading")
        scene.sleep(1.0)
        unpublish(me)
        scene.until("r has it")
        demand(not scene.suspects, f"I8: {scene.suspects}")

    scene.start("t", train, size=1, drain_s=0.1)
    scene.start("u", train, size=1, drain_s=0.1, datacenter="west")
    scene.play(r=read)
    demand(any(k.replica_of(source) == "u" for source, _ in scene.edges), "it was not left")


def second_copy(scene: Scene) -> None:
    """I14: while somebody reads from a copy, the replica makes no other for those who are far."""

    def read(me: Process, version: int) -> None:
        scene.until(f"t has {version}")
        _read(me, 0.6 if version == 2 else SLOW_S, version)
        if version == 2:
            demand(me.handle.last_read.reroutes == 0, "I14: a second copy was made")
        scene.until("r has it", "r1 has it")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t has 1")
        _reading(scene, "r")
        took_s = unpublish(me)
        demand(took_s < SOON_S, f"I14: a slow link held unpublish up for {took_s:.1f} s")
        publish(me, 2, 8)
        scene.reach("t has 2")
        _reading(scene, "r1")
        unpublish(me)
        demand("r has it" not in scene.reached, "I14: it waited for who reads from the copy")
        scene.until("r has it")
        _released(me, 5.0)

    scene.start("t", train, size=_size(scene), datacenter="west")
    scene.start("r", partial(read, version=1), size=1, datacenter="east")
    scene.start("r1", partial(read, version=2), size=1, datacenter="north")
    scene.play()


def no_memory(scene: Scene) -> None:
    """I14: where a rank has no memory for its part of a copy, far readers are waited for."""

    def read(me: Process) -> None:
        scene.until("t")
        _read(me, 1.0)
        demand(me.handle.last_read.reroutes == 0, "I14: it was left without a copy")
        scene.reach("r has it")

    def train(me: Process) -> None:
        if me.rank == scene.seed % 2:
            scene.crammed.add(me)
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        try:
            unpublish(me)
        except MemoryError as error:
            raise Broken("I14: it failed for want of memory") from error
        _released(me, 5.0)
        publish(me, 2, 8)
        meet(me, "has 2")

    scene.start("t", train, size=2, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()
    demand(not scene.seen["unpublished with a copy"], "I14: a copy was made")


def far_reader_dies(scene: Scene) -> None:
    """I14: a copy goes with the last far reader's lease, and stays for who takes its place."""
    has_next = scene.seed % 2

    def read(me: Process) -> None:
        name = me.start.replica
        scene.until("t", *(["seed"] if name == "r1" else []))
        if name == "r":
            scene.slow_s[me] = SLOW_S
            scene.hold("seed", me, puts("/readers/"), lambda: True, is_reply=True)
            replicate(me, timeout_s=200)
        else:
            _read(me)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, *(["r", "r1"] if has_next else ["r"]))
        unpublish(me)
        [seed] = scene.start_named("r").processes
        scene.sleep(3 * scene.random())
        scene.at(scene.now_s, scene.kill_process, seed)
        if has_next:
            scene.until("r1 has it")
        _released(me, TTL_S + 5.0)

    scene.start("t", train, size=1, datacenter="west", drain_s=1.0)
    scene.start("r", read, size=1, datacenter="east")
    if has_next:
        scene.start("r1", read, size=1, datacenter="east")
    scene.play()


def retained_too(scene: Scene) -> None:
    """I4, I14: one copy is there for those who retain the version, and for those who are far."""
    is_closed = scene.seed % 2  # right after

    def read(me: Process) -> None:
        scene.until("t")
        _read(me, 1.0)
        scene.until("t is done")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        took_s = unpublish(me)
        demand(took_s < SOON_S, f"I14: a slow link held unpublish up for {took_s:.1f} s")
        if is_closed:
            me.closing_s = scene.now_s
            me.handle.close()
            demand("r has it" in scene.reached, "I4: it did not linger for who reads from afar")
        else:
            publish(me, 2, 8)  # from now on nobody retains 1
            scene.until("r has it")
            _released(me, 5.0)
        scene.reach("t is done")

    retain = ("latest",)
    scene.start("t", train, size=_size(scene), datacenter="west", retain=retain, linger_s=60.0)
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


def closes_at_once(scene: Scene) -> None:
    """A handle that closes right after takes its copy along: nobody retains the version."""

    def read(me: Process) -> None:
        scene.until("t")
        scene.slow_s[me] = SLOW_S
        try:
            replicate(me, timeout_s=60)
        except SourceLost:
            scene.reach("lost")
        else:
            demand(False, "it got what nobody has any more")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        unpublish(me)
        me.closing_s = began_s = scene.now_s
        me.handle.close()
        took_s = scene.now_s - began_s
        demand(took_s < SOON_S, f"I6: close took {took_s:.1f} s for what nobody retains")
        scene.until("lost")

    scene.start("t", train, size=1, datacenter="west", linger_s=30.0)
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


def kept_for_long(scene: Scene) -> None:
    """A reader of a copy that was needed for longer than drain_s is let finish all the same."""

    def read(me: Process) -> None:
        scene.until("kept")
        _read(me, version=1)
        demand(me.handle.last_read.reroutes == 0, "I6: release did not wait for its reader")

    def train(me: Process) -> None:
        publish(me, 1)
        unpublish(me)
        scene.sleep(60)
        scene.reach("kept")
        _reading(scene, "r")
        publish(me, 2, 8)  # from now on nobody retains 1, nor has it
        scene.until("r has it")
        _released(me, 5.0)

    scene.start("t", train, size=_size(scene), retain=("latest",), drain_s=40.0)
    scene.play(r=read)


def fails_first(scene: Scene) -> None:
    """I14: parts of a copy that came to nothing do not keep the next unpublish from making one."""

    def read(me: Process) -> None:
        scene.until("t")
        _read(me)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        if me.rank == scene.seed % 2:
            scene.hold("copies", me, puts("/shards/t+"), lambda: "failed" in scene.reached)
        try:
            unpublish(me, timeout_s=2.0)
        except DeadlineExceeded:
            scene.reach("failed")
        scene.until("failed")
        scene.sleep(1.0)
        took_s = unpublish(me)
        demand(took_s < SOON_S, f"I14: a slow link held unpublish up for {took_s:.1f} s")
        scene.until("r has it")
        _released(me, 5.0)

    scene.start("t", train, size=2, datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


def comes_back_with_a_copy(scene: Scene) -> None:
    """I14: a copy that somebody reads from afar is offered again when its ranks are back."""

    def read(me: Process) -> None:
        scene.until("t")
        _read(me)

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("t")
        _reading(scene, "r")
        unpublish(me)
        [reader] = scene.start_named("r").processes
        reads_copy = lambda: any("+" in inst for _, inst, _ in reader.reads_from)
        scene.when(reads_copy, "a copy read")
        if me.rank == 0:
            scene.end_lease(scene.start_named("t").processes[scene.seed % me.start.size])
        scene.until("r has it")
        _released(me, 5.0)

    scene.start("t", train, size=_size(scene), datacenter="west")
    scene.start("r", read, size=1, datacenter="east")
    scene.play()


SCENES |= scenes_of(__name__)
