"""Dangers of a GPU, each a small piece: it works, or one sentence says why, within seconds.

The piece's own process is the trainer; a reader is forked before anything is begun on the card.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Timer
from typing import Any

import tensors as contents
import torch
from card import Card, Row, outcome, speed
from harness import Actors, Child, ChildFailed, seconds, started

import torch_ros
from torch_ros import Float8
from torch_ros.errors import ClosedError, TorchRosError

COUNT = 8
GIB = 0.5
WAIT_S = 30.0
TTL_S = 2
SILENT = 0.02  # of torch's copy: a read that is slower, and says nothing, is a trap
SENTENCE_S = 1.0
NOW_S = 0.02  # from the beginning of a read until one of its ends is killed
ENDS_S = 20.0


class Reader:
    """In a process of its own, which begins when it is told to."""

    def __init__(self, card: Card, name: str, size_bytes: int) -> None:
        self._card, self._name, self._size_bytes = card, name, size_bytes
        self.tensors: dict[str, torch.Tensor] = {}
        self._handle: Any = None
        self._replay: Callable[[], object] = lambda: None
        self._made: dict[str, torch.Tensor] = {}

    def begin(self, environment: Mapping[str, str], **options: Any) -> None:
        os.environ.update(environment)
        self.tensors = self._card.tensors(self._size_bytes, COUNT)
        self._handle = torch_ros.open(self._name, replica="reader", **options)
        self._handle.register(self.tensors)

    def copy(self) -> float:
        """The time of torch's own copy of these tensors."""
        others = {name: torch.empty_like(each) for name, each in self.tensors.items()}
        return self._card.usual(lambda: [others[n].copy_(t) for n, t in self.tensors.items()])

    def read(self, version: int) -> float:
        return seconds(lambda: self._handle.update(version, timeout_s=WAIT_S))

    def verify(self, version: int) -> None:
        contents.verify(self.tensors, version)

    def capture(self) -> None:
        """A graph that holds the registered tensors."""
        self._made = {name: torch.empty_like(each) for name, each in self.tensors.items()}

        def call() -> None:
            for name, each in self.tensors.items():
                self._made[name].copy_(each)

        self._replay = self._card.captured(call, lambda: None)

    def replay(self, version: int) -> None:
        self._replay()
        self._card.synchronize()
        contents.verify(self._made, version)

    def read_beside(self, version: int) -> None:
        """Kernels of other streams still copy the old content when the read begins."""
        self._made = {name: torch.empty_like(each) for name, each in self.tensors.items()}
        with self._card.side():
            self._card.busy()
            for name, each in self.tensors.items():
                self._made[name].copy_(each)
        self.read(version)
        with self._card.side():
            later = {name: each.clone() for name, each in self.tensors.items()}
        self._card.synchronize()
        contents.verify(self._made, version - 1)
        contents.verify(later, version)

    def borrow(self, version: int) -> None:
        with self._handle.borrow(version) as tensors:
            contents.verify(tensors, version)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close(linger_s=0)


class Source:
    """A trainer that is killed."""

    def __init__(self, card: Card, name: str, size_bytes: int) -> None:
        self._card, self._name, self._size_bytes = card, name, size_bytes
        self._handle: Any = None

    def begin(self) -> None:
        self.tensors = self._card.tensors(self._size_bytes, COUNT)
        self._handle = torch_ros.open(self._name, replica="source", ttl_s=TTL_S)
        self._handle.register(self.tensors)
        contents.write(self.tensors, 1)
        self._handle.publish(1)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close(linger_s=0)


@dataclass
class Pair:
    """A trainer here, and its reader."""

    card: Card
    child: Child
    name: str
    size_bytes: int
    tensors: dict[str, torch.Tensor]
    handle: torch_ros.ShardHandle
    version: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def publish(self) -> int:
        self.handle.unpublish()
        self.version += 1
        contents.write(self.tensors, self.version)
        self.handle.publish(self.version)
        return self.version

    def moved(self) -> float:
        """The time of a read whose result is right."""
        taken_s = self.child.ask("it", "read", self.publish())
        self.child.ask("it", "verify", self.version)
        return float(taken_s)


@contextmanager
def pair(card: Card, *, begins: bool = True, gib: float = GIB, **options: Any) -> Iterator[Pair]:
    name, size = f"danger-{secrets.token_hex(4)}", card.size_bytes(gib)

    def reader() -> Actors:
        return {"it": Reader(card, name, size)}

    with started({"reader": reader}, "fork") as (child,):
        tensors = card.tensors(size, COUNT)
        with torch_ros.open(name, replica="trainer", ttl_s=TTL_S, **options) as handle:
            handle.register(tensors)
            if begins:
                child.ask("it", "begin", {})
            yield Pair(card, child, name, size, tensors, handle)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The way a call went: its time, and the error that it raised."""

    took_s: float
    error: Exception | None

    def __str__(self) -> str:
        if self.error is None:
            return f"went well, in {self.took_s:.2f} s"
        lines = str(self.error).strip().splitlines() or [""]
        return f"{type(self.error).__name__} in {self.took_s:.2f} s: {lines[-1]}"


def attempted(call: Callable[[], object]) -> Attempt:
    began_s = time.monotonic()
    try:
        call()
    except (TorchRosError, RuntimeError, ChildFailed, AssertionError, OSError) as error:
        return Attempt(time.monotonic() - began_s, error)
    return Attempt(time.monotonic() - began_s, None)


def works(what: str, call: Callable[[], object]) -> Row:
    tried = attempted(call)
    return outcome(what, tried, "works", is_met=tried.error is None)


def expandable(card: Card) -> Iterator[Row]:
    """Segments that can grow, at both ends."""
    with pair(card) as two:
        is_met = card.grows() if card.is_gpu else None
        yield outcome("segments can grow", card.grows(), "True", is_met=is_met)
        own_s = two.child.ask("it", "copy")
        taken_s: list[float] = []
        tried = attempted(lambda: taken_s.extend((two.moved(), two.moved())))
        aim = f">= {SILENT:g} of torch's copy, or a sentence in {SENTENCE_S:g} s"
        if tried.error is None:
            row = speed("read", two.size_bytes, taken_s[-1], own_s)
            is_met = row.ratio is not None and row.ratio >= SILENT
            yield Row(row.what, row.found, row.ratio, aim, is_met)
        else:
            is_met = "NotSupported" in str(tried) and tried.took_s <= SENTENCE_S
            yield outcome("read", tried, aim, is_met=is_met)


def segments(card: Card) -> Iterator[Row]:
    """The allocator gives segments back, beside what is registered and below it."""
    with pair(card) as two:
        two.moved()
        junk = card.tensors(two.size_bytes, 1)
        two.moved()
        del junk
        card.give_back()
        yield works("empty_cache() beside registered tensors", two.moved)
        current = dict(two.tensors)
        two.handle.unpublish()
        two.handle.unregister()
        two.handle.register(lambda: current)
        two.tensors = current
        two.moved()
        two.handle.unpublish()
        for name in [*current]:
            del current[name]
        card.give_back()
        junk = card.tensors(two.size_bytes // 2, 3)  # others get the old addresses
        current.update(card.tensors(two.size_bytes, COUNT))
        yield works("registered tensors get other memory", two.moved)
        del junk


def graphs(card: Card) -> Iterator[Row]:
    """A graph that holds what is read into; a capture while a peer reads from this process."""
    with pair(card) as two:
        two.moved()
        two.child.ask("it", "capture")
        two.moved()
        yield works(
            "a graph sees what was read", lambda: two.child.ask("it", "replay", two.version)
        )
        version = two.publish()
        ones = torch.ones(1000, device=card.device)

        def add() -> None:
            ones.add_(1)

        def read() -> None:
            two.child.ask("it", "read", version)

        yield works("a capture while a peer reads", lambda: card.captured(add, read))
        yield works("what that peer read", lambda: two.child.ask("it", "verify", version))


def names(card: Card) -> Iterator[Row]:
    """The reader sees the same card under another spelling."""
    with pair(card, begins=False) as two:
        environment = dict(card.other_names())
        two.child.ask("it", "begin", environment)
        own_s = two.child.ask("it", "copy")
        two.moved()
        row = speed(f"read, {environment}", two.size_bytes, two.moved(), own_s)
        is_met = row.ratio is not None and row.ratio >= SILENT
        yield Row(row.what, row.found, row.ratio, f">= {SILENT:g} of torch's copy", is_met)


def streams(card: Card) -> Iterator[Row]:
    """Content that a side stream writes, and old content that one still reads."""
    with pair(card) as two:
        two.moved()
        two.handle.unpublish()
        two.version += 1
        with card.side():
            card.busy()
            contents.write(two.tensors, two.version)
        two.handle.publish(two.version)  # waits for kernels of all streams
        read = attempted(lambda: two.child.ask("it", "read", two.version))
        yield outcome(
            "a read of what a side stream writes", read, "works", is_met=read.error is None
        )
        yield works("what was read", lambda: two.child.ask("it", "verify", two.version))
        version = two.publish()
        yield works(
            "a read into what side streams use", lambda: two.child.ask("it", "read_beside", version)
        )


def fork(card: Card) -> Iterator[Row]:
    """A child that is forked after CUDA and the handle have begun."""
    with pair(card) as two:
        two.moved()
        began_s = time.monotonic()
        if not (forked := os.fork()):
            try:
                told = attempted(lambda: two.handle.publish(two.version + 1))
                os._exit(7 if isinstance(told.error, ClosedError) else 1)
            finally:
                os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        found = f"exit status {status} in {time.monotonic() - began_s:.2f} s"
        yield outcome("a call in the child", found, "ClosedError (7)", is_met=status == 7)
        yield works("the parent afterwards", two.moved)


def memory(card: Card) -> Iterator[Row]:
    """Too little memory for the buffers of a copy; and for what quantising takes."""
    with pair(card) as two:
        matrices = card.matrices(two.size_bytes)
        small = dict([*matrices.items()][:2])

        def copied(these: dict[str, torch.Tensor], transform: Float8 | None) -> None:
            two.version += 1
            two.handle.publish_copy(two.version, these, transform=transform)

        two.moved()
        held = two.handle.version
        for what, transform, left_bytes in (
            ("no room for buffers", None, 16 << 20),
            ("no room to quantise in", Float8(["*"]), 48 << 20),
        ):
            these = matrices if transform is None else small | {"m": stacked(card, small)}
            # Two buffers of half the size.
            buffers = sum(each.nbytes for each in these.values()) if transform else 0
            with card.short_of_memory(left_bytes + buffers):
                tried = attempted(lambda these=these, how=transform: copied(these, how))
            is_met = tried.error is not None if card.is_gpu else None
            yield outcome(what, tried, "an error", is_met=is_met)
            if tried.error is not None:
                is_kept = two.handle.version == held
                yield outcome("held still", two.handle.version, str(held), is_met=is_kept)
        yield works("a copy, with room again", lambda: copied(matrices, None))
        yield works("in place, afterwards", two.moved)


def stacked(card: Card, matrices: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A matrix of long rows, which are quantised at once."""
    each = next(iter(matrices.values()))
    return each.reshape(1, -1).repeat(4, 1) if card.is_gpu else each


def lent(card: Card) -> Iterator[Row]:
    """A copy on the card is not lent, and one in host memory is."""
    with pair(card, borrow_bytes=1 << 40) as two:
        for version, to in ((1, None), (2, "cpu")):
            contents.write(two.tensors, version)
            two.handle.publish_copy(version, two.tensors, to=to)
            tried = attempted(lambda version=version: two.child.ask("it", "borrow", version))
            what = f"borrow of a copy {'in host memory' if to else 'on the card'}"
            if to is None and card.is_gpu:
                is_met = "NotSupported" in str(tried.error) and tried.took_s <= SENTENCE_S
                yield outcome(what, tried, f"NotSupported in {SENTENCE_S:g} s", is_met=is_met)
                return  # the reader has ended with its error
            yield outcome(what, tried, "works", is_met=tried.error is None)


def lent_to_host(card: Card) -> Iterator[Row]:
    with pair(card, borrow_bytes=1 << 40) as two:
        contents.write(two.tensors, 1)
        two.handle.publish_copy(1, two.tensors, to="cpu")
        yield works("borrow of a copy in host memory", lambda: two.child.ask("it", "borrow", 1))


def deaths(card: Card) -> Iterator[Row]:
    """Kill -9 of a reader, then of a source, in the middle of a read."""
    with pair(card, gib=8 * GIB) as two:
        two.moved()
        two.child.tell("it", "read", (two.publish(),))
        time.sleep(NOW_S)
        two.child.process.kill()
        two.child.process.join()
        tried = attempted(two.handle.unpublish)
        is_met = tried.error is None and tried.took_s <= ENDS_S
        yield outcome("unpublish after its reader died", tried, f"<= {ENDS_S:g} s", is_met=is_met)


def lost(card: Card) -> Iterator[Row]:
    name, size = f"danger-{secrets.token_hex(4)}", card.size_bytes(8 * GIB)

    def source() -> Actors:
        return {"it": Source(card, name, size)}

    with started({"source": source}, "fork") as (child,):
        tensors = card.tensors(size, COUNT)
        with torch_ros.open(name, replica="reader", ttl_s=TTL_S) as handle:
            handle.register(tensors)
            child.ask("it", "begin")
            killer = Timer(NOW_S, child.process.kill)
            killer.start()
            tried = attempted(lambda: handle.replicate(1, timeout_s=WAIT_S))
            killer.join()
            aim = f"an error of ours, or a whole version, in {ENDS_S:g} s"
            is_ours = tried.error is None or isinstance(tried.error, TorchRosError)
            yield outcome(
                "a read whose source dies", tried, aim, is_met=is_ours and tried.took_s <= ENDS_S
            )
            if tried.error is None:
                yield works("what was read", lambda: contents.verify(tensors, 1))
