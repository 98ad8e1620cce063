"""Ctrl-C at random moments of every public call, caught, and the process goes on.

INTERRUPTS=1000 INTERRUPTS_TRANSPORT=auto is the long form, and FIRST_SEED another story.
"""

import json
import os
import subprocess
import sys

import pytest

from puppets import PROGRAMS

COUNT = int(os.environ.get("INTERRUPTS", "60"))
TRANSPORT = os.environ.get("INTERRUPTS_TRANSPORT", "memory")
SEED = os.environ.get("FIRST_SEED", "1")
CLOSE_S = 5.0


@pytest.mark.long
@pytest.mark.timeout(120 + COUNT)
def test_ctrl_c_at_any_moment_costs_neither_the_replica_nor_an_end(etcd_server, started):
    endpoint = f"etcd://{etcd_server.host}"
    program = PROGRAMS / "interrupted.py"
    process = started.start(program, endpoint, TRANSPORT, COUNT, SEED, talks=True)
    found = json.loads(process.hear())
    process.finish()
    print(found)
    assert sum(found["interrupted"].values()) >= COUNT, found
    assert len(found["interrupted"]) == 15, "some call was never interrupted"
    assert found["there"] == ["rollout", "trainer"]
    assert found["kept"], "a lease was lost"
    assert not found["streams"], "one goes on that nobody refers to"
    assert found["slowest_close_s"] < CLOSE_S


LOADS = """
import sys, threading
from importlib.abc import MetaPathFinder

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "nixl":
            print(threading.current_thread() is threading.main_thread())

sys.meta_path.insert(0, Watch())
from torch_ros.face.choose import choose_transport
choose_transport("ucx", replica="r", rank=0, in_process=False, reason="").close()
"""


@pytest.mark.long
def test_nixl_is_loaded_where_ctrl_c_does_not_come():
    loading = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True)
    assert loading.stdout == "False\n", loading.stderr
