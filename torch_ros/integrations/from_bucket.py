"""Versions of a bucket, for an engine that shares nothing else with the trainer."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

import torch_ros
from torch_ros import bucket
from torch_ros.allocation import allocating
from torch_ros.integrations.seams import Weights


class BucketVersions:
    """Stands where an `Installer` has a handle. One in each process of an engine.

    Tensors that land in the engine's own parameters are loaded there, from the second version on by
    what has changed since. Of the others it has a copy in host memory, whole, which is kept in the
    same way; the engine's loader gets all of it for each version. Nothing is offered to others.

    It waits for no version to come, and a store has deadlines of its own: no `timeout_s` is heard.
    """

    model: str
    rank: int
    version: None = None

    def __init__(self, url: str, model: str, rank: int = 0) -> None:
        self.model, self.rank = model, rank
        # Each knows what it has filled last.
        self._to_engine, self._to_copy = bucket.open(url, model), bucket.open(url, model)
        self._copy: dict[str, torch.Tensor] = {}
        self._copied = ""  # the content that it has
        self._found: torch_ros.Contents | None = None

    def contents(
        self,
        version: int | str = "latest",
        *,
        timeout_s: float | None = None,  # noqa: ARG002  # as a handle has it; so below
    ) -> torch_ros.Contents:
        """As `Bucket.contents`."""
        self._found = self._to_engine.contents(version)
        return self._found

    def read(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        partial: bool = True,  # noqa: ARG002
        timeout_s: float | None = None,  # noqa: ARG002
    ) -> None:
        """Load them, of the very content that was looked at last."""
        for fqn in tensors.keys() & self._copy.keys():  # they land by now, and need no copy
            del self._copy[fqn]
        if tensors:
            self._to_engine.load(tensors, version, uid=self._looked_at(version).uid)

    @contextmanager
    def stream(
        self,
        version: int,
        fqns: Iterable[str],
        *,
        buffer_bytes: int | None = None,  # noqa: ARG002
        timeout_s: float | None = None,  # noqa: ARG002
    ) -> Iterator[Weights]:
        """These tensors, out of the copy, which has that content from then on."""
        names, found = [*fqns], self._looked_at(version)
        is_there = self._copied == found.uid and self._copy.keys() >= {*names}
        if names and not is_there:
            self._make_copy(names, found)
        yield ((fqn, self._copy[fqn]) for fqn in names)

    def _make_copy(self, names: Iterable[str], found: torch_ros.Contents) -> None:
        wanted = {fqn: found.tensors[fqn] for fqn in names}
        if wanted != {fqn: (one.dtype, one.shape) for fqn, one in self._copy.items()}:
            self._copy = {}  # before the memory for another one is taken
            size_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in wanted.values())
            with allocating("a copy of a bucket's version", size_bytes):
                self._copy = {
                    fqn: torch.empty(shape, dtype=dtype, device="cpu")
                    for fqn, (dtype, shape) in wanted.items()
                }
        self._copied = ""
        self._to_copy.load(self._copy, found.version, uid=found.uid)
        self._copied = found.uid

    def _looked_at(self, version: int) -> torch_ros.Contents:
        found = self._found
        return found if found and found.version == version else self.contents(version)

    def serve(self, *, timeout_s: float | None = None) -> None:
        """Nothing: nobody reads from here."""

    def unpublish(self, *, timeout_s: float | None = None) -> None:
        """Nothing: nobody reads from here."""

    def unregister(self) -> None:
        """Nothing: it keeps no tensor of others from being freed."""

    def close(self) -> None:
        """Give the copy's memory back."""
        self._copy, self._copied = {}, ""
