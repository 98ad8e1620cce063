"""A copy of a version in host memory, that outlives the tensors it was made from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_ros.exchange import EVERYTHING, Offer
from torch_ros.p2p.transport import HOST, Region, Transport
from torch_ros.store.records import Kept
from torch_ros.weights.local import packed
from torch_ros.weights.manifest import Layout


class HostCopy:
    """One rank's part: contiguous chunks, shown by an offer of their own, until `close`.

    Args:
        memory: Of each chunk of `layout`; copied before this returns.
        call: The number of the group's call that made it, which readers see.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        memory: Sequence[torch.Tensor],
        kept: Kept,
        call: int,
    ) -> None:
        self.kept, self.call = kept, call
        self.is_kept = False  # a thread sees to it that it is offered for as long as needed
        self._chunks = [torch.empty(t.shape, dtype=t.dtype) for t in memory]
        for chunk, tensor in zip(self._chunks, memory, strict=True):
            chunk.copy_(tensor)
        self.offer = Offer(transport)
        regions = {
            Region(chunk.data_ptr(), chunk.numel() * chunk.element_size()) for chunk in self._chunks
        }
        ordered = sorted(regions, key=lambda region: region.address)
        addresses = [chunk.data_ptr() for chunk in self._chunks]
        self.offer.show(packed(layout), addresses, [HOST] * len(addresses), ordered)
        self.offer.serve(call, EVERYTHING)

    def close(self) -> None:
        """Show it no more, and free it."""
        self.offer.void()
        self.offer.close()
        self._chunks.clear()
