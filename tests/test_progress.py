"""A read's progress: the bar on a terminal, and the function that `open` takes."""

import io
import sys
from contextlib import closing

import pytest
import torch

import torch_ros
from torch_ros.transfer import batches, reading
from torch_ros.transfer import meter as meter_module
from torch_ros.transfer.meter import Meter


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(meter_module, "BAR_AFTER_S", 0.0)
    return lambda stream: monkeypatch.setattr(sys, "stderr", stream) or stream


def read(rank=0, on_progress=None):
    with closing(Meter("version 7", on_progress, rank)) as meter:
        meter.expect(4000)
        for _ in range(4):
            meter.add(1000)


def test_a_bar_is_drawn_on_a_terminal_and_its_end_stays(stderr):
    stream = stderr(Terminal())
    read()
    assert "version 7: 100%" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


def test_nothing_is_drawn_in_a_log(stderr):
    stream = stderr(io.StringIO())
    read()
    assert stream.getvalue() == ""


def test_nothing_is_drawn_of_a_short_read(stderr, monkeypatch):
    monkeypatch.setattr(meter_module, "BAR_AFTER_S", 60.0)
    stream = stderr(Terminal())
    read()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("local", "rank", "is_drawn"), [("", 1, 0), ("0", 8, 1), ("1", 0, 0)])
def test_the_first_rank_of_a_host_draws(stderr, monkeypatch, local, rank, is_drawn):
    if local:
        monkeypatch.setenv("LOCAL_RANK", local)
    stream = stderr(Terminal())
    read(rank)
    assert bool(stream.getvalue()) == is_drawn


def test_the_environment_turns_the_bar_off(stderr, monkeypatch):
    monkeypatch.setenv("TORCH_ROS_PROGRESS", "0")
    stream = stderr(Terminal())
    read()
    assert stream.getvalue() == ""


def test_a_function_gets_the_numbers_and_replaces_the_bar(stderr):
    stream, seen = stderr(Terminal()), []
    read(on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1000, 4000), (2000, 4000), (3000, 4000), (4000, 4000)]
    assert stream.getvalue() == ""


def publish_and_read(on_progress):
    options = {"endpoint": f"memory://{id(on_progress)}"}
    with (
        torch_ros.open("m", replica="t", **options) as trainer,
        torch_ros.open("m", replica="r", on_progress=on_progress, **options) as rollout,
    ):
        trainer.register({f"w{n}": torch.ones(1000) for n in range(4)})
        trainer.publish(1)
        rollout.register({f"w{n}": torch.zeros(1000) for n in range(4)})
        return rollout.replicate()


def test_open_takes_the_function(monkeypatch):
    for name in ("BATCH_BYTES", "STEP_BYTES"):
        monkeypatch.setattr(batches, name, 4000)
    for name in ("FLIGHT", "STEPS_FLIGHT"):
        monkeypatch.setattr(reading, name, 1)
    seen = []
    assert publish_and_read(lambda *numbers: seen.append(numbers)) == 1
    assert seen == [(4000 * n, 16_000) for n in (1, 2, 3, 4)]


def test_an_exception_in_the_function_is_logged_and_the_read_goes_on(caplog):
    calls = []

    def fails(done, total):
        calls.append(done)
        raise ValueError("no display")

    assert publish_and_read(fails) == 1
    assert len(calls) == 1
    assert "no display" in caplog.text


def test_what_cannot_be_called_is_refused():
    with pytest.raises(torch_ros.errors.UsageError, match="on_progress=3"):
        torch_ros.open("m", endpoint="memory://none", on_progress=3)
