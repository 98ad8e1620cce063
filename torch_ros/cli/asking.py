"""Ask etcd on behalf of a command: no seat, no lease, no write."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches

from torch_ros.cli import waits
from torch_ros.cli.waits import Blamed, Why
from torch_ros.deadline import Deadline, wall_ms
from torch_ros.errors import AccessDenied, BackendError, ClosedError, UsageError
from torch_ros.fleet import seen
from torch_ros.fleet.fleet import Fleet, fleet_ranges
from torch_ros.fleet.life import Life, State, look
from torch_ros.printable import some
from torch_ros.protocol.keys import EVERY_MODEL, Keys, parse_model, parse_seen
from torch_ros.protocol.legible import keyed, readable
from torch_ros.protocol.records import SeenRecord, VersionRef
from torch_ros.protocol.versions import Spec, resolve, spec_ranges
from torch_ros.store.endpoint import connect, located
from torch_ros.store.kv import KV
from torch_ros.store.loops import Done, Wait, follow
from torch_ros.store.run import run
from torch_ros.store.txn import Changes, Count, Follow, Get, Read, Txn, View, Watch, whole

ANSWER_S = 10.0
OPS_MAX = 32  # of a request: etcd refuses more than 128
# States of a process that does nothing more.
ENDS = {"stopped", "traced", "frozen", "closed", "gone", "replaced"}
WATCH_S = 60.0  # a stream of etcd, then another
PERIOD_S = 0.1  # between two fleets: what changes more often is seen together
LOOK_S = 2.0  # of a watch, then another: so soon is it noticed that nobody looks any more


def connected(endpoint: str, timeout_s: float | None = None) -> KV:
    """The store, which is not started for this; the caller closes it."""
    return connect(located(endpoint), timeout_s=ANSWER_S if timeout_s is None else timeout_s)


def models(kv: KV, timeout_s: float = ANSWER_S) -> list[str]:
    """The names under which there are records. Keys alone are read.

    Raises: AccessDenied: This user may not read all models; it may still name one.
    """
    try:
        reply = kv.commit(Txn(ops=(Get(EVERY_MODEL, keys_only=True),)), timeout_s=timeout_s)
    except AccessDenied as denied:
        advice = f"{denied.advice}, or name a model that it may read"
        raise AccessDenied(denied.endpoint, denied.what, denied.reason, advice) from denied
    [found] = reply.results
    assert not isinstance(found, int)
    return sorted({name for key in found if (name := parse_model(key)) is not None})


def liveliest(kv: KV) -> list[str]:
    """All models: those with somebody first, then the one with the newest publication."""

    def standing(model: str) -> tuple[bool, int]:
        try:
            found = fleet(kv, model)
        except BackendError:  # of another release, or not for this user
            return (True, 0)
        alive = any(each.state == "complete" for each in found.replicas.values())
        return (not alive, -max((each.at_ms or 0 for each in found.versions), default=0))

    return sorted(models(kv), key=standing)


def fleet(kv: KV, model: str, timeout_s: float = ANSWER_S) -> Fleet:
    keys = Keys(model)
    return Fleet.of(kv.read(Read(fleet_ranges(keys)), timeout_s=timeout_s), keys)


def revision(kv: KV) -> int:
    """The store's revision, now."""
    return kv.read(Read(()), timeout_s=ANSWER_S).rev


def await_change(kv: KV, model: str | None, after_rev: int, timeout_s: float) -> None:
    """Return when something has been written after that revision; later, if nothing is."""
    ranges = (EVERY_MODEL,) if model is None else whole(fleet_ranges(Keys(model)))
    watch, until_s = Watch(ranges, after_rev, "a change"), time.monotonic() + timeout_s
    while (left_s := until_s - time.monotonic()) > 0:
        if kv.wait(watch, timeout_s=min(left_s, WATCH_S)):
            return


def fleets(
    kv: KV, model: str, over: threading.Event, period_s: float = PERIOD_S
) -> Iterator[Fleet | BackendError]:
    """The fleet, and again whenever it has changed, until `over` is set or `kv` is closed.

    An error stands for a fleet that cannot be told now; the next one that can be told follows it.
    """
    keys = Keys(model)
    ranges = fleet_ranges(keys)
    view: View | None = None
    while not over.is_set():
        try:
            if view is None:
                view = kv.read(Read(ranges), timeout_s=ANSWER_S)
                yield Fleet.of(view, keys)
            changes = kv.follow(Follow(whole(ranges), view.rev, ""), timeout_s=LOOK_S)
            if changes is None:
                view = None
            elif changes.entries:
                view = view.after(changes)
                yield Fleet.of(view, keys)
        except ClosedError:
            return
        except BackendError as error:
            view = None
            yield error
            over.wait(PERIOD_S)
        over.wait(period_s)


def resolved(
    endpoint: str, model: str, versions: Sequence[int | str], timeout_s: float
) -> list[VersionRef]:
    """The versions that are meant, all of them at one moment; waits until all are there.

    Raises:
        VersionNotFound: One was there, and is gone.
        DeadlineExceeded: One did not come in time.
        UsageError: One is no version.
    """
    keys, specs = Keys(model), list(map(Spec.parse, versions))
    ranges = whole(spec_ranges(keys))

    def rule(view: View) -> Done[list[VersionRef]] | Wait:
        refs = []
        for spec in specs:
            offer = resolve(view, keys, spec)
            if isinstance(offer, Wait):
                return offer
            refs.append(offer.ref)
        return Done(refs)

    deadline = Deadline(" and ".join(map(str, versions)), timeout_s)
    with closing(connected(endpoint)) as kv:
        return run(follow(ranges, rule), kv, deadline)


def why(kv: KV, model: str, replica: str, version: int | None) -> Why:
    """The reason for which a replica does not get on.

    Raises: UsageError: There is no such model or replica; names the one that may be meant.
    """
    there, keys = fleet_of(kv, model).replicas, Keys(model)
    view = _open_still(kv.read(Read((keys.all(),)), timeout_s=ANSWER_S), keys)
    sat = seen.all_of(view, keys)
    names = sorted({*there, *(name for name, _ in sat)})
    if replica not in names:
        near = get_close_matches(replica, names, 1) or names
        found = some(list(map(repr, near))) or "none"
        raise UsageError(f"no replica {replica!r} of model {model!r}; there is {found}")
    why = waits.why(view, keys, replica, version, now_ms=wall_ms())
    looked = tuple(_looked_at(each, sat.get((each.replica, each.rank))) for each in why.processes)
    is_held_up = why.kind == "nothing" and any(each.state in ENDS for each in looked)
    return replace(why, processes=looked, kind="process" if is_held_up else why.kind)


def _open_still(view: View, keys: Keys) -> View:
    """Without those who closed their handles while etcd was away: nobody looks for them."""
    lost = seen.lost(view, keys).items()
    closed = [keys.seen_at(*where) for where, record in lost if state_of(record) == "closed"]
    return view.after(Changes(view.rev, dict.fromkeys(closed)))


def _looked_at(process: Blamed, record: SeenRecord | None) -> Blamed:
    """With what it does now, if it can be seen from this host."""
    if record is None or (record.host, record.pid) != (process.host, process.pid):
        return process
    return replace(process, state=state_of(record))


def state_of(record: SeenRecord) -> State:
    """The process as this host sees it now."""
    return look(record.pid, Life(record.boot, record.namespace, record.started, record.sign))


def fleet_of(kv: KV, model: str) -> Fleet:
    """The fleet of a model that has records.

    Raises: UsageError: It has none; names the one that may be meant.
    """
    found = fleet(kv, model)
    if found.replicas or found.versions:
        return found
    require(kv, model)
    return found


def lost(kv: KV, there: Fleet) -> Mapping[str, Sequence[int]]:
    """The ranks of the replicas that have no group any more, and closed no handle, by replica.

    Costs the key of each process, and the record of each that is lost.
    """
    keys, found = Keys(there.model), dict[str, list[int]]()
    [every] = kv.commit(Txn(ops=(Get(keys.seen(), keys_only=True),)), timeout_s=ANSWER_S).results
    assert not isinstance(every, int)
    alive = {each.name for each in there.replicas.values() if each.state != "gone"}
    names = {name for _, (name, _), _ in keyed(every.items(), parse_seen)} - alive
    ranges = tuple(map(keys.seen_of, sorted(names))) if len(names) < OPS_MAX else (keys.seen(),)
    view = kv.read(Read(ranges), timeout_s=ANSWER_S)
    for _, (replica, rank), record, _ in readable(view.entries.items(), parse_seen, SeenRecord):
        if replica in names and state_of(record) != "closed":
            found.setdefault(replica, []).append(rank)
    return found


def require(kv: KV, model: str) -> None:
    """Raises: UsageError: The model has no record; names the one that may be meant."""
    reply = kv.commit(Txn(ops=(Count(Keys(model).all()),)), timeout_s=ANSWER_S)
    if reply.results == (0,):
        raise UsageError(f"no model {model!r} in {kv.endpoint}{meant(model, others(kv, model))}")


def others(kv: KV, model: str) -> Sequence[str] | None:
    """The other models; None: this user may not list them."""
    try:
        return [each for each in models(kv) if each != model]
    except AccessDenied:
        return None


def meant(model: str, there: Sequence[str] | None) -> str:
    if there is None:
        return "; this user may not list the others"
    if near := get_close_matches(model, there, 1):
        return f"; did you mean {near[0]!r}?"
    return f"; there are {some(list(map(repr, there)))}" if there else ", and no other model either"
