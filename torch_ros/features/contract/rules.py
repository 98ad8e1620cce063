"""Withdrawing a version whose publisher has written to it while it was offered. Pure."""

from hashlib import blake2b

import msgspec

from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import VersionRecord, VersionRef
from torch_ros.store.loops import Act, Done, Step
from torch_ros.store.txn import Put, Ranges, Txn, View, one


def _withdrawn_uid(uid: str) -> str:
    """The uid in the record of a version from which this content was withdrawn; nobody holds it."""
    return blake2b(f"withdrawn/{uid}".encode(), digest_size=8).hexdigest()


def withdraw_ranges(keys: Keys, ref: VersionRef) -> Ranges:
    return (one(keys.version(ref.run, ref.version)),)


def withdraw(view: View, keys: Keys, ref: VersionRef) -> Step[None]:
    """Give the version's record a uid that nobody holds: no holder of this content is a source any
    more, and a read under way cannot complete.

    It is done where the number means something else already, or nothing.
    """
    key = keys.version(ref.run, ref.version)
    record = VersionRecord.at(view, key)
    if record is None or record.uid != ref.uid:
        return Done(None)
    gone = msgspec.structs.replace(record, uid=_withdrawn_uid(ref.uid), layout="")
    return Act(Txn((view.unchanged(key),), (Put(key, gone.encode()),)), lambda _: None)


def is_withdrawn(view: View, keys: Keys, held: VersionRef) -> bool:
    record = VersionRecord.at(view, keys.version(held.run, held.version))
    return record is not None and record.uid == _withdrawn_uid(held.uid)
