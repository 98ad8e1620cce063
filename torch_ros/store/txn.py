"""Transactions and requests as plain values: what to do, never how.

The vocabulary is etcd's: a key has the revision that created it and the revision that last
changed it, a transaction is guards and operations, applied whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field


class Range(Struct, frozen=True):
    """The keys ``start <= key < end``, in byte order of their UTF-8."""

    start: str
    end: str

    def __contains__(self, key: str) -> bool:
        return self.start <= key < self.end


def one(key: str) -> Range:
    return Range(key, key + "\0")


def under(prefix: str) -> Range:
    """Every key that starts with `prefix`, which must end in an ASCII character below DEL."""
    return Range(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


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
    """No key is in `range`."""

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

    range: Range
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


class Reply(Struct, frozen=True):
    """What became of a `Txn`. `results`: one per `Get` and `Count` of its ops, in order."""

    applied: bool
    rev: int  # the store's revision when it was answered
    results: tuple[Mapping[str, Entry] | int, ...] = ()


UNKNOWN = Reply(applied=False, rev=0)  # the reply was lost: the txn may have applied; look again


class View(Struct, frozen=True):
    """Several ranges, read at one revision."""

    rev: int
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def unchanged(self, key: str) -> Unchanged:
        """The guard that says: nobody wrote `key` since this view."""
        entry = self.entries.get(key)
        return Unchanged(key, entry.mod_rev if entry else 0)

    def within(self, range_: Range) -> Iterator[tuple[str, Entry]]:
        """The keys of `range_` and their entries, in key order."""
        return ((key, self.entries[key]) for key in sorted(self.entries) if key in range_)


class Read(Struct, frozen=True):
    """Request. Reply: a `View` of all `ranges`."""

    ranges: tuple[Range, ...]


class Commit(Struct, frozen=True):
    """Request. Reply: a `Reply`; `UNKNOWN` when it was lost."""

    txn: Txn


class Watch(Struct, frozen=True):
    """Request. Reply: the seconds waited, until something in `ranges` may have changed after
    `after_rev`, or `limit_s` were over.

    May come early (a broken connection, a compacted revision), never late. `reason` is for
    people: it says what is waited for, in logs and in DeadlineExceeded.
    """

    ranges: tuple[Range, ...]
    after_rev: int
    reason: str
    limit_s: float = math.inf


Request = Read | Commit | Watch
T = TypeVar("T")
Steps = Generator[Request, Any, T]  # a loop that asks for its I/O
