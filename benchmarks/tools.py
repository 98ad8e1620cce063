"""The price that a fleet pays while every tool looks at it: processor time, and requests to etcd.

A trainer publishes, and three rollouts follow. Rounds with all tools running take turns with rounds
without them. Counted is what the fleet's own processes do, not the tools. The fleet has the first
core, tools and etcd have the others; they share its cache.

    python benchmarks/tools.py --rounds 15
"""

import argparse
import contextlib
import http.client
import os
import pty
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import tensors as contents
from control import Meter
from harness import Actors, Child, Sample, Setup, ask_all, etcd_at, rounds, say, started
from report import machine

import torch_ros
from torch_ros.face import opening
from torch_ros.store.kv import KV

VERSIONS, EVERY_S = 20, 0.2  # of a round
ROLLOUTS, SIZE_MIB, TENSORS = 3, 64, 100
LOOKED_S = 1.0  # how often a page of figures is scraped, and `why` is asked
WAIT_S = 60.0
FLEETS_CORE = 0
CPU, REQUESTS = "s of processor", "requests to etcd"
Beside = Callable[[], contextlib.AbstractContextManager[None]]
NOTHING, TOOLS = "nothing beside them", "all tools"


class Member:
    """A process of the fleet."""

    def __init__(self, setup: Setup, name: str) -> None:
        os.sched_setaffinity(0, {FLEETS_CORE})
        self._meters: list[Meter] = []
        connect = opening.connect_store

        def metered(endpoint: str, *, timeout_s: float) -> KV:
            self._meters.append(Meter(connect(endpoint, timeout_s=timeout_s)))
            return self._meters[-1]

        opening.connect_store = metered
        self._tensors = contents.plain(SIZE_MIB << 20, TENSORS)
        self._handle = torch_ros.open(setup.name, endpoint=setup.endpoint, replica=name)
        self._handle.register(self._tensors)

    def publish(self, version: int) -> None:
        self._handle.unpublish()
        self._handle.publish(version)

    def follow(self, version: int) -> None:
        while self._handle.version != version:
            self._handle.update("latest", wait_s=WAIT_S)

    def spent(self) -> dict[str, float]:
        asked = sum((meter.requests for meter in self._meters), Counter[str]())
        return {CPU: time.process_time(), REQUESTS: asked.total()}

    def close(self) -> None:
        self._handle.close()


def member(setup: Setup, name: str) -> Actors:
    return {"member": Member(setup, name)}


def a_round(
    fleet: list[Child],
    numbers: Iterator[int],
    beside: Beside,
) -> Sample:
    with beside():
        before = ask_all(fleet, "member", "spent")
        for _ in range(VERSIONS):
            version = next(numbers)
            for child in fleet[1:]:
                child.tell("member", "follow", (version,))
            began_s = time.monotonic()
            fleet[0].ask("member", "publish", version)
            for child in fleet[1:]:
                child.hear()
            time.sleep(max(0.0, began_s + EVERY_S - time.monotonic()))
        after = ask_all(fleet, "member", "spent")
    return {
        what: sum(now[what] - then[what] for now, then in zip(after, before, strict=True))
        for what in (CPU, REQUESTS)
    }


@contextlib.contextmanager
def tools(setup: Setup) -> Iterator[None]:
    """`ls --watch`, `top`, the page with a browser's stream, `export`, and `why`, all the time."""
    over, model, shown = threading.Event(), setup.name, subprocess.DEVNULL
    command = [sys.executable, "-m", "torch_ros", "--endpoint", setup.endpoint]
    web, export = free_port(), free_port()
    ours, terminal = pty.openpty()
    watched = [
        subprocess.Popen([*command, *asked], stdin=where, stdout=where, stderr=shown)
        for where, *asked in (
            (shown, "ls", model, "--watch"),
            (terminal, "top", model),
            (shown, "web", model, "--port", str(web)),
            (shown, "export", "--port", str(export)),
        )
    ]
    os.close(terminal)

    def ask_why() -> None:
        while not over.wait(LOOKED_S):
            subprocess.run([*command, "why", model, "rollout-0"], check=False, stdout=shown)

    looks = (
        ask_why,
        partial(_drain, ours),
        partial(_look, web, f"/events?model={model}", over),
        partial(_look, export, "/metrics", over),
    )
    lookers = [threading.Thread(target=look) for look in looks]
    try:
        for port in (web, export):
            _await(port)
        for looker in lookers:
            looker.start()
        yield
        assert all(process.poll() is None for process in watched), "a tool has ended"
    finally:
        over.set()
        for process in watched:
            process.terminate()
            process.wait()
        for looker in lookers:
            looker.join()
        os.close(ours)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _await(port: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return


def _drain(terminal: int) -> None:
    with contextlib.suppress(OSError):  # its other end is closed
        while os.read(terminal, 1 << 16):
            pass


def _look(port: int, path: str, over: threading.Event) -> None:
    """Ask for a page each second; read one that does not end as it comes."""
    while not over.wait(LOOKED_S):
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        with contextlib.closing(server), contextlib.suppress(OSError, http.client.HTTPException):
            server.request("GET", path)
            page = server.getresponse()
            while page.read1(4096) and not over.is_set():
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--endpoint", default="local", help='"local", or "etcd://host:port"')
    given = parser.parse_args()
    os.sched_setaffinity(0, {*os.sched_getaffinity(0)} - {FLEETS_CORE})  # and all that begins here
    with etcd_at(given.endpoint), tempfile.TemporaryDirectory() as files:
        name = f"bench-{secrets.token_hex(4)}"
        setup = Setup(given.endpoint, name, SIZE_MIB, given.rounds, files)
        names = ["trainer", *(f"rollout-{number}" for number in range(ROLLOUTS))]
        with started({each: partial(member, setup, each) for each in names}) as fleet:
            numbers = iter(range(1, sys.maxsize))
            besides: Mapping[str, Beside] = {
                NOTHING: contextlib.nullcontext,
                TOOLS: partial(tools, setup),
            }
            cases = {what: partial(a_round, fleet, numbers, each) for what, each in besides.items()}
            samples = rounds(given.rounds, cases)
    say(str(machine(given.endpoint)))
    for what in (CPU, REQUESTS):
        pairs = [
            (without[what], beside[what])
            for without, beside in zip(samples[NOTHING], samples[TOOLS], strict=True)
        ]
        ratios = sorted(beside / without for without, beside in pairs)
        alone = statistics.median(without for without, _ in pairs)
        print(
            f"{what} of {VERSIONS} versions, {ROLLOUTS + 1} processes: {alone:.2f} without tools; "
            f"with all of them {statistics.median(ratios):.3f} times ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
