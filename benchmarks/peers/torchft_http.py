"""torchft's HTTPTransport: the trainer serves its state dict, and rollouts copy what they fetch."""

from collections.abc import Sequence
from datetime import timedelta

from torchft.checkpointing import HTTPTransport

import peers

LIMIT = timedelta(seconds=60)


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._transport = HTTPTransport(LIMIT, num_chunks=0)

    def publish(self, version: int) -> str:
        everyone = [1 + number for number in range(self.place.rollouts)]
        self._transport.send_checkpoint(everyone, version, dict(self.tensors), LIMIT)
        return self._transport.metadata()

    def release(self) -> None:
        self._transport.disallow_checkpoint()

    def close(self) -> None:
        self._transport.shutdown(wait=False)


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._transport = HTTPTransport(LIMIT, num_chunks=0)

    def receive(self, version: int, tickets: Sequence[str]) -> None:
        [address] = tickets
        peers.copy(self._transport.recv_checkpoint(0, address, version, LIMIT), self.tensors)

    def close(self) -> None:
        self._transport.shutdown(wait=False)


PEER = peers.Peer(
    name="torchft, HTTP", package="torchft", trainer=Trainer, rollout=Rollout, lends=True
)
