"""The mutability contract of one handle, from where tensors are offered to their unpublish."""

import logging
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from torch_ros.deadline import Deadline
from torch_ros.errors import ContractBroken, TorchRosError
from torch_ros.features.contract.guarding import Guarded, firsts
from torch_ros.features.contract.rules import is_withdrawn, withdraw, withdraw_ranges
from torch_ros.features.contract.writes import Counts, Write
from torch_ros.printable import log_of
from torch_ros.protocol.records import Kept, VersionRef
from torch_ros.shard.core import Shard
from torch_ros.shard.seams import Feature
from torch_ros.shard.tensors import first_changed
from torch_ros.store.loops import settle
from torch_ros.store.run import run
from torch_ros.store.txn import View
from torch_ros.transfer.registered import LocalState, finish_kernels

log: logging.Logger = log_of(__name__)

WITHDRAW_S = 5.0  # the tensors are given back by then, and their owner waits for the error
ADVICE = (
    "publish it under a new number, and write only after unpublish() has returned. "
    "handle.guard(optimizer) does that for optimizer steps, but not for buffers that a forward "
    "pass writes, such as those of BatchNorm"
)


class Contract(Feature):
    """Finds writes to what a handle offers, and withdraws what it has published of that.

    Args:
        checks: Compare the tensors' digests, too.
    """

    def __init__(self, shard: Shard, *, checks: bool) -> None:
        self._shard, self._checks = shard, checks
        self._guarded = Guarded()
        self._counts: Counts | None = None  # since what is registered was offered
        self._kept: Kept | None = None  # as an unpublish began, and
        self._write: Write | None = None  # what was found by then
        shard.attach(self)

    # Optimizers

    def guard(self, optimizer: torch.optim.Optimizer, hook: RemovableHandle) -> None:
        """Look from now on whether what `optimizer` steps is what is registered."""
        tensors = self._shard.tensors
        self._guarded.add(optimizer, hook)
        if (there := tensors.registered) is None or tensors.is_copy or self._guarded.look(there):
            return
        log.warning(
            "no parameter of the guarded optimizer lies where a registered tensor does, and so "
            "its steps do not change what is published: register the module that it trains"
        )

    def examines(self, tensors: LocalState) -> None:
        if not self._guarded.is_empty:
            self._guarded.look(tensors)

    # Writes

    def offers(self) -> None:
        if self._counts is None:
            self._counts = self._new_counts()
        else:
            self._counts.note()

    def _new_counts(self) -> Counts | None:
        tensors = self._shard.tensors
        if (registered := tensors.registered) is None or tensors.is_copy:
            return None
        names = {address: fqn for fqn, address in firsts(registered).items()}
        if registered.named is not None:
            return Counts(registered.named.own, names, is_own=True)
        memory = [*registered.phases[-1].memory, *registered.sharded]
        return Counts(memory, names, is_own=False)

    def lets_go(self) -> None:
        self._counts = None

    def unpublishes(self) -> None:
        self._kept, self._write = self._shard.group.ledger.holds, self._written()

    def _written(self) -> Write | None:
        """A write since the registered tensors were offered, the first one that is certain."""
        if self._counts is None:
            return None
        freed = self._shard.tensors.freed
        return Write(freed, is_certain=True) if freed else self._counts.since()

    def has_unpublished(self, held: VersionRef, deadline: Deadline) -> None:
        """Say that it was written to before, which the publisher withdraws first."""
        kept, write = self._kept, self._write
        kept = kept if kept is not None and kept.ref == held else None
        try:
            if write is not None and kept is not None:
                if write.is_certain and kept.is_original:
                    raise ContractBroken(held.version, write.what, ADVICE)
                self._warn_once(held, write)
            if self._checks:
                self._compare(held)
        except ContractBroken:
            if kept is not None and kept.is_original:
                self._withdraw(held, deadline)
            raise

    def _compare(self, held: VersionRef) -> None:
        """Raises: ContractBroken: The tensors have other digests now."""
        registered, before = self._shard.tensors.registered, self._shard.digests
        if registered is None or not before.chunks:
            return
        finish_kernels(registered.cuda_devices)
        fqn = first_changed(registered, before.chunks, registered.digests(before.depth))
        if fqn is not None:
            raise ContractBroken(
                held.version,
                f"tensor {fqn!r} is not what it was",
                "write only after unpublish() has returned; handle.guard(optimizer) sees to it",
            )

    def _warn_once(self, held: VersionRef, write: Write) -> None:
        if not self._shard.tensors.is_news("writes"):
            return
        log.warning(
            "version %d was probably written to while %r held it: %s; who read it then may have a "
            "mixture. Call unpublish() before anything writes; check_contract=True tells for sure",
            held.version,
            self._shard.group.seat.replica,
            write.what,
        )

    # Withdrawal

    def _withdraw(self, held: VersionRef, deadline: Deadline) -> None:
        group = self._shard.group
        what = f"withdrawing version {held.version}"
        within = Deadline(what, min(WITHDRAW_S, max(0.5, deadline.left_s())))
        rule = partial(withdraw, keys=group.seat.keys, ref=held)
        try:
            run(settle(what, withdraw_ranges(group.seat.keys, held), rule), group.kv, within)
        except TorchRosError as error:
            log.warning("replicas that hold version %d still pass it on: %s", held.version, error)

    def seeks(self, view: View, held: VersionRef) -> None:
        """Warn once that the version that is held is not to be used."""
        shard = self._shard
        if not is_withdrawn(view, shard.group.seat.keys, held):
            return
        if not shard.tensors.is_news(("withdrawn", held)):
            return
        log.warning(
            "version %d of %r, which this handle holds, was withdrawn: its publisher wrote to it "
            "while it was being read, so it may mix two versions",
            held.version,
            shard.model,
        )
