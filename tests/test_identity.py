"""Which rank of which replica a process is, from what it was started with."""

import pytest
import torch.distributed as dist

from torch_ros.errors import UsageError
from torch_ros.shard import identity
from torch_ros.shard.identity import identify

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job7", "ROLE_NAME": "actor"}


def found(replica=None, rank=None, world_size=None):
    return identify(replica, rank, world_size, timeout_s=5)


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    identity._names_taken.clear()


def test_a_process_alone_has_a_name_of_its_own(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    first, second = found(), found()
    assert (first.rank, first.world_size) == (0, 1)
    assert first.replica != second.replica


def test_torchrun_without_a_process_group_gives_rank_run_and_role(torchrun):
    first, second = found(), found()
    assert (first.rank, first.world_size, first.nonce) == (1, 4, None)
    assert (first.replica, second.replica) == ("job7-actor", "job7-actor-1")


def test_a_run_id_of_none_is_no_name(torchrun, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match="replica='...'"):
        found()
    assert found("given").replica == "given"


def test_other_ranks_than_torchruns_need_a_name(torchrun):
    with pytest.raises(UsageError, match="rank 0 of 2"):
        found(rank=0, world_size=2)
    assert found(rank=0, world_size=1).world_size == 1


def test_a_process_group_of_one_is_one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        alone = found()
        assert (alone.rank, alone.world_size) == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks_are_named(rank, world_size):
    with pytest.raises(UsageError, match="expected 0 <= rank < world_size"):
        found("r", rank, world_size)
