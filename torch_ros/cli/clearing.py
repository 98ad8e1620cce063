"""`torch-ros gc`: delete what nobody alive has left behind in a model's keys."""

from collections.abc import Sequence

from torch_ros.cli import asking
from torch_ros.cli.leftovers import Leftover, clearing, leftovers
from torch_ros.deadline import wall_ms
from torch_ros.errors import Contention
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import SeenRecord
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read

FORGOTTEN_MS = 7 * 86_400_000  # since a process of another host took its seat
LOST_MAX = 64  # races with those who are alive


def found(kv: KV, model: str) -> Sequence[Leftover]:
    keys = Keys(model)
    view = kv.read(Read((keys.all(),)), timeout_s=asking.ANSWER_S)
    return leftovers(view, keys, _may_go)


def _may_go(record: SeenRecord) -> bool:
    state = asking.state_of(record)
    is_old = wall_ms() - record.at_ms > FORGOTTEN_MS
    return state in {"gone", "replaced", "closed"} or (state.startswith("other") and is_old)


def clear(kv: KV, model: str) -> Sequence[Leftover]:
    """Delete all of it, and return that. A record that somebody begins to use meanwhile stays.

    Raises: Contention: Somebody else wrote there all the time.
    """
    gone: dict[str, Leftover] = {}
    lost = 0
    while lost < LOST_MAX:
        left = found(kv, model)
        if not left:
            return list(gone.values())
        txn = clearing(left)
        if kv.commit(txn, timeout_s=asking.ANSWER_S).applied:
            gone |= {each.key: each for each in left[: len(txn.ops)]}
        else:
            lost += 1
    raise Contention(f"gc of model {model!r}", LOST_MAX)
