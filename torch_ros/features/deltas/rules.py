"""Whether a rank reads a version by deltas or in full: by which seems to take less time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ros.codec.delta import Piece
from torch_ros.costs import Costs

MARGIN = 0.6  # deltas are taken where they win clearly: a guess is easily wrong by a half
STAGED_SHARE = 0.25  # of the target's bytes: more is not staged
WAIT_SHARE = 0.5  # of a read in full, for a delta that is being made
MADE_BYTES_PER_S = 2.7e9  # of the copy: 0.4 s per GiB, at 1 %
# One thread of `benchmarks/delta.py`. Digests are made of all the memory either way.
CHANGES_PER_S = 50e6
STEP_S = 1e-4  # of a link and a piece, however few changes are there: Python and numpy


class Extent(NamedTuple):
    """The places of a source chunk that are needed: from the first to before the end."""

    first: int
    end: int


def reaches(pieces: Sequence[Piece]) -> dict[int, dict[int, Extent]]:
    """The places that the pieces need, by source rank and chunk. Columns need whole rows."""
    found: dict[int, dict[int, Extent]] = {}
    for piece in pieces:
        of_rank, own = found.setdefault(piece.source_rank, {}), (piece.place.first, piece.end)
        known = of_rank.get(piece.source_chunk, Extent(*own))
        of_rank[piece.source_chunk] = Extent(min(known.first, own[0]), max(known.end, own[1]))
    return found


@dataclass(frozen=True, slots=True)
class DeltaWork:
    """All that a rank reads of deltas, and writes because of them."""

    staged_bytes: int
    changed: int
    steps: int  # links times pieces


def full_s(bytes_total: int, costs: Costs) -> float:
    """The time of a read in full, without its digests."""
    return bytes_total / costs.read_bytes_per_s


def wait_s(copy_bytes: int, bytes_total: int, costs: Costs) -> float:
    """How long to wait for the delta of a copy of that size, to a target of that size.

    It is being made, and nobody says since when: it may have just begun.
    """
    most_s = WAIT_SHARE * full_s(bytes_total, costs)
    return most_s if copy_bytes / MADE_BYTES_PER_S <= most_s else 0.0


def are_faster(deltas: DeltaWork, bytes_total: int, costs: Costs) -> bool:
    """Whether deltas are, for a target of that size."""
    reading_s = deltas.staged_bytes / costs.read_bytes_per_s
    applying_s = deltas.changed / CHANGES_PER_S + deltas.steps * STEP_S
    is_small = deltas.staged_bytes <= STAGED_SHARE * bytes_total
    return is_small and reading_s + applying_s <= MARGIN * full_s(bytes_total, costs)
