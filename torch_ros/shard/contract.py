"""The mutability contract at its end: whether what was offered has been written to meanwhile."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_ros.deadline import Deadline
from torch_ros.errors import ContractBroken, TorchRosError
from torch_ros.printable import log_of
from torch_ros.protocol.records import Kept, VersionRef
from torch_ros.protocol.withdrawal import withdraw, withdraw_ranges
from torch_ros.store.loops import settle
from torch_ros.store.run import run
from torch_ros.transfer.writes import Write

if TYPE_CHECKING:
    from torch_ros.shard.core import Shard

log = log_of(__name__)

WITHDRAW_S = 5.0  # the tensors are given back by then, and their owner waits for the error
ADVICE = (
    "publish it under a new number, and write only after unpublish() has returned. "
    "handle.guard(optimizer) does that for optimizer steps, but not for buffers that a forward "
    "pass writes, such as those of BatchNorm"
)


def conclude(
    shard: Shard, held: VersionRef, kept: Kept | None, write: Write | None, deadline: Deadline
) -> None:
    """Say that `held` was written to before it was unpublished, which it is by now.

    Args:
        kept: What the handle held when the unpublish began.
        write: What torch had counted by then, since that was offered.

    Raises:
        ContractBroken: It was, for certain. The publisher has withdrawn it first.
    """
    is_own = kept is not None and kept.ref == held and kept.is_original
    try:
        if write is not None and kept is not None and kept.ref == held:
            if write.is_certain and is_own:
                raise ContractBroken(held.version, f"{write}", ADVICE)
            _warn_once(shard, held, write)
        if shard.settings.check_contract:
            shard.tensors.check_unchanged(held.version, shard.digests)
    except ContractBroken:
        if is_own:
            _withdraw(shard, held, deadline)
        raise


def tell_withdrawn(shard: Shard, held: VersionRef) -> None:
    """Warn once that the version that is held is not to be used."""
    if not shard.tensors.is_news(("withdrawn", held)):
        return
    log.warning(
        "version %d of %r, which this handle holds, was withdrawn: its publisher wrote to it while "
        "it was being read, so it may mix two versions",
        held.version,
        shard.model,
    )


def _warn_once(shard: Shard, held: VersionRef, write: Write) -> None:
    if not shard.tensors.is_news("writes"):
        return
    log.warning(
        "version %d was probably written to while %r held it: %s; who read it then may have a "
        "mixture. Call unpublish() before anything writes; check_contract=True tells for sure",
        held.version,
        shard.group.seat.replica,
        write,
    )


def _withdraw(shard: Shard, held: VersionRef, deadline: Deadline) -> None:
    keys = shard.group.seat.keys
    what = f"withdrawing version {held.version}"
    within = Deadline(what, min(WITHDRAW_S, max(0.5, deadline.left_s())))
    rule = partial(withdraw, keys=keys, ref=held)
    try:
        run(settle(what, withdraw_ranges(keys, held), rule), shard.group.kv, within)
    except TorchRosError as error:
        log.warning("replicas that hold version %d still pass it on: %s", held.version, error)
