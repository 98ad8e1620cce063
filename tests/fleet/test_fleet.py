"""`handle.fleet`: all that a model's records say, as values."""

import threading

import pytest
import torch
from kit import inside, published

from torch_ros.deadline import wall_ms
from torch_ros.errors import StoreUnavailable
from torch_ros.fleet.fleet import Fleet
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.membership import adopted
from torch_ros.protocol.records import Holding, Kept, ShardRecord, VersionRecord, VersionRef
from torch_ros.shard.replication import Replication
from torch_ros.store.txn import Put, Read, Txn


def replicated(handle, version="latest"):
    handle.register({"w": torch.empty(4)})
    handle.replicate(version)


def rows(fleet):
    return [
        (each.ref.version, each.replica, each.kind, each.state, each.is_offered)
        for each in fleet.held
    ]


def test_a_fleet_is_told_to_those_who_have_no_handle(opened, endpoint, monkeypatch):
    """And nothing is written for them."""
    trainer = opened("trainer")
    published(trainer, 1)
    found = Fleet.at(trainer.model, endpoint=endpoint)
    assert rows(found) == rows(trainer.fleet()) == [(1, "trainer", "original", "full", True)]
    monkeypatch.setenv("TORCH_ROS_ENDPOINT", endpoint)
    other = f"{trainer.model}-other"
    assert not Fleet.at(other).versions
    kv = inside(trainer).group.kv
    assert not kv.read(Read((Keys(other).all(),)), timeout_s=20).entries


def test_no_etcd_is_started_to_tell_a_fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_ROS_LOCAL_DIR", str(tmp_path / "etcd"))
    with pytest.raises(StoreUnavailable, match="no etcd of this user runs"):
        Fleet.at("policy", endpoint="local")
    assert not (tmp_path / "etcd").exists()


def test_a_fleet_is_who_has_what_and_where(opened):
    trainer = opened("trainer", retain=(1,), datacenter="west")
    published(trainer, 1)
    spot = opened("spot", spot=True, datacenter="east")
    replicated(spot)
    published(trainer, 2)  # 1 is retained, and a spot replica is no witness: a copy of it stays
    fleet = trainer.fleet()
    assert rows(fleet) == [
        (2, "trainer", "original", "full", True),
        (1, "spot", "replica", "full", True),
        (1, "trainer", "copy", "full", True),
    ]
    assert fleet.latest == inside(trainer).held
    assert [(each.ref.version, each.is_offered) for each in fleet.versions] == [
        (2, True),
        (1, True),
    ]
    assert {(each.tensor_count, each.size_bytes) for each in fleet.versions} == {(1, 16)}
    assert [each.datacenter for each in fleet.held] == ["west", "east", "west"]
    assert {each.replica for each in fleet.holders(fleet.held[-1].ref)} == {"spot", "trainer"}
    found = fleet.replicas["trainer"]
    assert (found.state, found.world_size, found.retain) == ("complete", 1, ("1",))
    assert (found.datacenter, found.spot, found.install) == ("west", False, None)
    assert (fleet.replicas["spot"].datacenter, fleet.replicas["spot"].spot) == ("east", True)
    assert trainer.list() == {2: {"trainer"}, 1: {"spot", "trainer+2"}}


def test_a_fleet_says_since_when(opened):
    began_ms = wall_ms()
    trainer = opened("trainer", retain=(1,))
    published(trainer, 1)
    spot = opened("spot", spot=True)
    replicated(spot)
    before = trainer.fleet()
    published(trainer, 2)  # a copy of 1 stays
    spot.unpublish()
    after = trainer.fleet()
    moments = [each.at_ms for each in (after.versions[1], before.versions[0], after.versions[0])]
    assert began_ms <= moments[0] == moments[1] <= moments[2] <= wall_ms()
    by_kind = {each.kind: each.since_ms for each in (*before.held, *after.held)}
    assert set(by_kind) == {"original", "replica", "copy"}
    assert all(moments[0] <= since_ms <= wall_ms() for since_ms in by_kind.values())


def test_a_reader_that_comes_back_knows_when_its_version_was_published(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1)
    replicated(rollout)
    [there] = trainer.fleet().versions
    kept = inside(rollout).group.ledger.held
    assert kept.at_ms == there.at_ms
    assert kept.record(None, "rollout").at_ms == there.at_ms
    original = inside(trainer).group.ledger.held
    assert (original.record(None, "trainer").by, kept.record(None, "rollout").by) == ("trainer", "")


def test_ranks_that_come_back_agree_whatever_their_clocks_said():
    ref = VersionRef("run", 1, "uid", 1)
    kept = [Kept(ref, 3, "L", is_original=True, at_ms=at_ms) for at_ms in (5, 6)]
    shards = [ShardRecord("host", rank, b"", kept=each) for rank, each in enumerate(kept)]
    assert adopted(shards)[1] == kept[0]
    others = [ShardRecord("host", 1, b"", kept=Kept(ref, 4, "L", is_original=True, at_ms=5))]
    assert adopted([shards[0], *others])[1] is None


def test_a_reader_is_seen_at_both_ends(opened, monkeypatch):
    trainer, rollout = opened("trainer"), opened("rollout", installs=False)
    published(trainer, 1)
    seen, goes_on = threading.Event(), threading.Event()
    fetch = Replication._fetch

    def waits(self, *args):
        seen.set()
        goes_on.wait(10)
        return fetch(self, *args)

    monkeypatch.setattr(Replication, "_fetch", waits)
    reading = threading.Thread(target=replicated, args=(rollout,))
    reading.start()
    seen.wait(10)
    fleet = trainer.fleet()
    goes_on.set()
    reading.join(20)
    by_name = {each.replica: each for each in fleet.held}
    assert by_name["trainer"].readers == ("rollout",)
    assert by_name["rollout"].sources == ("trainer",)
    assert (by_name["rollout"].state, by_name["rollout"].is_offered) == ("filling", False)
    after = trainer.fleet()
    assert [(each.readers, each.sources) for each in after.held] == [((), ()), ((), ())]


def test_an_engine_says_what_it_uses(opened):
    trainer = opened("trainer")
    published(trainer, 1)
    rollout = opened("rollout", installs=True)
    with rollout.installing(1):
        rollout.read(1, {"w": torch.empty(4)})
    fleet = trainer.fleet()
    assert fleet.replicas["rollout"].install.active.version == 1
    assert fleet.replicas["trainer"].install is None


def test_an_empty_model_has_its_own_replica_only(opened):
    fleet = opened("alone").fleet()
    assert (fleet.held, fleet.latest, fleet.versions) == ((), None, [])
    assert list(fleet.replicas) == ["alone"]
    assert list(fleet.runs.values()) == [1]


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_record_that_cannot_be_read_is_not_there(opened):
    trainer = opened("trainer")
    published(trainer, 1)
    shard = inside(trainer)
    keys, held = Keys(trainer.model), shard.held
    ops = (
        Put(keys.holding(held.run, 1, "default", "ghost@00000000"), b"{"),
        Put(keys.group("ghost"), b"[]"),
    )
    shard.group.kv.commit(Txn((), ops), timeout_s=5)
    assert rows(trainer.fleet()) == [(1, "trainer", "original", "full", True)]


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_full_is_not_offered_that_readers_are_not_given(opened):
    trainer = opened("trainer")
    published(trainer, 1)
    shard = inside(trainer)
    keys, held = Keys(trainer.model), shard.held
    other = Holding("0123456789abcdef", 1, "full", 1)  # of another content with this number
    moved = Holding(held.uid, 1, "full", 1, "east")  # whose key says that it is elsewhere
    puts = [
        Put(keys.holding(held.run, 1, "default", f"{name}@00000000"), record.encode())
        for name, record in (("other", other), ("moved", moved))
    ]
    shard.group.kv.commit(Txn((), tuple(puts)), timeout_s=5)
    # A holding under another datacenter's key cannot be read, as everywhere.
    assert {row[1]: row[4] for row in rows(trainer.fleet())} == {"other": False, "trainer": True}
    assert trainer.list() == {1: {"trainer"}}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("ab/2/16", (2, 16)),
        ("ab/0/0", (0, 0)),
        ("", None),
        ("ab", None),
        ("ab/2", None),
        ("a/x/1", None),
    ],
)
def test_a_layout_says_how_much_there_is(layout, sizes):
    assert VersionRecord("uid", layout).sizes == sizes
