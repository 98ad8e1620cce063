"""Ends UCX's TCP connections to a peer that does not answer, which neither NIXL nor UCX can.

A socket on which nothing can be received any more makes UCX end the connection, and every read of
it with an error. The connection stays open behind UCX's back, and what still comes is thrown away:
docs/PROTOCOL.md#a-source-that-stands-still says why.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

_KEPT_MAX = 64  # connections kept open; the oldest is closed first
_QUIET_S = 10.0  # after the last byte that came, the source has sent it all, and one is closed
_BUSY_S, _IDLE_S = 0.02, 0.2  # between two looks at them, while something comes and before
_RECENT_S = 1.0  # something comes, if something came since then
_INFO = struct.Struct("<8B24I4Q")  # the beginning of Linux's struct tcp_info
_LAST_SENT, _LAST_RECEIVED = 8 + 9, 8 + 11  # in it: milliseconds since then
_SENT_BYTES, _RECEIVED_BYTES = 8 + 24 + 2, 8 + 24 + 3
_ANSWERS_BYTES = 1 << 20  # who got so much more than it gave reads from us
_ESTABLISHED = 1


def epolls() -> set[int]:
    """Return the epolls that this process has open."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(each.readlink()) == "anon_inode:[eventpoll]":
                found.add(int(each.name))
    return found


def nested(among: Iterable[int]) -> tuple[int, ...]:
    """Those epolls that are watched by another of them: UCX's worker watches its transports'."""
    known = set(among)
    return tuple(sorted({fd for each in known for fd, _ in _watched(each)} & known))


def silence(epolls: Iterable[int], asked_s: float, where: bytes) -> int:
    """End those connections to a peer on which nothing has come, although it was asked.

    All sockets that these epolls watch must be UCX's.

    Args:
        asked_s: Since the last question to the peer. A stopped peer's last bytes may have come
            after it: a connection to the peer is silent if nothing has come for half of that time.
        where: The peer's address, as UCX wrote it. Its port is in there; if no silent connection
            goes to such a one, all others are ended on which something was sent, and nothing has
            come for `asked_s`, except those of readers.

    Returns:
        How many that were.
    """
    found = [_opened(fd, inode) for epoll in epolls for fd, inode in _watched(epoll)]
    opened = [connection for connection in found if connection is not None]
    own = {connection.getsockname() for connection in opened}
    # One whose other end is watched here too leads to no peer, nor does one that was reset.
    others = {each: peer for each in opened if (peer := _peer(each)) and peer not in own}
    there = [each for each, peer in others.items() if peer[1].to_bytes(2, "big") in where]
    ended = [each for each in there if _is_silent(each, asked_s / 2)] or [
        each for each in others if _is_silent(each, asked_s, needs_question=True)
    ]
    for connection in opened:
        if connection in ended:
            with contextlib.suppress(OSError):  # it was reset meanwhile
                connection.shutdown(socket.SHUT_RD)
            _drain.keep(connection)
        else:
            connection.close()
    return len(ended)


def _watched(epoll: int) -> Iterator[tuple[int, int]]:
    """Everything that an epoll watches: descriptors, and the inodes behind them."""
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        words = line.replace(":", " ").split()
        if words[:1] == ["tfd"] and "ino" in words:
            yield int(words[1]), int(words[words.index("ino") + 1], 16)


def _opened(fd: int, inode: int) -> socket.socket | None:
    """Another descriptor of the same TCP socket; UCX's threads may close theirs at any time."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    is_tcp = found.type == socket.SOCK_STREAM and found.proto == socket.IPPROTO_TCP
    if os.fstat(copy).st_ino == inode and is_tcp:
        return found
    found.close()
    return None


def _peer(connection: socket.socket) -> tuple[Any, ...] | None:
    """The address of the other end; None: there is none, or none any more."""
    try:
        return cast("tuple[Any, ...]", connection.getpeername())
    except OSError:
        return None


def _info(connection: socket.socket) -> tuple[int, ...]:
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    return _INFO.unpack(raw)


def _is_silent(connection: socket.socket, quiet_s: float, *, needs_question: bool = False) -> bool:
    """Whether nothing came for `quiet_s`; and, if it `needs_question`, something was sent after the
    last that came: a peer that was asked nothing has nothing to say. False for a connection over
    which a peer reads from us, so that we only answer.
    """
    try:
        info = _info(connection)
    except (OSError, struct.error):
        return False
    sent_ago_ms, came_ago_ms = info[_LAST_SENT], info[_LAST_RECEIVED]
    is_mute = came_ago_ms >= 1000 * quiet_s and (sent_ago_ms <= came_ago_ms or not needs_question)
    is_reader = info[_SENT_BYTES] > info[_RECEIVED_BYTES] + _ANSWERS_BYTES
    return info[0] == _ESTABLISHED and is_mute and not is_reader


class _Drain:
    """Throws away what comes on connections that nobody reads, as long as there are any. After a
    fork the child has the descriptors and no thread: it keeps them until it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[socket.socket, float | None] = OrderedDict()  # when bytes came last
        self._is_running = False

    def keep(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._kept) >= _KEPT_MAX:
                self._kept.popitem(last=False)[0].close()
            self._kept[connection] = None
            if not self._is_running:  # the thread ends when none is left
                with contextlib.suppress(RuntimeError):  # no thread to be had: the next one tries
                    threading.Thread(target=self._run, name="torch_ros drain", daemon=True).start()
                    self._is_running = True

    def _run(self) -> None:
        while True:
            with self._lock:
                for connection in list(self._kept):
                    self._look(connection)
                if not self._kept:
                    self._is_running = False
                    return
                since_s = time.monotonic() - _RECENT_S
                is_busy = any(came_s and came_s > since_s for came_s in self._kept.values())
            time.sleep(_BUSY_S if is_busy else _IDLE_S)

    def _look(self, connection: socket.socket) -> None:
        """Throw away what has come; close the connection if it has ended, or nothing more comes."""
        try:
            while connection.recv(1 << 20, socket.MSG_DONTWAIT):  # b"", once nothing is there
                self._kept[connection] = time.monotonic()
            has_ended = _info(connection)[0] != _ESTABLISHED
        except OSError:
            has_ended = True
        came_s = self._kept[connection]
        if has_ended or (came_s is not None and time.monotonic() - came_s > _QUIET_S):
            del self._kept[connection]
            connection.close()


_drain = _Drain()
