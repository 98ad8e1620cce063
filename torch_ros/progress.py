"""A line on the terminal that says how far a long read is. Nothing for short ones, or in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

PROGRESS_VARIABLE = "TORCH_ROS_PROGRESS"  # "0": no lines at all
AFTER_S = 1.0  # what is done by then is not worth a line
EVERY_S = 0.1
BAR_WIDTH = 20


class ProgressLine:
    """Bytes that are there, of those that are to be read. For one thread.

    with ProgressLine("version 7") as line:
        line.expect(total_bytes)
        line.add(size_bytes)  # as often as there is news

    Shows nothing unless `stream` is a terminal and this takes longer than a second.

    Args:
        what: What is read, for people.
        is_shown: False on all ranks but one: they share the terminal.
        stream: None: stderr.
    """

    def __init__(
        self,
        what: str,
        *,
        is_shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._clock = what, clock
        self._stream = sys.stderr if stream is None else stream
        is_wanted = is_shown and os.environ.get(PROGRESS_VARIABLE) != "0"
        self._is_shown = is_wanted and self._stream is not None and self._stream.isatty()
        self._total, self._done, self._drawn = 0, 0, ""
        self._started_s = clock()
        self._due_s = self._started_s + AFTER_S

    def expect(self, total_bytes: int) -> None:
        """How many bytes there are to be read in all, those that are there included."""
        self._total = total_bytes

    def add(self, size_bytes: int) -> None:
        """So many more are there."""
        self._done += size_bytes
        if self._is_shown and self._clock() >= self._due_s:
            self._draw()

    def _draw(self) -> None:
        now_s = self._clock()
        self._due_s = now_s + EVERY_S
        line = as_line(self._what, self._done, self._total, now_s - self._started_s)
        self._stream.write(f"\r{line.ljust(len(self._drawn))}")
        self._stream.flush()
        self._drawn = line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What was shown stays as it is at the end."""
        if self._drawn:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()


def as_line(what: str, done: int, total: int, elapsed_s: float) -> str:
    """As tqdm would say it."""
    share = min(1.0, done / total) if total else 1.0
    filled = "#" * int(share * BAR_WIDTH)
    speed = done / elapsed_s if elapsed_s > 0 else 0.0
    left = _clock_time((total - done) / speed) if 0 < done < total and speed else "00:00"
    return (
        f"{what}: {share:4.0%}|{filled:{BAR_WIDTH}}| {done / 1e9:.2f}/{total / 1e9:.2f} GB "
        f"[{_clock_time(elapsed_s)}<{left}, {speed / 1e9:.2f} GB/s]"
    )


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
