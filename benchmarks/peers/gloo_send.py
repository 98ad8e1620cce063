"""torch.distributed: each tensor is sent to each rollout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from peers import gloo_broadcast


class Trainer(gloo_broadcast.Trainer):
    def publish(self, version: int) -> None:  # noqa: ARG002
        for tensor in self.tensors.values():
            sent = [dist.isend(tensor, 1 + number) for number in range(self.place.rollouts)]
            for each in sent:
                each.wait()


class Rollout(gloo_broadcast.Rollout):
    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        for tensor in self.tensors.values():
            dist.recv(tensor, 0)


PEER = dataclasses.replace(
    gloo_broadcast.PEER, name="gloo, send and recv", trainer=Trainer, rollout=Rollout
)
