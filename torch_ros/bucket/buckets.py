"""A model's versions in a bucket, for a place that shares nothing else with who published them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from urllib.parse import quote

import torch

import torch_ros
from torch_ros import arguments
from torch_ros.bucket import chain, hub
from torch_ros.bucket.deltas import Filled, InPlace, WeightPatch, deltas_of, patch
from torch_ros.bucket.files import (
    InBucket,
    Kind,
    Mismatch,
    StoredChange,
    StoredVersion,
    decoded,
    kept,
)
from torch_ros.bucket.objects import ObjectStore
from torch_ros.bucket.reading import fill
from torch_ros.codec.delta import Delta
from torch_ros.errors import UnreadableVersion, UsageError, VersionNotFound
from torch_ros.printable import log_of

log: logging.Logger = log_of(__name__)

TRIES = 3  # a version may be collected while it is looked for
COLLECTED = "each is collected before it is read"


class Bucket:
    """The versions of one model below a URL; see `torch_ros.bucket.open`.

    It keeps no connection and needs no close. Any thread may call it.
    """

    url: str
    model: str

    def __init__(self, url: str, model: str) -> None:
        arguments.text("url", url)
        arguments.text("model", model)
        if model in {".", ".."}:  # a folder would lose it
            raise UsageError(f"model {model!r}: no store has a folder of that name")
        self.url, self.model = url, model
        self.root: str = quote(model, safe="")
        self.store: ObjectStore = hub.opened(url)
        self._filled: Filled | None = None  # by the last load

    def __repr__(self) -> str:
        return f"Bucket({self.url!r}, {self.model!r})"

    def list(self) -> dict[int, Kind]:
        """The versions of the newest run, ascending, and how each is stored: "full" or "delta".

        A version whose trainer died, and started again with a lower number, is none.

        Raises:
            BucketError: The store does not answer, or refuses; or no store answers, as where a
                folder's disk is not mounted.

        Cost: One request for a thousand versions, and one more if there are none.
        """
        return {each.version: each.kind for each in reversed(chain.living(self.kept()))}

    def contents(self, version: int | str = "latest") -> torch_ros.Contents:
        """The tensors that a version consists of, as `ShardHandle.contents` tells. Reads none.

        Args:
            version: A number, "latest" or "latest-<k>".

        Raises:
            VersionNotFound: The bucket has no such version.
            BucketError: The store does not answer, or refuses.

        Cost: One request for a thousand versions, and one for the version's manifest.
        """
        for _ in range(TRIES):
            found = chain.chosen(self.kept(), self.model, version)[-1]
            if (stored := self.manifest(found)) is not None:
                named = dict(sorted(stored.tensors.items()))
                return torch_ros.Contents(
                    found.version, named, stored.left_out, found.run, found.uid
                )
        raise VersionNotFound(self.model, str(version), COLLECTED)

    def load(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int | str = "latest",
        *,
        uid: str | None = None,
    ) -> int:
        """Read a version into these tensors, in place.

        A version that is stored as a delta takes the full one before it, and the deltas since.
        Those of the tensors that the last load has filled, and to which nobody has written since,
        take the deltas since that version: about 3 % of the bytes where 1 % of bfloat16 has
        changed. Where one that is whole here turns out not to have had it, all is read anew.
        Deltas are applied in host memory: of tensors on a GPU a copy of all is made there.

        Each process by itself: it reads what its own shards need. Ranks that must have the same
        version ask `contents` on one of them, and load that number and that content: a trainer that
        has died and come back may publish the number again. Each byte that is used was checked
        against the digest that the archiver made of it. Nothing is served; to do so, register
        and publish the tensors under the number that this returns, in a run of this place's own.

        Args:
            tensors: By name, with the version's dtypes and whole shapes; any part of the version.
                A DTensor stands for its local shard, a `torch_ros.Chunked` for its boxes.
            version: A number, "latest" or "latest-<k>".
            uid: No other content than the one that has this `Contents.uid`.

        Returns:
            The version's number.

        Raises:
            VersionNotFound: The bucket has no such version, or another content under its number.
            ManifestMismatch: A name, shape or dtype that the version does not have. Nothing is
                written.
            UsageError: No plain tensors. Nothing is written.
            BucketError: The store does not answer, or a file is not what was archived. The content
                of the tensors is undefined.

        Cost: The bytes of the parts of 4 MiB that have something for these tensors: for shards by
        rows little more than their own, for shards by columns those of the whole rows. 512 MiB of
        memory at most.
        """
        filled, self._filled = self._filled, None  # whatever comes, until all is well
        known = filled.among(tensors) if filled else {}
        for _ in range(TRIES):
            links = chain.chosen(self.kept(), self.model, version)
            found = links[-1]
            if uid not in (None, found.uid):
                reason = f"its content is {found.uid!r} now, expected {uid!r}; ask `contents` anew"
                raise VersionNotFound(self.model, str(found.version), reason)
            had = known if filled and filled.version in links else {}
            others = (
                {n: tensor for n, tensor in tensors.items() if n not in had} if had else tensors
            )
            if others and not self._read(links, others):  # first: it refuses what does not fit
                continue
            if had and filled and not self._update(links, filled.version, had):
                known = {}
                if not self._read(links, had):
                    continue
            self._filled = Filled.of(found, tensors)
            return found.version
        raise VersionNotFound(self.model, str(version), COLLECTED)

    def _update(
        self, links: Sequence[InBucket], had: InBucket, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Make the last version of `links` of one of them that these tensors have."""
        since = links[links.index(had) + 1 :]
        stored = self._manifests(since)
        if stored is None or any(s.base is None or s.base.uid != had.uid for s in stored[:1]):
            return False
        if (unlike := self._apply(since, stored, tensors)) is None:
            return True
        log.warning("%r did not have version %d; reading all", unlike, had.version)
        return False

    def _read(self, links: Sequence[InBucket], tensors: Mapping[str, torch.Tensor]) -> bool:
        """Read a full version, and the deltas behind it; False: one is gone, nothing was read."""
        stored = self._manifests(links)
        if stored is None:
            return False
        fill(self.store, f"{self.root}/{links[0].files_at}", stored[0], tensors)
        if (unlike := self._apply(links[1:], stored[1:], tensors)) is not None:
            reason = f"a delta of {unlike!r} is of other content than that of its base"
            self.store.refuse(f"{self.root}/{links[-1].key}", reason)
        return True

    def _apply(
        self,
        links: Sequence[InBucket],
        stored: Sequence[StoredVersion],
        tensors: Mapping[str, torch.Tensor],
    ) -> str | None:
        """Returns the name of a tensor that did not have what a delta is of."""
        if not links:
            return None
        target = InPlace(tensors)
        for link, each in zip(links, stored, strict=True):
            unlike = target.apply(self.store, f"{self.root}/{link.files_at}", each)
            if unlike is not None:
                return unlike
        target.end()
        return None

    def _manifests(self, links: Sequence[InBucket]) -> Sequence[StoredVersion] | None:
        """None: one was collected meanwhile."""
        found = []
        for link in links:
            if (stored := self.manifest(link)) is None:
                return None
            found.append(stored)
        for base, stored in pairwise(found):
            if stored.base is None or stored.base.uid != base.uid:
                key = f"{self.root}/{links[found.index(stored)].key}"
                self.store.refuse(key, f"it is a delta of {stored.base}, not of {base.uid!r}")
        return found

    def patches(self, base: int, version: int | str = "latest") -> Iterator[WeightPatch]:
        """What has changed from one version to a later one, for engines that patch weights.

        Places that have changed more than once come once, with the last value; some may have the
        value of the base again. Tensors that have not changed do not come.

        Args:
            base: The number of a version that the engine has.
            version: A number, "latest" or "latest-<k>".

        Raises:
            VersionNotFound: The bucket has no such version, or no deltas that lead to it from
                `base`: load it.
            BucketError: The store does not answer, or a file is not what was archived.

        Cost: The bytes of the deltas; memory for them and for the largest tensor's patch.
        """
        links = chain.chosen(self.kept(), self.model, version)
        since = next((links[n + 1 :] for n, each in enumerate(links) if each.version == base), None)
        stored = None if since is None else self._manifests(since)
        if since is None or stored is None:
            names = ", ".join(str(each.version) for each in links)
            reason = f"no deltas lead to it from {base}, only from {names}; load it"
            raise VersionNotFound(self.model, str(links[-1].version), reason)
        deltas: dict[str, list[Delta]] = {}
        changes: dict[str, StoredChange] = {}
        for link, each in zip(since, stored, strict=True):
            names_of = [change.fqn for change in each.changes]
            for change, delta in deltas_of(
                self.store, f"{self.root}/{link.files_at}", each, names_of
            ):
                deltas.setdefault(change.fqn, []).append(delta)
                changes[change.fqn] = change
        for fqn in sorted(deltas):
            yield patch(changes[fqn], deltas.pop(fqn))

    def keys(self) -> Sequence[str]:
        """All objects of the model, below its folder."""
        return [each.key[len(self.root) + 1 :] for each in self.store.list(self.root)]

    def kept(self) -> Sequence[InBucket]:
        """All versions that have a manifest, of all runs."""
        return [found for key in self.keys() if (found := kept(key)) is not None]

    def manifest(self, of: InBucket) -> StoredVersion | None:
        """A version's manifest; None: it was collected meanwhile.

        Raises: UnreadableVersion: It is not what an archiver of this release has written.
        """
        key = f"{self.root}/{of.key}"
        content = self.store.get(key)
        if content is None:
            return None
        try:
            return decoded(content, self.model, of)
        except Mismatch as error:
            advice = "read another version; use one release of torch_ros for all processes"
            raise UnreadableVersion(self.url, key, str(error), advice) from error


def open(url: str, model: str) -> Bucket:  # noqa: A001  # as torch_ros.open
    """The versions of a model in an object store, as `torch-ros archive` writes them.

    Neither etcd nor a replica is asked: all that this place has to share is the bucket.

    Args:
        url: `s3://bucket/prefix`, `gs://`, `az://`, `hf://buckets/owner/name` (with the extra
            `hub`; never tried against the Hub itself), a folder or `file:///folder`, which the
            first archiver makes; `memory://name` for tests. Credentials and endpoints are those of
            the environment, under the store's own names, such as AWS_ACCESS_KEY_ID and
            AWS_ENDPOINT_URL: a URL that may have a key or options in it is a UsageError.
        model: As it was published.

    Raises:
        UsageError: It is no URL of a store, or the extra `bucket` is not installed.
        BucketError: The store cannot be used as its environment says.

    Cost: No request.
    """
    return Bucket(url, model)
