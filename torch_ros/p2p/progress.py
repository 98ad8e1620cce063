"""Keeps an agent answering its readers, at next to no cost while there are none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

IDLE_S = 0.02  # between looks while nobody reads: at 10 ms the looks take 2 % of a core
BUSY_S = 0.0002  # while somebody does; over TCP the source moves the bytes in these looks
LINGER_S = 1.0  # busy for this long after a reader was last heard of


class ProgressLoop:
    """Calls `look` for as long as it lives, often or seldom.

    NIXL has a progress thread of its own, which takes a whole core, busy or not. Without any
    progress at the source a connection is never made, and over TCP no byte moves.

    Args:
        look: Makes progress; whether a reader was heard of. What it raises is logged once.
        name: Of the thread.
    """

    def __init__(self, look: Callable[[], bool], *, name: str) -> None:
        self._look = look
        self._stopping = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns once `look` is not being called any more. Idempotent."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        busy_until_s = time.monotonic() + LINGER_S
        while True:
            if self._heard():
                busy_until_s = time.monotonic() + LINGER_S
            is_busy = time.monotonic() < busy_until_s
            if self._stopping.wait(BUSY_S if is_busy else IDLE_S):
                return

    def _heard(self) -> bool:
        try:
            return self._look()
        except Exception:
            if not self._has_failed:
                log.exception("an agent's progress failed; trying on")
            self._has_failed = True
            return False
