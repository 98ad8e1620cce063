"""A trainer in the west and four rollouts in the east: what crosses the link between them."""

import json
import os
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from lab import LIBRARY

from puppets import Actor, Puppets

ELEMENTS = 1 << 18  # of 4 bytes
TENSORS = 24
SIZE = TENSORS * ELEMENTS * 4
ROLLOUTS = tuple(f"rollout{number}" for number in range(4))
ROUNDS = 3
TTL_S = 3  # a version takes a second to cross, so that leases end if they do not get through
# Where runs add what they counted, a line of JSON each.
FOUND = Path(tempfile.gettempdir(), f"torch_ros-wan-{os.getuid()}", "crossings.jsonl")


class Job:
    """A trainer, and its rollouts, with tensors whose content says their version."""

    def __init__(self, lab, started, endpoint):
        self.model, self.started = "m-" + uuid.uuid4().hex[:8], started
        self.environment = {"TORCH_ROS_ENDPOINT": endpoint, **LIBRARY}
        with lab.host("west"):
            self.trainer = self._start("trainer", "west")
        with lab.host("east"):
            self.rollouts = [self._start(name, "east") for name in ROLLOUTS]
        for actor in self.everybody():
            assert actor.hear() == {"answer": "here"}

    def _start(self, name, datacenter):
        return Actor(
            self.started,
            name,
            self.environment,
            model=self.model,
            datacenter=datacenter,
            tensors=TENSORS,
            elements=ELEMENTS,
            digests="full",
            ttl_s=TTL_S,
        )

    def everybody(self):
        return [self.trainer, *self.rollouts]

    def publish(self, version):
        self.trainer.ask("unpublish")
        self.trainer.ask("fill", version=version)
        self.trainer.ask("publish", version=version)

    def replicate(self, version):
        """All rollouts at once. Returns what they say of it, by their names."""
        for rollout in self.rollouts:
            rollout.ask("unpublish")
        for rollout in self.rollouts:
            rollout.tell("replicate", version=version)
        answers = {rollout.name: rollout.answer_of(rollout.hear()) for rollout in self.rollouts}
        for rollout in self.rollouts:
            assert rollout.ask("is_whole", version=version)
        return answers

    def await_listed(self, names, seconds=60):
        """Until the trainer finds that these have its version."""
        deadline_s = time.monotonic() + seconds
        while (there := self.trainer.ask("list")) != {"1": sorted(names)}:
            assert time.monotonic() < deadline_s, there


@pytest.fixture(scope="module")
def job(lab, etcd_in_the_west, tmp_path_factory):
    made = Puppets(tmp_path_factory.mktemp("puppets"))
    try:
        yield Job(lab, made, f"etcd://{etcd_in_the_west.host}")
    finally:
        made.close()


def test_rollouts_who_lose_their_trainer_are_missed_and_come_back(lab, job):
    job.publish(1)
    job.replicate(1)
    job.await_listed(["trainer", *ROLLOUTS])
    with lab.cut():
        job.await_listed(["trainer"])
    job.await_listed(["trainer", *ROLLOUTS])
    assert losses(job) == {"trainer": 0, **dict.fromkeys(ROLLOUTS, 1)}
    for rollout in job.rollouts:
        assert rollout.ask("is_whole", version=1)


def losses(job):
    """How often each has lost its lease."""
    return {actor.name: actor.log().count("it takes its seat again") for actor in job.everybody()}


def test_a_version_crosses_the_link_once(lab, job, capsys):
    counted, lost = [], losses(job)
    for version in range(2, 2 + ROUNDS):
        job.publish(version)
        before = lab.wan_bytes(into="east")
        answers = job.replicate(version)
        crossings = (lab.wan_bytes(into="east") - before) / SIZE
        assert {answer["version"] for answer in answers.values()} == {version}
        sources = {name: answer["source"] for name, answer in answers.items()}
        assert 1 < crossings < 1.1, "headers are a few hundredths"
        counted.append({"crossings": round(crossings, 3), "sources": sources})
    FOUND.parent.mkdir(exist_ok=True)
    with FOUND.open("a") as file:
        file.write(json.dumps({"bytes": SIZE, "rounds": counted}) + "\n")
    with capsys.disabled():
        print(f"\ncrossings: {[found['crossings'] for found in counted]}, more in {FOUND}")
    assert losses(job) == lost, "keep-alives cross a link that is full"


def test_a_trainer_takes_its_tensors_back_while_they_cross_the_link(lab, job):
    version = 2 + ROUNDS
    job.publish(version)
    for rollout in job.rollouts:
        rollout.ask("unpublish")
    before, deadline_s = lab.wan_bytes(into="east"), time.monotonic() + 60
    for rollout in job.rollouts:
        rollout.tell("replicate", version=version)
    while lab.wan_bytes(into="east") < before + SIZE / 8:
        assert time.monotonic() < deadline_s, "nothing crosses"
    with lab.cut():  # nobody can end meanwhile
        job.trainer.ask("unpublish")
        holders = job.trainer.ask("list").get(str(version), [])
        job.trainer.ask("fill", version=version + 1)
    assert [name for name in holders if name.startswith("trainer+")], "it made no copy"
    for rollout in job.rollouts:
        assert rollout.answer_of(rollout.hear())["version"] == version
        assert rollout.ask("is_whole", version=version)
