"""The rule by which a retained version may be given up."""

import pytest

from torch_ros.deadline import Deadline
from torch_ros.errors import UsageError
from torch_ros.features.retention.rules import Wish, keeping, keeping_ranges
from torch_ros.memory.store import MemoryKV
from torch_ros.protocol import records
from torch_ros.protocol.keeping import GivenUp
from torch_ros.protocol.keys import Keys
from torch_ros.store.loops import Done, settle
from torch_ros.store.run import run
from torch_ros.store.txn import Delete, Put, Txn, one

KEYS = Keys("m")


@pytest.mark.parametrize("spec", ["5", "latest", "latest-1"])
def test_an_older_runs_copy_goes_only_while_a_newer_run_is_held(spec):
    kv, old = MemoryKV(), records.VersionRef("one", 5, "u", 1)
    holdings = {}
    for number, (name, version, inst) in enumerate((("one", 5, "r1@x"), ("two", 9, "r2@x")), 1):
        holdings[name] = KEYS.holding(name, version, "default", inst)
        there = {
            KEYS.run(name): records.RunRecord("h:1", number),
            KEYS.version(name, version): records.VersionRecord("u", "L"),
            holdings[name]: records.Holding("u", 1, "full", 1),
        }
        for key, record in there.items():
            assert kv.commit(Txn(ops=(Put(key, record.encode()),)), timeout_s=1).applied
    who = records.GroupRecord("x", 1, "two", retain=[spec], is_complete=True)
    assert kv.commit(Txn(ops=(Put(KEYS.group("r0"), who.encode()),)), timeout_s=1).applied

    def rule(view):
        return Done(keeping(view, KEYS, old, GivenUp("r1@x", "default")))

    steps = settle("test", keeping_ranges(KEYS, old, "default"), rule)
    keep = run(steps, kv, Deadline("test", 9))
    assert not keep.is_needed  # "5" means a version of the newest run, which has none
    assert kv.commit(Txn(ops=(Delete(one(holdings["two"])),)), timeout_s=1).applied
    assert not kv.commit(Txn(keep.guards, (Delete(one(holdings["one"])),)), timeout_s=1).applied


@pytest.mark.parametrize("where", ["", "@here"])
def test_a_wish_for_a_number_that_is_too_great_is_told_the_bound(where):
    with pytest.raises(UsageError, match=f"expected 0 <= version <= {2**63 - 1}"):
        Wish.parse("9" * 20 + where)
