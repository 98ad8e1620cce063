"""The simulator of many replicas: its parts against slow ones, and short runs with bounds."""
# needs features deltas, fallback, following, installs, lending, pace, seeding, streams, tcp

import itertools
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import acceptance
import numpy as np
import page
import plane
import pytest
import scale
import scenarios
from cluster import Cluster, Model
from network import Network, Transfer
from rules import RULES, TODAY
from space import IndexedSpace

import torch_ros
from torch_ros.deadline import Deadline
from torch_ros.errors import SourceLost, TransferFailed
from torch_ros.face import opening
from torch_ros.memory.store import MemoryKV, Space
from torch_ros.protocol import sources
from torch_ros.store.txn import (
    Created,
    Delete,
    Empty,
    Get,
    NoneNewer,
    Put,
    Read,
    Sample,
    Txn,
    Unchanged,
    Watch,
    one,
    under,
)
from torch_ros.transfer import stall

pytestmark = pytest.mark.timeout(600)  # they compute, and beside others slowly

ROOT = Path(__file__).parents[2]


# The store with indexes is the store


def any_range(rng):
    return rng.choice([
        under("/t/m/holdings/"), under("/t/m/holdings/r/"), under("/t/m/holdings/r/1/"),
        under("/t/m/readers/"), under("/t/m/holdings/r/1/a"), one("/t/m/holdings/r/1/a1"),
    ])  # fmt: skip


def any_key(rng):
    kind = rng.choice(["holdings/r/1", "holdings/r/2", "readers"])
    return f"/t/m/{kind}/{rng.choice('ab')}{rng.randrange(6)}"


def any_sample(rng, rev):
    before = rng.choice([0, 0, rng.randrange(1, rev + 2)])
    return Sample(any_range(rng), rng.randrange(1, 6), before, is_oldest=rng.random() < 0.5)


def any_txn(rng, rev, leases):
    guards = [
        rng.choice([
            Unchanged(any_key(rng), rng.randrange(rev + 1)),
            Created(any_key(rng), rng.randrange(rev + 1)),
            Empty(any_range(rng)),
            NoneNewer(any_range(rng), rng.randrange(rev + 1)),
        ])
        for _ in range(rng.choice([0, 0, 1]))
    ]  # fmt: skip
    keys = {any_key(rng): None for _ in range(rng.randrange(3))}
    ops = [Put(key, b"x", rng.choice([0, *leases])) for key in keys]
    gone = any_range(rng)
    if rng.random() < 0.2 and not any(key in gone for key in keys):
        ops.append(Delete(gone))
    ops.append(Get(any_sample(rng, rev)))
    return Txn(tuple(guards), tuple(ops), (any_range(rng), any_sample(rng, rev)))


@pytest.mark.parametrize("seed", range(5))
def test_the_store_with_indexes_answers_as_the_store_does(seed):
    rng, touched = random.Random(seed), []
    plain, indexed = Space(lambda: 0.0), IndexedSpace(lambda: 0.0, touched.extend)
    plain.changed = indexed.changed
    leases = [plain.grant(9) for _ in range(3)]
    assert leases == [indexed.grant(9) for _ in range(3)]
    applied = 0
    for _ in range(1500):
        before = dict(plain._entries)
        touched.clear()
        if leases and rng.random() < 0.002:
            gone = leases.pop()
            plain.expire(gone)
            indexed.expire(gone)
        txn = any_txn(rng, plain.rev, leases)
        replies = plain.commit(txn), indexed.commit(txn)
        assert replies[0] == replies[1]
        applied += replies[0].applied
        assert plain._entries == indexed._entries
        changed = {
            key for key in {*before, *plain._entries} if before.get(key) != plain._entries.get(key)
        }
        assert changed == set(touched)
        request = Read((any_range(rng), any_sample(rng, plain.rev)))
        assert plain.read(request) == indexed.read(request)
        watch = Watch((any_range(rng),), rng.randrange(plain.rev + 1), "")
        assert plain.has_changed(watch) == indexed.has_changed(watch)
    assert 300 < applied < 1500


# The network


def shares(capacity, flows):
    """Max-min fair rates, by filling all at once. `flows`: links, and what is wanted."""
    rates, live, left = [0.0] * len(flows), set(range(len(flows))), list(capacity)
    while live:
        users = Counter(link for flow in live for link in flows[flow][0])
        more = min(
            [left[link] / count for link, count in users.items()]
            + [flows[flow][1] - rates[flow] for flow in live]
        )
        for flow in live:
            rates[flow] += more
            for link in flows[flow][0]:
                left[link] -= more
        live = {
            flow
            for flow in live
            if flows[flow][1] - rates[flow] > 1e-9 and all(left[k] > 1e-9 for k in flows[flow][0])
        }
    return rates


@pytest.mark.parametrize("seed", range(20))
def test_flows_share_what_there_is_max_min_fairly(seed):
    rng = random.Random(seed)
    network = Network(step_bytes=1e9, tick_s=1e-6)
    capacity = [float("inf")]

    def link(rate):
        capacity.append(rate)
        return network.link(rate)

    nodes = [
        network.node(rng.choice("ab"), link(rng.randrange(1, 9)), link(rng.randrange(1, 9)))
        for _ in range(8)
    ]
    network.join("a", "b", 3.0, most=2.0)
    capacity += [3.0, 3.0]
    expected = []
    for reader in nodes:
        source = rng.choice([node for node in nodes if node is not reader])
        network.show(source, 1.0)
        network.start(Transfer(reader, [source], 1e6, 0.0, lambda *_: None))
        links, wanted = [source.out, reader.into], 1e9
        if source.datacenter != reader.datacenter:
            links.append(len(capacity) - (2 if source.datacenter == "a" else 1))
            wanted = 2.0
        expected.append((links, wanted))
    network.tick()
    assert network._table["done"] / network.tick_s == pytest.approx(shares(capacity, expected))
    assert network.sent().sum() == pytest.approx(network._table["done"].sum())


def test_a_reader_of_two_has_what_both_have_and_loses_no_step():
    network = Network(step_bytes=10.0, tick_s=1.0)
    first, second, reader = (network.node("a", network.link(9.0), network.link(9.0)) for _ in "abc")
    ended = []
    for node in (first, second):
        network.show(node, 1.0)
    network.set_rate(second.out, 2.0)
    network.start(Transfer(reader, [first, second], 100.0, 0.0, lambda *end: ended.append(end)))
    for _ in range(6):
        network.tick()
    assert network.shown(reader) == 0.2  # the slower one has sent 12 of its 50
    network.lose(second, "it is gone")
    assert ended == [(second, "it is gone")]
    assert network.is_idle
    assert network.shown(reader) == 0.2
    network.start(Transfer(reader, [first], 100.0, 0.2, lambda *end: ended.append(end)))
    while not network.is_idle:
        network.tick()
    assert ended[1] == (None, "")
    assert network.shown(reader) == 1.0
    assert network.sent()[first.number] == pytest.approx(42 + 80, abs=9)


def test_nothing_comes_from_who_is_dead():
    network = Network(step_bytes=10.0, tick_s=1.0)
    source, reader = (network.node("a", network.link(9.0), network.link(9.0)) for _ in "ab")
    network.show(source, 1.0)
    network.start(Transfer(reader, [source], 100.0, 0.0, lambda *_: None))
    network.tick()
    network.kill(source)
    for _ in range(9):
        network.tick()
    assert network.sent()[source.number] == pytest.approx(9.0)


def waits(shows_s, rate, step):
    """When a reader has each step, by the library's own wait; the source shows one at each time."""
    now, ends = [0.0], []
    time = type(
        "time", (), {"monotonic": lambda: now[0], "sleep": lambda s: now.__setitem__(0, now[0] + s)}
    )
    with patch.object(stall, "time", time):
        deadline = Deadline("d", 1e9, 0.0, lambda: None)
        wait = stall.SourceWait("r", deadline, lambda: True, is_eager=True)
        with patch.object(Deadline, "check", lambda *_: None):
            seen = 0
            for number in range(len(shows_s)):
                while seen <= number:
                    before, seen = seen, sum(at <= now[0] for at in shows_s)
                    if seen == before:
                        wait.wait("")
                    else:
                        wait.reset()
                now[0] += step / rate
                seen = sum(at <= now[0] for at in shows_s)  # it is asked at the end of each step
                ends.append(now[0])
    return ends


def followed(shows_s, rate, step):
    """When a reader has each step, in the network."""
    network, count = Network(step_bytes=step, tick_s=5e-5), len(shows_s)
    source, reader = (network.node("a", network.link(rate), network.link(rate)) for _ in "ab")
    network.start(Transfer(reader, [source], count * step, 0.0, lambda *_: None))
    ends = []
    while not network.is_idle:
        network.show(source, sum(at <= network.now_s for at in shows_s) / count)
        network.tick()
        ends += [network.now_s] * (round(network.shown(reader) * count) - len(ends))
    return ends


@pytest.mark.long
@pytest.mark.parametrize("rule", [TODAY, "polls that back off"])
def test_readers_look_as_seldom_as_the_library_does(rule):
    rng, step, rate = random.Random(1), 10.0, 5000.0  # a step takes 2 ms
    shows_s = list(itertools.accumulate(rng.choice([0.001, 0.002, 0.03, 0.08]) for _ in range(80)))
    with RULES[rule]():
        expected, found = waits(shows_s, rate, step), followed(shows_s, rate, step)
    late = np.subtract(found, shows_s)
    # A reader that backs off, and has waited for long, is late.
    assert (late.mean() > 0.004) == (rule != TODAY)
    assert late.mean() == pytest.approx(np.subtract(expected, shows_s).mean(), abs=0.0008)
    assert np.abs(np.subtract(found, expected)).max() < stall.POLL_S_MAX + 0.001


def test_who_waits_for_a_relay_to_begin_asks_when_the_library_would():
    now = [0.0]
    time = type(
        "time", (), {"monotonic": lambda: now[0], "sleep": lambda s: now.__setitem__(0, now[0] + s)}
    )
    asked = []
    with patch.object(stall, "time", time), patch.object(Deadline, "check", lambda *_: None):
        deadline = Deadline("d", 1e9, 0.0, lambda: None)
        wait = stall.SourceWait("r", deadline, lambda: True, is_eager=True)
        for _ in range(12_000):
            wait.wait("")
            now[0] += 0.00017  # to ask takes so long
            asked.append(now[0])
    for begins_s in (0.0001, 0.003, 0.0123, 0.1, 2.1, 2.4):
        after = next(at for at in asked if at >= begins_s)
        assert plane.asked_at(0.0, begins_s, 0.00017) == pytest.approx(after)


# The library runs in it


class Counting(MemoryKV):
    requests = Counter()  # noqa: RUF012  # of all

    def read(self, request, *, timeout_s):
        self.requests["reads"] += 1
        return super().read(request, timeout_s=timeout_s)

    def commit(self, txn, *, timeout_s):
        self.requests["commits"] += 1
        return super().commit(txn, timeout_s=timeout_s)


def test_a_replica_asks_the_store_what_a_real_one_asks():
    import torch

    space = Space()
    with patch.object(opening, "connect_store", lambda *_, **__: Counting(space)):
        options = {"endpoint": "memory://counted", "huge_pages": False}
        with (
            torch_ros.open("m", replica="t", **options) as trainer,
            torch_ros.open("m", replica="r", **options) as rollout,
        ):
            trainer.register({"w": torch.ones(4)})
            rollout.register({"w": torch.zeros(4)})
            trainer.publish(1)
            Counting.requests.clear()
            rollout.replicate("latest")
            real = dict(Counting.requests)
    found = scenarios.burst(0, n=1)
    assert {name: found[name] for name in real} == real


@pytest.mark.nightly
def test_whom_replicas_read_from_is_the_librarys_choice():
    as_it_is = scenarios.burst(0, n=12)
    assert (as_it_is["heads_sent_x"], as_it_is["readers_max"]) == (1.0, 1)
    with patch.object(sources, "_first_choice", lambda *a, **_: next(iter(a[4]))):
        assert scenarios.burst(0, n=12)["readers_max"] > 1
    with patch.object(sources, "_is_source", lambda *a: a[3].state == "full"):
        from_the_trainer = scenarios.burst(0, n=12)
    assert from_the_trainer["heads_sent_x"] == pytest.approx(12, rel=0.05)
    assert from_the_trainer["last_x"] == pytest.approx(12, rel=0.1)


@pytest.mark.long
def test_a_burst_with_steps_of_another_size_passes_them_on_sooner():
    with RULES["both"]():
        altered = scenarios.burst(0, n=30)
    assert scenarios.burst(0, n=30)["last_x"] < altered["last_x"] - 0.02


@pytest.mark.long
def test_who_dies_ends_and_everybody_else_has_it_all():
    found = scenarios.deaths(0, n=20, share=0.1)
    assert (found["died"], found["failed"]) == (2, 0)
    assert found["last_x"] < 1.1


@pytest.mark.nightly
def test_a_version_that_is_slow_for_all_slows_no_later_one():
    with Cluster(Model()) as cluster:
        all_ = scenarios.Burst(cluster, scenarios.newcomers(cluster, 12))
        [trainer], clock = all_.trainers, cluster.clock
        trainer.slow_down(0.2)
        all_.run()
        took_x = [max(all_.stalls_x())]
        trainer.slow_down(1.0)
        for version in range(2, 5):
            cluster.does(trainer, clock.now_s, trainer.handle.unpublish)
            cluster.run()
            cluster.does(trainer, clock.now_s, partial(trainer.handle.publish, version))
            cluster.run()
            began_s = clock.now_s
            for process in all_.newcomers:
                cluster.does(process, began_s, partial(process.handle.update, "latest"))
            cluster.run()
            took_x.append((clock.now_s - began_s) * Model().nic / Model().bytes_total)
    assert took_x[0] == pytest.approx(5, rel=0.1)
    assert max(took_x[1:]) < 2  # from the trainer alone: 12


def test_a_source_that_is_the_last_one_and_dies_is_lost():
    with Cluster(replace(Model(), bytes_total=5e9)) as cluster:
        all_ = scenarios.Burst(cluster, scenarios.newcomers(cluster, 2))
        cluster.clock.at(cluster.clock.now_s + 0.1, cluster.kill, all_.trainers[0])
        all_.run()
        assert [type(error) for error in all_.errors.values()] == [SourceLost, SourceLost]


def test_who_waits_for_a_relay_to_begin_misses_it_when_it_dies():
    with Cluster(Model()) as cluster:
        [relay], [reader], clock = cluster.replica("r"), cluster.replica("s"), cluster.clock
        cluster.open([relay, reader])
        [box] = [each for each in cluster.boxes.values() if each.process is relay]
        peers, deadline = plane.Peers(cluster, reader), Deadline("d", 1e9, 0.0, lambda: None)
        dies_s, lost_s = clock.now_s + 0.3, []

        def wait():
            with pytest.raises(TransferFailed):
                while True:
                    peers.state(box.card, deadline, serves=True)
            lost_s.append(clock.now_s)

        cluster.does(reader, clock.now_s, wait)
        clock.at(dies_s, cluster.kill, relay)
        cluster.run()
    assert lost_s[0] - dies_s < 3 * Model().detect_s


# Short runs, with bounds


@pytest.mark.nightly
@pytest.mark.parametrize(("seeding", "most_s"), [("foreground", 8.5), ("host", 4.0)])
def test_few_stand_still_while_a_version_crosses_a_slow_link(seeding, most_s):
    found = scenarios.updates_12(0, seeding=seeding, etcd=scenarios.WEST)
    assert found["stall_s"] < most_s
    assert found["crossings"] == 1.0


@pytest.mark.nightly
def test_nobody_starves_who_polls_seldom():
    assert scenarios.fast_versions(0, lasts_s=30.0)["lag"] <= 8


@pytest.mark.nightly
def test_bounds_of_a_few_replicas_hold():
    assert scenarios.burst(0, n=10)["last_x"] < 1.05
    assert scenarios.figure_7b(0, groups=4)["stall_s"] < 72.0  # ideal: 70.4
    assert scenarios.figure_11(0, rollouts=4, trainers=1)["mean_s"] < 1.6
    herd = scenarios.herd(0, waiting=30, reading=30)
    assert herd["reads"] <= 4
    assert herd["failed"] == 0
    for far, newcomers in ((1, 1), (1, 8), (2, 16)):
        assert scenarios.datacenters(0, n=newcomers, far=far)["crossings"] == 1.0
    slow = scenarios.stragglers(0, n=20)
    assert slow["healthy_p99_x"] < 1.1
    assert slow["next_p99_x"] < 1.05


@pytest.mark.nightly
def test_bounds_of_up_to_two_hundred_hold():
    assert scenarios.burst(0, n=100)["last_x"] < 1.1
    assert scenarios.burst(0, n=100, heads=4)["last_x"] < 1.05
    assert scenarios.deaths(0, n=100)["last_x"] < 1.1
    slow = scenarios.stragglers(0, n=100, share=0.03)
    assert slow["healthy_p99_x"] < 1.15
    assert slow["next_p99_x"] < 1.05
    staggered = scenarios.burst(0, n=50, over_s=5.0)
    assert staggered["p99_x"] < 1.01
    found = scenarios.burst(0, n=200)
    assert found["last_x"] < 1.12
    assert found["KiB"] < 22
    assert found["commits"] < 4.1


FIRST_OF_EACH_SCENARIO = """
import scale
usual = scale.usual
scale.usual = lambda n_max: list({job.what: job for job in reversed(usual(n_max))}.values())
scale.main()
"""


def script(directory, *, seed):
    command = [sys.executable, "-c", FIRST_OF_EACH_SCENARIO, "--n", "8", "--out", directory]
    folder = str(ROOT / "benchmarks" / "scale")
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": folder}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


@pytest.mark.nightly
def test_the_same_bytes_come_twice(tmp_path):
    told = [script(tmp_path / name, seed=seed).stdout for name, seed in (("a", 1), ("b", 2))]
    assert told[0] == told[1]
    for name in ("results.json", "README.md", "last-done.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.long
def test_the_same_figures_come_twice():
    jobs = [
        scale.job("burst", n=12),
        scale.job("datacenters", 3, n=6, far=2),
        scale.job("deaths", n=12),
    ]
    # Two processes, without threads that other tests have left in this one. Each has played others.
    again = scale.played(jobs[::-1], 2)[::-1]
    assert scale.encoded(scale.played(jobs, 2)) == scale.encoded(again)


@pytest.mark.long
def test_figures_do_not_tell_which_process_of_which_host_has_played(monkeypatch):
    jobs = [scale.job("burst", n=3)]
    here = scale.encoded(scale.played(jobs, 1))
    monkeypatch.setattr(os, "getpid", lambda: 10**9)
    monkeypatch.setattr(socket, "gethostname", lambda: "somewhere.else")
    assert scale.encoded(scale.played(jobs, 1)) == here


# The page


@pytest.mark.long
def test_the_page_is_what_the_figures_make(tmp_path):
    docs = ROOT / "docs" / "scale"
    rows = page.rows_in(docs)
    page.write(rows, tmp_path)
    assert (docs / "README.md").read_text() == (tmp_path / "README.md").read_text()
    assert {row["rule"] for row in rows} == {TODAY}
    assert all(acceptance.causes(rows)), "say why it is missed"


def test_an_aim_is_met_missed_or_was_not_run():
    figures = {"last_x": 1.2, "KiB": 20.5, "commits_first": 3}
    rows = [{"what": "burst", "params": {"n": 1000}, "figures": figures}]
    said = {line[0]: line[1:] for line in acceptance.lines(rows)}
    assert said["burst of 1,000, last done"] == ("1.12 x", "1.2 x", "missed")
    assert said["burst of 100, last done"] == ("1.1 x", "", "not run")
    figures["last_x"] = 1.12
    said = {line[0]: line[1:] for line in acceptance.lines(rows)}
    assert said["burst of 1,000, last done"][2] == "met"


def test_every_scenario_that_is_run_has_a_job():
    jobs = scale.usual(1000)
    assert {each.what for each in jobs} >= {
        "burst", "figure_7b", "figure_11", "figure_12", "updates_12", "datacenters", "stragglers",
        "deaths", "herd", "held_up", "fast_versions",
    }  # fmt: skip
    assert max(dict(each.params).get("n", 0) for each in jobs) == 1000
    assert np.isfinite([each.weight for each in jobs]).all()
