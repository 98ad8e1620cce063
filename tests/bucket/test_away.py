"""A bucket that is gone for a while: the fleet does not notice, and the archiver catches up.

TORCH_ROS_AWAY_S=300 takes it away for five minutes, with the archiver's own retries.
"""

import os
import re
import signal
import time

import pytest
import torch
from kit import until

import torch_ros
import torch_ros.bucket

pytest.importorskip("obstore")
AWAY_S = float(os.environ.get("TORCH_ROS_AWAY_S", "0"))
STEP_S = 0.5 if AWAY_S else 0.0  # between two: minutes of them would only keep the machine busy
BACK_S = 240 if AWAY_S else 60  # until it has tried again
HURRY = """
objects.RETRIES, objects.RETRY_S, archiving.RETRY_MAX_S = 1, 1, 2
"""
ARCHIVER = f"""
import sys
from torch_ros.bucket import objects
from torch_ros.cli import archiving, main
{"" if AWAY_S else HURRY}
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.timeout(120 + 2 * AWAY_S + BACK_S)
@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_the_fleet_goes_on_without_the_bucket_and_the_archiver_catches_up(
    opened, endpoint, started, server
):
    trainer, rollout = opened("trainer"), opened("rollout")
    sent, got = ({"w": torch.zeros(1 << 20)} for _ in range(2))
    trainer.register(sent)
    rollout.register(got)
    bucket = torch_ros.bucket.open("s3://weights/p", trainer.model)
    arguments = ["--endpoint", endpoint, "archive", trainer.model, bucket.url, "--keep", "3"]
    archiver = started.start(ARCHIVER, *arguments)

    def step(version):
        began_s = time.monotonic()
        trainer.unpublish()
        sent["w"].fill_(version)
        trainer.publish(version)
        rollout.update("latest")
        assert got["w"].eq(version).all()
        return time.monotonic() - began_s

    step(1)
    until(lambda: 1 in bucket.list(), by=archiver)
    before_s = sorted(step(version) for version in range(2, 12))
    server.is_away, began_s = True, time.monotonic()
    away_s, version = [], 12
    tries = 1 if AWAY_S else 3
    while (
        len(re.findall(r"s3://.*it tries again in", archiver.end_of_log())) < tries
        or len(away_s) < 10
        or time.monotonic() < began_s + AWAY_S
    ):
        assert archiver.poll() is None, archiver.end_of_log()
        away_s.append(step(version))
        version += 1
        time.sleep(STEP_S)
    gone_s, median_s = time.monotonic() - began_s, sorted(away_s)[len(away_s) // 2]
    assert median_s < 3 * before_s[5] + 0.1
    server.is_away, began_s = False, time.monotonic()
    until(lambda: version - 1 in bucket.list(), BACK_S, by=archiver)
    print(
        f"gone for {gone_s:.0f} s: {len(away_s)} versions, {median_s:.3f} s each in the median and "
        f"{max(away_s):.3f} s at most, {before_s[5]:.3f} s before; the archiver has the last one "
        f"{time.monotonic() - began_s:.0f} s after the bucket is back"
    )
    found = {"w": torch.zeros(1 << 20)}
    assert bucket.load(found) == version - 1
    assert found["w"].eq(version - 1).all()
    archiver.signal(signal.SIGTERM)
    archiver.finish()
