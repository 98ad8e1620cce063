"""How a command that stays is told to end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM; the second one ends the process as ever."""
    ends = threading.Event()

    def end(number: int, _: object) -> None:
        ends.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, end) for number in ENDS}
    try:
        yield ends
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
