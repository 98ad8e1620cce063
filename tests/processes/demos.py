"""Examples that run as users run them, with an etcd and a temporary directory of their own."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from kit import until

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ETCD = [sys.executable, "-m", "torch_ros.store.local"]


@contextlib.contextmanager
def apart(directory):
    """The environment of such a run. Nothing of it is left afterwards."""
    (directory / "tmp").mkdir()
    environment = os.environ | {
        "TORCH_ROS_LOCAL_DIR": str(directory / "etcd"),
        "TORCH_ROS_ENDPOINT": "local",
        "TMPDIR": str(directory / "tmp"),
    }
    yield environment
    for pid in running_children(environment):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run([*ETCD, "stop"], env=environment, check=True, timeout=30)


@contextlib.contextmanager
def started_demo(surroundings, script, *options):
    with subprocess.Popen(
        [sys.executable, EXAMPLES / script, *options],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()  # or the end of a failed test would wait for it


def running_children(surroundings, named=r"examples/\w+/"):
    """Processes of this test's demo that its launcher started; etcd's command is another."""
    found = []
    mark = f"TORCH_ROS_LOCAL_DIR={surroundings['TORCH_ROS_LOCAL_DIR']}".encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = mark in (process / "environ").read_bytes().split(b"\0")
            if is_ours and re.search(named.encode(), (process / "cmdline").read_bytes()):
                found.append(int(process.name))
    return found


def read_until(demo, words):
    for line in demo.stdout:
        if words in line:
            return line
    pytest.fail(f"the demo ended before it said {words!r}")


def wait_until_none_runs(surroundings, timeout_s):
    until(lambda: not running_children(surroundings), timeout_s, pause_s=0.1)


def descendants(pid):
    """The commands of the processes below this one, by process id."""
    found = {}
    for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().decode()
            found |= {child: command.replace("\0", " "), **descendants(child)}
    return found
