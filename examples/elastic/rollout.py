"""Follow the trainers, whoever they are by now, and keep what they may need again."""

import os
import sys

from model import build

import torch_ros
from torch_ros.errors import PeerError


def main() -> None:
    last, held = int(sys.argv[1]), 0
    model = build(seed=2)
    with torch_ros.open(os.environ["TORCH_ROS_MODEL"], replica="rollout") as handle:
        handle.register({f"model.{fqn}": tensor for fqn, tensor in model.state_dict().items()})
        print("waits for a first version", flush=True)
        while held < last:
            handle.wait(lambda available, held=held: max(available, default=0) > held)
            try:
                if not handle.update("latest"):
                    continue
            except PeerError:  # the trainers died while we read from them
                continue
            held = handle.version or held
            print(f"has version {held}", flush=True)
        # The trainers leave when they have seen that we have it.
        handle.wait(lambda available: len(available.get(last, ())) == 1)


if __name__ == "__main__":
    main()
