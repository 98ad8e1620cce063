"""Two datacenters and the link between them, in one process. Run by lab.py, never imported.

python link.py MBIT_PER_S ROUND_TRIP_MS DATACENTER DATACENTER

Each datacenter is a namespace of networks, and one of mounts, whose /sys shows that network: UCX
looks for devices there. The namespaces have no names that could be left behind: they
last as long as this process, or one within them. This process has the TAP devices that are the
ends of the link, and moves the Ethernet frames between them, because not every kernel can delay
packets by itself.

The process says where the namespaces are, or why there are none, in a line of JSON. A line of its
standard input cuts the link, the next one mends it; the process answers each with a line. It ends
when standard input does, which also happens when its parent is killed, and first ends all processes
in the namespaces.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
DEVICE = "wan"
# Frames of 1,500 bytes at 200 Mbit/s would take a quarter of a core, and tests have few.
FRAME_BYTES = 9000
ETHERNET_BYTES = 14
# The longest queue of frames before the link. TCP fills the link if this is at least a round trip.
QUEUE_S = 0.1
END_S = 20.0


class Way:
    """One direction: frames take their turns at the link's rate, and then the time across."""

    def __init__(self, into, bytes_per_s, delay_s):
        self.into, self.bytes_per_s, self.delay_s = into, bytes_per_s, delay_s
        self.under_way = deque()  # (when it arrives, frame)
        self.free_s = 0.0  # when the link has sent what waits

    def take(self, frame, now_s):
        self.free_s = max(self.free_s, now_s)
        if self.free_s - now_s <= QUEUE_S:  # otherwise the queue is full
            self.free_s += len(frame) / self.bytes_per_s
            self.under_way.append((self.free_s + self.delay_s, frame))

    def deliver(self, now_s):
        while self.under_way and self.under_way[0][0] <= now_s:
            os.write(self.into, self.under_way.popleft()[1])


def carry(ends, bytes_per_s, delay_s):
    """Move frames until standard input ends; while the link is cut, they are lost."""
    is_cut = False
    ways = {
        end: Way(into, bytes_per_s, delay_s) for end, into in zip(ends, ends[::-1], strict=True)
    }
    while True:
        arrivals = [way.under_way[0][0] for way in ways.values() if way.under_way]
        left_s = max(0.0, min(arrivals) - time.monotonic()) if arrivals else None
        ready, _, _ = select.select([sys.stdin, *ways], [], [], left_s)
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            is_cut = not is_cut
            for way in ways.values():
                way.under_way.clear()
            say(is_cut=is_cut)
        for end in ways.keys() & ready:
            frame = os.read(end, ETHERNET_BYTES + FRAME_BYTES)
            if not is_cut:
                ways[end].take(frame, time.monotonic())
        for way in ways.values():
            way.deliver(time.monotonic())


def build(number):
    """Go into a new datacenter. Returns the files of its namespaces, and its end of the link."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET | CLONE_NEWNS):
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), "unshare")
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TAP | IFF_NO_PI))
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "set", DEVICE, "mtu", str(FRAME_BYTES), "up")
    run("ip", "address", "add", f"{address(number)}/24", "dev", DEVICE)
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")], end


def address(number):
    return f"10.77.0.{1 + number}"


def run(*command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def end_all_within(networks, spared):
    """Kill what is in these namespaces, and return when it is gone."""
    deadline_s = time.monotonic() + END_S
    while pids := [pid for pid in processes() if pid not in spared and network(pid) in networks]:
        assert time.monotonic() < deadline_s, f"{pids} do not end"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def network(pid):
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    return None


def say(**words):
    print(json.dumps(words), flush=True)


def main():
    mbit_per_s, round_trip_ms, *datacenters = sys.argv[1:]
    starter = os.getppid()
    try:
        built = [build(number) for number, _ in enumerate(datacenters)]
    except OSError as error:
        say(unavailable=f"no network namespaces with a link between them: {error}")
        return
    # The link keeps its rate and its time on a busy machine, too. It takes a tenth of a core.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    namespaces, ends = zip(*built, strict=True)
    say(
        namespaces=dict(zip(datacenters, namespaces, strict=True)),
        addresses={name: address(number) for number, name in enumerate(datacenters)},
    )
    try:
        carry(ends, float(mbit_per_s) * 1e6 / 8, float(round_trip_ms) / 2e3)
    finally:
        networks = {os.fstat(net).st_ino for net, _ in namespaces}
        end_all_within(networks, spared={os.getpid(), starter})


if __name__ == "__main__":
    main()
