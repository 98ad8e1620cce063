"""The seam at which copies are made for a save, and features attend them until publication."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_ros.transfer.registered import LocalState


class Attendant:
    """A feature's part in one copy: told of it, in this order. Each method does nothing here."""

    def begins(
        self, chunks: Iterable[tuple[str, torch.device]], objects: Mapping[str, torch.Tensor]
    ) -> None:
        """A buffer is about to be filled: by these chunks, each with the device of its copy.

        Raises: UsageError: Not with these.
        """

    def pool(self, copy_bytes: int) -> torch.Tensor | None:
        """Memory to be registered with a copy of that size, if there is some."""
        return None

    def shown(self, registered: LocalState) -> None:
        """The copy is registered. The word is 0: nobody may read it yet."""

    def more(self, uid: str, *, is_offered: bool) -> Mapping[str, int]:
        """The addresses that readers of this content shall know, by name: it is shown next.

        Args:
            is_offered: The content is, once the call ends; False: only when etcd is back.
        """
        return {}

    def published(self, uid: str, *, is_offered: bool) -> None:
        """The copy is held as this content. Does not raise."""


@dataclass(frozen=True, slots=True)
class Copier:
    """Makes the copy that a save publishes.

    Args:
        transforms: Make its tensors. The ranks of a replica compare the `repr` of each.
        more: Options of features, each in its own class.
        fill: Makes the copy of a state dict, in memory that no reader uses. Raises a UsageError if
            there can be none.
        turn: Called before it is shown: readers will use it, and nobody the one before.
    """

    transforms: Sequence[object]
    more: tuple[object, ...]
    fill: Callable[[LocalState, Sequence[Attendant]], LocalState]
    turn: Callable[[], None]
