"""torch_ros beside its peers: those that are installed here, in the smallest size.

Nothing is expected of the figures. `make bench-peers` installs all peers.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEERS = sorted(path.stem for path in (BENCHMARKS / "peers").glob("[a-z]*.py"))
PLACED = runpy.run_path(str(BENCHMARKS / "placed.py"))
STUCK = """
import subprocess, sys, time
sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open({told!r}, "w") as told:
    print(sleeping.pid, file=told)
time.sleep(600)
"""
LIMIT = """
import argparse, beside, pathlib, sys
beside.HERE = pathlib.Path(sys.argv[1])
given = argparse.Namespace(
    peers=["ros", "other"], cases=["one"], rounds=2, size_mib=1, repeat=1, limit_s=10.0, out=None
)
found = beside.run(given, {})["one"]
assert {each["error"] for each in found.values()} == {"not done within 10 s"}, found
print(*beside.tables({"one": found}))
"""


def ended(*arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{BENCHMARKS}"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_moves_whole_versions(peer, tmp_path):
    out = tmp_path / "found.json"
    small = ("--size-mib", 1, "--repeat", 1, "--rounds", 1, "--out", out)
    told = ended(BENCHMARKS / "beside.py", "--peers", peer, "--cases", "one", "resharded", *small)
    cases = json.loads(out.read_text())["cases"]
    errors = {case: found[peer].get("error", "") for case, found in cases.items()}
    if errors["one"].startswith(("ModuleNotFoundError", "ImportError")):
        pytest.skip(f"{peer}: {errors['one']}")
    assert errors == {"one": "", "resharded": ""}
    [turn] = cases["one"][peer]["turns"]
    [sample] = turn["samples"]
    assert sample.keys() == {"last", "held", "may write"}
    assert sample["last"] > 0
    assert f"| {cases['one'][peer]['name']} (" in told
    is_left = f"- Left to their users by: {cases['resharded'][peer]['name']}" in told
    assert is_left is not bool(cases["resharded"][peer]["turns"])


@pytest.mark.long
def test_a_peer_that_hangs_is_ended_with_all_its_processes_and_the_run_goes_on(tmp_path):
    told = tmp_path / "told"
    (tmp_path / "turn.py").write_text(STUCK.format(told=str(told)))
    printed = ended("-c", LIMIT, tmp_path)
    assert "ros did not run: `not done within 10 s`" in printed
    assert "other did not run: `not done within 10 s`" in printed
    sleeping = Path("/proc") / told.read_text().strip() / "stat"
    assert not sleeping.exists() or sleeping.read_text().rpartition(")")[2].split()[0] == "Z"


def turn(last, held):
    samples = [{"last": each, "held": held, "may write": held} for each in last]
    return {"samples": samples, "beyond": {"between versions": 2, "peak": 3}}


def test_the_table_has_medians_of_all_ratios_of_each_round_and_what_did_not_run(tmp_path):
    ours = [turn([0.1, 0.1, 0.4], 0.002), turn([0.2, 0.3, 0.3], 0.002)]
    others = [turn([0.2, 0.2, 0.2], 0.0012), turn([0.3, 0.3, 0.3], 0.0012)]
    found = {
        "ros": {"name": "A", "package": "r 1", "turns": ours},
        "other": {"name": "B", "package": "a 2", "turns": others},
        "broken": {"turns": [], "error": "No such library"},
        "whole": {"name": "Whole", "package": "whole 3", "turns": []},
    }
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"header": {}, "cases": {"one": found}}))
    told = ended(BENCHMARKS / "beside.py", "--show", file).splitlines()
    assert told[0] == "## One trainer, one rollout"
    assert told[4:] == [
        "| A (r 1) | 250 (100..300) | 1.00 (1.00..1.00) | 2.0 (2.0..2.0) | 2 (2..2) | 2 | 3 |",
        "| B (a 2) | 250 (200..300) | 1.50 (1.00..2.00) | 1.2 (1.2..1.2) | 1 (1..1) | 2 | 3 |",
        "",
        "- broken did not run: `No such library`",
        "- Left to their users by: Whole",
        "",
    ]
    assert ">B<" in file.with_suffix(".svg").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_element_of_another_version_or_place_is_found(rank):
    tensors = PLACED["whole"](1 << 20)
    PLACED["write"](tensors, 5, rank)
    PLACED["verify"](tensors, 5, rank)
    for version, other in ((6, rank), (5, 1 - rank)):
        with pytest.raises(AssertionError, match="t0000 is not what version"):
            PLACED["verify"](tensors, version, other)
    tensors["t0099"][1, 7] += 1
    with pytest.raises(AssertionError, match="t0099 is not what version 5 has there"):
        PLACED["verify"](tensors, 5, rank)
