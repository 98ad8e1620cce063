"""Probes at the port of a process's figures."""
# needs features installs

import http.client
import json
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

import kit
import pytest
from features.installs.engines import engine, install
from kit import published

import torch_ros
from torch_ros import environment
from torch_ros.errors import StoreUnavailable
from torch_ros.metrics import HandleCollector, server
from torch_ros.metrics.ready import ready_here

endpoint = pytest.fixture(kit.store)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.READY_DIR, str(tmp_path / "ready"))


@pytest.fixture
def trainer(opened):
    handle = opened("trainer")
    published(handle, 1)
    return handle


@contextmanager
def asking(ready=ready_here):
    """A server, and a way to ask it: the status, headers and body that it answers with."""
    with server.serving(HandleCollector(), "127.0.0.1", 0, ready) as url:
        at = urlsplit(url)

        def ask(target, method="GET", **headers):
            connection = http.client.HTTPConnection(at.hostname, at.port, timeout=20)
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
            found = answer.status, answer.headers, answer.read()
            connection.close()
            return found

        yield ask


def test_the_port_of_figures_answers_probes_of_its_own_replicas(opened, trainer):
    handle = engine(opened)
    target = f"/ready/{handle.model}/engine"
    with asking() as ask:
        assert ask(target)[0] == 503
        install(handle, 1)
        status, headers, body = ask(target)
        assert (status, headers["content-type"]) == (200, "application/json")
        assert headers["cache-control"] == "no-store"
        assert json.loads(body) == {"is_ready": True, "version": 1, "reason": ""}
        status, headers, nothing = ask(target, "HEAD")
        assert (status, int(headers["content-length"]), nothing) == (200, len(body), b"")
        assert ask(f"/ready/{handle.model}/other")[0] == 503
        assert ask("/ready")[0] == 400
        assert b"torch_ros_held_version" in ask("/metrics")[2]
        assert ask(target, Host="evil.example")[0] == 403


def test_a_slash_in_a_name_stays_in_the_name():
    name = "Qwen/Qwen3-4B"
    handle = torch_ros.open(name, endpoint=kit.memory(), replica="r/0", installs=True)
    try:
        with asking() as ask:
            names = [quote(each, safe="") for each in (name, "r/0")]
            assert b"has no version yet" in ask("/".join(["/ready", *names]))[2]
            assert ask(f"/ready/{name}/r/0")[0] == 400
    finally:
        handle.close()


def test_another_process_s_replica_is_as_one_that_nobody_has(opened, trainer, monkeypatch):
    handle = engine(opened)
    install(handle, 1)
    monkeypatch.setattr("torch_ros.metrics.ready.open_shards", tuple)
    with asking() as ask:
        status, _, body = ask(f"/ready/{handle.model}/engine")
        assert (status, b"no engine of this user" in body) == (503, True)


def test_how_far_behind_an_engine_is_its_own_etcd_says(opened, trainer, monkeypatch):
    handle = engine(opened)
    install(handle, 1)
    published(trainer, 3)
    with asking() as ask:
        target = f"/ready/{handle.model}/engine?behind="
        assert (ask(f"{target}2")[0], ask(f"{target}1")[0]) == (200, 503)

        def away(*_, **__):
            raise StoreUnavailable("etcd://here", 0.5, "away")

        monkeypatch.setattr(kit.inside(handle).group.kv, "read", away)
        status, _, body = ask(f"{target}0")
        assert (status, b"nobody knows how far behind" in body) == (200, True)
        assert b"etcd://here" not in body


def test_a_port_without_engines_makes_nobody_ready():
    """As that of `torch-ros export`, which would have figures for any path."""
    with asking(server.nobody_is_ready) as ask:
        assert ask("/ready/m/r")[0] == 404
        assert ask("/metrics")[0] == 200
