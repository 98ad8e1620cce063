"""Brings what is made on a device to host memory, piece by piece."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_ros.weights.local import copy_bits

CROSSING_MAX = 2  # one is copied on the host while the next one crosses


@dataclass(frozen=True, slots=True)
class _Crossing:
    tensors: Sequence[torch.Tensor]  # in host memory, there once the event has happened
    places: Sequence[torch.Tensor]
    event: torch.cuda.Event | None

    def land(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        for tensor, place in zip(self.tensors, self.places, strict=True):
            if tensor is not place:
                copy_bits(place, tensor)


class Ferry:
    """Pieces cross into pinned memory, on a stream of their own, while the next ones are made.

    Places that are pinned themselves are crossed into: UCX pins what is registered with it, so a
    copy buffer is, from its second version on.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: deque[_Crossing] = deque()

    def bring(self, made: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """Copy each tensor to its place in host memory; all are there when `land` has returned.

        Args:
            made: On one device, by its current stream; not written afterwards.
        """
        while len(self._under_way) >= CROSSING_MAX:
            self._under_way.popleft().land()
        self._under_way.append(self._begun(made, places))

    def land(self) -> None:
        while self._under_way:
            self._under_way.popleft().land()

    def _begun(self, made: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> _Crossing:
        stream = self._stream(made[0].device)
        is_pinned = stream is not None
        # torch keeps pinned memory for later pieces, and gives it out when its copy is over.
        tensors = [
            place
            if is_pinned and place.is_pinned() and place.is_contiguous()
            else torch.empty_like(each, device="cpu", pin_memory=is_pinned)
            for each, place in zip(made, places, strict=True)
        ]
        with torch.cuda.stream(stream):  # None: there is nothing to switch
            for tensor, crossing in zip(made, tensors, strict=True):
                copy_bits(crossing, tensor, non_blocking=is_pinned)
                if stream is not None:
                    tensor.record_stream(stream)
        return _Crossing(tensors, places, stream.record_event() if stream is not None else None)

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream for copies from that device, which now waits for its current one."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream
