"""`examples/two_regions.py`: rollouts that reach only a bucket, over 100 Mbit/s and 40 ms."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab import LIBRARY, Lab, LabUnavailable

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_regions.py"
SIZE, VERSIONS, PORT = 24 << 20, 4, 5000


@pytest.fixture(scope="module")
def lab():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Lab(mbit_per_s=100))
        except LabUnavailable as error:
            pytest.skip(str(error))
        yield made


@pytest.fixture
def programs(lab):
    """Starts programs in a datacenter, and ends them all."""
    running = []

    def start(where, *command, **environment):
        with lab.host(where):
            running.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=os.environ | LIBRARY | {"OMP_NUM_THREADS": "1"} | environment,
                    text=True,
                    start_new_session=True,
                )
            )
        return running[-1]

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_port(lab, address):
    deadline_s = time.monotonic() + 30
    with lab.host("west"):
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address, PORT), 1):
                return
            assert time.monotonic() < deadline_s, "moto does not listen"
            time.sleep(0.05)


@pytest.mark.nightly
def test_changes_cross_in_a_fraction_of_the_bytes_and_the_time(lab, etcd_in_the_west, programs):
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server", exc_type=ImportError)
    address = lab.address("west")
    store = {
        "AWS_ENDPOINT_URL": f"http://{address}:{PORT}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    programs("west", "-m", "moto.server", "-H", address, "-p", str(PORT))
    await_port(lab, address)
    make = "import urllib.request as u; u.urlopen(u.Request(URL, method='PUT'))"
    made = programs("west", "-c", make.replace("URL", repr(f"http://{address}:{PORT}/weights")))
    assert made.wait(30) == 0, made.stdout.read()
    endpoint = {"TORCH_ROS_ENDPOINT": f"etcd://{etcd_in_the_west.host}"}
    began_s = time.monotonic()
    rollouts = programs("east", EXAMPLE, "rollouts", "s3://weights/demo", **store)
    trainer = programs("west", EXAMPLE, "trainer", "s3://weights/demo", **store, **endpoint)
    said = {each: each.communicate(timeout=100)[0] for each in (rollouts, trainer)}
    took_s = time.monotonic() - began_s
    assert [rollouts.returncode, trainer.returncode] == [0, 0], list(said.values())
    print(said[rollouts], f"{took_s:.1f} s in all")
    found = re.findall(r"version (\d), (.+): ([0-9.]+) MiB in ([0-9.]+) s", said[rollouts])
    full = [(float(mib), float(s)) for _, what, mib, s in found if what == "in full"]
    deltas = [(float(mib), float(s)) for _, what, mib, s in found if what != "in full"]
    assert len(full) == 1
    assert deltas
    assert full[0][0] * 2**20 > SIZE
    for mib, s in deltas:  # of one step each, or more if it was passed by
        assert mib < full[0][0] / 20
        assert s < full[0][1] / 2
    assert took_s < 60
