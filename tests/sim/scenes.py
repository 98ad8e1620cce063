"""Small histories that are written down, where a seed decides only who moves when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import isfunction, signature
from itertools import permutations
from unittest.mock import patch

import msgspec
from checks import Broken, demand, never
from replicas import TTL_S, Process, Start, Struck, Task
from story import short
from world import MANY, SHAPES, World

from torch_ros import errors
from torch_ros.features.streams.filling import IDLE_S
from torch_ros.protocol import keys as k
from torch_ros.protocol import membership, records
from torch_ros.protocol.seating import NOTE_TTL_S
from torch_ros.shard.beginnings import PATIENCE_S, Beginning
from torch_ros.shard.checkpoint import SaveRequest
from torch_ros.store.txn import Commit, Delete, Put, Read, Watch, whole
from torch_ros.transfer import peers
from torch_ros.transfer.registered import LocalState

SIZE = 2  # ranks of a replica
LINGER_S = 40.0
SOON_S = 2.0
REFUSALS = ("full", "denies writes", "is silent")
MANY_TENSORS = tuple((f"w{number}", (12,)) for number in range(7))
UNEVEN_S = 0.9  # less than STALL_S, after which a reader asks the store whether its source is there


@dataclass(frozen=True)
class Hold:
    """A request that is slow: it is under way until something else has happened."""

    name: str
    process: Process
    matches: Callable[[object], bool]
    until: Callable[[], object]
    meanwhile: Callable[[], object]
    is_reply: bool


@dataclass(frozen=True)
class Refusal:
    """An etcd that renews leases, and refuses a process something else, until then."""

    kind: str
    until_s: float

    def error(self, what: object) -> errors.StoreUnavailable | errors.AccessDenied | None:
        if isinstance(what, str) and what.startswith(("keep alive", "revoke")):
            return None
        if self.kind == "full":
            return errors.StoreAlarm("sim://", "NOSPACE")
        is_write = isinstance(what, Commit) and any(isinstance(op, Put) for op in what.txn.ops)
        if self.kind == "denies writes":
            return errors.AccessDenied("sim://", "role", "no", "ask for it") if is_write else None
        return errors.StoreUnavailable("sim://", 5.0, "no answer") if is_write else None


class Scene(World):
    """Nothing fails but what the scene makes fail. Starts and programs are told, not drawn."""

    shape = (("w0", (12,)), ("w1", (12,)), ("w2", (12,)))

    def _populate(self) -> None:
        self.rates = dict.fromkeys(self.rates, 0.0)
        self.step_s, self.haste, self.read_s = 0.001, 0.0, 0.0
        self.steps_of_trouble, self.struck_share = 1_000_000, 0.0
        self.many = (32, 8, 8)
        self.is_judged = self.is_compared = self.makes_deltas = self.is_streamed = False
        self.shapes = self.shape
        self.slow_s: dict[Process, float] = {}  # how long reads of a process take
        self.uneven: set[Process] = set()  # whose reads land in no order
        self.failing: dict[Process, int] = {}  # how many of its next reads fail
        self.crammed: set[Process] = set()  # whose hosts have no memory
        self.requests, self.loses_reply = 0, -1  # how many there were, and which is not answered
        self.losses: dict[Process, tuple] = {}  # which next request is not answered, and why
        self.edges: set[tuple[str, str]] = set()  # who has read from whom: (source, reader)
        self.claims = 0  # the most that a source had at a time
        self.suspects: set[str] = set()
        self.reached: set[str] = set()
        self.holds: list[Hold] = []
        self.refusals: dict[Process, Refusal] = {}
        self.before_lock: dict[Process, Callable[[], object]] = {}  # done before its next one
        self.again: dict[int, int] = {}  # call -> content, where a number is published twice

    def _trouble(self) -> None:
        pass

    def start(
        self, name: str, script, *, size: int = SIZE, sharding: str = "rows", **options
    ) -> Start:
        for start in self.starts:
            start.is_replaced |= start.replica == name
        made = Start(self, name, "r" not in name, size, sharding, script=script, **options)
        made.number = len(self.starts)
        self.starts.append(made)
        for rank in range(size):
            process = Process(self, made, rank, len(self.processes))
            self.processes.append(process)
            made.processes.append(process)
            self.spawn(process, "main", process.live)
        return made

    def play(self, size: int = 1, /, **scripts: Callable[[Process], object]) -> None:
        """Start these too, by their names, each a replica of so many ranks; and play."""
        for name, script in scripts.items():
            self.start(name, script, size=size)
        super().play()

    def content_of(self, call: records.Call) -> int:
        return self.again.get(call.number) or self.contents[call.ref.version]

    def content(self, version: int) -> int:
        return self.contents[version]

    def reach(self, where: str, *, until: str | Sequence[str] = ()) -> None:
        """Say that it is reached; then wait until others are."""
        self.tell("the scene", f"reaches: {where}")
        self.reached.add(where)
        self.until(*([until] if isinstance(until, str) else until))

    def until(self, *wheres: str, limit_s: float = 300.0) -> None:
        self.when(lambda: {*wheres} <= self.reached, f"{wheres} reached", limit_s)

    def when(self, holds: Callable[[], object], what: str, limit_s: float = 300.0) -> None:
        until_s = self.now_s + limit_s
        while not holds():
            demand(self.now_s < until_s, f"I6: never {what}, only {self.reached}")
            self.sleep(0.05)

    def hold(
        self,
        name: str,
        process: Process,
        matches: Callable[[object], bool],
        until: Callable[[], object],
        *,
        meanwhile: Callable[[], object] = lambda: None,
        is_reply: bool = False,
    ) -> None:
        """Let the next such request of a process be slow.

        Args:
            until: What has to have happened before it goes on.
            meanwhile: Done at once, before anybody else moves.
            is_reply: It applies, and the reply is slow.
        """
        self.holds.append(Hold(name, process, matches, until, meanwhile, is_reply))

    def _hold(self, what: object, *, is_reply: bool) -> None:
        process = self.current.process if self.current else None
        for hold in list(self.holds):
            if (hold.process, hold.is_reply) == (process, is_reply) and hold.matches(what):
                self.holds.remove(hold)
                self.reach(hold.name)
                hold.meanwhile()
                self.when(hold.until, f"the end of the hold {hold.name!r}", 60.0)
                self.reach(f"after {hold.name}")

    def end_lease(self, process: Process) -> None:
        self.tell(process, "loses its lease")
        self.store.expire(process.shard.group.seat.lease_id)
        self.store_changed("a lease ends")

    def request_fault(self, connection) -> str:
        self._hold(self.current.waiting, is_reply=False)
        self.requests += 1
        matches, fault = self.losses.get(self.current.process, (lambda _: False, ""))
        if matches(self.current.waiting):
            del self.losses[self.current.process]
            return fault
        is_lost = self.requests == self.loses_reply
        return "lose reply" if is_lost else super().request_fault(connection)

    def refuse(self, process: Process, what: object, timeout_s: float) -> None:
        found = self.refusals.get(process)
        if found is None or self.now_s >= found.until_s or not (error := found.error(what)):
            return
        self.tell(process, what, "REFUSED")
        if found.kind == "is silent":
            self.sleep(timeout_s)
        raise error

    def about_to_lock(self) -> None:
        super().about_to_lock()
        self.before_lock.pop(self.current.process, lambda: None)()

    def about_to_watch(self, watch: Watch) -> None:
        self._hold(watch, is_reply=False)

    def read_delay_s(self) -> float:
        process = self.current.process
        if process in self.uneven:
            return self.random() * UNEVEN_S if self.random() < 0.3 else 0.0
        return self.slow_s.get(process, 0.0)

    def available_bytes(self) -> float:
        return 0 if self.current.process in self.crammed else super().available_bytes()

    def read_error(self) -> str:
        process = self.current.process
        if self.failing.get(process, 0) > 0:
            self.failing[process] -= 1
            return "the read failed"
        return ""

    def store_changed(self, what: object) -> None:
        if any("/readers/" in key for key in self.store.fresh):
            claims: dict[str, set] = {}
            for key in self.store.entries:
                if "/readers/" in key:
                    source, reader, _ = k.parse_reader(key)
                    claims.setdefault(source, set()).add(reader)
                    self.edges.add((source, reader))
            self.claims = max(self.claims, *map(len, claims.values()), 0)
        self.suspects |= {key for key in self.store.fresh if "/suspects/" in key}
        super().store_changed(what)
        self._hold(what, is_reply=True)


def puts(part: str) -> Callable[[object], bool]:
    """Commits that put a record of that kind."""
    return lambda what: (
        isinstance(what, Commit)
        and any(isinstance(op, Put) and part in op.key for op in what.txn.ops)
    )


def deletes(part: str) -> Callable[[object], bool]:
    return lambda what: (
        isinstance(what, Commit)
        and any(isinstance(op, Delete) and part in op.range.start for op in what.txn.ops)
    )


def reads_shards(what: object) -> bool:
    """Reads of where all ranks of a replica are."""
    return isinstance(what, Read) and any(
        "/shards/" in range_.start and range_.start.endswith("/") for range_ in whole(what.ranges)
    )


def makes_full(what: object) -> bool:
    """A commit that completes a call."""
    return puts("/holdings/")(what) and any(
        isinstance(op, Put) and b'"full"' in op.value for op in what.txn.ops
    )


def publish(
    process: Process,
    version: int,
    content: int = 7,
    timeout_s: float = 100,
    store_wait_s: float | None = None,
) -> bool:
    process.world.contents[version] = content
    process.fill(content)
    return process.handle.publish(version, timeout_s=timeout_s, store_wait_s=store_wait_s)


def replicate(process: Process, version: int | str = "latest", timeout_s: float = 100) -> None:
    got = process.handle.replicate(version, timeout_s=timeout_s)
    process.world.checks.returned(process, got)


def unpublish(process: Process, timeout_s: float = 100) -> float:
    """How long that took. Afterwards its owner writes."""
    began_s = process.world.now_s
    process.handle.unpublish(timeout_s=timeout_s)
    process.scribble_if_free()
    return process.world.now_s - began_s


def meet(me: Process, where: str = "") -> None:
    """Wait until all ranks of its replica have come there."""
    wheres = [f"{each} {where}".rstrip() for each in me.start.processes]
    me.world.reach(wheres[me.rank], until=(*wheres,))


def alike(scene: Scene, told: dict[int, list]) -> None:
    """Say that it is over, when all ranks were told the same."""
    answers = list(told.values())
    demand(all(each == answers[0] for each in answers), f"I3: the ranks differ: {told}")
    scene.reach("over")


def burst(scene: Scene) -> None:
    """I8: newcomers that come at once form a chain, in which each source feeds one reader."""
    count = 6
    for number in range(count):
        scene.start(f"r{number}", lambda me: (replicate(me), _leave(me, count)))
    scene.play(2, t=lambda me: (publish(me, 1), _leave(me, count)))
    demand(scene.claims == 1, f"I8: a source fed {scene.claims} readers at a time")


def digests_of_the_next(scene: Scene) -> None:
    """I6: right bytes are not compared with the digests of the version after theirs."""
    late: list[Process] = []

    def train(me: Process) -> None:
        publish(me, 1, 1)
        scene.when(lambda: late, "a reader between a word and what is shown with it")
        unpublish(me)
        publish(me, 2, 2)
        scene.reach("2 is there", until="r2 has 1")

    def read_afar(me: Process) -> None:
        replicate(me, 1)
        scene.reach("r1 has 1", until="r2 has 1")

    def read(me: Process) -> None:
        scene.until("r1 has 1")
        with suppress(errors.CorruptWeights):
            replicate(me, 1)  # from t, which is near, and then from r1
        demand(not me.shard.observed.tally.corrupt, f"I6: {me} has seen wrong digests")
        scene.reach("r2 has 1")

    ask = peers.Peers._ask

    def asks(self, where, what, *args):
        me = scene.current.process
        if what == "whole" and me.start.replica == "r2" and not late:
            late.append(me)
            scene.until("2 is there")
        return ask(self, where, what, *args)

    with patch.object(peers.Peers, "_ask", asks):
        scene.start("t", train, size=1, digests="full", drain_s=0.3)
        scene.start("r1", read_afar, size=1, digests="full", datacenter="west")
        scene.start("r2", read, size=1, digests="full")
        scene.play()


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
    scene.play(2, t=lambda me: (publish(me, 1), scene.until("r0.0/0", "r1.1/0")))


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

    scene.play(2, t=train, r=read)


def _await_reader(me: Process) -> None:
    """Until all ranks of the reader read, or have read."""
    readers = me.world.start_named("r").processes
    has_read = lambda reader: reader.handle and reader.handle.version is not None
    me.world.when(lambda: all(r.reads_from or has_read(r) for r in readers), "a reader")


def earlier_readers(scene: Scene) -> None:
    """Readers of an earlier incarnation are waited for too: they read the same memory."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 2.0
        replicate(me)
        demand(me.handle.last_read.reroutes == 0, "I6: unpublish did not wait for its readers")

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        seat = me.shard.group.seat
        if me.rank == 0:
            scene.store.expire(seat.lease_id)
            scene.store_changed("a lease ends")
        while me.shard.group.seat is seat or me.shard.group.state != "seated":
            scene.sleep(0.1)
        unpublish(me)

    scene.play(2, t=train, r=read)


def stuck_reader(scene: Scene) -> None:
    """A reader that is stuck holds unpublish up for `drain_s`, and has nothing in the end."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 50.0
        try:
            replicate(me, timeout_s=80)
        except errors.TorchRosError:
            scene.reach(str(me))

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        took_s = unpublish(me, timeout_s=40)
        demand(took_s < 5, f"I6: a stuck reader held unpublish up for {took_s:.0f} s")
        scene.sleep(100)

    scene.start("t", train, drain_s=1.0)
    scene.play(2, r=read)
    demand({"r.1/0", "r.1/1"} <= scene.reached, "I2: a reader got what was taken back")


def late_landing(
    scene: Scene, sources: tuple[str, ...] = ("t", "u"), lost: str = "t", readers: int = 1
) -> None:
    """What is still in flight from a source that was lost does not land over what came after."""

    def read(me: Process) -> None:
        scene.until(*sources)
        scene.uneven.add(me)
        replicate(me)
        scene.sleep(10)
        scene.checks.returned(me, 1)
        scene.reach(str(me.rank), until=(*map(str, range(readers)),))

    def train(me: Process) -> None:
        name = me.start.replica
        scene.until(*sources[: sources.index(name)])
        publish(me, 1)
        scene.reach(name)
        if name == lost:
            _await_reader(me)
            scene.sleep(scene.random())
            unpublish(me)
        scene.until(*map(str, range(readers)))

    for name in sources:
        scene.start(name, train, size=1, drain_s=0.1)
    scene.start("r", read, size=readers)
    scene.play()


def stands_still(scene: Scene) -> None:
    """A source that does not answer is left for one that does, and what it answers later is lost.

    It is alive, and holds its lease: only who reads from it can know.
    """

    def read(me: Process) -> None:
        scene.until("t", "u")
        scene.slow_s[me] = 1.5
        began_s = scene.now_s
        replicate(me)
        took_s = scene.now_s - began_s
        demand(took_s < 40, f"I6: a mute source held its reader up for {took_s:.0f} s")
        scene.sleep(60)
        scene.checks.returned(me, 1)
        scene.reach(str(me.rank))

    def train(me: Process) -> None:
        name = me.start.replica
        scene.until(*(("t",) if name == "u" else ()))
        publish(me, 1)
        scene.reach(name)
        if name == "t":
            _await_reader(me)
            scene.sleep(scene.random())
            me.mute_until_s = scene.now_s + 50
        scene.until("0", "1")

    scene.start("t", train, size=1)
    scene.start("u", train, size=1)
    scene.play(2, r=read)


def staged_landing(scene: Scene) -> None:
    """What is read by way of a buffer counts only if its source served it to the end."""
    scene.shapes = SHAPES[-1]
    late_landing(scene, readers=2)


def second_source(scene: Scene) -> None:
    """Of several sources, each says for itself whether what was read from it counts."""
    late_landing(scene, ("t", "u", "v"), lost="u")


def end_together(scene: Scene) -> None:
    """Each of the batches that end together counts by the words of the ranks it came from."""

    def read(me: Process) -> None:
        scene.until("t", "u")
        scene.uneven.add(me)
        replicate(me)
        scene.checks.returned(me, 1)
        scene.reach("read")

    def train(me: Process) -> None:
        name = me.start.replica
        scene.until(*(["t"] if name == "u" else []))
        publish(me, 1)
        scene.reach(name)
        if name == "t" and me.rank == 1:  # its peer comes to that much later
            _await_reader(me)
            scene.sleep(scene.random())
            unpublish(me)
        scene.until("read")

    scene.start("t", train, drain_s=0.1)
    scene.play(u=train, r=read)


def copied_over(scene: Scene) -> None:
    """What counts already is not written over with what may not count."""
    scene.shapes = SHAPES[-1]

    def is_read(name: str) -> bool:
        sources = [inst for _, inst, _ in scene.start_named("r").processes[0].reads_from]
        return "read" in scene.reached or any(k.replica_of(inst) == name for inst in sources)

    def train(me: Process) -> None:
        name = me.start.replica
        scene.until(*(["t.0/0"] if name == "u" else []))
        if name == "v":
            scene.when(lambda: is_read("t"), "reading from the first")
        publish(me, 1)
        scene.reach(str(me))
        if name != "v":
            scene.when(lambda: is_read(name), f"reading from {name}")
            scene.sleep(scene.random() * (3 if name == "t" else 1))
            unpublish(me)
        scene.until("read")

    def read(me: Process) -> None:
        scene.until("t.0/0", "u.1/0", "u.1/1")
        scene.uneven.add(me)
        replicate(me, timeout_s=300)
        scene.checks.returned(me, 1)
        scene.reach("read")

    scene.start("t", train, size=1, drain_s=0.1)
    scene.start("u", train, drain_s=0.1)  # other chunks: what is read from it is staged
    scene.play(v=train, r=read)


def relay_dies(scene: Scene) -> None:
    """Who reads from a relay that dies goes on elsewhere, with what it has."""

    def relay(me: Process) -> None:
        scene.slow_s[me] = 2.0
        scene.reach("relay")
        replicate(me)

    def read(me: Process) -> None:
        scene.until("relay")
        scene.sleep(0.3)
        scene.slow_s[me] = 1.5
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
        except errors.DeadlineExceeded as error:
            raise Broken(f"I6: nobody has it, and a reader waits: {error}") from error
        except errors.TorchRosError:
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
        scene.reach("read", until="back")
        demand(scene.now_s < scene.back_s + 3, "I6: nobody told")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("lost")
        group = me.shard.group
        scene.cut(me, 4 * TTL_S)
        scene.store.expire(group.seat.lease_id)
        scene.store_changed("a lease ends")
        scene.sleep(4 * TTL_S)
        while group.state != "seated":
            demand(group.state == "away", "I6: it does not come back")
            scene.sleep(0.1)
        scene.back_s = scene.now_s
        scene.reach("back", until="read")

    scene.play(t=train, r=read)


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
        meet(me)

    scene.play(2, t=train, r=read)


def last_reply(scene: Scene) -> None:
    """I5: the last rank to be ready ends the call, also if it was not told that it is the last."""

    def train(me: Process) -> None:
        if me.rank == 1:
            is_ready = lambda: any("/ready/" in key for key in scene.store.entries)
            scene.when(is_ready, "ready")
            scene.losses[me] = puts("/ready/"), "lose reply"
        with never(errors.DeadlineExceeded, "I6: all are ready, and nobody ends the call"):
            publish(me, 1, timeout_s=20)
        demand(me not in scene.losses, "no reply was lost")

    scene.play(2, t=train)


def lost_request(scene: Scene) -> None:
    """I5: what was not answered may not have happened."""

    def train(me: Process) -> None:
        scene.losses[me] = makes_full, "lose"
        publish(me, 1)
        demand(me not in scene.losses, "no request was lost")
        scene.until("read")

    def read(me: Process) -> None:
        with never(errors.DeadlineExceeded, "I6: it is published, and not offered"):
            replicate(me, timeout_s=30)
        scene.reach("read")

    scene.play(t=train, r=read)


def two_trainers(scene: Scene) -> None:
    """Two publish at the same moment: numbers grow, and one number is one content."""
    versions = {"t": 1, "u": 1 + int(scene.random() * 2)}
    is_overtaken = scene.random() < 0.5

    def train(me: Process) -> None:
        version = versions[me.start.replica]
        if is_overtaken and me.start.replica == "t":
            published = lambda: any(held.state == "full" for held in scene.checks.holdings.values())
            scene.hold("decides", me, puts("/holdings/"), published)
        elif is_overtaken:
            scene.until("decides")
        try:
            publish(me, version, 6 + version)
        except errors.VersionConflict:
            scene.saw("refused")
        scene.reach(str(me), until=("t.0/0", "u.1/0"))

    scene.play(t=train, u=train)


def seen_before(scene: Scene) -> None:
    """The view of the last call may be over: a number that readers held then is free again."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("r.1/0", "r.1/1")
        unpublish(me)
        scene.reach(f"free {me}", until=("left r.1/0", "left r.1/1"))
        with never(errors.VersionConflict, "I6: nobody holds version 1 any more"):
            publish(me, 1)

    def read(me: Process) -> None:
        replicate(me)
        scene.reach(str(me), until=("free t.0/0", "free t.0/1"))
        unpublish(me)
        scene.reach(f"left {me}")

    scene.play(2, t=train, r=read)


def ready_before(scene: Scene) -> None:
    """Who was ready in a call that failed is not counted in the next one."""

    def read(me: Process) -> None:
        if me.rank == 0:
            scene.failing[me] = 1000
            stops = lambda: scene.suspend(me.start.processes[1], 4.0)  # before it withdraws
            scene.hold("fails", me, deletes("/holdings/"), lambda: True, meanwhile=stops)
        try:
            replicate(me)
        except errors.SourceLost:
            scene.failing[me] = 0
            me.scribble_if_free()
        replicate(me)
        meet(me)

    scene.play(2, t=lambda me: (publish(me, 1), scene.until("r.1/0", "r.1/1")), r=read)


def not_whole(scene: Scene) -> None:
    """`latest` is what can be read: not what is still published, nor what is taken back."""

    def is_there(state: str) -> Callable[[], bool]:
        return lambda: any(
            k.parse_holding(key).version == 2 and holding.state == state
            for key, holding in scene.checks.holdings.items()
        )

    def read(state: str) -> Callable[[Process], None]:
        def program(me: Process) -> None:
            scene.when(is_there(state), f"a holding that is {state}")
            with never(errors.TorchRosError, "I6: version 1 is there"):
                got = me.handle.replicate("latest", timeout_s=3)
            demand(got == 1, f"I6: version 2 is {state}, and taken for the latest")
            scene.reach(state)

        return program

    def keep(me: Process) -> None:
        publish(me, 1)
        scene.reach("older", until=("filling", "draining"))

    def train(me: Process) -> None:
        scene.until("older", *(["filling"] if me.rank else []))
        publish(me, 2)
        _await_reader(me)
        unpublish(me)

    def hold_up(me: Process) -> None:
        scene.slow_s[me] = 2.0
        scene.until("filling")
        replicate(me, 2)

    scene.start("u", keep, size=1)
    scene.start("t", train)
    scene.play(r0=read("filling"), r=hold_up, r1=read("draining"))


def _see_few(*most: int) -> None:
    """Until the scene is over."""
    for (module, name), number in zip(MANY, most, strict=True):
        setattr(module, name, number)


def _few_not_whole(scene: Scene) -> None:
    """As `not_whole`, with views that leave most out."""
    _see_few(1, 1, 1)
    not_whole(scene)


def alone_no_more(scene: Scene) -> None:
    """I8: who takes several idle sources leaves them to those who have come meanwhile."""
    trainers, others = tuple("tuvw"), tuple(f"r{number}" for number in range(1, 7))
    seen = lambda part, name: any(part in key and f"/{name}@" in key for key in scene.store.entries)

    def first(me: Process) -> None:
        scene.until(*trainers)
        have_come = lambda: all(seen("/holdings/", name) for name in others)
        scene.hold("alone", me, puts("/readers/"), have_come)
        scene.slow_s[me] = 1.0
        replicate(me)
        stay(me)

    def read(me: Process) -> None:
        scene.until("alone")
        if me.start.replica == "r1":
            have_sources = lambda: all(
                name in scene.reached or seen("/readers/", name) for name in ("r0", *others[1:])
            )
            scene.hold("late", me, puts("/readers/"), have_sources)
        scene.slow_s[me] = 1.0
        replicate(me)
        stay(me)

    def stay(me: Process) -> None:
        scene.reach(me.start.replica, until=(*trainers, "r0", *others))

    for name in trainers:
        scene.start(name, lambda me: (publish(me, 1), stay(me)), size=1)
    scene.start("r0", first, size=1)
    for name in others:
        scene.start(name, read, size=1)
    scene.play()
    demand(scene.claims == 1, f"I8: a source fed {scene.claims} readers at a time")


def freed_meanwhile(scene: Scene) -> None:
    """I8: a source that becomes free does not send two newcomers to the next one."""

    def train(me: Process) -> None:
        scene.until(*(["t.0/0"] if me.start.replica == "u" else []))
        publish(me, 1)
        scene.reach(str(me), until="r2")

    def first(me: Process) -> None:
        scene.until("u.1/0")
        scene.hold("finishes", me, deletes("/readers/"), lambda: "claims" in scene.reached)
        replicate(me)
        scene.reach("free", until=("r1", "r2"))

    def second(me: Process) -> None:
        scene.until("finishes")
        has_another = lambda: any(
            k.replica_of(k.parse_reader(key)[1]) == "r2"
            for key in scene.store.entries
            if "/readers/" in key
        )
        scene.hold("claims", me, puts("/readers/"), lambda: has_another() or "r2" in scene.reached)
        replicate(me)
        scene.reach("r1")

    def third(me: Process) -> None:
        scene.until("free")
        scene.slow_s[me] = 1.5
        replicate(me)
        scene.reach("r2")

    for name, script in {"t": train, "u": train, "r0": first, "r1": second, "r2": third}.items():
        scene.start(name, script, size=1)
    scene.play()
    demand(scene.claims == 1, f"I8: a source fed {scene.claims} readers at a time")


def claimed_meanwhile(scene: Scene) -> None:
    """unpublish waits for who came while it looked whether anybody reads."""

    def read(me: Process) -> None:
        scene.until("unpublishes")
        scene.slow_s[me] = 1.0
        with never(errors.SourceLost, "I6: unpublish did not wait for its readers"):
            replicate(me)

    def train(me: Process) -> None:
        publish(me, 1)
        is_read = lambda: any("/readers/" in key for key in scene.store.entries)
        scene.hold("unpublishes", me, deletes("/holdings/"), is_read)
        unpublish(me)

    scene.start("t", train, size=1)
    scene.play(2, r=read)


ORDERS = [
    order
    for order in permutations(("sees", "completes", "leaves", "looks"))
    if order.index("sees") < order.index("completes")
]


def last_offer(scene: Scene) -> None:
    """I6: whenever the last holder leaves, the version is heard of from who has just read it."""
    order = ORDERS[scene.seed % len(ORDERS)]
    before = {step: {"has read", *order[: order.index(step)]} for step in order}

    def has_turn(step: str) -> bool:
        return before[step] <= scene.reached

    def read(me: Process) -> None:
        if me.rank == 1:  # the last to be ready; so it sees who else offers the version
            both_read = lambda: any("/ready/" in key for key in scene.store.entries)
            sees = lambda: both_read() and has_turn("sees")
            scene.hold("has read", me, puts("/ready/"), sees)
            scene.hold("sees", me, makes_full, lambda: has_turn("completes"))
        replicate(me)
        scene.reach("completes", until="told")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until(*before["leaves"])
        me.handle.close()
        scene.reach("leaves")

    def look(me: Process) -> None:
        scene.until(*before["looks"])
        scene.at(scene.now_s + 0.5, scene.reach, "looks")
        replicate(me)
        scene.reach("told")

    scene.start("r0", read)
    scene.play(t=train, r1=look)


def last_change(scene: Scene) -> None:
    """I6: `wait` hears of the change that it waits for, also if others come with it."""
    count = 4

    def look(me: Process) -> None:
        scene.until("published")
        scene.reach("waits")
        me.handle.wait(lambda there: len(there.get(1, ())) > count, timeout_s=100)
        scene.reach("told")
        demand(scene.now_s < scene.full_s + 3, "I6: nobody told")

    def read(me: Process) -> None:
        scene.until("waits")
        replicate(me)
        scene.full_s = scene.now_s
        scene.until("told")

    scene.start("r", look, size=1)
    scene.start("t", lambda me: (publish(me, 1), scene.reach("published"), scene.until("told")))
    for number in range(count):
        scene.start(f"r{number}", read, size=1)
    scene.play()


def strike() -> None:
    raise Struck


def struck_in_open(scene: Scene, *, is_shared: bool = True) -> None:
    """Ctrl-C in `open` on a rank ends it on peers that wait and that come, and in no next start."""

    def train(me: Process) -> None:
        demand(me.start is not first, f"{me} is open, and a rank was interrupted")
        scene.reach("over")

    def restart(_: Process) -> None:
        scene.until("struck")
        struck_s = scene.now_s
        has_ended = lambda: all(process.is_gone for process in first.processes)
        scene.when(has_ended, "the end of all who opened with it", 3.0)
        scene.start("t", train)
        scene.until("over")
        demand(scene.now_s < struck_s + NOTE_TTL_S, "the next start met no note")

    first = scene.start("t", train, size=3, nonce=scene.token() if is_shared else None)
    victim, peer, third = first.processes
    waits = lambda what: isinstance(what, Watch) and "has ranks" in what.reason
    scene.hold("waits", peer, waits, lambda: True)
    if is_shared:  # else it would be of another start
        is_read = lambda what: isinstance(what, Read)
        scene.hold("comes", third, is_read, lambda: "struck" in scene.reached)
    else:
        scene.hold("waits too", third, waits, lambda: True)
    there = {"waits"} if is_shared else {"waits", "waits too"}
    strike_then = lambda: there <= scene.reached and strike()
    scene.hold("struck", victim, puts("/shards/"), strike_then)
    scene.play(r=restart)


def struck_at_the_end_of_open(scene: Scene) -> None:
    """Ctrl-C in an `open` that has returned on a peer ends that peer's calls."""

    def train(me: Process) -> None:
        demand(me is not victim, "it was interrupted")
        scene.reach("open")
        began_s = scene.now_s
        with suppress(errors.SeatLost):
            publish(me, 1)
            raise Broken("I7: it is offered without one rank")
        demand(scene.now_s < began_s + 3, "I6: its peer has gone, and was waited for")
        scene.reach("over")

    victim, peer = scene.start("t", train, nonce=scene.token()).processes
    looks = lambda what: isinstance(what, Read) and "sits" in scene.reached
    completes = lambda what: puts("/groups/")(what) and "looks" in scene.reached
    scene.hold("sits", peer, puts("/shards/"), lambda: True, is_reply=True)
    scene.hold("looks", peer, looks, lambda: "struck" in scene.reached)
    scene.hold("sits last", victim, puts("/shards/"), lambda: "looks" in scene.reached)
    strike_then = lambda: "open" in scene.reached and strike()
    scene.hold("struck", victim, completes, strike_then, is_reply=True)
    scene.play()
    demand("over" in scene.reached, "it was not tried")


def looks_away(scene: Scene) -> None:
    """I6: nobody misses the one change that comes between the look and the watch that follows."""

    def is_offered() -> bool:
        return any(holding.state == "full" for holding in scene.checks.holdings.values())

    def train(me: Process) -> None:
        scene.hold("offers", me, makes_full, lambda: "has looked" in scene.reached)
        publish(me, 1)
        scene.offered_s = scene.now_s
        scene.until("read")

    def read(me: Process) -> None:
        scene.until("offers")
        waits = lambda what: isinstance(what, Watch) and what.reason
        scene.hold("has looked", me, waits, is_offered)
        replicate(me)
        demand(scene.now_s < scene.offered_s + 3, "I6: nobody told")
        scene.reach("read")

    scene.play(t=train, r=read)


def dies(scene: Scene) -> None:
    """I7: what a replica holds goes with the first of its processes."""

    def train(me: Process) -> None:
        publish(me, 1)
        meet(me)
        anchor, other = _anchor_and_other(me)
        if me is anchor:
            scene.at(scene.now_s, scene.kill_process, other)
        scene.sleep(TTL_S + 3)
        demand(not scene.checks.holdings, "I7: a process is dead, and what it had is offered")

    scene.play(2, t=train)


def fed_already(scene: Scene) -> None:
    """I8: the place of a newcomer among many leads to a source that feeds one; it takes another."""
    _see_few(2, 1, 8)
    rollouts = tuple(f"r{number}" for number in range(5))

    def has_claimed(name: str) -> bool:
        return any(k.replica_of(reader) == name for _, reader in scene.edges)

    def train(me: Process) -> None:
        scene.until(*(["t"] if me.start.replica == "u" else []))
        publish(me, 1)
        scene.reach(me.start.replica, until=(*rollouts,))

    def read(me: Process) -> None:
        name, number = me.start.replica, int(me.start.replica[1:])
        scene.until("t", "u")
        if number == 4:
            scene.until("r0")  # now one more is full, and each place another
        elif number > 0:
            scene.when(lambda: has_claimed(f"r{number - 1}"), "the one before")
        last = "r4" if number else "r3"
        scene.hold(f"{name} is done", me, makes_full, lambda: has_claimed(last))
        replicate(me)
        scene.reach(name, until=(*rollouts,))

    for name in ("t", "u"):
        scene.start(name, train, size=1)
    for name in rollouts:
        scene.start(name, read, size=1)
    scene.play()
    demand(scene.claims == 1, f"I8: a source fed {scene.claims} readers at a time")


def published_again(scene: Scene) -> None:
    """I1: a number that nobody holds any more may be published again, with other bytes."""

    def train(me: Process) -> None:
        for content in (7, 8):
            publish(me, 1, content)
            scene.reach(f"{content}", until=f"read {content}")
            unpublish(me)

    def read(me: Process) -> None:
        for content in (7, 8):
            scene.until(f"{content}")
            replicate(me)
            unpublish(me)
            scene.reach(f"read {content}")

    scene.play(t=train, r=read)


def serves(scene: Scene) -> None:
    """I1: what was read is offered later, all of it or nothing, if it still is what was read."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("serves 0", "serves 1")
        unpublish(me)
        scene.reach("left", until="has it")

    def infer(me: Process) -> None:
        me.read(1, 100)
        me.cells[0] += me.rank  # a loader goes on in place, on one rank
        try:
            me.handle.serve(timeout_s=100)
        except errors.ContentChanged:
            demand(not me.handle.version, f"I1: {me} offers what it says has changed")
        else:
            demand(holds=False, why=f"I1: {me} offers what was written to")
        me.read(1, 100)
        me.handle.serve(timeout_s=100)
        scene.reach(f"serves {me.rank}", until="has it")
        unpublish(me)

    def follow(me: Process) -> None:
        scene.until("left")
        replicate(me, 1)
        scene.reach("has it")

    scene.start("t", train, size=1, digests="full")
    scene.start("r0", infer, digests="full" if scene.seed % 2 else "off")
    scene.play(r1=follow)


def served_anew(scene: Scene) -> None:
    """I1: what was read is not offered under a number that has become another content's."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("read")
        unpublish(me)
        scene.until("decides")
        publish(me, 1, 8)
        scene.reach("anew", until="refused")

    def infer(me: Process) -> None:
        me.read(1, 100)
        if scene.seed % 2:  # it decides after that, or has looked before
            scene.reach("decides")
            scene.reach("read", until="anew")
        else:
            holds = puts("/holdings/")
            scene.hold("decides", me, holds, lambda: "anew" in scene.reached)
            scene.reach("read")
            scene.sleep(1.0)
        try:
            me.handle.serve(timeout_s=100)
        except errors.VersionNotFound:
            scene.reach("refused")
        else:
            demand(holds=False, why=f"I1: {me} offers what it has under a number of others")

    scene.play(t=train, r=infer)


def _is_of_r(key: str) -> bool:
    return "/holdings/" in key and "/r@" in key


def served_meanwhile(scene: Scene) -> None:
    """I1: a number is not published anew while somebody begins to offer what it meant."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("read")
        unpublish(me)
        there = scene.store.entries
        scene.hold("decides", me, puts("/versions/"), lambda: any(map(_is_of_r, there)))
        try:
            publish(me, 1, 8)
        except errors.VersionConflict:
            scene.reach("refused")
        else:
            demand(holds=False, why=f"I1: {me} has published other content under a number held")

    def infer(me: Process) -> None:
        me.read(1, 100)
        scene.reach("read", until="decides")
        me.handle.serve(timeout_s=100)
        scene.until("refused")

    scene.play(t=train, r=infer)


def _train_until(me: Process, *wheres: str) -> None:
    """Publish; unpublish once these are reached, soon, and write."""
    publish(me, 1)
    me.world.until(*wheres)
    took_s = unpublish(me)
    demand(took_s < IDLE_S + 3, f"I12: {me} waited {took_s:.1f} s for a consumer that sleeps")
    me.world.reach("gave up")


def _await_flight(scene: Scene) -> None:
    """Until the reader has something in flight."""
    (reader,) = scene.start_named("r").processes
    wire = scene.wires[f"agent-{reader.number}"]
    scene.when(lambda: wire.flying or "done" in scene.reached, "a read in flight")


def streamed_beside_a_write(scene: Scene) -> None:
    """I12: what landed while its source was written to is not handed out."""
    scene.shapes = MANY_TENSORS

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("came")
        _await_flight(scene)
        scene.sleep(scene.random() / 2)
        unpublish(me)  # and leaves readers behind

    def consume(me: Process) -> None:
        def pause_s() -> float:
            scene.slow_s[me] = 0.5
            scene.reach("came")
            return 0.0

        with suppress(errors.SourceLost, errors.VersionNotFound):
            me.streamed(1, pause_s=pause_s)

    scene.start("t", train, size=1, drain_s=0.1)
    scene.play(r=consume)


def streamed_from_another(scene: Scene) -> None:
    """I12: what is still in flight from a source that was lost lands over nothing that counts."""
    scene.shapes = MANY_TENSORS

    def consume(me: Process) -> None:
        scene.until("t", "u")
        scene.uneven.add(me)
        scene.reach("reads")
        came = me.streamed(1, 200)
        demand(len(came) == len(MANY_TENSORS), f"I12: only {came} came")
        scene.reach("done")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach(me.start.replica)
        if me.start.replica == "t":
            scene.until("reads")
            for _ in range(2):
                _await_flight(scene)
                unpublish(me)
                scene.sleep(2.0)
                publish(me, 1)  # the other has it still: the same content
        scene.until("done")

    scene.start("t", train, size=1, drain_s=0.1)
    scene.start("u", train, size=1, drain_s=0.1)
    scene.play(r=consume)


def streamed_anew(scene: Scene) -> None:
    """I12: a stream does not go on in other content that has come under the same number."""
    scene.shapes = MANY_TENSORS

    def train(me: Process) -> None:
        _train_until(me, "sleeps")
        publish(me, 1, 8)
        scene.reach("anew", until="refused")

    def consume(me: Process) -> None:
        def pause_s() -> float:
            scene.reach("sleeps", until="anew")
            return 0.0

        try:
            me.streamed(1, pause_s=pause_s)
        except errors.VersionNotFound:
            scene.reach("refused")
        else:
            demand(holds=False, why="I12: a stream went on in other content")

    scene.play(t=train, r=consume)


def streamed_after_a_lost_reply(scene: Scene) -> None:
    """I12: a source whose record was put without an answer is looked at again before it is read."""
    scene.shapes = MANY_TENSORS

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("has 1")
        scene.when(lambda: any("/readers/" in key for key in scene.store.entries), "a reader")
        unpublish(me)  # and leaves it behind
        publish(me, 1, 8)
        scene.until("done")

    def consume(me: Process) -> None:
        scene.until("has 1")
        scene.losses[me] = puts("/readers/"), "lose reply"
        with suppress(errors.SourceLost, errors.VersionNotFound):
            me.streamed(1)
        scene.reach("done")

    scene.start("t", train, size=1, drain_s=0.1)
    scene.play(r=consume)


def dropped_stream(scene: Scene) -> None:
    """I12: nothing is left of a stream that is dropped, not even by a request that applies late."""
    scene.shapes = MANY_TENSORS

    def consume(me: Process) -> None:
        scene.until("has 1")
        if scene.seed % 2:
            scene.losses[me] = puts("/readers/"), "late"
            with suppress(errors.DeadlineExceeded, errors.StoreUnavailable):
                me.streamed(1, timeout_s=1.0)
        else:
            me.streamed(1, leave_after=2)
        scene.reach("left it", until="gave up")

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("has 1", until="left it")
        scene.sleep(13.0)  # a late request has come by then
        took_s = unpublish(me)
        demand(took_s < 3, f"I12: {me} waited {took_s:.1f} s for a stream that is over")
        scene.reach("gave up")

    scene.play(t=train, r=consume)


def only_on_spot(scene: Scene) -> None:
    """I4: who gives up what it retains keeps a copy, if all others that have it are on spots."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("has 1")
        unpublish(me)
        scene.reach("given up")

    def read(me: Process) -> None:
        replicate(me)
        scene.reach("has 1", until="given up")

    scene.start("t", train, size=1, retain=("latest",))
    scene.start("r", read, size=1, spot=True)
    scene.play()


def no_memory_for_a_copy(scene: Scene) -> None:
    """I4, I6: a trainer whose host has no memory for a copy of what is retained steps on."""

    def train(me: Process) -> None:
        if me.rank == scene.seed % 2:
            scene.crammed.add(me)
        publish(me, 1)
        unpublish(me)
        scene.crammed.discard(me)
        publish(me, 2, 8)
        unpublish(me)
        if me.rank == 0:
            demand(me.handle.list(timeout_s=5).keys() == {2}, "I4: a later copy is not made")
            scene.reach("looked")
        scene.until("looked")  # or the copy goes with the peer

    scene.start("t", train, size=2, retain=("latest",))
    scene.play()


def _anchor_and_other(me: Process) -> tuple[Process, Process]:
    """The two processes of a replica, once both have their seats."""
    world, both = me.world, me.start.processes
    world.when(lambda: all(peer.handle is not None for peer in both), "the peer's handle")
    anchor = world.store.entries[me.shard.group.seat.group].lease_id
    first, second = both
    return (first, second) if first.shard.group.seat.lease_id == anchor else (second, first)


def copied_meanwhile(scene: Scene) -> None:
    """A copy that is offered while its group is expelled goes with the group."""

    def is_offered() -> bool:
        return any("+" in key for key in scene.checks.holdings)

    def train(me: Process) -> None:
        publish(me, 1)
        anchor, other = _anchor_and_other(me)
        if me is anchor:
            scene.hold("expels", me, deletes("/groups/"), is_offered)
        offers = lambda what: puts("/holdings/")(what) and puts("+")(what)
        dies = lambda: scene.end_lease(other)
        is_expelled = lambda: "expels" in scene.reached
        scene.hold("offers", me, offers, is_expelled, meanwhile=dies)
        unpublish(me)
        scene.until("after expels")

    scene.start("t", train, retain=("latest",))
    scene.play()


def replaced_meanwhile(scene: Scene) -> None:
    """Who takes a replica's name leaves nothing of what it decides meanwhile."""

    def train(me: Process) -> None:
        if me.rank == 0:
            successor = scene.start("t", lambda _: scene.reach("over"), size=1).processes[0]
            scene.hold("takes", successor, puts("/groups/"), lambda: scene.checks.holdings)
        scene.until("takes")
        publish(me, 1)
        scene.until("after takes")

    scene.play(2, t=train)
    demand("over" in scene.reached, "I6: the name is not taken")


def same_nonce(scene: Scene) -> None:
    """I3: whose request for a group was not answered does not ask for it again: others had it."""

    def take(me: Process) -> None:
        publish(me, 1)
        scene.start("t", lambda _: scene.reach("taken"), size=1)
        scene.until("taken")

    def lose() -> None:
        scene.loses_reply = scene.requests + 1
        scene.start("t", take, size=1)

    [first] = scene.start("t", lambda me: publish(me, 2), size=1).processes
    scene.hold("creates", first, puts("/groups/"), lambda: True, meanwhile=lose)
    scene.hold(
        "asks again",
        first,
        lambda what: isinstance(what, Read) and "creates" in scene.reached,
        lambda: "taken" in scene.reached and not scene.checks.groups,
    )
    scene.play()
    demand("after asks again" in scene.reached, "the reply was not lost")


def replaced_reader(scene: Scene) -> None:
    """A reader whose name is taken stops with what is in flight, not when it has everything."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 0.3  # three reads to reach the source take less than STALL_S
        try:
            replicate(me)
        except errors.SeatLost:
            reads = (scene.now_s - scene.taken_s) / scene.slow_s[me]
            # Three to reach the source; two for the first batch, of many.
            demand(reads < 6, f"I6: its name was taken, and it made {reads:.0f} reads more")
            scene.reach("stopped")

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        scene.taken_s = scene.now_s
        scene.start("r", lambda _: scene.until("stopped"), size=1)
        scene.until("stopped")

    scene.play(t=train, r=read)


def other_version(scene: Scene) -> None:
    """I1: who had a part of a version when its seat was lost, and reads another then, reads all."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 0.5
        replicate(me)
        scene.reach("read")

    def train(me: Process) -> None:
        publish(me, 1, content=7)
        _await_reader(me)
        scene.sleep(5.5 * 0.5)  # three to reach the source; two for the first batches, of many
        [reader] = scene.start_named("r").processes
        scene.cut(reader, 2 * TTL_S)
        scene.end_lease(reader)
        unpublish(me)
        publish(me, 2, content=8)
        scene.until("read")

    scene.play(t=train, r=read)


def expelled_meanwhile(scene: Scene) -> None:
    """Who expels a dead neighbour leaves nothing of what the group decides meanwhile."""

    def train(me: Process) -> None:
        anchor, other = _anchor_and_other(me)
        if me is anchor:
            scene.hold("expels", me, deletes("/groups/"), lambda: scene.checks.holdings)
            scene.end_lease(other)
        scene.until("expels")
        publish(me, 1)
        meet(me, "is back")

    scene.play(2, t=train)


def closed_meanwhile(scene: Scene) -> None:
    """Who closes its handle leaves nothing of what the peers decide meanwhile."""

    def train(me: Process) -> None:
        if me.rank == 0:
            scene.hold("closes", me, puts("/groups/"), lambda: scene.checks.holdings)
            return
        scene.until("closes")
        publish(me, 1)

    scene.play(2, t=train)


def closed_coming_back(scene: Scene) -> None:
    """Who closes while it takes its seat again ends what its peers have taken up meanwhile."""

    def is_closed() -> bool:
        return any(group.left is not None for group in scene.checks.groups.values())

    def train(me: Process) -> None:
        _, other = _anchor_and_other(me)
        meet(me)
        if me is other:
            scene.until("sits")
            scene.when(lambda: scene.checks.holdings, "a holding of the new incarnation")
            return
        scene.hold("sits", other, puts("/shards/"), is_closed, is_reply=True)
        # The last to sit down makes the group complete.
        scene.hold("follows", me, puts("/shards/"), lambda: "sits" in scene.reached)
        scene.end_lease(other)
        scene.until("sits")
        with suppress(errors.SeatLost):
            publish(me, 1)

    scene.play(2, t=train)


def _update_together(me: Process, both_have: Sequence[str], until_s: float) -> None:
    """Update to version 1, again until both ranks have it, of which one may learn first."""
    scene = me.world
    while not {*both_have} <= scene.reached:
        demand(scene.now_s < until_s, "I6: the ranks hold different things for ever")
        try:
            me.handle.update(timeout_s=5)
        except errors.TorchRosError:
            scene.sleep(0.5)
        else:
            scene.checks.returned(me, 1)
            scene.reach(f"{me} has it")
            scene.sleep(0.5)


def took_back(scene: Scene) -> None:
    """What one rank's owner took back without the store, its peers learn when they are back."""

    def read(me: Process) -> None:
        replicate(me)
        meet(me)
        scene.cut(me, 3 * TTL_S)
        over_s = scene.now_s + 3 * TTL_S
        try:  # one is told that etcd is away; the other has lost its seat by then
            unpublish(me, timeout_s=2 * TTL_S if me.rank == 0 else 3.0)
        except errors.TorchRosError:
            demand(me.rank == 1, "I2: the seat is lost, and the tensors are not given back")
        scene.when(lambda: scene.now_s > over_s, "back")
        _update_together(me, both_have, over_s + 60)

    both_have = "r.1/0 has it", "r.1/1 has it"
    scene.play(2, t=lambda me: (publish(me, 1), scene.until(*both_have)), r=read)


def failed_for_one(scene: Scene) -> None:
    """An unpublish fails for one rank; the owner of another has the tensors back without etcd."""
    both_have = "t.0/0 has it", "t.0/1 has it"

    def read(me: Process) -> None:
        scene.slow_s[me] = 3.0  # longer than the unpublish of rank 1 may last
        with suppress(errors.TorchRosError):
            me.handle.replicate(1, timeout_s=100)
        scene.until(*both_have)

    def train(me: Process) -> None:
        publish(me, 1)
        _await_reader(me)
        meet(me)
        if me.rank == 0:
            scene.cut(me, 3 * TTL_S)
        over_s = scene.now_s + 3 * TTL_S
        try:
            unpublish(me, timeout_s=2 * TTL_S if me.rank == 0 else 1.0)
        except errors.DeadlineExceeded:
            demand(me.rank == 1, "I2: the seat is lost, and the tensors are not given back")
            demand(me.handle.version == 1, "it failed, and nothing is held")
        else:
            demand(me.rank == 0, "I2: they are given back, and somebody reads them")
        scene.when(lambda: scene.now_s > over_s, "back")
        _update_together(me, both_have, over_s + 60)

    def keep(me: Process) -> None:
        scene.until("t.0/0", "t.0/1")
        publish(me, 1)
        scene.until(*both_have)

    scene.start("t", train)
    scene.start("u", keep, size=1)
    scene.play(r=read)


def trains_on(
    scene: Scene, *, cut_off: tuple[int, ...] = (0, 1), refused: Sequence[str] = ()
) -> None:
    """A trainer steps on while etcd is away from some of its ranks; then what it holds is there.

    Args:
        refused: How etcd refuses, of which the seed chooses. (): it is away.
    """
    kind = refused[scene.seed % len(refused)] if refused else ""
    steps, away_s, pause_s = 40, 6 * TTL_S, 2.0
    came: list[int] = []
    waited_s = dict.fromkeys(range(SIZE), 0.0)
    marks: dict[int, list] = {rank: [] for rank in range(SIZE)}

    def train(me: Process) -> None:
        for step in range(1, steps + 1):
            came.append(step)  # the ranks meet in each step
            scene.when(lambda s=step: came.count(s) == SIZE, f"the ranks meet in step {step}")
            began_s = scene.now_s
            unpublish(me)
            # Every other version is published twice, with other bytes.
            scene.again[2 * step - 1] = 100 + step
            publish(me, step // 2, 100 + step, store_wait_s=0)
            waited_s[me.rank] += scene.now_s - began_s
            demand(me.handle.version == step // 2, "it returned, and nothing is held")
            marks[me.rank].append(me.shard.mailbox.word.mark)
            scene.sleep(pause_s)
            if step == 3 and me.rank == 0:
                for process in me.start.processes:
                    if process.rank in cut_off and kind:
                        scene.refusals[process] = Refusal(kind, scene.now_s + away_s)
                    elif process.rank in cut_off:
                        scene.cut(process, away_s)
        demand(waited_s[me.rank] < 4 * TTL_S, f"I6: a trainer waits for etcd: {waited_s}")
        demand(len({*marks[me.rank]}) == steps, "I1: one mark for two contents")
        demand(me.shard.group.state == "seated", "I6: it does not come back")
        scene.until("read")

    def read(me: Process) -> None:
        scene.when(lambda: len(came) == SIZE * steps, "the trainer's last step")
        scene.sleep(3 * TTL_S)
        got = me.handle.replicate("latest", timeout_s=TTL_S)
        demand(got == steps // 2, f"I6: latest is {got}")
        scene.checks.returned(me, got)
        scene.reach("read")

    scene.start("t", train)
    scene.play(r=read)


def half_cut_off(scene: Scene) -> None:
    """Ranks that are cut off from etcd count as those that are not."""
    trains_on(scene, cut_off=(0,))


def does_not_wait(scene: Scene) -> None:
    """Ranks that come back do not wait for the one that has published already, without etcd."""

    def train(me: Process) -> None:
        publish(me, 1, 11)
        meet(me, "holds 1")
        if me.rank == 0:
            scene.cut(me, 3 * TTL_S)
            unpublish(me)
            demand(not publish(me, 2, 12, store_wait_s=0), "I6: etcd is away, and offers it")
            scene.reach("does not wait")
        else:
            scene.until("does not wait")
            unpublish(me)
            scene.when(lambda: me.shard.group.state == "seated", "its seat")
            with never(errors.DeadlineExceeded, "I6: a rank that has published is waited for"):
                publish(me, 2, 12, timeout_s=5)
        scene.until("read")

    def read(me: Process) -> None:
        scene.until("t.0/0 holds 1", "t.0/1 holds 1")
        replicate(me, 2)
        scene.reach("read")

    scene.start("t", train)
    scene.play(r=read)


def given_up_before(scene: Scene) -> None:
    """A call given up before a publication without etcd keeps neither that rank nor its peers."""

    def train(me: Process) -> None:
        publish(me, 1, 11)
        meet(me, "holds 1")
        unpublish(me)
        meet(me, "holds nothing")
        if me.rank == 0:
            scene.cut(me, 1.5 * TTL_S)
            with suppress(
                errors.DeadlineExceeded, errors.StoreUnavailable
            ):  # and cannot tell its peer
                publish(me, 2, 12, timeout_s=1)
                raise Broken("I6: etcd is away, and offers it")
            demand(not publish(me, 3, 13, store_wait_s=0), "I6: etcd is away, and offers it")
            scene.when(lambda: me.shard.group.state == "seated", "its seat")
        else:
            began_s = scene.now_s
            with suppress(errors.CallAborted):
                publish(me, 2, 12, timeout_s=200)
                raise Broken("I7: it is offered without one rank")
            took_s = scene.now_s - began_s
            demand(took_s < 100, f"I6: a rank gave up, and was waited for {took_s:.0f} s")
            with suppress(
                errors.CallAborted
            ):  # if its peer has seen meanwhile that it waits in vain
                publish(me, 3, 13)
        with never(errors.TorchRosError, "I6: what was given up is in the way"):
            unpublish(me)
            publish(me, 4, 14, timeout_s=20)
        scene.checks.returned(me, 4)
        meet(me, "holds 4")

    scene.play(2, t=train)


def came_to_nothing(scene: Scene) -> None:
    """A publication that etcd refused when it was back is unpublished on all ranks alike.

    One of them knows that there is nothing to unpublish. The other is cut off before it learns so.
    """
    both = "t.0/0", "t.0/1"

    def train(me: Process) -> None:
        publish(me, 1, 11)
        scene.reach(str(me), until=(*both,))
        scene.cut(me, 3 * TTL_S)
        unpublish(me)
        demand(not publish(me, 2, 12, store_wait_s=0), "I6: etcd is away, and offers it")
        scene.reach(f"{me} holds 2")
        scene.when(lambda: me.shard.group.state == "seated", "its seat")
        scene.reach(f"{me} is back", until=(*(f"{each} is back" for each in both),))
        if me.rank == 1:
            scene.until("knows")
            scene.cut(me, 3 * TTL_S)
        unpublish(me)
        scene.reach("knows")
        publish(me, 4, 14, store_wait_s=0)
        scene.until("read")

    def overtake(me: Process) -> None:
        scene.until(*(f"{each} holds 2" for each in both))
        publish(me, 3, 13)
        scene.until("read")

    def read(me: Process) -> None:
        scene.until("knows")
        with never(errors.DeadlineExceeded, "I6: all ranks hold it, and it is not offered"):
            replicate(me, 4, timeout_s=6 * TTL_S)
        scene.reach("read")

    scene.start("t", train)
    scene.play(u=overtake, r=read)


def retained_meanwhile(scene: Scene) -> None:
    """I4: the only copy of what is retained is put aside before it is given up without etcd."""

    def train(me: Process) -> None:
        publish(me, 1, 11)
        unpublish(me)  # it sees what others retain
        publish(me, 2, 12)
        meet(me, "holds 2")
        scene.when(lambda: not me.copies, "the copy of version 1 released")
        meet(me, "lets go of 1")
        scene.cut(me, 3 * TTL_S)
        unpublish(me)
        for step in range(3):
            publish(me, 3, 13 + step, store_wait_s=0)
            unpublish(me)
        copies = len(me.copies)
        demand(copies == 1, f"I4: {copies} copies of an outage")
        scene.until("read")

    def read(me: Process) -> None:
        scene.until("t.1/0 lets go of 1", "t.1/1 lets go of 1")
        scene.sleep(2 * TTL_S)
        with never(errors.DeadlineExceeded, "I4: what it retains was given up"):
            replicate(me, timeout_s=6 * TTL_S)
        demand(me.handle.version == 2, f"I4: {me.handle.version} is the latest")
        scene.reach("read")

    scene.start("r", read, size=1, retain=("latest",))
    scene.play(2, t=train)


def late_answer(scene: Scene) -> None:
    """The end of a call is not learned from the store any more once the seat is lost."""

    def train(me: Process) -> None:
        anchor, other = _anchor_and_other(me)

        def lost() -> None:
            """Nobody knows the end yet, but for who waits for this reply."""
            scene.suspend(other if me is anchor else anchor, 3.0)
            scene.end_lease(anchor)

        def is_back() -> bool:
            group = scene.checks.groups.get(scene.keys.group("t"))
            return group is not None and group.is_complete and "." in group.nonce

        scene.hold("ends", me, deletes("/ready/"), is_back, meanwhile=lost, is_reply=True)
        publish(me, 1, timeout_s=20)
        meet(me, "is back")

    scene.play(2, t=train)


def both_drain(scene: Scene) -> None:
    """Of two that give up what is retained, not each takes the other for a witness."""

    def train(me: Process) -> None:
        is_second = me.start.replica == "u"
        scene.until(*(["t.0/0"] if is_second else []))
        publish(me, 1)
        scene.reach(str(me))
        _await_reader(me)
        if is_second:
            states = scene.checks.holdings
            scene.when(lambda: any(h.state == "draining" for h in states.values()), "draining")
        unpublish(me)

    def read(me: Process) -> None:
        scene.until("u.1/0")
        scene.slow_s[me] = 2.0
        replicate(me)

    scene.start("t", train, size=1, retain=("latest",))
    scene.start("u", train, size=1, retain=("latest",))
    scene.play(r=read)


def half_dead(scene: Scene) -> None:
    """I7: nobody is sent to a replica of which a process is dead, though nobody has noticed."""

    def train(me: Process) -> None:
        scene.until(*(["t.0/0", "t.0/1"] if me.start.replica == "u" else []))
        publish(me, 1)
        scene.reach(str(me))
        if str(me) == "t.0/0":
            scene.until("t.0/1", "u.1/0", "u.1/1")
            scene.at(scene.now_s, dies, *_anchor_and_other(me))
        scene.until("r.2/0", "r.2/1")

    def dies(anchor: Process, victim: Process) -> None:
        scene.suspend(anchor, 5.0)
        scene.kill_process(victim)
        scene.end_lease(victim)
        scene.reach("dead")

    def read(me: Process) -> None:
        scene.until("dead")
        replicate(me)
        meet(me)

    scene.play(2, t=train, u=train, r=read)


def half_there(scene: Scene) -> None:
    """I1: a rank that loses its seat while the last one sums up is waited for."""

    def train(me: Process) -> None:
        meet(me, "opens")
        (peer,) = (each for each in me.start.processes if each is not me)
        loses = partial(scene.end_lease, peer)
        scene.hold("summing up", me, reads_shards, lambda: True, meanwhile=loses)
        publish(me, 1)
        scene.reach(str(me), until="r.1/0")

    def read(me: Process) -> None:
        scene.until("t.0/0", "t.0/1", "summing up")
        replicate(me)
        scene.reach(str(me))

    scene.start("t", train, sharding="stages")
    scene.play(r=read)


def moved(scene: Scene) -> None:
    """A source that shows other tensors than the last time is read where these are."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until("r.1/0 has 1", "r.1/1 has 1")
        unpublish(me)
        me.handle.unregister()
        before = me.memory
        me._make_memory()
        demand(before.data_ptr() != me.memory.data_ptr(), "they have not moved")
        me.shard.tensors.show(LocalState(me.tensors, {}, {}))
        publish(me, 2, 8)
        scene.until("r.1/0 has 2", "r.1/1 has 2")

    def read(me: Process) -> None:
        for version in (1, 2):
            while me.handle.version != version:
                me.handle.update(timeout_s=20)
                scene.sleep(0.1)
            scene.checks.returned(me, version)
            demand(not me.handle.last_read.reroutes, "it was not read where the tensors are")
            scene.reach(f"{me} has {version}")
        scene.until("r.1/0 has 2", "r.1/1 has 2")

    scene.play(2, t=train, r=read)


def other_bytes(scene: Scene) -> None:
    """I1: who publishes a number with other bytes than an older publisher is refused."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("offered", until="r has 1")

    def train_too(me: Process) -> None:
        scene.until("offered")
        me.fill(8)
        with suppress(errors.VersionConflict):
            me.handle.publish(1, timeout_s=100)
            raise Broken("I1: two offer other bytes under one number")
        demand(me.handle.version is None, "I5: what was refused is held")
        scene.reach("refused", until="r has 1")

    def read(me: Process) -> None:
        scene.until("refused")
        replicate(me, 1)
        scene.reach("r has 1")

    scene.start("a", train, size=1, digests="full")
    scene.start("b", train_too, size=1, digests="full")
    scene.play(r=read)


def older_goes_on(scene: Scene) -> None:
    """I6: what is published is not compared with the next content of an older publisher."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.reach("offered", until="compares")
        unpublish(me)
        publish(me, 2, 8)
        scene.reach("2 is there", until="r has 1")

    def train_too(me: Process) -> None:
        scene.until("offered")
        scene.hold("compares", me, reads_shards, lambda: "2 is there" in scene.reached)
        with never(errors.VersionConflict, "I6: it was compared with the version after it"):
            publish(me, 1)
        demand("after compares" in scene.reached, "it was not compared")
        scene.reach("1 is there", until="r has 1")

    def read(me: Process) -> None:
        scene.until("1 is there")
        replicate(me, 1)
        scene.reach("r has 1")

    scene.start("a", train, size=1, digests="full")
    scene.start("b", train_too, size=1, digests="full")
    scene.play(r=read)


def who_is_believed(_: Scene) -> None:
    """What ranks that come back hold together, by what each of them knows. (Of the rule alone.)"""
    held = records.Kept(records.VersionRef("run", 1, "uid", 1), 3, "L", is_original=True)
    was, is_source = records.Asked("publish", 1), records.Outcome(is_source=True)
    publish_3 = records.Call(3, "publish", was, ref=held.ref, outcome=is_source)
    unpublish_4 = records.Call(
        4, "unpublish", records.Asked("unpublish", 1), ref=held.ref, outcome=records.Outcome()
    )
    back = partial(records.ShardRecord, "h", card=b"", is_back=True)
    holder = back(pid=1, kept=held, ended=[publish_3])
    in_it = back(pid=2, pending=3)
    elsewhere = back(pid=3, pending=2)
    gave_up = back(pid=4, ended=[publish_3, unpublish_4])
    nobody_waits = records.Outcome(records.Failure("CallAborted", {}, 0))
    cut_off = back(pid=5, ended=[msgspec.structs.replace(publish_3, outcome=nobody_waits)])
    calls, _ = membership.adopted([cut_off, holder, cut_off])
    demand(calls == [publish_3], "I3: who gave a call up is believed, not who knows its end")
    end = records.Outcome(is_source=True, said="L", answers=records.answers_of({0: "a", 1: "a"}))
    known = msgspec.structs.replace(publish_3, outcome=end)
    ready = back(pid=6, pending=3, ready=known, answer="a")
    newer = msgspec.structs.replace(ready, pid=7, ready=publish_3)  # it knows of no such end
    for other in (holder, in_it, gave_up, cut_off):
        demand(not membership.not_waited_for([ready, other]), f"I1: {other.pid} has no part in it")
    for ranks in ([ready, ready], [ready, newer], [newer, ready]):
        demand(membership.not_waited_for(ranks) == known, "I6: nobody offers it")
    for other in (newer, msgspec.structs.replace(ready, pid=8, answer="b")):
        ranks = [newer if other is newer else ready, other]
        demand(not membership.not_waited_for(ranks), f"I9: nobody knows what {other.pid} has")
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


def _register(me: Process, sharding: str) -> None:
    """From now on it has other boxes, and holds nothing."""
    me.start.sharding = sharding
    me._make_memory()
    me.handle.unregister()
    me.shard.tensors.show(LocalState(me.tensors, {}, {}))


def _lacks(me: Process, call: Callable[[], object]) -> None:
    """A call of a replica that lacks a cell fails on all ranks, which says where it is."""
    try:
        call()
    except errors.ManifestMismatch as error:
        is_named = "'w0'" in str(error) and "box from [5] to [6]" in str(error)
        demand(is_named, f"I9: a cell is missing, and {error}")
    else:
        raise Broken(f"I9: {me} has a part of it, and holds it")


def lacks_a_cell(scene: Scene) -> None:
    """I9: a version of which the ranks lack a cell is offered by nobody, whatever was before."""

    def train(me: Process) -> None:
        for _ in range(2):  # a failure leaves no belief behind
            _lacks(me, lambda: publish(me, 1))
        _register(me, "rows")
        publish(me, 2, 8)
        unpublish(me)
        _register(me, "gap")
        _lacks(me, lambda: publish(me, 3, 9))
        _register(me, "rows")
        publish(me, 4, 10)
        scene.until("read")

    def read(me: Process) -> None:
        replicate(me, 4)
        scene.reach("read")

    scene.start("t", train, sharding="gap")
    scene.play(r=read)


def a_part_is_read(scene: Scene) -> None:
    """I9: replicas that have read a part hold nothing, and are no witnesses."""

    def train(me: Process) -> None:
        publish(me, 1)
        scene.until(*(f"r{n}.{1 + n}/{rank} has a part" for n in (0, 1) for rank in range(SIZE)))
        unpublish(me)
        scene.reach("given up", until="read")

    def part(me: Process) -> None:
        if me.start.loads:
            for _ in range(2):  # the second time it is known
                me.load(Task("load", 1, timeout_s=50))
                demand(me.handle.version is None, f"I9: {me} has a part of it, and holds it")
        else:
            _lacks(me, lambda: replicate(me, 1))
        scene.reach(f"{me} has a part", until="read")

    def read(me: Process) -> None:
        scene.until("given up")
        replicate(me, 1, timeout_s=20)
        scene.reach("read")

    scene.start("t", train, retain=("latest",))
    scene.start("r0", part, sharding="gap")
    scene.start("r1", part, sharding="gap", loads=True)
    scene.play(r2=read)


def a_part_unseen(scene: Scene) -> None:
    """I9: a part that was published without etcd is offered by nobody when that is back."""
    who = scene.rng.choice([(0, 1), (0,)])  # publishes without it

    def train(me: Process) -> None:
        if is_known:
            publish(me, 1)
            unpublish(me)
        meet(me, "begins")
        _register(me, "gap")
        if me.rank in who:
            scene.cut(me, 3 * TTL_S)
            publish(me, 2, 8, store_wait_s=0)
            scene.reach("published")
            scene.sleep(5 * TTL_S)
        else:
            scene.until("published")
            scene.when(lambda: me.shard.group.state != "seated", "its seat is lost")
            _lacks(me, lambda: publish(me, 2, 8))

    is_known = scene.random() < 0.7
    scene.play(2, t=train)


def a_part_is_copied(scene: Scene) -> None:
    """I9: a part whose publication came to no end that is known is not copied as a version."""

    def train(me: Process) -> None:
        scene.slow_s[me] = 60.0  # before it is seen that a cell is missing
        try:
            publish(me, 1, timeout_s=5)
        except errors.TorchRosError:
            scene.reach(f"{me} is ready")
        scene.until("t.0/0 is ready", "t.0/1 is ready")
        unpublish(me)
        meet(me, "took it back")
        scene.sleep(4 * TTL_S)

    start = scene.start("t", train, sharding="gap", retain=("latest",))
    for process in start.processes:
        cut = partial(scene.cut, process, 2 * TTL_S)
        scene.hold("ready", process, puts("/ready/"), lambda: True, meanwhile=cut, is_reply=True)
    scene.play()


def read_from(scene: Scene, name: str) -> set[str]:
    """The replicas that it has read from, or was sent to."""
    return {k.replica_of(source) for source, reader in scene.edges if k.replica_of(reader) == name}


def _close(me: Process) -> float:
    """How long that takes."""
    began_s, me.closing_s = me.world.now_s, me.world.now_s
    me.handle.close()
    return me.world.now_s - began_s


def suspected_newer(scene: Scene, retain: str = "latest") -> None:
    """I4: an older version stays whether a newer one goes, whose only holder is suspected, or not.

    Args:
        retain: With "latest" the newer one goes; with "latest-1" it stays.
    """

    def keep(me: Process) -> None:
        publish(me, 1)
        scene.reach("t has 1")
        scene.when(lambda: scene.suspects, "u suspected")
        unpublish(me)
        scene.sleep(3 * TTL_S)
        demand(1 in me.handle.list(timeout_s=5), "I4: version 1 is lost")
        scene.reach("over")

    def publish_newer(me: Process) -> None:
        scene.until("t has 1")
        publish(me, 2)
        scene.reach("u has 2", until="over")

    def read(me: Process) -> None:
        scene.until("u has 2")
        if retain == "latest":
            scene.at(scene.now_s, scene.kill_process, scene.start_named("u").processes[0])
        scene.failing[me] = 1
        with suppress(errors.SourceLost, errors.DeadlineExceeded):
            replicate(me, 2, timeout_s=3)
        scene.until("over")

    scene.start("r", read, size=1, retain=(retain,), spot=True)
    scene.play(t=keep, u=publish_newer)


def save(
    process: Process,
    version: int,
    content: int = 7,
    timeout_s: float = 100,
    begun: Beginning | None = None,
) -> None:
    """What dcp.save does on a rank: its content is there by the time that the group is asked."""
    process.world.contents[version] = content
    if process.handle.version is None:
        process.fill(content)
    state = LocalState(process.tensors, {}, {})
    request = SaveRequest(version, state, timeout_s=timeout_s, begun=begun)
    process.handle.checkpoints.save(request)


def unpublished_alone(scene: Scene) -> None:
    """I2: a rank that missed an unpublish does not vouch for what its owner then writes."""

    def read(me: Process) -> None:
        scene.slow_s[me] = 50.0
        with suppress(errors.TorchRosError):
            replicate(me, 5, timeout_s=80)
            raise Broken("I2: a reader got what was taken back")
        scene.until("t.0/0 has 6", "t.0/1 has 6")
        scene.slow_s[me] = 0.0
        replicate(me, 6)
        scene.reach("read")

    def train(me: Process) -> None:
        publish(me, 5, 15)
        _await_reader(me)
        if me.rank == 0:
            unpublish(me)
            scene.reach("unpublished")
        else:  # it failed on its way there
            scene.until("unpublished")
            with suppress(errors.DeadlineExceeded):  # there is nothing to read
                me.handle.update("latest", timeout_s=5)
            demand(me.handle.version is None, "I2: what its group has given up is held")
            me.scribble_if_free()
            scene.reach("failed")
        scene.until("failed")
        publish(me, 6, 16)
        scene.checks.returned(me, 6)
        scene.reach(f"{me} has 6", until="read")

    scene.start("t", train, drain_s=1.0)
    scene.play(r=read)


def unpublished_meanwhile(scene: Scene) -> None:
    """A rank that comes with another call to an unpublish makes its part of it: the copy too."""

    def train(me: Process) -> None:
        save(me, 5, 15)
        if me.rank == 0:
            unpublish(me)  # it waits for the other rank's part of the copy
        else:
            scene.when(
                lambda: _has_call("t", scene, records.Asked("unpublish", 5)), "the unpublish"
            )
        save(me, 6, 15)
        scene.checks.returned(me, 6)
        scene.reach(f"{me} has 6", until="read")
        scene.when(lambda: not me.copies, "the copy released", 60.0)

    def read(me: Process) -> None:
        scene.until("t.1/0 has 6", "t.1/1 has 6")
        replicate(me, "latest")
        scene.reach("read")

    scene.start("r", read, size=1, retain=("latest",))
    scene.play(2, t=train)


def _has_call(replica: str, scene: Scene, asked: records.Asked) -> bool:
    """Whether the group has made that call, the last time it made any."""
    calls = [c for (inst, _), c in scene.checks.decided.items() if k.replica_of(inst) == replica]
    return bool(calls) and calls[-1].asked == asked


def failed_before(scene: Scene) -> None:
    """A call that one rank never made uses one number on all; what failed changes nothing."""
    done: list[int] = []

    def train(me: Process) -> None:
        save(me, 5, 15)
        if me.rank == 0:
            with suppress(errors.DeadlineExceeded):
                save(me, 6, 15, timeout_s=5)
                raise Broken("I7: it is offered without one rank")
            scene.reach("failed")
        scene.until("failed")
        with never(errors.TorchRosError, "I6: its ranks are out of step for good"):
            is_new = me.handle.update("latest", timeout_s=20)
            demand(not is_new and me.handle.version == 5, "I3: it does not hold what it held")
            scene.reach(f"{me} is in step", until=("t.0/0 is in step", "t.0/1 is in step", "read"))
            save(me, 7, 15, timeout_s=20)
        scene.checks.returned(me, 7)
        done.append(me.shard.group.ledger.calls_made)
        meet(me, "is done")
        demand(len({*done}) == 1, f"I3: its ranks have made {done} calls")

    def read(me: Process) -> None:
        scene.until("t.0/0 is in step", "t.0/1 is in step")
        with never(errors.TorchRosError, "I6: what is offered cannot be read"):
            replicate(me, 5, timeout_s=20)
        scene.reach("read", until=("t.0/0 is done", "t.0/1 is done"))

    scene.start("t", train)
    scene.play(r=read)


class _Storage:
    """In place of dcp's writer."""


def begins_late(scene: Scene) -> None:
    """A call of DCP is not given up while a rank has not begun it."""

    def train(me: Process) -> None:
        storage = _Storage()
        if me.rank == 1:
            scene.until("begun")
            scene.sleep(2 * PATIENCE_S)
        begun = me.handle.checkpoints.begin("save", 5, storage)
        scene.reach("begun" if me.rank == 0 else "both have begun", until="both have begun")
        with never(errors.TorchRosError, "I6: a rank that was late was not waited for"):
            save(me, 5, 15, begun=begun)
        meet(me)

    scene.play(2, t=train)


def never_comes(scene: Scene) -> None:
    """A call of DCP that fails on one rank where nobody hears of it fails on all, soon."""

    def train(me: Process) -> None:
        storage = _Storage()
        begun = me.handle.checkpoints.begin("save", 5, storage)
        began_s = scene.now_s
        if me.rank == 0:
            with suppress(errors.CallAborted):
                save(me, 5, 15, timeout_s=200, begun=begun)
                raise Broken("I7: it is offered without one rank")
            took_s = scene.now_s - began_s
            demand(took_s < 2 * PATIENCE_S, f"I6: a rank failed, and was waited for {took_s:.0f} s")
            scene.reach("failed")
        scene.until("failed")
        save(me, 6, 16, begun=me.handle.checkpoints.begin("save", 6, storage))
        scene.checks.returned(me, 6)
        meet(me)

    scene.play(2, t=train)


def scenes_of(module: str) -> dict[str, Callable[[Scene], None]]:
    """The scenes of a module, by name: its public functions that take one, and need no more."""
    mine = [each for each in vars(sys.modules[module]).values() if isfunction(each)]
    found = [each for each in mine if each.__module__ == module and each.__name__[0] != "_"]
    return {each.__name__.replace("_", " "): each for each in found if _takes_a_scene(each)}


def _takes_a_scene(function: Callable) -> bool:
    made = signature(function)
    needed = [each.annotation for each in made.parameters.values() if each.default is each.empty]
    return needed in ([Scene], ["Scene"]) and made.return_annotation in (None, "None")


SCENES = scenes_of(__name__) | {
    "few, not whole": _few_not_whole,
    "struck in open, not shared": partial(struck_in_open, is_shared=False),
    "refused": partial(trains_on, refused=REFUSALS),
    "half refused": partial(trains_on, refused=REFUSALS, cut_off=(0,)),
    "suspected before": partial(suspected_newer, retain="latest-1"),
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
