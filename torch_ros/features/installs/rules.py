"""The versions that replicas' engines use: docs/protocol/installs.md, invariant I10. Pure.

One record per replica. Each end of an install is a compare-and-swap of it, so there is one.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from torch_ros.errors import BackendError, InstallRejected, SeatLost, UsageError, VersionNotFound
from torch_ros.features.installs.records import NAME, Install, Rejection
from torch_ros.protocol import keys as k
from torch_ros.protocol.calls import conclude, open_call
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import keyed, readable, say
from torch_ros.protocol.records import (
    Call,
    Failure,
    GroupRecord,
    Outcome,
    VersionRecord,
    VersionRef,
)
from torch_ros.protocol.seat import Seat, recorded
from torch_ros.protocol.versions import Spec, resolve
from torch_ros.store.loops import Act, Done, Step, Wait
from torch_ros.store.txn import Entry, Put, Range, Txn, View, one

# The own record


def own_key(seat: Seat) -> str:
    return seat.keys.carried_at(seat.inst, NAME)


def _own(view: View, seat: Seat) -> Install:
    there = Install.at(view, own_key(seat))
    if there is None:  # it goes with the group
        raise SeatLost(seat.replica, "its install record is gone")
    return there


def _put(view: View, seat: Seat, new: Install) -> Put:
    key = own_key(seat)
    return Put(key, new.encode(), view.entries[key].lease_id)


def _changed(view: View, seat: Seat, new: Install) -> Act[Install]:
    same = view.unchanged(own_key(seat))
    return Act(Txn((same,), (_put(view, seat, new),)), lambda _: new)


def _wanted(view: View, seat: Seat, spec: Spec, floor: VersionRef | None) -> VersionRef | Wait:
    """The version that is meant; the floor, if nobody has that number any more.

    Raises: UsageError: It is below the floor.
    """
    is_floor = floor is not None and floor.version == spec.absolute
    try:
        offer = resolve(view, seat.keys, dataclasses.replace(spec, floor=floor))
    except VersionNotFound:
        if floor is None or not is_floor:
            raise
        return floor
    if isinstance(offer, Wait):
        return floor if floor is not None and is_floor else offer
    refuse_older(offer.ref, floor)
    return offer.ref


def refuse_older(ref: VersionRef, floor: VersionRef | None) -> None:
    """Raises: UsageError: `ref` is older than the last version of its run that was active."""
    if floor is not None and floor.follows(ref):
        raise UsageError(
            f"version {ref.version} is not installed: version {floor.version} of run {ref.run!r} "
            "was active here, and versions only grow within a run; publish the old weights under "
            "a new number, or in a new run"
        )


def enter(view: View, seat: Seat, call: Call, spec: Spec) -> Step[Call]:
    """Decide which version is installed, and take away what is active."""
    there = _own(view, seat)
    ref = _wanted(view, seat, spec, there.floor)
    if isinstance(ref, Wait):
        return ref
    new = there.entered(ref, call.number)
    said = "active" if new.trying is None else ""  # which ranks may not know, or know wrongly
    decided = msgspec.structs.replace(call, ref=ref, outcome=Outcome(said=said))
    return recorded(
        view,
        seat,
        decided,
        (view.unchanged(own_key(seat)),),
        (_put(view, seat, new),),
    )


def enter_alone(
    view: View, seat: Seat, attempt: int, spec: Spec, known: VersionRef | None
) -> Step[Install]:
    """As `enter`, by a group of one rank, which may know what its number means."""
    there = _own(view, seat)
    ref = known or _wanted(view, seat, spec, there.floor)
    if isinstance(ref, Wait):
        return Wait(ref.reason, (*ref.ranges, one(own_key(seat))))
    refuse_older(ref, there.floor)
    is_done = there.attempt == attempt or ref == there.active
    return Done(there) if is_done else _changed(view, seat, there.entered(ref, attempt))


def leave(view: View, seat: Seat, call: Call, ref: VersionRef) -> Step[Call]:
    """Decide which content the ranks have installed: all must have this one."""
    return recorded(view, seat, msgspec.structs.replace(call, ref=ref))


def end(view: View, seat: Seat, call: Call, attempt: int) -> Step[Outcome]:
    """All ranks have left their blocks well: active, unless a rank has thought better of it."""
    current = open_call(view, seat, call)
    if isinstance(current, Outcome):
        return Done(current)
    ref, there = current.ref, _own(view, seat)
    assert ref is not None
    if there.attempt == attempt and (there.trying or there.active == ref):
        new = there.left(ref)
        same = (view.unchanged(own_key(seat)),)
        return conclude(view, seat, current, Outcome(), same, (_put(view, seat, new),))
    failure = Failure.of(rejected(there, seat, ref), replica="", call=0, rank=seat.rank)
    return conclude(view, seat, current, Outcome(failure))


def leave_alone(view: View, seat: Seat, attempt: int, ref: VersionRef) -> Step[Install]:
    there = _own(view, seat)
    if there.attempt == attempt and there.active == ref:  # before, or the reply was lost
        return Done(there)
    if there.attempt != attempt or there.trying is None:
        raise rejected(there, seat, ref)
    return _changed(view, seat, there.left(ref))


def rejected(there: Install, seat: Seat, ref: VersionRef) -> InstallRejected:
    """The error of a rank that finds its install ended by somebody else."""
    found = there.rejected or Rejection(ref, seat.rank, "another install was begun meanwhile")
    return InstallRejected(seat.replica, ref.version, found.rank, found.reason)


def reject(view: View, seat: Seat, attempt: int, rejection: Rejection | None) -> Step[Install]:
    """End an install badly, for a rank that has left its block so, whatever the others found.

    Args:
        rejection: None: it has not come to know of an attempt of that number.
    """
    there = _own(view, seat)
    if there.attempt == attempt and (ref := there.trying or there.active):
        found = rejection or Rejection(ref, seat.rank, "it was not entered")
        return _changed(view, seat, there.refused(found))
    if there.attempt < attempt:  # the request to enter may apply late
        return _changed(view, seat, msgspec.structs.replace(there, attempt=attempt))
    return Done(there)


# The records of all


def installs_of(view: View, keys: Keys) -> dict[str, Install]:
    """The replicas that say which version they use. A record that cannot be read says nothing.

    One without a lease was put by hand. It counts if the view shows the group that it is of.
    """
    found: dict[str, tuple[int, Install]] = {}
    for key, inst, entry in _there(view, keys):
        if not entry.lease_id and not _is_living(view, keys, inst):
            continue
        try:
            install = Install.decode(entry.value, key)
        except BackendError as error:
            say(key, str(error.__cause__))
            install = Install()
        replica = k.replica_of(inst)
        if replica not in found or found[replica][0] < entry.create_rev:  # of two, the later start
            found[replica] = (entry.create_rev, install)
    return {replica: install for replica, (_, install) in found.items()}


def _there(view: View, keys: Keys) -> Iterator[tuple[str, str, Entry]]:
    """Each one's key, and the incarnation that it is of."""
    for key, (inst, feature), entry in keyed(view.within(keys.carried()), k.parse_carried):
        if feature == NAME:
            yield key, inst, entry


def _is_living(view: View, keys: Keys, inst: str) -> bool:
    group = keys.group(k.replica_of(inst))
    found = readable(view.seen(one(group)), k.parse_group, GroupRecord)
    return any(inst == k.instance(name, record.nonce) for _, name, record, _ in found)


def put_by_hand(view: View, keys: Keys) -> frozenset[str]:
    """The keys of the groups that records without a lease seem to be of."""
    return frozenset(
        keys.group(k.replica_of(inst))
        for _, inst, entry in _there(view, keys)
        if not entry.lease_id
    )


@dataclass(frozen=True, slots=True)
class Goal:
    """A version that replicas are to use, in a run."""

    keys: Keys
    run: str
    version: int
    uid: str = ""  # as far as it is known

    @property
    def ranges(self) -> tuple[Range, ...]:
        return (self.keys.carried(), one(self.keys.version(self.run, self.version)))

    def answers(
        self, replicas: Mapping[str, Install]
    ) -> Mapping[str, Literal["active", "rejected", "none"]]:
        """Each replica's answer to it."""
        return {name: self._answer(each) for name, each in replicas.items()}

    def known(self, view: View) -> "Goal":
        """The same version, with its uid if nobody knew that and there it is."""
        there = view.within(self.ranges[1])
        uids = [record.uid for _, _, record, _ in readable(there, k.parse_version, VersionRecord)]
        return self if self.uid else dataclasses.replace(self, uid="".join(uids))

    def _is_met(self, ref: VersionRef | None) -> bool:
        """Whether a version is this one, or a newer one. With another uid its number is not."""
        if ref is None or ref.run != self.run or ref.version < self.version:
            return False
        return ref.version > self.version or self.uid in ("", ref.uid)

    def _answer(self, install: Install) -> Literal["active", "rejected", "none"]:
        has_rejected = install.rejected is not None and self._is_met(install.rejected.ref)
        # While it goes on to a newer one it cannot come to use an older one.
        if self._is_met(install.active) or (self._is_met(install.floor) and not has_rejected):
            return "active"
        return "rejected" if has_rejected and not self._is_met(install.trying) else "none"


def at(install: Install | None) -> str:
    """A replica's answer, for people."""
    if install is None:
        return "not heard of"
    words = ["at no version"]
    if install.active:
        words = [f"at {install.active.version} of run {install.active.run!r}"]
    if install.trying:
        words.append(f"trying {install.trying.version}")
    if (found := install.rejected) is not None:
        words.append(f"rejected {found.ref.version} on rank {found.rank}: {found.reason}")
    return ", ".join(words)
