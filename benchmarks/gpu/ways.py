"""Weights between two processes that share a card, and between it and host memory.

Each way beside torch's own copy of the same tensors within one process, which is as fast as this
machine goes. The publications are timed with the reads: they wait for kernels, no bytes move.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from card import Card, Row, speed
from harness import Actors, Child, Sample, Setup, rounds, started
from others import Copy
from ours import Rollout, Trainer

COUNT, ROUNDS, AIM = 100, 3, 0.8
COPY, ROS = "torch's copy", "publish and replicate"


class DeviceCopy(Copy):
    def __init__(self, card: Card, *pair: dict[str, torch.Tensor]) -> None:
        super().__init__(*pair)
        self._card = card

    def _copy(self) -> None:
        super()._copy()
        self._card.synchronize()


def held(card: Card, size_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """The same number of tensors in each place."""
    return {
        place: {name: each.to(place) for name, each in card.tensors(size_bytes, COUNT).items()}
        for place in dict.fromkeys((card.device, "cpu"))
    }


def source(card: Card, setup: Setup, size_bytes: int) -> Actors:
    tensors = held(card, size_bytes)
    return {place: Trainer(setup, place, tensors[place]) for place in tensors}


def reader(card: Card, setup: Setup, size_bytes: int) -> Actors:
    tensors, copied = held(card, size_bytes), held(card, size_bytes)
    actors: dict[str, object] = {}
    for here in tensors:
        for there in tensors:
            way = f"{here} to {there}"
            actors[way] = Rollout(setup, here, f"in-{there}", tensors[there])
            actors[f"copy {way}"] = DeviceCopy(card, copied[here], tensors[there])
    return actors


def replicate(pair: list[Child], here: str, there: str) -> Sample:
    theirs, ours = pair
    way = f"{here} to {there}"
    version = theirs.ask(here, "write")
    published_s = theirs.ask(here, "publish")
    read_s = ours.ask(way, "replicate", version)["elapsed_s"]
    ours.ask(way, "verify", version)
    ours.ask(way, "let_go")
    theirs.ask(here, "unpublish")  # others write to the same tensors
    return {"elapsed_s": published_s + read_s, "published_s": published_s}


def copied(child: Child, way: str) -> Sample:
    return {"elapsed_s": child.ask(f"copy {way}", "copy", 1)}


def ways(card: Card) -> Iterator[Row]:
    """2 GiB from each place to each place, in place."""
    size = card.size_bytes(2)
    setup = Setup("local", f"gpu-{secrets.token_hex(4)}", size >> 20, ROUNDS, "")
    builds = {name: partial(build, card, setup, size) for name, build in ENDS.items()}
    places = [*dict.fromkeys((card.device, "cpu"))]
    cases: dict[tuple[str, str], Callable[[], Sample]] = {}
    with started(builds, "fork") as pair:
        for here in places:
            for there in places:
                way = f"{here} to {there}"
                cases[COPY, way] = partial(copied, pair[1], way)
                cases[ROS, way] = partial(replicate, pair, here, there)
        samples = rounds(ROUNDS, cases)
    for here in places:
        for there in places:
            way = f"{here} to {there}"
            copy_s, ros_s = (
                median(sample["elapsed_s"] for sample in samples[what, way]) for what in (COPY, ROS)
            )
            yield speed(f"{COPY}, {way}", size, copy_s)
            yield speed(f"{ROS}, {way}", size, ros_s, copy_s, AIM if here != there else None)
            published_s = median(sample["published_s"] for sample in samples[ROS, way])
            yield Row(f"publish alone, {way}", f"{1e3 * published_s:.1f} ms")


ENDS: dict[str, Callable[[Card, Setup, int], Actors]] = {"source": source, "reader": reader}
