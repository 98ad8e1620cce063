"""`torch-ros export`, as a process that Prometheus scrapes."""
# needs features streams

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from kit import inside, published
from scraping import exporting, scrape
from users import limited

import torch_ros
from torch_ros.features.streams import filling
from torch_ros.protocol.keys import EVERY_MODEL
from torch_ros.store.txn import Read


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_a_scrape_has_what_is_there_now_and_nothing_is_written(opened, endpoint):
    trainer = opened('trainer "one"\n')
    published(trainer, 7)
    kv = inside(trainer).group.kv
    before = kv.read(Read((EVERY_MODEL,)), timeout_s=5)
    with exporting(endpoint) as (process, said):
        found = scrape(said)
        assert found["torch_ros_fleet_latest_version", trainer.model] == 7
        assert found["torch_ros_fleet_latest_bytes", trainer.model] == 16
        assert found["torch_ros_fleet_only_copy", trainer.model] == 1
        after = kv.read(Read((EVERY_MODEL,)), timeout_s=5)
        assert after.entries == before.entries
        rollout = opened("rollout", {"w": torch.empty(4)})
        rollout.replicate()
        found = scrape(said)
        assert found["torch_ros_fleet_only_copy", trainer.model] == 0
        assert found["torch_ros_fleet_replicas", trainer.model, "complete"] == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_who_streams_is_counted_among_those_who_read(opened, endpoint, monkeypatch):
    monkeypatch.setattr(filling, "IDLE_S", 60.0)  # for which a source waits for this consumer
    trainer, rollout = opened("trainer"), opened("rollout")
    trainer.register({str(number): torch.ones(4) for number in range(4)})
    trainer.publish(1)
    with exporting(endpoint) as (_, said):

        def in_flight():
            found = scrape(said)
            names = [f"torch_ros_fleet_{kind}_in_flight" for kind in ("readers", "streams")]
            return [found[name, trainer.model] for name in names]

        assert in_flight() == [0, 0]
        with rollout.stream(1, map(str, range(4)), buffer_bytes=16) as stream:
            next(stream)
            assert in_flight() == [1, 1]
            assert trainer.fleet().held[0].streamers == ("rollout",)
        assert in_flight() == [0, 0]


@pytest.mark.long
def test_it_outlives_an_etcd_that_comes_and_goes(etcd_server, started):
    endpoint = f"etcd://{etcd_server.host}"
    with torch_ros.open("policy", endpoint=endpoint, replica="trainer", ttl_s=5) as trainer:
        published(trainer, 1)
        with exporting(endpoint, "policy") as (process, said):
            assert scrape(said)["torch_ros_fleet_latest_version", "policy"] == 1
            etcd_server.kill()
            assert scrape(said) == {("torch_ros_fleet_etcd_up",): 0}
            etcd_server.start()
            until_s = time.monotonic() + 20
            while not scrape(said)["torch_ros_fleet_etcd_up",]:
                assert time.monotonic() < until_s
            assert scrape(said)["torch_ros_fleet_readable", "policy"] == 1
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=20)
            assert process.returncode == 0
            assert "Traceback" not in err


@pytest.mark.long
def test_a_role_that_may_read_one_model_is_enough_for_that_one(running_etcd, tmp_path):
    with running_etcd(tmp_path / "etcd") as server:
        endpoint = f"etcd://{server.host}"
        with torch_ros.open("policy", endpoint=endpoint, replica="trainer") as trainer:
            published(trainer, 1)
            environment = limited(server, "/torch-ros/policy/", tmp_path / "password")
            code, err = failed("--endpoint", endpoint, "export", "--port", "0", **environment)
            assert (code, "user 'reads' may not read all keys" in err) == (3, True)
            with exporting(endpoint, "policy", **environment) as (_, said):
                assert scrape(said)["torch_ros_fleet_latest_version", "policy"] == 1


def failed(*arguments, **environment):
    command = [sys.executable, "-m", "torch_ros", *arguments]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment
    )
    assert (found.stdout, found.stderr.count("\n") <= 3) == ("", True)
    assert "Traceback" not in found.stderr
    return found.returncode, found.stderr


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_what_cannot_be_served_is_said(opened, endpoint):
    trainer = opened("trainer")
    published(trainer, 1)
    code, err = failed("--endpoint", endpoint, "export", trainer.model[:-1])
    assert (code, f"did you mean {trainer.model!r}?" in err) == (2, True)
    with exporting(endpoint) as (_, said):
        taken = re.search(r":(\d+)/", said)[1]
        code, err = failed("--endpoint", endpoint, "export", "--port", taken)
        assert (code, "Address already in use" in err) == (2, True)
    assert failed("--endpoint", endpoint, "export", "--port", "70000")[0] == 2
    assert failed("--endpoint", endpoint, "export", "--host", "no.such.host.invalid")[0] == 2
    assert failed("--endpoint", "etcd://127.0.0.1:9", "export")[0] == 3
