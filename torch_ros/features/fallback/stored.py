"""A bucket as the handles of a model see it when no process holds anything."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from torch_ros.bucket import chain
from torch_ros.bucket.buckets import Bucket
from torch_ros.bucket.files import PART_BYTES, InBucket, StoredVersion, kept
from torch_ros.bucket.reading import Look, fill_chunks
from torch_ros.errors import ManifestMismatch, UnreadableVersion
from torch_ros.features.fallback.rules import Stored
from torch_ros.printable import log_of
from torch_ros.weights.coverage import require_whole
from torch_ros.weights.manifest import Layout, logical, require_all
from torch_ros.weights.plan import plan

log: logging.Logger = log_of(__name__)


@dataclass(frozen=True, slots=True)
class BucketVersion:
    """A version of a bucket, of which the manifest is here."""

    bucket: Bucket
    of: InBucket
    stored: StoredVersion

    def fill(self, layout: Layout, memory: Sequence[torch.Tensor], look: Look) -> int:
        """Fill these chunks; see `torch_ros.bucket.reading.fill_chunks`."""
        folder = f"{self.bucket.root}/{self.of.files_at}"
        return fill_chunks(self.bucket.store, folder, self.stored, (layout, memory), look)


class FallbackBucket:
    """The bucket of `torch_ros.open(..., bucket=url)`, below all runs.

    Any thread may call it; a call lasts as long as the store.
    """

    url: str

    def __init__(self, url: str, model: str) -> None:
        self.url, self._bucket = url, Bucket(url, model)

    def newest_run(self) -> tuple[int, str]:
        """Its number in the bucket, and its name; (0, ""): it has none to go on with.

        A handle goes on from a version that is there in full: newer ones, which are deltas, stay
        what they are under the name that they have.

        Raises: BucketError: The store does not answer, or refuses.
        """
        alive = chain.living(self._bucket.kept())
        is_full = bool(alive) and alive[0].kind == "full"
        return (alive[0].run_number, alive[0].run) if is_full else (0, "")

    def choose(self, layout: Layout, avoided: Collection[str], *, is_alone: bool) -> Stored | None:
        """The newest version that is there in full, and fits; None: there is none.

        Args:
            layout: A rank's registered tensors, all of which the version has to have.
            avoided: Keys of manifests that are passed over.
            is_alone: They have to be all that the version has, too.

        Raises:
            UnreadableVersion: There is none, but one whose manifest cannot be read.
            BucketError: The store does not answer, or refuses.
        """
        unreadable: UnreadableVersion | None = None
        deltas: list[int] = []
        for each in chain.living(self._bucket.kept()):
            if each.kind != "full" or each.key in avoided:
                deltas += [each.version] if each.kind != "full" else []
                continue
            try:
                stored = self._bucket.manifest(each)
                if stored is not None:  # else it was collected meanwhile
                    self._tell(each.version, deltas)
                    return _fitting(each, stored, layout, is_alone=is_alone)
            except UnreadableVersion as error:
                unreadable = error
                log.warning("%s; it is passed over", error)
            except ManifestMismatch as error:
                name = f"{self.url}: version {each.version} of {self._bucket.model!r}"
                log.warning("%s is passed over: %s", name, error)
        if unreadable is not None:  # "none" would mean to begin anew
            raise unreadable
        return None

    def _tell(self, version: int, deltas: Sequence[int]) -> None:
        if deltas:
            newer = f"{len(deltas)} up to {deltas[0]} are newer, and deltas"
            log.warning(
                "%s: version %d is the newest in full; %s, which torch_ros.bucket.load reads",
                self.url,
                version,
                newer,
            )

    def contents(self, manifest: str) -> BucketVersion:
        """The version of a manifest's key.

        Raises:
            UnreadableVersion: It is gone, or none of this release's.
            BucketError: The store does not answer, or refuses.
        """
        of = kept(manifest)
        stored = self._bucket.manifest(of) if of is not None else None
        if of is None or stored is None:
            self._bucket.store.refuse(f"{self._bucket.root}/{manifest}", "it was collected")
        return BucketVersion(self._bucket, of, stored)


def _fitting(of: InBucket, stored: StoredVersion, layout: Layout, *, is_alone: bool) -> Stored:
    """Raises: ManifestMismatch: These tensors are others; or, alone, not all of the version."""
    if stored.left_out:
        what, expected = f"version {of.version}", "tensors only"
        found = f"the objects {stored.left_out[:3]}, which no bucket has"
        raise ManifestMismatch(what, expected, found, "read another version")
    layouts = [file.layout for file in stored.files]
    plan(layouts, layout, staging_bytes=PART_BYTES)
    whole = logical(layouts)
    if is_alone:
        require_all(of.version, whole, logical([layout]))
        require_whole([layout])
    return Stored(of.key, of.version, of.uid, whole.digest, of.born_ms)
