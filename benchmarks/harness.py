"""What all parts of the benchmark stand on: processes that do as they are told, rounds in which
every case has its turn, an etcd of their own.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from torch_ros.local import etcd as local

ANSWER_S = 300.0  # for one answer of a child
END_S = 10.0
STARTED_S = time.monotonic()

Case = TypeVar("Case", bound=Hashable)
Actors = Mapping[str, Any]  # what a child has, by name; each is told to close in the end
Sample = Mapping[str, float]  # of one case in one round


@dataclass(frozen=True, slots=True)
class Setup:
    """One run of the benchmark. Names and directories are its own."""

    endpoint: str
    name: str  # begins the names of its models
    size_mib: int
    repeat: int  # how often everything is measured, at least
    directory: str  # in memory; for the files of others

    @property
    def size_bytes(self) -> int:
        return self.size_mib << 20


@dataclass(frozen=True, slots=True)
class Failure:
    report: str


class ChildFailed(Exception):
    """A process of the benchmark failed, ended, or did not answer."""


def say(words: str) -> None:
    print(f"[{time.monotonic() - STARTED_S:6.1f} s] {words}", file=sys.stderr, flush=True)


# Processes


class Child:
    """A process with what `build` returns there."""

    def __init__(self, name: str, build: Callable[[], Actors], method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self.name = name
        self.process = context.Process(target=_serve, args=(theirs, build), daemon=True)
        self.process.start()
        theirs.close()  # so that its death ends our wait

    def ask(self, actor: str, method: str, *arguments: object) -> Any:
        self.tell(actor, method, arguments)
        return self.hear()

    def tell(self, *told: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # `hear` says why it has ended
            self._pipe.send(told)

    def hear(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise ChildFailed(f"{self.name} has not answered for {ANSWER_S:.0f} s")
        try:
            heard = self._pipe.recv()
        except EOFError:
            self.process.join(END_S)
            status = self.process.exitcode
            raise ChildFailed(f"{self.name} has ended with exit status {status}") from None
        if isinstance(heard, Failure):
            raise ChildFailed(f"{self.name} failed:\n{heard.report}")
        return heard

    def end(self) -> None:
        self.process.terminate()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_S)


def ask_all(children: Sequence[Child], actor: str, method: str, *arguments: object) -> list[Any]:
    """All do it at the same time; what each says."""
    for child in children:
        child.tell(actor, method, arguments)
    return [child.hear() for child in children]


@contextlib.contextmanager
def started(
    builds: Mapping[str, Callable[[], Actors]], method: str = "spawn"
) -> Iterator[list[Child]]:
    """Processes, ready. None is left afterwards, whatever happens."""
    children: list[Child] = []
    try:
        # Inherited: Ctrl-C reaches children too, and is ours alone to handle.
        ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            children.extend(Child(name, build, method) for name, build in builds.items())
        finally:
            signal.signal(signal.SIGINT, ours)
        for child in children:
            child.hear()
        yield children
        for child in children:
            child.tell()
        for child in children:
            child.process.join(END_S)
    finally:
        with _undisturbed():
            for child in children:
                child.end()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not stop us halfway."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, ours, strict=True):
            signal.signal(number, handler)


def _serve(pipe: Connection, build: Callable[[], Actors]) -> None:
    """Do as told until told to end, or until the parent has ended."""
    import torch  # noqa: PLC0415  # not needed where the parent is
    import torch.distributed as dist  # noqa: PLC0415

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(1)
    try:
        actors = build()
        pipe.send(sorted(actors))
        while told := pipe.recv():
            actor, method, given = told
            pipe.send(getattr(actors[actor], method)(*given))
        logging.getLogger("torch_ros").setLevel(logging.ERROR)  # ranks do not leave at one instant
        for actor in actors.values():
            actor.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    except EOFError:
        return
    except BaseException:  # noqa: BLE001  # dcp's are no Exceptions; the parent shows it
        pipe.send(Failure(traceback.format_exc()))


@contextlib.contextmanager
def etcd_at(endpoint: str) -> Iterator[None]:
    """In here, and in children, "local" is an etcd that ends with this run."""
    if endpoint != "local":
        yield
        return
    before = os.environ.get(local.DIRECTORY)
    with tempfile.TemporaryDirectory(prefix="torch-ros-bench-") as directory:
        os.environ[local.DIRECTORY] = directory
        try:
            local.ensure()
            yield
        finally:
            with _undisturbed():
                local.stop(Path(directory))
            if before is None:
                del os.environ[local.DIRECTORY]
            else:
                os.environ[local.DIRECTORY] = before


# Measuring


def rounds(repeat: int, cases: Mapping[Case, Callable[[], Sample]]) -> dict[Case, list[Sample]]:
    """Every case once in every round, so that a noisy machine is noisy for all of them.

    The first round warms up and does not count. Each begins with another case: whatever one case
    leaves to the next, it is not always that.
    """
    samples: dict[Case, list[Sample]] = defaultdict(list)
    names = list(cases)
    for number in range(repeat + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            sample = cases[name]()
            if number:
                samples[name].append(sample)
        say(f"  round {number} of {repeat}" if number else "  warm-up")
    return samples


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls; one before them warms up."""
    call()
    return [seconds(call) for _ in range(count)]


def seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
