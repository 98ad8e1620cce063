"""How a replica offers what it has read before (docs/protocol/serving.md#serve). Pure."""

from torch_ros.errors import VersionNotFound
from torch_ros.protocol.calls import filling, require_nothing_held
from torch_ros.protocol.records import Call, VersionRecord, VersionRef
from torch_ros.protocol.seat import Seat, holding_put, recorded
from torch_ros.store.loops import Step
from torch_ros.store.txn import Put, Ranges, View, one, sample


def serve_ranges(seat: Seat, ref: VersionRef) -> Ranges:
    keys = seat.keys
    return (
        one(keys.run(ref.run)),
        one(keys.version(ref.run, ref.version)),
        sample(keys.holdings()),
    )


def serve(view: View, seat: Seat, call: Call, ref: VersionRef) -> Step[Call]:
    """Announce what this replica has read as `ref`; it is offered once every rank has proven it.

    Nobody need hold it any more: while its record has this uid, its number means this content.
    """
    require_nothing_held(view, seat)
    keys = seat.keys
    key, run = keys.version(ref.run, ref.version), keys.run(ref.run)
    record = VersionRecord.at(view, key)
    reason = ""
    if record is None or not record.layout or view.get(run) is None:
        reason = "it is gone since this replica has read it"
    elif record.uid != ref.uid:
        reason = "it was published anew, as other content, since this replica has read it"
    if reason:
        raise VersionNotFound(keys.model, str(ref.version), f"{reason}; read a newer one")
    assert record is not None
    held = holding_put(view, seat, ref, filling(seat, call, ref))
    guards = (view.unchanged(key), view.unchanged(run))
    decided = record.brought_by(call, ref)
    # A publication that has seen nobody hold the number looks again.
    again = Put(key, record.encode())
    return recorded(view, seat, decided, guards, (again, held))
