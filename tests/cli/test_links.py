"""`torch-ros doctor --links`: what its rates say, and that it reads as a reader does."""

import json
from functools import partial

import pytest
import torch

import torch_ros
from torch_ros.cli import links, main, probing
from torch_ros.cli.links import Link
from torch_ros.errors import SourceLost


def link(replica, rate, way="TCP eth0", **more):
    return Link(replica, f"host-{replica}", way, rate, **more)


def test_the_fastest_is_first_and_what_is_far_below_the_median_is_named():
    found = [link("c", 0.35e9), link("a", 23.1e9), link("b", 22.8e9)]
    assert [row[0] for row in links.rows(found)] == ["a", "b", "c"]
    assert links.rows(found)[-1][-1] == "<- 65x below the median"
    [finding] = links.slow(found)
    assert finding.level == "warn"
    assert finding.found == "link from c at host-c, TCP eth0: 0.35 GB/s"
    assert list(links.slow([link("a", 3e9), link("b", 2e9), link("c", 1.1e9)])) == []


def test_what_is_copied_here_is_no_measure_of_a_network():
    here = [link(str(number), 9e9, "copied") for number in range(5)]
    assert list(links.slow([*here, link("a", 1e9), link("b", 1e9)])) == []
    assert len(list(links.slow([*here, link("a", 1e9, "copied")]))) == 1


def test_a_replica_that_was_not_read_is_told_and_counts_for_nothing():
    gone = Link("b", "host-b", problem="it left before it was read")
    [finding] = links.slow([link("a", 1e9), gone])
    assert finding.found == "link from b at host-b: it left before it was read"
    assert links.rows([gone, link("a", 1e9)])[1][-2:] == ("-", "it left before it was read")


def test_64_mib_are_read_or_the_smallest_tensor():
    def names(**sizes):
        tensors = {name: (torch.uint8, torch.Size([size << 20])) for name, size in sizes.items()}
        return probing._names(torch_ros.Contents(1, tensors), 64 << 20)

    assert names(a=100, b=40, c=30, d=20, e=0) == ["b", "d"]
    assert names(a=100, b=70) == ["b"]


def probed(seconds_of, fails_at=None):
    """The link that probes find, and what each of them read."""
    reads = []

    def read(names):
        if len(reads) == fails_at:
            raise SourceLost("r", "it left")
        reads.append(names)
        return names * (1 << 20), seconds_of(names)

    return probing._link(read, 8, 64, Link("r", "host-r")), reads


def test_a_slow_link_is_not_filled_and_a_fast_one_is_measured_with_enough():
    link, reads = probed(lambda mib: mib / 4)
    assert (reads, link.bytes_per_s) == ([8, 8, 8], 4 << 20)
    link, reads = probed(lambda mib: mib / 1000)
    assert (reads, link.bytes_per_s) == ([8, 64, 64], pytest.approx(1000 << 20))


def test_a_source_that_leaves_in_the_middle_keeps_what_was_measured():
    assert probed(lambda mib: mib / 4, fails_at=1)[0].bytes_per_s == 4 << 20
    assert "it left" in probed(lambda mib: mib / 4, fails_at=0)[0].problem


def test_a_probe_is_at_most_4_percent_of_a_gib_that_is_read_beside_it():
    reads = probed(lambda _: 1e-4)[1]
    most = {8: probing.FIRST_BYTES, 64: probing.PROBE_BYTES}
    assert sum(most[each] for each in reads) <= 0.04 * (1 << 30)


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_each_replica_that_has_all_of_it_is_probed_and_nothing_stays(opened, endpoint, capsys):
    trainer, rollout, idle = (opened(name) for name in ("trainer", "rollout", "idle"))
    for handle in (trainer, rollout):
        handle.register({"w": torch.zeros(1 << 20)})
    trainer.publish(1)
    rollout.replicate()
    assert main.main(["--endpoint", endpoint, "--json", "doctor", "--links", trainer.model]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {each["replica"] for each in said["links"]} == {"trainer", "rollout"}
    assert all(each["bytes_per_s"] > 0 for each in said["links"])
    fleet = idle.fleet()
    assert set(fleet.replicas) == {"trainer", "rollout", "idle"}
    assert not any(each.readers for each in fleet.held)
    assert main.main(["--endpoint", endpoint, "doctor", "--links", f"{trainer.model}x"]) == 2


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.parametrize("name", ["w", "x"])
def test_a_number_that_is_published_anew_is_told_and_not_measured(opened, name):
    first, doctor = opened("trainer", {"w": torch.zeros(100)}), opened("doctor-1", spot=True)
    first.publish(1)
    contents = doctor.contents()
    first.close(linger_s=0)
    anew = opened("trainer", {name: torch.ones(100)}, run="new")
    anew.publish(1)
    assert probing._holders(doctor, contents) == []
    read = partial(probing._read, doctor, contents, source="trainer")
    link = probing._link(read, ["w"], ["w"], Link("trainer", "here"))
    assert link.bytes_per_s == 0
    assert ("published anew" if name == "w" else "no such name") in link.problem
