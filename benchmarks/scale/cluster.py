"""Replicas of a model that run the library as it is, over a modelled etcd and network.

`torch_ros.open` and everything behind it runs here unchanged: handles, calls, rules, loops, leases,
the threads that renew them and watch neighbours. Three things are modelled: the store's time
(`Etcd`), the memory that processes show to each other (`plane`), and threads and clocks, which are
those of the simulated tests.
"""

import functools
import heapq
import itertools
import logging
import math
import os
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from network import Network, Node
from space import IndexedSpace, folder, folders

sys.path.append(str(Path(__file__).parents[2] / "tests" / "sim"))

import plane
from schedule import Actor, Scheduler
from world import HOMES, INHABITED

from torch_ros.deadline import Deadline
from torch_ros.errors import ClosedError
from torch_ros.face import handle, opening
from torch_ros.face.identity import Identity
from torch_ros.features.retention import host_copies
from torch_ros.protocol import group
from torch_ros.protocol.records import Record
from torch_ros.store.txn import Put, Read, Reply, Txn, View, Watch
from torch_ros.transfer import batches, stall

HOUR_S = 3600.0
TTL_S = 10


@dataclass(frozen=True)
class Model:
    """The figures of what is modelled. Rates are bytes per second, each way.

    The defaults are those of the machines in the paper: 8 GPUs with a NIC each, 50 GB on each.
    """

    bytes_total: float = 50e9  # a rank's part
    nic: float = 25e9
    copy: float = 48e9  # to host memory
    etcd_rtt_s: float = 0.001
    etcd_datacenter: str = "default"
    jitter: float = 0.5  # share of etcd_rtt_s, up or down
    write_s: float = 1 / 20_000  # etcd's time for one request
    read_s: float = 1 / 60_000
    near_rtt_s: float = 50e-6  # between two processes
    far_rtt_s: float = 0.04
    detect_s: float = 0.1  # until a reader knows that its source has died
    ticks: int = 1  # for a step over a NIC


class Clock(Scheduler):
    """Runs whoever can move, in the order in which they could; time passes between."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.now_s = 0.0

    def play(self, network: Network, is_over: Callable[[], bool]) -> None:
        timers = self._timers
        while not is_over():
            while self._ready:
                ready, self._ready = self._ready, []
                for actor in ready:
                    if not actor.is_over:
                        self._resume(actor)
            next_s = timers[0][0] if timers else math.inf
            if not network.is_idle and network.now_s + network.tick_s <= next_s:
                network.tick()
                self.now_s = network.now_s
            elif timers:
                self.now_s = max(self.now_s, next_s)
                if network.is_idle:
                    network.skip_to(self.now_s)
                _, _, do, args = heapq.heappop(timers)
                do(*args)
            else:
                raise AssertionError(f"all wait for ever: {[str(a) for a in self.actors][:9]}")


class Etcd:
    """One queue of requests, each with its share of etcd's time, and the way there and back.

    `is_free`: requests cost no time yet, while the cluster is put up.
    """

    def __init__(self, clock: Clock, model: Model) -> None:
        self.clock, self.model = clock, model
        self.space = IndexedSpace(clock.clock, self._changed)
        self.is_free = True
        self.requests: Counter[str] = Counter()
        self.bytes = 0
        self._idle_from_s = 0.0
        self._watchers: dict[str, dict[int, tuple[Actor, int, Watch, float]]] = {}
        self._others: dict[int, tuple[Actor, int, Watch, float]] = {}
        self._numbers = itertools.count()

    def reset(self) -> None:
        """Count from now on."""
        self.requests.clear()
        self.bytes = 0

    def ask(self, kind: str, do: Callable[[], Any], way_s: float) -> Any:
        if self.is_free:
            return do()
        clock, actor = self.clock, self.clock.current
        token = actor.token

        def arrive() -> None:
            # Its leader renews leases by itself, which no other member has to write.
            is_read = kind in ("reads", "renewals")
            service_s = self.model.read_s if is_read else self.model.write_s
            self._idle_from_s = max(clock.now_s, self._idle_from_s) + service_s
            clock.at(self._idle_from_s, serve)

        def serve() -> None:
            answer = do()
            clock.at(clock.now_s + self._delay_s(way_s), clock.wake, actor, token, answer)

        clock.at(clock.now_s + self._delay_s(way_s), arrive)
        return clock.park(kind)

    def _delay_s(self, way_s: float) -> float:
        half = self.model.etcd_rtt_s / 2
        return way_s / 2 + half * (1 + self.model.jitter * (2 * self.clock.random() - 1))

    # Leases

    def grant(self, ttl_s: int) -> int:
        lease_id = self.space.grant(ttl_s)
        self.clock.at(self.clock.now_s + ttl_s, self._look_at, lease_id)
        return lease_id

    def _look_at(self, lease_id: int) -> None:
        ends_s = self.space.ends_s(lease_id)
        if ends_s is None:
            return
        if ends_s <= self.clock.now_s:
            self.space.expire(lease_id)
        else:
            self.clock.at(ends_s, self._look_at, lease_id)

    # Watches

    def wait(self, watch: Watch, timeout_s: float, way_s: float) -> bool:
        clock = self.clock
        if self.space.has_changed(watch):
            return True
        number, actor = next(self._numbers), clock.current
        places = [
            self._watchers.setdefault(name, {})
            if (name := folder(r) or (r.start if r.end == r.start + "\0" else ""))
            else self._others
            for r in watch.ranges
        ]
        for place in places:
            place[number] = (actor, actor.token, watch, way_s)
        try:
            return clock.park(watch, clock.now_s + timeout_s) is not None
        finally:
            for place in places:
                place.pop(number, None)

    def _changed(self, keys: Sequence[str]) -> None:
        told: dict[int, tuple[Actor, int, Watch, float]] = {}
        for key in keys:
            for name in (key, *folders(key)):
                told.update(self._watchers.get(name, {}))
            others = self._others.items()
            told.update((n, one) for n, one in others if any(key in r for r in one[2].ranges))
        for actor, token, _, way_s in told.values():
            delay_s = 0.0 if self.is_free else self._delay_s(way_s)
            self.requests["told"] += 1
            self.clock.at(self.clock.now_s + delay_s, self.clock.wake, actor, token, "told")


class Connection:
    """A process's `KV`, which counts."""

    endpoint = "etcd://modelled"

    def __init__(self, etcd: Etcd, process: "Process", way_s: float) -> None:
        self._etcd, self._process, self._way_s, self._is_closed = etcd, process, way_s, False

    def _ask(self, kind: str, do: Callable[[], Any]) -> Any:
        if self._is_closed:
            raise ClosedError(f"{self.endpoint} was closed")
        self._count(kind)
        return self._etcd.ask(kind, do, self._way_s)

    def _count(self, kind: str) -> None:
        self._etcd.requests[kind] += 1
        self._process.requests[kind] += 1

    def read(self, request: Read, *, timeout_s: float) -> View:
        view = self._ask("reads", partial(self._etcd.space.read, request))
        self._carried(view.entries)
        return view

    def commit(self, txn: Txn, *, timeout_s: float) -> Reply:
        reply = self._ask("commits", partial(self._etcd.space.commit, txn))
        if not reply.applied:
            self._count("lost")
        self._carried({op.key: op for op in txn.ops if isinstance(op, Put)})
        for found in (*reply.results, *([reply.view.entries] if reply.view else [])):
            if not isinstance(found, int):
                self._carried(found)
        return reply

    def _carried(self, records: Any) -> None:
        size = sum(len(key) + len(each.value) for key, each in records.items())
        self._etcd.bytes += size
        self._process.bytes += size

    def wait(self, watch: Watch, *, timeout_s: float) -> bool:
        self._count("watches")
        return self._etcd.wait(watch, timeout_s, self._way_s)

    def follow(self, request, *, timeout_s):
        self.wait(Watch(request.ranges, request.after_rev, ""), timeout_s=timeout_s)
        return self._etcd.space.changes(request)

    def grant(self, ttl_s: int, *, timeout_s: float) -> tuple[int, int]:
        return self._ask("leases", partial(self._etcd.grant, ttl_s)), ttl_s

    def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        return self._ask("renewals", partial(self._etcd.space.keep_alive, lease_id))

    def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        self._ask("leases", partial(self._etcd.space.expire, lease_id))

    def close(self) -> None:
        self._is_closed = True


class Process:
    """One rank of a replica, on NICs of its own unless it is told others."""

    is_suspended = False

    def __init__(self, cluster: "Cluster", name: str, rank: int, ranks: int, datacenter: str):
        self.cluster, self.name, self.rank, self.ranks = cluster, name, rank, ranks
        self.datacenter = datacenter
        network, nic = cluster.network, cluster.model.nic
        self.out, self.into = network.link(nic), network.link(nic)
        self.actors: list[Actor] = []
        self.held_up: list[Actor] = []
        self.nodes: list[Node] = []
        self.handle: handle.ShardHandle
        self.is_dead = False
        self.requests: Counter[str] = Counter()  # to etcd
        self.bytes = 0  # from and to etcd
        self.first_read: tuple[float, int] | None = None  # when it began, after how many commits

    def __str__(self) -> str:
        return f"{self.name}/{self.rank}"

    def node(self) -> Node:
        """A place for what it shows: its tensors, or a copy of them."""
        self.nodes.append(self.cluster.network.node(self.datacenter, self.out, self.into))
        return self.nodes[-1]

    def begins_to_read(self) -> None:
        if self.first_read is None:
            self.first_read = self.cluster.clock.now_s, self.requests["commits"]

    def reset(self) -> None:
        """Count from now on."""
        self.requests.clear()
        self.bytes, self.first_read = 0, None

    def slow_down(self, factor: float) -> None:
        for link in (self.out, self.into):
            self.cluster.network.set_rate(link, self.cluster.model.nic * factor)

    def opens(self, **options: Any) -> None:
        self.handle = opening.open(
            "m",
            endpoint=Connection.endpoint,
            replica=self.name,
            rank=self.rank,
            world_size=self.ranks,
            run="r",
            datacenter=self.datacenter,
            timeout_s=HOUR_S,
            ttl_s=TTL_S,
            huge_pages=False,
            on_progress=lambda *_: None,
            **options,
        )
        tensors, known = self.handle._shard.tensors, self.cluster.registered
        tensors.registered, tensors._places = known, [each.data_ptr() for each in known.memory]


class Cluster:
    """A model's replicas. `with cluster:` production code lives in it.

    Args:
        step_bytes: The step that a relay passes on as a whole; None: as the library does.
    """

    def __init__(self, model: Model, *, seed: int = 0, step_bytes: float | None = None) -> None:
        self.model, self.seed = model, seed
        self.clock = Clock(seed)
        step = step_bytes or batches.STEP_BYTES
        self.network = Network(step, step / model.nic / model.ticks)
        self.etcd = Etcd(self.clock, model)
        self.registered = plane.registered(model.bytes_total)
        self.boxes: dict[str, plane.Mailbox] = {}  # by agent
        self.processes: list[Process] = []
        self._names = itertools.count(1)
        self._at_work = 0
        self._stack = ExitStack()
        self.rng = random.Random(seed)  # of scenarios; the clock has its own

    # Called by scenarios

    def replica(self, name: str, *, ranks: int = 1, datacenter: str = "default") -> list[Process]:
        made = [Process(self, name, rank, ranks, datacenter) for rank in range(ranks)]
        self.processes += made
        return made

    def open(self, processes: Sequence[Process], **options: Any) -> None:
        """All processes take their seats, which etcd does at no time: no figure is about opening.

        They do it one after the other: in a burst all ask at once, and do not renew leases as well.
        """
        for number, process in enumerate(processes):
            at_s = self.clock.now_s + number / len(processes) * TTL_S / 3
            self.does(process, at_s, lambda process=process: process.opens(**options))
        self.run()

    def start(self) -> None:
        """Time, and what etcd is asked, count from now on."""
        self.etcd.is_free = False
        self.etcd.reset()
        for process in self.processes:
            process.reset()
        self.began_s = self.clock.now_s

    def does(self, process: Process, at_s: float, what: Callable[[], Any]) -> None:
        """Let a process do `what`, in a thread of its own, at `at_s`."""
        self._at_work += 1

        def work() -> None:
            try:
                what()
            finally:
                if not process.is_dead:
                    self._at_work -= 1

        self.clock.at(at_s, self.clock.spawn, process, "main", work)

    def run(self) -> None:
        """Let time pass until all processes have done what `does` gave them."""
        self.clock.play(self.network, lambda: not self._at_work)

    def kill(self, process: Process) -> None:
        """The process dies with all its threads; its readers notice soon, etcd with its lease."""
        mains = [actor for actor in process.actors if actor.role == "main"]
        self._at_work -= len(mains)
        process.is_dead = True
        for node in process.nodes:
            self.network.kill(node)
        for box in [each for each in self.boxes.values() if each.process is process]:
            if box.transfer is not None:
                self.network.stop(box.transfer)
        self.clock.kill(process.actors)
        self.clock.at(self.clock.now_s + self.model.detect_s, self._noticed, process)

    def _noticed(self, process: Process) -> None:
        for node in process.nodes:
            self.network.lose(node, "it is gone")
        for box in [each for each in self.boxes.values() if each.process is process]:
            box.wake("it is gone")

    # The time between processes

    def rtt_s(self, a: str, b: str) -> float:
        return self.model.near_rtt_s if a == b else self.model.far_rtt_s

    # Production code, told to live here

    def __enter__(self) -> Self:
        self._stack.enter_context(self._inhabited())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def _inhabited(self) -> Iterator[None]:
        clock = self.clock

        def current() -> Process:
            return clock.current.process

        def connection(*_: Any, **__: Any) -> Connection:
            process = current()
            far = process.datacenter != self.model.etcd_datacenter
            return Connection(self.etcd, process, self.model.far_rtt_s if far else 0.0)

        def identify(
            _model: str, replica: str, rank: int, world_size: int, *, timeout_s: float
        ) -> Identity:
            return Identity(replica, rank, world_size, f"s{self.seed}" if world_size > 1 else None)

        def mailbox(_: Any, forget: Callable[..., None] | None = None) -> plane.Mailbox:
            made = plane.Mailbox(self, current())
            if forget is not None:
                forget.__self__.own = made
            return made

        class Copy(host_copies.HostCopy):
            """A copy takes the model's time, and is shown as any other."""

            def __init__(copy, transport, layout, memory, kept, call, digests, pages):  # noqa: N805
                clock.sleep(self.model.bytes_total / self.model.copy)
                copy._cluster = self
                super().__init__(transport, layout, memory, kept, call, digests, pages)

        everywhere = {
            "threading": clock.threads(),
            "Latch": clock.threads().Event,
            "_aside": SimpleNamespace(run=lambda job: job()),
            "time": clock.time(),
            "secrets": SimpleNamespace(token_hex=lambda _=0: f"x{next(self._names)}"),
            "Deadline": lambda what, timeout_s, **more: Deadline(
                what, timeout_s, clock.now_s, **more
            ),
            "HostCopy": Copy,
            "available_bytes": lambda: math.inf,
            "Mailbox": mailbox,
            "Room": lambda _: plane.Room(self),
            "Reading": lambda *_, **__: plane.Reading(self, current()),
            "identify": identify,
            "_open_shards": set(),
            "_close_open_shards_at_exit": lambda: None,
            "mark_written": lambda _: None,
            "choose_transport": lambda *_, **__: SimpleNamespace(agent="", close=lambda: None),
            "connect_store": connection,
            "BLINK_S": stall.STALL_S,  # a wait for a read is as long
        }
        with ExitStack() as stack:
            for module in INHABITED:
                for name, value in everywhere.items():
                    if getattr(module, name, None) is not None and (module, name) not in HOMES:
                        stack.enter_context(patch.object(module, name, value))
            decode = functools.lru_cache(1 << 16)(Record.decode.__func__)
            stack.enter_context(patch.object(Record, "decode", classmethod(decode)))
            stack.enter_context(patch.object(group.Group, "_surprised", _not_survived))
            # Records have both, and bytes are counted.
            stack.enter_context(patch.object(os, "getpid", lambda: 4711))
            stack.enter_context(patch.object(socket, "gethostname", lambda: "host"))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            stack.callback(self._abandon)
            yield

    def _abandon(self) -> None:
        self.clock.kill(list(self.clock.actors))


def _not_survived(_: Any, what: str, error: Exception) -> None:
    raise error  # a mistake of ours: threads must not go on here
