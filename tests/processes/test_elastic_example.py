"""The elastic example does what DISTRIBUTED.md says, as it is printed there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = "examples/torchrun_elastic.sh"


@pytest.fixture
def surroundings(tmp_path):
    environment = os.environ | {
        "TORCH_ROS_LOCAL_DIR": str(tmp_path / "etcd"),
        "TMPDIR": str(tmp_path),
    }
    environment.pop("TORCH_ROS_ENDPOINT", None)
    yield environment
    stop = [sys.executable, "-m", "torch_ros.store.local", "stop"]
    subprocess.run(stop, env=environment, check=True, timeout=30)


@pytest.mark.timeout(180)
def test_a_job_that_loses_a_node_goes_on_from_what_the_rollout_kept(surroundings):
    assert f"\n{COMMAND}" in (ROOT / "docs" / "DISTRIBUTED.md").read_text()
    done = subprocess.run(
        [ROOT / COMMAND],
        cwd=ROOT,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout
    said = done.stdout
    before, killed, after = said.partition("kill -9")
    assert killed, said
    assert re.search(r"\d rank\(s\) begin with new weights", before), said
    resumed = re.findall(r"begin with version (\d+), read from rollout in", after)
    assert resumed, said
    assert all(3 <= int(version) < 8 for version in resumed), said  # as far as it came before
    # What a node had reached before it heard of the kill may be printed after it.
    _, _, after = after.partition("begin with version")
    trained = [int(version) for version in re.findall(r"version (\d): loss", after)]
    assert trained[-1] == 8, said
    assert min(trained) > min(map(int, resumed)), said
    left = {path.name for path in pathlib.Path(surroundings["TMPDIR"]).iterdir()} - {"etcd"}
    assert not left
