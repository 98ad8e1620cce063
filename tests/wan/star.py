"""Hosts on one machine around a switch, each behind a link of its own rate.

    with Star({"fast": "400mbit", "slow": "40mbit"}) as star:
        with star.host("slow"):
            subprocess.Popen(...)

`star.host("centre")` is a host without a limit, at `CENTRE`. Root is needed, `ip`, `tc`, `mount`
and `unshare`.
"""

import contextlib
import subprocess
from pathlib import Path

from lab import CLONE_FS, LabUnavailable, _call, _enter

DEVICE = "wan"
CENTRE = "10.79.0.1"
LIBRARY = {"UCX_TLS": "tcp"}  # nothing is copied through the kernel


class Star:
    """Args: rates: By the hosts' names, as `tc` writes them."""

    def __init__(self, rates):
        self.rates, self._keepers = rates, {}

    def __enter__(self):
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            said = getattr(error, "stderr", "") or error
            raise LabUnavailable(f"no star can be made here: {said}") from error
        return self

    def __exit__(self, *_):
        for keeper in self._keepers.values():  # with the last process of it goes a namespace
            keeper.kill()
            keeper.wait()

    def _make(self):
        for name in ("switch", "centre", *self.rates):
            # UCX looks for devices in /sys.
            begin = "mount -t sysfs sysfs /sys && echo && exec sleep 1000"
            command = ["unshare", "--net", "--mount", "sh", "-c", begin]
            keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
            self._keepers[name] = keeper
            if not keeper.stdout.readline():
                raise OSError("unshare, or mount, is refused")
        with self.host("switch"):  # UCX takes no bridge for a device
            run("ip link add bridge type bridge")
            run("ip link set bridge up")
        for number, name in enumerate(("centre", *self.rates), 1):
            with self.host("switch"):
                pid = self._keepers[name].pid
                run(f"ip link add s{number} type veth peer name {DEVICE} netns {pid}")
                run(f"ip link set s{number} master bridge up")
            with self.host(name):
                run("ip link set lo up")
                run(f"ip address add 10.79.0.{number}/24 dev {DEVICE}")
                run(f"ip link set {DEVICE} up")
                if rate := self.rates.get(name):
                    run(f"tc qdisc add dev {DEVICE} root tbf rate {rate} burst 256kb latency 100ms")

    @contextlib.contextmanager
    def host(self, name):
        """Processes that this thread makes within are of that host; see `Lab.host`."""
        kinds, there = ("net", "mnt"), self._keepers[name].pid
        with contextlib.ExitStack() as stack:
            back, on = (
                [stack.enter_context(Path(f"/proc/{of}/ns/{kind}").open()) for kind in kinds]
                for of in ("thread-self", there)
            )
            _call("unshare", CLONE_FS)
            try:
                _enter(on)
                yield
            finally:
                _enter(back)


def run(command):
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
