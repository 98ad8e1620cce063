"""The seam behind which bytes move between processes. Knows no models or versions."""

from collections.abc import Sequence
from typing import Protocol

from torch_ros.costs import Costs
from torch_ros.p2p.voucher import Neighbour
from torch_ros.spans import HOST, Region, Spans

CONNECT_S = 8.0  # for a peer's first answer


class Registration(Protocol):
    """Regions that peers may read, and reads may land in, until `close`. The memory must stay
    allocated until `close` has returned. The same memory may be part of several registrations.
    """

    descriptor: bytes  # for `Peer.attach`; opaque to everyone but the same kind of transport

    def close(self) -> None:
        """Idempotent. Reads by peers that are still running get an error or undefined bytes."""


class Transfer(Protocol):
    """Spans that one peer reads from another's memory; may be posted again once it is done."""

    size_bytes: int

    @property
    def ways(self) -> Sequence[tuple[str, int]]:
        """For people: how its bytes come, and how many by each way."""

    def post(self) -> None:
        """Start. May block for as long as the copy takes (same host); releases the GIL.

        Raises: TransferFailed: The peer is gone.
        """

    def is_done(self) -> bool:
        """Whether every byte has landed; makes progress, so call it until it says so. May block for
        as long as the copy takes (same host); releases the GIL.

        Raises: TransferFailed: The peer is gone, or the read failed. It has then terminated.
        """

    def close(self) -> None:
        """Release it. No byte lands after this returns: a read in flight is ended first."""


class Peer(Protocol):
    """Another agent, connected."""

    agent: str

    @property
    def costs(self) -> Costs:
        """The time that reads from it take, as far as is known."""

    def attach(self, descriptor: bytes) -> None:
        """Learn of a registration of this peer, so that its memory can be read.

        Raises: TransferFailed: The peer cannot be reached, or the descriptor is not of this peer.
        """

    def is_beyond(self, limit_s: float) -> bool:
        """Whether each of some one-byte reads took longer. The first one that did not is the last.

        Raises: TransferFailed: The peer is gone.
        """

    def prepare(
        self, spans: Spans, *, source_device: int = HOST, target_device: int = HOST
    ) -> Transfer:
        """Make a transfer. Costs microseconds a span; posting it again costs none of that.

        Args:
            spans: Within memory attached from this peer and registered here; no span is empty.
                Sources may overlap each other. Where targets do, one of their sources lands there.
            source_device: The device of all source addresses: `HOST` or a CUDA device of the peer.
            target_device: The device of all target addresses, likewise, of this process.

        Raises: TransferFailed: Memory that is not attached or not registered, or the peer is gone.
        """

    def cut(self) -> None:
        """Have reads in flight end, if there is a way: it does not answer. The connection may be of
        no use afterwards: close it. Others of this process on which an answer is due may end too.
        """

    def close(self) -> None:
        """Disconnect: the peer keeps no state for this process. Idempotent. Close reads first."""


class Transport(Protocol):
    """This process's endpoint. Safe to call from many threads."""

    agent: str  # a name no other agent has
    connection: bytes  # what a peer needs for `connect`, below 4 KiB; it never changes

    @property
    def is_copied_from(self) -> bool:
        """Whether the kernel copies memory of this process for peers, page by page."""

    def register(self, regions: Sequence[Region]) -> Registration:
        """Make memory readable by peers and usable as a target.

        Raises: UsageError: An empty region, or memory that cannot be registered.
        """

    def prove(self, agent: str, descriptor: bytes) -> Neighbour:
        """The process on this host that has made this descriptor; the caller closes the answer, and
        finds memory that it lends among its open files (docs/protocol/lending.md).

        Raises:
            Unproven: There is none whose files this process may open; why.
            TransferFailed: These bytes are not a descriptor.
        """

    def connect(self, connection: bytes) -> Peer:
        """Know a peer. The same peer may be connected again after its `close`.

        Raises: TransferFailed: The peer is gone, or these are not a peer's connection bytes.
        """

    def close(self) -> None:
        """End every registration and peer. Idempotent."""
