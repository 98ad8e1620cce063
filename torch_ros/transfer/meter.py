"""The bytes of one read as they come, for a function of the user's or a bar on the terminal."""

import logging
import os
import sys
from collections.abc import Callable

from tqdm import tqdm  # type: ignore[import-untyped]  # its stubs are another package

from torch_ros import environment
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

OnProgress = Callable[[int, int], object]
"""Called with the bytes that have arrived, and the bytes that the read takes."""

BAR_AFTER_S = 1.0  # a shorter read needs no bar


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
        is_wanted = is_first and environment.value(environment.PROGRESS) != "0"
        is_drawn = is_wanted and on_progress is None and sys.stderr.isatty()
        self._bar = tqdm(
            desc=what, unit="B", unit_scale=True, delay=BAR_AFTER_S, disable=not is_drawn
        )

    def expect(self, bytes_total: int) -> None:
        """Set the bytes that the read takes, those that have arrived included."""
        self._total = self._bar.total = bytes_total

    def add(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        self._done += size_bytes
        self._bar.update(size_bytes)
        if self._on_progress is not None:
            try:
                self._on_progress(self._done, self._total)
            except Exception:  # the replica needs its weights more than its display
                log.exception("on_progress failed; it is not called again in this read")
                self._on_progress = None

    def close(self) -> None:
        self._bar.close()
