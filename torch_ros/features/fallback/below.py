"""The bucket below all runs, as those see it that fall back: docs/protocol/fallback.md."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from torch_ros.features.fallback.rules import Stored
from torch_ros.weights.manifest import Layout

Look = Callable[[int], object]
"""Told how many more bytes have been filled, and asked whether to go on: it raises if not."""


class StoredContents(Protocol):
    """A version of a bucket, of which the manifest is here."""

    def fill(self, layout: Layout, memory: Sequence[torch.Tensor], look: Look) -> int:
        """Fill these chunks; how many bytes were read. Writes nothing after its return, or error.

        Raises:
            BucketError: The store does not answer, or refuses.
            UnreadableVersion: A file is not what was archived, or gone.
            ManifestMismatch: A name, shape or dtype that the version does not have.
        """


class BucketBelow(Protocol):
    """The bucket that `open` was given. Any thread may call it; a call lasts as long as the store.

    Raises:
        BucketError: By each call, where the store does not answer, or refuses.
    """

    url: str

    def newest_run(self) -> tuple[int, str]:
        """Its number in the bucket, and its name; (0, ""): it has none."""

    def choose(self, layout: Layout, avoided: Collection[str], *, is_alone: bool) -> Stored | None:
        """Its newest version that is there in full, and fits; None: it has none.

        Args:
            layout: A rank's registered tensors, all of which the version has to have.
            avoided: Keys of manifests that are passed over.
            is_alone: They have to be all that the version has, too.
        """

    def contents(self, manifest: str) -> StoredContents:
        """The version of a manifest's key."""
