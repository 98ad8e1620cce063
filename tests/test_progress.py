"""The line on the terminal: when it is there, and what it says."""

import io
import uuid

import pytest
import torch

import torch_ros
from torch_ros.progress import AFTER_S, EVERY_S, ProgressLine, as_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_shown_of_what_is_soon_done(clock):
    stream = Terminal()
    with ProgressLine("v", stream=stream, clock=clock) as line:
        line.expect(100)
        clock.now_s += AFTER_S - 0.01
        line.add(100)
    assert stream.getvalue() == ""


def test_a_long_read_is_shown_and_its_end_stays(clock):
    stream = Terminal()
    with ProgressLine("version 7", stream=stream, clock=clock) as line:
        line.expect(4_000_000_000)
        for _ in range(4):
            clock.now_s += 1
            line.add(1_000_000_000)
    drawn = stream.getvalue().split("\r")[1:]
    assert [text[11:15] for text in drawn] == [" 25%", " 50%", " 75%", "100%", "100%"]
    assert drawn[-1].rstrip(" ").endswith("4.00/4.00 GB [00:04<00:00, 1.00 GB/s]\n")


def test_it_is_not_drawn_more_often_than_anyone_can_read(clock):
    stream = Terminal()
    line = ProgressLine("v", stream=stream, clock=clock)
    line.expect(1000)
    clock.now_s += AFTER_S
    for _ in range(100):
        line.add(10)
        clock.now_s += EVERY_S / 10
    assert stream.getvalue().count("\r") in (10, 11)


def test_an_error_leaves_the_terminal_at_the_start_of_a_line(clock):
    stream = Terminal()

    def fail():
        with ProgressLine("v", stream=stream, clock=clock) as line:
            line.expect(10)
            clock.now_s += AFTER_S
            line.add(5)
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert stream.getvalue().endswith("\n")
    assert " 50%" in stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "options", "variable"),
    [
        (io.StringIO(), {}, None),
        (Terminal(), {"is_shown": False}, None),
        (Terminal(), {}, "0"),
    ],
    ids=["no terminal", "another rank", "switched off"],
)
def test_it_stays_away(clock, monkeypatch, stream, options, variable):
    if variable is not None:
        monkeypatch.setenv("TORCH_ROS_PROGRESS", variable)
    with ProgressLine("v", stream=stream, clock=clock, **options) as line:
        line.expect(10)
        clock.now_s += 60
        line.add(5)
    assert stream.getvalue() == ""


def test_it_says_how_long_it_will_take():
    assert as_line("v", 0, 10, 0.0).startswith("v:   0%|")
    assert "[00:10<00:30, 0.10 GB/s]" in as_line("v", 10**9, 4 * 10**9, 10)
    assert "[1:00:00<1:00:00," in as_line("v", 10**9, 2 * 10**9, 3600)
    assert as_line("v", 0, 0, 1.0).startswith("v: 100%|")
    assert as_line("v", 11, 10, 1.0).startswith("v: 100%|"), "whole rows can be more than asked"


def test_replicate_feeds_it(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("torch_ros.progress.AFTER_S", 0.0)
    endpoint = f"memory://{uuid.uuid4().hex}"
    with (
        torch_ros.open("m", endpoint=endpoint, replica="a") as trainer,
        torch_ros.open("m", endpoint=endpoint, replica="b") as rollout,
    ):
        trainer.register({"w": torch.ones(1000, 1000)})
        trainer.publish(7)
        rollout.register({"w": torch.zeros(1000, 1000)})
        rollout.replicate()
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("version 7 of 'm': 100%|####################| 0.00/0.00 GB")
