"""A `torch.distributed.Store` whose records are in etcd: `keys` says which."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import operator
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]  # torch has it at run time

from torch_ros.deadline import Deadline
from torch_ros.errors import (
    BackendError,
    ClosedError,
    DeadlineExceeded,
    StoreUnavailable,
    TorchRosError,
    UsageError,
)
from torch_ros.printable import log_of
from torch_ros.store.distributed.keys import Blob, StoreKeys, inline, parsed
from torch_ros.store.distributed.lease import CLOSE_S, SharedLease
from torch_ros.store.distributed.once import Plan, Writer, ask, look
from torch_ros.store.endpoint import connect
from torch_ros.store.kv import KV
from torch_ros.store.run import RETRY_S, run
from torch_ros.store.txn import (
    UNKNOWN,
    Commit,
    Count,
    Delete,
    Empty,
    Entry,
    Get,
    Op,
    Put,
    Range,
    Steps,
    T,
    Txn,
    View,
    Watch,
    one,
)

log: logging.Logger = log_of(__name__)

TIMEOUT = timedelta(seconds=300)  # TCPStore's
TTL_S = 30
PIECE_BYTES_MAX = 1 << 20  # etcd refuses requests above 1.5 MiB
KEYS_PER_TXN = 40  # each takes up to three of the 128 operations that etcd allows

NUMBER = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")  # what C's strtoll reads of a text
INT64_MAX = 2**63 - 1

# torch holds the C++ half of a store only, and calls fail once the Python half is gone.
_open_stores: set[EtcdStore] = set()


@atexit.register
def _close_all() -> None:
    """Leave in good order: threads of grpc that outlive the interpreter may abort the process."""
    for store in list(_open_stores):
        with contextlib.suppress(Exception):
            store.close()


class EtcdStore(Store):
    """A store like `torch.distributed.TCPStore`, kept in etcd instead of in one process.

    Every client that names the same `endpoint` and `prefix` has the same keys, and no client is
    special: any of them may leave, and etcd may restart, without the others noticing more than a
    delay. Methods, arguments, results and exceptions are those of TCPStore, except that

    * `add` to a value that is no number raises DistStoreError (TCPStore's server ends);
    * who waits for a key that is set and at once deleted may go on waiting;
    * `get` of a key that is there never times out.

    Life of the keys: they hang on one lease, granted to the first client and renewed by all. They
    outlive the client that wrote them, and vanish `ttl_s` after the last one was closed or died.
    A job that starts again sooner must use another prefix, or finds what its predecessor left. If
    the lease ends under a client (etcd was out of reach of all clients for longer than `ttl_s`),
    its next call raises DistNetworkError. A client leaves by `close` or at exit, not when nobody
    refers to it any more: torch keeps only what C++ has of a store.

    Thread-safe; reads take no lock, and any number of threads may wait at once. A write is applied
    once, also when its reply is lost and it is sent again. Not usable in a child of ``fork()``:
    it raises ClosedError there, and everywhere after `close`.

    Queues raise NotImplementedError, as those of `torch.distributed.FileStore` do; so does
    `list_keys` through `torch.distributed.PrefixStore`, as torch does not pass it on to stores
    written in Python.

    Args:
        endpoint: "etcd://host:port[,host:port]", members of one cluster, or any other endpoint
            that `torch_ros.open` takes.
        prefix: Any text; names the store within the etcd, as an address does a TCPStore.
        timeout: How long opening, and later every call, may take; `set_timeout` changes it. A call
            that waits for a key raises DistStoreError after it, any other DistNetworkError when
            etcd has not answered. Negative: no limit.
        ttl_s: How long keys stay without any client. The first client's counts.
        keep: A key of this client has no lease: it stays until it is deleted. Where a client ends
            while it writes more than 1 MiB, so do pieces that no key names (`StoreKeys.blobs`).

    Raises:
        UsageError: An argument is not as above.
        AccessDenied: etcd does not let this process in.
        DistNetworkError: etcd did not answer within `timeout`.

    Cost: one round trip to etcd for `check`, `get` of what is there, `set` and `multi_set`; two for
    `add`, `append`, `compare_set` and `delete_key`, and more under contention. Values above 1 MiB
    take one more per MiB; they become visible as a whole.
    """

    def __init__(
        self,
        endpoint: str,
        prefix: str,
        *,
        timeout: timedelta = TIMEOUT,
        ttl_s: int = TTL_S,
        keep: bool = False,
    ) -> None:
        super().__init__()
        if not prefix:
            raise UsageError("the prefix of an EtcdStore is empty; name the job")
        if ttl_s < 1:
            raise UsageError(f"ttl_s is {ttl_s}; it has to be at least 1")
        self.set_timeout(timeout)
        self.endpoint: str = endpoint
        self.prefix: str = prefix
        self._keys, self._client, self._pid = StoreKeys(prefix), uuid.uuid4().hex, os.getpid()
        self._is_closed = False
        deadline = self._deadline("opening the store")
        try:
            self._kv = _connected(endpoint, deadline)
            try:
                self._lease = SharedLease(self._kv, self._keys.lease(), ttl_s, deadline)
            except BaseException:
                self._kv.close()
                raise
        except (StoreUnavailable, DeadlineExceeded) as error:
            raise DistNetworkError(str(error)) from error
        self._lease_id = 0 if keep else self._lease.id  # of the keys; marks have the lease anyway
        mark = functools.partial(self._keys.mark, self._client)
        self._writer = Writer(mark, self._lease.id)
        _open_stores.add(self)

    def __repr__(self) -> str:
        return f"EtcdStore({self.endpoint!r}, {self.prefix!r})"

    def close(self) -> None:
        """Leave the store; its keys stay as long as other clients do, or `ttl_s`. Idempotent.

        Calls that wait in other threads raise ClosedError. Takes at most about 4 s.
        """
        _open_stores.discard(self)
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        marks = Txn(ops=(Delete(self._keys.marks(self._client)),))
        try:
            self._kv.commit(marks, timeout_s=CLOSE_S)
        except TorchRosError as error:
            log.info("%r: its marks stay until its lease ends: %s", self, error)
        finally:
            self._kv.close()
            self._lease.close()

    # Values

    def set(self, key: str | bytes, value: str | bytes) -> None:
        self._assign(((_key(key), _value(value)),))

    def get(self, key: str | bytes) -> bytes:
        """The value, once there is one; DistStoreError after the timeout."""
        (value,) = self.multi_get([key])
        return value

    def add(self, key: str | bytes, value: int) -> int:
        """Add to the number at `key`, 0 if there is none; the sum, which wraps around at 64 bits.

        The value becomes the sum as decimal text.
        """
        amount = operator.index(value)
        if not -INT64_MAX - 1 <= amount <= INT64_MAX:
            raise TypeError(f"add: {amount} has more than 64 bits")

        def rule(old: bytes | None) -> tuple[bytes, int]:
            total = (0 if old is None else _number(key, old)) + amount
            total = (total + INT64_MAX + 1) % 2**64 - INT64_MAX - 1
            return str(total).encode(), total

        return self._update("add", key, rule)

    def compare_set(
        self, key: str | bytes, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Replace the value if it is `expected_value`; the value after that.

        A missing key is created if `expected_value` is empty; otherwise it stays missing, and the
        answer is `expected_value`.
        """
        expected, desired = _value(expected_value), _value(desired_value)

        def rule(old: bytes | None) -> tuple[bytes | None, bytes]:
            if old == expected or (old is None and not expected):
                return desired, desired
            return None, expected if old is None else old

        return self._update("compare_set", key, rule)

    def append(self, key: str | bytes, value: str | bytes) -> None:
        added = _value(value)
        self._update("append", key, lambda old: ((old or b"") + added, None))

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """The values, once all are there; DistStoreError after the timeout."""
        wanted = _key_list(keys)
        deadline = self._deadline("get")
        values: list[bytes] = []
        for batch in _batches(wanted):
            values += self._run(self._fetched(batch, deadline), deadline, wanted)
        return values

    def multi_set(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Set all. Up to 40 keys and 1 MiB at once; of more, readers may see a part."""
        if len(keys) != len(values):
            raise DistStoreError("multiSet keys and values vectors must be of same size")
        # The last of several values for one key counts, as if they were set in turn.
        pairs = dict(zip(_key_list(keys), map(_value, values), strict=True))
        for batch in _batches(list(pairs.items()), size=lambda pair: len(pair[1])):
            self._assign(batch)

    # Keys

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | None = None) -> None:
        """Return once all of `keys` are there; DistStoreError after `timeout`.

        With several keys, each is there at some time during the call.
        """
        wanted = _key_list(keys)
        deadline = self._deadline("wait", timeout)
        for batch in _batches(wanted):
            self._run(self._present(batch), deadline, wanted)

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all of `keys` are there now."""
        wanted = _key_list(keys)
        deadline = self._deadline("check")
        counts = [Count(one(self._keys.value(key))) for key in wanted]
        return all(
            all(self._run(ask(*batch), deadline, wanted).results) for batch in _batches(counts)
        )

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a value. Whether there was one."""
        name = _key(key)
        head = self._keys.value(name)

        def plan(view: View) -> Steps[Plan[bool] | None]:
            yield from ()
            found = view.entries.get(head)
            if found is None:
                return Plan(answer=False)
            ops = (Delete(one(head)), *self._without_blob(name, found))
            return Plan(answer=True, guards=(view.unchanged(head),), ops=ops)

        return self._write("delete_key", name, (Get(one(head)),), plan)

    def num_keys(self) -> int:
        """How many keys have a value."""
        counted = ask(Count(self._keys.everything()))
        (count,) = self._run(counted, self._deadline("num_keys"), []).results
        assert isinstance(count, int)
        return count

    def list_keys(self) -> list[str]:
        """All keys that have a value, in their own order."""
        range_ = self._keys.everything()
        looked = look(Get(range_, keys_only=True))
        view = self._run(looked, self._deadline("list_keys"), [])
        names = (key.removeprefix(range_.start) for key in view.entries)
        return sorted(unquote_to_bytes(name).decode() for name in names)

    # What torch asks of a store

    def clone(self) -> EtcdStore:
        """This store: it may be used by any number of threads, and has one timeout."""
        return self

    def has_extended_api(self) -> bool:
        return True

    def _refuse_queue(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            "EtcdStore has no queues; number the items with add(), set() each under its number, "
            "and get() them in turn"
        )

    queue_push: Callable[..., NoReturn] = _refuse_queue
    queue_pop: Callable[..., NoReturn] = _refuse_queue
    queue_len: Callable[..., NoReturn] = _refuse_queue

    # torch's C++ looks for these names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # How

    def _deadline(self, what: str, timeout: timedelta | float | None = None) -> Deadline:
        """The end of a call, after `timeout` or else the store's; negative: never."""
        # The base class has a timeout, and its stub has none.
        chosen = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        seconds = chosen.total_seconds() if isinstance(chosen, timedelta) else float(chosen)
        return Deadline(f"{what} ({self!r})", math.inf if seconds < 0 else seconds)

    def _check(self) -> None:
        """Raises: ClosedError, BackendError: No call can be made any more, nor go on."""
        if self._is_closed:
            raise ClosedError(f"{self!r} was closed")
        if os.getpid() != self._pid:
            raise ClosedError(f"{self!r} was opened before fork(); open it again here")
        self._lease.check()

    def _run(self, steps: Steps[T], deadline: Deadline, keys: Iterable[bytes]) -> T:
        """Perform `steps`, with TCPStore's errors in place of ours; `keys` are named in these."""
        try:
            return run(steps, self._kv, deadline, check=self._check)
        except DeadlineExceeded as error:
            waited_ms = f"{deadline.timeout_s * 1000:.0f}ms"
            named = ", ".join(key.decode(errors="replace") for key in keys)
            raise DistStoreError(f"wait timeout after {waited_ms}, keys: {named}") from error
        except BackendError as error:
            raise DistNetworkError(str(error)) from error

    def _present(self, keys: Sequence[bytes]) -> Steps[None]:
        """Wait until each of `keys` was there once."""
        heads = [one(self._keys.value(key)) for key in keys]
        while True:
            reply = yield from ask(*map(Count, heads))
            missing = [at for at, count in enumerate(reply.results) if not count]
            if not missing:
                return
            # One is enough to watch: there is no end before it comes.
            reason = f"{len(missing)} of {len(keys)} keys, such as {keys[missing[0]]!r}, not set"
            yield Watch((heads[missing[0]],), reply.rev, reason)
            if len(missing) > 1:
                # The others are likely on their way; each look costs one count per key.
                heads, keys = [heads[at] for at in missing], [keys[at] for at in missing]

    def _fetched(self, keys: Sequence[bytes], deadline: Deadline) -> Steps[list[bytes]]:
        """The values, once all are there; read again if one is deleted or replaced meanwhile."""
        heads = [self._keys.value(key) for key in keys]
        while True:
            found = (yield from look(*(Get(one(head)) for head in heads))).entries
            if len(found) < len({*heads}):  # a key may be given twice
                yield from self._present(keys)
                deadline.check("a key was always deleted before it was read")
                continue
            values = []
            for key, head in zip(keys, heads, strict=True):
                value = yield from self._value_of(key, found[head])
                if value is None:
                    break
                values.append(value)
            else:
                return values
            deadline.check("it was always replaced while it was read")

    def _value_of(self, key: bytes, entry: Entry) -> Steps[bytes | None]:
        """The value that `entry` stands for; None if it was replaced meanwhile."""
        found = parsed(entry.value)
        if isinstance(found, bytes):
            return found
        pieces = []
        for index in range(found.pieces):
            piece_key = self._keys.piece(key, found.name, index)
            piece = (yield from look(Get(one(piece_key)))).entries.get(piece_key)
            if piece is None:
                return None
            pieces.append(piece.value)
        return b"".join(pieces)

    def _stored(self, key: bytes, value: bytes) -> Steps[tuple[bytes, tuple[Range, ...]]]:
        """The record that stands for `value`, whose pieces are in the store by then."""
        if len(value) <= PIECE_BYTES_MAX:
            return inline(value), ()
        starts = range(0, len(value), PIECE_BYTES_MAX)
        blob = Blob(uuid.uuid4().hex, len(starts))
        for index, start in enumerate(starts):
            piece = value[start : start + PIECE_BYTES_MAX]
            put = Put(self._keys.piece(key, blob.name, index), piece, self._lease_id)
            reply = UNKNOWN
            while reply is UNKNOWN:  # it may be put twice: nobody else writes or reads it yet
                reply = yield Commit(Txn(ops=(put,)))
            if not reply.applied:
                self._lease.compare(View(0))
        return blob.record(), (self._keys.blob(key, blob.name),)

    def _without_blob(self, key: bytes, entry: Entry | None) -> Iterator[Delete]:
        """The keys that become garbage with `entry`."""
        if entry is not None and isinstance(blob := parsed(entry.value), Blob):
            yield Delete(self._keys.blob(key, blob.name))

    def _assign(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Set all of `pairs` in one transaction, and drop the blobs of the values before."""
        heads = [self._keys.value(key) for key, _ in pairs]
        stored: list[tuple[bytes, tuple[Range, ...]]] = []

        def plan(view: View) -> Steps[Plan[None] | None]:
            if not stored:
                for key, value in pairs:
                    stored.append((yield from self._stored(key, value)))
            ops: list[Op] = []
            for (key, _), head, (record, _) in zip(pairs, heads, stored, strict=True):
                ops.append(Put(head, record, self._lease_id))
                ops += self._without_blob(key, view.entries.get(head))
            guards = tuple(map(view.unchanged, heads))
            return Plan(None, guards, tuple(ops), tuple(b for _, blobs in stored for b in blobs))

        first = None
        if all(len(value) <= PIECE_BYTES_MAX for _, value in pairs):
            # Most keys never had a large value, and then nothing has to be read first.
            guards = tuple(Empty(self._keys.blobs(key)) for key, _ in pairs)
            puts = tuple(
                Put(head, inline(value), self._lease_id)
                for head, (_, value) in zip(heads, pairs, strict=True)
            )
            first = Plan(None, guards, puts)
        looks = tuple(Get(one(head)) for head in heads)
        self._write("set", pairs[0][0], looks, plan, first)

    def _update(
        self, what: str, key: str | bytes, rule: Callable[[bytes | None], tuple[bytes | None, T]]
    ) -> T:
        """Replace the value by what `rule` makes of it, unless that is None; the rule's answer."""
        name = _key(key)
        head = self._keys.value(name)

        def plan(view: View) -> Steps[Plan[T] | None]:
            found = view.entries.get(head)
            old = None
            if found is not None:
                old = yield from self._value_of(name, found)
                if old is None:  # replaced meanwhile: look again
                    return None
            new, answer = rule(old)
            if new is None:
                return Plan(answer)
            record, blobs = yield from self._stored(name, new)
            put = Put(head, record, self._lease_id)
            ops: tuple[Op, ...] = (put, *self._without_blob(name, found))
            return Plan(answer, (view.unchanged(head),), ops, blobs)

        return self._write(what, name, (Get(one(head)),), plan)

    def _write(
        self,
        what: str,
        key: bytes,
        gets: tuple[Get, ...],
        plan: Callable[[View], Steps[Plan[T] | None]],
        first: Plan[T] | None = None,
    ) -> T:
        """Write at most once: `first`, or what `plan` makes of `gets`; None: look again."""

        def planned(view: View) -> Steps[Plan[T] | None]:
            self._lease.compare(view)
            return plan(view)

        deadline = self._deadline(what)
        gets = (Get(one(self._lease.key)), *gets)
        return self._run(self._writer.write(gets, planned, deadline, first=first), deadline, [key])


def _connected(endpoint: str, deadline: Deadline) -> KV:
    while True:  # the store may start later than its clients do
        try:
            return connect(endpoint, timeout_s=max(0.5, deadline.left_s()))
        except StoreUnavailable:
            if deadline.left_s() < RETRY_S:
                raise
            time.sleep(RETRY_S)


def _batches(found: Sequence[T], size: Callable[[T], int] = lambda _: 0) -> Iterator[Sequence[T]]:
    """`found` in parts that one transaction can have; what is too large alone counts nothing."""
    batch: list[T] = []
    total = 0
    for item in found:
        added = size(item) if size(item) <= PIECE_BYTES_MAX else 0
        if batch and (len(batch) == KEYS_PER_TXN or total + added > PIECE_BYTES_MAX):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += added
    if batch:
        yield batch


def _key_list(keys: Sequence[str | bytes]) -> list[bytes]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys is {keys!r}; it has to be a list of keys")
    return [_key(key) for key in keys]


def _bytes(what: str, given: str | bytes | bytearray) -> bytes:
    if isinstance(given, str):
        try:
            return given.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"a {what} is not text that UTF-8 can say: {given!r}") from error
    if isinstance(given, (bytes, bytearray)):
        return bytes(given)
    raise TypeError(f"a {what} is a {type(given).__name__}; it has to be str or bytes")


_key, _value = functools.partial(_bytes, "key"), functools.partial(_bytes, "value")


def _number(key: str | bytes, text: bytes) -> int:
    """The number that C reads in `text`; it ignores what follows it."""
    found = NUMBER.match(text)
    number = int(found[1]) if found and len(found[1]) <= len(str(INT64_MAX)) + 1 else None
    if number is None or not -INT64_MAX - 1 <= number <= INT64_MAX:
        raise DistStoreError(f"add: the value of {key!r} is {text[:40]!r}, not a 64-bit number")
    return number
