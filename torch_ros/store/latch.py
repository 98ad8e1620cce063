"""A `threading.Event` that is set once, and that no signal breaks."""

import queue


class Latch:
    """Set by any thread, for good; waited for by any.

    Python runs signal handlers in the main thread, between any two steps. Where one raises within
    `Event.set`, as that of Ctrl-C does, the event's own lock may stay taken, and who waits for the
    event, to renew a lease, say, waits for ever. Here each step that others see is one call into C.
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
            self._tokens.put(None)  # for the next who waits
        return self._is_set
