"""Whether a source that makes no progress is there still, by whatever name. Pure."""

from torch_ros.protocol import keys as k
from torch_ros.protocol import legible
from torch_ros.protocol.records import Call, VersionRef
from torch_ros.protocol.seat import Seat, version_read
from torch_ros.protocol.sources import Source
from torch_ros.store.loops import Done, Step
from torch_ros.store.txn import Range, View, one, under


def there_ranges(seat: Seat, ref: VersionRef, source: Source) -> tuple[Range, ...]:
    """Where the holdings of a source are, also when its processes have taken their seats again."""
    keys = (
        seat.keys.holding(ref.run, ref.version, source.datacenter, k.first_of(inst))
        for inst in source.insts
    )
    return tuple(range_ for key in keys for range_ in (one(key), under(f"{key}.")))


def is_there(view: View, seat: Seat, call: Call, source: Source) -> Step[bool]:
    """Whether a source that makes no progress may still make some."""
    return Done(still_offers(view, seat, version_read(view, seat, call), source))


def offers(view: View, seat: Seat, ref: VersionRef, source: Source) -> Step[bool]:
    """As `is_there`, for who reads outside of a call."""
    return Done(still_offers(view, seat, ref, source))


def still_offers(view: View, seat: Seat, ref: VersionRef, source: Source) -> bool:
    """Whether what its processes show is held still, by whatever name."""
    for range_ in there_ranges(seat, ref, source):
        for _, where, holding, entry in legible.holdings(view.within(range_)):
            # Processes that came back with all of it show it with the mark that they had; those
            # that are filling are younger than their readers then.
            is_born_then = (where.inst, entry.create_rev) == (source.inst, source.born)
            is_same = source.is_full or is_born_then or k.lingers(where.inst)
            is_same &= holding.state != "filling" or holding.is_relay
            if is_same and holding.mark == source.mark:
                return True
    return False
