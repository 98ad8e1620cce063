"""A trainer of two ranks that saves with dcp, and begins again with the weights that rollouts have.

    torchrun --standalone --nproc-per-node 2 examples/restart_dcp.py     # Ctrl-C, kill -9, ...
    torchrun --standalone --nproc-per-node 2 examples/restart_dcp.py     # goes on from there

Beside it, a rollout keeps what it reads: python examples/follow.py follow --model restart-dcp
Rollouts have the model alone: keep the optimizer's state, if it has one, in checkpoints.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import torch_ros
from torch_ros.dcp import ROSWriter, default_handle

STEPS = 1000


def begin(handle: torch_ros.ShardHandle, model: torch.nn.Module) -> int:
    """Read the newest version that anybody has, the same on all ranks; 0: nobody has one."""
    handle.register(model)
    for _ in range(10):
        try:
            return handle.replicate("latest", missing_ok=True, timeout_s=60) or 0
        except torch_ros.errors.PeerError as lost:
            # A version of a trainer that was killed is offered until its lease ends, unreadable.
            print(f"not yet: {lost}", flush=True)
            time.sleep(2)
    raise SystemExit("no version can be read: begin from a checkpoint")


def main() -> None:
    os.environ.setdefault("TORCH_ROS_MODEL", "restart-dcp")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    handle = default_handle("save")  # the one that dcp.save uses
    version = begin(handle, model)
    if dist.get_rank() == 0:
        print(f"begins after version {version}", flush=True)
    while version < STEPS:
        batch = torch.randn(512, 64)
        loss = (model(batch)[:, 0] - batch.sum(1)).square().mean()
        loss.backward()
        handle.unpublish()  # what was read is offered, too: nobody reads what the optimizer writes
        optimizer.step()
        optimizer.zero_grad()
        version += 1
        dcp.save(model.state_dict(), storage_writer=ROSWriter(version))
        if dist.get_rank() == 0:
            print(f"version {version}: loss {loss.item():.2f}", flush=True)
        time.sleep(0.5)
    handle.close()  # a rollout that has not read the last version does so before this returns
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
