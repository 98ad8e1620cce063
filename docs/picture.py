"""Draws docs/picture.svg: a trainer, etcd, and a chain of rollouts. Run it after a change here."""

from pathlib import Path

INK, QUIET, PAPER = "#1f2933", "#7b8794", "#ffffff"
BYTES, RECORDS = "#d9480f", "#1971c2"
WIDTH, HEIGHT = 920, 340
TOP, BOX_WIDTH, BOX_HEIGHT = 190, 170, 96
PROCESSES = (
    (24, "trainer", "FSDP2, 8 ranks", "dcp.save(...)", "7: all of it"),
    (258, "rollout 1", "TP, 2 ranks", 'replicate("latest")', "7: all of it"),
    (492, "rollout 2", "TP, 4 ranks", 'update("latest")', "7: half of it"),
    (726, "rollout 3", "one process", "dcp.load(...)", "7: a third"),
)

Point = tuple[int, int]


def text(x: int, y: int, said: str, size: int = 13, colour: str = INK, *more: str) -> str:
    style = " ".join((f'font-size="{size}"', f'fill="{colour}"', *more))
    return f'<text x="{x}" y="{y}" text-anchor="middle" {style}>{said}</text>'


def box(x: int, y: int, width: int, height: int, colour: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" '
        f'fill="{PAPER}" stroke="{colour}" stroke-width="1.5"/>'
    )


def arrow(
    start: tuple[int, int], end: tuple[int, int], colour: str, width: float, *more: str
) -> str:
    (x, y), (to_x, to_y) = start, end
    style = " ".join((f'stroke="{colour}"', f'stroke-width="{width}"', *more))
    head = "bytes" if colour == BYTES else "records"
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" {style} marker-end="url(#{head})"/>'


def head(name: str, colour: str, size: int) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" '
        f'markerHeight="{size}" orient="auto"><path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
    )


def process(x: int, name: str, shape: str, call: str, word: str) -> list[str]:
    middle = x + BOX_WIDTH // 2
    return [
        box(x, TOP, BOX_WIDTH, BOX_HEIGHT, INK),
        text(middle, TOP + 24, name, 15, INK, 'font-weight="600"'),
        text(middle, TOP + 43, shape, 12, QUIET),
        text(middle, TOP + 61, call, 11, INK, 'font-family="monospace"'),
        box(x + 22, TOP + 70, BOX_WIDTH - 44, 18, BYTES),
        text(middle, TOP + 83, f"word: {word}", 11, BYTES),
    ]


def picture() -> str:
    etcd_x, etcd_y, etcd_width = 320, 20, 280
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>',
        box(etcd_x, etcd_y, etcd_width, 70, RECORDS),
        text(WIDTH // 2, etcd_y + 28, "etcd", 16, RECORDS, 'font-weight="600"'),
        text(WIDTH // 2, etcd_y + 50, "who holds 7, who reads it from whom", 13),
    ]
    for at, (x, name, shape, call, word) in enumerate(PROCESSES):
        parts += process(x, name, shape, call, word)
        top = (x + BOX_WIDTH // 2, TOP - 4)
        bottom = (etcd_x + (at * 2 + 1) * etcd_width // 8, etcd_y + 74)
        parts.append(arrow(top, bottom, RECORDS, 1.3, 'stroke-dasharray="5 4"'))
        if at:
            y = TOP + BOX_HEIGHT // 2
            parts.append(arrow((x - 64 + 4, y), (x - 4, y), BYTES, 4))
    parts += [
        text(150, 130, "records and leases", 12, RECORDS),
        text(WIDTH // 2, HEIGHT - 28, "NIXL moves the bytes, from memory to memory.", 13, BYTES),
        text(
            WIDTH // 2,
            HEIGHT - 10,
            "Each rollout serves what it has while it reads the rest; a reader believes its bytes "
            "if the source's word still says 7.",
            12,
            QUIET,
        ),
    ]
    lines = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif">\n'
        f"<defs>{head('bytes', BYTES, 4)}{head('records', RECORDS, 7)}</defs>\n{lines}\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
