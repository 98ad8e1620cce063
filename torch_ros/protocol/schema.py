"""The number of the format of a model's keys and records: one for all that stands in them. Pure.

No release reads another one's format. This says so by name, before a record that means something
else is believed.
"""

from torch_ros.errors import BackendError
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import SchemaRecord
from torch_ros.release import RELEASE
from torch_ros.store.txn import Created, Guard, Put, View

SCHEMA = 5  # changes with the keys and records of docs/protocol/records.md


def require_own(view: View, keys: Keys) -> bool:
    """Whether the model has a number yet, which is then this release's.
    Raises: BackendError: Another release has written the model's records.
    """
    there = SchemaRecord.at(view, keys.schema())
    if there is not None and there.number != SCHEMA:
        raise BackendError(
            f"model {keys.model!r} is served by release {there.release} of torch_ros (format "
            f"{there.number}), and this is release {RELEASE} (format {SCHEMA}); use one "
            "release for all processes of a model, or another name for it; when no process of "
            f"that release runs any more: etcdctl del --prefix {keys.root}/"
        )
    return there is not None


def put_own(view: View, keys: Keys) -> tuple[tuple[Put, ...], tuple[Guard, ...]]:
    """The record of a model that has no number yet, and the guard that it is, or is not, there.
    Raises: BackendError: As `require_own`.
    """
    if require_own(view, keys):  # guarded: `torch-ros gc` deletes all of an unused model
        there = view.entries[keys.schema()]
        return (), (Created(keys.schema(), there.create_rev),)
    record = SchemaRecord(SCHEMA, RELEASE)
    return (Put(keys.schema(), record.encode()),), (view.unchanged(keys.schema()),)
