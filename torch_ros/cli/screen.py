"""How `torch-ros top` writes lines into cells of a terminal. Pure."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch_ros.cli import headway, ls
from torch_ros.cli.lines import Line, Spread
from torch_ros.fleet.fleet import Fleet
from torch_ros.printable import some
from torch_ros.protocol.records import VersionRef

SPREAD_WIDTH = 40
NARROW = 64  # columns: with fewer, how and where are left out
COLOURS = ("#5b9dff", "#ffb454", "#3ddbb4", "#ff7eb6", "#b79cff", "#c5e478", "#ff8f6b", "#6ad7ff")
VERSIONS_SHOWN = 4
DIGITS = 20  # of a number in a name


@dataclass(frozen=True, slots=True)
class Column:
    """`share`: of the width that the others leave, if `width` is 0."""

    name: str
    text: Callable[[Line], str]
    width: int = 0
    share: int = 0


def version(line: Line) -> str:
    held = number(line.holds)
    return f"{held} > {number(line.fills)}" if line.fills else held


def state(line: Line) -> str:
    shown = headway.text(line.headway) if line.headway else line.state
    more = ", suspected" if line.is_suspected else ""
    return f"{shown}{more}" + (f", {line.behind} behind" if line.behind and not line.fills else "")


def reads(line: Line) -> str:
    if line.sources:
        return some(line.sources)
    return f"(read by {some(line.readers)})" if line.readers else ""


def number(ref: VersionRef | None) -> str:
    return str(ref.version) if ref else "-"


def colour(ref: VersionRef | None) -> str | None:
    """The same as on the page of `torch-ros web`."""
    return COLOURS[ref.version % len(COLOURS)] if ref else None


def age(ref: VersionRef | None) -> tuple[object, ...]:
    """Newer versions first."""
    return (0, -ref.run_number, -ref.version) if ref else (1,)


@lru_cache(1 << 16)
def natural(name: str) -> str:
    """So that r10 comes behind r9."""
    return re.sub("[0-9]+", lambda found: found[0].zfill(DIGITS), name)


COLUMNS = (
    Column("REPLICA", lambda line: line.replica, share=3),
    Column("VERSION", version, 12),
    Column("STATE", state, 18),
    Column("READS FROM", reads, share=4),
    Column("HOW", lambda line: line.how, 10),
    Column("FOR", lambda line: ls.age(line.since_ms).removesuffix(" ago"), 8),
    Column("WHERE", lambda line: line.datacenter, share=2),
)
ORDERS: Sequence[tuple[str, Callable[[Line], tuple[object, ...]]]] = (
    ("replica", lambda line: (natural(line.replica),)),
    ("version", lambda line: (age(line.holds), age(line.fills), natural(line.replica))),
    ("state", lambda line: (line.state, natural(line.replica))),
    ("reads", lambda line: (not line.sources, -len(line.readers), natural(line.replica))),
)


def columns(width: int) -> list[tuple[Column, int]]:
    """Those that there is room for, each with its width."""
    shown = COLUMNS if width >= NARROW else COLUMNS[:4]
    left = max(0, width - sum(each.width for each in shown) - len(shown))
    shares = sum(each.share for each in shown)
    return [(each, each.width or max(4, left * each.share // shares)) for each in shown]


def chosen(there: Iterable[Line], words: str) -> list[Line]:
    """The lines in which each of some words is."""
    asked = words.lower().split()
    if not asked:
        return list(there)
    found = []
    for line in there:
        cells = (line.replica, version(line), line.state, line.how, line.datacenter)
        text = " ".join(cells).lower()
        if all(word in text for word in asked):
            found.append(line)
    return found


def title(fleet: Fleet, endpoint: str) -> str:
    there = " < ".join(str(each.ref.version) for each in fleet.versions[:VERSIONS_SHOWN])
    return f"{fleet.model} @ {endpoint}   revision {fleet.revision}   {there}"


def newest(fleet: Fleet, spread: Spread) -> str:
    """The newest version in words; the bar stands behind it."""
    if fleet.latest is None:
        return f"no version is offered   {spread.total} replicas"
    sizes = next(each.size_bytes for each in fleet.versions if each.ref == fleet.latest)
    size = f" of {ls.size(sizes)}" if sizes is not None else ""
    found = f"version {fleet.latest.version}{size}   held by {spread.held} of {spread.total}"
    return f"{found}   {spread.filling} reading"


def bar(spread: Spread, width: int) -> tuple[str, str, str]:
    """Those who have it, those who read it, and the others, as parts of `width`."""
    total = max(1, spread.total)
    held = round(width * spread.held / total)
    filling = min(width - held, -(-width * spread.filling // total))
    return "█" * held, "▓" * filling, "░" * (width - held - filling)
