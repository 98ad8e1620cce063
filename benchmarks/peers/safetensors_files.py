"""safetensors: a file in memory, of which each rollout copies the tensors."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

import peers


class Trainer(peers.Trainer):
    def publish(self, version: int) -> Path:
        self._path = Path(self.place.directory) / f"model-{version}.safetensors"
        save_file(dict(self.tensors), self._path)
        return self._path

    def forget(self) -> None:
        self._path.unlink()


class Rollout(peers.Rollout):
    def receive(self, version: int, tickets: Sequence[Path]) -> None:  # noqa: ARG002
        [path] = tickets
        peers.copy(load_file(path), self.tensors)


PEER = peers.Peer(
    name="safetensors files in /dev/shm",
    package="safetensors",
    trainer=Trainer,
    rollout=Rollout,
    lends=False,
)
