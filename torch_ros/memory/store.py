"""The store in one process: for tests, the simulator, and groups that live in one process."""

# ruff: noqa: ARG002  # every request has a `timeout_s`; memory answers sooner

import itertools
import math
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec.structs import replace

from torch_ros.errors import ClosedError, RequestTooLarge, UsageError
from torch_ros.store.aside import Aside
from torch_ros.store.txn import (
    Changes,
    Count,
    Created,
    Delete,
    Empty,
    Entry,
    Follow,
    Get,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Read,
    Reply,
    Sample,
    T,
    Txn,
    Unchanged,
    View,
    Watch,
    whole,
)

# etcd's own limits, so that what works here works there.
OPS_MAX = 128
TXN_BYTES_MAX = 1_572_864
# Older changes are compacted: a watch that starts before them returns at once.
CHANGES_MAX = 100_000

ABSENT = Entry(b"", 0, 0, 0)


class Space:
    """The state of an etcd: entries, leases and the latest changes. Callers hold `changed`.

    Args:
        clock: Seconds, for leases. A lease ends at the first access after its time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rev: int = 1
        self.changed: threading.Condition = threading.Condition()
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []  # sorted; the order of str is the order of its UTF-8
        self._changes: deque[tuple[int, str]] = deque(maxlen=CHANGES_MAX)
        self._lease_ids = itertools.count(1)
        self._leases: dict[int, tuple[float, int]] = {}  # id -> when it ends, its TTL

    def read(self, request: Read) -> View:
        entries: dict[str, Entry] = {}
        shown: list[Range] = []
        for asked, range_ in zip(request.ranges, whole(request.ranges), strict=True):
            found = self._get(asked)
            entries.update(found)
            if len(found) == len(self._keys_in(range_)):
                shown.append(range_)
        return View(self.rev, entries, tuple(shown), request.ranges)

    def commit(self, txn: Txn) -> Reply:
        _check(txn)
        if not all(map(self._lease_lives, txn.ops)):
            return Reply(applied=False, rev=self.rev)
        if not all(map(self._holds, txn.guards)):
            view = self.read(Read(txn.otherwise)) if txn.otherwise else None
            return Reply(applied=False, rev=self.rev, view=view)
        results = tuple(self._apply(txn.ops))
        return Reply(applied=True, rev=self.rev, results=results)

    def has_changed(self, watch: Watch) -> bool:
        """Whether something in the watch's ranges changed after its revision, or may have."""
        if watch.after_rev > self.rev:
            return True  # the store was wiped since
        for rev, key in reversed(self._changes):
            if rev <= watch.after_rev:
                return False
            if any(key in range_ for range_ in watch.ranges):
                return True
        return len(self._changes) == CHANGES_MAX

    def changes(self, request: Follow) -> Changes | None:
        """The changes that `request` asks for, if they may be told by now."""
        if request.after_rev > self.rev or self.has_changed(Watch((), request.after_rev, "")):
            return None  # wiped, or compacted
        new = itertools.takewhile(lambda c: c[0] > request.after_rev, reversed(self._changes))
        keys = {key for _, key in new if any(key in range_ for range_ in request.ranges)}
        return Changes(self.rev, {key: self._entries.get(key) for key in keys})

    def grant(self, ttl_s: int) -> int:
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = (self._clock() + ttl_s, ttl_s)
        self.changed.notify_all()  # who waits may have to wake earlier now
        return lease_id

    def keep_alive(self, lease_id: int) -> int:
        if lease_id not in self._leases:
            return 0
        _, ttl_s = self._leases[lease_id]
        self._leases[lease_id] = (self._clock() + ttl_s, ttl_s)
        return ttl_s

    def expire(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)
        held = [key for key, entry in self._entries.items() if entry.lease_id == lease_id]
        self._delete(held, self.rev + 1)

    def expire_due(self) -> None:
        while self._leases and self.next_end_s() <= 0:
            self.expire(min(self._leases, key=self._leases.__getitem__))

    def next_end_s(self) -> float:
        ends = min((ends for ends, _ in self._leases.values()), default=math.inf)
        return ends - self._clock()

    def _holds(self, guard: Guard) -> bool:
        match guard:
            case Unchanged(key, mod_rev):
                return self._entries.get(key, ABSENT).mod_rev == mod_rev
            case Created(key, create_rev):
                return self._entries.get(key, ABSENT).create_rev == create_rev
            case Empty(range_):
                return not self._keys_in(range_)
            case NoneNewer(range_, rev):
                return all(self._entries[key].mod_rev <= rev for key in self._keys_in(range_))

    def _lease_lives(self, op: Op) -> bool:
        return not isinstance(op, Put) or op.lease_id == 0 or op.lease_id in self._leases

    def _apply(self, ops: tuple[Op, ...]) -> Iterator[Mapping[str, Entry] | int]:
        rev = self.rev + 1
        for op in ops:
            match op:
                case Put():
                    self._put(op, rev)
                case Delete(range_):
                    self._delete(self._keys_in(range_), rev)
                case Get(range_, keys_only):
                    yield self._get(range_, keys_only=keys_only)
                case Count(range_):
                    yield len(self._keys_in(range_))

    def _put(self, put: Put, rev: int) -> None:
        old = self._entries.get(put.key)
        if old is None:
            insort(self._keys, put.key)
        create_rev = old.create_rev if old else rev
        self._entries[put.key] = Entry(put.value, create_rev, rev, put.lease_id)
        self._note(put.key, rev)

    def _delete(self, keys: list[str], rev: int) -> None:
        for key in keys:
            del self._entries[key]
            del self._keys[bisect_left(self._keys, key)]
            self._note(key, rev)

    def _note(self, key: str, rev: int) -> None:
        self.rev = rev
        self._changes.append((rev, key))
        self.changed.notify_all()

    def _get(self, range_: Range | Sample, *, keys_only: bool = False) -> dict[str, Entry]:
        keys = self._sample(range_) if isinstance(range_, Sample) else self._keys_in(range_)
        if keys_only:
            return {key: replace(self._entries[key], value=b"") for key in keys}
        return {key: self._entries[key] for key in keys}

    def _sample(self, sample: Sample) -> list[str]:
        keys = self._keys_in(sample.range)
        if not sample.before and len(keys) <= sample.most:
            return keys
        born = {key: self._entries[key].create_rev for key in keys}
        found = [key for key in keys if not sample.before or born[key] < sample.before]
        found.sort(key=born.__getitem__, reverse=not sample.is_oldest)
        return found[: sample.most]

    def _keys_in(self, range_: Range) -> list[str]:
        return self._keys[
            bisect_left(self._keys, range_.start) : bisect_left(self._keys, range_.end)
        ]


class MemoryKV:
    """A `KV` over a `Space`; several may share one, as connections share an etcd.

    Answers at once, so `timeout_s` matters to `wait` only.
    """

    def __init__(self, space: Space | None = None, *, endpoint: str = "memory://") -> None:
        self.endpoint = endpoint
        self._space = space or Space()
        self._is_closed = False

    def read(self, request: Read, *, timeout_s: float) -> View:
        return self._ask(lambda space: space.read(request))

    def commit(self, txn: Txn, *, timeout_s: float) -> Reply:
        return self._ask(lambda space: space.commit(txn))

    def wait(self, watch: Watch, *, timeout_s: float) -> bool:
        return _aside.run(lambda: self._wait(watch, timeout_s))

    def _wait(self, watch: Watch, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._open() as space:
                if space.has_changed(watch):
                    return True
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                # Nobody else may be there to notice that a lease ends.
                space.changed.wait(min(remaining_s, space.next_end_s()))

    def follow(self, request: Follow, *, timeout_s: float) -> Changes | None:
        self.wait(Watch(request.ranges, request.after_rev, ""), timeout_s=timeout_s)
        with self._open() as space:
            return space.changes(request)

    def grant(self, ttl_s: int, *, timeout_s: float) -> tuple[int, int]:
        return self._ask(lambda space: space.grant(ttl_s)), ttl_s

    def keep_alive(self, lease_id: int, *, timeout_s: float) -> int:
        return self._ask(lambda space: space.keep_alive(lease_id))

    def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        self._ask(lambda space: space.expire(lease_id))

    def close(self) -> None:
        _aside.run(self._close)

    def _close(self) -> None:
        with self._space.changed:
            self._is_closed = True
            self._space.changed.notify_all()

    def _ask(self, request: Callable[[Space], T]) -> T:
        def answer() -> T:
            with self._open() as space:
                return request(space)

        return _aside.run(answer)

    @contextmanager
    def _open(self) -> Iterator[Space]:
        with self._space.changed:
            if self._is_closed:
                raise ClosedError(f"{self.endpoint} was closed")
            self._space.expire_due()
            yield self._space


_spaces: dict[str, Space] = {}
_aside = Aside("torch_ros asks memory")


def named(name: str) -> MemoryKV:
    """A `MemoryKV` on the space that everyone in this process means by ``memory://name``."""
    return MemoryKV(_spaces.setdefault(name, Space()), endpoint=f"memory://{name}")


def _check(txn: Txn) -> None:
    """Refuse what etcd refuses."""
    if max(len(txn.guards), len(txn.ops)) > OPS_MAX:
        raise UsageError(f"a transaction has at most {OPS_MAX} guards and {OPS_MAX} operations")
    puts = [op for op in txn.ops if isinstance(op, Put)]
    if sum(len(put.key.encode()) + len(put.value) for put in puts) > TXN_BYTES_MAX:
        key, size_bytes = max((len(put.value), put.key) for put in puts)[::-1]
        raise RequestTooLarge("memory", key, size_bytes)
    deleted = [op.range for op in txn.ops if isinstance(op, Delete)]
    keys = {put.key for put in puts}
    if len(keys) < len(puts) or any(key in range_ for key in keys for range_ in deleted):
        raise UsageError("a transaction changes no key twice")
