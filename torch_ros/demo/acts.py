"""The story of `torch-ros demo`: a trainer and rollouts here, of which some are killed.

This process starts the others, kills two of them, and prints what they say.
"""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

import torch_ros
from torch_ros.errors import PeerError

SPAWN = multiprocessing.get_context("spawn")
WIDTH = 1024  # of the model: 8 MiB
STEP_S = 1.0  # between two versions
LIMIT_S = 90.0  # for any one thing to happen: importing torch takes a while on busy cores
LEAVE_S = 10.0


@dataclass(frozen=True)
class Child:
    """One process of the demo, as it sees itself."""

    name: str
    model: str
    endpoint: str
    demo: "Connection[tuple[str, int], None]"
    """Takes sentences, each with the version that is held then. At its end the process ends, too.

    Each has its own: a lock that several share would not outlive one that is killed.
    """

    @cached_property
    def ends(self) -> threading.Event:
        """An event that tells this process to leave."""
        return threading.Event()

    def tell(self, sentence: str, version: int) -> None:
        with suppress(BrokenPipeError):  # the end is near
            self.demo.send((sentence, version))

    @contextmanager
    def opened(self) -> Iterator[tuple[torch_ros.ShardHandle, torch.nn.Module]]:
        """A handle with a model."""
        threading.Thread(target=self._listen, daemon=True).start()
        torch.set_num_threads(1)
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)]
        net = torch.nn.Sequential(*layers)
        with torch_ros.open(self.model, endpoint=self.endpoint, replica=self.name) as handle:
            handle.register(net)
            yield handle, net

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            self.demo.recv()
        self.ends.set()


def _from(handle: torch_ros.ShardHandle) -> str:
    report = handle.last_read
    assert report is not None
    size, took = report.bytes_read / 2**20, report.elapsed_s * 1e3
    return f"from {report.source}, {size:.1f} MiB in {took:.0f} ms"


def train(child: Child) -> None:
    """Publish a version after each step, from the newest that anybody has."""
    with child.opened() as (handle, net):
        version = _newest(child, handle)
        optimizer = torch.optim.SGD(net.parameters(), lr=30.0)
        handle.guard(optimizer)  # nobody reads what the optimizer writes
        while not child.ends.wait(STEP_S):
            batch = torch.randn(64, WIDTH, device="cpu", dtype=torch.float32)
            loss = (net(batch) - batch.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            version += 1
            handle.publish(version)
            child.tell(f"publishes version {version}, loss {loss.item():.3f}", version)


def _newest(child: Child, handle: torch_ros.ShardHandle) -> int:
    """Read the newest version, if there is one."""
    while not child.ends.is_set():
        try:
            version = handle.replicate("latest", missing_ok=True, timeout_s=LIMIT_S)
        except PeerError:  # one that only the killed trainer had, until its lease ends
            time.sleep(STEP_S)
            continue
        if version is not None:
            child.tell(f"goes on from version {version}, {_from(handle)}", version)
        return version or 0
    return 0


def follow(child: Child) -> None:
    """Read each new version in place, and be a source of it."""
    with child.opened() as (handle, _):
        for version in handle.follow("latest", stop=child.ends):
            child.tell(f"has version {version}, {_from(handle)}", version)


@dataclass
class Demo:
    """The processes that run, and what they have said."""

    model: str
    endpoint: str
    say: Callable[..., None]
    processes: dict[str, BaseProcess] = field(default_factory=dict)
    heard: dict[str, "Connection[None, tuple[str, int]]"] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """The newest version that each has told of."""

    def start(self, name: str, plays: Callable[[Child], None]) -> None:
        self.heard[name], demo = SPAWN.Pipe()
        child = Child(name, self.model, self.endpoint, demo)
        process = SPAWN.Process(target=plays, args=(child,), name=name)
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is told to this process
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, usual)
            demo.close()  # the other side sees the end of this one
        self.processes[name] = process
        self.versions[name] = 0

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.join()
        self.heard.pop(name).close()
        del self.versions[name]

    def until(self, version: int, *names: str) -> None:
        """Print what is said until all of these have this version.

        Raises:
            PeerError: A process has ended, or one of these is late.
        """
        limit = time.monotonic() + LIMIT_S
        while missing := [name for name in names if self.versions[name] < version]:
            said = wait([*self.heard.values()], max(limit - time.monotonic(), 0))
            if not said:
                late = " and ".join(missing)
                raise PeerError(f"{late}: no version {version} within {LIMIT_S:.0f} s")
            for name in [each for each, heard in self.heard.items() if heard in said]:
                try:
                    sentence, self.versions[name] = self.heard[name].recv()
                except (EOFError, ConnectionResetError):
                    self.processes[name].join()
                    code = self.processes[name].exitcode
                    raise PeerError(f"{name} ended with exit code {code}") from None
                self.say(f"{name:>9} | {sentence}")

    def end(self) -> None:
        """Let all of them leave; who does not is killed."""
        for heard in self.heard.values():
            heard.close()
        limit = time.monotonic() + LEAVE_S
        for process in self.processes.values():
            process.join(max(limit - time.monotonic(), 0))
            process.kill()
            process.join()


def perform(model: str, endpoint: str, say: Callable[..., None]) -> None:
    """Rollouts follow a trainer; it is killed, one comes late, and it begins again.

    `say` prints lines. Nobody is left behind, however this ends.

    Raises:
        PeerError: A process has ended that was not to, or is late.
    """
    demo = Demo(model, endpoint, say)
    try:
        _act(demo)
    finally:
        demo.end()


def _act(demo: Demo) -> None:
    demo.start("trainer", train)
    demo.start("rollout-0", follow)
    demo.start("rollout-1", follow)
    demo.until(3, "rollout-0", "rollout-1")
    demo.kill("trainer")
    kept = max(demo.versions.values())
    demo.say("", f"The trainer is killed. The rollouts have version {kept}; a third comes:", "")
    demo.start("rollout-2", follow)
    demo.until(kept, "rollout-2")
    demo.kill("rollout-0")
    demo.say("", "A rollout is killed, too. The trainer starts again, from those that live:", "")
    demo.start("trainer", train)
    demo.until(kept + 3, "rollout-1", "rollout-2")
