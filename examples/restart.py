"""A trainer that begins again where it ended, with the weights that rollouts still have.

    python examples/restart.py       # Ctrl-C, kill -9, or however it ends
    python examples/restart.py       # goes on from the last version that anybody has

Beside it, a rollout keeps what it reads: python examples/follow.py follow --model restart-me
With TORCH_ROS_BUCKET, or open(bucket=...), it goes on from there when everybody has gone.
"""

import argparse
import time
from copy import deepcopy
from functools import partial

import torch

import torch_ros


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="restart-me")
    parser.add_argument("--steps", type=int, default=1000, help="in all, over all starts")
    asked = parser.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    first = deepcopy(model.state_dict())  # in your job a checkpoint, if there is one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    # `retain`: should it end in order, the last version stays until a rollout has it.
    opened = partial(torch_ros.open, asked.model, replica="trainer", retain=("latest",))
    handle = opened()
    handle.register(model)
    version = newest(handle)
    if version is None:
        print("nobody has a version: begins anew", flush=True)
        handle.close()
        model.load_state_dict(first)  # a read that failed may have left a part of a version
        # In a new run, numbers begin again. A rollout that lives keeps the old one from doing so.
        handle, version = opened(run="new"), 0
        handle.register(model)
    source = handle.last_read.source if handle.last_read is not None else "nobody"
    print(f"begins after version {version}, read from {source}", flush=True)
    with handle:
        handle.guard(optimizer)  # unpublishes what was read, too, before the first step
        while version < asked.steps:
            batch = torch.randn(512, 64)
            loss = (model(batch)[:, 0] - batch.sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            version += 1
            handle.publish(version)
            print(f"version {version}: loss {loss.item():.2f}", flush=True)
            time.sleep(0.5)


if __name__ == "__main__":
    main()
