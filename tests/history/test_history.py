"""Real processes, a real etcd, real transfers, and faults that a seed chooses.

make history FAULTS=20 FIRST_SEED=1
"""

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import strikes
import verdict
from stage import Stage
from strikes import plan

FAULTS_PER_SEED = 10
FAULTS = int(os.environ.get("FAULTS", "4"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "1"))
COUNTS = [min(FAULTS_PER_SEED, FAULTS - done) for done in range(0, FAULTS, FAULTS_PER_SEED)]


@pytest.fixture
def folder(request):
    """For histories and logs. pytest's own folders go after three more runs."""
    name = f"{request.getfixturevalue('seed')}-{request.getfixturevalue('count')}"
    made = Path(tempfile.gettempdir(), f"torch_ros-history-{os.getuid()}", name)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    return made


# Copies within the host; TCP of our own; UCX's.
SURROUNDINGS = (
    {},
    {"UCX_TLS": "tcp,self"},
    {"UCX_TLS": "tcp,self", "TORCH_ROS_TRANSPORT": "ucx"},
)


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("a GiB in each process")
@pytest.mark.parametrize(
    ("seed", "count"), [(FIRST_SEED + i, count) for i, count in enumerate(COUNTS)]
)
def test_no_fault_tears_loses_or_hangs_anything(seed, count, etcd_server, folder):
    planned = plan(seed, count)
    surroundings = SURROUNDINGS[seed % len(SURROUNDINGS)]
    (folder / "plan").write_text("\n".join(map(str, planned)))
    diary = asdict(Stage(etcd_server, folder, surroundings).play(planned))
    (folder / "diary.json").write_text(json.dumps(diary, indent=1))
    lives = [
        life
        for who, rank in strikes.PROCESSES
        for life in verdict.read(folder / f"{who}-{rank}.jsonl", who, rank)
    ]
    wrongs = verdict.judge(lives, diary["strikes"], diary)
    told = verdict.story(lives, diary["strikes"], wrongs)
    (folder / "story").write_text(told)
    verified = [n for life in lives for n in life.notes if n["event"] == "verified"]
    print(
        f"\nseed {seed}: {count} faults, {len(verified)} versions read, "
        f"{sum(n['reroutes'] for n in verified)} re-routed, "
        f"{sum(n['source'] != 'trainer' for n in verified)} from rollouts; followed within "
        f"{max(diary['followed'].values(), default=0):.1f} s; at most "
        f"{max(0.0, verdict.overtime(lives)):.1f} s over a deadline; {folder}"
    )
    if wrongs:
        tail = "\n".join(told.splitlines()[-150:])
        again = f"make history FAULTS={count} FIRST_SEED={seed}"
        pytest.fail(f"{tail}\n\nall of it: {folder}/story\nagain: {again}", pytrace=False)
