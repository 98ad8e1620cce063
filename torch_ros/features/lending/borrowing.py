"""Borrowing a version where it lies: docs/protocol/lending.md, invariant I11.

One process's own business: no call of the group, and no record.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from torch_ros.deadline import Deadline
from torch_ros.errors import LoanBroken, LoanRefused, NotSupported, PeerError, SourceLost
from torch_ros.features.lending.memory import Closed, Loan, NotLent, NotYet
from torch_ros.p2p.voucher import LetGo, Unproven
from torch_ros.printable import log_of
from torch_ros.protocol.keys import Keys, replica_of
from torch_ros.protocol.records import Holding, VersionRecord, VersionRef
from torch_ros.protocol.versions import Spec, resolve, shows_all, spec_ranges
from torch_ros.shard.core import Shard
from torch_ros.spans import HOST
from torch_ros.store.loops import Done, Step, Wait
from torch_ros.store.txn import Unseen, View
from torch_ros.transfer.card import ALL_BLOCKS, Card, Word
from torch_ros.weights.chunked import Chunked
from torch_ros.weights.coverage import whole_layout
from torch_ros.weights.local import WORDS
from torch_ros.weights.manifest import (
    UNIONS_MAX,
    Layout,
    Manifest,
    TensorRecord,
    dtype_named,
    logical,
)
from torch_ros.weights.tiling import matched

log: logging.Logger = log_of(__name__)

PAUSE_S = 0.05  # before another look for a publisher that has gone on

_LIVE = "these are live tensors, or no copy that a handle with borrow_bytes made"
_COPY = "publish it with publish_copy, on a handle opened with borrow_bytes; or replicate it"
_HOST = "publish it from host memory, or replicate it"


@dataclass(frozen=True, slots=True)
class _Offer:
    ref: VersionRef
    layout: str  # digest
    holdings: Mapping[str, Holding]  # of its publishers, which may have it in a copy


class Borrowed(Mapping[str, torch.Tensor]):
    """The tensors of a version, by fqn, where its publisher has them."""

    version: int
    replica: str

    def __init__(self, version: int, replica: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version, self.replica, self._tensors = version, replica, tensors

    def __getitem__(self, fqn: str) -> torch.Tensor:
        return self._tensors[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Borrowed(version={self.version}, replica={self.replica!r}, {len(self)} tensors)"


@dataclass(frozen=True, slots=True)
class Loans:
    """All that is locked for one block."""

    model: str
    borrowed: Borrowed
    loans: Sequence[Loan]

    def leave(self) -> None:
        """Give all of it back.

        Raises: LoanBroken: Something was written there meanwhile.
        """
        try:
            _finish_devices()
            _fence()
            # Before they are unlocked: from then on their lenders may write.
            is_intact = all(loan.is_intact for loan in self.loans)
        finally:
            for loan in self.loans:
                loan.end()
        if not is_intact:
            raise LoanBroken(self.model, self.borrowed.version, self.borrowed.replica)


@contextmanager
def borrowing(shard: Shard, version: int | str, timeout_s: float | None) -> Iterator[Borrowed]:
    """The tensors of a version, for as long as the block lasts."""
    loans = _borrow(shard, version, shard.deadline(f"borrow {version}", timeout_s))
    try:
        shard.observed.open["loans"].add(id(loans))
        yield loans.borrowed
    except Exception:
        loans.leave()  # an error of its own has the block's as its context
        raise
    except BaseException as error:  # Ctrl-C stays Ctrl-C
        try:
            loans.leave()
        except LoanBroken as broken:
            error.add_note(str(broken))
        raise
    else:
        loans.leave()
    finally:
        shard.observed.open["loans"].discard(id(loans))


def _borrow(shard: Shard, version: int | str, deadline: Deadline) -> Loans:
    spec = Spec.parse(version)
    shard.require_usable()
    shard.read_begins(deadline)
    shard.read_ends(None, deadline)  # a loan that is refused leaves nothing half read
    while True:
        offer = _publishers(shard, spec, deadline)
        refusals = list[NotSupported | LoanRefused]()
        for inst in sorted(offer.holdings):
            try:
                return _borrow_from(shard, offer, inst, deadline)
            except (NotSupported, LoanRefused) as error:
                refusals.append(error)
            except PeerError as error:
                log.info("replica %r: %s", replica_of(inst), error)
        # A copy is there for as long as its holding is: was it, all the time?
        if refusals and _publishers(shard, spec, deadline) == offer:
            raise refusals[0]
        deadline.check(f"version {offer.ref.version} was at {', '.join(offer.holdings)}")
        time.sleep(PAUSE_S)


def _publishers(shard: Shard, spec: Spec, deadline: Deadline) -> _Offer:
    """The version that is meant, and its publishers; once there are some."""
    keys = shard.group.seat.keys

    def rule(view: View) -> Step[_Offer]:
        offer = resolve(view, keys, spec)
        if isinstance(offer, Wait):
            return offer
        ref = offer.ref
        holdings = {inst: held for inst, held in offer.holdings.items() if held.is_original}
        if not holdings:
            if not shows_all(view, keys, offer):
                raise Unseen
            if spec.absolute is None:  # its publisher is about to publish the next one
                return _until_one_lends(keys, ref)
            who = ", ".join(sorted(map(replica_of, offer.holdings)))
            reason = "it has read the version, and only copies of publishers are lent"
            raise LoanRefused(shard.model, ref.version, who, reason, "publish it again")
        key = keys.version(ref.run, ref.version)
        record = VersionRecord.decode(view.entries[key].value, key)
        return Done(_Offer(ref, record.layout, holdings))

    return shard.group.ask(spec_ranges(keys), rule, deadline)


def _until_one_lends(keys: Keys, ref: VersionRef) -> Wait:
    """Another publisher may come; if all holders go, another version counts, as an older run's."""
    reason = f"version {ref.version} is held by replicas that read it; none lends"
    return Wait(reason, (keys.versions(), keys.holdings_of(ref.run, ref.version)))


def _borrow_from(shard: Shard, offer: _Offer, inst: str, deadline: Deadline) -> Loans:
    """Borrow all that one publisher has, or nothing.

    Raises: SourceLost: It has gone on, or is gone.
    """
    model, ref, holding, replica = shard.model, offer.ref, offer.holdings[inst], replica_of(inst)
    records = shard.manifests.shards(inst, deadline, holding.world_size)
    what = f"borrowing version {ref.version} from replica {replica!r}"
    with ExitStack() as undo:
        loans = list[Loan]()
        for rank, record in enumerate(records):
            try:
                loans.append(_loan(shard, record.card, holding.mark))
                undo.callback(loans[-1].end)
            except Closed as error:
                reason = "it lends as much already as its borrow_bytes allow"
                advice = "open it with more of them"
                raise LoanRefused(model, ref.version, replica, reason, advice) from error
            except LetGo as error:
                raise SourceLost(replica, f"rank {rank}: {error}") from error
            except NotYet as error:  # in a moment, if it lives
                reason = f"rank {rank} has yet to learn that all have published"
                raise SourceLost(replica, reason) from error
            except (Unproven, NotLent, OSError) as error:
                raise NotSupported(f"{what} (rank {rank}: {str(error) or _LIVE})", _COPY) from error
        manifests = [Manifest.decode(loan.manifest) for loan in loans]
        if logical([manifest.layout for manifest in manifests]).digest != offer.layout:
            raise SourceLost(replica, "it lends other tensors")
        if any(device != HOST for manifest in manifests for device in manifest.devices):
            raise NotSupported(f"{what} (it is on a GPU, and CUDA IPC is missing)", _HOST)
        borrowed = Borrowed(ref.version, replica, _tensors(manifests, loans))
        undo.pop_all()
    shard.read_ends(ref, deadline)
    log.info("borrowed version %d of %r from replica %r", ref.version, model, replica)
    return Loans(model, borrowed, loans)


def _loan(shard: Shard, card: bytes, mark: int) -> Loan:
    where = Card.decode(card)
    with closing(shard.transport.prove(where.agent, where.mailbox)) as process:
        return Loan(process, Word(mark, ALL_BLOCKS).pack(), Word(mark, 0).pack())


def _tensors(manifests: Sequence[Manifest], loans: Sequence[Loan]) -> dict[str, torch.Tensor]:
    """The tensors of a version: as one, if a chunk has all of it, else of boxes."""
    found = {}
    for record, own in _tiles(tuple(manifest.layout for manifest in manifests)).items():
        dtype, boxes = dtype_named(record.dtype), dict[tuple[int, ...], torch.Tensor]()
        for tile in own:
            start = manifests[tile.rank].addresses[tile.chunk] + tile.start * dtype.itemsize
            steps = zip(tile.sizes, tile.strides, strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in steps)
            # Made of plain words: as_strided crashes on the dtypes of quantized tensors.
            word, memory = WORDS[dtype.itemsize], loans[tile.rank].memory
            words = torch.frombuffer(memory, dtype=word, count=reach, offset=start)
            boxes[tile.offsets] = words.as_strided(tile.sizes, tile.strides).view(dtype)
        if not boxes:  # it has no elements
            boxes[(0,) * len(record.shape)] = torch.empty(record.shape, dtype=dtype, device="cpu")
        first = next(iter(boxes.values()))
        is_whole = first.shape == record.shape
        found[record.fqn] = first if is_whole else Chunked(record.shape, dtype, boxes)
    return found


@dataclass(frozen=True, slots=True)
class _Tile:
    """A box of a tensor, and where it begins in memory: in which chunk of which rank."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rank: int
    chunk: int
    start: int  # in elements, from the chunk's first


@lru_cache(maxsize=UNIONS_MAX)
def _tiles(layouts: Sequence[Layout]) -> Mapping[TensorRecord, Sequence[_Tile]]:
    """The tensors of a version, and of each the boxes that it consists of; objects are left out.

    Args:
        layouts: Those of all ranks of one replica, in rank order.

    Raises: ManifestMismatch: A part of a tensor is on no rank. Names the fqn.
    """
    whole = whole_layout(layouts)
    records = whole.tensors
    offered, wanted, pieces = matched(layouts, whole, target_rank=0)
    inside = pieces.offsets - offered.offsets[pieces.source]
    starts = (inside * offered.strides[pieces.source]).sum(1)
    found: dict[TensorRecord, list[_Tile]] = {record: [] for record in records}
    for row, (source, target) in enumerate(zip(pieces.source, pieces.target, strict=True)):
        record = records[wanted.tensor[target]]
        shown = slice(len(record.shape))
        found[record].append(
            _Tile(
                tuple(pieces.offsets[row, shown].tolist()),
                tuple(pieces.sizes[row, shown].tolist()),
                tuple(offered.strides[source, shown].tolist()),
                int(offered.rank[source]),
                int(offered.chunk[source]),
                int(starts[row]),
            )
        )
    return found


def _finish_devices() -> None:
    """Wait for kernels and copies that were queued inside the block, on any device that is used."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)


def _fence() -> None:
    """Order all loads of this thread before it, and those after it behind it.

    Locks do: no load moves up past the taking of one, none down past its release.
    """
    for _ in range(2):
        with _order:
            pass


_order = threading.Lock()
