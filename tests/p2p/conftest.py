"""Processes that are told what to do, and say how it went."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PRELUDE = """
import os, signal, sys, time
import numpy as np
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.p2p import nixl
from torch_ros.p2p.transport import Region

def say(*words):
    print(*words, flush=True)

def hear():
    line = sys.stdin.readline()
    if not line:
        os._exit(3)  # the test is gone
    return line.split()

def region(array):
    return Region(array.ctypes.data, array.nbytes)

def wait(read):
    while not read.is_done():
        time.sleep(0.0002)
"""


class Process:
    def __init__(self, script, *arguments, environment=None):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def hear(self):
        return self.process.stdout.readline().split()

    def ask(self, *words):
        self.tell(*words)
        return self.hear()

    def signal(self, number):
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@pytest.fixture
def spawn():
    yield from _spawning()


@pytest.fixture(scope="module")
def spawn_for_all():
    """For processes that all tests of a file use."""
    yield from _spawning()


def _spawning():
    spawned = []

    def start(*arguments, **keywords):
        spawned.append(Process(*arguments, **keywords))
        return spawned[-1]

    yield start
    for each in spawned:
        each.process.kill()
        each.process.wait()
        each.process.stdin.close()
        each.process.stdout.close()
