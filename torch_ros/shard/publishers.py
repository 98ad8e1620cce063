"""Several publishers of one number: legal, as long as all have the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch_ros.deadline import Deadline
from torch_ros.environment import DEFAULT_MODEL
from torch_ros.errors import ManifestMismatch, NotSupported, PeerError, VersionConflict
from torch_ros.printable import log_of
from torch_ros.protocol.call import GroupCall
from torch_ros.protocol.keys import replica_of
from torch_ros.protocol.originals import elder, elder_ranges
from torch_ros.protocol.sources import Source
from torch_ros.shard.verification import digests_of, published
from torch_ros.transfer.mailbox import Digests
from torch_ros.weights.digest import first_difference
from torch_ros.weights.manifest import Logical, Manifest, logical, require_same

if TYPE_CHECKING:
    from torch_ros.shard.core import Shard

log = log_of(__name__)


def require_equal_to_elder(shard: Shard, call: GroupCall, layout: str, deadline: Deadline) -> None:
    """Compare what this replica is about to offer with what an older publisher of it shows.

    Readers mix bytes of both. The last rank to be ready asks, before the call ends. If one of the
    two has no digests, nothing tells whether they are equal; under the default model's name, which
    two jobs may share by accident, a warning says so.

    Args:
        layout: The one that the ranks of this replica have all of.

    Raises:
        ManifestMismatch: The tensors are others.
        VersionConflict: The digests differ.
    """
    group, ref = shard.group, call.ref
    if ref.uid == call.fresh_uid:  # nobody else has published the number
        return
    rule = partial(elder, seat=group.seat, ref=ref)
    find_elder = partial(group.ask, elder_ranges(group.seat, ref), rule, deadline)
    if (found := find_elder()) is None:
        return
    inst = found.inst
    try:
        manifests = shard.manifests.of(inst, deadline, found.world_size)
    except PeerError as error:  # it goes: readers find that out
        log.info("version %d of %r is not compared: %s", ref.version, replica_of(inst), error)
        return
    theirs, tensors = _digests(manifests), _tensors(manifests)
    # Only if the elder shows the version's layout: it may have gone on to other tensors.
    if layout != tensors.digest == published(shard, ref, deadline):
        own = _tensors(shard.manifests.own(deadline))
        require_same(ref.version, replica_of(inst), tensors, own)
    mine = _digests(shard.manifests.own(deadline)) if theirs.totals else Digests()
    if mine.totals and mine.depth == theirs.depth:
        fqn = first_difference(mine.totals, theirs.totals)
        if fqn is not None and find_elder() == found:  # else these may be of its next content
            reason = f"{replica_of(inst)!r} has published it with other content: tensor {fqn!r}"
            raise VersionConflict(shard.model, ref.version, ref.run, reason)
    elif shard.model == DEFAULT_MODEL and shard.tensors.is_news("publishers"):
        log.warning(
            "version %d of model %r is also published by %r, and without digests nobody can tell "
            "whether the bytes are the same: give each job its own model (TORCH_ROS_MODEL), or "
            "open all handles with digests",
            ref.version,
            shard.model,
            replica_of(inst),
        )


def _tensors(manifests: list[Manifest]) -> Logical:
    """The tensors that ranks show; none, if some are about to show other tensors already."""
    try:
        return logical([manifest.layout for manifest in manifests])
    except ManifestMismatch:
        return Logical(())


def _digests(manifests: list[Manifest]) -> Digests:
    """The digests of whole tensors, as far as these ranks tell."""
    try:
        return digests_of(manifests)
    except NotSupported:  # overlapping parts: their digests do not add up
        return Digests()


class ReadFrom:
    """The publishers from whom one version is read: without digests nobody compares their bytes."""

    def __init__(self, shard: Shard, version: int) -> None:
        self._shard, self._version = shard, version
        self._names: list[str] = []

    def note(self, sources: Iterable[Source], *, has_some: bool, is_compared: bool) -> None:
        """Note who is read from next, and warn where two publishers' bytes may be mixed.

        Args:
            has_some: Whether bytes that came from earlier sources are kept.
            is_compared: Whether digests tell in the end that all bytes are one version's.
        """
        before = self._names if has_some else []
        now = [replica_of(source.inst) for source in sources if source.is_original]
        self._names = list(dict.fromkeys([*before, *now]))
        if is_compared or len(self._names) < 2 or not self._shard.tensors.is_news("a mixture"):
            return
        log.warning(
            "version %d of %r is read from two publishers, %s: nothing tells whether their bytes "
            "are the same, and what is read may be a mixture; open them and this handle with "
            "digests, or let one of them publish",
            self._version,
            self._shard.model,
            " and ".join(map(repr, self._names[:2])),
        )
