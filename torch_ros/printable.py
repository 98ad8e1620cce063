"""Texts of others, as people get them: anybody may have chosen a name, and no terminal obeys it."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

_FALLBACK = logging.Handler()  # says on stderr, if there is one, what went wrong in another


def printable(text: str) -> str:
    r"""`text` on one line, without what a terminal would obey: an escape sequence is `\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Log(logging.Logger):
    """Its handlers are the program's. One that raises ends no call of ours."""

    def handle(self, record: logging.LogRecord) -> None:
        """Tell the handlers."""
        try:
            super().handle(record)
        except Exception:  # noqa: BLE001
            with suppress(Exception):
                _FALLBACK.handleError(record)


def log_of(module: str) -> logging.Logger:
    """The logger of a module: each of its messages is one line, whatever names are in it."""
    log = logging.getLogger(module)
    log.__class__ = Log  # the program may have asked for it before
    log.addFilter(_on_one_line)  # once, however often it is asked for
    return log


def _on_one_line(record: logging.LogRecord) -> bool:
    if not (text := record.getMessage()).isprintable():
        record.msg, record.args = printable(text), ()
    return True


def silence(out: TextIO) -> None:
    """Drop what it still has: Python writes it once more at the end, and would fail again."""
    with suppress(OSError, ValueError):  # one that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
