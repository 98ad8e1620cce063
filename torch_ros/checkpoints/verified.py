"""Whether the replicas of a version have the same bits, and a checkpoint on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch_ros.checkpoints.compared import Named
from torch_ros.weights.digest import digest

Digests = Mapping[str, int]  # of whole tensors, by fqn


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
