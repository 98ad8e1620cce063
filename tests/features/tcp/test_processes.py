"""Processes that publish and load over sockets of ours, through etcd, without NIXL."""

import signal
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from p2p.steps import region

from torch_ros.features.tcp.transport import TcpTransport


@pytest.mark.long  # in one process: tests/contract; without encryption: tests/dcp
def test_ranks_of_another_sharding_load_encrypted(jobs):
    jobs.environment |= {
        "TORCH_ROS_TRANSPORT": "tcp",
        "TORCH_ROS_LISTEN": "127.0.0.1",
        "UCX_TLS": "tcp",  # nothing is copied
    }
    jobs.run_ranks(2, "reshard_elsewhere")


SOURCE = """
import sys
import numpy as np
from torch_ros.features.tcp.transport import TcpTransport
from torch_ros.spans import Region
held = np.ones(64 << 20, np.uint8)
transport = TcpTransport()
name = transport.register([Region(held.ctypes.data, held.nbytes)])
print(transport.connection.hex(), name.descriptor.hex(), held.ctypes.data, flush=True)
sys.stdin.read()
"""


def test_a_source_that_is_stopped_is_no_further_away():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    source = subprocess.Popen([sys.executable, "-c", SOURCE], text=True, **pipes)
    with closing(TcpTransport()) as reader:
        connection, _, _ = source.stdout.readline().split()
        peer = reader.connect(bytes.fromhex(connection))
        source.send_signal(signal.SIGSTOP)
        assert not peer.is_beyond(0.005)
        source.send_signal(signal.SIGCONT)
        assert peer.is_beyond(0.0), "it was measured"
    source.stdin.close()
    assert source.wait(20) == 0


def test_a_source_that_exits_while_it_is_read_exits_well():
    target = np.zeros(64 << 20, np.uint8)
    with closing(TcpTransport()) as reader:
        reader.register([region(target)])
        for _ in range(5):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            source = subprocess.Popen([sys.executable, "-c", SOURCE], text=True, **pipes)
            connection, descriptor, address = source.stdout.readline().split()
            peer = reader.connect(bytes.fromhex(connection))
            peer.attach(bytes.fromhex(descriptor))
            rows = [(int(address), target.ctypes.data, target.nbytes)]
            read = peer.prepare(np.array(rows, np.uint64))
            read.post()
            assert not read.is_done()
            source.stdin.close()
            assert source.wait(20) == 0
            read.close()
            peer.close()
