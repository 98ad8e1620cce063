"""Cuts spans into transfers that can be waited for, posts these, and waits until they landed."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from torch_ros.deadline import Deadline
from torch_ros.p2p.transport import Transfer
from torch_ros.spans import Spans
from torch_ros.weights.columns import distinct, numbered

TRANSFER_BYTES = 32 << 20  # within one host a transfer is a copy, during which nothing else is done
FLIGHT = 2  # transfers in flight at a time
POLL_S = 0.0002
# A read that takes long, as from a peer far away, is looked at after so much more of its time.
SOON_S, POLL_SHARE, POLL_S_MAX = 0.001, 1 / 32, 0.005


class Watcher:
    """Follows the transfers of one `perform`. This one lets each be posted at once. `still` is
    called again and again while something is on its way.
    """

    def __init__(self, still: Callable[[], None] = lambda: None) -> None:
        self._still = still

    def may_post(self, transfer: Transfer) -> bool:  # noqa: ARG002  # for those who wait
        """Return whether the bytes that this transfer reads are there."""
        return True

    def landed(self, transfers: Sequence[Transfer]) -> None:
        """All bytes of these transfers have landed."""

    def blocked(self) -> None:
        """Wait a little: nothing is in flight, and the next transfer may not be posted yet."""

    def still(self, flying: Sequence[Transfer]) -> None:  # noqa: ARG002
        self._still()


def perform(
    transfers: Sequence[Transfer],
    deadline: Deadline,
    watcher: Watcher,
    *,
    flight: int = FLIGHT,
    flight_bytes: float = math.inf,
    pause_s: float = POLL_S,
) -> None:
    """Post the transfers in order and see them through. After an error some may be in flight.

    Args:
        flight, flight_bytes: So many are in flight at most, or of so many bytes; one always may be.
        pause_s: Sleep so long, or longer, between two looks at them.

    Raises:
        TransferFailed: A peer is gone.
        DeadlineExceeded: Too slow.
    """
    waiting = deque(transfers)
    flying: list[Transfer] = []
    came_s = time.monotonic()
    left, on_way = sum(transfer.size_bytes for transfer in transfers), 0
    while waiting or flying:
        while waiting and len(flying) < flight and watcher.may_post(waiting[0]):
            if flying and on_way + waiting[0].size_bytes > flight_bytes:
                break
            flying.append(waiting[0])
            on_way += waiting[0].size_bytes
            waiting.popleft().post()
        done = [transfer for transfer in flying if transfer.is_done()]
        if done:
            came_s = time.monotonic()
            flying = [transfer for transfer in flying if transfer not in done]
            landed = sum(transfer.size_bytes for transfer in done)
            left, on_way = left - landed, on_way - landed
            watcher.landed(done)
        if left:
            deadline.check(f"{left} bytes are still to be read")
        watcher.still(flying)
        if not done and flying:
            time.sleep(max(pause_s, longer_pause_s(time.monotonic() - came_s)))
        elif not done and waiting:
            watcher.blocked()


def longer_pause_s(waited_s: float) -> float:
    return min(waited_s * POLL_SHARE, POLL_S_MAX) if waited_s > SOON_S else 0.0


def close_all(transfers: Sequence[Transfer]) -> None:
    """Release transfers. None of their bytes lands after this has returned, even by Ctrl-C."""
    for number, transfer in enumerate(transfers):
        try:
            transfer.close()
        except (KeyboardInterrupt, SystemExit):  # once more: it was interrupted while it waited
            close_all(transfers[number:])
            raise


def parts(spans: Spans) -> list[Spans]:
    """Return the same bytes in parts of about `TRANSFER_BYTES`, one for each transfer."""
    spans = cut(joined(spans))
    ends = np.cumsum(spans[:, 2])
    cuts = np.searchsorted(ends, np.arange(TRANSFER_BYTES, int(ends[-1]), TRANSFER_BYTES)) + 1
    return [part for part in np.split(spans, distinct(cuts)) if len(part)]


def joined(spans: Spans) -> Spans:
    """Return the same bytes with spans joined that touch on both sides, as tensors may lie. A
    joined span stands where the first of its spans stood.
    """
    # By the distance from source to target, which spans that touch on both sides have in common.
    order = np.lexsort((spans[:, 0], spans[:, 1] - spans[:, 0]))
    source, target, size = spans[order].T
    touches = (source[:-1] + size[:-1] == source[1:]) & (target[:-1] + size[:-1] == target[1:])
    if not touches.any():
        return spans
    starts = np.flatnonzero(np.concatenate(([True], ~touches)))
    runs = spans[order[starts]]
    runs[:, 2] = np.add.reduceat(size, starts)
    return runs[np.argsort(np.minimum.reduceat(order, starts))]


def cut(spans: Spans) -> Spans:
    """Return the same bytes in spans of at most `TRANSFER_BYTES`. On one host a span is one long
    copy: meanwhile this process looks neither at the clock nor after its own readers.
    """
    if int(spans[:, 2].max()) <= TRANSFER_BYTES:
        return spans
    owner, ordinal = numbered(-(-spans[:, 2].astype(np.int64) // TRANSFER_BYTES))
    pieces, done = spans[owner], ordinal.astype(np.uint64) * np.uint64(TRANSFER_BYTES)
    pieces[:, :2] += done[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - done, np.uint64(TRANSFER_BYTES))
    return pieces
