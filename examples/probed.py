"""A rollout for a supervisor that probes it, and tells it to go, as Kubernetes does:

    python examples/follow.py train --model probe-me
    python examples/probed.py --model probe-me --replica rollout-0
    torch-ros ready --model probe-me --replica rollout-0

It is ready while it has a version to answer with. SIGTERM has it `leave`: readers in the middle of
a read may finish, for some seconds. What comes then goes elsewhere.
"""

import argparse
import signal
import threading

import torch

import torch_ros
from torch_ros.errors import ClosedError, NotAvailable, PeerError

FOREVER_S = 1e9
told = threading.Event()


def leave(handle: torch_ros.ShardHandle, within_s: float) -> None:
    told.wait()
    handle.leave(within_s=within_s)  # then the calls of `follow` raise ClosedError


def follow(handle: torch_ros.ShardHandle, model: torch.nn.Module) -> None:
    held: int | None = None

    def is_new(there: dict[int, set[str]]) -> bool:
        return bool(there) and max(there) != held

    while True:
        handle.wait(is_new, timeout_s=FOREVER_S)
        try:
            with handle.installing("latest") as new:
                handle.update(new.version)
        except (NotAvailable, PeerError) as error:  # it went meanwhile, or its source
            print(f"not yet: {error}", flush=True)
            continue
        held = new.version
        answer = model(torch.full((1, 64), 0.125)).item()
        print(f"version {held}: {answer:.2f}, on the way to 8", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="probe-me")
    parser.add_argument("--replica", default="rollout-0")
    parser.add_argument("--within-s", type=float, default=20.0, help="for readers, when it leaves")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    with torch_ros.open(asked.model, replica=asked.replica, installs=True) as handle:
        handle.register(model)
        threading.Thread(target=leave, args=(handle, asked.within_s), daemon=True).start()
        try:
            follow(handle, model)
        except ClosedError:
            print("has left", flush=True)


if __name__ == "__main__":
    main()
