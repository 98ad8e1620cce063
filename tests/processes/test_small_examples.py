"""The examples of a page do what their first lines say."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from demos import (
    EXAMPLES,
    descendants,
    read_until,
    rollout_that_holds_nothing,
    started_demo,
)
from kit import until

SMALL = {
    "follow.py": 70,
    "probed.py": 70,
    "restart.py": 70,
    "push_pull.sh": 70,
    "one_gpu.py": 80,
}  # lines
ANSWER = re.compile(r"version (\d+): (-?[\d.]+), on the way to 8")


@pytest.mark.parametrize("name", SMALL)
def test_they_are_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < SMALL[name]


def ended(process, number=signal.SIGINT):
    """The rest of its output, when it has ended well."""
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


@contextlib.contextmanager
def started_ranks(surroundings, script):
    """Two ranks; they and torchrun are killed at the end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [sys.executable, *torchrun, EXAMPLES / script],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            for pid in [*descendants(job.pid), job.pid]:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(180)
def test_a_rollout_follows_and_both_end_in_order(surroundings, ctrl_c):
    with (
        started_demo(surroundings, "follow.py", "train", "--step-s", "0.2") as trainer,
        started_demo(surroundings, "follow.py", "follow") as rollout,
    ):
        for _ in range(3):
            read_until(rollout, "on the way to 8")
        versions = [int(number) for number, _ in ANSWER.findall(ended(rollout))]
        assert versions == sorted(set(versions))
        assert ended(trainer, signal.SIGTERM)


@pytest.mark.timeout(180)
def test_a_probed_rollout_is_ready_until_it_is_told_to_leave(surroundings):
    names = ("--model", "probe-me", "--replica", "rollout-0")

    def ready():
        command = [sys.executable, "-m", "torch_ros", "ready", *names]
        return subprocess.run(command, env=surroundings, timeout=60).returncode

    with (
        started_demo(surroundings, "follow.py", "train", *names[:2], "--step-s", "0.2"),
        started_demo(surroundings, "probed.py", *names) as rollout,
    ):
        assert ready() == 1
        read_until(rollout, "on the way to 8")
        until(lambda: ready() == 0)  # it is not within an update
        assert "has left" in ended(rollout, signal.SIGTERM)
        assert ready() == 1


@pytest.mark.timeout(240)
def test_a_rollout_of_two_ranks_stops_together(surroundings, ctrl_c):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with (
        started_demo(surroundings, "follow.py", "train", "--step-s", "0.2"),
        subprocess.Popen(
            [*torchrun, "--nproc-per-node", "2", EXAMPLES / "follow.py", "follow"],
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as ranks,
    ):
        for _ in range(6):
            read_until(ranks, "on the way to 8")
        each = [pid for pid, command in descendants(ranks.pid).items() if "follow.py" in command]
        assert len(each) == 2
        os.kill(each[1], signal.SIGTERM)  # one of them is told
        output, _ = ranks.communicate(timeout=60)
    assert ranks.returncode == 0, output
    said = [number for number, _ in ANSWER.findall(output)]
    assert len(set(said[-2:])) <= 1, output  # after the same version


@pytest.mark.timeout(240)
def test_a_trainer_that_is_killed_begins_again_from_a_rollout(surroundings, ctrl_c):
    model = ["--model", "again"]
    with started_demo(surroundings, "follow.py", "follow", *model) as rollout:
        with started_demo(surroundings, "restart.py", *model) as trainer:
            read_until(trainer, "begins after version 0, read from nobody")
            read_until(rollout, "version 3:")
            trainer.kill()
        with started_demo(surroundings, "restart.py", *model, "--steps", "8") as trainer:
            output, _ = trainer.communicate(timeout=120)
        assert trainer.returncode == 0, output
        [(began, source)] = re.findall(r"begins after version (\d+), read from (\S+)", output)
        assert 3 <= int(began) < 8
        assert source != "nobody"
        assert f"version {int(began) + 1}: loss" in output
        assert "version 8: loss" in output
        # It ended in order: its last version is handed over.
        read_until(rollout, "version 8:")
        ended(rollout)


@pytest.mark.timeout(240)
def test_a_trainer_that_saves_with_dcp_begins_again_from_a_rollout(surroundings, ctrl_c):
    with started_demo(surroundings, "follow.py", "follow", "--model", "restart-dcp") as rollout:
        with started_ranks(surroundings, "restart_dcp.py") as trainer:
            read_until(trainer, "begins after version 0")
            read_until(rollout, "version 3:")
        with started_ranks(surroundings, "restart_dcp.py") as trainer:
            began = int(read_until(trainer, "begins after version").split()[-1])
            assert began >= 3
            read_until(trainer, f"version {began + 1}: loss")
            read_until(rollout, f"version {began + 1}:")
        ended(rollout)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("started", "name", "model"),
    [(started_demo, "restart.py", "restart-me"), (started_ranks, "restart_dcp.py", "restart-dcp")],
)
def test_a_trainer_begins_anew_if_it_is_killed_when_only_it_has_a_version(
    surroundings, started, name, model
):
    with contextlib.ExitStack() as rollouts:
        with started(surroundings, name) as trainer:
            read_until(trainer, "version 2: loss")
            rollout = rollouts.enter_context(rollout_that_holds_nothing(surroundings, model))
        with started(surroundings, name) as trainer:
            read_until(trainer, "nobody has a version: begins anew")
            read_until(trainer, "version 1: loss")
            rollout.stdin.write("\n")
            rollout.stdin.flush()
            read_until(rollout, "reads")


@pytest.mark.timeout(180)
def test_a_checkpoint_goes_in_and_comes_out(surroundings):
    with subprocess.Popen(
        [EXAMPLES / "push_pull.sh"],
        env={**surroundings, "PATH": f"{sys.exec_prefix}/bin:{surroundings['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as script:
        output, _ = script.communicate(timeout=170)
    assert script.returncode == 0, output
    assert "version 1 of" in output
    assert "leaving version 1" in output


@pytest.mark.timeout(240)
def test_a_rollout_beside_its_trainer_says_what_the_trainer_says(surroundings):
    command = [sys.executable, EXAMPLES / "one_gpu.py"]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"version (\d+): loss [\d.]+; both say (\[.+\])", done.stdout)
    assert [int(version) for version, _ in said] == [*range(1, 11)], done.stdout
    assert len({tokens for _, tokens in said}) > 2  # else older weights would say the same


def spans(file):
    batches = [json.loads(line)["resourceSpans"] for line in file.read_text().splitlines()]
    return [
        span
        for batch in batches
        for resource in batch
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_spans_of_a_fleet_are_in_files_and_each_read_links_to_its_publication(
    surroundings, tmp_path
):
    command = [sys.executable, EXAMPLES / "spans.py", tmp_path / "spans"]
    assert subprocess.run(command, env=surroundings, timeout=100).returncode == 0
    trainer, *rollouts = (
        spans(tmp_path / f"spans/{name}.jsonl") for name in ("trainer", "rollout-0", "rollout-1")
    )
    published = {span["spanId"] for span in trainer if span["name"] == "torch_ros.publish"}
    assert len(published) == 3
    for rollout in rollouts:
        links = [link for span in rollout for link in span.get("links", ())]
        assert {link["spanId"] for link in links} <= published
        assert links
