"""Tables of text, no wider than a terminal. Pure."""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import zip_longest

GAP = "  "

Row = Sequence[str]


def table(header: Row, rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """The lines of a table of at least one row; cells that do not fit are folded.

    Words are broken only where they must be. If even the words of the header do not fit, a row is a
    block: a line for each of its cells.

    Args:
        width: None: as wide as it has to be; a row is a line.
    """
    columns = list(zip(*rows, strict=True))
    heads = [_longest(head.split()) for head in header]
    if width is None:
        heads = list(map(_width, header))
    widths = list(map(max, heads, map(_longest, columns)))
    room = sum(widths) if width is None else width - len(GAP) * (len(header) - 1)
    if sum(widths) > room:
        words = (_longest(" ".join(column).split()) for column in columns)
        _narrow(widths, list(map(max, heads, words)), room)
        _narrow(widths, heads, room)
    if width is not None and sum(widths) > room:
        yield from _blocks(header, rows, width)
        return
    named = list(map(_folded, header, widths))
    height = max(map(len, named))
    yield from _joined([[""] * (height - len(each)) + each for each in named], widths)
    for row in rows:
        yield from _joined(list(map(_folded, row, widths)), widths)


def _narrow(widths: list[int], least: Sequence[int], room: int) -> None:
    """Take from the widest that may give, until they fit or none may."""
    while sum(widths) > room and widths != least:
        may_give = (at for at, width in enumerate(widths) if width > least[at])
        widths[max(may_give, key=widths.__getitem__)] -= 1


def _blocks(header: Row, rows: Sequence[Row], width: int) -> Iterator[str]:
    wide = _longest(header)
    widths = (wide, max(1, width - wide - len(GAP)))
    for number, row in enumerate(rows):
        if number:
            yield ""
        for head, cell in zip(header, row, strict=True):
            if cell:
                yield from _joined([[head], _folded(cell, widths[1])], widths)


def _joined(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for parts in zip_longest(*cells, fillvalue=""):
        yield GAP.join(map(_padded, parts, widths)).rstrip()


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _folded(text: str, width: int) -> list[str]:
    """In lines of that width, between words where that is possible."""
    if _width(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if _width(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and _width(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    return lines


def _longest(texts: Sequence[str]) -> int:
    return max(map(_width, texts), default=1)


def _width(text: str) -> int:
    """In cells of a terminal, of which some characters take two and some none."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
