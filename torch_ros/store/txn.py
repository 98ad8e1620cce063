"""Transactions and requests as plain values: what to do, never how.

The vocabulary is etcd's: a key has the revision that created it and the revision that last
changed it, a transaction is guards and operations, applied whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field


class Range(Struct, frozen=True):
    """The keys ``start <= key < end``, in byte order of their UTF-8."""

    start: str
    end: str

    def __contains__(self, key: str) -> bool:
        return self.start <= key < self.end


EVERYTHING = Range("", "\U0010ffff")


def one(key: str) -> Range:
    return Range(key, key + "\0")


def under(prefix: str) -> Range:
    """Every key that starts with `prefix`, which must end in an ASCII character below DEL."""
    return Range(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


SAMPLE_MAX = 32  # more records than these are many


class Sample(Struct, frozen=True):
    """In a `Read`: a few records of `range`, those created last (`is_oldest`: first).

    Watched, it is the whole range. `docs/protocol/samples.md` tells why.
    """

    range: Range
    most: int
    before: int = 0  # only records created before this revision; 0: all
    is_oldest: bool = False


def sample(range_: Range) -> Sample:
    """All of `range_` if that is not much."""
    return Sample(range_, SAMPLE_MAX)


Ranges = tuple[Range | Sample, ...]


def whole(ranges: Iterable[Range | Sample]) -> tuple[Range, ...]:
    return tuple(each.range if isinstance(each, Sample) else each for each in ranges)


class Unseen(Exception):
    """A rule cannot decide from samples: it wants to see `more` in their stead; if none, all."""

    def __init__(self, *more: Range | Sample) -> None:
        super().__init__(*more)
        self.more = more


class Entry(Struct, frozen=True):
    value: bytes  # b"" when only keys were asked for
    create_rev: int  # the same for as long as the record lives
    mod_rev: int  # changes with every write
    lease_id: int  # 0: no lease


class Unchanged(Struct, frozen=True):
    """`key` was last written at `mod_rev`; 0: it does not exist."""

    key: str
    mod_rev: int


class Created(Struct, frozen=True):
    """`key` is still the record created at `create_rev`, whatever its value is now."""

    key: str
    create_rev: int


class Empty(Struct, frozen=True):
    range: Range


class NoneNewer(Struct, frozen=True):
    """No key in `range` was written after `rev`. Deletions do not show."""

    range: Range
    rev: int


Guard = Unchanged | Created | Empty | NoneNewer


class Put(Struct, frozen=True):
    key: str
    value: bytes
    lease_id: int = 0


class Delete(Struct, frozen=True):
    range: Range


class Get(Struct, frozen=True):
    """Sees the operations that stand before it in the same transaction."""

    range: Range | Sample
    keys_only: bool = False


class Count(Struct, frozen=True):
    """Like `Get`, for the number of keys only."""

    range: Range


Op = Put | Delete | Get | Count


class Txn(Struct, frozen=True):
    """Apply all of `ops` if all of `guards` hold, else none. No key is put twice.

    etcd allows 128 guards and 128 operations; no transaction of ours has one per rank.
    """

    guards: tuple[Guard, ...] = ()
    ops: tuple[Op, ...] = ()
    otherwise: Ranges = ()  # read if a guard fails


class View(Struct, frozen=True):
    """Several ranges, or samples of them, read at one revision."""

    rev: int
    entries: Mapping[str, Entry] = field(default_factory=dict)
    shown: tuple[Range, ...] = (EVERYTHING,)  # here, a key that is not in `entries` does not exist
    asked: Ranges = ()  # what was read

    def shows(self, range_: Range) -> bool:
        """Whether all records of `range_` are here."""
        return any(all_.start <= range_.start and range_.end <= all_.end for all_ in self.shown)

    def has(self, range_: Range | Sample) -> bool:
        """Whether to read `range_` would add nothing: just that was read, or all of it is here."""
        return range_ in self.asked or all(map(self.shows, whole((range_,))))

    def after(self, changes: Changes) -> View:
        """The view at a later revision, of the ranges that it shows."""
        entries = {**self.entries, **changes.entries}
        there = {key: entry for key, entry in entries.items() if entry is not None}
        return View(changes.rev, there, self.shown, self.asked)

    def get(self, key: str) -> Entry | None:
        """The record, or None if there is none. Raises: Unseen: There may be one."""
        entry = self.entries.get(key)
        if entry is None and not self.shows(one(key)):
            raise Unseen
        return entry

    def unchanged(self, key: str) -> Unchanged:
        """The guard that says: nobody wrote `key` since this view."""
        entry = self.get(key)
        return Unchanged(key, entry.mod_rev if entry else 0)

    def within(self, range_: Range) -> Iterator[tuple[str, Entry]]:
        """Keys and entries of `range_`, in key order. Raises: Unseen: There may be others."""
        if not self.shows(range_):
            raise Unseen
        return self.seen(range_)

    def seen(self, range_: Range) -> Iterator[tuple[str, Entry]]:
        """As `within`, as far as they were read: what is not here may be there."""
        start, end = range_.start, range_.end
        keys = sorted(key for key in self.entries if start <= key < end)
        return ((key, self.entries[key]) for key in keys)


class Changes(Struct, frozen=True):
    """All that was written in some ranges, until `rev`; None: deleted."""

    rev: int
    entries: Mapping[str, Entry | None] = field(default_factory=dict)


class Reply(Struct, frozen=True):
    """The fate of a `Txn`. `results`: one per `Get` and `Count` of its ops, in order."""

    applied: bool
    rev: int  # the store's revision when it was answered
    results: tuple[Mapping[str, Entry] | int, ...] = ()
    view: View | None = None  # of what the txn wanted `otherwise`, if a guard failed


UNKNOWN = Reply(applied=False, rev=0)  # the reply was lost: the txn may have applied; look again


class Read(Struct, frozen=True):
    """Request. Reply: a `View` of all `ranges`."""

    ranges: Ranges


class Commit(Struct, frozen=True):
    """Request. Reply: a `Reply`; `UNKNOWN` when it was lost."""

    txn: Txn


class Watch(Struct, frozen=True):
    """Request. Reply: the seconds waited, until something in `ranges` may have changed after
    `after_rev`, or `limit_s` were over.

    May come early (a broken connection, a compacted revision), never late. `reason` is for
    people: it says what is waited for, in logs and in DeadlineExceeded; "": waiting is in order.
    `until` ends it too, and is asked every 2 s.
    """

    ranges: tuple[Range, ...]
    after_rev: int
    reason: str
    limit_s: float = math.inf
    until: Callable[[], bool] | None = None


class Follow(Struct, frozen=True):
    """Request. Reply: `Changes` in `ranges` after `after_rev`, once there are some, or after
    `limit_s`; None: they cannot be told, or it has waited for long, so read again.
    """

    ranges: tuple[Range, ...]
    after_rev: int
    reason: str
    limit_s: float = math.inf


Request = Read | Commit | Watch | Follow
T = TypeVar("T")
Steps = Generator[Request, Any, T]  # a loop that asks for its I/O
