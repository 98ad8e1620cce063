"""Every command with a user of etcd whose role has the keys of one model, and no others."""

from contextlib import closing

import pytest
from crowd import Crowd
from terminal import drawn
from test_bad_input import ASK_ETCD, ask  # noqa: F401  # a fixture
from test_read_only import READ
from users import limited

import torch_ros
from torch_ros.cli import main
from torch_ros.store.endpoint import connect

ALL = {"ls": [], "doctor": [], "export": ["--port", "0"]}  # that take no model, too


def missing(may, prefix):
    """The permission that is not there, and the line that grants it."""
    does = "write" if may == "readwrite" else may
    grant = f"etcdctl role grant-permission ROLE --prefix=true {may} {prefix}"
    return f"user 'reads' may not {does} all keys that begin with {prefix!r}", grant


@pytest.fixture(scope="module")
def served(running_etcd, tmp_path_factory):
    """The host of an etcd, and the environment of one who has the model "policy" there."""
    folder = tmp_path_factory.mktemp("one-model")
    with running_etcd(folder / "etcd", "--bcrypt-cost", "4") as server:
        password = folder / "password"
        yield f"etcd://{server.host}", limited(server, "/torch-ros/policy/", password, writes=True)


@pytest.fixture
def endpoint(served, monkeypatch):
    for name, value in served[1].items():
        monkeypatch.setenv(name, value)
    with closing(connect(served[0], timeout_s=10)) as kv:
        crowd = Crowd(kv, "policy")
        for name in ("trainer", "rollout"):
            crowd.join(name)
        crowd.publish("trainer", 1)
        crowd.hold("rollout", 1)
        crowd.commit()
    return served[0]


@pytest.mark.parametrize("command", [*READ, "push", "gc --yes"])
def test_one_s_own_model_is_enough(command, endpoint, ask):  # noqa: F811
    code, err = ask(endpoint, command, "policy")
    assert (code in READ.get(command, {0}), "torch-ros:" in err) == (True, False)


def test_top_draws(endpoint, served):
    assert drawn(endpoint, "policy", b"version 1", **served[1]) == 0


def test_a_model_that_is_gone_is_named_and_others_are_not_listed(endpoint, ask):  # noqa: F811
    assert ask(endpoint, "gc --yes", "policy")[0] == 0
    for command in ("gc", "ls", "why", "pull"):
        code, err = ask(endpoint, command, "policy")
        assert (code, "no model 'policy'" in err) == (2, True)
        assert "this user may not list the others" in err


def test_why_does_without_the_other_models(endpoint, capsys):
    with torch_ros.open("policy", endpoint=endpoint, replica="waits"):
        arguments = ["why", "policy", "waits", "--version", "9"]
        code = main.main(["--endpoint", endpoint, *arguments])
    out, err = capsys.readouterr()
    assert (code, "nobody has version 9" in out, "may not" in err) == (1, True, False)


@pytest.mark.parametrize("command", ASK_ETCD)
def test_another_model_takes_a_permission_which_is_said(command, endpoint, ask, capsys):  # noqa: F811
    if command == "doctor":
        code = main.main(["--endpoint", endpoint, "doctor", "--model", "reward"])
        said = capsys.readouterr().out
    else:
        code, said = ask(endpoint, command, "reward")
    assert code == 3
    for words in missing("read", "/torch-ros/reward/"):
        assert words in said


@pytest.mark.parametrize("command", ALL)
def test_all_models_take_a_permission_which_is_said(command, endpoint, capsys):
    assert main.main(["--endpoint", endpoint, command, *ALL[command]]) == 3
    said = "".join(capsys.readouterr())
    for words in (*missing("read", "/torch-ros/"), "or name a model that it may read"):
        assert words in said
