"""etcd is away while a trainer trains: for everybody, or for one of its two ranks.

OUTAGE_S=600 makes it ten minutes, with leases as long as by default.
"""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_ros
from torch_ros.errors import SeatLost, StoreUnavailable

OUTAGE_S = float(os.environ.get("OUTAGE_S", "5"))
TTL_S = 2 if OUTAGE_S < 60 else 10
STEP_S = 0.5
WAITS_S = 30  # what a trainer waits in all: a lease, and to take its seat again
PATIENCE_S = 100


class Proxy:
    """A way to etcd that can be cut."""

    def __init__(self, port):
        self._port, self._open, self._is_cut = port, set(), False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"etcd://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._is_cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one, other):
        with contextlib.suppress(OSError):
            while said := one.recv(1 << 16):
                other.sendall(said)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        self._is_cut = True
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self):
        self._is_cut = False

    def close(self):
        self.cut()
        self._listener.close()


class Job:
    """A trainer of some ranks, in threads that meet in each step, and rollouts that follow it."""

    def __init__(self, endpoints, endpoint):
        self.stop, self.meet = threading.Event(), threading.Barrier(len(endpoints))
        self.endpoints, self.endpoint = endpoints, endpoint
        self.handles, self.versions = {}, {}
        self.step = self.not_waited = 0
        self.waited_s = dict.fromkeys(range(len(endpoints)), 0.0)

    def open(self, endpoint, name, **options):
        return torch_ros.open(
            "m", endpoint=endpoint, replica=name, ttl_s=TTL_S, transport="memory", **options
        )

    def train(self, rank):
        size = len(self.endpoints)
        handle = self.open(self.endpoints[rank], "trainer", rank=rank, world_size=size)
        tensor = torch.zeros(64)
        with handle, contextlib.suppress(threading.BrokenBarrierError):
            handle.register({f"w{rank}": tensor})  # each rank has a stage
            step = 0
            while True:
                self.meet.wait(PATIENCE_S)
                step += 1
                began_s = time.monotonic()
                handle.unpublish()
                self.waited_s[rank] += time.monotonic() - began_s
                tensor.fill_(step)
                began_s = time.monotonic()
                is_offered = handle.publish(step, store_wait_s=0)
                self.waited_s[rank] += time.monotonic() - began_s
                assert handle.version == step
                self.not_waited += not is_offered and rank == 0
                self.step = step
                time.sleep(STEP_S)

    def roll(self, name):
        handle = self.open(self.endpoint, name, retain=("latest",))
        tensors = {f"w{rank}": torch.zeros(64) for rank in range(len(self.endpoints))}
        with handle:
            handle.register(tensors)
            while not self.stop.is_set():
                with contextlib.suppress(SeatLost, StoreUnavailable):
                    if handle.update(timeout_s=PATIENCE_S):
                        now = {float(x) for tensor in tensors.values() for x in tensor}
                        assert now == {float(handle.version)}
                        self.versions[name] = handle.version
                time.sleep(0.1)

    def run(self, strike, mend):
        with ThreadPoolExecutor(8) as pool:
            trainers = [pool.submit(self.train, rank) for rank in range(len(self.endpoints))]
            rollouts = [pool.submit(self.roll, name) for name in ("r0", "r1")]
            running = [*trainers, *rollouts]

            def until(holds):
                until_s = time.monotonic() + PATIENCE_S
                while not holds():
                    for job in running:
                        if job.done():
                            job.result()
                    assert time.monotonic() < until_s, (self.step, self.versions)
                    time.sleep(0.05)

            def follows(step):
                return all(self.versions.get(name, 0) >= step for name in ("r0", "r1"))

            try:
                until(lambda: follows(3))
                strike()
                before, steps = dict(self.waited_s), self.step
                time.sleep(OUTAGE_S)
                steps = self.step - steps
                mend()
                now = self.step
                until(lambda: follows(now + 1))
                waits = {rank: self.waited_s[rank] - before[rank] for rank in before}
                print(f"{OUTAGE_S:.0f} s: {steps} steps, waited {waits}, {self.not_waited} not")
                return steps, max(waits.values())
            finally:
                self.stop.set()
                self.meet.abort()


@pytest.fixture(autouse=True)
def _loud(caplog):
    caplog.set_level("INFO", logger="torch_ros")


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def well(job, steps, waited_s, caplog):
    assert job.not_waited >= 2
    assert waited_s < WAITS_S
    assert steps >= (OUTAGE_S - WAITS_S) / STEP_S / 2
    away = [line for line in lines(caplog) if "cannot take its seat" in line]
    assert len(away) <= 4 * (7 + OUTAGE_S / 60)  # of four handles; not one every 0.5 s
    assert any("has its seat again" in line and "after" in line for line in lines(caplog))


@pytest.mark.long
def test_a_trainer_steps_on_while_etcd_is_away_and_everybody_follows_afterwards(
    etcd_server, caplog
):
    endpoint = f"etcd://{etcd_server.host}"
    job = Job([endpoint], endpoint)
    steps, waited_s = job.run(etcd_server.kill, etcd_server.start)
    well(job, steps, waited_s, caplog)


@pytest.mark.long
def test_two_ranks_step_on_while_one_of_them_is_cut_off_from_etcd(etcd_server, caplog):
    endpoint = f"etcd://{etcd_server.host}"
    proxy = Proxy(etcd_server.port)
    try:
        job = Job([proxy.endpoint, endpoint], endpoint)
        steps, waited_s = job.run(proxy.cut, proxy.mend)
    finally:
        proxy.close()
    well(job, steps, waited_s, caplog)
