"""All that a command writes for people and for programs: no terminal obeys a name in it."""

import io
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from shutil import get_terminal_size
from typing import Any, TextIO

import msgspec

from torch_ros.cli.table import table
from torch_ros.printable import printable

SCHEMA = 1  # of what --json prints
COLUMNS = re.compile("0*[1-9][0-9]{0,5}")


def prepare() -> None:
    """Have what is closed (`>&-`) swallow all, and escape what an encoding has no character for."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  # for good
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(out: TextIO, *lines: str) -> None:
    """At once: who reads a pipe may be waiting for it."""
    out.write("".join(f"{printable(line)}\n" for line in lines))
    out.flush()


def complain(text: object) -> None:
    with suppress(OSError, ValueError):  # nobody hears it; the exit code is there still
        say(sys.stderr, f"torch-ros: {text}")


def say_json(out: TextIO, values: dict[str, Any]) -> None:
    say_raw(out, msgspec.json.encode({"schema": SCHEMA, **values}, enc_hook=str))


def say_raw(out: TextIO, text: bytes) -> None:
    """JSON on a line; characters that a terminal may obey are escaped, as JSON does."""
    out.write(re.sub(r"[^ -~]", _escaped, text.decode()) + "\n")
    out.flush()


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def say_table(out: TextIO, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As wide as COLUMNS says, or the terminal; in a pipe a row is a line."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if cells:
        say(out, *table(header, cells, _width(out)))


def _width(out: TextIO) -> int | None:
    told = os.environ.get("COLUMNS", "")
    if COLUMNS.fullmatch(told):
        return int(told)
    return get_terminal_size().columns if out.isatty() else None
