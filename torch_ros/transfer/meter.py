"""The bytes of one read as they come, for a function of the user's or a bar on the terminal."""

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


class Meter:
    """Counts the bytes of one read for `on_progress`; None: for a bar on the terminal.

    with closing(Meter("version 7", on_progress, rank)) as meter:
        meter.expect(bytes_total)
        meter.add(size_bytes)  # for each batch

    The bar needs a terminal and a read of more than a second; the first rank of each host draws.
    """

    def __init__(self, what: str, on_progress: OnProgress | None, rank: int) -> None:
        self._on_progress, self._done, self._total = on_progress, 0, 0
        is_first = os.environ.get("LOCAL_RANK", str(rank)) == "0"
        is_drawn = is_first and on_progress is None
        self._bar = Bar(what, delay_s=BAR_AFTER_S) if is_drawn else None

    def expect(self, bytes_total: int) -> None:
        """Set the bytes that the read takes, those that have arrived included."""
        self._total = bytes_total

    def add(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        self._done += size_bytes
        if self._bar is not None:
            self._bar.show(self._done, self._total)
        if self._on_progress is not None:
            try:
                self._on_progress(self._done, self._total)
            except Exception:  # the replica needs its weights more than its display
                log.exception("on_progress failed; it is not called again in this read")
                self._on_progress = None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
