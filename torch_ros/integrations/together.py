"""The steps that all ranks of an engine take together, or none."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar

import torch_ros
from torch_ros.errors import CallAborted, InstallRejected, TorchRosError
from torch_ros.integrations.seams import EngineRanks

T = TypeVar("T")


class Together:
    """This rank among those of its engine.

    Args:
        teller: The handle by which others are told of installs; None: nobody is.
    """

    def __init__(
        self, rank: int, peers: EngineRanks, teller: "torch_ros.ShardHandle | None"
    ) -> None:
        self.rank = rank
        self._peers, self._teller = peers, teller
        self._failed: int | None = None  # the rank of the last error, in its own words

    def gather(self, mine: T) -> Sequence[T]:
        """As `EngineRanks.gather`."""
        return self._peers.gather(mine)

    def step(self, step: Callable[[], T]) -> T:
        """A step that all ranks take, or none: they raise the error of the lowest that has one."""
        found: list[T] = []
        failed: Exception | None = None
        try:
            found.append(step())
        except Exception as error:  # noqa: BLE001  # raised below, on all ranks
            is_plain = isinstance(error, TorchRosError)
            failed = error if is_plain else RuntimeError(f"{type(error).__name__}: {error}")
            failed.__cause__ = None if is_plain else error
        self._failed = None
        for rank, each in enumerate(self.gather(failed)):
            if each is not None:
                self._failed = rank if failed is None else self.rank
                raise failed or each
        return found[0]

    def told(self, version: int, timeout_s: float, step: Callable[[], T]) -> T:
        """A step of all ranks, as an install that others are told of, if anybody is."""
        if (teller := self._teller) is None:
            return step()
        block = teller.installing(version, timeout_s=timeout_s)
        left = ExitStack()
        try:
            self.step(lambda: left.enter_context(block))
            found = step()
        except Exception as error:
            is_mine = self._failed in (None, self.rank)
            rank, reason = self._failed or 0, f"{type(error).__name__}: {error}"
            told = error if is_mine else CallAborted(teller.replica, 0, rank, reason)
            with suppress(InstallRejected):
                left.__exit__(type(told), told, None)
            raise
        self.step(left.close)
        return found
