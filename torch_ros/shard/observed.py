"""The facts about one shard that collectors ask for, from any thread and at any time."""

from collections import defaultdict
from collections.abc import Callable

from torch_ros.protocol.group import Group
from torch_ros.protocol.records import VersionRef
from torch_ros.shard.report import Reports
from torch_ros.shard.tally import Tally, Whose, tallies, without_pid
from torch_ros.transfer.reading import Reading


class Observed:
    """Counted and noted by the shard's calls; read by nobody in them."""

    def __init__(self, model: str, group: Group, reports: Reports, reading: Reading) -> None:
        self._group, seat = group, group.seat
        self.tally: Tally = tallies.begin(Whose(model, without_pid(seat.replica), str(seat.rank)))
        reports.listeners.append(self.tally.add)
        self.newest: VersionRef | None = None  # that its calls have heard of
        self.staged: dict[str, Callable[[], int]] = {  # bytes that it holds beside its tensors
            "staging": lambda: reading.staging_bytes
        }

        # The things that have not ended yet, by their kind.
        self.open: defaultdict[str, set[object]] = defaultdict(set)

    def heard_of(self, ref: VersionRef | None) -> None:
        """Note a version that somebody has, if it is newer than what was heard of before."""
        if ref is not None and (self.newest is None or ref.order > self.newest.order):
            self.newest = ref

    def end(self) -> None:
        """The shard is closed; its counts stay."""
        self.tally.seats_lost = self._group.ledger.seats_lost
        tallies.end(self.tally)
