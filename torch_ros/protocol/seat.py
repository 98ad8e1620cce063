"""One process's place in a replica's group, and how the group writes its decisions. Pure."""

from dataclasses import dataclass
from functools import lru_cache

from torch_ros.errors import Fenced, SeatLost
from torch_ros.protocol import keys as k
from torch_ros.protocol.keeping import NO_KEEPER, Keeper
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import Call, Decisions, GroupRecord, Holding, VersionRef
from torch_ros.store.loops import Act
from torch_ros.store.txn import Delete, Entry, Guard, Op, Put, Range, Txn, View, one

CALLS_KEPT = 64  # a rank that is further behind its peers than this is lost
KNOWN_KEPT = 8  # where all ranks know how those before ended: for people
NONE_YET = Decisions()
CLOSED = "closed its handle"  # an orderly end


class Leaves:
    """The replicates in which a group passes nothing on: it is a leaf in them. Here, none is.

    A leaf may read from everybody, since nobody reads from it. Pure.
    """

    def is_leaf(self, seat: "Seat", call: Call) -> bool:
        """Whether no rank is read from in this call."""
        del seat, call
        return False

    def begun(self, view: View, seat: "Seat", call: Call) -> Call:
        """The call of a group that would relay, as it is decided to bring its `ref`."""
        del view, seat
        return call

    def ended(self, view: View, seat: "Seat", call: Call) -> Txn | None:
        """Make a leaf relay after all, if the older holdings, all of them seen now, ask for it.

        None: the group is no leaf in this call, or stays one.
        """
        del view, seat, call
        return None


NO_LEAVES = Leaves()


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's place in one incarnation of a replica."""

    keys: Keys
    replica: str
    nonce: str
    rank: int
    world_size: int
    run: str
    run_number: int
    lease_id: int
    datacenter: str
    spot: bool
    drain_s: float  # how long readers may finish before the source goes on without them
    prefers: str = ""  # the replica whose full copy it reads first, and alone
    leaves: Leaves = NO_LEAVES
    keeper: Keeper = NO_KEEPER
    knows: tuple[tuple[int, frozenset[str]], ...] = ()  # by rank: what a call may have in `must`
    # By their ranks: publications not waited for, and what those would have said to be ready.
    unwaited: tuple[tuple[int, Call, str], ...] = ()
    unpublished_by: int = 0  # the call since which its ranks, all told, hold nothing; 0: none

    @property
    def inst(self) -> str:
        return k.instance(self.replica, self.nonce)

    @property
    def group(self) -> str:
        return self.keys.group(self.replica)

    @property
    def decisions(self) -> str:
        return self.keys.decisions(self.inst)

    @property
    def own(self) -> tuple[Range, ...]:
        """The records that every step of a call looks at."""
        return (one(self.group), one(self.decisions))

    def knows_first(self, name: str) -> bool:
        """Whether this is the lowest of the ranks that know what a call has in `must` as `name`."""
        return self.rank == min((rank for rank, known in self.knows if name in known), default=-1)

    def done_by(self, call: Call) -> dict[int, str]:
        """The ranks that published by `call` and did not wait, and what each would have said."""
        return {
            rank: answer
            for rank, ready, answer in self.unwaited
            if rank != self.rank and (ready.number, ready.ref) == (call.number, call.ref)
        }

    def holding(self, ref: VersionRef) -> str:
        return self.keys.holding(ref.run, ref.version, self.datacenter, self.inst)

    def copy_holding(self, ref: VersionRef, copy: str) -> str:
        """The key of the holding of a copy in host memory."""
        return self.keys.holding(ref.run, ref.version, self.datacenter, copy)

    def taken_back(self, view: View, call: Call) -> Txn:
        """Undo a decision to replicate that no rank has acted on, so that it is made anew."""
        assert call.ref is not None
        decisions = decisions_at(view, self.decisions)
        left = decisions.with_calls(c for c in decisions.calls if c.number != call.number)
        return Txn(
            (view.unchanged(self.group), view.unchanged(self.decisions)),
            (
                Put(self.decisions, left.encode(), own_group(view, self).lease_id),
                Delete(one(self.holding(call.ref))),
            ),
        )


def own_group(view: View, seat: Seat) -> Entry:
    """The group's record. Its lease is the anchor: all group-level records hang on it.

    Raises: SeatLost: This incarnation is no longer the living one.
    """
    entry = view.get(seat.group)
    if entry is None:
        reason = "its group record is gone (a rank died, or etcd lost its lease)"
        raise SeatLost(seat.replica, reason)
    group = GroupRecord.decode(entry.value, seat.group)
    if group.nonce != seat.nonce:
        is_own = k.family(group.nonce) == k.family(seat.nonce)
        whose = "its ranks take their seats again" if is_own else "another start has taken its name"
        raise (SeatLost if is_own else Fenced)(seat.replica, f"{whose} ({group.nonce})")
    if group.left is not None:
        raise Fenced(seat.replica, f"rank {group.left} {CLOSED}", is_orderly=True)
    return entry


def find(view: View, seat: Seat, number: int) -> Call | None:
    return next((call for call in calls_of(view, seat) if call.number == number), None)


def call_now(view: View, seat: Seat, call: Call) -> Call:
    """The call as the group has it now."""
    return find(view, seat, call.number) or call


def version_read(view: View, seat: Seat, call: Call) -> VersionRef:
    """The version that the group still reads.

    Raises: SeatLost, TorchRosError: It does not; a peer gave up.
    """
    own_group(view, seat)
    current = find(view, seat, call.number)
    if current is not None and current.failure is not None:
        raise current.failure.error()
    assert call.ref is not None
    return call.ref


def calls_of(view: View, seat: Seat) -> tuple[Call, ...]:
    return decisions_at(view, seat.decisions).calls


def decisions_at(view: View, key: str) -> Decisions:
    """The record of that key, which may be another incarnation's; an empty one: it has none."""
    entry = view.get(key)
    return _decoded(entry.value, key) if entry else NONE_YET


def claims_of(keys: Keys, call: Call, inst: str) -> list[str]:
    """The keys of the claims by which `inst` reads in that call, one on each source."""
    if call.ref is None:
        return []
    run, version = call.ref.run, call.ref.version
    sources = map(k.inst_at, call.sources)
    return [keys.reader_group(run, version, source, inst) for source in sources]


@lru_cache(16)  # a call looks some five times at a record whose 64 calls take 0.1 ms to decode
def _decoded(value: bytes, key: str) -> Decisions:
    return Decisions.decode(value, key)


def group_txn(
    view: View, seat: Seat, call: Call, guards: tuple[Guard, ...] = (), ops: tuple[Op, ...] = ()
) -> Txn:
    """A transaction that writes `call` and everything that comes with it, or nothing (I3)."""
    decisions = decisions_at(view, seat.decisions).with_call(call)
    kept = KNOWN_KEPT if call.was_made_by_all else CALLS_KEPT
    record = Put(seat.decisions, decisions.cut(kept).encode(), own_group(view, seat).lease_id)
    own = (view.unchanged(seat.group), view.unchanged(seat.decisions))
    return Txn((*own, *guards), (record, *ops))


def recorded(
    view: View, seat: Seat, call: Call, guards: tuple[Guard, ...] = (), ops: tuple[Op, ...] = ()
) -> Act[Call]:
    return Act(group_txn(view, seat, call, guards, ops), lambda _: call)


def recall(view: View, seat: Seat, number: int) -> Call | None:
    """The group's call `number`, or None if nobody has made it yet.

    Raises: SeatLost: It was made, and is forgotten: it must not be decided again (I3).
    """
    call = find(view, seat, number)
    if call is None and number < decisions_at(view, seat.decisions).forgotten_below:
        raise forgotten(seat, number)
    return call


def forgotten(seat: Seat, number: int) -> Fenced:
    return Fenced(seat.replica, f"call {number} is older than the calls that the group remembers")


def holding_put(view: View, seat: Seat, ref: VersionRef, holding: Holding) -> Put:
    return Put(seat.holding(ref), holding.encode(), own_group(view, seat).lease_id)
