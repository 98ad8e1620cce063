"""Who belongs to a replica's group, and until when. Pure, like `rules`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from torch_ros.errors import SelfFenced, UsageError
from torch_ros.store import keys as k
from torch_ros.store.keys import Keys
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.records import Failure, Group, Run, Shard
from torch_ros.store.rules import DELETES_MAX, Seat, own_group
from torch_ros.store.txn import (
    Count,
    Created,
    Delete,
    Empty,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Txn,
    View,
    one,
)


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that wants a place in a replica's group."""

    keys: Keys
    replica: str
    rank: int
    world_size: int
    lease_id: int
    shard: Shard
    nonce: str  # for a new incarnation; with `is_shared`, the only one it may join
    is_shared: bool  # all ranks have been given the same nonce
    run: str | None  # None: the newest live one; "new": a new one
    fresh_run: str  # the name of a new run
    datacenter: str
    spot: bool

    @property
    def group(self) -> str:
        return self.keys.group(self.replica)


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank has its seat; the group may still lack others."""

    nonce: str
    run: str
    is_complete: bool


def open_ranges(who: Applicant) -> tuple[Range, ...]:
    return (who.keys.groups(), who.keys.runs(), who.keys.versions(), who.keys.holdings())


def find_group(view: View, who: Applicant) -> Step[str]:
    """The nonce of the group that waits for this rank; "": there is none."""
    entry = view.entries.get(who.group)
    group = Group.decode(entry.value) if entry else None
    return Done(group.nonce if group and _is_open_to(group, who) else "")


def _is_open_to(group: Group, who: Applicant) -> bool:
    if who.is_shared:
        return group.nonce == who.nonce
    return not group.is_complete and group.left is None


def create_group(view: View, who: Applicant) -> Step[bool]:
    """Make this replica's group record; whether a living incarnation had to go for it.

    A predecessor that lives on loses its records in the same transaction, and is fenced.
    """
    entry = view.entries.get(who.group)
    old = Group.decode(entry.value) if entry else None
    if old and _is_open_to(old, who):
        return Done(value=False)  # a peer was faster
    run, run_ops, guards = _choose_run(view, who)
    ops: list[Op] = [
        Put(
            who.group,
            Group(
                who.nonce, who.world_size, run, spot=who.spot, datacenter=who.datacenter
            ).encode(),
            who.lease_id,
        ),
        *run_ops,
    ]
    if old:
        inst = k.instance(who.replica, old.nonce)
        ops.append(Delete(one(who.keys.decisions(inst))))
        ops += [
            Delete(one(key))
            for key, _ in view.within(who.keys.holdings())
            if k.parse_holding(key).inst == inst
        ]
    return Act(
        Txn((view.unchanged(who.group), *guards), tuple(ops)),
        lambda _: old is not None and old.left is None,
    )


def _choose_run(view: View, who: Applicant) -> tuple[str, list[Op], tuple[Guard, ...]]:
    """The run to publish in, and what has to be written for it.

    A run lives while a group publishes in it or a holding is in it. When none lives, the records
    of dead ones are removed, so that a model used again starts with a clean slate.
    """
    keys = who.keys
    born = {k.parse_run(key): entry.create_rev for key, entry in view.within(keys.runs())}
    groups = [Group.decode(entry.value) for _, entry in view.within(keys.groups())]
    live = {group.run for group in groups if group.left is None}
    live |= {k.parse_holding(key).run for key, _ in view.within(keys.holdings())}
    live &= born.keys()
    if who.run is None and live:
        name = max(live, key=lambda run: born[run])
        return name, [], (Created(keys.run(name), born[name]),)
    name = who.fresh_run if who.run in (None, "new") else who.run
    assert name is not None
    if name in live:
        return name, [], (Created(keys.run(name), born[name]),)
    made: list[Op] = [Put(keys.run(name), Run(f"{who.shard.host}:{who.shard.pid}").encode())]
    if live:
        return name, [] if name in born else made, (view.unchanged(keys.run(name)),)
    # etcd refuses a transaction that puts a key which it also deletes with a range.
    dead = [key for key, _ in view.within(keys.runs()) if key != keys.run(name)]
    dead += [key for key, _ in view.within(keys.versions())]
    # Nobody has begun to use one meanwhile.
    guards = (
        Empty(keys.holdings()),
        NoneNewer(keys.groups(), view.rev),
        NoneNewer(keys.runs(), view.rev),
    )
    return name, [*made, *(Delete(one(key)) for key in dead[:DELETES_MAX])], guards


def join(view: View, who: Applicant, nonce: str) -> Step[Joined | None]:
    """Take the seat of this rank in group `nonce`. None: that group is gone, look again.

    The shard record is create-only and counted in the same transaction: the rank that sees the
    full count completes the group, so nobody waits on a contended key.
    """
    entry = view.entries.get(who.group)
    group = Group.decode(entry.value) if entry else None
    if entry is None or group is None or group.nonce != nonce:
        return Done(None)
    if group.refusal is not None:
        raise group.refusal.error()
    if group.world_size != who.world_size:
        return _refuse(view, who, group)
    inst = k.instance(who.replica, nonce)
    seats, own = who.keys.shards(inst), who.keys.shard(inst, who.rank)
    taken = view.entries.get(own)
    if taken is not None and taken.lease_id != who.lease_id:
        holder = Shard.decode(taken.value)
        reason = f"rank {who.rank} of replica {who.replica!r} is {holder.host}:{holder.pid}"
        return Wait(reason, (one(own), one(who.group)))
    if taken is None:
        seated = Joined(nonce, group.run, is_complete=False)
        txn = Txn(
            (view.unchanged(who.group), view.unchanged(own)),
            (Put(own, who.shard.encode(), who.lease_id), Count(seats)),
        )
        return Act(txn, lambda _: seated)
    joined = Joined(nonce, group.run, is_complete=True)
    if group.is_complete:
        return Done(joined)
    there = [int(key.rpartition("/")[2]) for key, _ in view.within(seats)]
    if len(there) < who.world_size:
        reason = f"replica {who.replica!r} has ranks {there} of {who.world_size}"
        return Wait(reason, (one(who.group),))
    complete = msgspec.structs.replace(group, is_complete=True)
    put = Put(who.group, complete.encode(), entry.lease_id)
    return Act(Txn((view.unchanged(who.group),), (put,)), lambda _: joined)


def _refuse(view: View, who: Applicant, group: Group) -> Act[Joined | None]:
    """The ranks disagree about their number: nobody shall wait for a group that cannot be."""
    error = UsageError(
        f"replica {who.replica!r}: rank {who.rank} was opened with world_size={who.world_size}, "
        f"its peers with world_size={group.world_size}; all ranks must be given the same"
    )
    if group.is_complete:
        raise error
    failure = Failure.of(error, replica=who.replica, call=0, rank=who.rank)
    refused = msgspec.structs.replace(group, refusal=failure)
    put = Put(who.group, refused.encode(), view.entries[who.group].lease_id)

    def fail(_: object) -> Joined | None:
        raise error

    return Act(Txn((view.unchanged(who.group),), (put,)), fail)


def watch_over(view: View, seat: Seat) -> Step[str]:
    """Rank r watches rank r + 1, not everyone everything. Returns once something has ended:
    why this incarnation is no more, or "" when that rank is gone and `expel` is called for.
    """
    try:
        own_group(view, seat)
    except SelfFenced as fenced:
        return Done(fenced.reason)
    key = follower(seat)
    return Wait("", (one(seat.group), one(key))) if key in view.entries else Done("")


def follower(seat: Seat) -> str:
    return seat.keys.shard(seat.inst, (seat.rank + 1) % seat.world_size)


def expel(view: View, seat: Seat) -> Step[str]:
    """Take a replica with a dead process out of the store, for everyone and at once (I7)."""
    try:
        own_group(view, seat)
    except SelfFenced as fenced:
        return Done(fenced.reason)
    records = [seat.group, seat.decisions, *_holdings(view, seat)]
    # A call that is decided meanwhile may bring another holding.
    guards = (view.unchanged(seat.group), view.unchanged(seat.decisions))
    txn = Txn(guards, tuple(Delete(one(key)) for key in records))
    return Act(txn, lambda _: f"rank {(seat.rank + 1) % seat.world_size} died")


def leave(view: View, seat: Seat, note_lease_id: int) -> Step[None]:
    """This rank closes its handle, so the replica ends; say so, or it looks like a crash."""
    try:
        entry = own_group(view, seat)
    except SelfFenced:
        return Done(None)
    left = msgspec.structs.replace(Group.decode(entry.value), left=seat.rank)
    records = _holdings(view, seat)  # the decisions stay, for peers that wait for an outcome
    txn = Txn(
        (view.unchanged(seat.group), view.unchanged(seat.decisions)),
        (Put(seat.group, left.encode(), note_lease_id), *(Delete(one(key)) for key in records)),
    )
    return Act(txn, lambda _: None)


def _holdings(view: View, seat: Seat) -> list[str]:
    held = (key for key, _ in view.within(seat.keys.holdings()))
    return [key for key in held if k.parse_holding(key).inst == seat.inst]
