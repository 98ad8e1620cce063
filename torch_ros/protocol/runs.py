"""Which run a newcomer publishes in: docs/PROTOCOL.md#runs. Pure."""

from collections.abc import Callable, Iterator

from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.applicant import Applicant
from torch_ros.protocol.calls import DELETES_MAX
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, nobody, readable
from torch_ros.protocol.records import NUMBER_MAX, GroupRecord, RunRecord, VersionRecord
from torch_ros.protocol.versions import run_numbers
from torch_ros.store.loops import Done, Step
from torch_ros.store.txn import Created, Delete, Entry, Guard, NoneNewer, Op, Put, Range, View, one


def is_any_trained(view: View, who: Applicant) -> Step[bool]:
    """Whether there is a run that a newcomer would choose by itself."""
    return Done(bool(_live_runs(view, who)[1]))


def choose_run(view: View, who: Applicant) -> tuple[str, list[Op], tuple[Guard, ...]]:
    """The run to publish in, and what has to be written for it (docs/PROTOCOL.md#runs)."""
    if who.run and who.run_number:  # it comes back: the run that it had, also if etcd was wiped
        return who.run, *restored_run(view, who, who.run, who.run_number)
    keys, numbers = who.keys, run_numbers(view, who.keys)
    live, trained = _live_runs(view, who)
    former_number, former = who.former_run
    name = who.fresh_run if who.run in (None, "new") else who.run
    if who.run is None and trained:  # the newest live one; else the last that a bucket knows
        name = max(trained, key=lambda run: (numbers[run], run))
    elif who.run is None and former not in ("", k.OUTSIDE) and not _is_known(view, keys, former):
        name, numbers[former] = former, former_number
    assert name is not None
    if name in live:
        return name, [], (Created(keys.run(name), view.entries[keys.run(name)].create_rev),)
    number = min(1 + max(numbers.values(), default=0), NUMBER_MAX)
    by = f"{who.shard.host}:{who.shard.pid}"
    ended_at = None if live else _highest(view, keys)
    made: list[Op] = [Put(keys.run(name), RunRecord(by, number, ended_at).encode())]
    alone = NoneNewer(keys.runs(), view.rev)  # no other run gets this number
    if live:
        return name, made, (view.unchanged(keys.run(name)), alone)
    # No run lives: records of ended ones go, each alone, since no range may have a key that is put.
    dead = [key for key, _ in view.within(keys.runs()) if key != keys.run(name)]
    dead += [key for key, _ in view.within(keys.versions())]
    guards = (nobody(view, keys.holdings()), NoneNewer(keys.groups(), view.rev), alone)  # still so
    return name, [*made, *(Delete(one(key)) for key in dead[:DELETES_MAX])], guards


def _highest(view: View, keys: Keys) -> int | None:
    """The highest version ever published, by records or a later run's `ended_at`; None: none."""
    found = readable(view.within(keys.versions()), k.parse_version, VersionRecord)
    numbers = [number for _, (_, number), record, _ in found if record.layout]
    runs = readable(view.within(keys.runs()), k.parse_run, RunRecord)
    numbers += [run.ended_at for _, _, run, _ in runs if run.ended_at is not None]
    return max(numbers, default=None)


def _is_known(view: View, keys: Keys, run: str) -> bool:
    """Whether etcd has anything of a run of that name: its ranks may come back with more of it."""
    return view.get(keys.run(run)) is not None or any(view.within(keys.versions(run)))


def _live_runs(view: View, who: Applicant) -> tuple[set[str], set[str]]:
    """The live runs (see `_users`); of these, those that `run=None` may choose: not a bucket's
    (OUTSIDE), nor one in which only archivers are. Where nobody publishes, a run with versions
    lives while another does: who had one would not follow in an older run. It looks at samples
    first, and at everything only if those do not settle the choice of `who`.
    """
    keys, numbers = who.keys, run_numbers(view, who.keys)
    newest = max(numbers, key=lambda run: (numbers[run], run), default=None)
    archivers = {name for _, name, _ in keyed(view.within(keys.archives()), k.parse_archive)}
    live, trained = set[str](), set[str]()
    for look in (view.seen, view.within):
        used = [(run, replica) for run, replica in _users(look, keys) if run in numbers]
        live = {run for run, _ in used}
        trained = {run for run, replica in used if replica not in archivers} - {k.OUTSIDE}
        # Settled if the run that `who` gets, the newest or the one that it names, is seen alive.
        if newest in trained if who.run is None else who.run in live:
            break
    if who.run is None and trained and newest not in trained:
        found = legible.holdings(view.within(keys.holdings()))
        if not any(holding.is_original for _, _, holding, _ in found):
            told = keyed(view.within(keys.versions()), k.parse_version)
            last = {run for _, (run, _), _ in told if run in numbers and run != k.OUTSIDE}
            return live | last, trained | last
    return live, trained


def _users(
    look: Callable[[Range], Iterator[tuple[str, Entry]]], keys: Keys
) -> Iterator[tuple[str, str]]:
    """Runs with one who uses them: a replica with a living group; "": something is held there."""
    for _, where, _ in keyed(look(keys.holdings()), k.parse_holding):
        yield where.run, ""
    for _, replica, group, _ in readable(look(keys.groups()), k.parse_group, GroupRecord):
        if group.left is None and group.refusal is None:
            yield group.run, replica


def restored_run(
    view: View, who: Applicant, run: str, number: int
) -> tuple[list[Op], tuple[Guard, ...]]:
    """Put the record of a run again if the store was wiped; the guards that it stays as it is."""
    key = who.keys.run(run)
    if entry := view.get(key):
        return [], (Created(key, entry.create_rev),)
    by = f"{who.shard.host}:{who.shard.pid}"
    return [Put(key, RunRecord(by, number).encode())], (view.unchanged(key),)
