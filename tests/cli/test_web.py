"""`torch-ros web` without a browser: lines and their differences, the watch, who is let in."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing, contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import torch
import uvicorn
from crowd import RUN, Crowd
from hypothesis import given
from hypothesis import strategies as st
from kit import until
from test_ls import ONE, TWO, fleet, held

from puppets.servers import free_port
from torch_ros.cli import asking, lines, main, telling, web
from torch_ros.cli.asking import fleets
from torch_ros.errors import StoreUnavailable
from torch_ros.fleet.fleet import Fleet
from torch_ros.protocol.keys import Keys
from torch_ros.protocol.records import SchemaRecord
from torch_ros.store.endpoint import connect
from torch_ros.store.txn import Delete, Put, Txn, one

BODY = 15 << 30


def line(*there, name="r0", **more):
    [found] = [each for each in lines.lines(fleet(*there, **more)) if each.replica == name]
    return found


def test_a_line_says_what_a_replica_has_and_reads():
    reading = line(
        held("trainer", kind="original", readers=("r0",)),
        held("r0", state="filling", is_relay=True, sources=("trainer",), since_ms=7),
        held("r0", ONE),
    )
    assert (reading.holds, reading.fills, reading.state, reading.how) == (
        ONE,
        TWO,
        "filling",
        "relay",
    )
    assert (reading.sources, reading.behind) == (("trainer",), 1)
    assert reading.since_ms == 7
    assert line(held("r0"), held("r0", ONE, kind="copy")).also == (ONE,)
    assert line(held("trainer"), names=["r0"]).state == "empty"


@pytest.mark.parametrize(
    ("there", "state"),
    [
        ({"state": "full"}, "full"),
        ({"state": "full", "is_offered": False}, "not offered"),
        ({"state": "draining"}, "draining"),
        ({"state": "filling", "kind": "original"}, "publishing"),
        ({"kind": "lingering"}, "lingering"),
    ],
)
def test_a_state_is_a_word(there, state):
    assert line(held("r0", **there)).state == state


def test_a_replica_that_is_gone_is_not_full():
    there = fleet(held("r0"))
    there.replicas["r0"] = replace(there.replicas["r0"], state="left")
    [found] = lines.lines(there)
    assert found.state == "left"
    assert lines.spread([found], TWO) == lines.Spread(0, 0, 0)


def test_a_spread_counts_who_has_it_and_who_reads():
    there = fleet(held("a"), held("b", state="filling"), held("b", ONE), names=["c"])
    assert lines.spread(lines.lines(there), there.latest) == lines.Spread(1, 1, 3)


STATES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["full", "filling", "draining"]))


@given(STATES, STATES)
def test_what_differs_makes_the_one_into_the_other(one, other):
    before, after = (
        telling.told(fleet(*(held(name, state=state) for name, state in states.items())))
        for states in (one, other)
    )
    told = telling.difference(before, after)
    kept = {name: value for name, value in before.lines.items() if name not in told["gone"]}
    assert kept | {each["replica"]: each for each in told["lines"]} == after.lines
    assert telling.difference(after, after)["lines"] == []


def test_a_watch_tells_each_change_and_the_last_one_of_many(store, crowd):
    over = threading.Event()
    told = fleets(store, crowd.keys.model, over)
    assert next(told).latest.version == 1
    for version in range(2, 30):
        crowd.publish("trainer", version)
        crowd.commit()
    seen = 0
    while next(told).latest.version < 29:
        seen += 1
    assert seen < 28
    over.set()
    assert list(told) == []


@pytest.mark.long
def test_a_watch_tells_that_etcd_is_away_and_goes_on(etcd_server):
    with closing(connect(f"etcd://{etcd_server.host}", timeout_s=10)) as kv:
        crowd = Crowd(kv, "policy")
        crowd.join("trainer")
        crowd.commit()
        told = fleets(kv, "policy", threading.Event())
        assert list(next(told).replicas) == ["trainer"]
        etcd_server.kill()
        assert isinstance(next(told), StoreUnavailable)
        etcd_server.start()
        while not isinstance(found := next(told), Fleet):
            assert isinstance(found, StoreUnavailable)
        assert list(found.replicas) == ["trainer"]


@pytest.mark.long  # an answer is waited for
def test_a_watch_tells_that_etcd_is_silent(etcd_server):
    with closing(connect(f"etcd://{etcd_server.host}", timeout_s=10)) as kv:
        told = fleets(kv, "policy", threading.Event())
        assert isinstance(next(told), Fleet)
        etcd_server.suspend()
        wakes = threading.Timer(40, etcd_server.process.send_signal, [signal.SIGCONT])
        wakes.start()
        assert isinstance(next(told), StoreUnavailable)
        wakes.cancel()
        etcd_server.process.send_signal(signal.SIGCONT)
        while not isinstance(next(told), Fleet):
            pass


@contextmanager
def serving(kv, model=None, token=""):
    """The port of a server in this process."""
    port = free_port()
    app = web.application(kv, model, token)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield port
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)


def ask(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def next_event(reply):
    kind = data = None
    while (text := reply.readline().decode()) != "\n" or data is None:
        name, _, value = text.rstrip("\n").partition(": ")
        kind, data = (value, data) if name == "event" else (kind, json.loads(value))
    return kind, data


def test_a_page_hears_of_a_fleet_and_then_of_what_has_changed(store, crowd):
    model = crowd.keys.model
    with serving(store, model) as port:
        assert json.load(ask(port, "/models"))["models"] == [model]
        reply = ask(port, f"/events?model={model}")
        kind, first = next_event(reply)
        assert (kind, first["all"], first["latest"]) == ("fleet", True, f"{RUN}/1")
        assert [each["replica"] for each in first["lines"]] == ["trainer"]
        assert (first["versions"][0]["bytes"], first["spread"]) == (BODY, [1, 0, 1])
        crowd.join("<img src=x>")
        crowd.commit()
        _, then = next_event(reply)
        assert (then["all"], [each["replica"] for each in then["lines"]]) == (
            False,
            ["<img src=x>"],
        )
        assert ask(port, "/events?model=other").status == 404


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_model_of_another_release_is_a_line_on_the_page(store):
    model = "m-other"
    record = SchemaRecord(99, "9").encode()
    store.commit(Txn((), (Put(Keys(model).schema(), record),)), timeout_s=5)
    with serving(store, model) as port:
        kind, told = next_event(ask(port, f"/events?model={model}"))
    assert (kind, "release 9" in told["reason"]) == ("trouble", True)


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_the_page_runs_what_is_in_it_and_writes_nothing(store, crowd):
    with serving(store) as port:
        reply = ask(port, "/")
        policy = reply.headers["content-security-policy"]
        page = reply.read().decode()
        for method in ("POST", "PUT", "DELETE"):
            assert ask(port, "/models", method).status == 405
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_name_that_leads_here_from_elsewhere_is_refused(store, crowd):
    with serving(store) as port:
        for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert ask(port, "/", Host=host).status == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", ""):
            assert ask(port, "/models", Host=host).status == 403


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_others_need_the_token(store, crowd):
    with serving(store, token="größe") as port:
        for path in ("/", "/models", "/events?model=x", "/?token=", "/?token=wrong"):
            assert ask(port, path).status == 401
        entered = ask(port, "/?token=gr%C3%B6%C3%9Fe")
        assert (entered.status, entered.headers["location"]) == (303, "/")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        name, _, value = cookie.partition(";")[0].partition("=")
        assert ask(port, "/models", Cookie=f"{name}={value}").status == 200
        assert ask(port, "/models", Cookie=f"{name}=wrong").status == 401
        sent = {"Authorization": "Bearer größe".encode()}
        assert ask(port, "/models", **sent).status == 200
        assert ask(port, "/models", Authorization="Bearer gr").status == 401
    with serving(store, token="größe") as other:  # of the same host: a browser sends it there too
        assert str(port) in name
        assert ask(other, "/models", Cookie=f"{name}={value}").status == 401
        assert ask(other, "/models", Cookie=f"torch-ros-{other}={value}").status == 401
        for said in ("größe", "gr%C3%B6%C3%9Fe"):
            assert said not in value


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_model_that_is_not_there_is_not_watched(store, crowd, monkeypatch):
    model, watched = crowd.keys.model, []

    def noted(kv, name, over):
        watched.append(name)
        return fleets(kv, name, over)

    monkeypatch.setattr(asking, "fleets", noted)
    with serving(store) as port:
        refused = ask(port, "/events?model=none")
        assert refused.status == 404
        assert "no model 'none' in" in refused.read().decode()
        assert next_event(ask(port, f"/events?model={model}"))[0] == "fleet"
    assert watched == [model]


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_one_page_too_many_is_told_so_until_another_is_closed(store, crowd, monkeypatch):
    monkeypatch.setattr(web, "STREAMS_MAX", 2)
    path = f"/events?model={crowd.keys.model}"
    with serving(store) as port:
        pages = [ask(port, path) for _ in range(2)]
        assert [next_event(page)[0] for page in pages] == 2 * ["fleet"]
        refused = ask(port, path)
        assert refused.status == 503
        assert refused.read() == b"2 pages are open; close some"
        pages[0].close()
        until_s = time.monotonic() + 20
        while (reply := ask(port, path)).status == 503:
            assert time.monotonic() < until_s
        assert next_event(reply)[0] == "fleet"


def test_what_cannot_be_served_is_an_exit_code(opened, endpoint, capsys):
    trainer = opened("trainer")
    for arguments, words in (
        ([trainer.model, "--host", "0.0.0.0"], "give --token"),
        ([trainer.model[:-1]], f"did you mean {trainer.model!r}?"),
    ):
        assert main.main(["--endpoint", endpoint, "web", *arguments]) == 2
        assert words in capsys.readouterr().err
    with serving(connect(endpoint, timeout_s=10)) as port:
        assert main.main(["--endpoint", endpoint, "web", "--port", str(port)]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_ctrl_c_lets_pages_go(opened, endpoint, ctrl_c):
    model = opened("trainer").model
    command = [sys.executable, "-m", "torch_ros", "--endpoint", endpoint, "web", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        port = urlsplit(server.stdout.readline().split()[0].removesuffix(":")).port
        reply = ask(port, f"/events?model={model}")
        assert next_event(reply)[0] == "fleet"
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=30)
    assert (server.returncode, said) == (0, "")


def test_the_page_opens_on_the_model_that_lives(opened, store, endpoint):
    """The first of the list is shown."""
    dead = Crowd(store, "a-dead-" + uuid.uuid4().hex[:8])
    dead.join("trainer")
    dead.publish("trainer", 1)
    dead.commit()
    store.commit(Txn((), (Delete(one(dead.keys.group("trainer"))),)), timeout_s=5)
    older, newer = opened("older"), Crowd(store, "b-" + uuid.uuid4().hex[:8])
    newer.join("trainer")
    newer.commit()
    older.register({"w": torch.zeros(1)})
    older.publish(1)
    mine = {dead.keys.model, older.model, newer.keys.model}
    found = [each for each in asking.liveliest(store) if each in mine]
    assert found == [older.model, newer.keys.model, dead.keys.model]
