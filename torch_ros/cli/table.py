"""Tables of text, no wider than a terminal that has room for the words of their heads. Pure."""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap

GAP = "  "

Row = Sequence[str]


def table(header: Row, rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """The lines of a table; cells that do not fit are folded, between words where that suffices.

    A folded cell whose characters are two cells wide may stick out.

    Args:
        width: None: as wide as it has to be; a row is a line.
    """
    columns = list(zip(*rows, strict=True))
    heads = [_width(head) if width is None else _longest(head.split()) for head in header]
    widths = list(map(max, heads, map(_longest, columns)))
    words = (_longest(" ".join(column).split()) for column in columns)
    room = sum(widths) if width is None else width - len(GAP) * (len(header) - 1)
    for least in (list(map(max, heads, words)), heads):
        while sum(widths) > room and widths != least:
            may_give = (at for at, wide in enumerate(widths) if wide > least[at])
            widths[max(may_give, key=widths.__getitem__)] -= 1
    named = list(map(_folded, header, widths))
    height = max(map(len, named))
    yield from _joined([[""] * (height - len(each)) + each for each in named], widths)
    for row in rows:
        yield from _joined(list(map(_folded, row, widths)), widths)


def _folded(text: str, width: int) -> list[str]:
    return [text] if _width(text) <= width else wrap(text, width, break_on_hyphens=False)


def _joined(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (
            part + " " * (wide - _width(part)) for part, wide in zip(parts, widths, strict=True)
        )
        yield GAP.join(padded).rstrip()


def _longest(texts: Sequence[str]) -> int:
    return max(map(_width, texts), default=1)


def _width(text: str) -> int:
    """In cells of a terminal, of which some characters take two and some none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))
