"""Weights between two processes that share a GPU, and between it and host memory.

Each way beside torch's own copy of the same tensors within one process, which is as fast as this
machine goes. The publications are timed with the reads: they wait for kernels, no bytes move.
Prints a row of JSON per way. Needs a CUDA device.

    python benchmarks/gpu.py --size-mib 4096
"""

import argparse
import json
import secrets
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import tensors as contents
import torch
from harness import Actors, Child, Sample, Setup, etcd_at, rounds, say, seconds, started
from others import Copy
from ours import Rollout, Trainer

from torch_ros.weights.digest import digest

PLACES = ("cuda", "cpu")
COPY, ROS, COPIES = "torch copy", "torch_ros, publish and replicate", "publish_copy"
TCP = 'the same, transport="tcp"'
OVER_TCP: dict[str, Any] = {"transport": "tcp", "listen": "127.0.0.1"}


def made(setup: Setup, count: int, place: str) -> dict[str, torch.Tensor]:
    plain = contents.plain(setup.size_bytes, count)
    return {fqn: tensor.to(place) for fqn, tensor in plain.items()}


class DeviceCopy(Copy):
    def _copy(self) -> None:
        super()._copy()
        torch.cuda.synchronize()


class Copier(Trainer):
    """Publishes copies of tensors on a GPU, there or in host memory."""

    def publish_copy(self, to: str) -> float:
        self._version += 1
        contents.write(self.tensors, self._version)
        torch.cuda.synchronize()
        where = None if to == "cuda" else to
        return seconds(partial(self._handle.publish_copy, self._version, self.tensors, to=where))

    def digest(self) -> float:
        torch.cuda.synchronize()
        return seconds(self._digest)

    def _digest(self) -> None:
        for tensor in self.tensors.values():
            offsets = (0,) * tensor.dim()
            digest(tensor, global_shape=tuple(tensor.shape), offsets=offsets, depth="full")


def source(setup: Setup, count: int) -> Actors:
    held = {place: made(setup, count, place) for place in PLACES}
    trainers = {place: Trainer(setup, place, held[place]) for place in PLACES}
    trainers |= {
        f"tcp {place}": Trainer(setup, f"tcp-{place}", held[place], **OVER_TCP) for place in PLACES
    }
    copies = {f"copies to {to}": Copier(setup, f"copies-{to}", held["cuda"]) for to in PLACES}
    return trainers | copies


def reader(setup: Setup, count: int) -> Actors:
    held = {place: made(setup, count, place) for place in PLACES}
    actors: dict[str, object] = {}
    for here in PLACES:
        sources = made(setup, count, here)
        for there in PLACES:
            name = f"in-{there}"
            actors[f"{here} to {there}"] = Rollout(setup, here, name, held[there])
            actors[f"tcp {here} to {there}"] = Rollout(
                setup, f"tcp-{here}", name, held[there], **OVER_TCP
            )
            actors[f"copy {here} to {there}"] = DeviceCopy(sources, held[there])
    return actors


def replicate(pair: list[Child], here: str, there: str) -> Sample:
    """`here` is the trainer: a place, after "tcp " if it is read over that."""
    theirs, ours = pair
    version = theirs.ask(here, "write")
    published_s = theirs.ask(here, "publish")
    way = f"{here} to {there}"
    read_s = ours.ask(way, "replicate", version)["elapsed_s"]
    ours.ask(way, "verify", version)
    ours.ask(way, "let_go")
    theirs.ask(here, "unpublish")  # others write to the same tensors
    return {"elapsed_s": published_s + read_s, "published_s": published_s}


def cases(pair: list[Child]) -> dict[tuple[str, str], Callable[[], Sample]]:
    theirs, ours = pair
    found: dict[tuple[str, str], Callable[[], Sample]] = {}

    def asked(child: Child, *what: Any) -> Callable[[], Sample]:
        return lambda: {"elapsed_s": child.ask(*what)}

    for here in PLACES:
        for there in PLACES:
            way = f"{here} to {there}"
            found[COPY, way] = asked(ours, f"copy {way}", "copy", 1)
            found[ROS, way] = partial(replicate, pair, here, there)
            found[TCP, way] = partial(replicate, pair, f"tcp {here}", there)
    for to in PLACES:
        found[COPIES, f"cuda to {to}"] = asked(theirs, f"copies to {to}", "publish_copy", to)
    found["digest, full", "cuda"] = asked(theirs, "copies to cuda", "digest")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with etcd_at("local"):
        setup = Setup("local", f"gpu-{secrets.token_hex(4)}", given.size_mib, given.rounds, "")
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        builds = {
            "source": partial(source, setup, given.tensors),
            "reader": partial(reader, setup, given.tensors),
        }
        with started(builds) as pair:
            samples = rounds(given.rounds, cases(pair))
    speeds = {
        case: median(setup.size_bytes / 1e9 / sample["elapsed_s"] for sample in taken)
        for case, taken in samples.items()
    }
    for (what, way), speed in speeds.items():
        row: dict[str, object] = {"what": what, "way": way, "GB/s": round(speed, 2)}
        if what != COPY and (COPY, way) in speeds:
            row["of torch's copy"] = round(speed / speeds[COPY, way], 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
