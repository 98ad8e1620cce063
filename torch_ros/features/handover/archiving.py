"""An archiver says what its bucket has, so that the last version is not taken from it."""

from collections.abc import Callable
from functools import partial

from torch_ros.errors import SeatLost
from torch_ros.features.handover import archives as rules
from torch_ros.protocol.records import ArchiveRecord, VersionRef
from torch_ros.shard.core import Shard
from torch_ros.shard.finding import wait_for
from torch_ros.store.loops import settle


class Archives:
    """The record of one handle's replica, which has one rank."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._said: tuple[str, VersionRef | None] | None = None  # by which incarnation, and what

    def say(self, ref: VersionRef | None, *, timeout_s: float | None = None) -> None:
        """Tell who closes that the bucket has this version, or a newer one; None: none yet.

        It is said again by a handle that has taken another seat. One that is on its way to a seat
        says nothing. The second time costs no request.

        Raises:
            SeatLost: For good, if it is a `Fenced`.
            DeadlineExceeded, BackendError: etcd does not answer.
        """
        self._shard.busy(partial(self._say, ref, timeout_s))

    def wait(
        self, predicate: Callable[[dict[int, set[str]]], bool], *, timeout_s: float | None = None
    ) -> dict[int, set[str]]:
        """As `ShardHandle.wait`, where what no replica published does not count."""
        return wait_for(self._shard, predicate, timeout_s, of_trainers=True)

    def _say(self, ref: VersionRef | None, timeout_s: float | None) -> None:
        """As `say`, while no other call is made. Without a seat it says nothing."""
        group = self._shard.group
        seat, session = group.seat, group.session
        if group.state != "seated" or self._said == (seat.inst, ref):
            return
        deadline = self._shard.deadline("saying what a bucket has", timeout_s)
        rule = partial(rules.say, seat=seat, said=ArchiveRecord(ref))
        try:
            group.run(settle(deadline.what, rules.said_ranges(seat), rule), deadline)
        except SeatLost as lost:
            group.fence(lost, session)
            raise
        self._said = (seat.inst, ref)
