"""Every command with users of etcd who may only read, or do nothing; etcd's revision tells."""

import io
import json
import os
import signal
import sys
import threading
from urllib.parse import urlsplit

import pytest
from crowd import Crowd
from scraping import samples
from terminal import drawn
from test_bad_input import COMMANDS, ask, each_that_asks  # noqa: F401  # a fixture
from test_web import ask as get
from test_web import next_event
from users import limited

from torch_ros.cli import main
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Read

READ = {"ls": {0}, "ls --deep": {0}, "why": {0, 1}, "doctor": {0, 1}, "gc": {0}}
WRITE = {"push", "pull", "diff", "verify", "archive"}  # they take a seat, since they move tensors
SERVE = {"export", "web"}


@pytest.fixture(scope="module")
def users(running_etcd, tmp_path_factory):
    """The endpoint of an etcd with a model, and the environment of one who may only read it."""
    folder = tmp_path_factory.mktemp("users")
    with running_etcd(folder / "etcd", "--bcrypt-cost", "4") as server:
        endpoint = f"etcd://{server.host}"
        kv = connect(endpoint, timeout_s=10)
        crowd = Crowd(kv, "policy")
        for name in ("trainer", "rollout", "reads"):
            crowd.join(name)
        crowd.publish("trainer", 1)
        crowd.hold("rollout", 1)
        crowd.read("reads", "trainer", 1)
        crowd.commit()
        kv.close()
        yield endpoint, limited(server, "/torch-ros/", folder / "password")


@pytest.fixture
def revision(users, monkeypatch):
    """As the one who may read: etcd's revision."""
    endpoint, environment = users
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def look():
        kv = connect(endpoint, timeout_s=10)
        try:
            return kv.read(Read(()), timeout_s=10).rev
        finally:
            kv.close()

    return look


def test_each_command_is_one_that_reads_writes_or_serves():
    known = {*READ, *WRITE, *SERVE, "top", "ready"}
    assert {command.split()[0] for command in known} == {*COMMANDS}


@pytest.mark.parametrize("command", READ)
def test_what_only_reads_may(command, users, revision, ask):  # noqa: F811
    before = revision()
    code, err = ask(users[0], command, "policy")
    assert (code in READ[command], "torch-ros:" in err) == (True, False)
    assert revision() == before


def test_all_models_may_be_listed(users, revision, capsys):
    before = revision()
    assert main.main(["--endpoint", users[0], "ls"]) == 0
    assert "policy" in capsys.readouterr().out
    assert revision() == before


@pytest.mark.parametrize(
    ("deep", "seen"),
    [((), b"version 1"), pytest.param(("--deep",), b"filling ?", marks=pytest.mark.long)],
)
def test_top_draws(deep, seen, users, revision):
    before = revision()
    assert drawn(users[0], "policy", seen, *deep, **users[1]) == 0
    assert revision() == before


class Listening(io.StringIO):
    """Standard output of a command that serves: looks at what is served, then says Ctrl-C."""

    look = None

    def flush(self):
        if self.look is None:
            self.look = threading.Thread(target=self._look)
            self.look.start()

    def _look(self):
        try:
            url = json.loads(self.getvalue())["url"]
            if url.endswith("metrics"):
                found = {each.name: each.value for each in samples(url)}
                self.seen = found["torch_ros_fleet_latest_version"]
            else:
                reply = get(urlsplit(url).port, "/events?model=policy")
                self.seen = next_event(reply)[0]
        finally:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("command", "seen"), [("export", 1.0), ("web", "fleet")])
def test_what_serves_may(command, seen, users, revision, ctrl_c, monkeypatch):
    before, out = revision(), Listening()
    monkeypatch.setattr(sys, "stdout", out)
    assert main.main(["--endpoint", users[0], "--json", command, "policy", "--port", "0"]) == 0
    out.look.join()
    told = json.loads(out.getvalue())
    assert (told["schema"], told["models"], told["endpoint"]) == (1, ["policy"], users[0])
    assert told["port"] == urlsplit(told["url"]).port
    assert out.seen == seen
    assert revision() == before


@pytest.mark.parametrize("command", [*sorted(WRITE), "gc --yes"])
def test_what_writes_is_refused_with_a_line(command, users, revision, ask):  # noqa: F811
    before = revision()
    code, err = ask(users[0], command, "policy")
    assert (code, err.count("torch-ros:")) == (3, 1)
    assert "user 'reads' may not write all keys that begin with '/torch-ros/" in err
    assert "grant-permission ROLE --prefix=true readwrite /torch-ros/" in err
    assert revision() == before


@each_that_asks
def test_who_may_do_nothing_is_told_so(command, users, revision, ask, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TORCH_ROS_ETCD_USER", "nobody")
    code, err = ask(users[0], command, "policy")
    assert code == 3
    assert command == "doctor" or "user 'nobody' may not" in err
