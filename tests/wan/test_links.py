"""`torch-ros doctor --links` around a switch: links come in their order, the slow one is named."""

import json
import os
import subprocess
import sys
import uuid

import pytest
from lab import LabUnavailable
from star import CENTRE, LIBRARY, Star

from puppets import Actor

RATES = {"fast": "400mbit", "middle": "200mbit", "slow": "20mbit"}
MIB = 8  # of the model
RUNS = int(os.environ.get("TORCH_ROS_LINK_RUNS", "2"))
PROGRAM = f"""
import sys
from torch_ros.cli.main import main
for _ in range({RUNS}):
    main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def star():
    try:
        with Star(RATES) as star:
            yield star
    except LabUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def fleet(star, started, running_etcd, tmp_path):
    """A replica of one model on each host, and the environment to ask for them in the centre."""
    with star.host("centre"):
        context = running_etcd(tmp_path / "etcd", address=CENTRE)
        server = context.__enter__()
    environment = {"TORCH_ROS_ENDPOINT": f"etcd://{server.host}", **LIBRARY}
    model = "m-" + uuid.uuid4().hex[:8]
    actors = []
    for name in RATES:
        with star.host(name):
            options = {"model": model, "tensors": 4, "elements": MIB << 16, "timeout_s": 60}
            actors.append(Actor(started, name, environment, **options))
    for actor in actors:
        assert actor.hear() == {"answer": "here"}
    actors[0].ask("publish", version=1)
    for actor in actors[1:]:
        actor.ask("replicate", version=1)
    yield model, environment
    context.__exit__(None, None, None)


@pytest.mark.nightly
def test_links_are_ranked_and_the_slow_one_is_named(star, fleet):
    model, environment = fleet
    with star.host("centre"):
        command = [sys.executable, "-c", PROGRAM, "--json", "doctor", "--links", model]
        found = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        )
    runs = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(runs) == RUNS
    for said in runs:
        print({link["replica"]: round(link["bytes_per_s"] * 8e-6) for link in said["links"]})
        assert [link["replica"] for link in said["links"]] == list(RATES)
        assert {link["way"] for link in said["links"]} == {"TCP wan"}
        [slow] = [each for each in said["findings"] if each["found"].startswith("link from")]
        assert slow["found"].startswith("link from slow at ")
        assert slow["level"] == "warn"
