"""How long a server of vLLM on CPUs takes from its start to its first token, by where weights are.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/born.py --mib 1024 --repeat 3

A random Qwen3 is in safetensors files in the page cache, and published by a trainer on this host.
Servers start in turn from the files, from the trainer (`load_format="torch_ros"`), and with dummy
weights, which takes as long as all else does. Compare within one run.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "engines" / "vllm"), str(ROOT / "tests")]

from engine import model  # noqa: E402
from kit import until  # noqa: E402
from rollouts import ServerUnderTest, Trainer, at_birth  # noqa: E402

import puppets  # noqa: E402

BODY = {"model": "m", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1}}


def first_token_s(path: str, log: Path, options: dict) -> float:
    """From the start of a server to its first answer."""
    began_s = time.perf_counter()
    server = ServerUnderTest(path, log, **options)
    try:
        until(server.is_up, 600, pause_s=0.02)
        server.ask("inference/v1/generate", BODY)
        return time.perf_counter() - began_s
    finally:
        server.close()


def loading(log: Path) -> str:
    """The line of the log that says how long loading took."""
    told = re.findall(r"\] (Loading weights took .*|.*after .* s: version .*)", log.read_text())
    return told[-1] if told else "nothing loaded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of the model, at least")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    with tempfile.TemporaryDirectory() as place:
        model(f"{place}/model", options.mib)
        size = sum(path.stat().st_size for path in Path(place).rglob("*.safetensors"))
        with puppets.running_etcd(Path(place) / "etcd") as etcd:
            endpoint = f"etcd://{etcd.host}"
            trainer = Trainer(f"{place}/model", "bench", endpoint)
            trainer.publish(1, is_quick=True)
            ways = {
                "dummy weights": {},
                "safetensors": {"load-format": "safetensors"},
                "torch_ros": at_birth("bench", replica="vllm", options={"endpoint": endpoint}),
            }
            took_s: dict[str, list[float]] = {way: [] for way in ways}
            try:
                for turn in range(options.repeat):
                    for way, how in ways.items():
                        log = Path(place) / f"{way}-{turn}.log"
                        took_s[way].append(first_token_s(f"{place}/model", log, how))
                        print(f"{way}: {took_s[way][-1]:.1f} s; {loading(log)}", flush=True)
            finally:
                trainer.close()
    print(f"{size / 2**20:.0f} MiB, load average {os.getloadavg()[0]:.1f}")
    for way, each in took_s.items():
        print(f"  {way:16} {statistics.median(each):6.1f} s   ({min(each):.1f} to {max(each):.1f})")


if __name__ == "__main__":
    main()
