"""TorchStore: Monarch's actors put a state dict, and get it into their own."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import harness
import torch
import torchstore as ts
from monarch.actor import Actor, endpoint, shutdown_context, this_host

import peers

KEY = "weights"
END_S = 30.0


class Trainer(peers.Trainer):
    def publish(self, version: int) -> None:  # noqa: ARG002
        asyncio.run(ts.put_state_dict(dict(self.tensors), KEY))


class Rollout(peers.Rollout):
    def receive(self, version: int, tickets: Sequence[Any]) -> None:  # noqa: ARG002
        asyncio.run(ts.get_state_dict(KEY, user_state_dict=dict(self.tensors)))


class Serving(Actor):
    """An actor that does as it is told."""

    def __init__(self, build: Callable[[], harness.Actors]) -> None:
        torch.set_num_threads(1)
        self._actors = build()

    @endpoint
    def do(self, actor: str, method: str, given: Sequence[object]) -> Any:
        return getattr(self._actors[actor], method)(*given)


class Child:
    def __init__(self, name: str, build: Callable[[], harness.Actors]) -> None:
        processes = this_host().spawn_procs(name=name, per_host={"gpus": 1})
        self._actor = processes.spawn(name, Serving, build)
        self._answer: Any = None

    def tell(self, *told: object) -> None:
        self._answer = self._actor.do.call_one(*told)

    def hear(self) -> Any:
        return self._answer.get(timeout=harness.ANSWER_S)


@contextmanager
def started(_: peers.Place, builds: peers.Builds) -> Iterator[list[Child]]:
    asyncio.run(ts.initialize())
    try:
        yield [Child(name.replace(" ", "_"), build) for name, build in builds.items()]
    finally:
        with suppress(TimeoutError):  # all that moved was verified; beside.py ends what is left
            asyncio.run(ts.shutdown())
            shutdown_context().get(timeout=END_S)


PEER = peers.Peer(
    name="TorchStore",
    package="torchstore",
    trainer=Trainer,
    rollout=Rollout,
    lends=False,
    cases=("one", "four", "resharded"),
    started=started,
)
