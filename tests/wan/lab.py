"""Two datacenters on one machine: network namespaces, and a link that is slow and far.

    with Lab() as lab:
        with lab.host("west"):
            etcd = subprocess.Popen(...)  # runs in the west, as all that is started here
        with lab.host("east"):
            rollout = started.start(program, **LIBRARY)
        lab.wan_bytes(into="east")

Within a datacenter its address is reached over loopback. Root is needed, /dev/net/tun, `ip` and
`mount`; nothing outside of the namespaces changes.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

CLONE_FS = 0x200
LINK = Path(__file__).with_name("link.py")
DEVICE = "wan"
END_S = 30.0
# Nothing is copied from one namespace to the other through the kernel, as between hosts.
LIBRARY = {"UCX_TLS": "tcp"}


class LabUnavailable(Exception):
    """This machine does not let us make a lab; the message says why."""


class Lab:
    """A lab that is there from `with` on, and gone after it with all processes within.

    The lab is gone as well, a moment later, when the process that made it is killed.

    Args:
        mbit_per_s: The rate of each direction of the link.
        round_trip_ms: The time across the idle link and back.

    Raises:
        LabUnavailable: `with` cannot make a lab here.
    """

    def __init__(self, mbit_per_s=200, round_trip_ms=40, datacenters=("west", "east")):
        self.mbit_per_s, self.round_trip_ms = mbit_per_s, round_trip_ms
        self.datacenters = datacenters

    def __enter__(self):
        self._link = subprocess.Popen(
            [
                *(sys.executable, LINK),
                *(str(self.mbit_per_s), str(self.round_trip_ms), *self.datacenters),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is for those who close the lab
        )
        try:
            said = self._hear()
            if reason := said.get("unavailable"):
                raise LabUnavailable(reason)
            self._namespaces, self._addresses = said["namespaces"], said["addresses"]
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_):
        self._close()

    def address(self, datacenter):
        """The address at which both datacenters reach this one."""
        return self._addresses[datacenter]

    @contextlib.contextmanager
    def host(self, datacenter):
        """Processes, puppets and sockets that this thread makes within are of that datacenter.

        From the first call on this thread has a working directory of its own.
        """
        here = [Path(f"/proc/thread-self/ns/{kind}") for kind in ("net", "mnt")]
        files = Path(f"/proc/{self._link.pid}/fd")
        there = [files / str(file) for file in self._namespaces[datacenter]]
        with contextlib.ExitStack() as stack:
            back, on = ([stack.enter_context(path.open()) for path in p] for p in (here, there))
            _call("unshare", CLONE_FS)  # or no thread may change its mounts
            try:
                _enter(on)
                yield
            finally:
                _enter(back)

    def wan_bytes(self, into=None):
        """The bytes that have arrived at one end of the link, or both, headers and all."""
        ends = self.datacenters if into is None else [into]
        return sum(self.device_bytes(DEVICE, into=end) for end in ends)

    def device_bytes(self, device, into):
        """The bytes that have arrived at a network device of that datacenter."""
        with self.host(into):
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == f"{device}:")

    @contextlib.contextmanager
    def cut(self):
        """The link loses all frames until the block ends."""
        self._toggle()
        try:
            yield
        finally:
            self._toggle()

    def _toggle(self):
        self._link.stdin.write("\n")
        self._hear()

    def _hear(self):
        return json.loads(self._link.stdout.readline())

    def _close(self):
        self._link.stdin.close()
        try:
            self._link.wait(END_S)
        finally:
            self._link.kill()
            self._link.wait()
            self._link.stdout.close()


def _enter(namespaces):
    directory = Path.cwd()
    for namespace in namespaces:
        _call("setns", namespace.fileno(), 0)
    os.chdir(directory)  # a namespace of mounts is entered at its root


def _call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), name)
