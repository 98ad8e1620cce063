"""vLLM's own HTTP endpoints, with nothing of ours at the driver; and its trainer engines."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress

import pytest
from rollouts import PLAIN
from trainer import PROMPTS, TOKENS, greedy, step

START_S = 600


class Server:
    def __init__(self, path, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._log = log.open("w")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
        options = {
            "host": "127.0.0.1",
            "port": self.url.rpartition(":")[2],
            "served-model-name": "m",
            "dtype": "float32",
            "load-format": "dummy",
            "max-model-len": "128",
            "max-num-seqs": "4",
            "kv-cache-memory-bytes": str(64 << 20),
            "weight-transfer-config": json.dumps({"backend": "torch_ros"}),
        }
        flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"]
        self._process = subprocess.Popen(
            [*command, *flags, *(one for k, v in options.items() for one in (f"--{k}", v))],
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": PLAIN},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def is_up(self):
        assert self._process.poll() is None, "the server has ended"
        with suppress(OSError):
            self.ask("health", method="GET")
            return True
        return False

    def ask(self, path, body=None, method="POST"):
        request = urllib.request.Request(
            f"{self.url}/{path}",
            json.dumps(body).encode() if body is not None else None,
            {"content-type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or b"null")

    def close(self):
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def agrees(self, answers):
        for prompt, (expected, _) in zip(PROMPTS, answers, strict=True):
            params = {"temperature": 0, "max_tokens": TOKENS, "detokenize": False}
            body = {"model": "m", "token_ids": prompt, "sampling_params": params}
            answer = self.ask("inference/v1/generate", body)
            assert answer["choices"][0]["token_ids"] == expected


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(tiny("untied"), log)
    try:
        for _ in range(START_S):
            if server.is_up():
                break
            with suppress(subprocess.TimeoutExpired):
                server._process.wait(1)
        else:
            pytest.fail(log.read_text()[-2000:])
        yield server
    finally:
        server.close()
        print(log.read_text()[-3000:])


def test_a_driver_that_knows_vllm_alone(server, tiny, train, etcd_endpoint):
    trainer = train(tiny("untied"), "http")
    info = {"model": "http", "options": {"endpoint": etcd_endpoint}}
    server.ask("init_weight_transfer_engine", {"init_info": info})
    for version in (1, 2, 3):
        published = trainer.publish(version)
        server.ask("pause?mode=keep")
        server.ask("start_weight_update")
        server.ask("update_weights", {"update_info": {"version": version}})
        server.ask("finish_weight_update", {"weight_version": str(version)})
        server.ask("resume")
        server.ask("reset_prefix_cache")
        server.agrees(published["answers"])
        assert server.ask("weight_info", method="GET") == {"weight_version": str(version)}


def test_a_trainer_engine_of_vllm(server, tiny, etcd_endpoint):
    """vLLM's own handshake, driven from the trainer."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from torch_ros.integrations.vllm import register
    from torch_ros.integrations.vllm.trainer import ROSTrainerInitInfo

    register()
    register()  # vLLM may call it more than once
    model = AutoModelForCausalLM.from_pretrained(tiny("untied"), dtype=torch.float32).eval()
    place = {"options": {"endpoint": etcd_endpoint}}
    engine = WeightTransferTrainerFactory.trainer_init(
        ROSTrainerInitInfo("pushed", rank=0, **place, engine=place),
        client=HTTPVLLMWeightSyncClient(server.url),
        source=ModuleSource(model),
    )
    try:
        for version in (1, 2):
            step(model, version)
            engine.send_weights()
            server.ask("reset_prefix_cache")
            server.agrees(greedy(model))
            assert engine.version == version
            assert server.ask("weight_info", method="GET") == {"weight_version": str(version)}
    finally:
        engine.shutdown()
