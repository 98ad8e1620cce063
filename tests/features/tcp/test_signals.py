"""A signal may come between any two lines of a read, and its handler may close or raise."""

import signal
import sys
import threading
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from kit import until
from p2p.steps import attached, prepared, region

from torch_ros.channels import pool
from torch_ros.channels.addresses import Listen, place
from torch_ros.errors import ClosedError, TransferFailed
from torch_ros.features.tcp import reading
from torch_ros.features.tcp.transport import TcpTransport

FILES = {reading.__file__, *map(str, Path(pool.__file__).parent.glob("*.py"))}
DEADLINE_S = 20
SEALED = pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])


@pytest.fixture
def source(is_sealed):
    where = (place()[0], -1 if is_sealed else place()[1])
    with closing(TcpTransport(listen=Listen(("127.0.0.1",)), place=where)) as made:
        yield made


@pytest.fixture
def reader():
    with closing(TcpTransport()) as made:
        yield made


@pytest.fixture
def handle():
    """Handle SIGUSR1 by a function."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, lambda *_: handler())
    signal.signal(signal.SIGUSR1, before)


def struck(number, call, event="line"):
    """Make a call, into which a signal comes at the event of that number; whether it did. (Between
    lines that hold a lock a handler never runs: one that raises comes where functions begin.)
    """
    left = number

    def trace(frame, what, _):
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        left -= what == event
        if not left and what == event:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return trace if event == "line" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left <= 0


def see_through(read):
    read.post()
    until(read.is_done, DEADLINE_S, pause_s=0)


@pytest.mark.parametrize(
    "is_sealed",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["plain", "sealed"],
)
@pytest.mark.parametrize("closes", ["read", "registration", "peer"])
def test_a_read_that_a_handler_in_its_thread_closes_is_over(source, reader, handle, closes):
    held = np.arange(6000, dtype=np.uint8)
    for number in count(1):
        target = np.zeros_like(held)
        registration = reader.register([region(target)])
        peer, _ = attached(source, reader, held)
        rows = [[held.ctypes.data + at, target.ctypes.data + at, 2000] for at in (0, 2000, 4000)]
        read = peer.prepare(np.array(rows, np.uint64))

        def close(it={"read": read, "registration": registration, "peer": peer}[closes], to=target):
            it.close()
            to[:] = 7

        handle(close)
        try:
            was_struck = struck(number, lambda read=read: see_through(read))
        except (ClosedError, TransferFailed):
            assert (target == 7).all(), number
        else:
            if not was_struck:
                break
            assert (target == 7).all(), number  # it was over before
        for each in (read, registration, peer):
            each.close()
    assert number > 50
    assert not reader.flying


@SEALED
def test_an_interrupt_ends_no_read_of_another_thread(source, reader, handle):
    held = np.arange(5000, dtype=np.uint8)
    peer, _ = attached(source, reader, held)
    handle(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    for number in count(1):
        theirs, [target] = prepared(reader, peer, held)
        thread = threading.Thread(target=theirs.post)
        thread.start()
        thread.join()
        mine, own = prepared(reader, peer, held)
        with suppress(KeyboardInterrupt):
            if not struck(number, lambda read=mine: see_through(read), "call"):
                break
        mine.close()
        del own
        until(theirs.is_done, DEADLINE_S, pause_s=0)
        assert (target == held).all()
        theirs.close()
    assert number > 20


@SEALED
def test_sockets_are_as_few_after_interrupts(source, reader, handle):
    held = np.arange(5000, dtype=np.uint8)
    peer, _ = attached(source, reader, held)
    handle(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    for number in range(1, 60):
        read, target = prepared(reader, peer, held)
        with suppress(KeyboardInterrupt):
            struck(number, lambda read=read: see_through(read), "call")
        read.close()
        del target
    reads = [prepared(reader, peer, held) for _ in range(10)]
    for read, _ in reads:
        read.post()
    until(lambda: {read.is_done() for read, _ in reads} == {True}, DEADLINE_S, pause_s=0)
    assert not peer.sockets._out
    until(lambda: source._server.count <= pool.NEAR_MAX + pool.FAR_MAX, DEADLINE_S)


@SEALED
def test_nothing_is_registered_or_connected_while_a_transport_closes(source, monkeypatch):
    """A call that comes while it closes raises, and leaves neither memory to read nor a socket."""
    reader, held = TcpTransport(), np.zeros(10, np.uint8)
    peer = reader.connect(source.connection)
    sockets, first = [], reader._first

    def closes(made):
        first(made)
        sockets.append(made)
        reader.close()

    monkeypatch.setattr(reader, "_first", closes)
    with pytest.raises(ClosedError):
        reader.connect(source.connection)
    assert not sockets[0]._idle
    peer.close()
    with closing(TcpTransport()) as other:
        check = other.refuse_closed
        checks = iter([check, lambda: (other.close(), check())])
        monkeypatch.setattr(other, "refuse_closed", lambda: next(checks)())  # noqa: PLW0108  # two calls
        with pytest.raises(ClosedError):
            other.register([region(held)])
        assert not other.table._bounds
    until(lambda: not source._server.count, DEADLINE_S)
