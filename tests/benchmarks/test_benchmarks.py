"""Each part of the benchmarks, and each of their programs, ends well in its smallest size.

Nothing is expected of the figures. Not run: `bucket.py`, whose steps are long, `born.py` and
`engine.py`, which need vLLM, and `gpu/carried.py`, which downloads. The pieces for a GPU run on a
CPU that stands in.
`beside.py` has tests of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PARTS = {  # with constants that keep them small
    "one-to-one": {"COUNTS": (1,)},
    "resharding": {},
    "fanout": {"READERS": (1, 2), "MEETINGS": 1, "TURNS": 1},
    "steady": {"STEPS": 1, "CYCLES": 1},
    "streams": {"COUNTS": (100,)},
    "borrow": {"LOOKS": 1, "STEPS": 1},
    "huge-pages": {"READERS": 2, "TURNS": 1},
    "tcp": {},
    "footprint": {"READS": 1, "TRANSPORTS": ("auto",)},
    "dcp": {"RANKS": (2,), "STEPS": 1, "WARM_UP": 1},
}
PART = """
import ast, multiprocessing, sys, bench
part, constants = sys.argv[1:3]
for name, value in ast.literal_eval(constants).items():
    getattr(bench.PARTS[part], name)
    setattr(bench.PARTS[part], name, value)
context = multiprocessing.get_context("forkserver")  # most of a part's time is to import torch
context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.tensor"])
multiprocessing.get_context = lambda _: context
sys.argv[1:3] = ["--only", part]
bench.main()
"""
ON_A_CPU = "machine loop copies ways batching digests deltas graphs memory fork"
PROGRAMS = (
    "bench.py --only planning --size-mib 32 --repeat 1",
    "control.py --ranks 1 2 --rounds 1 --replicas 2 4",
    "costs.py --repeat 1",
    "delta.py --size-mib 2 --rounds 1",
    f"gpu/gpu.py --device cpu --only {ON_A_CPU}",
    "scale/scale.py --n 3 --only burst --rules both --workers 1",
    "store.py --ranks 2 --rounds 5",
    "updates.py --size-mib 8 --tensors 4 --rounds 1 --shares 0.01",
)


def ends_well(*arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{BENCHMARKS}"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_a_part_ends_well(part, tmp_path):
    ends_well("-c", PART, part, PARTS[part], "--size-mib", 32, "--repeat", 1, "--out", tmp_path)
    assert {"README.md", "results.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_well(program):
    name, *arguments = program.split()
    ends_well(BENCHMARKS / name, *arguments)


def test_no_part_and_no_program_is_left_out():
    is_program = 'if __name__ == "__main__"'
    paths = (path for path in BENCHMARKS.rglob("*.py") if is_program in path.read_text())
    found = {str(path.relative_to(BENCHMARKS)) for path in paths}
    left_out = {
        "beside.py",
        "born.py",
        "bucket.py",
        "engine.py",
        "gpu/carried.py",
        "plots.py",
        "report.py",
        "turn.py",
    }
    assert found == {program.split()[0] for program in PROGRAMS} | left_out
    parts = re.findall(
        '^    "(.+)": [a-z_]+,$', (BENCHMARKS / "bench.py").read_text(), re.MULTILINE
    )
    assert {*parts} == {*PARTS, "planning"}
