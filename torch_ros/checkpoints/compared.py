"""Which elements differ between two versions, or a version and a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

Named = tuple[str, torch.Tensor]
Shapes = Mapping[str, tuple[torch.dtype, torch.Size]]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same in both.

    Attributes:
        changed: How many elements have other bits; None: they cannot be compared, `why`.
    """

    name: str
    changed: int | None
    count: int
    why: str = ""


def unlike(one: Shapes, other: Shapes) -> Iterator[Difference]:
    """The tensors that only one of them has, or that have another dtype or shape in the other."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            which = "second" if name in other else "first"
            yield Difference(name, None, 0, f"only the {which} has it")
        elif one[name] != other[name]:
            kinds = (f"{dtype} {list(shape)}" for dtype, shape in (one[name], other[name]))
            yield Difference(name, None, 0, " and ".join(kinds))


def differences(one: Iterable[Named], other: Iterable[Named]) -> Iterator[Difference]:
    """The tensors of which elements differ, bit for bit; both come in the same order."""
    for (name, left), (same, right) in zip(one, other, strict=True):
        assert name == same
        changed = int((_bits(left) != _bits(right)).any(-1).sum()) if left.numel() else 0
        if changed:
            yield Difference(name, changed, left.numel())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Each element as a row of whole numbers, so that NaNs are what they are."""
    width = min(tensor.itemsize, max(WORDS))
    words = tensor.contiguous().view(-1).view(torch.uint8).view(WORDS[width])
    return words.view(tensor.numel(), -1)
