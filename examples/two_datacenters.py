"""A trainer in the west, and four rollouts in the east that go on while versions come.

    TORCH_ROS_ENDPOINT=etcd://...  python examples/two_datacenters.py trainer      # in the west
    TORCH_ROS_ENDPOINT=etcd://...  python examples/two_datacenters.py rollouts     # in the east

Two shells of one machine do as well, with no endpoint at all. Each version crosses the link between
the two once: the host memory of one rollout fetches it, and all four read it there. The trainer
takes its tensors back as soon as somebody reads them, and waits for a copy to host memory, not for
the link. (Bytes that are on their way in that moment are read again: at most 64 MiB.)
"""

import argparse
import os
import time
from functools import partial

import torch

import torch_ros

MODEL, ROLLOUTS = "two-datacenters", 4
MIB, FIRST, VERSIONS = 24, 1, 4


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.zeros(1 << 18) for number in range(MIB)}


def train(versions: int) -> None:
    weights = tensors()
    with torch_ros.open(
        MODEL, replica="trainer", datacenter="west", rank=0, world_size=1
    ) as handle:
        handle.register(weights)
        for version in range(FIRST, FIRST + versions):
            for tensor in weights.values():
                tensor.fill_(version)
            handle.publish(version)
            while not any(
                held.readers for held in handle.fleet().held if held.ref.version == version
            ):
                time.sleep(0.02)
            began_s = time.monotonic()
            handle.unpublish()  # from here on the next step may write them
            took_ms = (time.monotonic() - began_s) * 1e3
            print(
                f"version {version}: unpublish took {took_ms:.0f} ms, while it is read", flush=True
            )
            handle.wait(partial(is_everywhere, version))
        print("all rollouts have the last version", flush=True)


def is_everywhere(version: int, there: dict[int, set[str]]) -> bool:
    return len(rollouts(there.get(version, set()))) == ROLLOUTS


def is_there(name: str, handle: torch_ros.ShardHandle) -> bool:
    replicas = handle.fleet().replicas
    return name in replicas and replicas[name].state == "complete"


def rollouts(replicas: set[str]) -> set[str]:
    return {name for name in replicas if name.startswith("rollout-") and "+" not in name}


def roll_out(number: int, versions: int) -> None:
    weights = tensors()
    name = f"rollout-{number}"
    opened = partial(torch_ros.open, MODEL, rank=0, world_size=1)
    with opened(replica=name, datacenter="east", seeding="host") as handle:
        handle.register(weights)
        answers = 0
        while handle.version != FIRST + versions - 1:
            held = handle.version
            if handle.update():
                source = handle.last_read.source if handle.last_read else ""
                print(
                    f"{name}: version {handle.version} from {source}, "
                    f"{answers} answers from version {held} meanwhile",
                    flush=True,
                )
                answers = 0
            elif held is not None:  # an engine would answer a request here
                assert all(bool((tensor == held).all()) for tensor in weights.values())
                answers += 1
            time.sleep(0.02)
        while is_there("trainer", handle):  # it looks whether all have the last version
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=("trainer", "rollouts"))
    parser.add_argument("--versions", type=int, default=VERSIONS)
    asked = parser.parse_args()
    if asked.place == "trainer":
        train(asked.versions)
        return
    children = []
    for number in range(ROLLOUTS):  # torch is loaded once, before any handle is open
        if not (child := os.fork()):
            roll_out(number, asked.versions)
            return
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    raise SystemExit(max(codes, key=abs))


if __name__ == "__main__":
    main()
