"""Real processes: ranks with FSDP2 and DCP, etcd, NIXL."""

import json
import time

import pytest

from torch_ros.protocol.keys import Keys
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Read


@pytest.mark.parametrize("transport", ["auto", "ucx", "ucx-tcp"])
def test_ranks_of_another_sharding_follow_by_deltas(jobs, transport):
    jobs.run_ranks(2, "sparse", transport=transport)


def test_an_unchanged_sharded_job_is_planned_and_registered_once(jobs):
    jobs.run_ranks(2, "planned")


def test_hsdp_copies_are_published_in_place(jobs):
    jobs.run_ranks(2, "hsdp")


def test_all_that_dcp_saves_comes_back_through_the_default_handles(jobs):
    jobs.run_ranks(2, "everything")


def test_errors_have_our_types_on_every_rank_and_change_nothing(jobs):
    jobs.run_ranks(2, "refused")


def test_what_fails_within_dcp_on_one_rank_fails_on_both_and_the_next_call_works(jobs):
    jobs.run_ranks(2, "out_of_step")


def test_one_ranks_mistake_is_an_error_on_both(jobs):
    jobs.run_ranks(2, "own_failure")


def test_async_save_publishes_the_staged_copy(jobs):
    jobs.run_ranks(2, "staged")


def test_open_handles_that_nobody_uses_cost_next_to_nothing(jobs):
    jobs.start("idle").finish()


def test_a_rollout_serves_a_later_one_after_the_trainer_has_exited(jobs):
    folder = str(jobs.folder)
    trainer = jobs.start("publisher", folder=folder)
    jobs.await_path("published")
    first = jobs.start("follower", folder=folder, name="first", serve_until="second")
    jobs.await_path("first")
    jobs.path("leave").touch()
    trainer.finish()
    jobs.start("follower", folder=folder, name="second").finish()
    first.finish()
    assert json.loads(jobs.path("second").read_text()) == {"source": "first"}


@pytest.mark.xdist_group("a GiB in each process")
@pytest.mark.parametrize(
    "surroundings",
    [{}, {"UCX_TLS": "tcp,self", "TORCH_ROS_TRANSPORT": "ucx"}, {"UCX_TLS": "tcp,self"}],
    ids=["cma", "ucx over tcp", "tcp"],
)
def test_a_killed_source_is_an_error_within_ten_seconds(jobs, surroundings):
    jobs.environment |= surroundings
    folder, megabytes = str(jobs.folder), 1024
    trainer = jobs.start("publisher", folder=folder, megabytes=megabytes)
    jobs.await_path("published")
    reader = jobs.start(
        "follower", folder=folder, name="reader", megabytes=megabytes, expect="SourceLost"
    )
    jobs.await_path("reader-ready")
    # It reads from now on; a GiB takes a fraction of a second at least.
    etcd_reads = jobs.environment["TORCH_ROS_ENDPOINT"]
    wait_for_reader(etcd_reads, jobs.model)
    killed = time.time()
    trainer.kill()
    reader.finish()
    assert json.loads(jobs.path("reader").read_text())["at"] - killed < 10


def wait_for_reader(endpoint, model):
    kv = connect(endpoint, timeout_s=5)
    deadline = time.monotonic() + 30
    while not any(
        not key.endswith("group")
        for key in kv.read(Read((Keys(model).readers(),)), timeout_s=5).entries
    ):
        assert time.monotonic() < deadline
    kv.close()
