"""Surroundings in which NIXL cannot begin: an error with the way out, where libraries abort."""

import os
import re
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import torch_ros
from torch_ros.errors import UsageError
from torch_ros.p2p.nixl import NixlTransport
from torch_ros.p2p.room import FILES, PEER_FILES

IN_A_LOOP = """
import sys, torch_ros, torch_ros.errors
try:
    torch_ros.open("m", endpoint=sys.argv[1], rank=0, world_size=1)
except torch_ros.errors.UsageError as error:
    print(error)
"""


def test_a_process_that_may_open_few_more_files_is_told_how_many(etcd_endpoint):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(list(Path("/proc/self/fd").iterdir())) + FILES // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with pytest.raises(UsageError, match=rf"may have {limit}: .* raise the limit \(ulimit -n"):
            torch_ros.open("m", endpoint=etcd_endpoint, rank=0, world_size=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    torch_ros.open("m", endpoint=etcd_endpoint, rank=0, world_size=1).close()


# Has no room for another file after its transport was made.
FULL = """
import resource
from contextlib import suppress
from torch_ros.errors import UsageError
from torch_ros.p2p.room import require_files

transport = nixl.NixlTransport()
highest = max(map(int, os.listdir("/proc/self/fd")))
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
with suppress(OSError):
    while True:
        os.open("/dev/null", os.O_RDONLY)
try:
    transport.connect(bytes.fromhex(sys.argv[1]))
except TransferFailed as error:
    say(error)
try:
    require_files()
except UsageError as error:
    say(error)
"""


@pytest.mark.long
def test_a_reader_whose_files_run_out_later_is_told_its_limit(spawn):
    with closing(NixlTransport()) as source:
        full = spawn(FULL, source.connection.hex())
        for text in (" ".join(full.hear()) for _ in range(2)):
            found = re.search(r"this process has (\d+) files open and may have (\d+): ", text)
            assert found, text
            has, may_have = map(int, found.groups())
            assert may_have - PEER_FILES < has <= may_have  # UCX may have closed one since
            assert "raise the limit (ulimit -n" in text


@pytest.mark.long
def test_a_home_that_cannot_be_entered_is_named(etcd_endpoint, tmp_path):
    (tmp_path / "home").symlink_to("home")  # root may enter all others
    command = [sys.executable, "-c", IN_A_LOOP, etcd_endpoint]
    home = {**os.environ, "HOME": str(tmp_path / "home"), "TORCH_ROS_TRANSPORT": "ucx"}
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=60)
    assert "set HOME to a directory that it may enter" in done.stdout, done.stderr
