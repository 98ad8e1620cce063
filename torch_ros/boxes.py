"""Boxes of a tensor's elements, as offsets and sizes: what two share, and what is left of one."""

from collections.abc import Iterator
from operator import sub

Offsets = tuple[int, ...]
Box = tuple[Offsets, Offsets]  # where it begins, and its sizes


def common(one: Box, other: Box) -> Box | None:
    """The box that two have in common."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = (min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True))
    sizes = tuple(map(sub, ends, offsets))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def outside(box: Box, hole: Box) -> Iterator[Box]:
    """The parts of a box around a hole in it, disjoint."""
    offsets, sizes = list(box[0]), list(box[1])
    for dim, (begin, size) in enumerate(zip(*hole, strict=True)):
        for start, stop in ((offsets[dim], begin), (begin + size, offsets[dim] + sizes[dim])):
            if start < stop:
                yield (
                    (*offsets[:dim], start, *offsets[dim + 1 :]),
                    (*sizes[:dim], stop - start, *sizes[dim + 1 :]),
                )
        offsets[dim], sizes[dim] = begin, size
