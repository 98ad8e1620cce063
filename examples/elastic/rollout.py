"""Follow the trainers, whoever they are by now, and keep what they may need again."""

import os
import sys

import torch
from model import build

import torch_ros


def main() -> None:
    last = int(sys.argv[1])
    model = build(seed=2)
    with torch_ros.open(os.environ["TORCH_ROS_MODEL"], replica="rollout") as handle:
        handle.register(torch.nn.ModuleDict({"model": model}))
        print("waits for a first version", flush=True)
        for version in handle.follow("latest"):  # whatever becomes of the trainers meanwhile
            print(f"has version {version}", flush=True)
            if version >= last:
                break
        # The trainers leave when they have seen that we have it.
        handle.wait(lambda available: len(available.get(last, ())) == 1)


if __name__ == "__main__":
    main()
