"""The library's store in memory, with indexes: the same answers among ten thousand replicas."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from torch_ros.memory.store import ABSENT, Space
from torch_ros.store.txn import (
    Created,
    Empty,
    Entry,
    Guard,
    NoneNewer,
    Put,
    Range,
    Read,
    Reply,
    Sample,
    Txn,
    Unchanged,
    View,
    Watch,
    whole,
)

NAMES = 4  # parts of a key before the first folder that is asked for: "", root, model, kind

Ages = list[tuple[int, str]]  # (revision, key), in order


def folders(key: str) -> list[str]:
    """The folders that a key lies in, which are what most ranges are."""
    parts = key.split("/")
    return ["/".join(parts[:n]) + "/" for n in range(NAMES, len(parts))]


def folder(range_: Range) -> str:
    """The folder that a range is; "": it is something else."""
    start = range_.start
    return start if start.endswith("/") and range_.end == start[:-1] + "0" else ""


class IndexedSpace(Space):
    """A `Space` of one thread. Leases end when `expire` is called, not by themselves.

    Args:
        changed: Called with the keys that a change was made to, after each of them.
    """

    def __init__(self, clock: Callable[[], float], changed: Callable[[Sequence[str]], None]):
        super().__init__(clock)
        self.changed = SimpleNamespace(notify_all=lambda: None)
        self._tell = changed
        self._touched: list[str] = []
        self._born: defaultdict[str, Ages] = defaultdict(list)
        self._written: defaultdict[str, Ages] = defaultdict(list)
        self._last: dict[str, int] = {}  # the last change of a key or a folder, also a deletion
        self._leased: defaultdict[int, dict[str, None]] = defaultdict(dict)

    def commit(self, txn: Txn) -> Reply:
        reply = super().commit(txn)
        self._told()
        return reply

    def expire(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)
        self._delete(list(self._leased.pop(lease_id, ())), self.rev + 1)
        self._told()

    def ends_s(self, lease_id: int) -> float | None:
        """The time at which a lease ends; None: it has ended."""
        return self._leases[lease_id][0] if lease_id in self._leases else None

    def read(self, request: Read) -> View:
        entries: dict[str, Entry] = {}
        shown: list[Range] = []
        for asked, range_ in zip(request.ranges, whole(request.ranges), strict=True):
            found = self._get(asked)
            entries.update(found)
            if asked is range_ or len(found) == self._count(range_):
                shown.append(range_)
        return View(self.rev, entries, tuple(shown), request.ranges)

    def has_changed(self, watch: Watch) -> bool:
        def last(range_: Range) -> int:
            name = folder(range_) or range_.start
            if folder(range_) or range_.end == name + "\0":
                return self._last.get(name, 0)
            inside = (rev for key, rev in self._last.items() if key in range_)
            return max(inside, default=0)

        return watch.after_rev > self.rev or any(last(r) > watch.after_rev for r in watch.ranges)

    # Answers for which `Space` looks at everything

    def _told(self) -> None:
        if self._touched:
            keys, self._touched = self._touched, []
            self._tell(keys)

    def _note(self, key: str, rev: int) -> None:
        self.rev = rev
        self._changes.append((rev, key))
        self._touched.append(key)
        self._last[key] = rev
        for name in folders(key):
            self._last[name] = rev

    def _put(self, put: Put, rev: int) -> None:
        old = self._entries.get(put.key)
        if old is not None:
            self._leased[old.lease_id].pop(put.key, None)
        self._leased[put.lease_id][put.key] = None
        super()._put(put, rev)
        entry = self._entries[put.key]
        for name in folders(put.key):
            if old is None:
                insort(self._born[name], (entry.create_rev, put.key))
            else:
                _remove(self._written[name], (old.mod_rev, put.key))
            insort(self._written[name], (entry.mod_rev, put.key))

    def _delete(self, keys: list[str], rev: int) -> None:
        for key in keys:
            entry = self._entries[key]
            if entry.lease_id in self._leased:
                self._leased[entry.lease_id].pop(key, None)
            for name in folders(key):
                _remove(self._born[name], (entry.create_rev, key))
                _remove(self._written[name], (entry.mod_rev, key))
        super()._delete(keys, rev)

    def _count(self, range_: Range) -> int:
        if name := folder(range_):
            return len(self._born[name])
        return bisect_left(self._keys, range_.end) - bisect_left(self._keys, range_.start)

    def _sample(self, sample: Sample) -> list[str]:
        name = folder(sample.range)
        if not name:
            return super()._sample(sample)
        born = self._born[name]
        if not sample.before and len(born) <= sample.most:
            return self._keys_in(sample.range)
        end = bisect_left(born, (sample.before, "")) if sample.before else len(born)
        if sample.is_oldest:
            some = born[: min(sample.most, end)]
        else:
            start = max(0, end - sample.most)
            while start > 0 and born[start - 1][0] == born[start][0]:
                start -= 1  # keys of one transaction are taken in their order
            some = sorted(born[start:end], key=lambda each: -each[0])[: sample.most]
        return [key for _, key in some]

    def _holds(self, guard: Guard) -> bool:
        match guard:
            case Unchanged(key, mod_rev):
                return self._entries.get(key, ABSENT).mod_rev == mod_rev
            case Created(key, create_rev):
                return self._entries.get(key, ABSENT).create_rev == create_rev
            case Empty(range_):
                return not self._count(range_)
            case NoneNewer(range_, rev) if name := folder(range_):
                written = self._written[name]
                return not written or written[-1][0] <= rev
        return super()._holds(guard)


def _remove(ages: Ages, one: tuple[int, str]) -> None:
    del ages[bisect_left(ages, one)]
