"""Draws docs/pictures: what a replica is, how a burst of rollouts reads, and what the word is for.

    python docs/pictures.py

A picture follows the colour scheme of its reader.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = Path(__file__).with_suffix("")
WIDTH = 920
# A colour's name, in light mode and in dark mode.
COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2933", "#e6edf3"),
    "quiet": ("#5f6c7b", "#9aa7b4"),
    "faint": ("#d5dbe1", "#353d47"),
    "bytes": ("#c8450c", "#ff9a5c"),
    "records": ("#1864ab", "#6cb6ff"),
}

Point = tuple[int, int]
Box = tuple[int, int, int, int]  # x, y, width, height


def text(at: Point, said: str, size: int = 13, colour: str = "ink", *more: str) -> str:
    style = " ".join((f'font-size="{size}"', f'class="{colour}"', *more))
    return f'<text x="{at[0]}" y="{at[1]}" text-anchor="middle" {style}>{said}</text>'


def code(at: Point, said: str, size: int = 12, colour: str = "ink") -> str:
    return text(at, said, size, colour, 'font-family="monospace"')


def title(at: Point, said: str, colour: str = "ink") -> str:
    return text(at, said, 15, colour, 'font-weight="600"')


def box(place: Box, colour: str, *more: str) -> str:
    x, y, width, height = place
    style = " ".join((f'class="paper {colour}-line"', 'stroke-width="1.5"', *more))
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {style}/>'


def bar(place: Box, colour: str) -> str:
    x, y, width, height = place
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{colour}"/>'


def arrow(start: Point, end: Point, colour: str, width: float, *more: str) -> str:
    (x, y), (to_x, to_y) = start, end
    style = " ".join((f'class="{colour}-line"', f'stroke-width="{width}"', *more))
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" {style} marker-end="url(#{colour})"/>'


def look(start: Point, to_y: int) -> str:
    style = 'class="quiet-line" stroke-width="1.5" stroke-dasharray="4 4"'
    return f'<line x1="{start[0]}" y1="{start[1]}" x2="{start[0]}" y2="{to_y}" {style}/>'


def head(name: str, size: int) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" '
        f'markerHeight="{size}" orient="auto"><path d="M0 0 10 5 0 10z" class="{name}"/></marker>'
    )


def scheme(of: int) -> str:
    """The classes of one scheme: the name of a colour fills, with `-line` it is the stroke."""
    fills = (f".{name}{{fill:{both[of]}}}" for name, both in COLOURS.items())
    lines = (f".{name}-line{{stroke:{both[of]}}}" for name, both in COLOURS.items())
    return "".join((*fills, *lines))


def page(height: int, parts: list[str]) -> str:
    lines = "\n".join(parts)
    style = f"{scheme(0)}@media(prefers-color-scheme:dark){{{scheme(1)}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif">\n<style>{style}</style>\n'
        f"<defs>{head('bytes', 4)}{head('records', 7)}</defs>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="10" class="paper"/>\n{lines}\n</svg>\n'
    )


CELL, ROWS, COLUMNS = 20, 4, 2


def process(at: Point, rank: int, by: str) -> list[str]:
    """A process, with the matrix of a model of which it has one of the rows, or columns."""
    x, y = at
    parts = [box((x, y, 92, 132), "ink"), text((x + 46, y + 20), f"rank {rank}", 13)]
    left = x + 46 - COLUMNS * CELL // 2
    for row in range(ROWS):
        for column in range(COLUMNS):
            is_ours = rank == (row if by == "rows" else column)
            colour = "bytes" if is_ours else "faint"
            where = (left + column * CELL, y + 30 + row * CELL, CELL - 2, CELL - 2)
            parts.append(bar(where, colour))
    return [*parts, text((x + 46, y + 126), "shard", 12, "bytes")]


def replica() -> str:
    """Two replicas of one version, in two shardings, with their seats in etcd."""
    etcd = (230, 16, 460, 92)
    parts = [
        box(etcd, "records"),
        title((460, 38), "etcd", "records"),
        code((460, 60), "version 7 is held by trainer, rollout-1"),
        code((460, 78), "trainer:   seats of ranks 0, 1, 2, 3"),
        code((460, 96), "rollout-1: seats of ranks 0, 1      "),
        box((20, 190, 464, 184), "quiet", 'stroke-dasharray="6 5"'),
        box((636, 190, 264, 184), "quiet", 'stroke-dasharray="6 5"'),
        title((252, 214), "replica trainer: FSDP2, shards of rows"),
        title((768, 214), "replica rollout-1: TP, columns"),
    ]
    for rank in range(4):
        x = 36 + rank * 113
        parts += process((x, 228), rank, "rows")
        seat = ((x + 46, 184), (250 + rank * 70, 114))
        parts.append(arrow(*seat, "records", 1.3, 'stroke-dasharray="5 4"'))
    for rank in range(2):
        x = 664 + rank * 116
        parts += process((x, 228), rank, "columns")
        seat = ((x + 46, 184), (600 + rank * 70, 114))
        parts.append(arrow(*seat, "records", 1.3, 'stroke-dasharray="5 4"'))
    parts += [
        text((104, 132), "a seat for each rank,", 13, "records"),
        text((104, 149), "on its lease", 13, "records"),
        arrow((492, 294), (628, 294), "bytes", 4),
        text((560, 276), "NIXL reads", 13, "bytes"),
        text((560, 318), "each rank reads", 12, "quiet"),
        text((560, 334), "what its own", 12, "quiet"),
        text((560, 350), "shard needs", 12, "quiet"),
    ]
    return page(390, parts)


PROCESSES = (
    (24, "trainer", "FSDP2, 8 ranks", "dcp.save(...)", "7: all of it"),
    (258, "rollout 1", "TP, 2 ranks", 'replicate("latest")', "7: all of it"),
    (492, "rollout 2", "TP, 4 ranks", 'update("latest")', "7: half of it"),
    (726, "rollout 3", "one process", "dcp.load(...)", "7: a third"),
)


def chain() -> str:
    """Rollouts that read one version at the same moment."""
    top, width, height = 190, 170, 96
    etcd_x, etcd_y, etcd_width = 320, 20, 280
    parts = [
        box((etcd_x, etcd_y, etcd_width, 70), "records"),
        title((WIDTH // 2, etcd_y + 28), "etcd", "records"),
        text((WIDTH // 2, etcd_y + 50), "who holds 7, who reads it from whom", 13),
    ]
    for at, (x, name, shape, call, word) in enumerate(PROCESSES):
        middle = x + width // 2
        parts += [
            box((x, top, width, height), "ink"),
            title((middle, top + 24), name),
            text((middle, top + 43), shape, 12, "quiet"),
            code((middle, top + 61), call, 11),
            box((x + 22, top + 70, width - 44, 18), "bytes"),
            text((middle, top + 83), f"word: {word}", 11, "bytes"),
        ]
        record = ((middle, top - 4), (etcd_x + (at * 2 + 1) * etcd_width // 8, etcd_y + 74))
        parts.append(arrow(*record, "records", 1.3, 'stroke-dasharray="5 4"'))
        if at:
            y = top + height // 2
            parts.append(arrow((x - 60, y), (x - 4, y), "bytes", 4))
    parts += [
        text((150, 130), "records and leases", 12, "records"),
        text((WIDTH // 2, 312), "NIXL moves the bytes, from memory to memory.", 13, "bytes"),
        text(
            (WIDTH // 2, 331),
            "Each reads from its neighbour. Rollout 2 is a relay: it is read from while it reads.",
            12,
            "quiet",
        ),
    ]
    return page(346, parts)


def word() -> str:
    """Two reads of a source: one ends before the source writes its tensors, one after."""
    left, unpublished, cleared, right = 150, 480, 580, 890
    parts = [
        *(
            text((76, y), said, 14, "ink", 'font-weight="600"')
            for y, said in (
                (49, "trainer"),
                (93, "its word"),
                (171, "rollout A"),
                (251, "rollout B"),
            )
        ),
        box((left, 28, unpublished - left, 34), "ink"),
        text(((left + unpublished) // 2, 50), "version 7 is published"),
        code(((unpublished + cleared) // 2, 50), "unpublish"),
        box((cleared, 28, right - cleared, 34), "ink"),
        text(((cleared + right) // 2, 50), "the optimizer writes the tensors"),
        bar((left, 76, cleared - left, 24), "bytes"),
        text(((left + cleared) // 2, 93), "7, all of it", 13, "paper"),
        bar((cleared, 76, right - cleared, 24), "faint"),
        text(((cleared + right) // 2, 93), "0: nothing that is read now counts", 13),
        text((76, 268), "(it stood still", 12, "quiet"),
        text((76, 283), "for a minute)", 12, "quiet"),
    ]
    for y, start, end, verdict, so in (
        (166, 190, 350, "the word is 7:", "these bytes count"),
        (246, 410, 700, "the word is 0: none counts;", "B reads from another source"),
    ):
        parts += [
            arrow((start, y), (end, y), "bytes", 4),
            text(((start + end) // 2, y - 12), "reads bytes", 12, "bytes"),
            look((end + 12, y + 6), 104),
            text((end + 105, y - 6), verdict, 12),
            text((end + 105, y + 11), so, 12),
        ]
    parts += [
        arrow((left, 300), (right, 300), "records", 1.3),
        text((right - 20, 319), "time", 12, "quiet"),
        text((430, 319), "A reader looks at the word after its bytes have landed.", 13, "quiet"),
    ]
    return page(334, parts)


PICTURES: Mapping[str, Callable[[], str]] = {
    "replica.svg": replica,
    "chain.svg": chain,
    "word.svg": word,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
