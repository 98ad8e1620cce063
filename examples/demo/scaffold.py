"""Around the example, not part of it: what the launcher tells its children, and hears from them.

Nobody who uses torch_ros needs any of this. Digests and reports go through files in a directory
that all processes of one run share and the launcher removes.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from torch_ros.shard.report import ReadReport


class Scaffold:
    """One process's way to the launcher. `role` is what the table calls this process's replica."""

    def __init__(self, role: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--directory", type=Path, required=True)
        arguments = parser.parse_args()
        self.steps: int = arguments.steps
        self._directory: Path = arguments.directory
        self.trainer = ""  # the name of its replica, known from the first digests on
        self._role, self._rank = role, int(os.environ.get("RANK", "0"))

    def say(self, words: str) -> None:
        if self._rank == 0:
            print(words, flush=True)

    def report(self, replica: str, version: int, **measured: object) -> None:
        """One line for the launcher's table."""
        line = {"role": self._role, "replica": replica, "version": version, **measured}
        with (self._directory / f"{self._role}-{self._rank}.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    def report_read(self, replica: str, read: ReadReport) -> None:
        self.report(
            replica,
            read.version,
            source=read.source,
            size_bytes=read.bytes_total,
            elapsed_s=read.elapsed_s,
            transfer_s=read.stages_s["read"],
        )

    def write_digests(
        self, replica: str, version: int, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """What the version is, tensor by tensor, and who publishes it. Collective."""
        digests = _digests(tensors)
        if self._rank == 0:
            self._digests_of(version).write_text(json.dumps([replica, digests]))

    def check_digests(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """End this process unless every tensor is, bit for bit, the trainer's. Collective."""
        self.trainer, expected = json.loads(self._digests_of(version).read_text())
        found = _digests(tensors)
        differing = sorted(
            fqn for fqn in {*expected, *found} if expected.get(fqn) != found.get(fqn)
        )
        if differing:
            sys.exit(
                f"version {version}: {len(differing)} of {len(expected)} tensors are not what the "
                f"trainer published: {', '.join(differing)}"
            )

    def _digests_of(self, version: int) -> Path:
        return self._directory / f"digests-{version}.json"


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {fqn: _digest(tensor) for fqn, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    """Of the whole tensor, however it is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    digest = hashlib.sha256(f"{whole.dtype} {list(whole.shape)}".encode())
    digest.update(whole.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
