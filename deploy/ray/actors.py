"""A trainer of several ranks and rollouts, each a Ray actor; no weight goes through Ray's store.

    python deploy/ray/actors.py                       # Ray and an etcd of this host
    RAY_ADDRESS=auto TORCH_ROS_ENDPOINT=etcd://host:2379 python deploy/ray/actors.py --cpus 8

An actor that dies is begun again, and has the newest version of those that live: a rollout by
Ray, before it answers, the trainer by this program, before its next step.
"""

import argparse
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.fsdp import fully_shard

import torch_ros
from torch_ros.errors import PeerError


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))


def persist(read: Callable[[], int | None]) -> int | None:
    """A source that is killed is offered until its lease ends; then it is another's turn."""
    while True:
        try:
            return read()
        except PeerError:
            time.sleep(1)


@ray.remote
class Rank:
    """One of the trainer's. What names torch_ros here is the same in any loop with FSDP2."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.place = {"rank": rank, "world_size": world_size}

    def address(self) -> str:
        with socket.create_server(("", 0)) as free:
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def begin(self, address: str, model: str) -> tuple[int, int]:
        """The version that it goes on from, 0: none, and the process that it is in."""
        dist.init_process_group("gloo", init_method=address, **self.place)
        self.net = fully_shard(network())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.005)
        self._open(model)
        newest = partial(self.handle.replicate, "latest", missing_ok=True, timeout_s=60)
        self.version = persist(newest)
        if self.version is None:  # numbers begin again, in a new run
            self.handle.close()
            self._open(model, run="new")
            self.version = 0
        self.handle.guard(self.optimizer)  # nobody reads what the optimizer writes
        return self.version, os.getpid()

    def _open(self, model: str, **more: str) -> None:
        self.handle = torch_ros.open(model, replica="trainer", **self.place, **more)
        self.handle.register(self.net)

    def step(self) -> tuple[int, float]:
        batch = torch.randn(512, 64)
        loss = (self.net(batch)[:, 0] - batch.sum(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        self.handle.publish(self.version)
        return self.version, loss.item()


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Rollout:
    """It answers with the newest version that there is when it is asked."""

    def __init__(self, name: str, model: str) -> None:
        self.net = network()
        self.handle = torch_ros.open(model, replica=name)
        self.handle.register(self.net)

    def answer(self, question: torch.Tensor) -> tuple[torch.Tensor, int, str, int]:
        """Also the version that it is of, where that came from, and the process."""
        persist(partial(self.handle.update, "latest", wait_s=5))
        report = self.handle.last_read
        assert report is not None
        with torch.no_grad():
            return self.net(question), report.version, report.source, os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="ray-me")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=0.5, help="of each actor")
    asked = parser.parse_args()
    endpoint = os.environ.get("TORCH_ROS_ENDPOINT", "local")
    ray.init(runtime_env={"env_vars": {"TORCH_ROS_ENDPOINT": endpoint}})

    def placed(actor: Any, count: int, strategy: str) -> Iterator[Any]:
        group = placement_group([{"CPU": asked.cpus}] * count, strategy=strategy)
        for n in range(count):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n)
            yield actor.options(num_cpus=asked.cpus, scheduling_strategy=where)

    def begin(places: list[Any]) -> tuple[list[Any], int]:
        ranks = [place.remote(n, asked.ranks) for n, place in enumerate(places)]
        address = ray.get(ranks[0].address.remote())
        found = ray.get([rank.begin.remote(address, asked.model) for rank in ranks])
        version, pids = found[0][0], [pid for _, pid in found]
        print(f"trainer: begins after version {version}, processes {pids}", flush=True)
        return ranks, version

    places = [*placed(Rank, asked.ranks, "PACK")]
    named = enumerate(placed(Rollout, asked.rollouts, "SPREAD"))
    rollouts = [place.remote(f"rollout-{n}", asked.model) for n, place in named]
    ranks, version = begin(places)
    question = torch.full((1, 64), 0.125)
    while version < asked.steps:
        try:
            version, loss = ray.get([rank.step.remote() for rank in ranks])[0]
        except RayError as lost:  # of the one that died, or of one that waited for it
            print(f"trainer: {type(lost).__name__}; begins again", flush=True)
            for rank in ranks:
                ray.kill(rank)
            ranks, version = begin(places)
            continue
        print(f"version {version}: loss {loss:.2f}", flush=True)
        for n, rollout in enumerate(rollouts):
            try:
                answer, of, source, pid = ray.get(rollout.answer.remote(question))
            except RayError as lost:  # the version that it was to read went with the trainer
                print(f"rollout-{n}: {type(lost).__name__}", flush=True)
                continue
            said = f"{answer.item():.2f}, on the way to 8, by version {of} from {source}"
            print(f"rollout-{n}: {said}, process {pid}", flush=True)


if __name__ == "__main__":
    main()
