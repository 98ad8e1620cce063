"""A `threading.Event` that is set once, and that no signal breaks."""

import queue


class Latch:
    """Set by any thread, for good; waited for by any.

    Each step that others see is one call into C, so that a signal handler that raises between two
    leaves nobody waiting (`docs/ARCHITECTURE.md`, "Ctrl-C").
    """

    def __init__(self) -> None:
        self._is_set = False
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._tokens.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Whether it is set, within `timeout_s`."""
        if not self._is_set:
            try:
                self._tokens.get(timeout=max(0.0, timeout_s))
            except queue.Empty:
                return self._is_set
            self._tokens.put(None)  # one token is enough: each who waits hands it on
        return self._is_set
