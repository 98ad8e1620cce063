"""A server of vLLM says 503 for completions, and for these alone, while there is no version."""

import asyncio
import http.client
import json
import math
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import quote

import kit
import pytest
import uvicorn

import torch_ros
from torch_ros import environment
from torch_ros.integrations.vllm import gate
from torch_ros.integrations.vllm.core import FIRST, NO_VERSION

COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/a/new/path")
DRIVING = ("/update_weights", "/update_weights/", "/pause", "/resume", "/v1/load_lora_adapter")
ASKING_NO_WEIGHTS = ("/tokenize", "/v1/messages/count_tokens")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """However slowly a test runs."""
    monkeypatch.setattr(gate, "FRESH_S", math.inf)
    monkeypatch.setattr(gate, "WAIT_S", 60)


class Engine:
    """vLLM's client of an engine."""

    def __init__(self, version, load_format="auto"):
        self.version, self.asked = version, 0
        load = SimpleNamespace(load_format=load_format)
        self.vllm_config = SimpleNamespace(load_config=load)
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.is_asked = asyncio.Event()

    async def get_weight_version(self):
        self.asked += 1
        self.is_asked.set()
        await self.is_idle.wait()
        if isinstance(self.version, Exception):
            raise self.version
        return self.version


class Server:
    """An app behind the gate, and what each request has got from it."""

    def __init__(self, version, load_format="auto"):
        self.engine = Engine(version, load_format)
        self.gate = gate.Gate(self._answer)
        self.passed, self.status = [], 200
        self.then = lambda: None

    async def _answer(self, scope, receive, send):
        self.passed.append(scope["path"])
        self.then()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, path, method="POST", **scope):
        said = []
        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))

        async def send(message):
            said.append(message)

        async def receive():
            return {"type": "websocket.connect"}

        named = {"type": "http", "method": method, "path": path, "app": app} | scope
        await self.gate(named, receive, send)
        return said

    async def status_of(self, path, method="POST", **scope):
        return (await self.ask(path, method, **scope))[0]["status"]


def run(story):
    asyncio.run(story())


@pytest.mark.parametrize("path", COMPLETIONS)
def test_completions_get_503_with_a_reason_until_there_is_a_version(path):
    async def story():
        server = Server(NO_VERSION)
        start, body = await server.ask(path)
        headers = dict(start["headers"])
        assert (start["status"], headers[b"retry-after"]) == (503, b"1")
        assert int(headers[b"content-length"]) == len(body["body"])
        error = json.loads(body["body"])["error"]
        assert (error["code"], "no whole version" in error["message"]) == (503, True)
        server.engine.version = "1"
        assert await server.status_of(path) == 200
        assert server.passed == [path]

    run(story)


@pytest.mark.parametrize("path", DRIVING + ASKING_NO_WEIGHTS)
def test_calls_that_ask_no_weights_pass(path):
    async def story():
        server = Server(NO_VERSION)
        assert await server.status_of(path) == 200
        assert await server.status_of(f"/root{path}", root_path="/root") == 200

    run(story)


def test_gets_pass_such_as_health():
    async def story():
        server = Server(NO_VERSION)
        assert await server.status_of("/health", "GET") == 200
        assert await server.status_of("/v1/completions", "OPTIONS") == 200
        assert server.engine.asked == 0

    run(story)


@pytest.mark.parametrize(
    ("version", "load_format", "status"),
    [
        (FIRST, "dummy", 503),
        (FIRST, "torch_ros", 503),
        (FIRST, "auto", 200),
        ("3", "dummy", 200),
        (NO_VERSION, "auto", 503),
    ],
)
def test_dummy_weights_are_no_version_though_nobody_has_attached(version, load_format, status):
    async def story():
        assert await Server(version, load_format).status_of("/v1/completions") == status

    run(story)


@pytest.mark.parametrize("error", [RuntimeError("different results"), AttributeError("no method")])
def test_engines_that_disagree_or_cannot_be_asked_are_closed_and_the_log_says_why(error, caplog):
    async def story():
        server = Server(error)
        for _ in range(3):
            _, body = await server.ask("/v1/completions")
            assert "different versions" in json.loads(body["body"])["error"]["message"]
        [line] = caplog.messages  # not one for each request
        assert line == f"the engine does not say which version it has: {error!r}"

    run(story)


def test_an_engine_with_a_version_is_not_asked_at_each_request():
    async def story():
        server = Server("1")
        for _ in range(5):
            assert await server.status_of("/v1/completions") == 200
        assert server.engine.asked == 1
        for path in ("/pause", "/start_weight_update", "/resume", "/reset_prefix_cache"):
            await server.status_of(path)
        await server.status_of("/v1/completions")
        assert server.engine.asked == 1

    run(story)


@pytest.mark.parametrize(("path", "status"), [("/update_weights", 500), ("/weight_checker", 200)])
def test_a_call_that_leaves_no_version_closes_the_gate(path, status):
    async def story():
        server = Server("1")
        assert await server.status_of("/v1/completions") == 200
        server.status = status
        server.then = lambda: setattr(server.engine, "version", NO_VERSION)
        assert await server.status_of(path) == status
        assert await server.status_of("/v1/completions") == 503

    run(story)


def test_an_answer_of_500_closes_the_gate_of_a_server_that_saw_no_update():
    """As one of several servers of an engine."""

    async def story():
        server = Server("1")
        assert await server.status_of("/v1/completions") == 200
        server.engine.version, server.status = NO_VERSION, 500
        assert await server.status_of("/v1/completions") == 500
        assert await server.status_of("/v1/completions") == 503

    run(story)


def test_requests_wait_in_the_engine_while_it_is_updated(monkeypatch):
    monkeypatch.setattr(gate, "WAIT_S", 0)

    async def story():
        server = Server("1")
        await server.gate._ask(server.engine)
        await server.status_of("/update_weights/")
        server.engine.is_idle.clear()  # it says nothing until the update is over
        assert await server.status_of("/v1/completions") == 200
        server.engine.version = NO_VERSION
        server.engine.is_idle.set()
        await server.gate._question
        assert await server.status_of("/v1/completions") == 503

    run(story)


@pytest.mark.parametrize("was_open", [True, False])
@pytest.mark.parametrize(("version", "status"), [("2", 200), (NO_VERSION, 503)])
def test_requests_that_wait_ask_once_together(was_open, version, status):
    async def story():
        server = Server("1" if was_open else NO_VERSION)
        await server.gate._ask(server.engine)
        await server.status_of("/update_weights")
        server.engine.is_idle.clear()
        server.engine.is_asked.clear()
        server.engine.version = version
        waiting = [asyncio.ensure_future(server.status_of("/v1/completions")) for _ in range(4)]
        await server.engine.is_asked.wait()
        waiting += [asyncio.ensure_future(server.status_of("/v1/completions")) for _ in range(4)]
        await asyncio.sleep(0)  # these look, too, while the question is being asked
        server.engine.is_idle.set()
        assert await asyncio.gather(*waiting) == [status] * 8
        assert server.engine.asked == 2

    run(story)


def test_an_answer_does_not_count_for_ever(monkeypatch):
    """A server of several hears of no update, and its streams have no status of 500."""
    monkeypatch.setattr(gate, "FRESH_S", 0)

    async def story():
        server = Server("1")
        assert await server.status_of("/v1/completions") == 200
        server.engine.version = NO_VERSION
        assert await server.status_of("/v1/completions") == 503

    run(story)


def test_a_websocket_is_refused():
    async def story():
        server = Server(NO_VERSION)
        said = await server.ask("/v1/realtime", type="websocket")
        assert said[0]["type"] == "websocket.http.response.start"
        assert said[0]["status"] == 503
        assert not server.passed

    run(story)


def test_the_life_of_the_server_is_none_of_its_business():
    async def story():
        server = Server(NO_VERSION)
        await server.ask("", type="lifespan")
        assert server.passed == [""]

    run(story)


def test_a_server_without_an_engine_is_not_gated():
    async def story():
        server = Server(NO_VERSION)
        server.engine = None
        assert await server.status_of("/a/new/path") == 200

    run(story)


# Probes


@contextmanager
def served(app, **options):
    """An app behind uvicorn, as vLLM's is, and a way to ask it."""
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", **options))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    kit.until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]

    def ask(target, method="GET"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, target)
        answer = connection.getresponse()
        found = answer.status, dict(answer.headers), answer.read()
        connection.close()
        return found

    yield ask
    running.should_exit = True
    thread.join(30)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.READY_DIR, str(tmp_path / "ready"))
    where = kit.memory()
    handle = torch_ros.open("Qwen/Qwen3", endpoint=where, replica="vllm 0", installs=True)
    yield handle
    handle.close()


@pytest.mark.parametrize("root", ["", "/below"])
def test_a_probe_is_answered_whatever_the_engine_does(engine, root):
    server = Server(NO_VERSION)
    target = f"/ready/{quote(engine.model, safe='')}/{quote(engine.replica)}"
    with served(server.gate, root_path=root, lifespan="off") as ask:
        status, headers, body = ask(target)
        assert (status, headers["content-type"]) == (503, "application/json")
        assert json.loads(body)["reason"] == "rank 0 has no version yet"
        status, headers, nothing = ask(target, "HEAD")
        assert (status, headers["content-length"], nothing) == (503, str(len(body)), b"")
        assert ask(f"/ready/{engine.model}/r")[0] == 400  # a slash in a name
        assert ask(f"{target}?version=x")[0] == 400
    assert server.engine.asked == 0
    assert server.passed == []


def test_a_server_that_says_no_escapes_is_asked_all_the_same(engine):
    async def story():
        server = Server("1")
        _, body = await server.ask("/ready/m/r", "GET")
        assert "has told of it" in json.loads(body["body"])["reason"]
        assert await server.status_of("/ready/m/r", "POST") == 200  # none of ours

    run(story)
