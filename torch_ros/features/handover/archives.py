"""What an archiver says that its bucket has, for who closes: docs/protocol/archives.md. Pure."""

from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.legible import readable
from torch_ros.protocol.records import ArchiveRecord, VersionRef
from torch_ros.protocol.seat import Seat, own_group
from torch_ros.store.loops import Act, Done, Step
from torch_ros.store.txn import Put, Ranges, Txn, View, one


def said_ranges(seat: Seat) -> Ranges:
    return (one(seat.group), one(seat.keys.archive(seat.replica)))


def say(view: View, seat: Seat, said: ArchiveRecord) -> Step[None]:
    """Make the archiver's record say this, on the lease of its only rank; no write if it does.

    Raises: SeatLost: Another process may have its name by now.
    """
    own_group(view, seat)
    key, value = seat.keys.archive(seat.replica), said.encode()
    there = view.get(key)
    if there is not None and (there.value, there.lease_id) == (value, seat.lease_id):
        return Done(None)
    return Act(
        Txn((view.unchanged(seat.group),), (Put(key, value, seat.lease_id),)), lambda _: None
    )


def behind(view: View, keys: Keys, ref: VersionRef) -> list[str]:
    """The archivers that have dealt with neither this content yet nor with a newer version.

    Nothing that came from a bucket has to go there.
    """
    if ref.run == k.OUTSIDE:
        return []
    found = readable(view.within(keys.archives()), k.parse_archive, ArchiveRecord)
    return [name for _, name, said, _ in found if said.ref is None or _is_behind(said.ref, ref)]


def _is_behind(said: VersionRef, ref: VersionRef) -> bool:
    """Whether it has dealt with neither: the same number with another content is not `ref`."""
    return said.uid != ref.uid and said.order <= ref.order
