"""`torch-ros trace`: from a watch, and from journals; read back as a viewer would."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import chrome
import msgspec
import pytest
import torch
from stories import BEGAN_NS, MS, Story, author, spread

from torch_ros.cli import asking, main, merging, output, parsing, timeline, trace
from torch_ros.cli.recording import NOBODY, FleetRecording, is_everywhere
from torch_ros.cli.timeline import Row, Slice, Timeline
from torch_ros.errors import StoreUnavailable, UsageError
from torch_ros.protocol.fleet import Fleet, Held, Published, Replica
from torch_ros.protocol.journal import FORMAT, line
from torch_ros.protocol.keys import EVERY_MODEL
from torch_ros.protocol.records import VersionRef
from torch_ros.store.txn import Read

SEEDS = range(8)


def made(timeline_, **told):
    """As a viewer gets it."""
    return json.loads(msgspec.json.encode(timeline.trace(timeline_, told)))


def merged(story, model=None):
    calls = merging.calls(story.journals(), model)
    aligned = merging.aligned(calls)
    return made(merging.timeline(calls, aligned.moved_ns)), aligned


# What a viewer needs


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_is_valid_and_the_slices_of_a_row_never_overlap(seed):
    story = Story(seed, {f"gpu-{n}": random.Random(seed).uniform(-500, 500) for n in range(10)})
    found, _ = merged(spread(story, 12, 5))
    rows = chrome.check(found)
    assert {name for _, name in rows} == {f"roll-{n} rank 0" for n in range(12)} | {
        "trainer rank 0"
    }
    assert {host for host, _ in rows} == {f"gpu-{n}" for n in range(10)}
    assert len(chrome.arrows(found)) == 12 * 5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_stages_of_a_row_last_as_long_as_its_calls(seed):
    story = spread(Story(seed), 5, 8)
    rows = chrome.check(merged(story)[0])
    for (host, replica, rank), lines in story.lines.items():
        slices = rows[host, f"{replica} rank {rank}"]
        took_us = 1e6 * sum(done.elapsed_s for done in lines)
        assert sum(each["dur"] for each in slices) == pytest.approx(took_us, rel=0.01)


def test_time_that_no_stage_has_is_a_slice_of_its_own():
    story = Story()
    story.read("gpu-0", "roll", "trainer", 0, 100, stages_s={"decide": 0.03, "read": 0.05})
    [slices] = chrome.check(merged(story)[0]).values()
    assert [(each["name"], each["dur"]) for each in slices] == [
        ("decide", 30_000),
        ("read", 50_000),
        ("other", 20_000),
    ]


@pytest.mark.long
def test_a_hundred_replicas_and_fifty_versions_are_below_20_mb():
    story = spread(Story(), 100, 50)
    text = msgspec.json.encode(merged(story)[0])
    assert len(text) < 20e6
    rows = chrome.check(json.loads(text))
    assert sum(len(slices) for slices in rows.values()) == 50 + 49 + 100 * (50 * 6 + 49)


def test_overlapping_slices_get_a_row_below():
    row = Row("gpu-0", "roll-0")
    of = [Slice(row, f"s{at}", at, 100, {}) for at in (0, 50, 100, 120, 160, 250)]
    rows = chrome.check(made(Timeline(of[::-1], [], [])))
    names = {row: [each["name"] for each in slices] for row, slices in rows.items()}
    assert names == {
        ("gpu-0", "roll-0"): ["s0", "s100", "s250"],
        ("gpu-0", "roll-0 (2)"): ["s50", "s160"],
        ("gpu-0", "roll-0 (3)"): ["s120"],
    }


def test_rows_are_in_the_order_of_people_and_hosts_of_one_name_are_told_apart():
    rows = [Row("h", "roll-10"), Row("h", "roll-9"), Row("h", "roll-9", "other boot")]
    found = chrome._names(
        made(Timeline([Slice(each, "s", 0, 1) for each in rows], [], []))["traceEvents"]
    )
    assert list(found.values()) == ["h", "roll-9", "roll-10", "h", "roll-9"]


# Merging


def test_a_read_says_from_where_how_much_how_fast_and_by_which_way():
    story = Story()
    story.publish("gpu-0", "trainer", 0, size_bytes=15 << 30)
    ways = {"mapped": 1, "cma": 9}
    story.did(
        "gpu-0", "roll", "read", 10, 2000,
        stages_s={"decide": 0.5, "read": 1.5}, sources=["trainer", "roll-1"],
        size_bytes=3_000_000_000, ways=ways, reroutes=1,
    )  # fmt: skip
    found, _ = merged(story)
    rows = chrome.check(found)
    assert rows["gpu-0", "roll rank 0"][1]["args"] == {
        "version": 1,
        "source": "trainer, roll-1",
        "GB": 3.0,
        "GB/s": 2.0,
        "way": "cma, mapped",
        "reroutes": 1,
    }
    [publish] = rows["gpu-0", "trainer rank 0"]
    assert publish["args"]["stages_ms"] == {"decide": 1.0, "commit": 1.0}
    [((source, at), (reader, to))] = chrome.arrows(found)  # roll-1 left no journal
    assert (source, at["name"], reader, to["name"]) == (
        "trainer rank 0",
        "publish",
        "roll rank 0",
        "read",
    )


def test_an_arrow_comes_from_the_relay_while_that_one_reads():
    story = Story()
    story.publish("gpu-0", "trainer", 0)
    story.read("gpu-1", "roll-0", "trainer", 10, 100)
    story.read("gpu-2", "roll-1", "roll-0", 12, 120)
    found, _ = merged(story)
    chrome.check(found)
    ends = {(source, at["name"], reader) for (source, at), (reader, _) in chrome.arrows(found)}
    assert ends == {
        ("trainer rank 0", "publish", "roll-0 rank 0"),
        ("roll-0 rank 0", "read", "roll-1 rank 0"),
    }


def test_models_have_counters_of_their_own_and_are_named_where_there_are_several():
    story = Story()
    story.publish("gpu-0", "trainer", 0)
    story.read("gpu-0", "roll", "trainer", 5, 100)
    story.did("gpu-0", "trainer", "drain", 150, 1, waited_for=["roll"])
    alone, _ = merged(story)
    assert chrome.counters(alone, "held_by") == [0, 1, 2, 1]
    assert chrome.counters(alone, "in_flight") == [0, 1, 0]
    story.publish("gpu-0", "trainer", 0, model="reward")
    both, _ = merged(story)
    assert {name for _, name in chrome.check(both)} == {
        "policy: trainer rank 0",
        "policy: roll rank 0",
        "reward: trainer rank 0",
    }
    assert chrome.check(merged(story, "policy")[0]).keys() == chrome.check(alone).keys()


def test_a_load_that_found_its_version_in_place_is_no_slice():
    story = Story()
    story.publish("gpu-0", "trainer", 0)
    story.did("gpu-0", "trainer", "read", 5, 0, call=0, sources=["trainer"])
    assert len(merging.calls(story.journals(), None)) == 1


# Clocks


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_decides_before_its_version_was_published(seed):
    skews = {f"gpu-{n}": random.Random(seed + n).uniform(-5000, 5000) for n in range(10)}
    story = spread(Story(seed, skews), 20, 3)
    found, aligned = merged(story)
    assert aligned.left_ns == 0
    published = {}
    for slices in chrome.check(found).values():
        for each in slices:
            if each["name"] == "publish":
                published[each["args"]["version"]] = each["ts"]
    decided = [
        (each["args"]["version"], each["ts"] + each["dur"])
        for slices in chrome.check(found).values()
        for each in slices
        if each["name"] == "decide"
    ]
    assert len(decided) == 60
    assert all(published[version] <= at for version, at in decided)


def test_clocks_that_agree_are_left_as_they_are():
    calls = merging.calls(spread(Story(), 20, 3).journals(), None)
    assert {*merging.aligned(calls).moved_ns.values()} == {0}


def test_a_clock_is_moved_by_the_least_that_the_order_takes():
    story = Story(skews={"gpu-1": -100})
    story.publish("gpu-0", "trainer", 0)
    decided_ms = 1e3 * story.read("gpu-1", "roll", "trainer", 5, 60).stages_s["decide"]
    _, aligned = merged(story)
    assert aligned.moved_ns["boot of gpu-0"] == 0
    assert aligned.moved_ns["boot of gpu-1"] / MS == pytest.approx(95 - decided_ms, abs=0.01)


def test_ranks_of_one_call_were_in_it_together():
    """They may be on hosts whose publisher has left no journal."""
    story = Story(skews={"gpu-1": 5000})
    for rank in range(2):
        story.read(f"gpu-{rank}", "roll", "trainer", 0, 100, rank=rank, call=7)
    story.read("gpu-1", "roll", "trainer", -900, 100, rank=1, call=7, start="bb")  # of another life
    _, aligned = merged(story)
    assert aligned.moved_ns["boot of gpu-0"] / MS == pytest.approx(4900, abs=0.01)


def test_a_relay_has_decided_before_its_reader_has_done():
    story = Story(skews={"gpu-1": -1000})
    story.read("gpu-0", "roll-0", "trainer", 0, 100)
    story.read("gpu-1", "roll-1", "roll-0", 0, 200)
    _, aligned = merged(story)
    assert 800 < aligned.moved_ns["boot of gpu-1"] / MS <= 900


@pytest.mark.parametrize(("left_behind", "is_moved"), [([], True), (["roll"], False)])
def test_a_drain_that_waited_for_a_reader_ended_after_it(left_behind, is_moved):
    story = Story(skews={"gpu-1": 10_000})
    story.publish("gpu-0", "trainer", 0)
    story.read("gpu-1", "roll", "trainer", 0, 100)
    more = {"waited_for": ["roll"], "left_behind": left_behind}
    story.did("gpu-0", "trainer", "drain", 50, 60, **more)
    _, aligned = merged(story)
    assert (aligned.moved_ns["boot of gpu-0"] > 9_900 * MS) == is_moved


def test_a_number_that_was_published_twice_orders_nothing_else():
    """The content counts; where two have published that, nobody knows who was first."""
    story = Story()
    story.publish("gpu-0", "trainer", 5000, uid="later")
    story.read("gpu-1", "roll", "trainer", 0, 100, uid="first")
    story.publish("gpu-2", "a", 9000, uid="both")
    story.publish("gpu-3", "b", 0, uid="both")
    story.read("gpu-1", "roll", "b", 200, 100, uid="both")
    _, aligned = merged(story)
    assert {*aligned.moved_ns.values()} == {0}


def test_clocks_that_contradict_themselves_are_said_so():
    story = Story()
    story.publish("gpu-0", "trainer", 0, version=1)
    story.read("gpu-1", "roll", "trainer", -1000, 10, version=1)
    story.publish("gpu-1", "other", 0, version=2)
    story.read("gpu-0", "back", "other", -1000, 10, version=2)
    found, aligned = merged(story)
    chrome.check(found)
    assert aligned.left_ns > 900 * MS


# Files


def named(folder):
    return {each.name for each in folder.iterdir()}


@pytest.fixture
def told(capsys):
    def tell(*arguments):
        code = main.main(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return tell


def test_a_folder_of_journals_becomes_a_file(tmp_path, told):
    folder, out = tmp_path / "journals", tmp_path / "trace.json"
    folder.mkdir()
    spread(Story(skews={"gpu-1": -50}), 3, 2).write(folder)
    (folder / "notes.txt").write_text("no journal")
    code, said, err = told("trace", "--merge", folder, "--out", out)
    assert (code, err) == (0, "")
    assert said.startswith("42 slices and 6 arrows in 4 rows: ")
    assert "the clock of gpu-1 was moved by +" in said
    rows = chrome.check(json.loads(out.read_text()))
    assert len(rows) == 4
    assert named(tmp_path) == {"journals", "trace.json"}
    code, said, _ = told("--json", "trace", "policy", "--merge", folder, "--out", out)
    found = json.loads(said)
    assert (code, found["schema"], found["slices"], found["file"]) == (0, 1, 42, str(out))
    assert found["moved"][0]["hosts"] == ["gpu-1"]
    code, text, said = told("trace", "--merge", folder)
    assert (code, said.startswith("42 slices")) == (0, True)
    assert chrome.check(json.loads(text)).keys() == rows.keys()


def test_lines_that_are_not_whole_or_not_ours_are_left_out_and_counted(tmp_path, told):
    spread(Story(), 3, 2).write(tmp_path)
    whole = (tmp_path / "roll-0-0.jsonl").read_bytes()
    (tmp_path / "roll-0-0.jsonl").write_bytes(whole[:-9])  # one drain or read less
    with (tmp_path / "roll-1-0.jsonl").open("ab") as file:
        file.write(b'{"kind":"read"}\n\xff\n{"kind":')
    (tmp_path / "killed-early.jsonl").touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).touch()
    code, said, _ = told("--json", "trace", "--merge", tmp_path, "--out", tmp_path / "out")
    found = json.loads(said)
    assert (code, found["calls"], found["unreadable"]) == (0, 3 + 3 * 3 - 1, 2)
    assert found["cut"] == [
        "killed-early.jsonl",
        "roll-0-0.jsonl",
        "roll-1-0.jsonl",
        "\N{REPLACEMENT CHARACTER}.jsonl",
    ]
    chrome.check(json.loads((tmp_path / "out").read_text()))
    _, said, _ = told("trace", "--merge", tmp_path, "--out", tmp_path / "out")
    assert "4 last lines are not whole, and left out: killed-early.jsonl, roll-0-0.jsonl" in said
    assert "2 lines cannot be read, and are left out" in said


def other_release(folder):
    first = {"format": FORMAT + 1, "release": "9.9", "engine": "x"}
    (folder / "new.jsonl").write_text(json.dumps(first) + "\n" + '{"whatever": 1}\n')


def something_else(folder):
    (folder / "log.jsonl").write_text('{"level": "info"}\n')


def only_heads(folder):
    (folder / "idle.jsonl").write_bytes(line(author("gpu-0")))


def calls_of_policy(folder):
    spread(Story(), 1, 1).write(folder)


@pytest.mark.parametrize(
    ("fill", "arguments", "said"),
    [
        (lambda _: None, (), "no file *.jsonl in "),
        (only_heads, (), "1 files without a call in "),
        (other_release, (), "was written by release 9.9 of torch_ros (format 2)"),
        (something_else, (), "log.jsonl is no journal of torch_ros, it begins with"),
        (calls_of_policy, ("polciy",), "no call of model 'polciy' in "),
        (calls_of_policy, ("--out", "/proc/none/x"), "the trace cannot be written to /proc/none/x"),
        (
            calls_of_policy,
            ("--out", "/"),
            "the trace cannot be written to /: it is a folder or a device",
        ),
    ],
)
def test_a_folder_that_makes_no_trace_is_an_exit_code(tmp_path, told, fill, arguments, said):
    fill(tmp_path)
    code, out, err = told("trace", *arguments, "--merge", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    if "polciy" in arguments:
        assert "did you mean 'policy'?" in err


def test_no_device_is_replaced_by_a_file(tmp_path, told):
    calls_of_policy(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    code, _, err = told("trace", "--merge", tmp_path, "--out", tmp_path / "pipe")
    assert (code, "it is a folder or a device" in err) == (2, True)
    assert (tmp_path / "pipe").is_fifo()


def test_what_is_asked_wrongly_is_an_exit_code(tmp_path, told):
    assert told("trace", "--merge", tmp_path / "none")[0] == 2
    assert told("trace")[0] == 2
    for wrong in (
        ("--for", "0"),
        ("--for", "1d"),
        ("--for", "169h"),
        ("--for", "9" * 400),
        ("--for", "-5"),
        ("--for", "1s", "--version", "3"),
        ("--version", "x"),
    ):
        with pytest.raises(SystemExit) as ended:
            told("trace", "policy", *wrong)
        assert ended.value.code == 2
    assert [parsing.seconds(text) for text in ("90", "60s", "1.5m", "1h")] == [90, 60, 90, 3600]


# A watch

ONE, TWO = VersionRef("run-a", 1, "u1", 1), VersionRef("run-a", 2, "u2", 1)


def held(replica, state, ref=TWO, kind="replica", inst=None, **more):
    options = {"is_offered": state == "full", "is_relay": True, "spot": False, "world_size": 1}
    inst = inst or f"{replica}@0"
    return Held(ref, replica, inst, "default", kind, state, **options | more)


def fleet(*there, versions=(TWO, ONE), names=("trainer", "roll-0", "roll-1")):
    published = [
        Published(ref, any(h.ref == ref and h.is_offered for h in there), 3, 3_000_000_000)
        for ref in versions
    ]
    replicas = {
        name: Replica(name, f"{name}@0", "complete", "default", False, "run-a", 1)
        for name in sorted({*names, *(each.replica for each in there)})
    }
    return Fleet("policy", 7, {"run-a": 1}, published, there, replicas)


TRAINER = held("trainer", "full", kind="original")
HOSTS = {"trainer": "gpu-0", "roll-0": "gpu-1"}


def recorded(*steps, only=None, ends_ms=1000):
    """`steps`: moments in ms, and what a watch showed then."""
    recording = FleetRecording(only)
    for at_ms, seen in steps:
        recording.see(seen, BEGAN_NS + at_ms * MS)
    return made(recording.end(BEGAN_NS + ends_ms * MS, HOSTS))


def brief(rows):
    """Name, ms of the beginning, ms that it took, and what is said of it, by row."""
    return {
        row: [(each["name"], each["ts"] / 1e3, each["dur"] / 1e3, each["args"]) for each in slices]
        for row, slices in rows.items()
    }


def test_a_watch_shows_who_published_read_held_and_drained():
    reading = held("roll-0", "filling", sources=("trainer",))
    found = recorded(
        (0, fleet(versions=())),
        (10, fleet(held("trainer", "filling", kind="original"))),
        (20, fleet(TRAINER)),
        (100, fleet(TRAINER, reading)),
        (300, fleet(TRAINER, reading, held("roll-1", "filling", sources=("roll-0",)))),
        (600, fleet(TRAINER, held("roll-0", "full"))),  # roll-1 has given up
        (700, fleet(held("trainer", "draining", kind="original"), held("roll-0", "full"))),
        (750, fleet(held("roll-0", "full"))),
    )
    assert brief(chrome.check(found)) == {
        ("gpu-0", "trainer"): [
            ("publish", 10, 10, {"version": 2, "GB": 3.0}),
            ("hold", 20, 680, {"version": 2}),
            ("drain", 700, 50, {"version": 2}),
        ],
        ("gpu-1", "roll-0"): [
            ("read", 100, 500, {"version": 2, "source": "trainer", "GB": 3.0, "GB/s": 6.0}),
            ("hold", 600, 400, {"version": 2, "end": "later"}),
        ],
        (NOBODY, "roll-1"): [
            ("read", 300, 300, {"version": 2, "source": "roll-0", "end": "given up"})
        ],
    }
    ends = {(source, at["name"], reader) for (source, at), (reader, _) in chrome.arrows(found)}
    assert ends == {("trainer", "hold", "roll-0"), ("roll-0", "read", "roll-1")}
    assert chrome.counters(found, "held_by") == [0, 1, 2, 1]
    assert chrome.counters(found, "in_flight") == [0, 1, 2, 0]


def test_a_rate_is_only_said_of_what_was_seen_from_the_beginning():
    found = recorded(
        (0, fleet(TRAINER, held("roll-0", "filling", sources=("trainer",)))),
        (500, fleet(TRAINER, held("roll-0", "full"))),
    )
    [read, _] = brief(chrome.check(found))["gpu-1", "roll-0"]
    args = {"version": 2, "source": "trainer", "GB": 3.0, "began": "before"}
    assert read == ("read", 0, 500, args)


def test_a_copy_has_a_row_of_its_own_and_one_version_can_be_shown_alone():
    copy = held("trainer", "full", ONE, "copy", inst="trainer+3@0")
    both = (0, fleet(TRAINER, copy))
    assert {row for _, row in chrome.check(recorded(both))} == {"trainer", "trainer (copy)"}
    found = recorded(both, only=1)
    assert chrome.counters(found, "held_by") == [1]  # of the newest, whatever is drawn
    [alone] = chrome.check(found).values()
    assert [each["args"]["version"] for each in alone] == [1]


def test_a_version_is_everywhere_when_each_replica_has_it_or_a_newer_one():
    rest = [held(name, "full", ONE) for name in ("roll-0", "roll-1")]
    assert is_everywhere(fleet(TRAINER, *rest), 1)
    assert not is_everywhere(fleet(TRAINER, *rest), 2)
    assert not is_everywhere(fleet(TRAINER, rest[0]), 1)  # roll-1 has nothing at this moment
    assert not is_everywhere(fleet(TRAINER, rest[0], held("roll-1", "filling", ONE)), 1)
    assert not is_everywhere(fleet(versions=()), 1)
    ahead = fleet(TRAINER, *rest, names=("roll-1%2Bhost",))
    ahead.replicas["roll-1+host"] = Replica(
        "roll-1+host", "roll-1%2Bhost@0", "complete", "default", False, "run-a", 1
    )
    del ahead.replicas["roll-1%2Bhost"]
    assert is_everywhere(ahead, 1)  # a forerunner has nothing, most of the time


def test_a_version_that_has_gone_will_not_come():
    with pytest.raises(UsageError, match="no version 1 any more; its newest is 2"):
        trace._require_to_come(fleet(TRAINER, versions=(TWO,)), 1)
    trace._require_to_come(fleet(TRAINER), 2)
    trace._require_to_come(fleet(TRAINER), 3)


def published(handle, version):
    handle.unpublish()
    handle.unregister()
    handle.register({"w": torch.full((1000,), float(version))})
    handle.publish(version)


class Beside(threading.Thread):
    """Does something once the recording has begun: when its reader of etcd asks for hosts."""

    def __init__(self, monkeypatch, action):
        super().__init__()
        self.has_begun, self.action = threading.Event(), action
        learn = trace._learn

        def learned(*given):
            learn(*given)
            self.has_begun.set()

        monkeypatch.setattr(trace, "_learn", learned)
        self.start()

    def run(self):
        assert self.has_begun.wait(30)
        self.action()


def test_a_fleet_is_watched_until_all_have_the_version(
    opened, endpoint, told, tmp_path, monkeypatch
):
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1)
    rollout.register({"w": torch.empty(1000)})
    rollout.replicate()
    kv = trainer._shard.group.kv
    before = kv.read(Read((EVERY_MODEL,)), timeout_s=5).entries
    out, model = tmp_path / "trace.json", trainer.model
    asked = ("--endpoint", endpoint, "--json", "trace", model, "--out", out)
    code, said, err = told(*asked, "--for", "0.2s")
    assert (code, err, json.loads(said)["rows"]) == (0, "", 2)
    assert kv.read(Read((EVERY_MODEL,)), timeout_s=5).entries == before  # nothing was written
    spread = Beside(monkeypatch, lambda: (published(trainer, 2), rollout.update()))
    assert told(*asked, "--version", "2")[0] == 0
    spread.join()
    found = json.loads(out.read_text())
    rows = chrome.check(found)
    assert {row for _, row in rows} == {"trainer", "rollout"}
    assert {host for host, _ in rows} == {os.uname().nodename}
    versions = {each["args"]["version"] for slices in rows.values() for each in slices}
    assert versions == {2}
    assert chrome.counters(found, "held_by")[-1] == 2
    code, _, err = told(*asked, "--version", "2")
    assert (code, "has version 2 already" in err) == (2, True)
    code, _, err = told("--endpoint", endpoint, "trace", model[:-1], "--out", out)
    assert (code, f"did you mean {model!r}?" in err) == (2, True)
    assert named(tmp_path) == {"trace.json"}


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_etcd_may_go_and_come_back_while_a_watch_lasts(opened, endpoint, told, monkeypatch):
    trainer = opened("trainer")
    published(trainer, 1)
    fleets = trace.watching.fleets

    def with_a_gap(*given):
        there = fleets(*given)
        yield next(there)
        yield StoreUnavailable("etcd://x", 1.0, "it does not answer")
        yield StoreUnavailable("etcd://x", 1.0, "it does not answer")
        yield from there

    monkeypatch.setattr(trace.watching, "fleets", with_a_gap)
    code, text, err = told("--endpoint", endpoint, "trace", trainer.model, "--for", "0.3")
    assert (code, err.count("it does not answer"), err.count("it goes on")) == (0, 1, 1)
    assert len(chrome.check(json.loads(text))) == 1


def start(*arguments, **environment):
    command = [sys.executable, "-m", "torch_ros", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes)


@pytest.mark.parametrize("endpoint", ["etcd"], indirect=True)
def test_ctrl_c_writes_what_was_seen(opened, endpoint, tmp_path):
    published(opened("trainer"), 1)
    model, out = opened("rollout").model, tmp_path / "trace.json"
    recording = start("--endpoint", endpoint, "trace", model, "--for", "1h", "--out", out)
    until_s = time.monotonic() + 60
    while not named(tmp_path) or not has_handlers(recording.pid):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    recording.send_signal(signal.SIGTERM)
    _, err = recording.communicate(timeout=30)
    assert (recording.returncode, err) == (0, "")
    chrome.check(json.loads(out.read_text()))


def has_handlers(pid):
    """Whether a process takes SIGTERM itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(text for text in status.splitlines() if text.startswith("SigCgt:"))
    return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def test_an_etcd_that_is_not_there_is_an_exit_code(told, tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_S", 0.5)
    endpoint = ("--endpoint", "etcd://127.0.0.1:9")
    code, out, err = told(*endpoint, "trace", "policy", "--out", tmp_path / "trace.json")
    assert (code, out, err.startswith("torch-ros: ")) == (3, "", True)
    assert named(tmp_path) == set()


def test_nothing_in_a_name_is_obeyed_by_a_terminal_and_a_pipe_may_break(tmp_path, monkeypatch):
    values = {"slices": 1, "rows": 1, "arrows": 0, "cut": ["r\x1b[2J"]}
    out = io.StringIO()
    output.say(out, *trace.lines(values, None))
    assert "r\\x1b[2J" in out.getvalue()
    Story().publish("gpu-0", "trainer", 0)
    spread(Story(), 30, 30).write(tmp_path)
    recording = start("trace", "--merge", tmp_path)
    recording.stdout.close()
    assert recording.wait(60) == 0
    assert "Traceback" not in recording.stderr.read()
    recording.stderr.close()
