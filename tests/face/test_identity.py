"""Which rank of which replica a process is, from what it was started with."""

import signal
import threading
from itertools import product

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend "fake"

from torch_ros.errors import BackendError, DeadlineExceeded, UsageError
from torch_ros.face import identity
from torch_ros.face.identity import identify

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job7", "ROLE_NAME": "actor"}


def found(replica=None, rank=None, world_size=None):
    return identify("m", replica, rank, world_size, timeout_s=5)


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


STORES = {
    "file": lambda path: dist.FileStore(f"{path}/store", 2),
    "hash": lambda _: dist.HashStore(),
    "prefix": lambda path: dist.PrefixStore("job", dist.FileStore(f"{path}/store", 2)),
    "tcp": lambda _: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


class Torn(dist.Store):
    """A store whose server has ended."""

    def check(self, *_):
        raise dist.DistNetworkError("Connection reset by peer")

    set = get = wait = check


@pytest.fixture
def grouped():
    """Makes a process group of two around a store, in which this is one rank."""

    def group(store, rank):
        identity._opens.clear()
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        return dist.distributed_c10d._get_default_store()

    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("replica", [None, "named"])
def test_a_rank_0_that_does_not_come_is_a_deadline_in_any_store(grouped, tmp_path, kind, replica):
    store = grouped(STORES[kind](tmp_path), 1)
    for _ in range(2):  # whoever tries again waits for the same one
        with pytest.raises(DeadlineExceeded, match="rank 0 of the process group has not opened"):
            identify("m", replica, None, None, timeout_s=0.05)
    store.set("torch_ros/open/m/0", "abcd named")
    assert found(replica) == identity.Identity("named", 1, 2, "abcd")
    with pytest.raises(DeadlineExceeded):  # the next handle of the same model
        identify("m", replica, None, None, timeout_s=0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_of_the_process_group_that_fails_is_named(grouped, monkeypatch, rank):
    grouped(dist.HashStore(), rank)
    monkeypatch.setattr(identity, "_get_default_store", Torn)
    with pytest.raises(BackendError, match=r"\(Torn\) failed: DistNetworkError"):
        found()
    monkeypatch.setattr(identity, "_get_default_store", lambda: None)
    with pytest.raises(BackendError, match="NoneType"):
        found()


def test_ctrl_c_ends_the_wait_for_rank_0(grouped, tmp_path):
    grouped(STORES["file"](tmp_path), 1)
    main = threading.main_thread().ident
    ctrl_c = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            found()
    finally:
        ctrl_c.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("name", "text"), [*product(["RANK", "WORLD_SIZE"], ["x", "1.5", "-1"])])
def test_garbage_in_the_environment_is_named_where_it_counts(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=rf"{name}='{text}'"):
        found()
    assert found("r", 0, 1).world_size == 1  # nobody asks the environment
    monkeypatch.setenv(name, "")
    assert found().rank == 0
