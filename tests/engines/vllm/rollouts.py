"""Real vLLM engines, on CPUs, and a trainer in another process."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch_ros
import torch_ros.bucket
from torch_ros.bucket.archive import Archiver, Form

HERE = Path(__file__).parent
PLAIN = str(HERE / "plain")  # the plug-in's path
GATE = {"middleware": "torch_ros.integrations.vllm.gate.Gate"}
START_S = 600  # for a server to come up

# vLLM reads these when it is imported; its processes inherit them.
os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests look into workers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

COMMON = {
    "vocab_size": 1000,  # padded to 1024
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Trainer:
    """The other end of trainer.py, or of another program like it."""

    def __init__(self, path, name, endpoint, *, program="trainer.py", **options):
        self.name = name
        command = [sys.executable, str(HERE / program), path, name, endpoint]
        self._process = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, **command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the trainer has died"
        return json.loads(answer)

    def publish(self, version, **how):
        return self.ask(publish=version, **how)

    def kill(self):
        self._process.kill()
        self._process.wait(60)

    def close(self):
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait(60)


class FarAway:
    """A trainer and its archiver; `publish` returns when the version is in the bucket."""

    def __init__(self, trainer, endpoint, url):
        self._handle = torch_ros.open(trainer.name, endpoint=endpoint, spot=True)
        self.trainer, self.url, self.model = trainer, url, trainer.name
        self.bucket = torch_ros.bucket.open(url, self.model)
        self._archiver = Archiver(self._handle, self.bucket, keep=9, form=Form(deltas=32))

    def publish(self, version, **how):
        published = self.trainer.publish(version, **how)
        self._archiver.archive(lambda *_: None)
        return published

    def close(self):
        self._handle.close()


@dataclass
class EngineUnderTest:
    llm: object
    path: str
    ranks: int

    def answers(self, adapter=None):
        """As trainer.py's `greedy`; `adapter`: vLLM's request for it."""
        from trainer import PROMPTS, TOKENS
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, logprobs=1)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        found = []
        for output in self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapter):
            tokens, logs = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            both = zip(tokens, logs, strict=True)
            found.append([tokens, [log[token].logprob for token, log in both]])
        return found

    def agrees(self, published, adapter=None):
        """Assert that it answers as Hugging Face's model did."""
        for (tokens, logs), (expected, others) in zip(
            self.answers(adapter), published["answers"], strict=True
        ):
            assert tokens == expected
            assert max(abs(a - b) for a, b in zip(logs, others, strict=True)) <= 1e-4

    def in_workers(self, look):
        """The answer of `look(transfer engine)` in each worker."""
        return self.llm.collective_rpc(lambda worker: look(worker.weight_transfer_engine))

    def reports(self):
        return self.in_workers(lambda engine: engine.report)

    def checksums(self):
        return self.llm.collective_rpc("compute_weight_checksums")


@contextmanager
def running_engine(path, *, ranks=1, plain=True, **options):
    """An engine with weights of its own, which nobody trained."""
    from vllm import LLM

    if plain:
        sys.path.insert(0, PLAIN)  # processes that are spawned get this path
    try:
        llm = LLM(
            path,
            **{
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 128,
                "max_num_seqs": 4,
                "load_format": "dummy",
                "tensor_parallel_size": ranks,
                "kv_cache_memory_bytes": 64 << 20,
                "disable_log_stats": True,
                "weight_transfer_config": {"backend": "torch_ros"},
                **options,
            },
        )
    finally:
        if plain:
            sys.path.remove(PLAIN)
    try:
        yield EngineUnderTest(llm, path, ranks)
    finally:
        llm.llm_engine.engine_core.shutdown()


class ServerUnderTest:
    """vLLM's own, with its endpoints for weights."""

    def __init__(self, path, log, *, flags=(), **options):
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
            **options,
        }
        options = {name: value for name, value in options.items() if value is not None}
        flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out", *flags]
        paths = os.pathsep.join(filter(None, [PLAIN, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [*command, *flags, *(one for k, v in options.items() for one in (f"--{k}", v))],
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": paths},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def is_up(self):
        assert self._process.poll() is None, "the server has ended"
        with suppress(OSError):
            self.ask("health", method="GET")
            return True
        return False

    def ask(self, path, body=None, method="POST", **headers):
        request = urllib.request.Request(
            f"{self.url}/{path}",
            json.dumps(body).encode() if body is not None else None,
            {"content-type": "application/json", **headers},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or b"null")

    def update(self, version, pause="keep", label=""):
        """As a driver does that knows vLLM's own calls alone."""
        self.ask(f"pause?mode={pause}")
        self.ask("start_weight_update")
        self.ask("update_weights", {"update_info": {"version": version}})
        body = {} if label is None else {"weight_version": label or str(version)}
        self.ask("finish_weight_update", body)
        self.ask("resume")

    def update_fails(self, version, *, is_lost=False):
        """As a driver does that goes on after a failure; `is_lost`: which left no version."""
        self.ask("pause?mode=keep")
        self.ask("start_weight_update")
        calls = [
            ("update_weights", {"update_info": {"version": version}}),
            ("finish_weight_update", {"weight_version": str(version)}),
        ]
        for path, body in [*calls, ("resume", None)] if is_lost else calls:
            try:
                self.ask(path, body)
            except urllib.error.HTTPError as error:
                assert error.code >= 500
            else:
                raise AssertionError(f"{path} succeeded")
        if not is_lost:
            self.ask("resume")

    def close(self):
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def agrees(self, answers, model="m", **headers):
        """Assert that it answers as Hugging Face's model did."""
        from trainer import PROMPTS, TOKENS

        for prompt, (expected, _) in zip(PROMPTS, answers, strict=True):
            params = {"temperature": 0, "max_tokens": TOKENS, "detokenize": False}
            body = {"model": model, "token_ids": prompt, "sampling_params": params}
            answer = self.ask("inference/v1/generate", body, **headers)
            assert answer["choices"][0]["token_ids"] == expected


def replica(endpoint, **how):
    """Fields of an engine that is one."""
    return {"replica": "vllm", "options": {"endpoint": endpoint, "digests": "full"}} | how


def at_birth(model, **how):
    """Options of a server that is born with a version, and says so while it is not."""
    extra = json.dumps({"model": model, **how})
    flags = {"load-format": "torch_ros", "model-loader-extra-config": extra}
    return flags | {"weight-transfer-config": None} | GATE


@contextmanager
def running_server(path, log, **options):
    """A server that is up; its log is printed at the end."""
    server = ServerUnderTest(path, log, **options)
    try:
        for _ in range(START_S):
            if server.is_up():
                break
            with suppress(subprocess.TimeoutExpired):
                server._process.wait(1)
        else:
            raise TimeoutError(log.read_text()[-2000:])
        yield server
    finally:
        server.close()
        print(log.read_text()[-3000:])
