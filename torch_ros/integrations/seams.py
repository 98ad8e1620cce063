"""The neighbours of an installer: an engine, and the ranks of that."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from torch_ros.integrations.landing_plan import Obstacle
from torch_ros.integrations.landings import Recording

Weights = Iterator[tuple[str, torch.Tensor]]
Contents = Mapping[str, tuple[torch.dtype, Sequence[int]]]
T = TypeVar("T")


class Engine(Protocol):
    """An engine's weights, as the one file that knows the engine sees them."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers under each of their names, as they are now."""

    def record(self, contents: Contents) -> Recording:
        """Where the engine's loader puts these tensors."""

    def obstacles(self, recording: Recording) -> Mapping[str, Obstacle]:
        """The parameters that are not read into."""

    def may_lack(self, fqn: str) -> bool:
        """Whether these ranks may be without a part of it: it is derived, or somebody else's."""

    def load(self, modules: Iterable[str], weights: Weights) -> None:
        """Load these through the engine's loader, which makes these modules anew.

        A tensor is valid until the next one is asked for.
        """


class EngineRanks(Protocol):
    """The processes of one engine, which install a version together."""

    def gather(self, mine: T) -> Sequence[T]:
        """The answers of all ranks, in their order; the same on all of them."""


class Alone:
    """An engine of one process."""

    def gather(self, mine: T) -> Sequence[T]:
        return [mine]
