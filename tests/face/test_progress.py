"""A read's progress: the bar on a terminal, and the function that `open` takes."""

import errno
import io
import logging
import os
import sys
import termios
import threading
from contextlib import closing

import pytest
import torch

import torch_ros
from torch_ros.face import progress
from torch_ros.transfer import batches, reading
from torch_ros.transfer.meter import Meter


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(progress, "BAR_AFTER_S", progress.AT_ONCE_S)
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    return lambda stream: monkeypatch.setattr(sys, "stderr", stream) or stream


def read(rank=0, on_progress=None):
    with closing(Meter(progress.displays(on_progress)("version 7", rank))) as meter:
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
    monkeypatch.setattr(progress, "BAR_AFTER_S", 60.0)
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


class Broken(Terminal):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


class Refusing(Terminal):
    def isatty(self):
        raise ValueError("I/O operation on closed file")


class Sink:
    """What some programs put in the place of stderr."""

    def write(self, text):
        return len(text)


STREAMS = {
    "none": lambda: None,
    "sink": Sink,
    "EIO": lambda: Broken(OSError(errno.EIO, "Input/output error")),
    "EPIPE": lambda: Broken(BrokenPipeError()),
    "closed": lambda: Broken(ValueError("I/O operation on closed file.")),
    "odd": lambda: Broken(RuntimeError("no display")),
    "refusing": Refusing,
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_read_does_not_depend_on_stderr(stderr, kind):
    stderr(STREAMS[kind]())
    assert publish_and_read(None) == 1


def test_a_terminal_that_breaks_in_the_middle_ends_the_bar_alone(stderr):
    stream = stderr(Terminal())
    with closing(Meter(progress.displays(None)("version 7", 0))) as meter:
        meter.expect(3000)
        meter.add(1000)
        stream.write = Broken(OSError(errno.ENXIO, "no such device")).write
        meter.add(1000)
        stream.close()
        meter.add(1000)


def test_a_terminal_that_is_stopped_holds_up_no_read(stderr):
    """Ctrl-S: whoever writes to it waits for Ctrl-Q."""
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    termios.tcflow(terminal, termios.TCOOFF)
    with os.fdopen(terminal, "w") as stream, os.fdopen(screen, "rb", 0) as shown:
        stderr(stream)
        reads = threading.Thread(target=read, daemon=True)
        reads.start()
        reads.join(10)
        is_held_up = reads.is_alive()
        termios.tcflow(terminal, termios.TCOON)
        reads.join(10)
        assert not is_held_up
        read()
        os.set_blocking(screen, False)
        assert b"version 7: 100%" in (shown.readall() or b"")


@pytest.mark.parametrize("raises", [True, False])
def test_a_handler_of_logs_that_raises_fails_no_call(stderr, monkeypatch, caplog, raises):
    class Failing(logging.Handler):
        def emit(self, record):
            seen.append(record)
            raise ConnectionError("the collector is away")

    seen, handler, logger = [], Failing(), logging.getLogger("torch_ros")
    monkeypatch.setattr(logging, "raiseExceptions", raises)
    told = stderr(io.StringIO())
    caplog.set_level(logging.DEBUG, "torch_ros")
    logger.addHandler(handler)
    try:
        assert publish_and_read(None) == 1
    finally:
        logger.removeHandler(handler)
    assert seen
    assert ("the collector is away" in told.getvalue()) == raises


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
