"""Records that nobody alive has left behind, and that may go: docs/protocol/leftovers.md. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_ros.errors import BackendError
from torch_ros.fleet import seen
from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import nobody
from torch_ros.protocol.records import GroupRecord, RunRecord, SeenRecord, VersionRecord
from torch_ros.protocol.schema import require_own
from torch_ros.store.txn import Delete, Empty, Guard, NoneNewer, Txn, View, one

CLEARED_MAX = 30  # keys in one transaction, which has up to four guards for each: etcd takes 128


@dataclass(frozen=True, slots=True)
class Leftover:
    """A key that may be deleted under these guards, in one transaction with others or without."""

    key: str
    reason: str
    guards: tuple[Guard, ...]


def leftovers(
    view: View, keys: Keys, may_go: Callable[[SeenRecord], bool] = lambda _: False
) -> Sequence[Leftover]:
    """From a view of all records of the model.

    Args:
        may_go: Whether nobody needs to look for a process any more that has lost its seat.

    Raises: BackendError: Another release has written the model's records.
    """
    require_own(view, keys)
    lasting = {key for key, entry in view.entries.items() if not entry.lease_id}
    if lasting == view.entries.keys():
        alive = (keys.groups(), keys.holdings(), keys.every_shard())
        guards = tuple(nobody(view, range_) for range_ in alive)
        return [Leftover(key, "nobody has a seat in this model", guards) for key in sorted(lasting)]
    odd = [
        Leftover(key, "it hangs on no lease, so nobody alive keeps it", (view.unchanged(key),))
        for key in sorted(lasting)
        if key != keys.schema()
        and not any(key in each for each in (keys.runs(), keys.versions(), keys.seen()))
    ]
    held, lost = _held(view, keys), seen.lost(view, keys)
    reason = "its process lost this seat, and is gone, or has been for long"
    for (replica, rank), record in lost.items():
        key = keys.seen_at(replica, rank)
        if may_go(record):  # whoever takes the seat puts it anew
            odd.append(Leftover(key, reason, (view.unchanged(key),)))
    return [*odd, *_dead_runs(view, keys, held), *_old_versions(view, keys, held)]


def clearing(found: Sequence[Leftover]) -> Txn:
    """Delete the first ones, if all is still as it was seen."""
    some = found[:CLEARED_MAX]
    guards = dict.fromkeys(guard for each in some for guard in each.guards)
    return Txn(tuple(guards), tuple(Delete(one(each.key)) for each in some))


def _held(view: View, keys: Keys) -> Mapping[str, set[int]]:
    """The versions of each run that have a holding, whether its value can be read or not."""
    found: dict[str, set[int]] = {}
    for key, _ in view.within(keys.holdings()):
        if (where := k.parse_holding(key)) is not None:
            found.setdefault(where.run, set()).add(where.version)
    return found


def _dead_runs(view: View, keys: Keys, held: Mapping[str, set[int]]) -> Iterator[Leftover]:
    """Runs in which nobody is, below one in which somebody is: no later run gets their numbers."""
    named = _named_runs(view, keys)
    if named is None:
        return
    numbers = dict(_numbers(view, keys))
    highest = max((numbers[run] for run in named | held.keys() if run in numbers), default=0)
    since = NoneNewer(keys.groups(), view.rev)
    for run, number in sorted(numbers.items()):
        if run in named or run in held or number >= highest:
            continue
        guards = (since, view.unchanged(keys.run(run)), Empty(keys.holdings(run)))
        inside = [key for key, _ in view.within(keys.versions(run))]
        reason = f"nobody is in run {run!r}, and a newer one is used"
        for key in (*inside, keys.run(run)):  # the run last: without it the rest would stay
            yield Leftover(key, reason, (*guards, view.unchanged(key)))


def _named_runs(view: View, keys: Keys) -> set[str] | None:
    """The runs that groups publish in; None: a group's record cannot be read."""
    try:
        groups = (GroupRecord.decode(e.value, key) for key, e in view.within(keys.groups()))
        return {group.run for group in groups}
    except BackendError:
        return None


def _numbers(view: View, keys: Keys) -> Iterator[tuple[str, int]]:
    for key, entry in view.within(keys.runs()):
        try:
            number = RunRecord.decode(entry.value, key).number
        except BackendError:
            continue
        if (run := k.parse_run(key)) is not None:
            yield run, number


def _old_versions(view: View, keys: Keys, held: Mapping[str, set[int]]) -> Iterator[Leftover]:
    """Versions that nobody holds, below one that was published: numbers do not go back."""
    by_run: dict[str, list[int]] = {}
    for key, _ in view.within(keys.versions()):
        if (where := k.parse_version(key)) is not None:
            by_run.setdefault(where[0], []).append(where[1])
    for run, numbers in by_run.items():
        newest = max(_published(view, keys, run, numbers), default=None)
        if newest is None:
            continue
        above = view.unchanged(keys.version(run, newest))
        for number in numbers:
            if number >= newest or number in held.get(run, ()):
                continue
            key = keys.version(run, number)
            guards = (above, Empty(keys.holdings_of(run, number)))
            reason = f"nobody holds it, and version {newest} came after it"
            yield Leftover(key, reason, guards)


def _published(view: View, keys: Keys, run: str, numbers: Iterable[int]) -> Iterator[int]:
    for number in numbers:
        key = keys.version(run, number)
        try:
            record = VersionRecord.at(view, key)
        except BackendError:
            continue
        if record is not None and record.layout:
            yield number
