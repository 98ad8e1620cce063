"""The example with a trainer and vLLM engines learns, and ends whole."""

import os
import pathlib
import re
import signal
import tempfile

import pytest
from demos import descendants, read_until, running_children, started_demo
from kit import until

SCRIPT = "grpo_with_vllm.py"
STEP = re.compile(
    r"step +(\d+): reward (\d\.\d\d) \| samples (\d\.\d) versions old, \d+ groups dropped \| "
    r"an update paused generation \d+ ms \| published version (\d+)"
)


@pytest.fixture
def surroundings(surroundings):
    """With a short path: vLLM's sockets lie there, and may have 107 characters."""
    with tempfile.TemporaryDirectory() as short:
        yield surroundings | {"TMPDIR": short}


def test_a_policy_learns_from_samples_of_engines_that_follow_it(surroundings, tmp_path):
    plot = tmp_path / "reward.png"
    with started_demo(surroundings, SCRIPT, "--plot", str(plot)) as demo:
        output, _ = demo.communicate(timeout=600)
    assert demo.returncode == 0, output
    assert not running_children(surroundings)
    assert not list(pathlib.Path(surroundings["TMPDIR"]).iterdir())

    steps = STEP.findall(output)
    assert [int(step) + 1 for step, *_ in steps] == [int(version) for *_, version in steps], output
    rewards = [float(reward) for _, reward, *_ in steps]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.5, output
    assert all(float(age) <= 2 for _, _, age, _ in steps)
    assert "vLLM says what Hugging Face's model says" in output
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("strike", ["a rollout is killed", "Ctrl-C"])
def test_an_end_before_the_end_leaves_nothing_behind(surroundings, ctrl_c, strike):
    with started_demo(surroundings, SCRIPT, "--steps", "10000") as demo:
        read_until(demo, "| step   1:")
        below = descendants(demo.pid)
        assert sum("EngineCore" in command for command in below.values()) == 2, below
        if strike == "Ctrl-C":
            demo.send_signal(signal.SIGINT)
        else:
            os.kill(running_children(surroundings, r"rollout\.py")[0], signal.SIGKILL)
        output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 1
    expected = r"interrupted" if strike == "Ctrl-C" else r"the rollout \d ended with exit status -9"
    assert re.search(expected, output), output
    until(lambda: not any(map(is_running, below)), 5)


def is_running(pid):
    try:
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
