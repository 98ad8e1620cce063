"""Two datacenters with two devices between them: what carries a version, across and within."""

import subprocess
import uuid

import pytest
from lab import DEVICE, LIBRARY

from puppets import Actor

ELEMENTS = 1 << 18  # of 4 bytes
TENSORS = 24
SIZE = TENSORS * ELEMENTS * 4
SHORT_CUT = "lan"
WARNING = "away, and in the same fabric, 'default'"


@pytest.fixture(scope="module")
def short_cut(lab):
    """A second device in both datacenters, which joins them without a delay."""
    with lab.host("east"):
        keeper = subprocess.Popen(["sleep", "600"])
    made = "ip", "link", "add", SHORT_CUT, "type", "veth", "peer", "name", SHORT_CUT, "netns"
    with lab.host("west"):
        subprocess.run([*made, str(keeper.pid)], check=True)
    for number, datacenter in enumerate(lab.datacenters, 1):
        with lab.host(datacenter):
            for command in (["link", "set", SHORT_CUT, "up"], address(number)):
                subprocess.run(["ip", *command], check=True)
    yield SHORT_CUT
    keeper.kill()
    keeper.wait()


def address(number):
    return ["address", "add", f"10.78.0.{number}/24", "dev", SHORT_CUT]


@pytest.fixture
def start(lab, started, etcd_in_the_west):
    """Starts an actor with one model of this test's."""
    model = "m-" + uuid.uuid4().hex[:8]

    def start(name, where, environment, **options):
        environment = {"TORCH_ROS_ENDPOINT": f"etcd://{etcd_in_the_west.host}", **environment}
        options = {"model": model, "tensors": TENSORS, "elements": ELEMENTS, **options}
        with lab.host(where):
            return Actor(started, name, environment, **options)

    return start


@pytest.mark.parametrize("device", [DEVICE, SHORT_CUT])
def test_a_version_crosses_once_on_the_named_device(lab, short_cut, start, device):
    places = {"trainer": "west", "a": "west", "b": "east", "c": "east"}
    actors = {
        name: start(name, where, LIBRARY, datacenter=where, wan_devices=[device])
        for name, where in places.items()
    }
    for actor in actors.values():
        assert actor.hear() == {"answer": "here"}
    trainer, *rollouts = actors.values()
    trainer.ask("fill", version=1)
    trainer.ask("publish", version=1)
    before = arrived(lab, short_cut)
    for rollout in rollouts:
        rollout.tell("replicate", version=1)
    for rollout in rollouts:
        rollout.answer_of(rollout.hear())
        assert rollout.ask("is_whole", version=1)
    carried = {key: (count - before[key]) / SIZE for key, count in arrived(lab, short_cut).items()}
    assert 1 < carried.pop((device, "east")) < 1.1
    assert 1 < carried.pop(("lo", "east")) < 1.1, "the second one reads from the first"
    others = [share for (device, _), share in carried.items() if device != "lo"]
    assert all(share < 0.05 for share in others), carried
    assert not any(WARNING in actor.log() for actor in actors.values())


def arrived(lab, short_cut):
    devices = DEVICE, short_cut, "lo"
    return {
        (device, datacenter): lab.device_bytes(device, into=datacenter)
        for device in devices
        for datacenter in lab.datacenters
    }


def test_who_is_far_and_says_to_be_near_is_warned_of_once(start):
    small = {"tensors": 2, "elements": 1 << 10}
    trainer, rollout = (
        start(name, where, LIBRARY, **small)
        for name, where in (("trainer", "west"), ("rollout", "east"))
    )
    for actor in (trainer, rollout):
        assert actor.hear() == {"answer": "here"}
    for version in (1, 2):
        trainer.ask("unpublish")
        trainer.ask("fill", version=version)
        trainer.ask("publish", version=version)
        rollout.ask("unpublish")
        rollout.ask("replicate", version=version)
    assert (rollout.log().count(WARNING), trainer.log().count(WARNING)) == (1, 0)


def test_a_source_whose_device_does_not_lead_here_is_lost_and_the_error_names_the_way(start):
    small = {"tensors": 2, "elements": 1 << 10, "timeout_s": 60}
    trainer, rollout = (
        start(name, where, LIBRARY, datacenter=where, wan_devices=[device], **small)
        for name, where, device in (("trainer", "west", "lo"), ("rollout", "east", DEVICE))
    )
    for actor in (trainer, rollout):
        assert actor.hear() == {"answer": "here"}
    trainer.ask("publish", version=1)
    rollout.tell("replicate", version=1)
    said = rollout.hear()
    assert said["error"] == "SourceLost"
    assert "by tcp, as it is in fabric 'west': 127.0.0.1:" in said["text"]
