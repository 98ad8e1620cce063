"""The layouts that the ranks of a replica show, this one's included."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from torch_ros.deadline import Deadline
from torch_ros.errors import BackendError, SourceLost, TransferFailed
from torch_ros.protocol.group import Group
from torch_ros.protocol.keys import parse_rank, replica_of
from torch_ros.protocol.legible import keyed
from torch_ros.protocol.records import Outcome, ShardRecord, answers_of
from torch_ros.protocol.seat import own_group
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Range, View
from torch_ros.transfer.mailbox import Mailbox
from torch_ros.transfer.peers import Peers
from torch_ros.transfer.registered import LocalState
from torch_ros.transfer.stall import SourceWait
from torch_ros.weights.coverage import is_whole, require_whole, sharding
from torch_ros.weights.manifest import Layout, Manifest, logical


class Manifests:
    """Asks etcd where the ranks of a replica are, and each of them what it shows."""

    def __init__(self, group: Group, mailbox: Mailbox, peers: Peers) -> None:
        self._group, self._mailbox, self._peers = group, mailbox, peers

    def layouts(self, inst: str, deadline: Deadline) -> list[Layout]:
        """The layouts that the ranks of replica `inst` show now, rank by rank."""
        is_own = inst == self._group.seat.inst
        manifests = self.own(deadline) if is_own else self.of(inst, deadline)
        return [manifest.layout for manifest in manifests]

    def of(self, inst: str, deadline: Deadline, world_size: int = 1) -> list[Manifest]:
        """The manifests that the ranks of another replica show now, rank by rank.

        Raises: SourceLost: One of them is gone; `world_size` is how many there are at least.
        """
        return self._shown(self.shards(inst, deadline, world_size), replica_of(inst), deadline)

    def own(self, deadline: Deadline) -> list[Manifest]:
        """The manifests that the ranks of this replica show now, rank by rank.

        Raises:
            SeatLost: The group, or this rank's seat in it, is gone. A peer without one is awaited.
            SourceLost: A peer shows nothing; or this rank took its tensors back without etcd.
        """
        seat = self._group.seat
        shards = self._own_shards(deadline)
        peers = [shard for rank, shard in enumerate(shards) if rank != seat.rank]
        manifests = self._shown(peers, seat.replica, deadline)
        own = self._mailbox.manifest
        if own is None:
            raise SourceLost(seat.replica, f"rank {seat.rank} has taken its tensors back")
        manifests.insert(seat.rank, own)
        return manifests

    def together(
        self,
        registered: LocalState,
        said: Mapping[int, str],
        deadline: Deadline,
        *,
        is_required: bool = True,
    ) -> Outcome:
        """The layout that the ranks have every element of, once all are ready (I9).

        Peers' manifests are looked at only if no call has ended yet with the same answers: a
        trainer that saves the same tensors at each step pays for it once.

        Args:
            said: By rank, the digest of the sharding that it has.
            is_required: Whether a part is an error; else the outcome then has no layout.

        Raises:
            ManifestMismatch: It is required, and an element is missing.
            SourceLost: A rank shows other tensors than it was ready with.
        """
        answers = answers_of(said)
        # None: no call has ended with these answers yet. "": one has, and the ranks lacked a part.
        layout = self._group.ledger.layout_of(answers)
        if layout is None or (is_required and not layout):
            layouts = self._layouts_of(registered, said, deadline)
            if is_required:
                require_whole(layouts)
            if is_required or is_whole(layouts):
                layout = logical(layouts).digest
        return Outcome(said=layout or "", answers=answers)

    def _layouts_of(
        self, registered: LocalState, said: Mapping[int, str], deadline: Deadline
    ) -> Sequence[Layout]:
        """The layouts that all ranks show; this rank's alone, if each rank has everything."""
        mine = registered.sharding
        have_all_the_same = mine.is_whole and set(said.values()) == {mine.digest}
        if have_all_the_same or len(said) == 1:
            return [registered.layout]
        layouts = [manifest.layout for manifest in self.own(deadline)]
        for rank, layout in enumerate(layouts):
            if sharding(layout).digest != said[rank]:
                reason = f"rank {rank} shows other tensors than it was ready with"
                raise SourceLost(self._group.seat.replica, reason)
        return layouts

    def alone(self, registered: LocalState) -> Outcome:
        """The outcome of `together`, as far as this rank can tell without its peers.

        It can if the last call ended with the same from this rank, or if this rank has all itself.
        Otherwise the outcome has no answers.

        Raises: ManifestMismatch: It is alone, and an element is missing.
        """
        mine, world_size = registered.sharding, self._group.seat.world_size
        as_last_time = self._group.ledger.end_of(mine.digest)
        if as_last_time.answers:
            return as_last_time
        if world_size == 1:
            require_whole([registered.layout])
        elif not mine.is_whole:
            return Outcome()
        answers = answers_of(dict.fromkeys(range(world_size), mine.digest))
        return Outcome(said=logical([registered.layout]).digest, answers=answers)

    def _shown(
        self, shards: Sequence[ShardRecord], source: str, deadline: Deadline
    ) -> list[Manifest]:
        """Read the manifests of these processes, one after the other.

        A mute peer of this replica is waited for; another replica is left after a while, as lost.
        """
        manifests = []
        has_other = None if source == self._group.seat.replica else lambda _: True
        for rank, shard in enumerate(shards):
            mute = SourceWait(source, deadline, is_there=lambda: True, has_other=has_other)
            still = partial(mute.look, f"rank {rank} does not answer")
            try:
                _, manifest = self._peers.manifest(shard.card, deadline, still)
                manifests.append(manifest)
            except TransferFailed as error:
                self._peers.forget(error.agent)
                raise SourceLost(source, f"rank {rank}: {error.reason}") from error
        return manifests

    def shards(self, inst: str, deadline: Deadline, world_size: int = 1) -> list[ShardRecord]:
        """The records of the ranks of replica `inst`, rank by rank.

        Raises: SourceLost: One of them is gone; `world_size` is how many there are at least.
        """
        within = self._group.seat.keys.shards(inst)
        found = self._group.ask((within,), lambda v: Done(_records(v, inst, within)), deadline)
        if len(found) < world_size:
            reason = f"{len(found)} of its {world_size} processes are alive"
            raise SourceLost(replica_of(inst), reason)
        return found

    def _own_shards(self, deadline: Deadline) -> list[ShardRecord]:
        """The records of all ranks of this group; one without a seat is waited for."""
        seat = self._group.seat
        within = seat.keys.shards(seat.inst)

        def rule(view: View) -> Step[list[ShardRecord]]:
            own_group(view, seat)
            shards = _records(view, seat.inst, within, seat.world_size)
            if len(shards) == seat.world_size:
                return Done(shards)
            # A rank has lost its seat, and the others alone do not show all that the group holds.
            reason = (
                f"{len(shards)} of {seat.world_size} ranks of {seat.replica!r} have their seats"
            )
            return Wait(reason, (*seat.own, within))

        return self._group.ask((*seat.own, within), rule, deadline)


def _records(
    view: View, inst: str, within: Range, world_size: float = math.inf
) -> list[ShardRecord]:
    """The shard records of a group's ranks below `world_size`; one that is illegible is lost."""
    found = keyed(view.within(within), parse_rank)
    try:
        return [ShardRecord.decode(e.value, key) for key, rank, e in found if rank < world_size]
    except BackendError as error:
        raise SourceLost(replica_of(inst), str(error)) from error
