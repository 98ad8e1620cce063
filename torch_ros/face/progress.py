"""How far a read is, for a function of the user's or as a bar on the terminal."""

import logging
import math
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from tqdm import tqdm  # type: ignore[import-untyped]  # its stubs are another package

from torch_ros import environment
from torch_ros.printable import log_of
from torch_ros.transfer.meter import Display, Displays

log: logging.Logger = log_of(__name__)

OnProgress = Callable[[int, int], object]
"""Called with the bytes that have arrived, and the bytes that the read takes."""

BAR_AFTER_S = 1.0  # a shorter read needs no bar
AT_ONCE_S = 1e-6  # more than 0, for which tqdm draws before it can be closed
REDRAW_S = 0.1


class Bar:
    """A line of progress on stderr, if that is a terminal. It raises nothing, and waits for nobody.

    Args:
        delay_s: A read that is over before then is not shown.
    """

    def __init__(self, what: str, *, delay_s: float = AT_ONCE_S) -> None:
        self._bar: tqdm | None = None
        self._stream: TextIO | None = sys.stderr
        is_wanted = environment.value(environment.PROGRESS) != "0"
        with suppress(Exception):  # it is None, closed, or what a program has put there
            if is_wanted and self._stream is not None and self._stream.isatty() and self._is_free:
                # Counting each update, it leaves nothing to tqdm's own thread.
                how = {"delay": delay_s, "mininterval": REDRAW_S, "miniters": 1}
                self._bar = tqdm(desc=what, unit="B", unit_scale=True, **how)

    @property
    def is_shown(self) -> bool:
        """Whether anything is shown: else a read does without it."""
        return self._bar is not None

    @property
    def _is_free(self) -> bool:
        """Whether a write returns at once: a terminal that Ctrl-S has stopped would wait."""
        try:
            poll = select.poll()
            poll.register(self._stream.fileno(), select.POLLOUT)  # type: ignore[union-attr]
            return bool(poll.poll(0))
        except Exception:  # noqa: BLE001  # no file, or a stream of the program's own
            return True

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """So many of so many bytes are there."""
        if self._bar is None or not self._is_free:
            return
        self._bar.total = total_bytes
        try:
            self._bar.update(done_bytes - self._bar.n)
        except Exception:  # noqa: BLE001  # the terminal is gone
            self.close()

    def close(self) -> None:
        """Leave the line as it is."""
        bar, self._bar = self._bar, None
        if bar is not None:
            if not self._is_free:
                bar.delay = math.inf  # as if it were not drawn yet: tqdm writes nothing
            with suppress(Exception):
                bar.close()


class _Told:
    """A function of the user's, which is told of one read."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress: OnProgress | None = on_progress

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """Call it; not any more if it has raised."""
        if self._on_progress is not None:
            try:
                self._on_progress(done_bytes, total_bytes)
            except Exception:  # the replica needs its weights more than its display
                log.exception("on_progress failed; it is not called again in this read")
                self._on_progress = None

    def close(self) -> None:
        """It is told of no end."""


def displays(on_progress: OnProgress | None) -> Displays:
    """Tells a function of each read; None: draws a bar.

    The bar needs a terminal and a read of more than a second; the first rank of each host draws.
    """

    def display(what: str, rank: int) -> Display | None:
        if on_progress is not None:
            return _Told(on_progress)
        if os.environ.get("LOCAL_RANK", str(rank)) != "0":
            return None
        bar = Bar(what, delay_s=BAR_AFTER_S)
        return bar if bar.is_shown else None

    return display
