"""Texts of others, as people get them: anybody may have chosen a name, and no terminal obeys it."""

import logging


def printable(text: str) -> str:
    r"""`text` on one line, without what a terminal would obey: an escape sequence is `\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log_of(module: str) -> logging.Logger:
    """The logger of a module: each of its messages is one line, whatever names are in it."""
    log = logging.getLogger(module)
    log.addFilter(_on_one_line)  # once, however often it is asked for
    return log


def _on_one_line(record: logging.LogRecord) -> bool:
    if not (text := record.getMessage()).isprintable():
        record.msg, record.args = printable(text), ()
    return True
