"""Writes that torch counts: whether tensors were written to since they were offered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch.distributed.tensor import DTensor

from torch_ros.transfer.named import local_of

_count = attrgetter("_version")
_impl = attrgetter("_cdata")  # where torch has what it knows of a tensor, its count too


@dataclass(frozen=True, slots=True)
class Write:
    """A finding: a tensor was written to, or its memory was freed for others.

    Attributes:
        is_certain: The write was to this very memory. It may not be: a DTensor and its local tensor
            are counted apart, views of one storage and aliases (`detach()`) together.
    """

    what: str
    is_certain: bool


class Counts:
    """How often torch has counted a write to tensors, when they were offered.

    Not counted are writes through `.data`, by fused optimizers, by replays of CUDA graphs, by
    kernels of one's own and by other processes; nor any to a tensor made in inference mode.

    Args:
        tensors: The user's own where `is_own`; else others that are the same memory.
        names: By the address of a tensor's first element.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], names: Mapping[int, str], *, is_own: bool
    ) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._names, self._is_own = names, is_own
        self._firsts = [local_of(tensor).data_ptr() for tensor in self._tensors]
        self._impls = list(map(_impl, self._tensors))
        self.note()

    def note(self) -> None:
        """They are offered from now on."""
        self._before = list(map(_count, self._tensors))

    def since(self) -> Write | None:
        """The first tensor that was written to since; None: none that is counted."""
        if self._before == list(map(_count, self._tensors)):
            return None
        noted = zip(self._tensors, self._impls, self._firsts, self._before, strict=True)
        found = [
            self._write(tensor, first, _count(tensor) - before)
            for tensor, impl, first, before in noted
            # Another one in its place (`swap_tensors`) has a count of its own.
            if _count(tensor) > before and _impl(tensor) == impl
        ]
        certain = (write for write in found if write.is_certain)
        return next(certain, None) or next(iter(found), None)

    def _write(self, tensor: torch.Tensor, first: int, times: int) -> Write:
        is_all = not isinstance(tensor, DTensor) and (
            tensor.untyped_storage().nbytes() == tensor.nbytes
        )
        # Elsewhere by now (`p.data = ...`), it may have been written there.
        is_there = local_of(tensor).data_ptr() == first
        what = f"torch has counted {times} writes to tensor {self._names.get(first, '?')!r}"
        return Write(what, self._is_own and is_all and is_there)
