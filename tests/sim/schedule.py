"""Actors of which one runs at a time, by a seed's choice, on a clock that only waiting moves.

Production code that blocks runs here unchanged: threads become greenlets, and what a thread would
wait for (a reply, a lock, time) becomes a place at which the `Scheduler` lets somebody else run.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace

import greenlet


class Killed(greenlet.GreenletExit):
    """Unwinds the actors of a process that was killed."""


class Actor:
    """What is a thread in production."""

    __slots__ = (
        "args", "greenlet", "is_killed", "is_over", "loops", "process", "ready_s", "reply", "role",
        "stood_s", "target", "thread", "token", "waiting", "wipes",
    )  # fmt: skip

    def __init__(self, process, role: str, target: Callable, args: tuple = ()) -> None:
        self.process, self.role, self.target, self.args = process, role, target, args
        self.greenlet = None
        self.reply: object = None
        self.token = 0  # of the wait it is in; a wake-up for an earlier one does nothing
        self.waiting: object = "starts"
        self.is_over = self.is_killed = False
        self.loops: list = []  # ranges and rule of the loops of the store that it is in
        self.thread: object = None
        self.ready_s = math.inf  # since when it can move
        self.stood_s = 0.0  # how long it could have moved, and others did, in all
        self.wipes = 0  # that the store had seen when it answered last

    def __str__(self) -> str:
        return f"{self.process} {self.role}"


class Scheduler:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now_s = 1000.0
        self.actors: set[Actor] = set()
        self.current: Actor | None = None
        self._ready: list = []  # actors, and things to happen
        self._timers: list = []
        self._numbers = itertools.count()
        self._hub = greenlet.getcurrent()
        self.crash: BaseException | None = None
        self.step_s = 0.01
        self.haste = 0.0  # how often the last to move moves again
        self._last: Actor | None = None

    def clock(self) -> float:
        return self.now_s

    # Called by actors

    def park(self, waiting: object, until_s: float = math.inf):
        """Wait to be woken; returns what it was woken with, None when `until_s` came first."""
        actor = self.current
        if actor.is_killed:
            raise Killed
        actor.waiting = waiting
        if until_s < math.inf:
            self.at(until_s, self.wake, actor, actor.token, None)
        reply = self._hub.switch()
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def pause(self, what: object) -> None:
        """A point at which others may move, and this process be killed or suspended."""
        actor = self.current
        if actor.is_killed:
            raise Killed
        actor.waiting, actor.reply = what, None
        actor.token += 1
        self._make_ready(actor)
        reply = self._hub.switch()
        if isinstance(reply, BaseException):
            raise reply

    def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            self.pause("yields")
        else:
            self.park("sleeps", self.now_s + seconds)

    # Called by anybody

    def wake(self, actor: Actor, token: int, reply: object) -> None:
        if actor.token == token and not actor.is_over:
            actor.token += 1
            actor.reply = reply
            self._make_ready(actor)

    def at(self, when_s: float, do: Callable, *args) -> None:
        heapq.heappush(self._timers, (when_s, next(self._numbers), do, args))

    def soon(self, do: Callable[[], object]) -> None:
        """`do` it when the seed says so, among what else may happen now."""
        self._ready.append(do)

    def spawn(self, process, role: str, target: Callable, args: tuple = ()) -> Actor:
        actor = Actor(process, role, target, args)
        self.actors.add(actor)
        process.actors.append(actor)
        actor.greenlet = greenlet.greenlet(self._live, self._hub)
        self._make_ready(actor)
        return actor

    def kill(self, actors: list[Actor]) -> None:
        """End them where they are. Only from the hub."""
        for actor in list(actors):
            if actor.is_over:
                continue
            actor.is_killed = True
            if actor.greenlet:
                before, self.current = self.current, actor
                actor.greenlet.throw(Killed)
                self.current = before
            self._over(actor)

    # Called by the scheduler's owner

    def step(self) -> bool:
        """Let one of those who can move do so; False: nobody can before time passes."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= self.now_s:
            _, _, do, args = heapq.heappop(timers)
            do(*args)
        if not ready:
            return False
        if self.haste and self._last in ready and self.random() < self.haste:
            index = ready.index(self._last)
        else:
            index = int(self.random() * len(ready))
        chosen, ready[index] = ready[index], ready[-1]
        ready.pop()
        self.now_s += self.random() * self.step_s
        if not isinstance(chosen, Actor):
            chosen()
        elif chosen.is_over:
            pass
        elif chosen.process.is_suspended:
            chosen.process.held_up.append(chosen)
        else:
            self._last = chosen
            self._resume(chosen)
        return True

    def next_timer_s(self) -> float:
        return self._timers[0][0] if self._timers else math.inf

    def release(self, process) -> None:
        """It was suspended, and is not any more."""
        for actor in process.held_up:
            self._make_ready(actor)
        process.held_up.clear()

    def _make_ready(self, actor: Actor) -> None:
        actor.ready_s = self.now_s
        self._ready.append(actor)

    def _resume(self, actor: Actor) -> None:
        actor.stood_s += self.now_s - actor.ready_s
        self.current = actor
        actor.greenlet.switch(actor.reply)
        self.current = None
        if actor.greenlet.dead:
            self._over(actor)
        if self.crash is not None:
            raise self.crash

    def _over(self, actor: Actor) -> None:
        actor.is_over = True
        self.actors.discard(actor)
        actor.process.actors.remove(actor)
        for token in actor.thread.joining if actor.thread else ():
            self.wake(*token, None)

    def _live(self, _: object) -> None:
        actor = self.current
        try:
            if not actor.is_killed:
                actor.target(*actor.args)
        except Killed:
            pass
        except BaseException as error:
            self.crash = self.crash or error

    # What production modules get for `threading` and `time`

    def threads(self) -> SimpleNamespace:
        world = self

        class Thread:
            def __init__(self, *, target, name, daemon, args=()) -> None:
                words = name.split()
                self.role = " ".join(words[1:2] if words[0] == "torch_ros" else words[:1])
                self.target, self.args, self.joining = target, args, []

            def start(self) -> None:
                if world.current.is_killed:
                    raise Killed
                self.actor = world.spawn(world.current.process, self.role, self.target, self.args)
                self.actor.thread = self

            def is_alive(self) -> bool:
                return not self.actor.is_over

            def join(self, timeout: float = math.inf) -> None:
                if not self.actor.is_over:
                    self.joining.append((world.current, world.current.token))
                    world.park("joins a thread", world.now_s + timeout)

        class Waiters:
            def __init__(self) -> None:
                self._waiters: list = []

            def _wait(self, what: str, until_s: float):
                self._waiters.append((world.current, world.current.token))
                return world.park(what, until_s)

            def _wake_all(self) -> None:
                for actor, token in self._waiters:
                    world.wake(actor, token, "woken")
                self._waiters.clear()

        class Event(Waiters):
            is_happened = False

            def set(self) -> None:
                self.is_happened = True
                self._wake_all()

            def is_set(self) -> bool:
                return self.is_happened

            def wait(self, timeout: float = math.inf) -> bool:
                if not self.is_happened and timeout > 0:
                    self._wait("waits for an event", world.now_s + timeout)
                return self.is_happened

        class Lock(Waiters):
            """Reentrant."""

            owner: Actor | None = None
            depth = 0

            def acquire(self, blocking: bool = True, timeout: float = math.inf) -> bool:
                until_s = world.now_s + timeout if blocking else -math.inf
                while self.owner is not None and self.owner is not world.current:
                    if world.now_s >= until_s:
                        return False
                    self._wait("waits for a lock", until_s)
                self.owner = world.current
                self.depth += 1
                return True

            def __enter__(self):
                self.acquire()
                return self

            def release(self) -> None:
                self.__exit__()

            def __exit__(self, *_) -> None:
                self.depth -= 1
                if not self.depth:
                    self.owner = None
                    self._wake_all()

        class Condition(Lock):
            def __init__(self) -> None:
                super().__init__()
                self._sleepers: list = []

            def wait(self, timeout: float = math.inf) -> None:
                assert self.owner is world.current
                depth, self.depth, self.owner = self.depth, 0, None
                self._wake_all()
                self._sleepers.append((world.current, world.current.token))
                try:
                    world.park("waits for a condition", world.now_s + timeout)
                finally:
                    if not world.current.is_killed:
                        self.__enter__()
                        self.depth = depth

            def notify_all(self) -> None:
                for actor, token in self._sleepers:
                    world.wake(actor, token, "woken")
                self._sleepers.clear()

        return SimpleNamespace(
            Thread=Thread,
            Event=Event,
            Lock=Lock,
            RLock=Lock,
            Condition=Condition,
            current_thread=lambda: world.current.thread,
            get_ident=lambda: id(world.current),
        )

    def time(self) -> SimpleNamespace:
        return SimpleNamespace(
            monotonic=self.clock,
            time=self.clock,
            perf_counter=self.clock,
            clock_gettime=lambda _: self.now_s,
            CLOCK_BOOTTIME=7,
            sleep=self.sleep,
        )
