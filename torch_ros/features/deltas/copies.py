"""A delta that a publisher makes beside a copy: it leads to that from the one before."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from torch_ros import arguments
from torch_ros.codec.table import ENTRIES_MAX, NAME, TABLE_BYTES
from torch_ros.errors import UsageError
from torch_ros.features.deltas.making import CopyDeltas, PlannedDelta, PublishedCopy
from torch_ros.transfer.attending import Attendant
from torch_ros.transfer.registered import LocalState
from torch_ros.weights.manifest import Depth

RING_SHARE = 8  # of a copy's bytes: five deltas of 1 % of bfloat16, and room for the next
RING_BYTES_MIN = 1 << 16


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """The options of `ShardHandle.publish_copy` that concern deltas."""

    deltas: int = 0
    delta_bytes: int | None = None

    @classmethod
    def asked(cls, deltas: int, delta_bytes: int | None) -> Self:
        """Raises: UsageError: An option of another type than it should have."""
        arguments.whole(0, ENTRIES_MAX)("deltas", deltas)
        arguments.optional(arguments.whole(2 * TABLE_BYTES, 1 << 50))("delta_bytes", delta_bytes)
        return cls(deltas, delta_bytes)

    @classmethod
    def among(cls, options: Iterable[object]) -> Self:
        """Those among the options of all features; as if nobody had given any, if nobody has."""
        return next((each for each in options if isinstance(each, cls)), cls())

    def ring_bytes(self, copy_bytes: int) -> int:
        """The size of the ring for deltas of copies of that size; 0: none are asked for."""
        if not self.deltas:
            return 0
        return self.delta_bytes or TABLE_BYTES + max(copy_bytes // RING_SHARE, RING_BYTES_MIN)


class Attending(Attendant):
    """Has the delta to one copy made, from the one that is held where its save begins."""

    def __init__(
        self,
        copies: CopyDeltas,
        options: DeltaOptions,
        base: PublishedCopy | None,
        version: int,
        depth: Depth,
    ) -> None:
        self._copies, self._options, self._base = copies, options, base
        self._version, self._depth = version, depth
        self._copy: LocalState | None = None
        self._planned: PlannedDelta | None = None

    def begins(
        self, chunks: Iterable[tuple[str, torch.device]], objects: Mapping[str, torch.Tensor]
    ) -> None:
        if self._options.deltas:
            self._require_comparable(chunks, objects)
        self._copies.end()  # nobody reads the buffer that is filled any more

    def _require_comparable(
        self, chunks: Iterable[tuple[str, torch.device]], objects: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises: UsageError: No delta could be made of these copies, or none could be read."""
        if self._depth != "full":
            raise UsageError(
                f"deltas={self._options.deltas}: readers need digests of all content; open this "
                f'handle with digests="full" (it has {self._depth!r})'
            )
        if objects:
            raise UsageError(
                f"deltas: the state dict has objects ({next(iter(objects))!r}), and a replica that "
                "updates by deltas has tensors only; save these as another model, or leave deltas "
                "out"
            )
        for fqn, device in chunks:
            if device.type != "cpu":
                raise UsageError(
                    f"deltas: the copy of {fqn!r} would be on {device}; they are made in host "
                    'memory: pass to="cpu"'
                )

    def pool(self, copy_bytes: int) -> torch.Tensor | None:
        return self._copies.prepare(self._options.ring_bytes(copy_bytes))

    def shown(self, registered: LocalState) -> None:
        self._copy, entries_max = registered, self._options.deltas
        self._planned = self._copies.shown(self._base, registered, self._version, entries_max)

    def more(self, uid: str, *, is_offered: bool) -> Mapping[str, int]:
        address = self._copies.offer(self._planned, uid, is_made=is_offered)
        return {NAME: address} if address else {}

    def published(self, uid: str, *, is_offered: bool) -> None:
        if self._copy is None:
            return
        self._copies.published(uid, self._copy)
        if is_offered:
            self._copies.start(self._planned, uid)
