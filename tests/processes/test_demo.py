import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch
from demos import EXAMPLES, read_until, running_children, started_demo, wait_until_none_runs

SCRIPT = "fsdp2_to_rollouts.py"


# As on a processor without AVX-512, where torch multiplies bfloat16 a hundred times slower.
OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.parametrize(
    "processor",
    [
        pytest.param({}, id="this processor"),
        pytest.param(OLDER, id="older", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(200)
def test_two_rollouts_follow_a_trainer(surroundings, processor):
    with started_demo(surroundings | processor, SCRIPT, "--steps", "3") as demo:
        output, _ = demo.communicate(timeout=180)  # 20 s; computing in bfloat16 takes minutes
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
    assert "over NIXL, by ucx" in output
    for role in ("trainer", "rollout group", "single rollout"):
        assert f"{role} | builds the model" in output


@pytest.mark.timeout(120)
def test_an_interrupted_demo_leaves_nothing_behind(surroundings, ctrl_c):
    with started_demo(surroundings, SCRIPT, "--steps", "1000") as demo:
        read_until(demo, "| step 2:")
        assert len(running_children(surroundings)) == 7  # five ranks and two torchruns
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=15)
    assert demo.returncode == 1
    assert "interrupted" in output
    wait_until_none_runs(surroundings, timeout_s=1)
    assert not list(pathlib.Path(surroundings["TMPDIR"]).iterdir())


@pytest.mark.timeout(120)
def test_a_child_that_dies_ends_the_demo(surroundings):
    with started_demo(surroundings, SCRIPT, "--steps", "1000") as demo:
        read_until(demo, "| step 1:")
        # Its workers live on, in sessions of their own.
        os.kill(running_children(surroundings, named="torch.distributed.run")[0], signal.SIGKILL)
        output, _ = demo.communicate(timeout=15)
    assert demo.returncode == 1
    assert "ended with exit status -9" in output
    wait_until_none_runs(surroundings, timeout_s=1)


def test_children_that_print_nothing_end_the_demo(tmp_path):
    script = """
import sys
import launching

launching.SILENCE_S, launching.LONGER, launching.LOOK_S = 0.3, 4.0, 0.01
with launching.Children(f"SILENT_CHILDREN={sys.argv[1]}", {}) as children:
    # Its second line comes after a longer silence than the first, and is waited for.
    says = "import time; time.sleep(.2); print(1, flush=True); time.sleep(.6); print(2, flush=True)"
    children.start("hangs", [sys.executable, "-c", says + "; time.sleep(60)"])
    children.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1
    assert re.search(r"nothing was printed for \d+ s; still running: hangs", ended.stderr)
    assert ended.stdout.split() == ["hangs", "|", "1", "hangs", "|", "2"]


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
