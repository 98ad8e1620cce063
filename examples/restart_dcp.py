"""A trainer of two ranks that saves with dcp, and begins again with the weights that rollouts have.

    torchrun --standalone --nproc-per-node 2 examples/restart_dcp.py     # Ctrl-C, kill -9, ...
    torchrun --standalone --nproc-per-node 2 examples/restart_dcp.py     # goes on from there

Beside it, a rollout keeps what it reads: python examples/follow.py follow --model restart-dcp
Rollouts have the model alone: keep the optimizer's state, if it has one, in checkpoints.
"""

import argparse
import time
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import torch_ros
from torch_ros.dcp import ROSWriter


def newest(handle: torch_ros.ShardHandle) -> int | None:
    """Read the newest version that anybody has, the same on all ranks; None: nobody has one."""
    for _ in range(10):
        try:
            return handle.replicate("latest", missing_ok=True, timeout_s=60)
        except torch_ros.errors.PeerError as lost:
            # A version of a trainer that was killed is offered until its lease ends, unreadable.
            print(f"not yet: {lost}", flush=True)
            time.sleep(2)
    raise SystemExit("no version can be read: begin from a checkpoint")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="restart-dcp")
    parser.add_argument("--steps", type=int, default=1000, help="in all, over all starts")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    fully_shard(model)
    first = deepcopy(model.state_dict())  # in your job a checkpoint, if there is one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)

    opened = partial(torch_ros.open, asked.model, replica="trainer", retain=("latest",))
    handle = opened()
    handle.register(model)
    version = newest(handle)
    if version is None:
        say("nobody has a version: begins anew")
        dist.barrier()  # a rank that has not asked yet would find that its replica has closed
        handle.close()
        model.load_state_dict(first)  # a read that failed may have left a part of a version
        # In a new run, numbers begin again. A rollout that lives keeps the old one from doing so.
        handle, version = opened(run="new"), 0
        handle.register(model)
    say(f"begins after version {version}")
    while version < asked.steps:
        batch = torch.randn(512, 64)
        loss = (model(batch)[:, 0] - batch.sum(1)).square().mean()
        loss.backward()
        handle.unpublish()  # what was read is offered, too: nobody reads what the optimizer writes
        optimizer.step()
        optimizer.zero_grad()
        version += 1
        dcp.save(model.state_dict(), storage_writer=ROSWriter(version, handle=handle))
        say(f"version {version}: loss {loss.item():.2f}")
        time.sleep(0.5)
    handle.close()  # a rollout that has not read the last version does so before this returns
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
