"""The other models of an etcd, for people who wait for a version of a model that has none."""

from torch_ros.errors import TorchRosError
from torch_ros.protocol import keys as k
from torch_ros.protocol.group import Group
from torch_ros.protocol.keys import Keys
from torch_ros.store.kv import KV
from torch_ros.store.txn import Read, Sample, View, Watch, sample

RECORDS_MAX = 50  # the youngest are looked at: a list for people, and etcd has other work
MODELS_MAX = 8  # are named
SURVEY_S = 1.0


def hint(group: Group, watch: Watch) -> str:
    """The other models, for a wait for a version."""
    keys = group.seat.keys
    return other_models(group.kv, keys) if keys.versions() in watch.ranges else ""


def other_models(kv: KV, keys: Keys) -> str:
    """The models that have records, in words; "" if this one has a version, or nobody can say.

    Three requests at most; a role that may read one model only gets no list.
    """
    try:
        own = sample(keys.versions())
        if any(_versions(kv.read(Read((own,)), timeout_s=SURVEY_S), keys)):
            return ""
        youngest = kv.read(Read((Sample(k.EVERY_MODEL, RECORDS_MAX),)), timeout_s=SURVEY_S)
        names = sorted(filter(None, {k.parse_model(key) for key in youngest.entries}))
        there = [Keys(name) for name in names[:MODELS_MAX] if name != keys.model]
        view = kv.read(Read(tuple(sample(each.versions()) for each in there)), timeout_s=SURVEY_S)
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
