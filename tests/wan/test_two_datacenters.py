"""`examples/two_datacenters.py`, with a link of 200 Mbit/s and 40 ms between its two places."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from lab import LIBRARY

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_datacenters.py"
SIZE, VERSIONS, CROSSING_MS = 24 << 20, 3, 1000.0


def test_rollouts_answer_while_a_version_crosses_and_the_trainer_goes_on(
    lab, etcd_in_the_west, tmp_path
):
    source = EXAMPLE.read_text().replace('"two-datacenters"', f'"m-{uuid.uuid4().hex[:8]}"')
    program = tmp_path / "two_datacenters.py"
    program.write_text(source)
    environment = os.environ | LIBRARY | {"TORCH_ROS_ENDPOINT": f"etcd://{etcd_in_the_west.host}"}
    environment["OMP_NUM_THREADS"] = "1"
    before = lab.wan_bytes(into="east")
    running = {}
    try:
        for place, where in (("rollouts", "east"), ("trainer", "west")):
            with lab.host(where):
                running[place] = subprocess.Popen(
                    [sys.executable, program, place, "--versions", str(VERSIONS)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    text=True,
                    start_new_session=True,
                )
        said = {place: each.communicate(timeout=100)[0] for place, each in running.items()}
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    codes = {place: process.returncode for place, process in running.items()}
    assert codes == {"rollouts": 0, "trainer": 0}, said
    crossed = (lab.wan_bytes(into="east") - before) / VERSIONS
    waits = [float(found) for found in re.findall(r"unpublish took (\d+) ms", said["trainer"])]
    # Once, and again what was on its way when the trainer took its tensors back.
    assert 1.0 < crossed / SIZE < 2.05, said
    assert len(waits) == VERSIONS
    assert max(waits) < CROSSING_MS / 2, waits
    answers = re.findall(r"(\d+) answers from version (\d+) meanwhile", said["rollouts"])
    assert sum(int(count) for count, _ in answers) > 0
