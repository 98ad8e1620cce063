"""TRL's weight transfer, against servers with vLLM's endpoints that read with real handles."""

import ast
import json
import socket
import threading
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import torch_ros
from torch_ros.errors import DeadlineExceeded, PeerError, UsageError
from torch_ros.integrations.trl import ROSWeightTransfer

SHAPES = {"embed.weight": (12, 4), "layer.weight": (4, 4), "norm.weight": (4,)}


def weights(value, log=None):
    """One tensor at a time, in memory that the next one takes, as a gathering trainer may do."""
    memory = torch.empty(48)
    for name, shape in SHAPES.items():
        tensor = memory[: torch.Size(shape).numel()].view(shape).fill_(value)
        if log is not None:
            log.append(name)
        yield name, tensor
    memory.fill_(-1)


def init_fields():
    """The fields that the engine for vLLM has; vLLM, which it imports, is not here."""
    source = Path(torch_ros.__file__).parent / "integrations/vllm/engine.py"
    classes = (
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)
    )
    (info,) = (node for node in classes if node.name == "ROSInitInfo")
    return {node.target.id for node in info.body if isinstance(node, ast.AnnAssign)}


INIT_FIELDS = init_fields()


class Engine:
    """A server's half: a real handle, and the order of calls that vLLM insists on."""

    def __init__(self):
        self.asked, self.handles = [], []
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.is_updating, self.weight_version, self.broken = False, None, set()

    def answer(self, path, body):
        path, _, query = path.lstrip("/").partition("?")
        self.asked.append(path + (f"?{query}" if query else ""))
        if path in self.broken:
            raise RuntimeError("out of memory")
        if path == "init_weight_transfer_engine":
            info = body["init_info"]
            assert info.keys() <= INIT_FIELDS
            self.handles.append(
                torch_ros.open(
                    info["model"], replica=info["replica"], timeout_s=20, **info["options"]
                )
            )
            self.handles[-1].register(self.tensors)
        elif path == "start_weight_update":
            assert not self.is_updating, "started twice"
            self.is_updating = True
            self.handles[-1].unpublish()
        elif path == "update_weights":
            assert self.is_updating
            self.handles[-1].replicate(body["update_info"]["version"])
        elif path == "finish_weight_update":
            assert self.is_updating
            self.is_updating, self.weight_version = False, body.get("weight_version")


@contextmanager
def serving(engine, port=0):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                engine.answer(self.path, body)
            except Exception as error:
                self.send_error(500, "Internal Server Error", str(error))
            else:
                self.send_response(200)
                self.end_headers()

        do_GET = do_POST  # noqa: N815  # http.server's name

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for handle in engine.handles:
            handle.close()


@pytest.fixture
def two():
    """Two engines that are served, and the trainer's half."""
    endpoint, model = f"memory://{uuid.uuid4().hex}", "m-" + uuid.uuid4().hex[:8]
    engines = Engine(), Engine()
    options = {"endpoint": endpoint, "timeout_s": 20}
    info = {"options": {"endpoint": endpoint}}
    with serving(engines[0]) as one, serving(engines[1]) as other:
        servers = [one, other + "/"]
        transfer = ROSWeightTransfer(servers, model, options=options, init_info=info, timeout_s=30)
        yield engines, transfer
        transfer.destroy()


def step(transfer, value):
    """The order of TRL's `_sync_weight`."""
    transfer.pause()
    transfer.send_weights(weights(value))
    transfer.resume()


def test_servers_have_the_weights_when_they_go_on(two):
    engines, transfer = two
    transfer.init_weight_transfer()
    for number, value in enumerate((3.0, 5.0), start=1):
        step(transfer, value)
        for engine in engines:
            assert all((tensor == value).all() for tensor in engine.tensors.values())
            assert engine.weight_version == str(number) == str(transfer.version)
    update = ["start_weight_update", "update_weights", "finish_weight_update"]
    step_ = ["pause?mode=keep", *update, "resume"]
    expected = ["health", "init_weight_transfer_engine", *step_, *step_]
    assert [engine.asked for engine in engines] == [expected] * 2
    assert [len(engine.handles) for engine in engines] == [1, 1]
    assert len({engine.handles[0].replica for engine in engines}) == 2


def test_a_trainer_that_starts_again_counts_anew_in_a_run_of_its_own(two):
    engines, transfer = two
    step(transfer, 1.0)
    step(transfer, 2.0)
    transfer.destroy()
    transfer.destroy()
    step(transfer, 7.0)
    assert transfer.version == 1
    assert all((engine.tensors["norm.weight"] == 7.0).all() for engine in engines)


def test_a_tensor_of_another_shape_is_published_as_such(two):
    engines, transfer = two
    step(transfer, 1.0)
    for engine in engines:
        engine.handles[0].unpublish()
        engine.handles[0].unregister()
        engine.tensors["norm.weight"] = torch.zeros(6)
        engine.handles[0].register(engine.tensors)
    transfer.pause()
    wider = {name: torch.full(shape, 4.0) for name, shape in SHAPES.items()}
    transfer.send_weights(iter((wider | {"norm.weight": torch.full((6,), 4.0)}).items()))
    assert all((engine.tensors["norm.weight"] == 4.0).all() for engine in engines)


def test_a_server_that_refuses_is_named_and_the_other_is_not_left_halfway(two):
    engines, transfer = two
    step(transfer, 1.0)
    engines[1].broken.add("update_weights")
    transfer.pause()
    with pytest.raises(PeerError, match="update_weights answered 500") as caught:
        transfer.send_weights(weights(2.0))
    assert "out of memory" in str(caught.value)
    assert not engines[0].is_updating
    assert engines[0].asked[-1] == "finish_weight_update"  # and no resume
    engines[1].broken.clear()
    step(transfer, 3.0)
    assert all((engine.tensors["norm.weight"] == 3.0).all() for engine in engines)


def test_weights_that_cannot_be_gathered_reach_no_server_and_the_next_do(two):
    engines, transfer = two
    step(transfer, 1.0)

    def failing():
        yield next(weights(2.0))
        raise RuntimeError("gathering failed")

    before = len(engines[0].asked)
    with pytest.raises(RuntimeError, match="gathering failed"):
        transfer.send_weights(failing())
    assert len(engines[0].asked) == before
    step(transfer, 3.0)
    assert transfer.version == 2
    assert all((engine.tensors["embed.weight"] == 3.0).all() for engine in engines)


def test_all_weights_are_drawn_as_the_other_ranks_draw_theirs(two):
    _, transfer = two
    drawn = []
    transfer.send_weights(weights(1.0, drawn))
    assert drawn == list(SHAPES)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_server_that_comes_late_is_waited_for(monkeypatch):
    monkeypatch.setattr("torch_ros.integrations.trl.POLL_S", 0.05)
    endpoint, port = f"memory://{uuid.uuid4().hex}", free_port()
    url, options = f"http://127.0.0.1:{port}", {"endpoint": endpoint}
    transfer = ROSWeightTransfer(url, "late", options=options, init_info={"options": options})
    waits = threading.Thread(target=transfer.init_weight_transfer)
    waits.start()
    engine = Engine()
    with serving(engine, port):
        waits.join(30)
        assert not waits.is_alive()
        assert engine.asked[-1] == "init_weight_transfer_engine"
        transfer.destroy()


def test_a_server_that_never_comes_is_named_at_the_deadline(monkeypatch):
    monkeypatch.setattr("torch_ros.integrations.trl.POLL_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    transfer = ROSWeightTransfer(url, "never", timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match=f"{url}/health did not answer"):
        transfer.init_weight_transfer()


def test_a_server_that_stays_silent_is_named_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match=f"{url}/resume"):
            ROSWeightTransfer(url, "silent", timeout_s=0.2).resume()


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "", "http://host:port", "http://host:99999", []]
)
def test_a_server_that_is_no_url_is_refused(url):
    with pytest.raises(UsageError, match="expected one such as 'http://host:8000'"):
        ROSWeightTransfer(url, "m")
