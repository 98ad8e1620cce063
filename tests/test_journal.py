"""`TORCH_ROS_TRACE`: a process leaves its reports as lines of a file."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import chrome
import msgspec
import pytest
import torch

from torch_ros import environment
from torch_ros.cli import main, merging, timeline
from torch_ros.protocol.journal import parsed
from torch_ros.shard import journal


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.TRACE, str(tmp_path / "deep" / "journals"))
    return tmp_path / "deep" / "journals"


def read(folder):
    journal.flush()
    return [parsed(each.name, each.read_bytes()) for each in sorted(folder.iterdir())]


def published(handle, version):
    handle.unpublish()
    handle.unregister()
    handle.register({"w": torch.full((1000,), float(version))})
    handle.publish(version)


def test_each_report_becomes_a_line(opened, folder):
    began_ns = time.time_ns()
    trainer, rollout = opened("trainer"), opened("rollout")
    published(trainer, 1)
    rollout.register({"w": torch.empty(1000)})
    rollout.replicate()
    published(trainer, 2)
    rollout.update()
    [found] = read(folder)
    assert (found.author.host, found.author.pid) == (os.uname().nodename, os.getpid())
    assert (found.cut, found.unreadable) == (False, 0)
    for handle in (trainer, rollout):
        lines = [each for each in found.done if each.replica == handle.replica]
        for report, line in zip(handle.reports, lines, strict=True):
            assert (line.model, line.rank, line.call) == (handle.model, 0, report.call)
            assert (line.version, line.uid) == (report.version, report.uid)
            assert line.elapsed_s == report.elapsed_s
            assert line.stages_s == dict(getattr(report, "stages_s", {}))
        for one, next_ in pairwise(lines):
            assert one.ended_ns <= next_.began_ns
        assert began_ns <= lines[0].began_ns <= lines[-1].ended_ns <= time.time_ns()
    first = next(each for each in found.done if each.kind == "read")
    assert (first.sources, first.size_bytes) == (["trainer"], 4000)
    assert sum(first.ways.values()) == rollout.reports[0].bytes_read


def test_a_trace_of_real_calls_is_valid_and_lasts_as_long_as_they_did(opened, folder):
    trainer, rollouts = opened("trainer"), [opened(f"roll-{number}") for number in range(2)]
    for rollout in rollouts:
        rollout.register({"w": torch.empty(1000)})
    for version in range(1, 4):
        published(trainer, version)
        for rollout in rollouts:
            rollout.update()
    [found] = read(folder)
    calls = merging.calls([found], None)
    aligned = merging.aligned(calls)
    assert (aligned.left_ns, {*aligned.moved_ns.values()}) == (0, {0})
    made = timeline.trace(merging.timeline(calls, aligned.moved_ns), {})
    rows = chrome.check(json.loads(msgspec.json.encode(made)))
    for handle in (trainer, *rollouts):
        its = rows[os.uname().nodename, f"{handle.replica} rank 0"]
        took_us = 1e6 * sum(report.elapsed_s for report in handle.reports)
        assert sum(each["dur"] for each in its) == pytest.approx(took_us, rel=0.01)
    assert len(chrome.arrows(made)) == 6


def test_ranks_of_a_replica_have_one_start_and_one_call(ranks, pool, folder):
    handles = ranks("trainer")
    list(pool.map(lambda handle: published(handle, 1), handles))
    [found] = read(folder)
    assert {each.rank for each in found.done} == {0, 1}
    assert len({(each.start, each.call, each.uid) for each in found.done}) == 1


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_without_the_variable_nobody_listens(opened, monkeypatch):
    monkeypatch.delenv(environment.TRACE, raising=False)
    assert journal.listeners(opened()._shard.group.seat) == []


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(
    opened, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv(environment.TRACE, str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        published(opened("trainer"), 1)
        opened("rollout")
    assert [each.getMessage().split(",")[0] for each in caplog.records] == ["no journal is written"]


class Full:
    """A disk on which there is no room for all of a line."""

    name = "journal"

    def write(self, text):
        return len(text) - 1


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_disk_that_is_full_ends_the_journal_and_nothing_else(opened, folder, monkeypatch, caplog):
    trainer = opened("trainer")
    [added] = trainer._shard.reports.listeners[2:]
    its = added.func.__self__
    monkeypatch.setattr(its, "_file", Full())
    with caplog.at_level(logging.WARNING):
        published(trainer, 1)
        published(trainer, 2)
        its.flush(5)
    assert [each.getMessage() for each in caplog.records] == [
        "the journal journal ends here: no room for a line"
    ]


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_disk_that_stands_still_takes_no_more_memory_than_some(
    opened, folder, monkeypatch, caplog
):
    monkeypatch.setattr(journal, "WAITING_MAX", 2)
    goes_on, stands = threading.Event(), threading.Event()

    class Slow:
        name = "journal"

        def write(self, text):
            stands.set()
            goes_on.wait(10)
            return len(text)

    trainer = opened("trainer")
    [added] = trainer._shard.reports.listeners[2:]
    its = added.func.__self__
    monkeypatch.setattr(its, "_file", Slow())
    with caplog.at_level(logging.WARNING):
        published(trainer, 1)
        assert stands.wait(10)
        for version in range(2, 6):
            published(trainer, version)
        assert len(its._told) == 2
        goes_on.set()
        its.flush(5)
    assert [each.getMessage() for each in caplog.records] == [
        "the journal journal ends here: 2 calls wait to be written"
    ]


PROGRAM = """
import sys, torch, torch_ros

trainer = torch_ros.open("policy", endpoint="memory://here", replica="trainer")
trainer.register({"w": torch.zeros(4)})
for version in range(int(sys.argv[1])):
    trainer.unpublish()
    trainer.publish(version + 1)
if len(sys.argv) > 2:
    print("there", flush=True)
    sys.stdin.read()
"""


def await_lines(folder, count):
    until_s = time.monotonic() + 30
    while sum(each.read_bytes().count(b"\n") for each in folder.iterdir()) <= count:
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.long
def test_a_process_that_is_killed_leaves_whole_lines(folder, tmp_path, capsys):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, "100", "stay"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "there\n"
        await_lines(folder, 100)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    [found] = read(folder)
    assert (found.unreadable, found.author.pid) == (0, process.pid)
    assert len(found.done) >= 100
    out = tmp_path / "trace.json"
    assert main.main(["--json", "trace", "--merge", str(folder), "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["calls"], told["cut"]) == (len(found.done), [])


@pytest.mark.long
def test_a_process_that_ends_has_written_all(folder):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, "20"]
    assert subprocess.run(command, timeout=100).returncode == 0
    [found] = read(folder)
    assert len(found.done) == 39


@pytest.mark.parametrize("endpoint", ["memory"], indirect=True)
def test_a_fork_writes_nothing_into_its_parents_file(opened, folder):
    published(opened("trainer"), 1)
    before = read(folder)
    if (child := os.fork()) == 0:
        os._exit(len(journal._journals.there))
    assert os.waitpid(child, 0)[1] == 0
    assert read(folder) == before
