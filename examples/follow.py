"""A trainer, and rollouts that follow it, in two terminals or more:

    python examples/follow.py train
    python examples/follow.py follow

They find each other in the etcd of this host, or the one that TORCH_ROS_ENDPOINT names. Begin with
either, begin more rollouts, or end one: nobody waits for them. Ctrl-C ends a program after the
version that it is at. A rollout may have several ranks, which stop together, whoever is told:

    torchrun --standalone --nproc-per-node 2 examples/follow.py follow
"""

import argparse
import signal
import threading

import torch

import torch_ros

told = threading.Event()


def train(handle: torch_ros.ShardHandle, model: torch.nn.Module, step_s: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    handle.guard(optimizer)  # nobody reads what the optimizer writes
    version = max(handle.list(), default=0)
    while not told.wait(step_s):
        batch = torch.randn(512, 64)
        loss = (model(batch)[:, 0] - batch.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        version += 1
        handle.publish(version)
        print(f"version {version}: loss {loss.item():.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["train", "follow"])
    parser.add_argument("--model", default="follow-me")
    parser.add_argument("--step-s", type=float, default=1.0, help="between two versions")
    asked = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    with torch_ros.open(asked.model) as handle:
        handle.register(model)
        if asked.role == "train":
            train(handle, model, asked.step_s)
            return
        for version in handle.follow("latest", stop=told):
            answer = model(torch.full((1, 64), 0.125)).item()
            print(f"version {version}: {answer:.2f}, on the way to 8", flush=True)


if __name__ == "__main__":
    main()
