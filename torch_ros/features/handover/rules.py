"""How a replica closes in order: what only it has lingers (docs/protocol/closing.md). Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from torch_ros.features.handover import archives
from torch_ros.printable import some
from torch_ros.protocol import keys as k
from torch_ros.protocol.keeping import GivenUp, Keeper, Keeping
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, nobody, readable
from torch_ros.protocol.membership import to_delete
from torch_ros.protocol.records import GroupRecord, Holding, Ready, ShardRecord, VersionRef
from torch_ros.protocol.seat import Seat, calls_of, own_group
from torch_ros.protocol.unpublish import wake
from torch_ros.protocol.versions import offered
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.txn import (
    Delete,
    Guard,
    NoneNewer,
    Op,
    Put,
    Range,
    Ranges,
    Txn,
    Unseen,
    View,
    one,
)

CLOSING = 0  # the number of a group's last call; others count from 1


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A version that a group offers when it closes, in its tensors or in a copy."""

    keys: Keys
    ref: VersionRef
    call: int  # that brought it, or made the copy
    datacenter: str
    inst: str  # that offers it
    shard: ShardRecord  # where this rank shows it
    keeper: Keeper  # of the group, whose record does not say to the end what it retains

    @property
    def held(self) -> str:
        return self.keys.holding(self.ref.run, self.ref.version, self.datacenter, self.inst)

    @property
    def lingering(self) -> str:
        return k.lingering_of(self.inst, self.call)

    @property
    def lingers(self) -> str:
        """Its holding when it lingers."""
        return self.keys.holding(self.ref.run, self.ref.version, self.datacenter, self.lingering)

    @property
    def retention(self) -> Ranges:
        needed = self.keeper.ranges(self.keys, self.ref, self.datacenter)
        return (*needed, self.keys.archives())

    @property
    def readers(self) -> tuple[Range, Range]:
        """Those that have begun before it moved, and after."""
        of = self.keys.readers_of
        run, version = self.ref.run, self.ref.version
        return of(run, version, self.inst), of(run, version, self.lingering)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Somebody could take what only this replica has."""

    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The versions that the group offered linger; it has no other record any more."""


@dataclass(frozen=True, slots=True)
class Gone:
    """It is not offered any more, or will not be in a moment."""

    lost: tuple[VersionRef, ...] = ()  # that nobody else has; people are told
    lost_here: tuple[VersionRef, ...] = ()  # that nobody else has in this datacenter
    latest: int | None = None  # the version that is `latest` without these


def let_finish_ranges(seat: Seat, leaving: Sequence[Leaving]) -> Ranges:
    """All that `let_finish` is decided from."""
    of_each = (
        range_ for each in leaving for range_ in (one(each.held), each.readers[0], *each.retention)
    )
    return tuple(dict.fromkeys((*seat.own, *of_each)))


def let_finish(
    view: View, seat: Seat, leaving: Sequence[Leaving], *, is_patient: bool = True
) -> Step[Gone]:
    """Before `give_up`: admit nobody any more, and wait until nobody reads. Each rank runs this.

    If something needed is to linger, since others could take it, that is offered in full again, and
    nothing is waited for: lingering lets readers finish. Not `is_patient`: the time is over.
    """
    anchor, there = own_group(view, seat).lease_id, _there(view, leaving)
    keeps = {each: _keeping(view, each, seat) for each in there}
    needed = [] if seat.spot else [each for each in there if keeps[each].is_needed]
    lingers = any(_awaited(view, each, seat.inst, keeps[each]) for each in needed)
    state: Literal["full", "draining"] = "full" if lingers else "draining"
    # Not a copy of several ranks: peers that do not leave keep it full for as long as it is needed.
    changed = (
        needed if lingers else [e for e in there if e.inst == seat.inst or seat.world_size == 1]
    )
    other = {each: there[each] for each in changed if there[each].state != state}  # to be changed
    reading = _reading(view, (each.readers[0] for each in there))
    if not is_patient or not (other if lingers else reading):  # nothing is left to do here
        lost = [] if lingers else _alone(view, seat, there)
        return Done(_gone(view, lost, {each.inst for each in leaving}))
    if not other:
        names = _names(k.replica_of(reader) for reader in reading)
        reason = f"{names} to finish reading {_numbers([*there])}"
        return Wait(reason, let_finish_ranges(seat, leaving))
    ops: list[Op] = []
    for each, held in other.items():
        ops.append(Put(each.held, msgspec.structs.replace(held, state=state).encode(), anchor))
        ops += wake(view, each.keys.version(each.ref.run, each.ref.version)) if lingers else ()
    # A group that comes only now may be one to stay for.
    alone = [NoneNewer(seat.keys.groups(), view.rev)] if needed and not lingers else []
    unwanted = () if lingers or seat.spot else (g for keep in keeps.values() for g in keep.guards)
    same = (seat.group, seat.decisions, *(each.held for each in other))
    guards = (*map(view.unchanged, same), *alone, *unwanted)
    return Act(Txn(tuple(dict.fromkeys(guards)), tuple(ops)), None)


def give_up_ranges(seat: Seat, leaving: Sequence[Leaving]) -> Ranges:
    """All that `give_up` is decided from."""
    keys = seat.keys
    of_each = (
        range_
        for each in leaving
        for range_ in (
            one(each.held),
            one(each.lingers),
            keys.shards(each.lingering),
            *each.retention,
        )
    )
    ranks = keys.shards(seat.inst), keys.readies(seat.inst, CLOSING)
    return tuple(dict.fromkeys((*seat.own, *ranks, *of_each)))


def give_up(
    view: View,
    seat: Seat,
    leaving: Sequence[Leaving],
    *,
    calls_made: int,
    lease_id: int,
    is_patient: bool = True,
) -> Step[Awaited | Moved | Gone]:
    """The fate of all that a rank's group offers, when this rank closes.

    Gone if nobody needs it, or nobody could take it. Otherwise this rank comes, by its ready record
    of call CLOSING, and the rank that sees all of them moves everything to where it lingers.

    Args:
        calls_made: By this rank. A peer that has made another does not come.
        lease_id: For what lingers; 0: there is none yet, and `Awaited` says that one is needed.
        is_patient: False: there is no time to wait for anybody.

    Raises: SeatLost: The group is gone, or a peer has left.
    """
    keys, world_size = seat.keys, seat.world_size
    if lease_id and any(view.get(each.lingers) for each in leaving):
        return Done(Moved())  # before; the group's own records are gone since then
    own_group(view, seat)
    there = _there(view, leaving)
    keeps = {each: _keeping(view, each, seat) for each in there}
    own = (view.unchanged(seat.group), view.unchanged(seat.decisions))
    needed = [e for e in there if keeps[e].is_needed and there[e].state == "full"]
    if not needed:
        return _dropped(view, there, own, keeps.values()) if there else Done(Gone())
    waiting = {name for each in needed for name in _awaited(view, each, seat.inst, keeps[each])}
    alive = _ranks(view, keys.shards(seat.inst))
    is_ahead = any(call.number > calls_made for call in calls_of(view, seat))
    if not (is_patient and waiting) or len(alive) < world_size or is_ahead:  # a wait is in vain
        here = [each for each in needed if keeps[each].only_in]  # others elsewhere hold these
        return Done(_gone(view, needed, {each.inst for each in leaving}, here))
    if not lease_id:
        is_here = all(keeps[each].only_in for each in needed)
        return Done(Awaited(_reason(waiting, needed, is_here=is_here)))
    puts: list[Op] = [
        Put(keys.shard(each.lingering, seat.rank), each.shard.encode(), lease_id)
        for each, held in there.items()
        if held.state == "full"
    ]
    if world_size == 1:
        return _moved(view, seat, there, puts, lease_id)
    mine = keys.ready(seat.inst, CLOSING, seat.rank)
    if view.get(mine) is None:
        come = Put(mine, Ready("").encode(), lease_id)
        return Act(Txn((own[0], view.unchanged(mine)), (*puts, come)), None)
    came = _ranks(view, keys.readies(seat.inst, CLOSING))
    if len(came) == world_size:
        return _moved(view, seat, there, [], lease_id)
    missing = sorted(set(range(world_size)) - came)
    reason = f"ranks {missing} to close this replica too, which alone holds {_numbers(needed)}"
    return Wait(reason, give_up_ranges(seat, leaving))


def _there(view: View, leaving: Sequence[Leaving]) -> dict[Leaving, Holding]:
    """The holdings of these that are offered still, whatever their state."""
    held = {each: Holding.at(view, each.held) for each in leaving}
    return {each: own for each, own in held.items() if own and own.uid == each.ref.uid}


def _dropped(
    view: View, there: Mapping[Leaving, Holding], own: tuple[Guard, ...], keeps: Iterable[Keeping]
) -> Act[Gone]:
    """Delete all holdings, of which none is needed, as long as that is so (`keeps`)."""
    guards = (*own, *(view.unchanged(each.held) for each in there))
    guards = (*guards, *(guard for keep in keeps for guard in keep.guards))
    deletes = tuple(Delete(one(each.held)) for each in there)
    return Act(Txn(tuple(dict.fromkeys(guards)), deletes), lambda _: Gone())


def _moved(
    view: View, seat: Seat, there: Mapping[Leaving, Holding], ops: list[Op], lease_id: int
) -> Act[Awaited | Moved | Gone]:
    """Put what all ranks show under its lingering name, and end the incarnation, all at once."""
    keys = seat.keys
    for each, held in there.items():
        shards = len(_ranks(view, keys.shards(each.lingering)))
        if held.state == "full" and seat.world_size in {1, shards}:  # a single rank's is in `ops`
            stays = msgspec.structs.replace(held, is_original=False)
            ops.append(Put(each.lingers, stays.encode(), lease_id))
    # Also what a peer alone still offers: it may take a copy back that this rank has let go.
    ops += [*map(Delete, seat.own), *to_delete(view, keys, seat.inst)]
    ops.append(Delete(keys.readies(seat.inst, CLOSING)))
    ops.append(Delete(keys.seen_of(seat.replica)))
    same = (seat.group, seat.decisions, *(each.held for each in there))
    return Act(Txn(tuple(map(view.unchanged, same)), tuple(ops)), lambda _: Moved())


def linger_ranges(each: Leaving) -> Ranges:
    return (one(each.lingers), each.keys.shards(each.lingering), *each.readers, *each.retention)


def linger(view: View, each: Leaving, world_size: int) -> Step[Gone]:
    """Stay until this is not needed, or nobody is awaited; let readers finish. All ranks run it."""
    keys, ref = each.keys, each.ref
    entry = view.get(each.lingers)
    if entry is None:
        return Done(Gone())
    same = view.unchanged(each.lingers)
    gone = (Delete(one(each.lingers)),)
    if len(_ranks(view, keys.shards(each.lingering))) < world_size:
        lost = _gone_if_needed(view, each)  # a rank has left, or died
        return Act(Txn((same,), gone), lambda _: lost)
    holding = Holding.decode(entry.value, each.lingers)
    keep = _keeping_still(view, each)
    waiting = _awaited(view, each, k.owner_of(each.inst), keep) if keep.is_needed else []
    if waiting and holding.state == "full":
        reason = _reason(waiting, [each], is_here=keep.only_in is not None)
        return Wait(reason, linger_ranges(each))
    state: Literal["full", "draining"] = "full" if waiting else "draining"  # or back
    # A group that comes only now may be one to stay for.
    alone: tuple[Guard, ...] = (NoneNewer(keys.groups(), view.rev),)
    unwanted = alone if keep.is_needed else keep.guards
    guards: tuple[Guard, ...] = (same,) if waiting else (same, *unwanted)  # it goes by these
    reading = _reading(view, each.readers)
    if not waiting and not reading:
        lost = _gone_if_needed(view, each)
        guards = (*guards, *(nobody(view, range_) for range_ in each.readers))
        return Act(Txn(guards, gone), lambda _: lost)
    if holding.state != state:
        now = msgspec.structs.replace(holding, state=state)
        put = Put(each.lingers, now.encode(), entry.lease_id)
        woken = wake(view, keys.version(ref.run, ref.version)) if waiting else ()
        return Act(Txn(guards, (put, *woken)), None)
    names = _names(k.replica_of(reader) for reader in reading)
    reason = f"{names} to finish reading version {ref.version}"
    return Wait(reason, linger_ranges(each))


def stop(view: View, each: Leaving) -> Step[Gone]:
    """The time to linger is over: delete the holding, whoever reads or is awaited."""
    if view.get(each.lingers) is None:
        return Done(Gone())
    lost = _gone_if_needed(view, each)
    return Act(Txn(ops=(Delete(one(each.lingers)),)), lambda _: lost)


def _keeping(view: View, each: Leaving, seat: Seat) -> Keeping:
    """Whether a version is needed that would go with all that the group offers."""
    wanted = _wanted(view, each)
    dropped = GivenUp(seat.inst, each.datacenter, is_leaving=True, retain=wanted)
    return each.keeper.keeping(view, each.keys, each.ref, dropped)


def _keeping_still(view: View, each: Leaving) -> Keeping:
    """Whether a version that lingers is needed: by its own group too, which has no record now."""
    wanted = (*each.keeper.retain, *_wanted(view, each))
    dropped = GivenUp(each.lingering, each.datacenter, retain=wanted)
    return each.keeper.keeping(view, each.keys, each.ref, dropped)


def _wanted(view: View, each: Leaving) -> tuple[str, ...]:
    """What archivers want, none of which says so in a group's record."""
    return ("latest",) if archives.behind(view, each.keys, each.ref) else ()


def _awaited(view: View, each: Leaving, inst: str, keep: Keeping) -> list[str]:
    """The replicas that could take a version that is needed: archivers first, then others."""
    keys, ref = each.keys, each.ref
    archivers = [] if keep.only_in else archives.behind(view, keys, ref)
    return archivers or _others(view, keys, ref, inst, keep.only_in)


def _others(view: View, keys: Keys, ref: VersionRef, inst: str, only_in: str | None) -> list[str]:
    """The replicas that `inst` stays for, which ends and alone has a version that is retained.

    Args:
        only_in: The datacenter where it is retained; None: anywhere.

    Raises: Unseen: None is among those that were seen, which are not all.
    """
    found = []
    for _, replica, group, _ in readable(view.seen(keys.groups()), k.parse_group, GroupRecord):
        other = k.instance(replica, group.nonce)
        if group.left is not None or group.refusal is not None or group.spot or other == inst:
            continue
        if only_in not in (None, group.datacenter):
            continue
        is_successor = replica == k.replica_of(inst)  # it may never come to read the version
        held = keys.holding(ref.run, ref.version, group.datacenter, other)
        if is_successor and view.get(held) is None:
            continue
        found.append(replica)
    if not found and not view.shows(keys.groups()):
        raise Unseen
    return found


def _reading(view: View, ranges: Iterable[Range]) -> list[str]:
    """The instances that read by the records in these ranges, one for each record."""
    return [
        reader
        for range_ in ranges
        for _, (_, reader, _), _ in keyed(view.within(range_), k.parse_reader)
    ]


def _alone(view: View, seat: Seat, leaving: Iterable[Leaving]) -> list[Leaving]:
    """Those of `leaving` whose versions nobody else holds."""
    others = {
        offer.ref.uid
        for run in offered(view, seat.keys)
        for offer in run
        if any(not k.is_of(inst, seat.inst) for inst in offer.holdings)
    }
    return [each for each in leaving if each.ref.uid not in others]


def _ranks(view: View, range_: Range) -> set[int]:
    return {rank for _, rank, _ in keyed(view.within(range_), k.parse_rank)}


def _gone_if_needed(view: View, each: Leaving) -> Gone:
    """The end of a version that lingers; it is lost if it is needed still."""
    keep = _keeping_still(view, each)
    lost, here = ([each] if holds else [] for holds in (keep.is_needed, keep.only_in))
    return _gone(view, lost, {each.lingering}, here)


def _gone(
    view: View, lost: Sequence[Leaving], own: Collection[str], here: Collection[Leaving] = ()
) -> Gone:
    """The end of `lost`, which only `own` hold; of these, others elsewhere hold those in `here`."""
    if not lost:
        return Gone()
    runs = offered(view, lost[0].keys)
    left = [offer.ref.version for run in runs for offer in run if offer.holdings.keys() - {*own}]
    refs, refs_here = ([e.ref for e in lost if (e in here) is is_here] for is_here in (False, True))
    return Gone(tuple(refs), tuple(refs_here), next(iter(left), None))


def _reason(waiting: Iterable[str], needed: Sequence[Leaving], *, is_here: bool) -> str:
    holds = f"only this replica holds{' here' if is_here else ''}"
    return f"{_names(waiting)} to fetch {_numbers(needed)}, which {holds}"


def _numbers(needed: Sequence[Leaving]) -> str:
    numbers = sorted({each.ref.version for each in needed})
    return f"version{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _names(replicas: Iterable[str]) -> str:
    return some(sorted(set(replicas)))
