"""`torch-ros demo`, as who has installed the package runs it."""

import contextlib
import os
import re
import signal
import subprocess

import pytest
from demos import descendants, read_until, started_python
from kit import until


def started(surroundings):
    return started_python(surroundings, "-m", "torch_ros", "demo", stderr=subprocess.PIPE)


def parts(demo):
    """The processes of trainer and rollouts, in the order in which they were started."""
    found = descendants(demo.pid)
    return sorted(pid for pid, command in found.items() if "spawn_main" in command)


def until_gone(pids):
    def is_there(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True

    until(lambda: not any(map(is_there, pids)), 15, pause_s=0.1)


@pytest.mark.timeout(240)
def test_rollouts_go_on_without_a_trainer_and_it_goes_on_from_them(surroundings):
    with started(surroundings) as demo:
        said, warned = demo.communicate(timeout=220)
    assert demo.returncode == 0, said + warned
    kept = int(re.search(r"The rollouts have version (\d+)", said)[1])
    assert f"rollout-2 | has version {kept}, from rollout-" in said
    assert re.search(rf"trainer \| goes on from version {kept}, from rollout-[12], 8.0 MiB", said)
    for name in ("rollout-1", "rollout-2"):
        assert f"{name} | has version {kept + 3}, from " in said
    assert "Traceback" not in warned


@pytest.mark.timeout(150)
def test_a_part_that_ends_ends_the_demo(surroundings):
    with started(surroundings) as demo:
        read_until(demo, "has version 1")
        trainer, *rollouts = parts(demo)
        os.kill(trainer, signal.SIGTERM)
        _, warned = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "torch-ros: trainer ended with exit code -15" in warned
    until_gone(rollouts)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_demo_leaves_nobody_behind(surroundings, ctrl_c, number):
    with started(surroundings) as demo:
        read_until(demo, "has version 1")
        there = parts(demo)
        demo.send_signal(number)
        _, warned = demo.communicate(timeout=60)
    assert demo.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in warned
    until_gone(there)
