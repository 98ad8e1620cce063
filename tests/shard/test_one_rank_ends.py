"""An error or Ctrl-C on one of two ranks, at any line of any call, ends the call on both, soon.

A trace function raises at the n-th line that a rank executes in the package, for n all over the
call. INTERRUPTS=1000 tries that many moments of each call.
"""
# needs features following, reading

import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from kit import inside, memory

import torch_ros
from torch_ros.errors import CallAborted, SeatLost, TorchRosError
from torch_ros.features.reading.reads import Given
from torch_ros.protocol import membership
from torch_ros.protocol.seating import _Taking
from torch_ros.shard.checkpoint import LoadRequest, SaveRequest
from torch_ros.shard.core import Shard
from torch_ros.store.loops import Wait
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks

PACKAGE = Path(torch_ros.__file__).parent
# Where Ctrl-C comes: the store in memory is asked by a thread that no signal reaches.
STRUCK = tuple(
    f"{PACKAGE / room}"
    for room in ("face", "features", "shard", "protocol", "store/run", "store/loops")
)
STORES = re.compile(r"[\w.]+ = \w+")
BEGINNINGS = (Shard.busy.__code__, _Taking.take.__code__)
QUICK, MANY = 3, int(os.environ.get("INTERRUPTS", "60"))
SOON_S, TIMEOUT_S = 8.0, 20.0


class Struck(BaseException):
    """In place of KeyboardInterrupt, which pytest takes for its own."""


def sees_no_signal(frame) -> bool:
    """Whether Python raises nothing at this line: it looks at signals at calls and ends of loops.

    So not at the ends of a `with`, nor where a plain value is stored, as in a `finally`.
    """
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return source.startswith(("with ", "try:")) or STORES.fullmatch(source) is not None


@contextmanager
def struck_at(line: int) -> Iterator[list[int]]:
    """Within, this thread raises at that line of the package which it executes; counted are all.

    Not before a call has begun, which is as if it had not been made.
    """
    count, has_begun = [0], False

    def trace(frame, event, _):
        nonlocal has_begun
        if not frame.f_code.co_filename.startswith(STRUCK):
            return None
        has_begun = has_begun or frame.f_code in BEGINNINGS
        if event == "line":
            count[0] += 1
            if has_begun and count[0] >= line > 0 and not sees_no_signal(frame):
                sys.settrace(None)
                raise Struck
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


@dataclass
class Pair:
    """Two ranks of a replica, and a trainer of which they read."""

    handles: list
    source: object
    tensors: list
    pool: ThreadPoolExecutor
    version: int = 0
    ended_s: list = field(default_factory=list)

    def both(self, call: Callable) -> list:
        def attempt(rank: int):
            try:
                return call(self.handles[rank])
            except TorchRosError as error:
                return error

        return list(self.pool.map(attempt, range(2)))

    def anew(self) -> int:
        """A newer version of the source."""
        self.version += 1
        self.source.unpublish()
        self.source.publish(self.version)
        return self.version

    def strike(self, call: Callable, line: int) -> tuple[object, int]:
        """Both make the call; rank 0 is struck. What rank 1 is told, and rank 0's lines."""
        began = threading.Barrier(2)

        def victim():
            began.wait()
            with struck_at(line) as count, suppress(Struck, TorchRosError):
                call(self.handles[0])
            return count[0]

        def peer():
            began.wait()
            began_s = time.monotonic()
            try:
                return call(self.handles[1])
            except TorchRosError as error:
                return error
            finally:
                self.ended_s.append(time.monotonic() - began_s)

        lines, told = self.pool.submit(victim), self.pool.submit(peer)
        return told.result(TIMEOUT_S + 20), lines.result(TIMEOUT_S + 20)


endpoint = pytest.fixture(memory)


@pytest.fixture
def pair(opened, pool):
    source = opened("source", {"w": torch.ones(100)})
    join = lambda rank: opened("pair", rank=rank, world_size=2, timeout_s=TIMEOUT_S, drain_s=1)
    handles = list(pool.map(join, range(2)))
    made = Pair(handles, source, [{"w": torch.zeros(100)} for _ in handles], pool)
    for handle, tensors in zip(handles, made.tensors, strict=True):
        handle.register(tensors)
    return made


def mine(pair: Pair, handle) -> dict:
    return pair.tensors[pair.handles.index(handle)]


def held(pair: Pair) -> None:
    pair.anew()
    assert pair.both(lambda h: h.update()) == [True, True]


def nothing_held(pair: Pair) -> None:
    pair.anew()
    pair.both(lambda h: h.unpublish())


def newer(pair: Pair) -> None:
    held(pair)
    pair.anew()


def to_publish(pair: Pair) -> None:
    pair.both(lambda h: h.unpublish())
    pair.source.unpublish()
    pair.version += 1


def was_read(pair: Pair) -> None:
    nothing_held(pair)
    pair.both(lambda h: h.read("latest", mine(pair, h)))


def first_of(handle) -> int:
    return next(iter(handle.follow(stop=lambda: False)))


def streamed(pair: Pair, handle) -> int:
    with handle.stream("latest", ["w"], buffer_bytes=1000) as stream:
        return len(list(stream))


def saved(pair: Pair, handle) -> None:
    """As `dcp.save`, whose ranks are processes."""
    state = LocalState(local_chunks(mine(pair, handle)), {}, {})
    handle.checkpoints.save(SaveRequest(pair.version, state))


def loaded(pair: Pair, handle) -> None:
    into = Given(inside(handle).tensors, mine(pair, handle))
    handle.checkpoints.load(LoadRequest("latest", None, into))


CALLS = {
    "publish": (to_publish, lambda p, h: h.publish(p.version)),
    "publish_copy": (to_publish, lambda p, h: h.publish_copy(p.version, mine(p, h))),
    "unpublish": (held, lambda p, h: h.unpublish()),
    "replicate": (nothing_held, lambda p, h: h.replicate()),
    "replicate if there": (nothing_held, lambda p, h: h.replicate(missing_ok=True)),
    "update": (newer, lambda p, h: h.update()),
    "update that waits": (newer, lambda p, h: h.update(wait_s=20)),
    "idle update": (held, lambda p, h: h.update()),
    "follow": (newer, lambda p, h: first_of(h)),
    "read": (held, lambda p, h: h.read("latest", mine(p, h))),
    "serve": (was_read, lambda p, h: h.serve()),
    "stream": (held, streamed),
    "save": (to_publish, saved),
    "load": (newer, loaded),
}


@pytest.mark.parametrize(
    "count", [QUICK, pytest.param(MANY, marks=pytest.mark.nightly)], ids=["quick", "many"]
)
def test_who_is_struck_in_open_ends_it_for_its_peer(opened, pool, monkeypatch, caplog, count):
    waits, line, lines = threading.Event(), [0], list[int]()
    take, join = _Taking.take, membership.join

    def struck_take(self, applicant, *args):
        if applicant.rank:
            return take(self, applicant, *args)
        with struck_at(line[0]) as counted:
            seat = take(self, applicant, *args)
        lines.append(counted[0])
        return seat

    def seen_join(view, who, nonce):
        step = join(view, who, nonce)
        if isinstance(step, Wait) and who.rank:
            waits.set()
        return step

    monkeypatch.setattr(_Taking, "take", struck_take)
    monkeypatch.setattr(membership, "join", seen_join)

    def ranks():
        waits.clear()
        options = {"world_size": 2, "timeout_s": TIMEOUT_S}
        peer = pool.submit(opened, f"pair{line[0]}", rank=1, **options)
        assert waits.wait(TIMEOUT_S)
        with suppress(Struck):
            opened(f"pair{line[0]}", rank=0, **options)
            return peer, False
        return peer, True

    assert ranks()[0].result(TIMEOUT_S).rank == 1
    for line[0] in [3 + n * lines[0] // count for n in range(count)]:
        (peer, is_struck), struck_s = ranks(), time.monotonic()
        if not is_struck:  # it took fewer lines this time
            assert peer.result(TIMEOUT_S).rank == 1
            continue
        name = f"pair{line[0]}"
        try:
            handle = peer.result(TIMEOUT_S)
        except CallAborted as error:
            assert "open of replica" in str(error)
        except SeatLost as error:  # it had not looked while all were there
            assert "closed its handle" in str(error)
        else:  # it had all that it needs
            with pytest.raises(SeatLost, match="closed its handle"):
                handle.register({"w": torch.ones(1)})
                handle.publish(1)
        assert time.monotonic() - struck_s < SOON_S, line
    line[0] = 0
    assert opened(name).version is None, "another start has the name"
    assert "was already there" not in caplog.text


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_duplicate_that_is_struck_in_open_ends_nobody(opened, pool, monkeypatch, is_complete):
    """A process opened a rank that another one has, and waits for that one's end."""
    join, mine = membership.join, threading.local()
    waits, waits_too, strikes = threading.Event(), threading.Event(), threading.Event()
    options = {"world_size": 2, "timeout_s": TIMEOUT_S}

    def struck_join(view, who, nonce):
        step = join(view, who, nonce)
        if isinstance(step, Wait):
            (waits_too if hasattr(mine, "is_duplicate") else waits).set()
        if hasattr(mine, "is_duplicate"):
            assert strikes.wait(TIMEOUT_S)
            raise Struck
        return step

    def duplicate():
        mine.is_duplicate = True
        with pytest.raises(Struck):
            opened("pair", rank=0, **options)
        del mine.is_duplicate

    monkeypatch.setattr(membership, "join", struck_join)
    first = pool.submit(opened, "pair", rank=0, **options)
    assert waits.wait(TIMEOUT_S)
    struck = pool.submit(duplicate)
    assert waits_too.wait(TIMEOUT_S)
    if not is_complete:
        strikes.set()
        struck.result(TIMEOUT_S)
    handles = [opened("pair", rank=1, **options), first.result(TIMEOUT_S)]
    strikes.set()
    struck.result(TIMEOUT_S)
    for rank, handle in enumerate(handles):
        handle.register({f"w{rank}": torch.ones(1)})
    assert list(pool.map(lambda handle: handle.publish(1), handles)) == [True, True]


def moments(lines: int, count: int) -> list[int]:
    """Lines all over the call, others for each count."""
    return sorted({(2 * i + 1) * lines // (2 * count) for i in range(count)})


@pytest.mark.timeout(20 * MANY)
@pytest.mark.parametrize(
    "count", [QUICK, pytest.param(MANY, marks=pytest.mark.long)], ids=["quick", "many"]
)
@pytest.mark.parametrize("name", CALLS)
def test_who_is_struck_in_a_call_ends_it_for_its_peer(pair, name, count):
    prepare, call = CALLS[name]
    made = lambda handle: call(pair, handle)
    prepare(pair)
    _, lines = pair.strike(made, 0)
    for line in moments(lines, count):
        registered(pair)
        prepare(pair)
        told, _ = pair.strike(made, line)
        assert pair.ended_s[-1] < SOON_S, f"line {line} of {lines}: {told!r}"
        go_on(pair, line)


def registered(pair: Pair) -> None:
    for handle in pair.handles:
        if handle.version is None:
            handle.unregister()
            handle.register(mine(pair, handle))


def go_on(pair: Pair, line: int) -> None:
    """Both ranks are in step: what comes next is one call for both."""
    told = pair.both(lambda h: h.unpublish())
    assert told == [None, None], f"line {line}: {told}"
    registered(pair)
    if pair.source.version is None:
        pair.version += 1
        pair.source.publish(pair.version)
    told = pair.both(lambda h: h.replicate(timeout_s=10))
    assert told == [pair.version] * 2, f"line {line}: {told}"
