"""Full tensors that a trainer gathers one after the other, published from memory kept for them."""

from collections.abc import Iterable

import torch

import torch_ros


class GatheredCopy:
    """Publishes whole tensors that come one by one, and may be gone once the next one is asked for.

    Each is copied as it comes. The ranks of the handle get the same tensors in the same order, as
    gathering makes it; each keeps those that even out the bytes, so that all of them together hold
    one copy, and serve it.

    Args:
        handle: Nothing else is registered or published with it. Stays the caller's.
        device: Where the copies lie; None: where the tensors do.
    """

    def __init__(self, handle: torch_ros.ShardHandle, device: str | None = "cpu") -> None:
        self._handle, self._device = handle, device
        self._kept: dict[str, torch.Tensor] = {}
        self._is_registered = False

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Offer copies of `weights` as `version`, in place of what is held.

        Collective. The version before is given up first: its memory is written again. After an
        error nothing is held, and the call may be repeated.

        Returns:
            The bytes that this rank has copied.

        Raises as `ShardHandle.unpublish`, `register` and `publish` do.
        """
        handle, loads = self._handle, [0] * self._handle.world_size
        handle.unpublish()
        kept: dict[str, torch.Tensor] = {}
        for fqn, tensor in weights:
            rank = loads.index(min(loads))
            loads[rank] += tensor.nbytes
            if rank == handle.rank:
                kept[fqn] = self._copied(fqn, tensor)
        if not self._are_registered(kept):
            self._is_registered = False
            handle.unregister()
            handle.register(kept)
            self._kept, self._is_registered = kept, True
        handle.publish(version)
        return sum(mine.nbytes for mine in kept.values())

    def _copied(self, fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        mine = self._kept.get(fqn)
        if mine is None or (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
            device = self._device or tensor.device
            mine = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return mine.copy_(tensor.detach())

    def _are_registered(self, kept: dict[str, torch.Tensor]) -> bool:
        is_same = kept.keys() == self._kept.keys()
        same = is_same and all(mine is self._kept[fqn] for fqn, mine in kept.items())
        return self._is_registered and same
