"""How far a read has come, as `--deep` found it. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_ros.fleet.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Headway:
    """Of the read of one replica, all ranks together.

    Attributes:
        bytes_done, bytes_total: None: a rank did not answer, or shows nothing.
        bytes_per_s: Between two looks; None: likewise.
        problem: Why they are not known.
    """

    bytes_done: int | None = None
    bytes_total: int | None = None
    bytes_per_s: float | None = None
    problem: str = ""


Look = Callable[[Fleet], Mapping[str, Headway]]  # of those that fill, by `inst`


def text(made: Headway) -> str:
    """In the place of the state."""
    if made.bytes_done is None or made.bytes_total is None:
        return "filling ?"
    share = made.bytes_done / made.bytes_total if made.bytes_total else 1.0
    return f"{share:.0%} {(made.bytes_per_s or 0) / 1e9:.2f} GB/s"


@dataclass(frozen=True, slots=True)
class Position:
    """Where one rank was, and when.

    Attributes:
        mark: Of the call; 0: it shows nothing.
    """

    at_s: float
    mark: int
    bytes_done: int
    bytes_total: int


def summed(looks: Sequence[tuple[Position, Position]]) -> Headway:
    """The headway of a replica, of two looks at each of its ranks."""
    if not all(later.mark for _, later in looks):
        return Headway(problem="a rank shows no position: it rests, begins, or has just ended")
    done = sum(later.bytes_done for _, later in looks)
    rates = (
        (later.bytes_done - first.bytes_done) / (later.at_s - first.at_s)
        for first, later in looks
        if first.mark == later.mark and later.at_s > first.at_s
    )
    return Headway(done, sum(later.bytes_total for _, later in looks), sum(rates))


def listed(found: Mapping[str, Headway]) -> list[dict[str, Any]]:
    """For --json; `found` by `inst`, as in the fleet's `held`."""
    return [{"inst": inst, **asdict(found[inst])} for inst in sorted(found)]
