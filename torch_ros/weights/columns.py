"""Arrays with one row per thing, and functions for them that numpy lacks."""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    def take(self, rows: Ints | Bools) -> Self:
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))


def outermost_first(by: Ints, *columns: Ints) -> list[Ints]:
    """`columns` with the dimensions of each row by falling stride in `by`."""
    order = np.argsort(-by, axis=1, kind="stable")
    return [np.take_along_axis(column, order, 1) for column in columns]


def numbered(counts: Ints) -> tuple[Ints, Ints]:
    """For the things of each owner in turn: the owner, and the number among its own, from 0. Of
    counts 2, 0, 3: the owners 0, 0, 2, 2, 2, and the numbers 0, 1, 0, 1, 2.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - sum_before(counts)[owner]


def sum_before(values: Ints) -> Ints:
    """The sum of all earlier rows."""
    return np.cumsum(values) - values


def sum_after(values: Ints) -> Ints:
    """The sum of all later columns."""
    return values[:, ::-1].cumsum(1)[:, ::-1] - values


def group_starts(*columns: npt.NDArray[np.generic]) -> Ints:
    """The rows that differ from the row before, the first included."""
    differs = np.ones(len(columns[0]), np.bool_)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differs)


def distinct(column: Ints) -> Ints:
    """The values, in order. np.unique imports numpy.ma for it: 10 ms and a MiB of a first read."""
    ordered = np.sort(column)
    return ordered[group_starts(ordered)]
