"""The job for Slurm: what its scripts say, and what becomes of it on a cluster of this host."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from slurm_cluster import PROGRAMS, ROOT, Cluster, Job

from torch_ros import environment

SLURM = ROOT / "deploy" / "slurm"
PYTHON = shutil.which("python", path=PROGRAMS)
SCRIPTS = sorted(path for path in SLURM.iterdir() if path.suffix != ".md")
BOTH = {"rollout-0", "rollout-1"}
OF_ETCD = "--peer-client-cert-auth"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_takes_each_script(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.stderr == ""


def test_each_variable_is_one_of_the_library():
    named = {
        name for path in SLURM.iterdir() for name in re.findall(r"TORCH_ROS_\w+", path.read_text())
    }
    assert named
    assert named <= {value for value in vars(environment).values() if isinstance(value, str)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    for program in ("munged", "slurmctld", "slurmd"):
        if not shutil.which(program, path=PROGRAMS):
            pytest.skip(f"{program} is not installed: Debian's munge, slurmctld and slurmd")
    if os.getuid() != 0:
        pytest.skip("slurmd starts the processes of a job as root alone")
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def begun(job):
    """The versions after which its trainers began, one for each start."""
    return [int(number) for number in re.findall(r"begins after version (\d+)", job.log())]


def oldest(job):
    """The oldest version that a rollout uses; 0 if one uses none, or is not there."""
    used = job.ready()
    return min(used.values()) if used.keys() == BOTH else 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("slurm")
def test_a_job_outlives_its_rollouts_and_goes_on_when_it_is_requeued(cluster):
    job = Job(cluster, "policy", "--steps", "100000")
    job.until(lambda: job.ready("--behind", "20").keys() == BOTH)
    assert begun(job) == [0]

    # A rollout is killed, and another one takes its name.
    first = job.steps()["rollout-1"]
    # srun has these words too, but not as its own program.
    [worker] = cluster.processes(PYTHON, "examples/probed.py", "rollout-1")
    os.kill(worker, signal.SIGKILL)
    job.until(lambda: job.steps().get("rollout-1", first) != first)
    job.until(lambda: job.ready("--behind", "20").keys() == BOTH)

    # A rank of the trainer is killed: all begin again with what the rollouts have.
    os.kill(cluster.processes("-u", "examples/restart_dcp.py")[0], signal.SIGKILL)
    job.until(lambda: len(begun(job)) == 2)
    assert begun(job)[1] > 0

    # etcd is killed, and comes back with its records.
    [etcd] = cluster.processes(OF_ETCD)
    os.kill(etcd, signal.SIGKILL)
    job.until(lambda: cluster.processes(OF_ETCD) not in ([], [etcd]))
    later = job.archived() + 2
    job.until(lambda: oldest(job) >= later)

    # A rollout is told to go, and does not come back.
    cluster.run("scancel", "--signal=TERM", job.steps()["rollout-0"])
    job.until(lambda: job.steps().keys() == {"rollout-1"})
    job.until(lambda: "has left" in job.log())

    # The job begins again, as before its time limit, with the version that it had.
    had, starts = job.archived(), len(begun(job))
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.until(lambda: len(begun(job)) > starts)
    again = begun(job)[starts]
    assert again >= had > 0
    job.until(lambda: f"version {again + 1}: loss" in job.log())
    job.until(lambda: oldest(job) > again)
    cluster.run("scancel", job.number)
    job.until(lambda: job.state() == "CANCELLED" and not job.folders())


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("slurm")
def test_a_job_whose_trainer_is_done_ends_well_on_an_etcd_of_ones_own(cluster, etcd_endpoint):
    job = Job(cluster, "short", "--steps", "3", TORCH_ROS_ENDPOINT=etcd_endpoint)
    job.until(lambda: job.state() not in {"PENDING", "RUNNING", "COMPLETING"})
    assert job.state() == "COMPLETED"
    assert job.archived() == 3
    assert job.folders() == []
