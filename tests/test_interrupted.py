"""Ctrl-C at random moments of every public call, caught, and the process goes on.

INTERRUPTS=1000 INTERRUPTS_TRANSPORT=auto is the long form, and FIRST_SEED another story.
"""

import json
import os

import pytest

from puppets import PROGRAMS

COUNT = int(os.environ.get("INTERRUPTS", "60"))
TRANSPORT = os.environ.get("INTERRUPTS_TRANSPORT", "memory")
SEED = os.environ.get("FIRST_SEED", "1")
CLOSE_S = 5.0


@pytest.mark.timeout(120 + COUNT)
def test_ctrl_c_at_any_moment_costs_neither_the_replica_nor_an_end(etcd_server, started):
    endpoint = f"etcd://{etcd_server.host}"
    program = PROGRAMS / "interrupted.py"
    process = started.start(program, endpoint, TRANSPORT, COUNT, SEED, talks=True)
    found = json.loads(process.hear())
    process.finish()
    print(found)
    assert sum(found["interrupted"].values()) >= COUNT, found
    assert len(found["interrupted"]) == 11, "some call was never interrupted"
    assert found["there"] == ["rollout", "trainer"]
    assert found["kept"], "a lease was lost"
    assert found["slowest_close_s"] < CLOSE_S
