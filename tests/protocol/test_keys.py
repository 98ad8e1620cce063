"""Every key parses back, and no name reaches into another's prefix."""

import pytest

from torch_ros.protocol import keys as k
from torch_ros.protocol.keys import Keys

HOSTILE = ("m", "Qwen/Qwen3", "a/shards/b", "../x", "%2F", " ", "naïve", "a@b", "m/0001", "é\0")


@pytest.mark.parametrize("name", HOSTILE)
def test_keys_parse_back(name):
    keys = Keys(name)
    inst = k.instance(name, "beef")
    assert k.replica_of(inst) == name
    assert k.parse_run(keys.run(name)) == name
    assert k.parse_archive(keys.archive(name)) == name
    assert keys.archive(name) in keys.archives()
    assert k.parse_version(keys.version(name, 7)) == (name, 7)
    held = keys.holding(name, 7, name, inst)
    assert k.parse_holding(held) == k.HoldingKey(name, 7, name, inst)
    assert held == keys.holding_at(name, 7, k.place(name, inst))
    assert k.inst_at(k.place(name, inst)) == inst
    assert held in keys.holdings_in(name, 7, name)
    assert held in keys.holdings_of(name, 7)
    assert k.parse_reader(keys.reader_group(name, 7, inst, "r@1")) == (inst, "r@1", "group")
    assert k.parse_reader(keys.reader(name, 7, inst, "r@1", 3)) == (inst, "r@1", "000003")


def test_no_model_reaches_into_another():
    ranges = {name: Keys(name).versions() for name in HOSTILE}
    for name in HOSTILE:
        key = Keys(name).version("run", 1)
        assert [other for other, range_ in ranges.items() if key in range_] == [name]


def test_no_run_replica_or_call_reaches_into_another():
    keys = Keys("m")
    assert keys.version("a", 1) not in keys.versions("a/b")
    assert keys.version("a/b", 1) not in keys.versions("a")
    assert keys.shard("r@1", 0) not in keys.shards("r@11")
    assert keys.ready("r@1", 11, 0) not in keys.readies("r@1", 1)
    assert keys.reader("a", 1, "s@1", "r@1", 0) not in keys.readers_of("a", 1, "s@11")


def test_key_order_is_version_order():
    keys = Keys("m")
    versions = [0, 1, 9, 10, 99, 2**31, 2**53 + 1, k.VERSION_MAX]
    listed = [keys.version("run", version) for version in versions]
    assert listed == sorted(listed)
    above = keys.versions_above("run", 9)
    assert [v for v, key in zip(versions, listed, strict=True) if key in above] == versions[3:]
    assert keys.version("run2", 10) not in above
