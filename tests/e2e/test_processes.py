"""Real processes: torchrun, FSDP2, etcd, NIXL."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

JOBS = Path(__file__).with_name("jobs.py")


class Processes:
    """Processes of one test; none outlives it."""

    def __init__(self, endpoint, folder):
        self.model, self.folder = "m-" + uuid.uuid4().hex[:8], folder
        self.environment = {
            **os.environ,
            "TORCH_ROS_ENDPOINT": endpoint,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
        }
        self.started = []

    def start(self, job, *, ranks=1, **arguments):
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [JOBS, job, json.dumps({"model": self.model, **arguments})]
        process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, job, **options):
        self.finish(self.start(job, **options))

    def finish(self, process, timeout_s=90):
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, output[-6000:]
        assert "done" in output

    def path(self, name):
        return Path(self.folder, name)

    def wait_for(self, name, timeout_s=30):
        deadline = time.monotonic() + timeout_s
        while not self.path(name).exists() or not self.path(name).stat().st_size >= 0:
            for process in self.started:
                assert process.poll() in (None, 0, -9), process.stdout.read()[-6000:]
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.01)

    def close(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def processes(etcd_endpoint, tmp_path):
    made = Processes(etcd_endpoint, tmp_path)
    yield made
    made.close()


def test_fsdp2_to_tensor_parallel_to_one_process_and_back(processes):
    processes.run("reshard", ranks=2)


def test_an_unchanged_sharded_job_is_planned_and_registered_once(processes):
    processes.run("planned", ranks=2)


def test_hsdp_copies_are_published_in_place(processes):
    processes.run("hsdp", ranks=2)


def test_all_that_dcp_saves_comes_back_through_the_default_handles(processes):
    processes.run("everything", ranks=2)


def test_errors_have_our_types_on_every_rank_and_change_nothing(processes):
    processes.run("refused", ranks=2)


def test_what_fails_within_dcp_on_one_rank_fails_on_both_and_the_next_call_works(processes):
    processes.run("out_of_step", ranks=2)


def test_one_ranks_mistake_is_an_error_on_both(processes):
    processes.run("own_failure", ranks=2)


def test_async_save_publishes_the_staged_copy(processes):
    processes.run("staged", ranks=2)


def test_open_handles_that_nobody_uses_cost_next_to_nothing(processes):
    processes.run("idle")


def test_a_rollout_serves_a_later_one_after_the_trainer_has_exited(processes):
    folder = str(processes.folder)
    trainer = processes.start("publisher", folder=folder)
    processes.wait_for("published")
    first = processes.start("follower", folder=folder, name="first", serve_until="second")
    processes.wait_for("first")
    processes.path("leave").touch()
    processes.finish(trainer)
    processes.finish(processes.start("follower", folder=folder, name="second"))
    processes.finish(first)
    assert json.loads(processes.path("second").read_text()) == {"source": "first"}


@pytest.mark.parametrize("transport", ["", "tcp,self"])
def test_a_killed_source_is_an_error_within_ten_seconds(processes, transport):
    if transport:
        processes.environment["UCX_TLS"] = transport
    folder, megabytes = str(processes.folder), 1024
    trainer = processes.start("publisher", folder=folder, megabytes=megabytes)
    processes.wait_for("published", 60)
    reader = processes.start(
        "follower", folder=folder, name="reader", megabytes=megabytes, expect="SourceLost"
    )
    processes.wait_for("reader-ready", 60)
    # It reads from now on; a GiB takes a fraction of a second at least.
    etcd_reads = processes.environment["TORCH_ROS_ENDPOINT"]
    wait_for_reader(etcd_reads, processes.model)
    killed = time.time()
    trainer.kill()
    processes.finish(reader)
    assert json.loads(processes.path("reader").read_text())["at"] - killed < 10


def wait_for_reader(endpoint, model):
    from torch_ros.store.endpoint import connect
    from torch_ros.store.keys import Keys
    from torch_ros.store.txn import Read

    kv = connect(endpoint, timeout_s=5)
    deadline = time.monotonic() + 30
    while not any(
        not key.endswith("group")
        for key in kv.read(Read((Keys(model).readers(),)), timeout_s=5).entries
    ):
        assert time.monotonic() < deadline
    kv.close()
