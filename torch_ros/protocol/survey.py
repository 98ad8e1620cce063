"""Which models an etcd has: for people who wait for one that is not there, by a typing error."""

from torch_ros.errors import TorchRosError
from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read, Sample, View, sample

RECORDS_MAX = 50  # the youngest are looked at: a list for people, and etcd has other work
MODELS_MAX = 8  # are named
TIMEOUT_S = 1.0


def other_models(kv: KV, keys: Keys) -> str:
    """The models that have records, in words; "" if this one has a version, or nobody can say.

    Three requests at most; a role that may read one model only gets no list.
    """
    try:
        own = sample(keys.versions())
        if any(_versions(kv.read(Read((own,)), timeout_s=TIMEOUT_S), keys)):
            return ""
        youngest = kv.read(Read((Sample(k.EVERY_MODEL, RECORDS_MAX),)), timeout_s=TIMEOUT_S)
        names = sorted(filter(None, {k.parse_model(key) for key in youngest.entries}))
        there = [Keys(name) for name in names[:MODELS_MAX] if name != keys.model]
        view = kv.read(Read(tuple(sample(each.versions()) for each in there)), timeout_s=TIMEOUT_S)
    except TorchRosError:
        return ""
    found = ", ".join(f"{each.model!r} ({_named(_versions(view, each))})" for each in there)
    return f"; other models in this etcd: {found or 'none'}"


def _versions(view: View, keys: Keys) -> list[int]:
    found = (k.parse_version(key) for key in view.entries if key in keys.versions())
    return sorted({where[1] for where in found if where})


def _named(versions: list[int]) -> str:
    if len(versions) > 1:
        return f"versions {versions[0]} to {versions[-1]}"
    return f"version {versions[0]}" if versions else "no version"
