"""Verification: a source shows what was published, and the bytes read are those of the version."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from torch_ros.deadline import Deadline
from torch_ros.errors import CorruptWeights, ManifestMismatch, NotSupported, SourceLost, UsageError
from torch_ros.printable import log_of
from torch_ros.protocol.calls import SourceTerms
from torch_ros.protocol.records import Outcome, VersionRecord, VersionRef
from torch_ros.protocol.sources import Source
from torch_ros.shard.core import Shard
from torch_ros.store.loops import Done, Step
from torch_ros.store.txn import View, one
from torch_ros.transfer.feed import Feed
from torch_ros.transfer.mailbox import Digests
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.coverage import is_whole
from torch_ros.weights.digest import first_difference, first_unproven, totals
from torch_ros.weights.manifest import Depth, Logical, Manifest, logical, require_all

log: logging.Logger = log_of(__name__)


class Verification:
    """Compares one read of `ref` with what was published, from its first source to its end."""

    def __init__(self, shard: Shard, ref: VersionRef, deadline: Deadline) -> None:
        self._shard, self._deadline = shard, deadline
        self.ref: VersionRef = ref
        self._expected = Digests()  # of the version
        self.wanted: Logical | None = None  # what the first source shows of it
        self._manifests: Sequence[Manifest] = ()  # of the first source

    # Sources

    @contextmanager
    def as_published(self, feed: Feed) -> Iterator[None]:
        """Treat tensors that do not fit as a lost source, unless it shows what was published.

        Then the reader's own are wrong, and no other source would help. But a relay may be loading
        only a part of the version, or something else by now.
        """
        try:
            yield
        except UsageError as error:
            if self._is_published(feed):
                raise
            reason = f"it does not show the version: {error}"
            raise SourceLost(feed.source.replica, reason) from error

    def _is_published(self, feed: Feed) -> bool:
        """Whether the source shows the layout of the version's record; True if that is gone."""
        layout = published(self._shard, self.ref, self._deadline)
        try:
            return not layout or (logical(feed.layouts).digest == layout and is_whole(feed.layouts))
        except ManifestMismatch:
            return False

    def expect(self, feed: Feed, source: Source) -> None:
        """Take the version's digests from its first source, and pass them on to readers."""
        with self.as_published(feed):
            self._expected = self._digests_of(feed, source.inst)
            self.wanted = logical(feed.layouts)
        self._shard.mailbox.show_digests(self._expected)

    def _digests_of(self, feed: Feed, inst: str) -> Digests:
        """The version's digests, as far as this source knows them.

        A rank that does not verify adds up none, and takes totals that are there: its own readers
        may verify.
        """
        self._manifests = manifests = [manifest for _, manifest in feed.manifests]
        verifies, has_some = self._shard.settings.depth != "off", manifests[0].depth != "off"
        if verifies and has_some:
            found = digests_of(manifests)
            if found.depth == "off":
                log.warning(
                    "not all ranks of %s have digests of one depth; it is not verified", inst
                )
            return found
        if verifies:
            log.warning("%s has no digests; the bytes read from it are not verified", inst)
        known = next((m for m in manifests if m.totals), None)
        return Digests(known.depth, (), known.totals) if known else Digests()

    @property
    def known(self) -> Digests:
        """The version's digests, added up now if the first source has them only by chunk."""
        if not self._expected.totals and self._manifests:
            with suppress(NotSupported):  # overlapping parts: their digests do not add up
                found = digests_of(self._manifests)
                return found if found.depth != "off" else self._expected
        return self._expected

    # Bytes

    @property
    def compares(self) -> bool:
        """Whether the bytes are compared with the version's digests when all of them are there."""
        return self._shard.settings.depth != "off" and bool(self._expected.totals)

    @property
    def proves_all(self) -> bool:
        """Whether a comparison would find any wrong byte: digests of samples would not.

        Bytes that a rank made of what it had, by deltas, were checked by no source's word.
        """
        return self.compares and self._expected.depth == "full"

    def digest(self, registered: LocalState) -> bool:
        """Digest this rank's part, and show its digests: the last rank to be ready compares all.

        Returns:
            Whether anything was digested. A rank that does not verify keeps the source's totals,
            which it shows since `expect`.
        """
        shard, expected = self._shard, self._expected
        own_depth: Depth = expected.depth if shard.settings.depth != "off" else "off"
        shard.digests = Digests(expected.depth, registered.digests(own_depth), expected.totals)
        if own_depth != "off":
            shard.mailbox.show_digests(shard.digests)
        return own_depth != "off"

    def verify(self, source: str, *, is_unproven: bool = False) -> None:
        """Compare the digests of all ranks with the version's. Called by the last to be ready.

        Args:
            source: For the error: the replica that it was read from.
            is_unproven: A rank has made its part of what it had, by deltas: without digests of all
                bytes, or of each of its chunks, the read counts as corrupt.

        Raises: CorruptWeights: They differ.
        """
        shard, expected, version = self._shard, self._expected, self.ref.version
        if is_unproven and not self.proves_all:  # no tensor is known to be wrong, nor a source
            raise CorruptWeights(shard.model, version, "?", "")
        if shard.settings.depth == "off" or expected.depth == "off":
            return
        manifests = shard.manifests.own(self._deadline)
        if any(len(m.digests) != len(m.layout.chunks) for m in manifests):
            if is_unproven:
                raise CorruptWeights(shard.model, version, "?", "")
            log.warning("not all ranks have digests; version %d is not verified", version)
            return
        layouts, chunks = [m.layout for m in manifests], [m.digests for m in manifests]
        found = totals(layouts, chunks, depth=expected.depth)
        fqn = first_difference(found, expected.totals)
        if fqn is None and is_unproven:
            fqn = first_unproven(layouts, chunks, found)
        if fqn is not None:
            raise CorruptWeights(shard.model, version, fqn, "" if is_unproven else source)

    def end_of(
        self, registered: LocalState, said: Mapping[int, str], terms: SourceTerms
    ) -> Outcome:
        """The layout that the ranks have all of. Called by the last to be ready.

        Raises: ManifestMismatch: The whole version is required, and they lack a part of it.
        """
        shard, is_required = self._shard, terms.is_required
        if not (is_required or terms.is_served):
            return Outcome()  # the replica is no source, whatever it has
        end = shard.manifests.together(registered, said, self._deadline, is_required=is_required)
        if is_required:
            require_content(shard, self.ref, self.wanted, end, self._deadline)
        return end


def require_content(
    shard: Shard, ref: VersionRef, wanted: Logical | None, end: Outcome, deadline: Deadline
) -> None:
    """Name the tensor that a replica lacks; the end of its call only says that layouts differ.

    Args:
        wanted: The contents, as a source has shown them. A relay may have shown a part: then their
            digest is not the published one, and no tensor is named.
        end: The layout that the ranks of this replica have all of.

    Raises: ManifestMismatch: They lack a tensor.
    """
    if wanted is not None and end.said != wanted.digest == published(shard, ref, deadline):
        held = logical([manifest.layout for manifest in shard.manifests.own(deadline)])
        require_all(ref.version, wanted, held)


def published(shard: Shard, ref: VersionRef, deadline: Deadline) -> str:
    """The version's layout, as etcd has it; "": its record is gone."""
    key = shard.group.seat.keys.version(ref.run, ref.version)

    def rule(view: View) -> Step[str]:
        entry = view.get(key)
        return Done("" if entry is None else VersionRecord.decode(entry.value, key).layout)

    return shard.group.ask((one(key),), rule, deadline)


def digests_of(manifests: Sequence[Manifest]) -> Digests:
    """The digests of a version's whole tensors, by what the ranks of one source show.

    Of depth "off", where that does not tell: a rank has no digests, or such of another depth.

    Raises: NotSupported: Parts overlap, so that their digests do not add up.
    """
    depth, known = manifests[0].depth, manifests[0].totals
    if depth == "off":
        return Digests()
    if known:
        return Digests(depth, (), known)
    if any(m.depth != depth or len(m.digests) != len(m.layout.chunks) for m in manifests):
        return Digests()
    return Digests(depth, (), summed(manifests, depth))


def summed(manifests: Sequence[Manifest], depth: Depth) -> dict[str, int]:
    """The digests of whole tensors, of those of all chunks, which are of this depth."""
    return totals([m.layout for m in manifests], [m.digests for m in manifests], depth=depth)
