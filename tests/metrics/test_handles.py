"""Figures of a process's own handles."""
# needs features streams

import os
import subprocess
import sys
import uuid

import pytest
import torch
from kit import inside, published, until
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scraping import scrape

import torch_ros
from puppets.servers import free_port
from torch_ros.errors import DeadlineExceeded, SeatLost, UsageError
from torch_ros.features.streams import filling
from torch_ros.metrics import HandleCollector, process, serve
from torch_ros.metrics.process import serve_as_told
from torch_ros.shard.core import open_shards
from torch_ros.shard.report import REPORTS_KEPT, DrainReport, ReadReport
from torch_ros.shard.tally import BOUNDS_S, ENDED_MAX, Histogram, Tallies, Whose


def figures(handle):
    """The figures of a handle's model, by name and the labels that tell them apart."""
    registry = CollectorRegistry()
    registry.register(HandleCollector())
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("model") == handle.model:
                assert "pid" not in labels
                whose = labels.pop("replica"), labels.pop("rank")
                found[sample.name.removeprefix("torch_ros_"), *whose, *labels.values()] = (
                    sample.value
                )
    return found


@pytest.mark.long
def test_a_handle_tells_what_it_holds(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    assert figures(trainer)["held_version", "trainer", "0", trainer.run] == -1
    published(trainer, 7)
    rollout.register({"w": torch.empty(4)})
    rollout.replicate()
    found = figures(trainer)
    assert found["held_version", "trainer", "0", trainer.run] == 7
    assert found["held_version", "rollout", "0", trainer.run] == 7
    assert found["behind_versions", "rollout", "0"] == 0
    published(trainer, 9)
    assert figures(trainer)["behind_versions", "rollout", "0"] == 0  # nobody told it
    rollout.fleet()
    assert figures(trainer)["behind_versions", "rollout", "0"] == 2
    rollout.update()
    found = figures(trainer)
    assert (found["behind_versions", "rollout", "0"], found["seated", "rollout", "0"]) == (0, 1)
    assert found["etcd_up", "rollout", "0"] == 1
    assert 0 <= found["etcd_roundtrip_seconds", "rollout", "0"] < 20


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
@pytest.mark.long
def test_reads_publications_and_drains_are_counted_with_their_durations(opened):
    trainer, rollout = opened("trainer"), opened("rollout")
    reports = REPORTS_KEPT + 6  # more than are kept between two scrapes
    for version in range(reports):
        published(trainer, version)
        if version == 0:
            rollout.register({"w": torch.empty(4)})
        rollout.update()
    found = figures(trainer)
    [(way, count)] = [(key[4], value) for key, value in found.items() if key[3:4] == ("ok",)]
    assert (count, found["read_bytes_total", "rollout", "0", way]) == (reports, 16 * reports)
    for stage in ("decide", "read", "commit", "all"):
        assert found["read_seconds_count", "rollout", "0", stage] == reports
        assert found["read_seconds_bucket", "rollout", "0", "+Inf", stage] == reports
    stages = [value for key, value in found.items() if key[0] == "read_seconds_sum"]
    whole = found["read_seconds_sum", "rollout", "0", "all"]
    assert sum(stages) - whole == pytest.approx(whole, rel=0.2)
    assert found["publish_seconds_count", "trainer", "0"] == reports
    assert found["unpublish_wait_seconds_count", "trainer", "0"] == reports - 1
    assert 0 <= found["held_version_age_seconds", "rollout", "0"] < 60


def test_readers_that_are_left_behind_are_counted():
    tallies = Tallies()
    tally = tallies.begin(Whose("m", "r", "0"))
    for left in ((), ("a", "b")):
        tally.add(DrainReport(1, ("a", "b"), left, False, 1.0, 2, 3))
    tally.add(ReadReport(1, "a", 0, 8, 8, 0.1, {"read": 0.1}, {"cma": 2, "ucx": 6}))
    tally.add(ReadReport(1, "me", 0, 0, 0, 0.0, {}))  # it was here already
    [summed] = tallies.all().values()
    assert (summed.left_behind, summed.drain_s.sum_s, sum(summed.drain_s.counts)) == (2, 2.0, 2)
    assert summed.ended["reads"] == {"ucx": 1, "none": 1}
    assert summed.ended["read_bytes"] == {"cma": 2, "ucx": 6}
    assert sum(summed.read_s["read"].counts) == 1


@pytest.mark.long
def test_staged_bytes_are_those_beside_the_tensors(opened):
    trainer = opened("trainer", retain=("latest",))
    trainer.publish_copy(1, {"w": torch.zeros(1 << 16)})
    found = figures(trainer)
    assert found["staged_bytes", "trainer", "0", "buffers"] == 2 * 4 << 16
    assert found["staged_bytes", "trainer", "0", "copies"] == 0
    trainer.unpublish()  # the only one: it is copied
    assert figures(trainer)["staged_bytes", "trainer", "0", "copies"] == 4 << 16


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)  # one lends to itself there only
@pytest.mark.long
def test_who_streams_and_who_borrows_is_told_while_it_does(opened, monkeypatch):
    monkeypatch.setattr(filling, "IDLE_S", 60.0)  # for which a source waits for this consumer
    trainer, rollout = opened("trainer", borrow_bytes=1 << 20), opened("rollout")
    trainer.publish_copy(1, {str(number): torch.ones(4) for number in range(4)})

    def shown():
        found = figures(trainer)
        return [
            (found["streams", name, "0"], found["loans", name, "0"])
            for name in ("trainer", "rollout")
        ]

    with rollout.stream(1, map(str, range(4)), buffer_bytes=16) as stream:
        next(stream)
        assert shown() == [(0, 0), (1, 0)]
        with rollout.borrow(1), rollout.borrow("latest"):
            assert shown() == [(0, 0), (1, 2)]
        with pytest.raises(ZeroDivisionError), rollout.borrow(1):
            assert shown() == [(0, 0), (1, 1)]
            raise ZeroDivisionError
    assert shown() == [(0, 0), (0, 0)]


@pytest.mark.long
def test_reads_that_fail_are_counted_by_their_error(opened):
    rollout = opened("rollout", {"w": torch.empty(4)})
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            rollout.replicate(timeout_s=0.2)
    assert figures(rollout)["reads_total", "rollout", "0", "DeadlineExceeded", ""] == 2


@pytest.mark.long
def test_a_lost_seat_is_counted_and_shown(opened):
    trainer = opened("trainer")
    published(trainer, 1)
    shard = inside(trainer)
    shard.group.fence(SeatLost("trainer", "for a test"))
    found = figures(trainer)
    assert found["seat_lost_total", "trainer", "0"] == 1
    trainer.close()
    again = opened("trainer")
    assert figures(again)["seat_lost_total", "trainer", "0"] == 1


@pytest.mark.long
@pytest.mark.parametrize("ttl_s", [2, 30])
def test_a_process_that_is_cut_off_from_etcd_says_so(etcd_server, ttl_s):
    endpoint = f"etcd://{etcd_server.host}"
    with torch_ros.open(f"m{ttl_s}", endpoint=endpoint, replica="r", ttl_s=ttl_s) as handle:

        def shown():
            found = figures(handle)
            return [found[name, "r", "0"] for name in ("etcd_up", "seated", "seat_lost_total")]

        lost = int(ttl_s == 2)
        etcd_server.kill()
        until(lambda: shown() == [0, not lost, lost])
        etcd_server.start()
        until(lambda: shown() == [1, 1, lost])


@pytest.mark.long
def test_counters_outlive_a_handle(opened):
    rollout = opened("rollout")
    inside(rollout).observed.tally.corrupt += 3
    rollout.close()
    again = opened("rollout")
    inside(again).observed.tally.corrupt += 1
    assert figures(again)["corrupt_total", "rollout", "0"] == 4
    assert figures(again)["seated", "rollout", "0"] == 1


def test_a_name_that_nobody_chose_has_no_pid(opened):
    handle = opened()
    assert str(os.getpid()) in handle.replica
    names = {key[1] for key in figures(handle)}
    assert len(names) == 1
    assert str(os.getpid()) not in names.pop()


@pytest.mark.parametrize("name", ['"', "\\", 'a"} 1\n# b', "é"])
@pytest.mark.long
def test_any_name_of_a_replica_is_a_label(opened, name):
    assert figures(opened(name))["seated", name, "0"] == 1


def test_a_duration_is_in_the_first_bucket_that_has_room():
    times = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], 1e9):
        times.add(seconds)
    assert (times.counts[:2], times.counts[-2:]) == ([2, 1], [1, 1])
    assert sum(times.counts) == 5


def test_tallies_of_many_names_are_bounded_and_none_counts_twice():
    tallies = Tallies()
    for number in range(ENDED_MAX + 10):
        tally = tallies.begin(Whose("m", f"r{number}", "0"))
        tally.corrupt += 1
        tallies.end(tally)
        tallies.end(tally)
    found = tallies.all()
    assert len(found) == ENDED_MAX
    assert {tally.corrupt for tally in found.values()} == {1}


@pytest.mark.long
def test_a_process_serves_its_figures(opened):
    handle = opened("one")
    port = serve()
    url = f"at http://127.0.0.1:{port}/metrics"
    assert scrape(url)["torch_ros_seated", handle.model, "0", "one"] == 1
    with pytest.raises(UsageError, match="Address already in use"):
        serve(port)


PROGRAM = """
import sys, urllib.request, torch_ros
handle = torch_ros.open("policy", endpoint="memory://", replica="one")
again = torch_ros.open("policy", endpoint="memory://", replica="two")
print(sorted(name for name in sys.modules if name.startswith("prometheus_client"))[:1])
if len(sys.argv) > 1:
    print(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics").read().decode())
"""


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
def test_the_environment_serves_once_above_a_rank_s_port():
    port = free_port()  # the one that is served: its neighbour may be taken
    out, err = run(str(port), TORCH_ROS_METRICS_PORT=str(port - 1), LOCAL_RANK="1")
    assert 'torch_ros_seated{model="policy",rank="0",replica="two"} 1.0' in out
    assert err == ""
    assert run()[0] == "[]\n"  # nothing is imported that was not asked for


@pytest.mark.parametrize("told", ["x", "70000", "no.such.host.invalid:0", "65535"])
def test_a_job_does_not_fail_for_want_of_figures(monkeypatch, caplog, told):
    monkeypatch.setenv("TORCH_ROS_METRICS_PORT", told)
    monkeypatch.setenv("LOCAL_RANK", "1")
    serve_as_told.cache_clear()
    serve_as_told()
    assert "no figures are served" in caplog.text


def test_ctrl_c_while_the_figures_begin_leaves_no_seat(monkeypatch):
    def struck():
        raise KeyboardInterrupt

    monkeypatch.setenv("TORCH_ROS_METRICS_PORT", "0")
    monkeypatch.setattr(process, "serve_as_told", struck)
    before = open_shards()
    with pytest.raises(KeyboardInterrupt):
        torch_ros.open("m", endpoint=f"memory://{uuid.uuid4().hex}")
    assert open_shards() == before
