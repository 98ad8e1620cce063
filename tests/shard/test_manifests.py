"""The ranks of a replica look at what they show together, while one of them comes and goes."""

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import inside

import torch_ros
from torch_ros.protocol.records import ShardRecord
from torch_ros.shard.checkpoint import Checkpoints
from torch_ros.store.txn import Put, Txn


@pytest.fixture
def ranks():
    """Two ranks that hold version 1, each a tensor of its own."""
    options = {"endpoint": f"memory://{uuid.uuid4().hex}", "transport": "memory", "world_size": 2}
    with ThreadPoolExecutor(2) as pool:
        handles = list(
            pool.map(
                lambda rank: torch_ros.open("m", replica="t", rank=rank, ttl_s=2, **options),
                range(2),
            )
        )
        for rank, handle in enumerate(handles):
            handle.register({f"w{rank}": torch.ones(4)})
        list(pool.map(lambda handle: handle.publish(1), handles))
        yield handles
        list(pool.map(lambda handle: handle.close(), handles))


def test_a_first_look_at_the_own_replica_outlives_a_lost_seat(ranks):
    first, second = ranks
    manifests, group = inside(first).manifests, inside(second).group
    looked, layouts = [], manifests.layouts

    def loses_its_seat(inst, deadline):
        if not looked:
            group.kv.revoke(group.seat.lease_id, timeout_s=5)
        looked.append(inst)
        return layouts(inst, deadline)

    manifests.layouts = loses_its_seat
    found = Checkpoints(inside(first)).inspect(1, 20)
    assert {tensor.fqn for layout in found.layouts for tensor in layout.tensors} == {"w0", "w1"}
    assert len(looked) > 1


def test_a_shard_of_no_rank_of_the_group_is_passed_over(ranks):
    first, _ = ranks
    group = inside(first).group
    key = group.seat.keys.shard(group.seat.inst, 7)
    stray = ShardRecord("host", 1, b"no card").encode()
    assert group.kv.commit(Txn(ops=(Put(key, stray),)), timeout_s=5).applied
    found = Checkpoints(inside(first)).inspect(1, 20)
    assert len(found.layouts) == 2
