"""One seed, one history: replicas of a model, a store and wires that fail, and who moves when.

Production code that runs here as it is: everything behind `torch_ros.open`, which is the handle,
its data plane (`transfer`, `shard`), the group with its threads, the session, the
loops and all the rules. Only three things are others: the store (`stores`), the transport
(`wires`), and time and threads (`schedule`), by which the seed decides what happens next.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import importlib
import itertools
import logging
import math
import pkgutil
import secrets
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from random import Random
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import wires
from buckets import READ_S, URL, ModelBucket
from checks import Broken, Checks
from planting import others
from replicas import BLOCK_CELLS, CONTENT, PROBE, RELEASE_S, TTL_S, Process, Start, Struck, Task
from schedule import Scheduler
from sockets import Sock, StreamWire, streamed
from stores import Connection, Store, wakes
from story import short
from wires import LOOK_S, Wire

from torch_ros import deadline, face, features, protocol, shard, transfer
from torch_ros.channels import steps
from torch_ros.codec.table import TABLE_BYTES
from torch_ros.costs import NIXL_COSTS
from torch_ros.deadline import Deadline
from torch_ros.face.identity import Identity
from torch_ros.features.deltas import reading as delta_reading
from torch_ros.features.deltas.making import _Making
from torch_ros.features.lending import memory
from torch_ros.features.lending.memory import LentMemory, Loan
from torch_ros.features.pace import rates
from torch_ros.features.retention.host_copies import HostCopy
from torch_ros.features.seeding.rules import forerunner_of
from torch_ros.features.tracing import spans as tracing
from torch_ros.protocol import group, sources, versions
from torch_ros.protocol.keys import Keys, parse_holding
from torch_ros.protocol.records import Call, Record
from torch_ros.shard.word import OwnWord
from torch_ros.store import loops, run, session, txn
from torch_ros.store.txn import Watch
from torch_ros.transfer import reading
from torch_ros.transfer.card import Card
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.weights import manifest
from torch_ros.weights.plan import ReadPlan, plan

# The modules whose threads, time and waits are the world's: those that wait, and all above them.
# Spans are made by a thread and a clock of their own.
INHABITED = (
    *(run, session, deadline, manifest, steps),
    *(
        importlib.import_module(found.name)
        for package in (protocol, transfer, shard, features, face)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if found.name != tracing.__name__
    ),
)
HOMES = {(deadline, "Deadline")}  # the world's own is made of it

FAULTS = (
    "kill", "suspend", "cut", "unlink", "lose", "lose reply", "late", "early", "read", "slow",
    "restart", "expire", "wipe", "store restarts", "store away",
)  # fmt: skip
# What must have happened in a couple of thousand seeds, or they prove less than they seem to.
EVENTS = (
    *(f"fault: {kind}" for kind in FAULTS),
    "a stray write to what is held",
    "attached",
    "borrowed",
    "borrow: LoanRefused",
    "borrowed while it was given up",
    "attached to a copy",
    "attached to a far source",
    "attached to a relay",
    "attached to what lingers",
    "a bucket's version is corrupt",
    "a connection cut",
    "a stranger at the address",
    "chosen among many",
    "closed",
    "copied to host memory",
    "draining to full",
    "fetched ahead",
    "fetched ahead, and taken",
    "fenced for good",
    "filling to full",
    "followed",
    "full to draining",
    "gone",
    "install: InstallRejected",
    "install rejected",
    "installed",
    "await_installed: ok",
    "garbage read",
    "let go of before an answer",
    "lingers",
    "loaded",
    "never answered",
    "not waited for",
    "offered when back",
    "other bytes under an old number",
    "publish ends: ManifestMismatch",
    "race lost",
    "prefetched a version",
    "read",
    "read by deltas",
    "read by deltas of several versions",
    "read by deltas that were prefetched",
    "read from a bucket",
    "re-routed",
    "read ended early",
    "read failed",
    "replicate ends: ManifestMismatch",
    "replicate: SourceLost",
    "replicate: VersionNotFound",
    "seats taken again",
    "sent in part",
    "served",
    "started twice",
    "stopped",
    "stream left",
    "stream: SourceLost",
    "streamed",
    "some left out",
    "stepped aside",
    "struck while it skips",
    "unpublish: DeadlineExceeded",
    "unpublished with a copy",
    "update: CallAborted",
    "waited for nothing",
    "waited for something",
)
MANY = ((txn, "SAMPLE_MAX"), (versions, "HOLDERS_MAX"), (sources, "NEIGHBOURS"))
JUDGED = {"PACE_S": 0.0, "PACE_BYTES": 32, "CAUGHT_UP_BYTES": 0}
MAKE_DELTAS = {4, 7}  # of the seeds modulo 15: trainers publish copies, with deltas
ARCHIVED = 2  # of the seeds modulo 5: there is a bucket
STREAMED = 1  # of the seeds modulo 11: bytes come over TCP
COMPARED = {  # slow ones are found by how bytes land alone
    "PACE_S": 1e9,
    "LANDINGS": 2,
    "WINDOW_BYTES": 1,
    "WINDOW_S": 0.0,
    "RATE_SHARE": 0.3,
}
GAPS = 0.04  # of the starts: their ranks lack a cell
HERE = (("latest@here",), ("latest@here",), ("latest-1@here",), ("latest@here", "1@here"))
STORY = 60  # steps that a failure shows
STEPS_MAX = 60_000
SHAPES = (
    (("w0", (12,)), ("w1", (12,)), ("w2", (12,))),
    (("w0", (12,)), ("w1", (12,))),
    (("m", (3, 12)), ("w", (12,)), ("x", (24,))),
)


def few_change(index, content: int):
    """A third of the cells has another value in each content; half of these go back again."""
    kind = index % 6
    age = np.where(kind == 0, content, np.where(kind == 3, content % 2, content // 100))
    return index + age * CONTENT


@functools.cache
def _known(names: tuple[str, ...]) -> list[tuple[ModuleType, str]]:
    """The modules that know each of these."""
    there = ((module, name) for module in INHABITED for name in names)
    return [each for each in there if getattr(*each, None) is not None and each not in HOMES]


plans: dict[tuple, ReadPlan] = {}


def planned(sources, target, **options) -> ReadPlan:
    """The plan, which is pure; the same few layouts meet in all worlds."""
    key = (*(layout.digest for layout in (*sources, target)), *options.values())
    if key not in plans:
        plans[key] = plan(sources, target, **options)
    return plans[key]


class Locks:
    """The module `fcntl`, with locks that others may be faster to take."""

    def __init__(self, flock) -> None:
        self.flock = flock

    def __getattr__(self, name: str):
        return getattr(fcntl, name)


class World(Scheduler):
    def __init__(self, seed: int, *, story: int = STORY) -> None:
        super().__init__(seed)
        self.seed, rng = seed, self.rng
        self.seen: Counter[str] = Counter()
        self.wipes = 0
        self.told: deque = deque(maxlen=story)
        self.store = Store(self)
        self.keys = Keys("m")
        self.wires: dict[str, Wire | StreamWire] = {}
        self.ports: dict = {}  # who listens there
        self.dialed: list[Sock] = []
        self.watchers: dict = {}
        self.down_until_s = self.leases_renewed_s = 0.0
        self.store_hindered: list[tuple[float, float]] = []
        self.processes: list[Process] = []
        self.starts: list[Start] = []
        self.names = 0
        self.top = 0  # the highest version that anybody thought of
        self.contents: dict[int, int] = {}
        self.versions: dict[str, int] = {}  # by uid
        self.is_calm = False
        self.meetings: dict[str, set] = {}
        self.below = None  # the bucket of those that have one
        self.loans: dict[Process, list[Loan]] = {}
        self.steps = 0
        self.shapes = rng.choice(SHAPES)
        self.checks = Checks(self)
        # Each seed has its own kinds of trouble, and its own pace.
        rate = rng.choice([0.0, 0.3, 0.3, 1.0, 1.0, 2.0])
        self.rates = {kind: rate * rng.choice([0, 0, 1, 1, 2]) for kind in FAULTS}
        self.step_s = rng.choice([0.002, 0.01, 0.03, 0.1])
        self.haste = rng.choice([0.0, 0.0, 0.8])
        self.read_s = rng.choice([0.0, 0.0, 0.05, 2.0])
        self.steps_of_trouble = rng.randrange(150, 2000)
        self.is_seen_through = rng.random() < 0.35  # until everybody is well again; that takes long
        self.is_in_datacenters = rng.random() < 0.3
        self.is_retaining = rng.random() < 0.5
        self.is_lending = seed % 7 == 6  # the others stay what they were
        self.is_installing = seed % 7 == 3
        self.is_judged = seed % 2 == 1  # whoever is slow
        self.is_compared = seed % 4 == 1  # and no process copies from another
        self.is_streamed = seed % 11 == STREAMED
        # Of answers: sent in two parts; if late, copied early; if they fail, never there.
        self.part_share, self.early_share, self.silent_share = 0.3, 0.5, 0.5
        # From how many records on they are many: SAMPLE_MAX, HOLDERS_MAX and NEIGHBOURS.
        self.many = rng.choice([*4 * [(32, 8, 8)], (2, 1, 2), (1, 1, 1)])
        self.makes_deltas = seed % 15 in MAKE_DELTAS
        self.is_hasty, self.stray_share = False, 0.0
        self.struck_share = Random(f"{seed}/struck").choice([0.0, 0.0, 0.5])  # of calls skipped
        if self.makes_deltas:
            self._expect_deltas(Random(f"{seed}/deltas"))
        if seed % 5 == ARCHIVED:
            self._archive(Random(f"{seed}/bucket"))
        self._populate()

    def _expect_deltas(self, apart: Random) -> None:
        """Less goes wrong, and later: who reads deltas has read the version before."""
        share = apart.choice([0.05, 0.1, 0.3])
        self.rates = {kind: share * rate for kind, rate in self.rates.items()}
        self.steps_of_trouble = apart.randrange(1000, 8000)
        self.cells = few_change
        # Of the applications of deltas: before these, somebody writes to a cell that is held.
        self.stray_share = apart.choice([0.0, 0.0, 0.3])
        if apart.random() < 0.4:  # some bytes land when others are where they lay
            self.is_hasty, self.read_s, self.rates["slow"] = True, 0.0, 1.0

    def _archive(self, apart: Random) -> None:
        times_s = {"list_s": apart.choice([0.0, 15.0]), "read_s": apart.choice([0.02, 0.2, READ_S])}
        self.below = ModelBucket(self, fails=apart.choice([0.0, 0.1, 0.4]), **times_s)
        for version in sorted(apart.sample(range(6), apart.randrange(1, 4))):
            key = self.below.archive(version, self.number())
            if apart.random() < 0.3:
                self.below.corrupt.add(key)

    def _populate(self) -> None:
        late_s = Random(f"{self.seed}/late").choice([0, 30, 60, 90]) if self.below else 0
        for number in range(self.rng.choice([1, 1, 1, 2])):
            if late_s:
                self.at(self.now_s + late_s, self._launch_late, f"t{number}")
            else:
                self.launch(f"t{number}", is_trainer=True)
        for number in range(self.rng.choice([1, 2, 2, 3])):
            self.launch(f"r{number}", is_trainer=False)

    def _launch_late(self, name: str) -> None:
        if not self.is_calm:  # nobody comes any more then
            self.launch(name, is_trainer=True)

    # What happened

    def tell(self, who: object, what: object, fault: str = "") -> None:
        self.told.append((self.now_s, who, what, fault))

    def saw(self, what: str) -> None:
        self.seen[what] += 1

    def tale(self) -> str:
        lines = (f"{s - 1000:8.2f} {who!s:16} {short(what)} {f}" for s, who, what, f in self.told)
        return "\n".join(lines)

    # Names

    def cells(self, index, content: int):
        """What cells have in a content: each says which it is of, and where in it."""
        return index + content * CONTENT

    def number(self) -> int:
        self.names += 1
        return self.names

    def token(self, _: int = 0) -> str:
        return f"x{self.number()}"

    def deadline(self, what: str, timeout_s: float, **options) -> Deadline:
        return Deadline(what, timeout_s, self.now_s, **options)

    def process_of(self, shard) -> Process:
        return self.wires[Card.decode(shard.card).agent].process

    def start_of(self, replica: str, nonce: str) -> Start:
        """Whose group record that is: its creator is about to say so."""
        creator = self.current.process.start
        if replica in {creator.replica, forerunner_of(creator.replica)}:
            return creator
        return self.checks.starts[f"{replica}@{nonce}"]

    # Replicas and what they do

    def launch(self, name: str, *, is_trainer: bool, is_probe: bool = False, size=0) -> Start:
        rng = self.rng
        size = size or rng.choice([1, 1, 2, 2, 3, 4])
        size = min(size, 2) if self.makes_deltas else size
        for start in self.starts:
            start.is_replaced |= start.replica == name
        made = Start(self, name, is_trainer, size, rng.choice(["rows", "rows", "whole", "stages"]))
        made.number = len(self.starts)
        self.starts.append(made)
        if not is_probe:
            made.nonce = self.token() if rng.random() < 0.5 and size > 1 else None
            made.run = "new" if is_trainer and rng.random() < 0.05 else None
            made.spot = not is_trainer and rng.random() < 0.25
            made.drain_s = rng.choice([1.0, 5.0, 60.0])
            made.loads = rng.random() < 0.15
            made.linger_s = rng.choice([0.0, 4.0, 30.0])
            if self.is_retaining and rng.random() < 0.4:
                made.retain = rng.choice([("latest",), ("latest-1",), ("latest", "1")])
            # Drawn apart, so that each seed stays what it was.
            made.store_wait_s = Random(f"{self.seed}/{made.number}").choice([None, None, 0, 3.0])
            made.installs = self.is_installing and not is_trainer
            if self.is_lending and is_trainer:
                apart = Random(f"{self.seed}/{made.number}/lends")
                made.borrow_bytes, made.loads = apart.choice([200, 600, 1500]), True
            if Random(f"{self.seed}/{made.number}/ahead").random() < 0.5 and not is_trainer:
                made.seeding = "host" if self.is_in_datacenters and not made.loads else made.seeding
            if self.below and Random(f"{self.seed}/{made.number}/bucket").random() < 0.7:
                made.bucket = URL
            if Random(f"{self.seed}/{made.number}/gap").random() < GAPS:
                made.sharding = "gap"
        if self.is_in_datacenters:
            made.datacenter = rng.choice(["east", "west"])
            if Random(f"{self.seed}/{made.number}/here").random() < 0.3 and not is_probe:
                made.retain += Random(f"{self.seed}/here").choice(HERE)
        made.is_probe = is_probe
        if self.makes_deltas:
            self._make_deltas(made, Random(f"{self.seed}/{made.number}/deltas"))
        if is_probe and any(start.run for start in self.starts):
            made.run = (
                "new"  # who has used a version of the newest run waits for one of it, or newer
            )
        for rank in range(size):
            process = Process(self, made, rank, len(self.processes))
            self.processes.append(process)
            made.processes.append(process)
            self.spawn(process, "main", process.live)
        self.tell(made, f"starts: {size} ranks, {made.sharding}, retain={made.retain}")
        return made

    def _make_deltas(self, made: Start, apart: Random) -> None:
        made.digests = "full"
        if made.is_probe:
            return
        made.loads = made.is_trainer
        if made.is_trainer:
            made.deltas = apart.choice([1, 4, 16])
            made.delta_bytes = apart.choice([None, *(TABLE_BYTES + n for n in (800, 1600))])
            made.drain_s = 0.5 if self.is_hasty else apart.choice([0.5, 5.0, 60.0])
        elif apart.random() < 0.15:
            made.digests = ("full", *("off",) * (made.size - 1))

    def start_named(self, name: str) -> Start:
        return next(start for start in self.starts if start.replica == name)

    def next_task(self, at: Start) -> Task:
        task = self._delta_task(at) if self.makes_deltas else self._drawn_task(at)
        if at.installs and task.kind in {"replicate", "update", "stream"}:
            return dataclasses.replace(task, kind="install")
        draw = Random(f"installs/{self.seed}/{at.number}/{len(at.tasks)}").random()
        if not self.is_installing or draw > 0.5:
            return task
        is_idle = at.is_trainer and task.kind == "idle" and at.tasks[-1].kind == "publish"
        return Task("await_installed", at.tasks[-1].version, timeout_s=40) if is_idle else task

    def _delta_task(self, at: Start) -> Task:
        """Mostly in turn: readers have the version before when the next one comes."""
        apart, last = Random(f"deltas/{self.seed}/{at.number}/{len(at.tasks)}"), at.tasks[-1:]
        if apart.random() < 0.1:
            return self._drawn_task(at)
        if last and last[0].kind != "idle" and apart.random() < 0.9:
            longest = 500 if at.is_trainer else 150  # steps
            return Task("idle", timeout_s=apart.random() * longest * self.step_s)
        if not at.is_trainer:
            return Task("update", "latest")
        self.top += 1
        return Task("publish", self.top, self.content(self.top))

    def _drawn_task(self, at: Start) -> Task:
        rng, last = self.rng, at.tasks[-1] if at.tasks else Task("start")
        timeout_s = rng.choice([0.5, 5.0, 20.0, 20.0, 40.0])
        timeout_s *= 3 if at.bucket else 1  # nobody has to have anything for 20 s
        if rng.random() < 0.015:
            return Task("close")
        if rng.random() < 0.03:
            return Task(rng.choice(["wait", "list"]), timeout_s=timeout_s)
        if at.is_trainer:
            if at.bucket and not at.tasks and not at.loads and rng.random() < 0.7:
                return Task("begin", "latest", timeout_s=timeout_s)
            if last.kind == "publish" and rng.random() < 0.6:
                return self._idle()
            if last.kind in {"publish", "idle"} and rng.random() < 0.9 and len(at.tasks) > 1:
                return Task("unpublish", timeout_s=timeout_s)
            version = max(0, self.top + rng.choice([-1, 0, 0, 1, 1, 1, 1, 2]))
            self.top = max(self.top, version)
            return Task("publish", version, self.content(version), timeout_s)
        if last.kind != "idle" and rng.random() < 0.5:
            idle = self._idle()
            # Drawn apart, so that each seed stays much what it was.
            draw = Random(f"streams/{self.seed}/{at.number}/{len(at.tasks)}").random()
            return Task("stream", "latest", timeout_s=timeout_s) if draw < 0.2 else idle
        version = rng.choice(["latest"] * 8 + ["latest-1", max(0, self.top - 1), self.top])
        kind = rng.choices(["replicate", "update", "unpublish"], [1, 15, 4])[0]
        return Task(kind, version, timeout_s=timeout_s)

    def _idle(self) -> Task:
        longest_s = 20 if self.rng.random() < 0.15 else 80 * self.step_s
        return Task("idle", timeout_s=self.rng.random() * longest_s)

    def content_of(self, call: Call) -> int:
        return self.content(call.ref.version)

    def content(self, version: int) -> int:
        """The bytes of a version: others only when nobody is there who means the old ones."""
        known = self.contents.get(version)
        if known is None or (not self._is_meant(version) and self.rng.random() < 0.7):
            if known is not None:
                self.saw("other bytes under an old number")
            known = self.contents[version] = self.number()
        return known

    def _is_meant(self, version: int) -> bool:
        for key, holding in self.checks.holdings.items():
            if holding.is_original and parse_holding(key).version == version:
                return True  # whoever publishes it too has the same: that is the users' part
        for start in self.starts:
            if not start.is_trainer or all(process.is_gone for process in start.processes):
                continue
            if start.is_probe and version == PROBE:
                return True
            if any(task.kind == "publish" and task.version == version for task in start.tasks):
                return True
        return False

    def meet(self, where: str, process: Process) -> None:
        """Wait until everybody who can come has come."""
        came = self.meetings.setdefault(where, set())
        came.add(process)
        self.tell(process, f"waits until everybody {where}")
        until_s = self.now_s + 2000
        while not all(p.is_gone or p in came for p in self.processes):
            assert self.now_s < until_s, f"I6: not everybody {where}: {self._missing(came)}"
            self.sleep(4.0)

    def _missing(self, came: set) -> list[str]:
        return [str(p) for p in self.processes if not p.is_gone and p not in came]

    # Steps

    def play(self) -> None:
        while self.actors:
            self.steps += 1
            if self.steps > STEPS_MAX:
                there = [f"{actor} {short(actor.waiting)}" for actor in self.actors]
                raise Broken(f"I6: it does not come to an end: {there}")
            if not self.is_calm:
                if self.steps > self.steps_of_trouble:
                    if not self.is_seen_through:
                        return
                    self._calm_down()
                elif self.random() < 0.1:
                    self._trouble()
                    if self.makes_deltas:
                        self._supervise()
            if not self.step() and self.actors:
                self._pass_time()
        self.now_s += 3 * TTL_S
        self.store.expire_due()
        self.store_changed("the end")
        self.checks.end()

    def _pass_time(self) -> None:
        if self.random() < (0.01 if self.is_calm else 0.08):
            self.checks.stalled()
        next_s = self.next_timer_s()
        assert next_s < math.inf, f"I6: everybody sleeps for ever: {list(map(str, self.actors))}"
        self.now_s = max(self.now_s, next_s)

    def store_changed(self, what: object) -> None:
        """Check what is there now, and wake those who watch it."""
        store = self.store
        if not store.fresh:
            return
        keys, store.fresh = store.fresh, set()
        for actor, (token, watch, connection) in list(self.watchers.items()):
            if connection.is_reachable and wakes(watch, keys):
                self.wake(actor, token, "changed")
        self.checks.changed(keys, what)

    # Trouble

    def _strikes(self, kind: str, probability: float) -> bool:
        if self.is_calm or self.random() >= probability * self.rates[kind]:
            return False
        self.seen[f"fault: {kind}"] += 1
        return True

    def request_fault(self, connection: Connection) -> str:
        if connection.process.cut_until_s > self.now_s:
            return "cut"
        if self.down_until_s > self.now_s:
            return "down"
        if self.is_calm or self.random() >= 0.03:
            return ""
        kinds = {"lose": 0.25, "lose reply": 0.3, "late": 0.1}
        return next((kind for kind, p in kinds.items() if self._strikes(kind, p)), "")

    def is_struck(self, draw: Random) -> bool:
        """Whether Ctrl-C comes to a process that skips a call: within a call of its program."""
        is_called = self.current.process.is_called and not self.is_calm
        return is_called and draw.random() < self.struck_share

    def about_to_lock(self) -> None:
        self.pause("is about to lock")

    def about_to_watch(self, watch: Watch) -> None:
        pass

    def available_bytes(self) -> float:
        return math.inf

    def read_error(self) -> str:
        return "the read failed" if self._strikes("read", 0.01) else ""

    def read_delay_s(self) -> float:
        if self._strikes("slow", 0.02):
            return self.random() * 20
        return self.random() * self.read_s if self.read_s and not self.is_calm else 0.0

    def _trouble(self) -> None:
        rng = self.rng
        alive = [p for p in self.processes if not p.is_gone]
        if not alive:
            self._start_again()
            return
        self._fail_a_connection()
        if self._strikes("kill", 0.04):
            self._kill_one(rng.choice(alive))
        if self._strikes("suspend", 0.05):
            self.suspend(rng.choice(alive), rng.choice([0.5, 1, 4, 9, 12, 25]))
        if self._strikes("cut", 0.05):
            self.cut(rng.choice(alive), rng.choice([1, 4, 9, 12, 25]))
        if self._strikes("unlink", 0.04):
            victim, away_s = rng.choice(alive), rng.choice([0.1, 1, 4, 12])
            victim.unlinked_until_s = self.now_s + away_s
            self.tell(victim, f"cannot be read from, nor read, for {away_s} s")
        if self._strikes("early", 0.1):
            for actor, (token, _, _) in list(self.watchers.items()):
                self.wake(actor, token, "early")
        if self._strikes("restart", 0.04):
            self._start_again()
        if self._strikes("expire", 0.04):
            self._expire(rng.choice(alive))
        if self._strikes("wipe", 0.015):
            self._wipe()
        if self._strikes("store restarts", 0.02):
            self.tell("the store", "restarts")
            self.store.restart()
            self.leases_renewed_s = self.now_s
            self.store_away(rng.choice([0.1, 1, 4]))
        if self._strikes("store away", 0.03):
            self.store_away(rng.choice([1, 4, 9, 12, 25]))

    def _fail_a_connection(self) -> None:
        if self.dialed and self._strikes("read", 0.1):
            self.dialed = [each for each in self.dialed if not each.is_closed]
            for each in self.rng.sample(self.dialed, min(1, len(self.dialed))):
                each.fail()

    def suspend(self, victim: Process, pause_s: float) -> None:
        self.tell(victim, f"is suspended for {pause_s} s")
        victim.suspended_until_s = self.now_s + pause_s
        victim.hindered_s += pause_s
        self.at(victim.suspended_until_s + RELEASE_S, self.release, victim)

    def cut(self, victim: Process, cut_s: float) -> None:
        self.tell(victim, f"is cut off from the store for {cut_s} s")
        victim.cut_until_s = self.now_s + cut_s
        victim.hindered_s += cut_s
        self.at(victim.cut_until_s + 1e-6, self._reconnected)

    def store_away(self, away_s: float) -> None:
        self.tell("the store", f"is away for {away_s} s")
        self.down_until_s = max(self.down_until_s, self.now_s + away_s)
        for process in self.processes:
            process.hindered_s += away_s
        self.at(self.down_until_s + 1e-6, self._reconnected)

    def _reconnected(self) -> None:
        """A watch that was broken off looks again."""
        for actor, (token, _, connection) in list(self.watchers.items()):
            if connection.is_reachable:
                self.wake(actor, token, "reconnected")

    def _wipe(self) -> None:
        self.tell("the store", "IS WIPED")
        self.store.wipe()
        self.wipes += 1
        for process in self.processes:
            process.hindered_s += TTL_S
        for actor, (token, _, _) in list(self.watchers.items()):
            self.wake(actor, token, "wiped")
        self.store_changed("wiped")

    def _expire(self, victim: Process) -> None:
        if victim.handle is not None:
            self.tell(victim, "loses its lease")
            victim.hindered_s += TTL_S
            ahead = victim.forerunner
            of = ahead if ahead is not None and self.random() < 0.5 else victim.shard
            self.store.expire(of.group.session.lease_id)
            self.store_changed("a lease ends")

    def _kill_one(self, victim: Process) -> None:
        """Its lease may have had little left, and its neighbour may be slow to notice."""
        peers = [p for p in victim.start.processes if p is not victim and not p.is_gone]
        if peers and self.random() < 0.3:
            self.suspend(self.rng.choice(peers), self.rng.choice([1, 8]))
        self.kill_process(victim)
        if victim.handle is not None and self.random() < 0.5:
            self._expire(victim)

    def kill_process(self, victim: Process) -> None:
        self.tell(victim, "IS KILLED")
        victim.died_s, victim.is_gone, victim.reads_from = self.now_s, True, []
        self.kill(victim.actors)
        for loan in self.loans.pop(victim, []):
            loan._end()  # as the kernel does

    def _start_again(self) -> None:
        name = self.rng.choice([start.replica for start in self.starts])
        old = next(start for start in reversed(self.starts) if start.replica == name)
        alive = [p for p in old.processes if not p.is_gone]
        if self.random() < 0.6:
            for process in alive:
                self.kill_process(process)
        elif alive:
            self.saw("started twice")
        size = self.rng.choice([old.size] * 8 + [1, 2])
        self.launch(name, is_trainer=old.is_trainer, size=size)

    def _supervise(self) -> None:
        """Start replicas again of which a process has ended."""
        for start in self.starts[:]:
            if not start.is_replaced and any(process.is_gone for process in start.processes):
                for process in start.processes:
                    if not process.is_gone:
                        self.kill_process(process)
                self.launch(start.replica, is_trainer=start.is_trainer, size=start.size)

    def refuse(self, process: Process, what: object, timeout_s: float) -> None:
        """Raises what etcd says to a request that it refuses; a scene may have it so."""

    def _calm_down(self) -> None:
        self.is_calm, self.haste = True, 0.0
        self.step_s = min(self.step_s, 0.005)  # so that no lease ends for want of a turn
        self.tell("the world", "is calm from now on")
        self.down_until_s = self.now_s
        for process in self.processes:
            process.cut_until_s = process.suspended_until_s = self.now_s
            process.unlinked_until_s = self.now_s
            self.release(process)
        self._reconnected()
        self.at(self.now_s + 3 * TTL_S, self.checks.calm)
        self.at(self.now_s + 3 * TTL_S, self._probe)

    def _probe(self) -> None:
        self.launch("probe", is_trainer=True, is_probe=True, size=2)

    def was_hindered(self, process: Process, took_s: float) -> bool:
        """Whether anything slowed it down of late that is not counted with it."""
        return bool(self.read_s) or self.rates["slow"] > 0

    # Production code, told to live here

    @contextmanager
    def inhabited(self):
        world, threads, time = self, self.threads(), self.time()

        def settle(what, ranges, rule, *ahead):
            mine, loops_in = (ranges, rule), world.current.loops
            loops_in.append(mine)
            try:
                return (yield from loops.settle(what, ranges, rule, *ahead))
            finally:  # of one that was given up, whenever that is
                loops_in[:] = [one for one in loops_in if one is not mine]

        def follow(ranges, rule):
            mine, loops_in = (ranges, rule), world.current.loops
            loops_in.append(mine)
            try:
                return (yield from loops.follow(ranges, rule))
            finally:
                loops_in[:] = [one for one in loops_in if one is not mine]

        class Copy(HostCopy):
            def __init__(self, transport, *args) -> None:
                super().__init__(transport, *args)
                world.checks.copied(self, transport.process)

        serve, void, look = Mailbox.serve, Mailbox.void, _Making._look
        scatter, strays = delta_reading.DeltaRead.scatter, Random(f"{self.seed}/strays")

        def slow_serve(mailbox, mark, position):
            world.pause("is about to say what is there")
            serve(mailbox, mark, position)
            world.checks.shown(mailbox._transport.process)

        def slow_look(making):
            world.pause("makes a delta")
            look(making)

        def strayed(read, staged):
            process = world.current.process
            if strays.random() < world.stray_share and len(process.cells):
                process.cells[strays.randrange(len(process.cells))] += 7
                world.saw("a stray write to what is held")
            scatter(read, staged)

        skip, strikes = OwnWord.skip, Random(f"{self.seed}/strikes")

        def struck_skip(word, learn):
            is_struck = world.is_struck(strikes)
            if not is_struck or strikes.random() < 0.5:
                skip(word, learn)
            if is_struck:
                world.saw("struck while it skips")
                raise Struck

        def slow_void(mailbox):
            world.pause("is about to void what it says")
            void(mailbox)

        def not_survived(_, what, error):
            raise error  # a mistake of ours, or a check: threads must not go on here

        def flock(fd, how):
            if how != fcntl.LOCK_UN:  # which may come as late as with the garbage
                world.about_to_lock()
            fcntl.flock(fd, how)

        lend, borrowed = LentMemory.begin, Loan.__init__

        def begin(lent):
            world.checks.filled(lent)
            lend(lent)

        def loan(self, process, word, *before):
            borrowed(self, process, word, *before)
            world.loans.setdefault(world.current.process, []).append(self)

        def identify(_model, replica, rank, world_size, *, timeout_s):
            return Identity(replica, rank, world_size, world.current.process.start.nonce)

        everywhere = {
            "threading": threads,
            "Latch": threads.Event,
            "_aside": SimpleNamespace(run=lambda job: job()),
            "time": time,
            "secrets": SimpleNamespace(token_hex=self.token, token_bytes=secrets.token_bytes),
            "settle": settle,
            "follow": follow,
            "Deadline": self.deadline,
            "HostCopy": Copy,
            "available_bytes": self.available_bytes,
            "identify": identify,
            "_open_shards": set(),
            "_close_open_shards_at_exit": lambda: None,
            "mark_written": lambda _: None,
            "choose_transport": lambda *_, replica, **__: (
                StreamWire if world.is_streamed else Wire
            )(world, world.current.process, replica),
            "bucket_below": lambda url, _: world.below if url else None,
            "connect_store": lambda _, **__: Connection(world, world.current.process),
            "STEP_BYTES": 7,
            "BATCH_BYTES": 7,  # less than a block; odd, so that several sources take turns
            "BLOCK_BYTES": 8 * BLOCK_CELLS,
            "BLINK_S": LOOK_S,  # a wait for a read is as long
        }
        with ExitStack() as stack:
            known = _known((*everywhere,))
            stack.enter_context(others({place: everywhere[place[1]] for place in known}))
            stack.enter_context(streamed(world))
            spans = (f"00-{n:032x}-{n:016x}-01" for n in itertools.count(1))
            stack.enter_context(patch.object(tracing.Spans, "traceparent", lambda _: next(spans)))
            stack.enter_context(patch.object(reading, "plan", planned))
            for (module, name), most in zip(MANY, self.many, strict=True):
                stack.enter_context(patch.object(module, name, most))
            if self.makes_deltas:
                apart = Random(f"{self.seed}/chosen")
                chosen = {
                    "are_faster": lambda *_: apart.random() < 0.95,
                    "wait_s": lambda *_: apart.choice([0.0, 1.0]),
                }
                for name, value in chosen.items():
                    stack.enter_context(patch.object(delta_reading, name, value))
                stack.enter_context(patch.object(_Making, "_look", slow_look))
                stack.enter_context(patch.object(delta_reading.DeltaRead, "scatter", strayed))
            for name, value in self._limits().items():
                stack.enter_context(patch.object(rates, name, value))
            if self.is_compared:
                stack.enter_context(patch.object(wires, "LOOK_S", 0.02))
                stack.enter_context(patch.object(wires._Peer, "costs", NIXL_COSTS))
            # Pure, and asked for the same bytes again and again.
            decode = functools.lru_cache(4096)(Record.decode.__func__)
            stack.enter_context(patch.object(Record, "decode", classmethod(decode)))
            stack.enter_context(patch.object(memory, "fcntl", Locks(flock)))
            stack.enter_context(patch.object(memory, "_name", f"{id(self)} {{}}".format))
            stack.enter_context(patch.object(LentMemory, "begin", begin))
            stack.enter_context(patch.object(Loan, "__init__", loan))
            stack.enter_context(patch.object(Mailbox, "serve", slow_serve))
            stack.enter_context(patch.object(Mailbox, "void", slow_void))
            stack.enter_context(patch.object(OwnWord, "skip", struck_skip))
            stack.enter_context(patch.object(group.Group, "_surprised", not_survived))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            stack.callback(self.abandon)
            yield

    def _limits(self) -> dict[str, float]:
        return COMPARED if self.is_compared else JUDGED if self.is_judged else {}

    def abandon(self) -> None:
        for process in self.processes:
            process.is_gone = True
        self.kill(list(self.actors))


def simulate(seed: int, *, story: int = STORY) -> Counter[str]:
    """What happened. Raises Broken, with a story, if something did that must not."""
    world = None
    try:
        world = World(seed, story=story)
        with world.inhabited():
            world.play()
    except Exception as broken:
        tale = world.tale() if world else ""
        replay = f"make sim SEEDS=1 FIRST_SEED={seed} STORY=1"
        raise Broken(
            f"{tale}\n\nseed {seed}: {type(broken).__name__}: {broken}\nreplay: {replay}"
        ) from broken
    world.seen["steps"] = world.steps
    return world.seen


__all__ = ["Broken", "World", "simulate"]
