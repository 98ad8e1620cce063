"""Small histories that are written down, where a seed decides only who moves when."""

from __future__ import annotations

from checks import Broken, demand
from replicas import TTL_S, Process, Start
from story import short
from world import World

from torch_ros.errors import DeadlineExceeded, TorchRosError, VersionConflict
from torch_ros.store import keys as k
from torch_ros.store import membership
from torch_ros.store.records import Call, Kept, Outcome, Shard, VersionRef

SIZE = 2  # ranks of a replica


class Scene(World):
    """Nothing fails but what the scene makes fail. Starts and programs are told, not drawn."""

    shape = (("w0", (12,)), ("w1", (12,)), ("w2", (12,)))

    def _populate(self) -> None:
        self.rates = dict.fromkeys(self.rates, 0.0)
        self.step_s, self.haste, self.read_s = 0.001, 0.0, 0.0
        self.steps_of_trouble = 1_000_000
        self.shapes = self.shape
        self.slow_s: dict[Process, float] = {}  # how long reads of a process take
        self.uneven: set[Process] = set()  # whose reads land in no order
        self.failing: dict[Process, int] = {}  # how many of its next reads fail
        self.requests, self.loses_reply = 0, -1  # how many there were, and which is not answered
        self.claims = 0  # the most that a source had at a time
        self.reached: set[str] = set()

    def _trouble(self) -> None:
        pass

    def start(self, name: str, script, *, size: int = SIZE, **options) -> Start:
        made = Start(self, name, "r" not in name, size, "rows", script=script, **options)
        made.number = len(self.starts)
        self.starts.append(made)
        for rank in range(size):
            process = Process(self, made, rank, len(self.processes))
            self.processes.append(process)
            made.processes.append(process)
            self.spawn(process, "main", process.live)
        return made

    def content(self, version: int) -> int:
        return self.contents[version]

    def reach(self, where: str) -> None:
        self.tell("the scene", f"reaches: {where}")
        self.reached.add(where)

    def until(self, *wheres: str, limit_s: float = 300.0) -> None:
        until_s = self.now_s + limit_s
        while not {*wheres} <= self.reached:
            demand(self.now_s < until_s, f"I6: {wheres} is never reached, only {self.reached}")
            self.sleep(0.05)

    def request_fault(self, connection) -> str:
        self.requests += 1
        is_lost = self.requests == self.loses_reply
        return "lose reply" if is_lost else super().request_fault(connection)

    def read_delay_s(self) -> float:
        process = self.current.process
        if process in self.uneven:
            return 6.0 if self.random() < 0.3 else 0.0
        return self.slow_s.get(process, 0.0)

    def read_error(self) -> str:
        process = self.current.process
        if self.failing.get(process, 0) > 0:
            self.failing[process] -= 1
            return "the read failed"
        return ""

    def store_changed(self, what: object) -> None:
        if any("/readers/" in key for key in self.store.fresh):
            claims: dict[str, set] = {}
            for key in self.store._entries:
                if "/readers/" in key:
                    source, reader, _ = k.parse_reader(key)
                    claims.setdefault(source, set()).add(reader)
            self.claims = max(self.claims, *map(len, claims.values()), 0)
        super().store_changed(what)


def publish(process: Process, version: int, content: int = 7) -> None:
    process.world.contents[version] = content
    process.fill(content)
    process.handle.publish(version, timeout_s=100)


def replicate(process: Process, version: int | str = "latest", timeout_s: float = 100) -> None:
    got = process.handle.replicate(version, timeout_s=timeout_s)
    process.world.checks.returned(process, got)


def unpublish(process: Process, timeout_s: float = 100) -> float:
    """How long that took. Afterwards its owner writes."""
    began_s = process.world.now_s
    process.handle.unpublish(timeout_s=timeout_s)
    process.scribble_if_free()
    return process.world.now_s - began_s


def burst(scene: Scene) -> None:
    """I8: newcomers that come at once form a chain, in which each source feeds one reader."""
    count = 6
    for number in range(count):
        scene.start(f"r{number}", lambda me: (replicate(me), _leave(me, count)))
    scene.start("t", lambda me: (publish(me, 1), _leave(me, count)))
    scene.play()
    demand(scene.claims == 1, f"I8: a source fed {scene.claims} readers at a time")


def _leave(me: Process, count: int) -> None:
    world = me.world
    world.reach(str(me))
    while len(world.reached) < SIZE * (count + 1):
        world.sleep(0.1)


def flaky(scene: Scene) -> None:
    """Two readers whose reads fail now and then do not fail the only trainer."""

    def read(me: Process) -> None:
        scene.failing[me] = 2
        began_s = scene.now_s
        replicate(me, timeout_s=5)
        demand(scene.now_s < began_s + 4, "I6: a suspicion kept readers away")
        scene.reach(str(me))

    scene.start("r0", read, size=1)
    scene.start("r1", read, size=1)
    scene.start("t", lambda me: (publish(me, 1), scene.until("r0.0/0", "r1.1/0")))
    scene.play()


def drain(scene: Scene) -> None:
    """unpublish waits for those who read, while they have time."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 3.0
        replicate(me)
        demand(me.handle.last_read.reroutes == 0, "I6: unpublish did not wait for its readers")

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        unpublish(me)

    scene.start("t", train)
    scene.start("r", read)
    scene.play()


def _await_reader(me: Process) -> None:
    world, readers = me.world, me.world.start_named("r").processes
    while not all(reader.reads_from for reader in readers):
        world.sleep(0.05)


def earlier_readers(scene: Scene) -> None:
    """Readers of an earlier incarnation are waited for too: they read the same memory."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 2.0
        replicate(me)
        demand(me.handle.last_read.reroutes == 0, "I6: unpublish did not wait for its readers")

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        seat = me.handle._group.seat
        if me.rank == 0:
            scene.store.expire(seat.lease_id)
            scene.store_changed("a lease ends")
        while me.handle._group.seat is seat or me.handle._group.is_fenced:
            scene.sleep(0.1)
        unpublish(me)

    scene.start("t", train)
    scene.start("r", read)
    scene.play()


def stuck_reader(scene: Scene) -> None:
    """A reader that is stuck holds unpublish up for `drain_s`, and has nothing in the end."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 50.0
        try:
            replicate(me, timeout_s=80)
        except TorchRosError:
            scene.reach(str(me))

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        took_s = unpublish(me, timeout_s=40)
        demand(took_s < 5, f"I6: a stuck reader held unpublish up for {took_s:.0f} s")
        scene.sleep(100)

    scene.start("t", train, drain_s=1.0)
    scene.start("r", read)
    scene.play()
    demand({"r.1/0", "r.1/1"} <= scene.reached, "I2: a reader got what was taken back")


def late_landing(scene: Scene) -> None:
    """What is still in flight from a source that was lost does not land over what came after."""

    def read(me: Process) -> None:
        scene.until("t.0/0", "u.1/0")
        scene.uneven.add(me)
        replicate(me)
        scene.sleep(10)
        scene.checks.returned(me, 1)
        scene.reach("read")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach(str(me))
        if me.start.replica == "t":
            _await_reader(me)
            scene.sleep(scene.random())
            unpublish(me)
        scene.until("read")

    scene.start("t", train, size=1, drain_s=0.1)
    scene.start("u", train, size=1, drain_s=0.1)
    scene.start("r", read, size=1)
    scene.play()


def relay_dies(scene: Scene) -> None:
    """Who reads from a relay that dies goes on elsewhere, with what it has."""

    def relay(me: Process) -> None:
        scene.slow_s[me] = 2.0
        scene.reach("relay")
        replicate(me)

    def read(me: Process) -> None:
        scene.until("relay")
        scene.sleep(0.3)
        scene.slow_s[me] = 0.5
        replicate(me)
        report = me.handle.last_read
        demand(report.reroutes == 1, f"{report.reroutes} re-routes")
        demand(report.bytes_read == report.bytes_total, "what was there was read again")
        scene.reach("read")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("read")

    def kill() -> None:
        scene.kill_process(scene.start_named("r0").processes[0])

    scene.start("t", train, size=1)
    scene.start("r0", relay, size=1)
    scene.start("r1", read, size=1)
    scene.at(scene.now_s + 4.5, kill)
    scene.play()


def only_fillers(scene: Scene) -> None:
    """When the last that has a version is gone, those who fill it from each other learn so."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 3.0
        try:
            replicate(me, 1, timeout_s=60)
        except DeadlineExceeded as error:
            raise Broken(f"I6: nobody has it, and a reader waits: {error}") from error
        except TorchRosError:
            scene.reach(str(me))

    def kill() -> None:
        for process in scene.start_named("t").processes:
            scene.kill_process(process)

    scene.start("t", lambda me: (publish(me, 1), scene.sleep(1000)))
    for number in range(3):
        scene.start(f"r{number}", read, size=1)
    scene.at(scene.now_s + 3.5, kill)
    scene.play()
    demand(len(scene.reached) == 3, f"I6: only {scene.reached} learned it")


def comes_back(scene: Scene) -> None:
    """Who waits for a version hears of it when its replica takes its seats again."""

    def read(me: Process) -> None:
        scene.until("lost")
        scene.sleep(2 * TTL_S)  # until there is nothing to read
        replicate(me)
        scene.reach("read")
        scene.until("back")
        demand(scene.now_s < scene.back_s + 3, "I6: nobody told")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("lost")
        group = me.handle._group
        scene._cut(me, 4 * TTL_S)
        scene.store.expire(group.seat.lease_id)
        scene.store_changed("a lease ends")
        scene.sleep(4 * TTL_S)
        while group.is_fenced:
            demand(group._lost.may_return, "I6: it does not come back")
            scene.sleep(0.1)
        scene.back_s = scene.now_s
        scene.reach("back")
        scene.until("read")

    scene.start("t", train, size=1)
    scene.start("r", read, size=1)
    scene.play()


def lost_replies(scene: Scene) -> None:
    """I5: whichever reply is lost, of a request that applied, everything goes on."""
    scene.loses_reply = 30 + int(scene.random() * 60)  # the others come later, or open the handles

    def train(me: Process) -> None:
        began_s = scene.now_s
        publish(me, 1)
        scene.until("r.1/0", "r.1/1")
        unpublish(me)
        demand(scene.now_s < began_s + 15, "I6: a lost reply kept a call waiting")

    def read(me: Process) -> None:
        replicate(me)
        scene.reach(str(me))
        scene.until("r.1/0", "r.1/1")

    scene.start("t", train)
    scene.start("r", read)
    scene.play()


def two_trainers(scene: Scene) -> None:
    """Two publish at the same moment: numbers grow, and one number is one content."""
    versions = {"t": 1, "u": 1 + int(scene.random() * 2)}

    def train(me: Process) -> None:
        version = versions[me.start.replica]
        try:
            publish(me, version, 6 + version)
        except VersionConflict:
            scene.saw("refused")
        scene.reach(str(me))
        scene.until("t.0/0", "u.1/0")

    scene.start("t", train, size=1)
    scene.start("u", train, size=1)
    scene.play()


def who_is_believed(_: Scene) -> None:
    """What ranks that come back hold together, by what each of them knows. (Of the rule alone.)"""
    held = Kept(VersionRef("run", 1, "uid", 1), 3, "L", is_original=True)
    publish_3 = Call(3, "publish", "publish 1", 0, held.ref, outcome=Outcome(is_source=True))
    unpublish_4 = Call(4, "unpublish", "unpublish 1", 0, held.ref, outcome=Outcome())
    holder = Shard("h", 1, b"", held, [publish_3])
    in_it = Shard("h", 2, b"", None, [], pending=3)
    elsewhere = Shard("h", 3, b"", None, [], pending=2)
    gave_up = Shard("h", 4, b"", None, [publish_3, unpublish_4])
    for shards, expected in (
        ([holder, holder], held),
        ([in_it, holder], held),
        ([holder, elsewhere], None),  # it never did its part
        ([holder, gave_up], None),  # it knows more: the others have not heard of it
        ([gave_up, holder], None),
    ):
        _, kept = membership.adopted(shards)
        pids = [shard.pid for shard in shards]
        demand(kept == expected, f"I4: of {pids}, {kept} is believed, not {expected}")


SCENES = {
    "who is believed": who_is_believed,
    "two trainers": two_trainers,
    "lost replies": lost_replies,
    "burst": burst,
    "flaky": flaky,
    "drain": drain,
    "earlier readers": earlier_readers,
    "stuck reader": stuck_reader,
    "late landing": late_landing,
    "relay dies": relay_dies,
    "only fillers": only_fillers,
    "comes back": comes_back,
}


def perform(name: str, seed: int) -> None:
    """Raises Broken, with a story, if something happened that must not."""
    scene = Scene(seed)
    try:
        with scene.inhabited():
            SCENES[name](scene)
    except Exception as error:
        text = f"{scene.tale()}\n\n{name}, seed {seed}: {type(error).__name__}: {error}"
        raise Broken(text) from error


__all__ = ["SCENES", "Scene", "perform", "short"]
