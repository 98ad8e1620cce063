"""torch_ros, where nobody tells the rollouts: each waits in etcd for the version."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from peers import ros


class Rollout(ros.Rollout):
    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        self._handle.replicate(version)

    def forget(self) -> None:
        self._handle.unpublish()


PEER = dataclasses.replace(
    ros.PEER, name="torch_ros, rollouts wait in etcd", rollout=Rollout, together=True
)
