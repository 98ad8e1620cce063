"""Ctrl-C at random moments of every public call, caught, and the process goes on.

INTERRUPTS=1000 INTERRUPTS_TRANSPORT=auto is the long form, and FIRST_SEED another story.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = int(os.environ.get("INTERRUPTS", "60"))
TRANSPORT = os.environ.get("INTERRUPTS_TRANSPORT", "memory")
SEED = os.environ.get("FIRST_SEED", "1")
CLOSE_S = 5.0
ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(120 + COUNT)
def test_ctrl_c_at_any_moment_costs_neither_the_replica_nor_an_end(etcd_server):
    program = ROOT / "tests/interrupted.py"
    arguments = [f"etcd://{etcd_server.host}", TRANSPORT, str(COUNT), SEED]
    done = subprocess.run(
        [sys.executable, program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110 + COUNT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert sum(found["interrupted"].values()) >= COUNT, found
    assert len(found["interrupted"]) == 11, "some call was never interrupted"
    assert found["there"] == ["rollout", "trainer"]
    assert found["kept"], "a lease was lost"
    assert found["slowest_close_s"] < CLOSE_S
