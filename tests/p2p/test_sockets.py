"""Which of UCX's connections are ended: real sockets on loopback, in an epoll as UCX has them."""

import select
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from torch_ros.p2p import sockets

QUIET_MS = 300


class Connection:
    """A connection to a peer that answers what it is asked, and then something more."""

    def __init__(self, epoll: select.epoll) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
            self.reader = socket.create_connection(("127.0.0.1", self.port))
            self.source = server.accept()[0]
        epoll.register(self.reader, select.EPOLLIN)

    def ask(self) -> None:
        self.reader.sendall(b"?")
        assert self.source.recv(1) == b"?"

    def answer(self) -> None:
        self.source.sendall(b"!")
        assert self.reader.recv(1) == b"!"

    def is_ended(self) -> bool:
        try:
            return self.reader.recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False

    def rest(self, field: int = sockets._LAST_RECEIVED) -> None:
        """Return when nothing has come, or was sent, for `QUIET_MS`."""
        deadline = time.monotonic() + 10
        while sockets._info(self.reader)[field] < QUIET_MS:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self.reader.close()
        self.source.close()


@pytest.fixture
def epoll() -> Iterator[select.epoll]:
    with select.epoll() as made:
        yield made


@pytest.fixture
def peer(epoll) -> Iterator[Connection]:
    made = Connection(epoll)
    yield made
    made.close()


@pytest.fixture
def other(epoll) -> Iterator[Connection]:
    made = Connection(epoll)
    yield made
    made.close()


def where(connection: Connection) -> bytes:
    return b"..." + connection.port.to_bytes(2, "big") + b"..."


def test_a_stopped_peer_whose_last_bytes_came_after_the_question_is_cut(epoll, peer, other):
    for each in (peer, other):
        each.ask()
        each.answer()
    peer.rest()
    other.answer()
    assert sockets.silence([epoll.fileno()], 1.5 * QUIET_MS / 1000, where(peer)) == 1
    assert peer.is_ended()
    assert not other.is_ended()


def test_a_peer_that_sends_is_not_cut(epoll, peer):
    peer.ask()
    peer.rest()
    peer.answer()
    assert sockets.silence([epoll.fileno()], QUIET_MS / 1000, where(peer)) == 0
    assert not peer.is_ended()


def test_without_its_port_all_that_were_asked_and_said_nothing_are_cut(epoll, peer, other):
    other.ask()
    other.rest(sockets._LAST_SENT)
    other.answer()
    peer.ask()
    for each in (peer, other):
        each.rest()
    assert sockets.silence([epoll.fileno()], QUIET_MS / 1000, b"an address in another form") == 1
    assert peer.is_ended()
    assert not other.is_ended()


def test_a_connection_that_was_reset_hinders_no_other(epoll, peer, other):
    peer.ask()
    peer.rest()
    other.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.source.close()
    assert epoll.poll(10)  # the reset has come
    assert sockets.silence([epoll.fileno()], QUIET_MS / 1000, where(peer)) == 1
    assert peer.is_ended()
