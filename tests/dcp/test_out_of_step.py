"""An error on one rank, wherever dcp is: that call fails on all ranks, and the next one works.

Ranks are threads here, each with a process group of torch's own test library.
"""

import functools
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit import inside, until
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.testing._internal.distributed import multi_threaded_pg

import torch_ros
from torch_ros.dcp import ROSReader, ROSWriter
from torch_ros.errors import CallAborted, CallMismatch, DeadlineExceeded
from torch_ros.protocol import seating
from torch_ros.shard import beginnings
from torch_ros.shard.checkpoint import SaveRequest
from torch_ros.store.txn import Read
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.local import local_chunks

SIZE = 2
BOUND_S = 25  # below every deadline here
PLANNING = ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
SAVING = [*PLANNING, "resolve_data", "prepare_local_plan", "prepare_global_plan", "write_data"]
LOADING = [*PLANNING, "resolve_tensor", "load_bytes", "commit_tensor"]
LOADING += ["set_up_storage_reader", "prepare_local_plan", "prepare_global_plan"]
LOADING += ["read_metadata", "read_data"]


class Planted(Exception):
    pass


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(seating, "RETRY_S", 0.02)  # between two looks of who minds
    monkeypatch.setattr(beginnings, "LOOK_S", 0.02)


@pytest.fixture(scope="module")
def world():
    """Process groups whose ranks are threads."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    yield
    multi_threaded_pg._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


class Ranks:
    def __init__(self, endpoint, name):
        self.meet = threading.Barrier(SIZE)
        open_ = lambda rank: torch_ros.open(
            "m", endpoint=endpoint, replica=name, rank=rank, world_size=SIZE, timeout_s=30
        )
        with ThreadPoolExecutor(SIZE) as pool:
            self.handles = list(pool.map(open_, range(SIZE)))
        self.kept = []  # writers, readers, exceptions: nothing ends when it is let go of

    def each(self, do):
        """`do` on all ranks, each in a thread: what it returned or raised."""
        store = dist.HashStore()

        def on(rank):
            dist.init_process_group("threaded", rank=rank, world_size=SIZE, store=store)
            try:
                return do(rank, self.handles[rank])
            except BaseException as error:
                return error.with_traceback(None)  # or its frames keep all that was in them
            finally:
                self.meet.wait(BOUND_S)
                dist.destroy_process_group()

        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(on, range(SIZE)))

    def close(self):
        for handle in self.handles:
            handle.close()


@pytest.fixture
def replicas(world, quick):
    endpoint = f"memory://{uuid.uuid4().hex}"
    made = [Ranks(endpoint, "trainer"), Ranks(endpoint, "rollout")]
    yield made
    for ranks in made:
        ranks.close()


def failing(thing, hook):
    """`thing`, one of whose hooks raises."""

    before = getattr(thing, hook)

    @functools.wraps(before)
    def raising(*args, **options):
        if hook == "read_metadata":
            before(*args, **options)  # the call has begun
        raise Planted(hook)

    setattr(thing, hook, raising)


def state(version, rank):
    """Of another structure each time, so that nothing is remembered."""
    return {"w": torch.full((4,), float(version)), f"of {version}": torch.ones(rank + 1), "n": 7}


def save(ranks, version, hook="", *, is_own=False, is_kept=True, **options):
    def do(rank, handle):
        writer = ROSWriter(version, handle=handle)
        planner = writer.planner() if is_own else DefaultSavePlanner()
        ranks.kept += [writer] if is_kept else []
        if hook and rank == SIZE - 1:
            failing(planner if hasattr(planner, hook) else writer, hook)
        dcp.save(state(version, 0), storage_writer=writer, planner=planner, **options)

    return ranks.each(do)


def load(ranks, version, hook="", *, is_own=False, of=None):
    def do(rank, handle):
        reader = ROSReader(version, handle=handle)
        planner = reader.planner() if is_own else DefaultLoadPlanner()
        ranks.kept.append(reader)
        if hook and rank == (0 if "global" in hook else SIZE - 1):
            failing(planner if hasattr(planner, hook) else reader, hook)
        there = state(version if of is None else of, 0)
        got = {key: torch.zeros_like(v) if key != "n" else 0 for key, v in there.items()}
        dcp.load(got, storage_reader=reader, planner=planner)
        assert torch.equal(got["w"], there["w"])

    return ranks.each(do)


def failed(monkeypatch, do, *args, **options):
    """With no patience in this call: what it raised, on all ranks, long before a deadline."""
    began_s = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(beginnings, "PATIENCE_S", 0.05)
        errors = do(*args, **options)
    assert time.monotonic() < began_s + BOUND_S
    assert all(isinstance(error, BaseException) for error in errors), errors
    return errors


both_planners = pytest.mark.parametrize("is_own", [False, True], ids=["dcp's", "ours"])


@both_planners
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(
    replicas, is_own, monkeypatch
):
    trainer, rollout = replicas
    options = {"is_own": is_own, "use_collectives": False}
    for number, hook in enumerate([*SAVING, "set_up_storage_writer"]):
        failed(monkeypatch, save, trainer, 2 * number, hook, **options)
        assert save(trainer, 2 * number + 1, **options) == [None, None], hook
    assert load(rollout, "latest", of=2 * number + 1) == [None, None]


def test_so_does_one_with_collectives(replicas, monkeypatch):
    trainer, rollout = replicas
    for number, hook in enumerate(["set_up_planner", "finish_plan", "resolve_data", "write_data"]):
        failed(monkeypatch, save, trainer, 2 * number, hook)
        assert save(trainer, 2 * number + 1) == [None, None], hook
    assert load(rollout, "latest", of=2 * number + 1) == [None, None]


@both_planners
@pytest.mark.long
def test_a_load_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(
    replicas, is_own, monkeypatch
):
    trainer, rollout = replicas
    for number, hook in enumerate(LOADING):
        if is_own and hook == "load_bytes":
            continue  # it has no use for it
        assert save(trainer, number) == [None, None]
        failed(monkeypatch, load, rollout, number, hook, is_own=is_own)
        assert load(rollout, number, is_own=is_own) == [None, None], hook


def test_a_call_ends_when_nobody_has_its_writer_any_more(replicas):
    trainer, _ = replicas
    save(trainer, 1)
    began_s = time.monotonic()
    errors = save(trainer, 2, "set_up_planner", is_kept=False, use_collectives=False)
    assert time.monotonic() < began_s + BOUND_S
    assert isinstance(errors[0], CallAborted)
    assert "failed on this rank before" in str(errors[0])
    assert save(trainer, 3) == [None, None]


def test_a_call_ends_when_the_rank_makes_its_next(replicas):
    """Its peers have neither to wait, nor to be patient."""
    trainer, rollout = replicas
    save(trainer, 1)

    def do(rank, handle):
        for version in (2, 3):
            writer, planner = ROSWriter(version, handle=handle), DefaultSavePlanner()
            trainer.kept.append(writer)
            if (rank, version) == (1, 2):
                failing(planner, "finish_plan")
            try:
                dcp.save(
                    state(version, 0),
                    storage_writer=writer,
                    planner=planner,
                    use_collectives=False,
                    no_dist=False,
                )
            except (CallAborted, Planted) as error:
                trainer.kept.append(error)
                assert version == 2

    assert trainer.each(do) == [None, None]
    assert load(rollout, 3) == [None, None]


@pytest.mark.parametrize("first", range(SIZE))
def test_a_rank_that_never_began_a_save_is_in_step_with_its_next(replicas, first):
    """Whoever comes first: the rank that left a save out, or the one that waits in it."""
    trainer, _ = replicas
    there = threading.Event()

    def publish(handle, version):
        state = LocalState(local_chunks({"w": torch.ones(1)}), {}, {})
        handle.checkpoints.save(SaveRequest(version, state, timeout_s=30))

    def do(rank, handle):
        versions = [2, 3] if rank == 0 else [3]
        if rank != first:
            there.wait(BOUND_S)
            key = inside(handle).group.seat.own[1]
            until(lambda: inside(handle).group.kv.read(Read((key,)), timeout_s=5).entries)
        there.set()
        for version in versions:
            try:
                publish(handle, version)
            except CallMismatch:
                assert (rank, version) == (0, 2)
        return handle.version

    assert trainer.each(do) == [3, 3]


@pytest.mark.long
def test_ranks_that_try_the_same_again_and_again_come_into_step(replicas):
    """One left a try out: what it finds next is always the try before, unless it skips that.

    It skips that at once if its peer waits in the next one already.
    """
    trainer, _ = replicas

    def publish(handle, timeout_s):
        state = LocalState(local_chunks({"w": torch.ones(1)}), {}, {})
        handle.checkpoints.save(SaveRequest(2, state, timeout_s=timeout_s))

    def do(rank, handle):
        try:
            publish(handle, 5)
        except (DeadlineExceeded, CallAborted):
            return False
        return True

    with pytest.raises(DeadlineExceeded):
        publish(trainer.handles[1], 2)
    first, second = (trainer.each(do) for _ in range(2))
    assert first in ([False, False], [True, True])
    assert second == [True, True]
