import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ETCD = [sys.executable, "-m", "torch_ros.store.local"]


@pytest.fixture
def surroundings(tmp_path):
    """The environment of a run with an etcd and a temporary directory of its own."""
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {
        "TORCH_ROS_LOCAL_DIR": str(tmp_path / "etcd"),
        "TORCH_ROS_ENDPOINT": "local",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    yield environment
    subprocess.run([*ETCD, "stop"], env=environment, check=True, timeout=30)


def start_demo(surroundings, *options):
    return subprocess.Popen(
        [sys.executable, EXAMPLES / "fsdp2_to_rollouts.py", *options],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def running_children(surroundings):
    """Processes of this test's demo; etcd's command names none of its files."""
    found = []
    mark = f"TORCH_ROS_LOCAL_DIR={surroundings['TORCH_ROS_LOCAL_DIR']}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = mark in (process / "environ").read_bytes().split(b"\0")
            if is_ours and b"examples/demo" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def wait_until_none_runs(surroundings, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while found := running_children(surroundings):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)


@pytest.mark.timeout(240)
def test_two_rollouts_follow_a_trainer(surroundings):
    demo = start_demo(surroundings, "--steps", "3")
    output, _ = demo.communicate(timeout=230)
    assert demo.returncode == 0, output
    assert not running_children(surroundings)
    assert not list(pathlib.Path(surroundings["TMPDIR"]).iterdir())

    rows = re.findall(r"^ +(\d) +(\d\.\d\d) +[\d.]+ ms +[\d.]+ ms   \w", output, re.MULTILINE)
    assert [int(version) for version, _ in rows] == [1, 2, 3], output
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.5, output
    for reader in ("rollout group", "single rollout"):
        assert re.search(rf"{reader} +(trainer|rollout group|single rollout) +16\.3 ", output)
        assert re.search(rf"{reader} \| version 3 says 'Alice was", output)
    assert "bit for bit, what the trainer had" in output


@pytest.mark.timeout(120)
def test_an_interrupted_demo_leaves_nothing_behind(surroundings):
    demo = start_demo(surroundings, "--steps", "1000")
    try:
        seen = []
        for line in demo.stdout:
            seen.append(line)
            if "| step 2:" in line:
                break
        assert demo.poll() is None, seen
        assert len(running_children(surroundings)) >= 5
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=15)
    finally:
        demo.kill()
    assert demo.returncode != 0
    assert "interrupted" in output
    wait_until_none_runs(surroundings, timeout_s=5)
    assert not list(pathlib.Path(surroundings["TMPDIR"]).iterdir())


@pytest.mark.timeout(120)
def test_a_child_that_fails_ends_the_demo(surroundings):
    demo = start_demo(surroundings, "--steps", "1000")
    for line in demo.stdout:
        if "| step 1:" in line:
            break
    os.kill(running_children(surroundings)[0], signal.SIGKILL)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "ended with exit status" in output
    wait_until_none_runs(surroundings, timeout_s=5)


def test_a_rollout_with_one_wrong_bit_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rollout", "--steps", "1", "--directory", str(tmp_path)])
    spec = importlib.util.spec_from_file_location("scaffold", EXAMPLES / "demo" / "scaffold.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scaffold = module.Scaffold("any")
    trained = {"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)}

    scaffold.write_digests("trainer", 1, trained)
    scaffold.check_digests(1, {fqn: tensor.clone() for fqn, tensor in trained.items()})
    trained["b"].view(torch.int16)[3] ^= 1
    with pytest.raises(SystemExit, match=r"1 of 2 tensors .*: b"):
        scaffold.check_digests(1, trained)
