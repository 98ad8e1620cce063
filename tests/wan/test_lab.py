"""The lab itself: the link is as slow and as far as it says, and nothing of the lab stays."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lab import LINK, Lab

MIB = 1 << 20
SIZE = 24 * MIB


def network(pid="self"):
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def whoever_keeps(networks):
    """Processes in these networks, processes that have them open, and where they are mounted."""
    keepers = []
    for path in (*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")):
        try:
            name = str(path.readlink())
        except OSError:  # the process or the file is gone
            continue
        keepers += [str(path) for inode in networks if name == f"net:[{inode}]"]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return keepers + [
        line for line in mounts if any(f"net:[{inode}]" in line for inode in networks)
    ]


def devices():
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def pair(lab, here, there):
    """Two ends of a connection between datacenters."""
    with lab.host(there):
        listener = socket.create_server((lab.address(there), 0))
    with lab.host(here):
        client = socket.create_connection(listener.getsockname(), timeout=30)
    with listener:
        server, _ = listener.accept()
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(30)
    return client, server


def send(source, sink, size):
    """Seconds from before the first byte is sent until after the last is there."""
    began_s = time.monotonic()
    sender = threading.Thread(target=source.sendall, args=(bytes(size),))
    sender.start()
    left, buffer = size, memoryview(bytearray(MIB))
    while left:
        received = sink.recv_into(buffer)
        assert received, "the other end is closed"
        left -= received
    sender.join()
    return time.monotonic() - began_s


def round_trip_s(client, server):
    """The shortest of some: a busy machine adds to them, and nothing takes away."""
    taken_s = []
    for _ in range(8):
        began_s = time.monotonic()
        client.sendall(b".")
        server.sendall(server.recv(1))
        client.recv(1)
        taken_s.append(time.monotonic() - began_s)
    return min(taken_s)


@pytest.mark.parametrize(("here", "there"), [("west", "east"), ("east", "west")])
def test_the_link_is_as_slow_as_it_says_and_counts_what_crosses(lab, here, there):
    client, server = pair(lab, here, there)
    with client, server:
        before = lab.wan_bytes(into=there)
        mbit_per_s = SIZE * 8e-6 / send(client, server, SIZE)
        crossed = lab.wan_bytes(into=there) - before
    print(f"{mbit_per_s:.0f} Mbit/s, {crossed / SIZE:.3f} of what was sent")
    assert 0.6 * lab.mbit_per_s < mbit_per_s < lab.mbit_per_s, "TCP begins slowly; headers count"
    assert SIZE < crossed < 1.1 * SIZE


def test_the_link_is_as_far_as_it_says(lab):
    client, server = pair(lab, "west", "east")
    with client, server:
        taken_ms = round_trip_s(client, server) * 1e3
    print(f"{taken_ms:.1f} ms")
    assert lab.round_trip_ms < taken_ms < 1.5 * lab.round_trip_ms


def test_within_a_datacenter_nothing_crosses_the_link(lab):
    before = lab.wan_bytes()
    client, server = pair(lab, "east", "east")
    with client, server:
        send(client, server, SIZE)
        assert round_trip_s(client, server) * 1e3 < lab.round_trip_ms / 4
    assert lab.wan_bytes() - before < 10_000, "the kernels' own words"


def test_etcd_is_reached_from_the_other_datacenter(lab, etcd_in_the_west, etcd_programs):
    before = lab.wan_bytes()
    with lab.host("east"):
        etcdctl = [etcd_programs / "etcdctl", "--endpoints", etcd_in_the_west.client_url]
        subprocess.run([*etcdctl, "put", "key", "from the east"], check=True, timeout=60)
    with lab.host("west"):
        said = subprocess.run([*etcdctl, "get", "key"], check=True, timeout=60, capture_output=True)
    assert said.stdout == b"key\nfrom the east\n"
    assert lab.wan_bytes() > before


def test_nothing_crosses_a_cut_link_and_it_goes_on_afterwards(lab):
    client, server = pair(lab, "west", "east")
    with client, server:
        with lab.cut():
            before = lab.wan_bytes()
            client.sendall(b".")
            assert not select.select([server], [], [], 3 * lab.round_trip_ms / 1e3)[0]
            assert lab.wan_bytes() == before
        assert server.recv(1) == b"."


WHERE = """
import os
print(os.stat("/proc/self/ns/net").st_ino, sorted(os.listdir("/sys/class/net")), os.getcwd())
"""


def test_what_a_thread_starts_runs_in_the_datacenter_it_is_in(lab, started):
    here, seen = (network(), devices(), Path.cwd()), set()
    for datacenter in lab.datacenters:
        with lab.host(datacenter):
            there = f"{network('thread-self')} ['lo', 'wan'] {Path.cwd()}\n"
            puppet = started.start(WHERE)
            child = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True)
        puppet.finish()
        assert puppet.end_of_log() == child.stdout == there
        seen.add(there)
    assert len(seen) == 2
    assert (network(), devices(), Path.cwd()) == here


SLEEPER = "import time; print(flush=True); time.sleep(600)"


@pytest.mark.parametrize("end", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_of_it_is_left(lab, started, end):
    del lab  # it can be made here
    before, networks = (network(), devices()), set()
    try:
        with Lab() as made:
            for datacenter in made.datacenters:
                with made.host(datacenter):
                    puppet = started.start(SLEEPER, talks=True)
                    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                    puppet.hear()
                    networks |= {network(puppet.pid), network(child.pid)}
            assert len(whoever_keeps(networks)) >= 6, "two of each, and the link"
            with made.host("east"):
                if end:
                    raise end
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert len(networks) == 2
    assert whoever_keeps(networks) == []
    assert [puppet.wait(20) for puppet in started.started] == [-signal.SIGKILL] * 2
    assert child.wait(20) == -signal.SIGKILL
    assert (network(), devices()) == before


MAKER = """
import json, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from lab import Lab
with Lab() as lab:
    with lab.host("east"):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with lab.cut():
        print(json.dumps([lab._link.pid, child.pid]), flush=True)
        time.sleep(600)
"""


def test_nothing_is_left_of_one_whose_maker_is_killed(lab):
    before = devices()
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER, LINK.parent], stdout=subprocess.PIPE, text=True
    )
    with maker:
        pids = json.loads(maker.stdout.readline())
        networks = {network(pid) for pid in pids}
        assert len(networks) == 1, "the link ends up in the east"
        ends = [os.pidfd_open(pid) for pid in pids]
        maker.kill()
        for end in ends:
            assert select.select([end], [], [], 20)[0], "it still runs"
            os.close(end)
    assert whoever_keeps(networks) == []
    assert devices() == before


def test_two_labs_beside_each_other_do_not_meet(lab):
    with Lab(mbit_per_s=2000, round_trip_ms=2) as other:
        assert other.address("east") == lab.address("east")
        before = lab.wan_bytes()
        client, server = pair(other, "west", "east")
        with client, server:
            send(client, server, MIB)
        assert other.wan_bytes() > MIB
        assert lab.wan_bytes() - before < 10_000


REFUSED = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from lab import Lab, LabUnavailable
PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)
try:
    with Lab():
        pass
except LabUnavailable as error:
    print(error)
"""


def test_one_who_may_not_make_it_is_told_why():
    command = [sys.executable, "-c", REFUSED, LINK.parent]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Operation not permitted: 'unshare'" in said.stdout, said
