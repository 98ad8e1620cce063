"""`/ready/MODEL/REPLICA`: what a server says to a probe, and of whom it tells nothing."""

import json
import os
import subprocess
import sys
from urllib.parse import quote

import kit
import pytest
from features.installs.engines import engine, install
from kit import published

import torch_ros
from torch_ros import environment
from torch_ros.fleet import ready_page

endpoint = pytest.fixture(kit.store)
AWAY = "etcd://127.0.0.1:9"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.READY_DIR, str(tmp_path / "ready"))


def page(handle, query="", endpoint=AWAY):
    """The status of a handle's replica, and what is said of it."""
    names = (quote(name, safe="") for name in (handle.model, handle.replica))
    status, said = torch_ros.ready_page("/".join(["/ready", *names]) + query, endpoint=endpoint)
    return status, json.loads(said)


def said(version, reason=""):
    return {"is_ready": not reason, "version": version, "reason": reason}


def test_an_engine_is_ready_while_it_uses_a_version(opened, trainer):
    handle = engine(opened)
    assert page(handle) == (503, said(None, "rank 0 has no version yet"))
    install(handle, 1)
    assert page(handle) == (200, said(1))
    assert page(handle, "?version=1") == (200, said(1))
    assert page(handle, "?version=2") == (503, said(1, "it uses version 1, not 2"))
    handle.close()
    assert page(handle)[0] == 503


def test_it_says_how_far_behind_an_engine_is(opened, trainer, endpoint):
    handle = engine(opened)
    install(handle, 1)
    published(trainer, 3)
    assert page(handle, "?behind=2", endpoint) == (200, said(1))
    assert page(handle, "?behind=1", endpoint) == (503, said(1, "it uses version 1, 2 behind"))


def test_etcd_is_asked_once_a_second_however_many_ask(opened, trainer, endpoint, monkeypatch):
    handle, asked = engine(opened), []
    install(handle, 1)
    own = ready_page.newest_at
    monkeypatch.setattr(ready_page, "newest_at", lambda *of: asked.append(of) or own(*of))
    for _ in range(3):
        assert page(handle, "?behind=0", endpoint)[0] == 200
        assert page(handle, "?behind=0", AWAY)[0] == 200  # its silence is kept, too
    assert asked == [(endpoint, handle.model), (AWAY, handle.model)]
    monkeypatch.setattr(ready_page, "FRESH_S", 0)
    assert page(handle, "?behind=0", endpoint)[0] == 200
    assert len(asked) == 3


def test_an_etcd_that_is_away_makes_nobody_unready(opened, trainer, monkeypatch):
    handle = engine(opened)
    install(handle, 1)
    doubted = {"is_ready": True, "version": 1, "reason": "nobody knows how far behind it is"}
    assert page(handle, "?behind=0") == (200, doubted)
    monkeypatch.setenv(environment.ENDPOINT, AWAY)
    assert page(handle, "?behind=0", "") == (200, doubted)


def test_an_etcd_that_nobody_can_mean_is_named(opened, trainer):
    handle = engine(opened)
    install(handle, 1)
    status, found = page(handle, "?behind=0", "nonsense")
    assert (status, "the endpoint is 'nonsense'" in found["reason"]) == (503, True)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "a%2Fb", "größe", "a b?c#d", "..", "%"])
def test_names_are_percent_encoded_once(opened, name):
    handle = torch_ros.open(name, endpoint=kit.memory(), replica=name, installs=True)
    try:
        assert page(handle) == (503, said(None, "rank 0 has no version yet"))
    finally:
        handle.close()


@pytest.mark.parametrize("target", ["/ready/m/nobody", "/ready/nobody/r", "/ready/%FF/%00/"])
def test_a_name_that_nobody_has_is_as_one_whose_engine_has_not_come_yet(target):
    status, found = torch_ros.ready_page(target)
    reason = "no engine of this user on this host has told of it"
    assert (status, json.loads(found)) == (503, said(None, reason))


@pytest.mark.parametrize(
    "target",
    [
        "/ready",
        "/ready/m",
        "/ready/m/",
        "/ready//r",
        "/ready/Qwen/Qwen3/r",
        "/x/ready/m/r",
        "/ready/m/r?version=",
        "/ready/m/r?version=-1",
        "/ready/m/r?version=٣",
        "/ready/m/r?behind=x",
        "/ready/m/r?behnd=1",
        "/ready/m/r?behind=1&behind=2",
        "/ready/m/r?version=1&behind=1",
    ],
)
def test_a_target_of_another_form_is_no_answer_about_an_engine(target):
    status, found = torch_ros.ready_page(target)
    assert (status, "expected /ready/MODEL/REPLICA" in found) == (400, True)


def test_a_page_has_the_class_of_an_error_and_not_its_words(opened, trainer):
    handle = engine(opened)
    with pytest.raises(ValueError), handle.installing(1):
        raise ValueError("model.norm.weight")
    reason = "rank 0 has no version: 1 was rejected: ValueError"
    assert page(handle) == (503, said(None, reason))


def test_a_server_tells_nothing_of_those_that_it_does_not_know(opened, trainer):
    handle = engine(opened)
    install(handle, 1)
    target = f"/ready/{handle.model}/engine"
    assert ready_page.answer(target, lambda _: lambda: None)[0] == 200
    assert ready_page.answer(target, lambda _: None)[0] == 503
    assert "has told of it" in ready_page.answer(target, lambda _: None)[1]


def test_a_folder_of_somebody_else_makes_nobody_ready(opened, trainer, tmp_path):
    handle = engine(opened)
    install(handle, 1)
    os.chown(tmp_path / "ready" / f"torch-ros-{os.geteuid()}", 12345, 12345)
    status, found = page(handle)
    assert (status, "not a folder of this user" in found["reason"]) == (503, True)


def test_the_newest_version_is_the_one_that_readers_are_given(opened, trainer, endpoint):
    model, kv = trainer.model, kit.inside(trainer).group.kv
    assert ready_page.newest_at(endpoint, model).version == 1
    trainer.unpublish()
    assert ready_page.newest_in(kv, model) is None
    published(trainer, 4)
    assert ready_page.newest_in(kv, model) == trainer.fleet().latest


def test_a_page_takes_neither_torch_nor_grpc_unless_etcd_is_asked():
    program = (
        "import sys, torch_ros; torch_ros.ready_page('/ready/m/r'); "
        "print(*({'torch', 'grpc', 'numpy', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "\n", done
