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

# It is like a rollout in the middle of a read, which has given up what it had.
HOLDS_NOTHING = """
import sys, torch, torch_ros
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
with torch_ros.open(sys.argv[1]) as handle:
    handle.register(model)
    handle.replicate("latest")
    handle.unpublish()
    print("holds nothing", flush=True)
    sys.stdin.readline()
    print("reads", next(handle.follow("latest")), flush=True)
"""


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


def started_demo(surroundings, script, *options):
    return started_python(surroundings, EXAMPLES / script, *options)


@contextlib.contextmanager
def started_python(surroundings, *arguments, stderr=subprocess.STDOUT):
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.kill()  # or the end of a failed test would wait for it


@contextlib.contextmanager
def rollout_that_holds_nothing(surroundings, model):
    """It reads the newest version when it is told to."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_NOTHING, model],
        env=surroundings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as rollout:
        try:
            read_until(rollout, "holds nothing")
            yield rollout
        finally:
            rollout.kill()


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
    for child in children(pid):
        with contextlib.suppress(OSError):  # it may end before it is read
            command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().decode()
            found |= {child: command.replace("\0", " "), **descendants(child)}
    return found


def children(pid):
    """The processes that threads of this one began. A thread that ends takes its file with it."""
    found = []
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found
