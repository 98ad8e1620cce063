"""deploy/ray as it is run: trainer and rollouts are Ray actors, of which some are killed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from demos import ETCD

pytest.importorskip("ray")

ACTORS = Path(__file__).parents[2] / "deploy" / "ray" / "actors.py"


@pytest.fixture
def job(surroundings, tmp_path):
    """The program, which would go on for long, and lines of it that match a pattern."""
    told = {**surroundings, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", ACTORS, "--steps", "100000"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short,  # it has sockets
        subprocess.Popen(
            command,
            env=told | {"TMPDIR": short},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as running,
    ):

        def line(pattern):
            seen = []
            for each in running.stdout:
                seen.append(each)
                if found := re.search(pattern, each):
                    return found
            pytest.fail(f"it ended before it said {pattern!r}:\n{''.join(seen)}")

        try:
            yield running, line
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.communicate(timeout=30)
            finally:
                running.kill()
                subprocess.run([*ETCD, "stop"], env=told, check=True, timeout=30)


@pytest.mark.timeout(280)
def test_actors_that_are_killed_are_begun_again_with_the_newest_version(job):
    running, line = job
    first = [int(pid) for pid in line(r"after version 0, processes \[(\d+), (\d+)\]").groups()]
    old = line(r"rollout-0: .* by version \d+ from .*, process (\d+)")[1]
    os.kill(int(old), signal.SIGKILL)
    new = line(rf"rollout-0: .* by version (\d+) from .*, process (?!{old}\b)\d+")
    os.kill(first[1], signal.SIGKILL)
    line("trainer: .*; begins again")
    after = line(r"trainer: begins after version (\d+), processes \[(\d+), (\d+)\]")
    assert int(after[1]) >= int(new[1])
    assert not {*first} & {int(after[2]), int(after[3])}
    line(rf"rollout-1: .* by version {int(after[1]) + 1} from ")
    assert running.poll() is None
