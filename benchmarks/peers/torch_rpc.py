"""torch.distributed.rpc: a rollout calls a function of the trainer's and copies the result."""

from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

import peers

held: dict[str, peers.Tensors] = {}  # the functions of a process know only globals


def weights() -> peers.Tensors:
    return held["weights"]


def join(place: peers.Place, name: str, rank: int) -> None:
    rendezvous = f"file://{place.directory}/rpc"
    options = rpc.TensorPipeRpcBackendOptions(init_method=rendezvous)
    size = 1 + place.rollouts
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


class Trainer(peers.Trainer):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        held["weights"] = dict(tensors)
        join(place, "trainer", 0)

    def close(self) -> None:
        rpc.shutdown()


class Rollout(peers.Rollout):
    def __init__(self, place: peers.Place, rank: int, tensors: peers.Tensors) -> None:
        super().__init__(place, rank, tensors)
        join(place, f"rollout {rank}".replace(" ", "-"), 1 + rank)

    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        peers.copy(rpc.rpc_sync("trainer", weights), self.tensors)

    def close(self) -> None:
        rpc.shutdown()


PEER = peers.Peer(name="torch RPC", package="torch", trainer=Trainer, rollout=Rollout, lends=True)
