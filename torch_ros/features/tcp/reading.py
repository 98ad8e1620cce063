"""The reader's end: reads of a peer's memory.

There are no threads here: bytes are received by whoever asks whether a read is done, so none lands
once that is closed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from torch_ros.channels import wire
from torch_ros.channels.meeting import GO_ON, LATER, Channel, Running, Steps
from torch_ros.channels.pool import Flight, wait
from torch_ros.channels.views import at
from torch_ros.copies.crossing import Part
from torch_ros.errors import ClosedError, TransferFailed, UsageError
from torch_ros.spans import HOST

if TYPE_CHECKING:
    from torch_ros.features.tcp.transport import TcpPeer, TcpRegistration

WAIT_S = 0.005  # for bytes, of any read of this process; what is there is taken for as long


class TcpTransfer:
    """A `Transfer`: rows that are asked for, and the socket on which they come."""

    ways: Sequence[tuple[str, int]]

    def __init__(
        self,
        peer: TcpPeer,
        rows: Sequence[tuple[bytes, int, int, int]],
        targets: Collection[TcpRegistration],
        device: int = HOST,  # that the targets are on
    ) -> None:
        self.peer, self.targets, self._rows, self._device = peer, targets, rows, device
        self.size_bytes: int = sum(size for _, _, _, size in rows)
        way = "tcp, plain" if peer.sockets.is_near else "tcp, encrypted"
        self.ways = ((way, self.size_bytes),)
        self.flight: Flight = Flight()
        self._steps: Steps | None = None
        self._views: Sequence[memoryview] = ()  # into which a piece is received now
        self._state: Literal["idle", "flying", "done", "closed"] = "idle"
        self._failure = ""
        self._cause: Exception | None = None
        self._is_inside = False  # steps run
        self._is_closed = False
        self._lock = threading.RLock()  # nobody writes to the targets without it
        self._has_all = False
        peer.transport.add(self)

    def post(self) -> None:
        self.peer.transport.refuse_fork()
        with self._lock:
            if self._state == "closed":
                raise ClosedError("this read was closed")
            if self._state == "flying":
                raise UsageError("this read is still in flight; post it again when it is done")
            self._begin()
            if reason := self._refused():  # now: from here on, a signal's handler ends it
                self._end(reason)
            self._go_on(0)
        self._raise_failure()

    def _begin(self) -> None:
        self._failure, self._cause, self._has_all = "", None, False
        self._steps, self._state, self.flight.event = self._run(), "flying", GO_ON
        self.peer.transport.flying[self] = None

    def _refused(self) -> str:
        """The reason for which it may not fly; ""."""
        if self._is_closed:
            return "this read was closed"
        is_open = all(registration.is_open for registration in self.targets)
        return self.peer.ended() or ("" if is_open else "the memory it lands in was unregistered")

    def is_done(self) -> bool:
        """Receive for a while, also what is there for other reads of this process: one that nobody
        asks about meanwhile would keep its socket, and its source waiting.
        """
        transport = self.peer.transport
        transport.refuse_fork()
        if self.flight.event == LATER:  # a connection may be free by now
            self.go_on(0)
        flying = tuple(transport.flying)
        if self in flying:
            ready = wait([read.flight for read in flying], WAIT_S)
            end_s = time.monotonic() + WAIT_S
            for read in flying:
                if not ready or read.flight in ready:
                    read.go_on(end_s)
            for read in flying:  # the one that has waited for longest gets what is free now
                if read.flight.event == LATER:
                    read.go_on(0)
        with self._lock:
            self._raise_failure()
            if self._state in {"idle", "closed"}:
                raise ClosedError("this read was not posted, failed, or was closed")
            return self._state == "done"

    def go_on(self, end_s: float) -> None:
        """Receive what is there, until then, unless another thread does. Errors are kept for
        `is_done`.
        """
        if self._state == "flying" and self._lock.acquire(blocking=False):
            try:
                if self._state == "flying":
                    self._go_on(end_s)
            finally:
                self._lock.release()

    def _raise_failure(self) -> None:
        if self._failure:
            reason = self.peer.ended() or self._failure
            raise TransferFailed(self.peer.agent, reason) from self._cause

    def _go_on(self, end_s: float) -> None:
        """Receive what is there, until then. The caller holds the lock."""
        steps = self._steps
        if steps is None or self._is_inside:  # this is a handler of a signal that came in them
            return
        self._is_inside = True
        try:
            while self._steps is steps:
                self.flight.event = next(steps)
                if self.flight.event != GO_ON or time.monotonic() > end_s:
                    break
        except Exception as error:  # noqa: BLE001  # for whoever asks about this read
            if self._steps is steps:
                self._take_end(error)
        except BaseException:  # Ctrl-C: these steps are over, and the read, maybe another's, is not
            if self._steps is steps:
                self._end("")
                self._begin()
            raise
        finally:
            self._is_inside = False
            if self._steps is not steps:  # closed by a handler, while they ran
                steps.close()

    def _take_end(self, error: Exception) -> None:
        if isinstance(error, StopIteration):
            self._state = "done" if self._has_all else "idle"
            self.peer.transport.flying.pop(self, None)
        else:
            self._end(str(getattr(error, "strerror", "") or error or type(error).__name__))
            self._cause = error

    def _run(self) -> Steps:
        sockets, flight = self.peer.sockets, self.flight
        try:
            channel, is_used = yield from sockets.take(flight, self.size_bytes)
            for rows in wire.requests(self._rows):
                try:
                    status = yield from self._asked(channel, rows)
                except OSError:
                    if not is_used:
                        raise
                    flight.close()  # the source may have ended what was idle: that is no loss
                    channel = yield from sockets.dial(flight)
                    status = yield from self._asked(channel, rows)
                is_used = True
                piece_bytes = channel.piece_bytes if self._device == HOST else wire.PIECE_BYTES
                if status != wire.HERE:
                    raise ConnectionError("it has let go of the memory")
                for piece in wire.pieces([row[3] for row in rows], piece_bytes):
                    spans = [(rows[number][2] + first, size) for number, first, size in piece]
                    yield from self._filled(channel, spans)
                    yield GO_ON
            sockets.give(flight, channel)
            self._has_all = True
        except BaseException:  # also of `close`, in the middle
            sockets.drop(flight)
            raise

    def _filled(self, channel: Channel, spans: Sequence[tuple[int, int]]) -> Steps:
        """Receive a piece to these addresses. To a device it goes by way of host memory, and is
        there, or not on the way, whenever this yields.
        """
        if self._device == HOST:
            self._views = [at(*span) for span in spans]
            self._refuse_over()
            yield from channel.fill(self._views)
            return
        transport, first, parts = self.peer.transport, 0, list[Part]()
        with transport.pieces.one(sum(size for _, size in spans)) as piece:
            yield from channel.fill([piece])
            for address, size in spans:
                parts.append((self._device, address, piece[first : first + size]))
                first += size
            self._refuse_over()
            transport.crossing.into(parts)

    def _refuse_over(self) -> None:
        """Raises: ClosedError: A signal's handler has closed it, in the midst of its steps."""
        if self._steps is None:
            raise ClosedError("this read was closed")

    def _asked(self, channel: Channel, rows: Sequence[tuple[bytes, int, int, int]]) -> Running[int]:
        """The status of the answer."""
        head, body = wire.request([(name, source, size) for name, source, _, size in rows])
        yield from channel.send(head, more=True)
        yield from channel.send(body)
        (status,) = wire.STATUS.unpack((yield from channel.receive(wire.STATUS.size)))
        return int(status)

    def close(self) -> None:
        if self.peer.transport.is_foreign:
            return
        with self._lock:
            self._is_closed = True
            self._end("")
            self._state = "closed"
        self.peer.transport.discard(self)

    def stop(self, reason: str) -> None:
        """End it, if it is in flight. No byte lands when this has returned."""
        with self._lock:
            if self._state == "flying":
                self._end(reason)

    def _end(self, reason: str) -> None:
        steps, self._steps = self._steps, None
        self.flight.close()
        for view in self._views:
            with contextlib.suppress(BufferError):  # a call of the kernel has it, without a socket
                view.release()
        if steps is not None and not self._is_inside:  # else this is a signal's handler in them
            steps.close()
        if steps is not None and self._device != HOST:
            self.peer.transport.crossing.settle(self._device)
        self.peer.transport.flying.pop(self, None)
        if self._state == "flying":
            self._state, self._failure = "idle", reason
