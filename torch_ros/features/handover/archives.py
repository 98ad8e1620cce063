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
    """The record says this, on the lease of an archiver, which has one rank.

    Raises:
        SeatLost: Another one may have its name by now.
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

    None has anything to do with what no replica published.
    """
    if ref.run == k.OUTSIDE:
        return []
    found = readable(view.within(keys.archives()), k.parse_archive, ArchiveRecord)
    return [name for _, name, said, _ in found if said.ref is None or _is_behind(said.ref, ref)]


def _is_behind(said: VersionRef, ref: VersionRef) -> bool:
    """A number that has another content is not that version."""
    return said.uid != ref.uid and said.order <= ref.order
