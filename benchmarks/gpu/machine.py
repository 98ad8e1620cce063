"""The machine, and the tests that need a GPU."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from card import Card, Row, outcome, speed

from torch_ros.p2p.ucx import has_gpu

ROOT = Path(__file__).parents[2]
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "4", "--timeout", "60")


def machine(card: Card) -> Iterator[Row]:
    """Versions, what the library sees of the card, and how fast it is."""
    yield Row("device", card.name())
    yield Row("processors", str(os.cpu_count()))
    yield Row("kernel", " ".join(Path("/proc/version").read_text().split()[:3]))
    yield Row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in ("nixl-cu13", "nixl-cu12", "transformers", "triton"):
        try:
            yield Row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Row(name, "not there")
    is_seen = has_gpu() == card.is_gpu
    yield outcome("NVIDIA's driver in /proc", has_gpu(), str(card.is_gpu), is_met=is_seen)
    size = card.size_bytes(4)
    [source] = card.tensors(size, 1).values()
    target = torch.empty_like(source)
    taken_s = card.usual(lambda: target.copy_(source))
    yield speed("a copy on the card (bytes are read, and written)", size, taken_s)


def tests(card: Card) -> Iterator[Row]:
    """`tests/gpu`, which a CPU skips."""
    done = subprocess.run(
        [sys.executable, *TESTS, "tests/gpu"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield outcome(line[:120], "failed", "passes", is_met=False)
    is_met = done.returncode == 0 if card.is_gpu else None
    yield outcome("tests/gpu", lines[-1] if lines else "nothing", "all pass", is_met=is_met)
    print(done.stdout[-4000:], file=sys.stderr)
