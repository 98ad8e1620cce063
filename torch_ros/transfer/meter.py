"""The bytes of one read as they come, for somebody who shows them."""

from collections.abc import Callable
from typing import Protocol


class Display(Protocol):
    """Shows how far one read is. It raises nothing, and waits for nobody."""

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """So many of so many bytes are there."""

    def close(self) -> None:
        """The read has ended."""


Displays = Callable[[str, int], Display | None]
"""Begins to show a read, of which it is given the name and the rank; None: nobody looks."""


class Meter:
    """Counts the bytes of one read.

    with closing(Meter(display)) as meter:
        meter.expect(bytes_total)
        meter.add(size_bytes)  # for each batch
    """

    def __init__(self, display: Display | None) -> None:
        self._display, self._done, self._total = display, 0, 0

    def expect(self, bytes_total: int) -> None:
        """Set the bytes that the read takes, those that have arrived included."""
        self._total = bytes_total

    def add(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        self._done += size_bytes
        if self._display is not None:
            self._display.show(self._done, self._total)

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
