"""Where versions, replicas of one, or a version and a checkpoint on disk have other bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch

from torch_ros.weights.digest import digest
from torch_ros.weights.local import WORDS

Named = tuple[str, torch.Tensor]
Shapes = Mapping[str, tuple[torch.dtype, torch.Size]]
Digests = Mapping[str, int]  # of whole tensors, by fqn


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
    width = WORDS[min(tensor.itemsize, 8)]
    words = tensor.contiguous().view(-1).view(torch.uint8).view(width)
    return words.view(tensor.numel(), -1)


@dataclass(frozen=True, slots=True)
class Deviation:
    """A tensor of which one replica has other bits than `others`, who have the same."""

    name: str
    replica: str
    others: tuple[str, ...]


def digests_of(tensors: Iterable[Named]) -> Digests:
    """Digests of every bit. Tensors may come one after the other, in one buffer."""
    return {
        name: digest(tensor, global_shape=tensor.shape, offsets=(0,) * tensor.dim(), depth="full")
        for name, tensor in tensors
    }


def deviations(found: Mapping[str, Digests], trusted: Collection[str] = ()) -> Iterator[Deviation]:
    """The tensors that are not the same everywhere, by the replicas that have other bits than most.

    Args:
        found: The bits that each of them has; in doubt those that come first are right.
        trusted: Those of them that are right, whatever the others have.
    """
    for name in sorted(set(chain.from_iterable(found.values()))):
        has = {replica: digests[name] for replica, digests in found.items() if name in digests}
        judges = [value for replica, value in has.items() if not trusted or replica in trusted]
        if not judges:
            continue
        [(right, _)] = Counter(judges).most_common(1)
        others = tuple(replica for replica, value in has.items() if value == right)
        for replica, value in has.items():
            if value != right:
                yield Deviation(name, replica, others)
