"""A bucket that is gone for a while: the fleet does not notice, and the archiver catches up."""

import signal
import time

import pytest
import torch

import torch_ros
import torch_ros.bucket
from puppets.objects import ObjectServer

pytest.importorskip("obstore")
ARCHIVER = """
import sys
from torch_ros.bucket import objects
from torch_ros.cli import archiving, main
objects.RETRIES, objects.RETRY_S, archiving.RETRY_MAX_S = 1, 1, 2
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def server(monkeypatch):
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def wait_until(is_so, puppet, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert puppet.poll() is None, puppet.end_of_log()
        assert time.monotonic() < deadline_s, puppet.end_of_log()
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_the_fleet_goes_on_without_the_bucket_and_the_archiver_catches_up(
    opened, endpoint, started, server
):
    trainer, rollout = opened("trainer"), opened("rollout")
    sent, got = ({"w": torch.zeros(1 << 20)} for _ in range(2))
    trainer.register(sent)
    rollout.register(got)
    bucket = torch_ros.bucket.open("s3://weights/p", trainer.model)
    arguments = ["--endpoint", endpoint, "archive", trainer.model, bucket.url, "--keep", "3"]
    archiver = started.start(ARCHIVER, *arguments)

    def step(version):
        began_s = time.monotonic()
        trainer.unpublish()
        sent["w"].fill_(version)
        trainer.publish(version)
        rollout.update("latest")
        assert got["w"].eq(version).all()
        return time.monotonic() - began_s

    step(1)
    wait_until(lambda: 1 in bucket.list(), archiver)
    before_s = sorted(step(version) for version in range(2, 12))
    server.is_away = True
    away_s, version = [], 12
    while archiver.end_of_log().count("it tries again in") < 3 or len(away_s) < 10:
        assert archiver.poll() is None, archiver.end_of_log()
        away_s.append(step(version))
        version += 1
    assert sorted(away_s)[len(away_s) // 2] < 3 * before_s[5] + 0.1
    server.is_away = False
    wait_until(lambda: version - 1 in bucket.list(), archiver)
    found = {"w": torch.zeros(1 << 20)}
    assert bucket.load(found) == version - 1
    assert found["w"].eq(version - 1).all()
    archiver.signal(signal.SIGTERM)
    archiver.finish()
