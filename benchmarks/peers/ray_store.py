"""Ray's object store: actors, a `put` of arrays, and a reference that is passed on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import harness
import ray
import torch

import peers


class Trainer(peers.Trainer):
    def publish(self, version: int) -> Any:  # noqa: ARG002
        # Arrays, not tensors: readers map those. numpy knows no bfloat16.
        arrays = {fqn: tensor.view(torch.uint8).numpy() for fqn, tensor in self.tensors.items()}
        self._reference = ray.put(arrays)
        return self._reference

    def forget(self) -> None:
        self._reference = None


class Rollout(peers.Rollout):
    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        [reference] = tickets
        for fqn, array in ray.get(reference).items():
            self.tensors[fqn].view(torch.uint8).copy_(torch.from_numpy(array))


class Serving:
    """An actor that does as it is told."""

    def __init__(self, build: Callable[[], harness.Actors]) -> None:
        torch.set_num_threads(1)
        self._actors = build()

    def do(self, actor: str, method: str, given: Sequence[object]) -> Any:
        return getattr(self._actors[actor], method)(*given)


class Child:
    def __init__(self, build: Callable[[], harness.Actors]) -> None:
        self._actor = ray.remote(num_cpus=1)(Serving).remote(build)
        self._answer: Any = None

    def tell(self, *told: object) -> None:
        self._answer = self._actor.do.remote(*told)

    def hear(self) -> Any:
        answer, self._answer = self._answer, None  # a reference that it has is dropped with it
        return ray.get(answer, timeout=harness.ANSWER_S)


@contextmanager
def started(place: peers.Place, builds: peers.Builds) -> Iterator[list[Child]]:
    ray.init(
        num_cpus=len(builds),
        object_store_memory=3 * place.size_bytes + (128 << 20),
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=place.directory,
    )
    try:
        yield [Child(build) for build in builds.values()]
    finally:
        ray.shutdown()


PEER = peers.Peer(
    name="Ray's object store",
    package="ray",
    trainer=Trainer,
    rollout=Rollout,
    lends=False,
    started=started,
)
