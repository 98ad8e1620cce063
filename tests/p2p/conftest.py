"""Processes that are told what to do, and say how it went."""

import pytest

from puppets import Puppets

PRELUDE = """
import os, signal, sys, time
import numpy as np
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.p2p import nixl
from torch_ros.spans import Region

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
    """A puppet that talks in words."""

    def __init__(self, puppet):
        self.tell, self.signal = puppet.tell, puppet.signal
        self.process = puppet

    def hear(self):
        return self.process.hear().split()

    def ask(self, *words):
        self.tell(*words)
        return self.hear()


@pytest.fixture
def spawn(started):
    return _spawning(started)


@pytest.fixture(scope="module")
def spawn_for_all(tmp_path_factory):
    """For processes that all tests of a file use."""
    made = Puppets(tmp_path_factory.mktemp("puppets"))
    yield _spawning(made)
    made.close()


def _spawning(puppets):
    def start(script, *arguments, environment=None):
        return Process(puppets.start(PRELUDE + script, *arguments, talks=True, **environment or {}))

    return start
