"""torch_ros: the trainer's tensors are read where they are, by rollouts that are told to."""

from collections.abc import Sequence
from typing import Any

from harness import etcd_at
from ours import settle

import peers
import torch_ros


def opened(place: peers.Place, replica: str) -> torch_ros.ShardHandle:
    return torch_ros.open(place.name, endpoint="local", replica=replica)


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._handle = opened(place, "trainer")
        self._handle.register(tensors)
        settle(self._handle)

    def publish(self, version: int) -> None:
        self._handle.publish(version)

    def release(self) -> None:
        self._handle.unpublish()

    def close(self) -> None:
        self._handle.close()


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        self._handle = opened(place, f"rollout {rank}")
        self._handle.register(tensors)
        settle(self._handle)

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        self._handle.update("latest")

    def close(self) -> None:
        self._handle.close()


PEER = peers.Peer(
    name="torch_ros, publish",
    package="torch-ros",
    trainer=Trainer,
    rollout=Rollout,
    lends=True,
    cases=("one", "four", "resharded"),
    services=lambda _: etcd_at("local"),
)
